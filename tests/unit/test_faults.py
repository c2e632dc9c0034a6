"""Fault specs, and the bits that the injector changes."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparetrain_megatron.dmr.position import Position
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.faults.corrupt import corrupt, width
from sparetrain_megatron.faults.injector import Injector
from sparetrain_megatron.faults.spec import EXECUTIONS, PATTERNS, PHASES, FaultSpec

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[1:, ::2],
    "expanded": lambda t: t[:1].expand(3, -1),
    "scalar": lambda t: t[1, 2],
}


def make(dtype: torch.dtype, shape: tuple[int, ...] = (5, 8)) -> torch.Tensor:
    """A tensor with no constant row or column."""
    count = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    if dtype is torch.bool:
        return count % 3 == 0
    if dtype.itemsize == 1:
        return count.to(torch.uint8).view(dtype)  # FP8 has no arithmetic, and would round
    return count.to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in logical order."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def flipped(before: bytes, after: bytes, itemsize: int) -> list[tuple[int, int]]:
    """(element, bit) of every bit that differs."""
    found = []
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        for bit in range(8):
            if (a ^ b) >> bit & 1:
                found.append((index // itemsize, index % itemsize * 8 + bit))
    return found


def visit(injector: Injector, *tensors: torch.Tensor, operator="mm", execution="primary", **where):
    return injector.visit(Position(**where), operator, execution, tensors)


# --- specs ---------------------------------------------------------------------------------------

optional = st.none()
small = st.integers(0, 9)
shared_fields = {
    "rank": optional | small,
    "microbatch": optional | small,
    "layer": optional | small | st.sampled_from(["embedding", "head"]),
    "phase": optional | st.sampled_from(PHASES),
    "execution": st.sampled_from(EXECUTIONS),
    "operator": optional | st.sampled_from(["mm", "add_", "compiled:bias_gelu"]),
    "pattern": st.sampled_from(PATTERNS),
    "attempt": st.integers(1, 4),
    "repeat": st.sampled_from(["once", "always"]) | st.integers(1, 4),
}
fixed_specs = st.builds(
    FaultSpec,
    iteration=st.integers(1, 50),
    nth=st.integers(1, 20),
    element=st.integers(-5, 10**9),
    bit=st.integers(0, 64),
    output=optional | small,
    **shared_fields,
)
random_specs = st.builds(
    FaultSpec,
    iteration=optional | st.integers(1, 50),
    rate=st.floats(0, 1),
    seed=st.integers(0, 99),
    **shared_fields,
)


@given(fixed_specs | random_specs)
def test_text_round_trips(spec):
    assert FaultSpec.parse(str(spec)) == spec


def test_parses_the_documented_form():
    text = "iteration=3, rank=1,layer=2,phase=backward,operator=mm,nth=2,element=17,bit=9"
    assert FaultSpec.parse(text) == FaultSpec(
        iteration=3, rank=1, layer=2, phase="backward", operator="mm", nth=2, element=17, bit=9
    )
    assert FaultSpec.parse("random,rate=1e-4,seed=7") == FaultSpec(rate=1e-4, seed=7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("iteration=1,operatr=mm", "unknown key 'operatr'.*operator"),
        ("rank=1", "iteration= is missing"),
        ("iteration=0", "iteration=0.*from 1"),
        ("iteration=two", "iteration=two.*whole number"),
        ("iteration=1,phase=forwards", "phase=forwards.*forward, recompute"),
        ("iteration=1,execution=third", "execution=third.*primary, checker, both"),
        ("iteration=1,pattern=xor", "pattern=xor.*bit, swap"),
        ("iteration=1,repeat=0", "repeat=0.*once, always"),
        ("iteration=1,repeat=twice", "repeat=twice.*once, always"),
        ("iteration=1,nth=", "nth needs a value"),
        ("iteration=1,bit=1,bit=2", "bit is given twice"),
        ("iteration=1,seed=1", "seed= belongs to a random"),
        ("random", "random needs rate="),
        ("rate=0.1", "random,rate=P"),
        ("random,rate=2", "rate=2.0.*between 0 and 1"),
        ("random,rate=0.1,element=3", "element= makes no sense"),
    ],
)
def test_wrong_specs_are_named(text, says):
    with pytest.raises(UsageError) as error:
        FaultSpec.parse(text)
    assert re.search(says, str(error.value))


# --- bits ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(-3, 1000),
    st.integers(0, 200),
)
def test_one_bit_of_one_element(dtype, layout, element, bit):
    tensor = LAYOUTS[layout](make(dtype))
    before = raw(tensor)
    place = corrupt(tensor, "bit", element, bit)
    assert place == (element % tensor.numel(), bit % width(dtype), True)
    changed = flipped(before, raw(tensor), dtype.itemsize)
    if layout == "expanded":  # rows share their memory
        assert {(e % 8, b) for e, b in changed} == {(place.element % 8, place.bit)}
    else:
        assert changed == [(place.element, place.bit)]
    corrupt(tensor, "bit", element, bit)
    assert raw(tensor) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded"])
def test_patterns(dtype, pattern, layout):
    tensor = LAYOUTS[layout](make(dtype))
    before = tensor.clone()
    assert corrupt(tensor, pattern, 7, 3).effect
    size = dtype.itemsize
    old = [raw(before)[i : i + size] for i in range(0, len(raw(before)), size)]
    new = [raw(tensor)[i : i + size] for i in range(0, len(raw(tensor)), size)]
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if layout == "expanded":
        assert changed
        return
    if pattern == "burst":
        assert changed == [7, 8, 9, 10]
    elif pattern == "negate":
        assert len(changed) == tensor.numel()
    elif pattern == "swap":
        first, second = changed
        assert second == first + 1
        assert (new[first], new[second]) == (old[second], old[first])
    elif pattern == "shift":
        row = tensor.shape[-1]
        start = 7 // row * row
        rotated = old[start : start + row]
        assert new[start : start + row] == [rotated[-1], *rotated[:-1]]
        assert new[:start] == old[:start] and new[start + row :] == old[start + row :]
    if dtype is torch.bool:
        assert set(tensor.view(torch.uint8).flatten().tolist()) <= {0, 1}


def test_patterns_search_for_a_place_with_an_effect():
    tensor = torch.zeros(4, 4)
    tensor[2, 1] = 1
    assert corrupt(tensor, "swap", 15, 0).element == 8
    assert tensor[2].tolist() == [1, 0, 0, 0]
    assert corrupt(tensor, "shift", 0, 0).element == 8
    assert tensor[2].tolist() == [0, 1, 0, 0]
    for pattern in ("swap", "shift"):
        assert not corrupt(torch.zeros(4, 4), pattern, 0, 0).effect
        assert not corrupt(torch.zeros(()), pattern, 0, 0).effect
    assert corrupt(torch.zeros(4), "negate", 0, 0).effect  # the sign of zero
    assert not corrupt(torch.zeros(4, dtype=torch.int64), "negate", 0, 0).effect


def test_autograd_does_not_notice():
    leaf = torch.ones(3, requires_grad=True)
    result = leaf.exp()  # saved for backward
    assert corrupt(result, "bit", 0, 31).effect
    assert corrupt(leaf, "bit", 1, 31).effect
    result.sum().backward()
    assert leaf.grad[0] < 0
    with torch.inference_mode():
        inference = torch.ones(3)
    assert corrupt(inference, "bit", 0, 31).effect
    assert inference[0] == -1


# --- injector ------------------------------------------------------------------------------------


def test_hits_the_nth_match_once_an_attempt():
    injector = Injector([FaultSpec(iteration=2, operator="mm", nth=2, element=3, bit=31)], rank=0)
    assert not injector.armed
    injector.begin(1, 1)
    assert not injector.armed
    injector.begin(2, 1)
    assert injector.armed
    tensors = [torch.ones(2, 2) for _ in range(4)]
    assert not visit(injector, tensors[0])
    assert not visit(injector, tensors[1], operator="bmm")
    assert not visit(injector, tensors[1], execution="checker")
    assert not visit(injector, torch.empty(0))
    assert visit(injector, tensors[2], iteration=2, layer=4)
    assert not injector.armed
    assert not visit(injector, tensors[3])
    assert tensors[2].tolist() == [[1, 1], [1, -1]]
    assert all(t.sum() == 4 for t in (tensors[0], tensors[1], tensors[3]))
    (record,) = injector.records
    assert record["spec"] == "iteration=2,operator=mm,nth=2,element=3,bit=31"
    assert (record["layer"], record["operator"], record["dtype"]) == (4, "mm", "float32")
    assert (record["shape"], record["element"], record["bit"]) == ([2, 2], 3, 31)
    assert record["effect"] is True
    injector.begin(2, 2)
    assert not injector.armed


@pytest.mark.parametrize(
    ("attempt", "repeat", "hit"),
    [(1, "once", [1]), (2, "once", [2]), (1, 2, [1, 2]), (2, 2, [2, 3]), (2, "always", [2, 3, 4])],
)
def test_attempts(attempt, repeat, hit):
    injector = Injector([FaultSpec(iteration=1, attempt=attempt, repeat=repeat)], rank=0)
    for current in range(1, 5):
        injector.begin(1, current)
        assert injector.armed == (current in hit)
        assert visit(injector, torch.ones(1)) == (current in hit)
    injector.begin(2, 1)
    assert not injector.armed


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("microbatch", 0, 1),
        ("layer", 3, 4),
        ("layer", "head", "embedding"),
        ("phase", "backward", "recompute"),
    ],
)
def test_filters(key, value, other):
    injector = Injector([FaultSpec(iteration=1, **{key: value})], rank=0)
    injector.begin(1, 1)
    assert not visit(injector, torch.ones(1), **{key: other})
    assert visit(injector, torch.ones(1), **{key: value})


def test_other_ranks_are_left_alone():
    injector = Injector([FaultSpec(iteration=1, rank=1)], rank=0)
    injector.begin(1, 1)
    assert not injector.armed


@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_the_only_execution_counts_as_either(execution):
    injector = Injector([FaultSpec(iteration=1, execution=execution)], rank=0)
    injector.begin(1, 1)
    assert visit(injector, torch.ones(1), execution="only")


@pytest.mark.parametrize("order", [("primary", "checker"), ("checker", "primary")])
@pytest.mark.parametrize("text", ["iteration=1,nth=2,bit=5", "random,rate=0.5,seed=3"])
def test_both_executions_get_the_same_wrong_value(order, text):
    injector = Injector([FaultSpec.parse(text + ",execution=both")], rank=0)
    injector.begin(1, 1)
    hits = 0
    for _ in range(20):
        pair = [torch.ones(7) for _ in order]
        for execution, tensor in zip(order, pair, strict=True):
            hits += visit(injector, tensor, execution=execution)
        assert torch.equal(*pair)
    assert hits == 2 or (injector.armed and hits > 4)


def test_both_of_an_operator_that_runs_once_a_phase():
    injector = Injector([FaultSpec(iteration=1, execution="both", layer=1, element=1)], rank=0)
    injector.begin(1, 1)
    for phase in ("forward", "recompute"):
        assert visit(injector, torch.ones(2), execution="only", layer=1, phase=phase)
        assert not visit(injector, torch.ones(2), execution="only", layer=1, phase=phase)
    assert not injector.armed


def test_prefers_floating_point_outputs():
    spec = FaultSpec(iteration=1)
    outputs = [torch.empty(0), torch.arange(3), torch.ones(3), torch.ones(3)]
    for chosen, index in ((spec, 2), (FaultSpec(iteration=1, output=0), 1)):
        before = [raw(t) for t in outputs]
        injector = Injector([chosen], rank=0)
        injector.begin(1, 1)
        visit(injector, *outputs)
        assert [i for i, t in enumerate(outputs) if raw(t) != before[i]] == [index]


def random_hits(seed: int, rank: int = 0, iterations: int = 3) -> list[dict]:
    injector = Injector([FaultSpec(rate=0.1, seed=seed)], rank)
    for iteration in range(1, iterations + 1):
        injector.begin(iteration, 1)
        for _ in range(100):
            visit(injector, torch.ones(50), iteration=iteration)
            visit(injector, torch.ones(50), iteration=iteration, execution="checker")
    return injector.records


def test_random_faults_are_reproducible_and_leave_torch_alone():
    state = torch.get_rng_state()
    first, second = random_hits(1), random_hits(1)
    assert first == second
    assert first != random_hits(2)
    assert [r["element"] for r in first] != [r["element"] for r in random_hits(1, rank=1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert 15 <= len(first) <= 45
    assert {r["iteration"] for r in first} == {1, 2, 3}
    assert {r["execution"] for r in first} == {"primary"}
    assert len({r["bit"] for r in first}) > 8
    injector = Injector([FaultSpec(rate=1.0)], rank=0)
    injector.begin(1, 2)
    assert not injector.armed  # the retry is clean


@pytest.mark.parametrize("value", [True, 5, -3, 1.5, 0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("pattern", ["bit", "negate"])
def test_scalars(value, pattern):
    injector = Injector([FaultSpec(iteration=1, bit=62, pattern=pattern)], rank=0)
    injector.begin(1, 1)
    result = injector.visit_scalar(Position(), "_local_scalar_dense", "primary", value)
    assert type(result) is type(value)
    assert repr(result) != repr(value) or value != value  # every NaN prints alike
    assert injector.records[0]["effect"]
    assert injector.visit_scalar(Position(), "_local_scalar_dense", "primary", value) is value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_bits_on_a_cuda_device(dtype, pattern):
    host = make(dtype).t()
    device = host.cuda()
    assert corrupt(host, pattern, 9, 3) == corrupt(device, pattern, 9, 3)
    assert raw(host) == raw(device.cpu())
