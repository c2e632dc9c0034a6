"""The queue of second executions: its budget, and what the framework does meanwhile."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparetrain_megatron.dmr.deferred import below_autograd
from tests.unit.protected import Watched, checks, different


def holds(engine):
    """Bytes that are really kept for pending second executions, by an account of its own."""
    deferred = engine.deferred
    tapes = [*deferred._pending]
    if deferred._tape is not None:
        tapes.append(deferred._tape)
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for tape in tapes
        for t in tape.held
        if t is not None and t.untyped_storage()._cdata not in deferred.constants
    }
    return sum(storages.values())


class Program:
    """Regions that share values, writes to what they have read, and windows between them.

    Args:
        steps: ``region``, ``write``, ``serve``, ``empty``: each with a number.
    """

    def __init__(self, steps):
        self.steps = steps
        self.values = [torch.linspace(-1, 1, 16).reshape(4, 4) * (i + 1) for i in range(3)]
        self.constant = torch.linspace(1, 2, 16).reshape(4, 4)
        self.sum = torch.zeros(4, 4)

    def run(self, engine=None):
        for what, number in self.steps:
            if what == "region":
                if engine is not None:
                    engine.open_tape()
                self.region(number)
                if engine is not None:
                    engine.close_tape()
            elif what == "write":
                self.values[number % 3].mul_(0.5).add_(1)
            elif engine is not None:
                left = number if what == "serve" else 1000
                with engine.paused():
                    engine.deferred.serve(functools.partial(self.closed, [left]))
                if what == "empty":
                    assert not engine.deferred
            if engine is not None:
                self.look(engine)
        return self

    @property
    def result(self):
        return {**dict(zip("012", self.values)), "sum": self.sum}

    def region(self, number):
        x, y = self.values[number % 3], self.values[(number + 1) % 3]
        z = x @ self.constant
        for _ in range(number % 4):
            z = torch.tanh(z + y)
        z[1].mul_(2)
        self.sum.add_(z)  # leaves into an outside buffer
        self.values[number % 3] = z + x

    @staticmethod
    def closed(left):
        left[0] -= 1
        return left[0] < 0

    @staticmethod
    def look(engine):
        budget = engine.deferred.budget
        assert holds(engine) == engine.deferred.held_bytes
        if budget is not None:
            assert engine.deferred.held_bytes <= budget
            assert engine.counters.peak_bytes_held <= budget
        assert set(engine.deferred._bytes) <= set(engine.deferred._readers)


def run(steps, budget=None, *specs):
    """A protected run of a program; returns its result and the engine."""
    engine = Watched(*specs, repairs=False)
    program = Program(steps)
    engine.deferred.budget = budget
    engine.deferred.mark_constants([program.constant])
    with engine.active():
        program.run(engine)
    engine.verdict()
    return program.result, engine


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("region"), st.integers(0, 11)),
        st.tuples(st.just("region"), st.integers(0, 11)),
        st.tuples(st.just("write"), st.integers(0, 2)),
        st.tuples(st.just("serve"), st.integers(0, 9)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    max_size=14,
)
BUDGETS = st.one_of(st.none(), st.integers(0, 2000), st.sampled_from([0, 64, 128, 256, 1 << 20]))


@given(STEPS, BUDGETS)
@settings(deadline=None, max_examples=50)
def test_any_program_any_budget(steps, budget):
    result, engine = run(steps, budget)
    assert different(Program(steps).run().result, result) == []
    assert engine.found == []
    assert not engine.deferred
    assert holds(engine) == engine.deferred.held_bytes == 0
    assert not engine.deferred._readers
    assert not engine.deferred._bytes
    # Everything is checked, whatever the budget: at once, or when it is replayed.
    assert checks(engine.counters, ("naive", "deferred")) == operators(steps)
    replayed = sum(engine.counters.checks.get("deferred", {}).values())
    assert sum(engine.deferred.operators.values()) >= replayed
    if budget == 0:
        assert engine.counters.peak_bytes_held == 0


def operators(steps):
    """How many operators the program executes."""
    engine, program = Watched(), Program(steps)
    with engine.active():
        program.run()
    engine.verdict()
    return checks(engine.counters)


@given(STEPS, BUDGETS, st.integers(1, 12), st.sampled_from(["primary", "checker"]), st.data())
@settings(deadline=None, max_examples=50)
def test_any_single_fault(steps, budget, nth, execution, data):
    operator = data.draw(st.sampled_from(["mm", "add", "tanh", "mul_", "add_"]))
    spec = f"iteration=1,operator={operator},nth={nth},execution={execution},element=5,bit=30"
    result, engine = run(steps, budget, spec)
    if different(Program(steps).run().result, result):
        assert engine.found
    if execution == "checker":
        assert different(Program(steps).run().result, result) == []
    for mismatch in engine.found:
        assert mismatch.wrong in (execution, "unknown")


# --- one thing at a time ------------------------------------------------------------------------


def pending(engine, call):
    """Defers what a call runs; returns its result."""
    with engine.active():
        engine.open_tape()
        result = call()
        engine.close_tape()
    return result


def units(engine, count):
    with below_autograd():
        return [engine.deferred.unit() for _ in range(count)]


def write(engine, tensor):
    with engine.active():
        tensor.mul_(-3)


@pytest.mark.parametrize("executed", [0, 1, 2])
def test_copy_on_write(executed):
    """A held value is written while its tape waits, and in the middle of its replay."""
    x = torch.linspace(1, 2, 8)
    engine = Watched()
    pending(engine, lambda: (x * 2, x + 1, x - 1))
    pending(engine, lambda: x.exp())
    assert engine.deferred.held_bytes == 32  # one storage, however many read it
    units(engine, executed)
    write(engine, x)
    assert engine.deferred.held_bytes == holds(engine) == 32
    write(engine, x)
    assert engine.deferred.held_bytes == holds(engine) == 32
    pending(engine, lambda: x.log())
    assert engine.deferred.held_bytes == holds(engine) == 64
    assert not engine.verdict().dirty
    assert engine.deferred.held_bytes == 0


def test_a_view_is_written():
    x = torch.linspace(1, 2, 8)
    engine = Watched()
    pending(engine, lambda: x[4:] * 2)
    write(engine, x.view(2, 4)[1, :2])
    assert not engine.verdict().dirty


@pytest.mark.parametrize("constant", [False, True])
def test_a_write_that_goes_unseen_is_found(constant):
    """The tests above would find out if no copy was made."""
    x = torch.linspace(1, 2, 8)
    engine = Watched()
    if constant:
        engine.deferred.mark_constants([x])
    pending(engine, lambda: x * 2)
    x.add_(1)
    assert engine.verdict().dirty
    (mismatch,) = engine.found
    assert (mismatch.operator, mismatch.method, mismatch.wrong) == ("mul", "deferred", "primary")
    assert "held" in mismatch.note


def test_a_window_is_left_when_it_closes():
    engine = Watched()
    pending(engine, lambda: [torch.ones(3) * i for i in range(4)])
    engine.deferred.serve(lambda: True)
    assert engine.deferred.operators["window"] == 0
    answers = iter([False, False, True])
    engine.deferred.serve(lambda: next(answers))
    assert engine.deferred.operators["window"] == 2
    assert next(answers, None) is None
    assert engine.deferred
    engine.deferred.serve(lambda: False)  # until nothing is left
    assert not engine.deferred
    assert engine.counters.seconds_in_windows > 0
    assert engine.deferred.in_windows == engine.counters.seconds_in_windows
    assert engine.deferred.outside == {}
    engine.deferred.serve(pytest.fail)  # nothing to do: does not even ask


def test_drain():
    engine = Watched()
    pending(engine, lambda: torch.ones(3) * 2)
    units(engine, 1)
    pending(engine, lambda: torch.ones(3) * 2)
    engine.deferred.drain()
    assert not engine.deferred
    assert set(engine.deferred.outside) == {"drained"}
    engine.deferred.drain()
    assert units(engine, 2) == [False, False]
    assert engine.deferred.held_bytes == 0


@pytest.mark.parametrize("executed", [0, 2])
def test_an_abandoned_iteration_leaves_nothing(executed):
    x = torch.ones(8)
    engine = Watched("iteration=1,operator=exp,bit=20", repairs=False)
    pending(engine, lambda: (x * 2, x + 1))
    pending(engine, lambda: x.exp())
    units(engine, executed)
    with engine.active():
        engine.open_tape()
        x.sin()
        engine.discard()
        assert engine.tape is None
    assert not engine.deferred
    assert engine.deferred.held_bytes == 0
    write(engine, x)
    engine.begin(1, 2)
    pending(engine, lambda: x.cos())
    assert engine.deferred.held_bytes == 32
    assert not engine.verdict().dirty
    assert engine.found == []


def test_oldest_are_executed_first_where_memory_is_short():
    engine = Watched()
    tensors = [torch.ones(16) * i for i in range(4)]  # 64 bytes each
    engine.deferred.budget = 3 * 64 + 64  # and a result of 64 while it is replayed
    for tensor in tensors:
        pending(engine, lambda tensor=tensor: tensor + 1)
    assert engine.deferred.held_bytes == 3 * 64
    assert engine.deferred.operators["demoted"] == 2  # one operator and the tape's end
    left = {
        t.untyped_storage()._cdata
        for tape in engine.deferred._pending
        for t in tape.held
        if t is not None
    }
    assert left == {t.untyped_storage()._cdata for t in tensors[1:]}
    assert not engine.verdict().dirty


def test_no_more_is_executed_early_than_a_replay_needs():
    """The third one's own replay takes 256 bytes."""
    engine = Watched()
    tensors = [torch.ones(16) * i for i in range(3)]
    engine.deferred.budget = 2 * 64 + 256
    for tensor in tensors[:2]:
        pending(engine, lambda tensor=tensor: tensor + 1)
    pending(engine, lambda: torch.cat([tensors[2]] * 4))
    assert engine.deferred.held_bytes == 2 * 64
    assert engine.deferred.operators["demoted"] == 2
    assert not engine.verdict().dirty


@pytest.mark.parametrize("budget", [0, 63, 64, 127])
def test_what_does_not_fit_alone_is_checked_at_once(budget):
    engine = Watched()
    engine.deferred.budget = budget
    x = torch.ones(16)
    pending(engine, lambda: x + 1)
    assert not engine.deferred
    assert checks(engine.counters, ("naive", "deferred")) == 0  # counted at the verdict
    assert not engine.verdict().dirty
    assert checks(engine.counters, ("naive", "deferred")) == 1
    assert engine.counters.peak_bytes_held == 0


def test_who_waits_longest_is_first():
    engine = Watched()
    order = []
    for value in (1.0, 2.0, 3.0):
        pending(engine, lambda value=value: torch.full((2,), value).neg())
    engine.injector.armed = True
    engine.injector.visit = lambda place, name, execution, tensors: (
        order.append(float(tensors[0][0])) if name == "neg" else None
    )
    engine.deferred.drain()
    assert order == [-1, -2, -3]
