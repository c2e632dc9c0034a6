"""Naive execution of everything, with plain torch models."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparetrain_megatron.dmr.engine import UnprotectedOperator
from sparetrain_megatron.faults.targets import Recorder, Targets
from tests.unit.protected import Watched, checks, different, train


@pytest.fixture(autouse=True)
def generator():
    """Leaves torch's generator as it was."""
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transparent(dtype, recompute):
    engine = Watched(repairs=False)
    protected = train(dtype=dtype, recompute=recompute, around=engine.protect)
    assert different(train(dtype=dtype, recompute=recompute), protected) == []
    assert engine.found == []
    assert engine.counters.unprotected == {}
    assert checks(engine.counters) > 300


def test_every_class_is_counted():
    engine = Watched()
    train(steps=1, around=engine.protect)
    naive = engine.counters.checks["naive"]
    assert set(naive) == {"pure", "mutating", "scalar", "random"}, naive
    assert min(naive.values()) > 0
    assert {"view", "uninitialised"} <= set(engine.counters.run_once)


def test_nothing_is_seen_outside():
    engine = Watched("iteration=1,operator=add,bit=3")
    with engine.active():
        with engine.paused():
            torch.ones(3) + 1
        assert not engine.verdict().dirty
        with engine.active():
            pass
        assert engine.is_active
        torch.ones(3) + 1
    torch.ones(3) + 1
    assert engine.operators == ["add"]


FAULTS = {
    "pure": ("mm", lambda: torch.ones(4, 4) @ torch.ones(4, 4)),
    "several outputs": ("max", lambda: torch.max(torch.rand(4, 4), dim=1)[0]),
    "mutating": ("add_", lambda: torch.ones(4).add_(torch.ones(4))),
    "overwriting": ("copy_", lambda: torch.zeros(4).copy_(torch.rand(4))),
    "list": ("_foreach_add_", lambda: torch._foreach_add_([torch.ones(2), torch.ones(3)], 1.0)),
    "out": ("mm", lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))),
    "random": ("rand", lambda: torch.rand(5)),
    "random in place": ("normal_", lambda: torch.empty(5).normal_()),
    "integer": ("argmax", lambda: torch.rand(5).argmax()),
    "boolean": ("gt", lambda: torch.rand(5) > 0.5),
    "integer in place": ("add_", lambda: torch.arange(4).add_(1)),
    "float16": ("mul", lambda: torch.ones(3, dtype=torch.float16) * 2),
    "complex": ("mul", lambda: torch.ones(3, dtype=torch.complex64) * 2),
    "float8": ("_to_copy", lambda: torch.ones(3).to(torch.float8_e4m3fn)),
    "scalar": ("_local_scalar_dense", lambda: torch.ones(()).item()),
}


