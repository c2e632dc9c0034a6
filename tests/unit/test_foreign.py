"""Kernels that the dispatcher doesn't see: run twice, fingerprinted and recorded like operators."""

from __future__ import annotations

import types

import pytest
import torch

from sparetrain_megatron.dmr.engine import UnprotectedOperator
from sparetrain_megatron.dmr.foreign import (
    ForeignKernel,
    Kernel,
    Parts,
    UnknownKernel,
    Unsupported,
    Write,
)
from tests.unit.protected import Watched


class Scaler:
    """An argument with state: the largest value that it has seen, as a quantizer's amax."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor([scale])
        self.amax = torch.zeros(1)


class Scaled:
    """An object that holds a tensor, and that its owner empties when it is done with it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def take_apart(value):
    if isinstance(value, Scaler):

        def scaler(tensors):
            made = Scaler(0.0)
            made.scale, made.amax = tensors
            return made

        return Parts([value.scale, value.amax], scaler, state=(1,))
    if isinstance(value, Scaled):
        return Parts([value.data], lambda tensors: Scaled(*tensors))
    if isinstance(value, types.SimpleNamespace):
        raise Unsupported("sends on the way")
    return None


class Library:
    """Functions as a binding would have them; counts their executions."""

    def __init__(self) -> None:
        self.calls = 0

    def product(self, a, b, workspace):
        self.calls += 1
        workspace += 1
        return a @ b

    def accumulate(self, a, into, add):
        self.calls += 1
        return into.add_(a) if add else a + into

    def scale(self, x, scaler):
        self.calls += 1
        torch.maximum(scaler.amax, x.abs().max(), out=scaler.amax)
        return Scaled(x * scaler.scale)

    def sum(self, scaled, rows):
        self.calls += 1
        return [row * scaled.data.sum() for row in rows], torch.empty(1).fill_(self.calls)

    def noise(self, like, generator):
        self.calls += 1
        return torch.rand(like.shape, generator=generator)


KERNELS = {
    "product": Kernel("lib.product", ("a", "b", "workspace"), scratch=frozenset({"workspace"})),
    "accumulate": Kernel("lib.accumulate", ("a", "into", "add"), (Write("into", when="add"),)),
    "scale": Kernel("lib.scale", ("x", "scaler")),
    "sum": Kernel("lib.sum", ("scaled", "rows"), undefined=frozenset({1})),
    "noise": Kernel("lib.noise", ("like", "generator"), random=True),
}


@pytest.fixture
def library():
    return Library()


def wrapped(engine, library):
    return types.SimpleNamespace(
        **{
            name: ForeignKernel(engine, kernel, getattr(library, name), take_apart)
            for name, kernel in KERNELS.items()
        }
    )


def everything(kernels, scaler, into, workspace):
    """Calls each kernel once; empties what it is done with, as Transformer Engine does."""
    x = torch.arange(12.0).reshape(3, 4) / 7
    y = kernels.product(x, b=x.t(), workspace=workspace)
    kernels.accumulate(y, into, True)
    scaled = kernels.scale(y, scaler)
    rows, _ = kernels.sum(scaled, list(y))
    scaled.data = None
    noise = kernels.noise(y, torch.default_generator)
    return torch.stack(rows) + noise


def run(engine, library):
    """One protected run; returns everything that it leaves behind."""
    torch.manual_seed(0)
    scaler, into, workspace = Scaler(0.5), torch.ones(3, 3), torch.zeros(1)
    kernels = wrapped(engine, library)
    result = engine.protect(lambda: everything(kernels, scaler, into, workspace))
    return result, scaler.amax, into, torch.get_rng_state()


def expected():
    torch.manual_seed(0)
    scaler, into = Scaler(0.5), torch.ones(3, 3)
    result = everything(Library(), scaler, into, torch.zeros(1))
    return result, scaler.amax, into, torch.get_rng_state()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_runs_every_kernel_twice_and_changes_nothing(library):
    engine = Watched()
    assert same(run(engine, library), expected())
    assert library.calls == 2 * len(KERNELS)
    assert not engine.outcome.dirty and not engine.counters.unprotected


