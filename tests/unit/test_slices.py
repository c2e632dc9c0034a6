"""Large writes are checked slice by slice: copies never take more than a chunk of memory."""

import pytest
import torch

from tests.unit.protected import Watched

LIMIT = 4096
COUNT = 5000  # 20,000 bytes of float32: five slices, the last one shorter


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(COUNT, generator=generator) + 0.5 for _ in range(3)]


WRITES = {
    "add_": lambda a, b, c: a.add_(b),
    "mul_": lambda a, b, c: a.mul_(1.5),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c, value=0.1),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, c, value=-0.1),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.1),
    "zero_": lambda a, b, c: a.zero_(),
    "copy_": lambda a, b, c: a.copy_(b.double()),
    "fill_": lambda a, b, c: a.fill_(3),
    "clamp_": lambda a, b, c: a.clamp_(0.6, 1.2),
}


@pytest.fixture
def clones(monkeypatch):
    """Sizes in bytes of all private copies that checks take."""
    from sparetrain_megatron.dmr import bits

    sizes = []
    original = bits.clone_span

    def clone_span(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor)

    monkeypatch.setattr(bits, "clone_span", clone_span)
    return sizes


@pytest.mark.parametrize("name", WRITES)
def test_transparent_and_small(name, clones):
    engine = Watched(copy_limit=LIMIT)
    expected = tensors()
    WRITES[name](*expected)
    found = tensors()
    engine.protect(lambda: WRITES[name](*found))
    assert all(map(torch.equal, expected, found))
    assert engine.found == []
    assert engine.counters.checks["naive"]["mutating"] == 1
    assert len(clones) == 5
    assert max(clones) <= LIMIT
    assert sum(clones) == COUNT * 4
    assert 0 < engine.counters.peak_bytes_held <= LIMIT


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("execution", ["primary", "checker"])
@pytest.mark.parametrize("element", [0, 3000, COUNT - 1])
def test_a_fault_in_any_slice_is_found(name, execution, element):
    spec = f"iteration=1,operator={name},execution={execution},element={element},bit=1"
    engine = Watched(spec, copy_limit=LIMIT)
    found = tensors()
    engine.protect(lambda: WRITES[name](*found))
    assert len(engine.injector.records) == 1
    assert engine.operators == [name]


LISTS = {
    "_foreach_add_": lambda a, b: torch._foreach_add_(a, b),
    "_foreach_mul_": lambda a, b: torch._foreach_mul_(a, 0.5),
    "_foreach_addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, b, b, [0.1] * len(a)),
    "_foreach_zero_": lambda a, b: torch._foreach_zero_(a),
}


def lists():
    generator = torch.Generator().manual_seed(0)
    sizes = (300, 700, 10, 1000, 1, 500)
    return [[torch.rand(n, generator=generator) + 0.5 for n in sizes] for _ in range(2)]


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_cut_between_tensors(name, clones):
    engine = Watched(copy_limit=LIMIT)
    expected, found = lists(), lists()
    LISTS[name](*expected)
    engine.protect(lambda: LISTS[name](*found))
    assert all(map(torch.equal, expected[0], found[0]))
    assert engine.found == []
    assert sum(clones) == 4 * sum(t.numel() for t in found[0])
    assert 0 < engine.counters.peak_bytes_held <= LIMIT


@pytest.mark.parametrize("output", range(6))
@pytest.mark.parametrize("name", LISTS)
def test_a_fault_in_any_tensor_of_a_list_is_found(name, output):
    spec = f"iteration=1,operator={name},output={output},bit=1"
    engine = Watched(spec, copy_limit=LIMIT)
    found = lists()
    engine.protect(lambda: LISTS[name](*found))
    assert len(engine.injector.records) == 1
    assert engine.operators == [name]


def test_a_fault_in_the_checker_of_a_list_is_found():
    spec = "iteration=1,operator=_foreach_add_,execution=checker,bit=1"
    engine = Watched(spec, copy_limit=LIMIT)
    found = lists()
    engine.protect(lambda: torch._foreach_add_(*found))
    assert engine.operators == ["_foreach_add_"]


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.t().add_(1),  # not contiguous
        lambda a: a.add_(torch.rand(a.shape[1])),  # broadcast
        lambda a: torch.mm(a, a, out=torch.empty_like(a)),  # not elementwise
        lambda a: a.index_fill_(0, torch.tensor([1]), 2.0),
    ],
    ids=["transposed", "broadcast", "product", "indexed"],
)
def test_what_cannot_be_cut_is_checked_whole(write):
    engine = Watched(copy_limit=LIMIT)
    engine.protect(lambda: write(torch.ones(80, 80)))
    assert engine.found == []
    assert engine.counters.checks["naive"]["mutating"] >= 1


def test_without_a_limit_nothing_is_cut(clones):
    engine = Watched(copy_limit=0)
    found = tensors()
    engine.protect(lambda: found[0].add_(1))
    assert clones == [COUNT * 4]


def test_views_into_a_large_buffer_are_copied_alone(clones):
    buffer = torch.zeros(100_000)
    engine = Watched(copy_limit=LIMIT)
    engine.protect(lambda: buffer[500:600].add_(1))
    assert clones == [400]