@pytest.mark.parametrize("execution", ["primary", "checker"])
@pytest.mark.parametrize("repairs", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_in_each_class(name, repairs, execution):
    operator, call = FAULTS[name]
    spec = f"iteration=1,operator={operator},execution={execution},element=1,bit=2"
    engine = Watched(spec, repairs=repairs)
    engine.protect(call)
    assert len(engine.injector.records) == 1
    assert engine.operators == [operator]
    mismatch = engine.found[0]
    assert mismatch.elements_differ == 1
    assert mismatch.method == "naive"
    assert mismatch.wrong in (execution, "unknown")
    assert engine.outcome.dirty
    assert engine.outcome.mine == (mismatch,)
    assert not engine.verdict().dirty  # the next one begins anew


@pytest.mark.parametrize("name", ["pure", "overwriting", "random", "integer", "scalar"])
@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_a_third_execution_says_which_was_wrong(name, execution):
    operator, call = FAULTS[name]
    engine = Watched(f"iteration=1,operator={operator},execution={execution},bit=2")
    engine.protect(call)
    assert engine.found[0].wrong == execution


def test_bits_and_elements_are_reported():
    engine = Watched("iteration=1,operator=add,pattern=burst,bit=5,element=2")
    engine.protect(lambda: torch.ones(16) + 1)
    mismatch = engine.found[0]
    assert (mismatch.elements_differ, mismatch.elements, mismatch.bits) == (4, 16, [5])


@pytest.mark.parametrize(
    ("operator", "call", "expected"),
    [
        ("argmax", lambda: torch.tensor([1.0, 3.0, 2.0]).argmax(), torch.tensor(1)),
        ("add_", lambda: torch.tensor([1, 2]).add_(1), torch.tensor([2, 3])),
        ("ge", lambda: torch.tensor([1.0, 2.0]) >= 2, torch.tensor([False, True])),
        ("zero_", lambda: torch.tensor([1, 2]).zero_(), torch.tensor([0, 0])),
    ],
)
@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_wrong_integers_are_repaired(operator, call, expected, execution):
    """A wrong index would crash the rest of the discarded iteration."""
    spec = f"iteration=1,operator={operator},execution={execution},bit=33"
    engine = Watched(spec)
    assert torch.equal(engine.protect(call), expected)
    assert engine.operators == [operator]
    if execution == "primary":
        assert not torch.equal(Watched(spec, repairs=False).protect(call), expected)


def test_wrong_numbers_are_repaired_where_no_verdict_follows():
    engine = Watched("iteration=1,operator=add,bit=33", "iteration=1,operator=mul_,bit=12")
    engine.repairs_all = True
    result = engine.protect(lambda: (torch.ones(3) + 1).mul_(2))
    assert result.tolist() == [4, 4, 4]
    assert engine.operators == ["add", "mul_"]


def test_a_wrong_scalar_is_repaired():
    engine = Watched("iteration=1,operator=_local_scalar_dense,bit=62")
    assert engine.protect(lambda: torch.tensor(5.0).item()) == 5.0
    assert len(engine.found) == 1


def test_random_operators_draw_once():
    torch.manual_seed(3)
    expected = torch.rand(4), torch.empty(4).uniform_(), torch.randperm(5), torch.rand(4)
    torch.manual_seed(3)
    engine = Watched()
    drawn = engine.protect(
        lambda: (torch.rand(4), torch.empty(4).uniform_(), torch.randperm(5), torch.rand(4))
    )
    assert all(map(torch.equal, drawn, expected))
    assert engine.found == []


def test_generators_that_are_given():
    own = torch.Generator().manual_seed(5)
    expected = torch.rand(4, generator=own), torch.rand(4, generator=own)
    own.manual_seed(5)
    engine = Watched()
    drawn = engine.protect(lambda: (torch.rand(4, generator=own), torch.rand(4, generator=own)))
    assert all(map(torch.equal, drawn, expected))
    assert engine.found == []


def test_undefined_memory_is_no_mismatch():
    engine = Watched()
    engine.protect(lambda: [torch.empty(1000).fill_(1) for _ in range(5)])
    assert engine.found == []
    assert engine.counters.run_once["uninitialised"] == 5


def test_writes_through_views_and_twice_the_same_tensor():
    def call():
        base = torch.zeros(4, 4)
        base[:, 1].add_(1)
        base.t()[2].mul_(3)
        torch.add(base, base, out=base)
        base.addmm_(base.clone(), base.clone())
        base.add_(base)
        return base

    engine = Watched()
    assert torch.equal(engine.protect(call), call())
    assert engine.found == []


def test_strict_refuses_and_says_what():
    fragment = torch.library.Library("sparetrain_strict", "FRAGMENT")
    fragment.define("odd(Tensor x) -> Tensor")
    fragment.impl("odd", lambda x: x + 1, "CompositeExplicitAutograd")
    try:
        with pytest.raises(UnprotectedOperator, match="sparetrain_strict::odd"):
            Watched().protect(lambda: torch.ops.sparetrain_strict.odd(torch.ones(2)))
        lenient = Watched(strict=False)
        lenient.protect(lambda: torch.ops.sparetrain_strict.odd(torch.ones(2)))
        assert lenient.counters.unprotected == {"sparetrain_strict::odd": 1}
    finally:
        fragment._destroy()


def test_accumulation_is_a_phase_of_its_own():
    buffer = torch.zeros(8)
    engine = Watched("iteration=1,phase=accumulate,bit=4")
    engine.mark_accumulators([buffer[2:6]])

    def call():
        with engine.at(phase="backward"):
            torch.zeros(4).add_(1)
            buffer[:2].add_(1)
            buffer[2:4].add_(1)

    engine.protect(call)
    (mismatch,) = engine.found
    assert mismatch.position.phase == "accumulate"
    assert mismatch.ordinal == 4  # zeros, add_, add_, and then the one that accumulates
    assert engine.position.phase == "forward"


@functools.cache
def targets() -> Targets:
    """What one training step offers."""
    recorder = Recorder()
    engine = Watched(repairs=False)
    engine.injector = recorder
    train(steps=1, around=engine.protect)
    return Targets(recorder.visits, iteration=1)


@pytest.fixture(scope="module")
def clean():
    with torch.random.fork_rng():
        yield train(steps=1)


@given(number=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_any_single_fault_that_changes_anything_is_found(clean, number):
    (target,) = targets().draw(1, str(number), ("bit", "swap", "shift", "burst", "negate"))
    engine = Watched(target.spec, repairs=False)
    try:
        faulty = train(steps=1, around=engine.protect)
    except (RuntimeError, IndexError):
        return  # an operator refused the wrong value: loud, not silent
    assert len(engine.injector.records) == 1, target
    if different(clean, faulty):
        assert engine.found, target
    elif engine.injector.records[0]["effect"]:
        assert engine.found, f"harmless, but still a difference: {target}"