def test_not_active_runs_once(library):
    engine = Watched()
    wrapped(engine, library).product(torch.ones(2, 2), torch.ones(2, 2), torch.zeros(1))
    assert library.calls == 1


@pytest.mark.parametrize("execution", ["primary", "checker"])
@pytest.mark.parametrize("name", KERNELS)
def test_finds_a_fault_in_either_execution(library, name, execution):
    engine = Watched(f"iteration=1,operator=lib.{name},execution={execution},bit=20")
    run(engine, library)
    assert engine.operators == [f"lib.{name}"]
    assert len(engine.injector.records) == 1


def test_finds_wrong_state(library):
    """The quantised values are right, the amax is not: the next scale would be wrong."""
    engine = Watched("iteration=1,operator=lib.scale,output=1,bit=20")
    run(engine, library)
    assert engine.operators == ["lib.scale"]


def test_state_is_read_as_it_was(library):
    """The second execution starts from the amax before, and leaves the live one alone."""
    engine, scaler = Watched(), Scaler(1.0)
    scale = wrapped(engine, library).scale
    engine.protect(lambda: [scale(torch.full((2,), value), scaler) for value in (3.0, 2.0)])
    assert not engine.found and scaler.amax.item() == 3


def test_under_piggyback_each_pass_runs_once(library):
    engine = Watched()
    kernels, x = wrapped(engine, library), torch.rand(4, 4)

    def segment():
        return kernels.scale(kernels.product(x, x, torch.zeros(1)), Scaler(2.0)).data

    with engine.active():
        first = engine.first_pass("segment", [x])
        with engine.within(first):
            one = segment()
        second = engine.second_pass(first, [x])
        with engine.within(second):
            two = segment()
        engine.close_second_pass(second)
    assert library.calls == 4
    assert torch.equal(one, two) and not engine.verdict().dirty


def test_under_piggyback_finds_a_fault(library):
    engine = Watched("iteration=1,operator=lib.scale,phase=recompute,bit=3")
    kernels, x = wrapped(engine, library), torch.rand(4, 4)
    with engine.active():
        first = engine.first_pass("segment", [x])
        with engine.within(first):
            kernels.scale(x, Scaler(2.0))
        with engine.at(phase="recompute"):
            second = engine.second_pass(first, [x])
            with engine.within(second):
                kernels.scale(x, Scaler(2.0))
    assert engine.operators == ["lib.scale"]


def recorded(engine, library):
    torch.manual_seed(0)
    scaler, into, workspace = Scaler(0.5), torch.ones(3, 3), torch.zeros(1)
    kernels = wrapped(engine, library)
    with engine.active():
        engine.open_tape()
        result = everything(kernels, scaler, into, workspace)
        engine.close_tape()
        scaler.scale.fill_(7)  # what a pending execution reads is copied first
        once = library.calls
        engine.outcome = engine.verdict()
    return (result, scaler.amax, into, torch.get_rng_state()), once


def test_recorded_runs_again_later(library):
    engine = Watched()
    results, once = recorded(engine, library)
    assert same(results, expected())
    assert once == len(KERNELS) + 1  # what accumulates outside of the tape is checked at once
    assert library.calls == 2 * len(KERNELS)
    assert not engine.outcome.dirty and not engine.found


@pytest.mark.parametrize("execution", ["primary", "checker"])
@pytest.mark.parametrize("name", KERNELS)
def test_recorded_finds_a_fault(library, name, execution):
    engine = Watched(f"iteration=1,operator=lib.{name},execution={execution},bit=21")
    recorded(engine, library)
    assert engine.found and engine.outcome.dirty


def test_recorded_finds_wrong_state(library):
    engine = Watched("iteration=1,operator=lib.scale,execution=checker,output=1,bit=20")
    recorded(engine, library)
    assert engine.outcome.dirty


def test_memory_shared_by_results_is_all_compared(library):
    """Several results in one allocation, as of a kernel that allocates in bulk."""

    def halves(x):
        memory = torch.cat([x, x])
        return [memory[: len(x)], memory[len(x) :]]

    for output in (0, 1):
        engine = Watched(f"iteration=1,operator=lib.halves,execution=checker,output={output}")
        kernel = ForeignKernel(engine, Kernel("lib.halves", ("x",)), halves)
        with engine.active():
            engine.open_tape()
            kept = kernel(torch.rand(4))
            engine.close_tape()
            assert engine.verdict().dirty, output
        del kept


def test_unknown_kernels_are_refused_or_counted():
    engine = Watched(strict=True)
    kernel = UnknownKernel(engine, "lib.new", lambda x: x + 1)
    assert kernel(torch.zeros(1)) == 1
    with pytest.raises(UnprotectedOperator, match=r"lib\.new"), engine.active():
        kernel(torch.zeros(1))
    engine = Watched(strict=False)
    kernel = UnknownKernel(engine, "lib.new", lambda x: x + 1)
    assert engine.protect(lambda: kernel(torch.zeros(1))) == 1
    assert engine.counters.unprotected == {"lib.new": 1}


def test_a_call_that_can_not_be_repeated_is_counted(library):
    engine = Watched(strict=False)
    kernel = ForeignKernel(engine, Kernel("lib.send", ("x", "how")), lambda x, how: x, take_apart)
    engine.protect(lambda: kernel(torch.zeros(1), types.SimpleNamespace()))
    assert engine.counters.unprotected == {"lib.send (sends on the way)": 1}


def test_tensors_made_of_tensors_are_seen_through():
    """A subclass's own handler runs; the operators on its inner tensors are what is checked."""
    from torch.testing._internal.two_tensor import TwoTensor

    engine = Watched()
    pair = TwoTensor(torch.rand(2, 2), torch.rand(2, 2))
    result = engine.protect(lambda: pair @ pair)
    assert torch.equal(result.a, pair.a @ pair.a)
    assert sum(engine.counters.checks["naive"].values()) == 2


def test_recorded_state_may_be_read_and_made_on_the_same_tape(library):
    """What the kernel changes besides its results was read or made by another operator."""
    engine = Watched()
    scale = wrapped(engine, library).scale
    old, x = Scaler(1.0), torch.rand(4)
    with engine.active():
        engine.open_tape()
        read = old.amax + 1  # of a boundary
        scale(x, old)
        new = Scaler(2.0)  # made on this tape
        scale(x, new)
        scale(2 * x, new)
        also = new.amax * 2
        engine.close_tape()
        scale(3 * x, old)  # while the reader above is pending
        assert not engine.verdict().dirty
    assert torch.equal(read, torch.ones(1)) and also.item() == 4 * x.max().item()


def test_recorded_write_inside_and_outside_of_the_tape(library):
    """One call that fills memory made on the tape and adds to memory that was there before."""

    def both(x, made, there):
        made.copy_(x)
        there.add_(x)

    writes = (Write("made"), Write("there"))
    for execution in (None, "primary", "checker"):
        specs = [f"iteration=1,operator=mul,execution={execution},bit=20"] if execution else []
        engine = Watched(*specs)
        kernel = ForeignKernel(engine, Kernel("lib.both", ("x", "made", "there"), writes), both)
        there = torch.ones(4)
        with engine.active():
            engine.open_tape()
            made = torch.empty(4)
            kernel(torch.arange(4.0), made, there)
            result = made * 2
            engine.close_tape()
            dirty = engine.verdict().dirty
        assert dirty == (execution is not None)
        assert execution or torch.equal(result, torch.arange(4.0) * 2)
        assert torch.equal(there, torch.arange(4.0) + 1)
