"""What windows take of the queue: never more than one operator over, never more memory."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparetrain_megatron.dmr.deferred as deferred_module
from sparetrain_megatron.dmr.dynamic import EXACT, Windows, best_fit, in_time
from tests.unit.protected import Watched
from tests.unit.test_deferred import STEPS, Program, holds

SECONDS = st.floats(0, 5, allow_subnormal=False)


# --- the subset that fits a static window ---------------------------------------------------------


@given(st.lists(SECONDS, max_size=30), st.floats(0, 20))
def test_what_is_taken_fits(seconds, room):
    taken = best_fit(seconds, room)
    assert taken == sorted(set(taken))
    assert sum(seconds[i] for i in taken) <= room * (1 + 1e-6) + 1e-9


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40))
def test_no_other_subset_fits_better(seconds, room):
    best = max(
        sum(some)
        for n in range(len(seconds) + 1)
        for some in itertools.combinations(seconds, n)
        if sum(some) <= room
    )
    assert sum(seconds[i] for i in best_fit(seconds, room)) == best


@given(st.lists(SECONDS, min_size=EXACT + 1, max_size=40), st.floats(0, 20))
def test_of_many_the_longest_that_fits_is_taken(seconds, room):
    taken = best_fit(seconds, room)
    fitting = [s for s in seconds if s <= room]
    if fitting:
        assert max(seconds[i] for i in taken) == max(fitting)


# --- how long windows are -------------------------------------------------------------------------


def test_a_window_is_static_when_its_like_have_been_equally_long():
    windows = Windows()
    for seconds in (1.0, 1.02, 0.98):
        assert windows.room("reduce") is None
        windows.closed("reduce", seconds)
    assert windows.room("reduce") == pytest.approx(0.99)
    assert windows.room("another") is None
    for seconds in (0.1, 3.0, 0.5, 2.0):
        windows.closed("reduce", seconds)
    assert windows.room("reduce") is None


@given(st.lists(st.floats(0.001, 10), max_size=20))
def test_a_static_window_is_not_taken_for_longer_than_most(lengths):
    windows = Windows()
    for seconds in lengths:
        windows.closed("x", seconds)
    room = windows.room("x")
    if room is not None:
        last = sorted(lengths[-9:])
        assert room <= last[len(last) // 2]


# --- serving --------------------------------------------------------------------------------------


class Served(Program):
    """A program whose windows close on a clock that every replayed operator moves.

    Args:
        steps: As of the program; a window is open for as many seconds as its number says.
        costs: What operators take, in turn.
        static: Whether it is known how long windows are.
    """

    def __init__(self, steps, costs, static):
        super().__init__(steps)
        self.costs, self.static = itertools.cycle(costs), static
        self.now = 0.0

    def run(self, engine):
        deferred = engine.deferred
        unit, self.last = deferred.unit, 0.0

        def timed():
            ran = unit()
            if ran:
                self.last = next(self.costs)
                self.now += self.last
            assert deferred.budget is None or deferred.held_bytes <= deferred.budget
            return ran

        deferred.unit = timed
        for what, number in self.steps:
            if what == "region":
                engine.open_tape()
                self.region(number)
                engine.close_tape()
                for tape in deferred._pending:
                    tape.seconds = tape.computing * 1.0
            elif what == "write":
                self.values[number % 3].mul_(0.5).add_(1)
            else:
                self.window(engine, float(number))
            self.look(engine)
        return self

    def window(self, engine, length):
        deferred, end = engine.deferred, self.now + length
        room = length if self.static else None
        with engine.paused():
            deferred.serve(lambda: self.now >= end, room)
        if self.now > end:  # over, by the operator that ran when it closed
            assert self.now - end <= self.last + 1e-9
        elif self.now < end and deferred:
            raise AssertionError("left a window that was open, with operators waiting")


@settings(max_examples=60, deadline=None)
@given(
    STEPS,
    st.lists(st.floats(0.01, 3), min_size=1, max_size=7),
    st.booleans(),
    st.sampled_from([None, 0, 64, 200, 500, 2000]),
)
def test_a_window_is_overrun_by_one_operator_at_most_and_memory_never(steps, costs, static, budget):
    engine = Watched(repairs=False)
    program = Served(steps, costs, static)
    plain = Program(steps).run()
    engine.deferred.budget = budget
    engine.deferred.mark_constants([program.constant])
    with engine.active():
        program.run(engine)
    assert not engine.verdict().dirty
    assert holds(engine) == 0
    for name, value in plain.result.items():
        assert value.equal(program.result[name])


def with_three_tapes() -> Watched:
    """An engine where three regions wait for their second executions."""
    engine = Watched(repairs=False)
    program = Program([])
    with engine.active():
        for number in range(3):
            engine.open_tape()
            program.region(number)
            engine.close_tape()
    return engine


def test_what_fits_a_static_window_goes_first():
    engine = with_three_tapes()
    first, second, third = engine.deferred._pending
    first.seconds, second.seconds, third.seconds = 3.0, 5.0, 1.0
    engine.deferred.serve(lambda: True, 6.0)
    assert [*engine.deferred._pending] == [second, third, first]
    engine.verdict()


# --- not being late -------------------------------------------------------------------------------


def test_what_a_window_s_like_have_lasted_follows_from_the_bytes_that_cross():
    windows = Windows()
    for seconds, size in ((1.0, 100), (9.0, 100), (4.0, 400)):
        assert windows.like("all_to_all", 300) == []
        windows.crossed("all_to_all", size, seconds)
    assert windows.like("all_to_all", 300) == pytest.approx([3.0, 3.0, 27.0])
    assert windows.like("another", 300) == []
    windows.crossed("empty", 0, 1.0)  # tells nothing
    assert windows.like("empty", 300) == []


LENGTHS = [1.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize(
    "seconds, open_for, begins",
    [
        (3.0, 0.0, True),  # two of eight closed before
        (4.5, 0.0, False),  # three did
        (3.0, 1.0, True),  # of those still open then, none did
        (3.5, 1.0, True),  # one of six
        (4.5, 1.0, False),  # two of six
        (0.5, 8.2, True),
        (1.0, 8.2, False),
        (1.0, 9.5, False),  # longer than any: the peer has been late for half a second
        (1.0, 10.5, True),
    ],
)
def test_an_operator_begins_only_if_it_will_probably_end_in_time(seconds, open_for, begins):
    assert in_time(seconds, open_for, LENGTHS) is begins


@given(
    st.lists(st.floats(0.01, 3), min_size=1, max_size=5),
    st.floats(0.1, 12),
    st.floats(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_a_window_of_known_length_is_not_left_late(costs, at_least, late):
    """Nothing runs over the end that was foreseen; a late peer is waited for in small portions."""
    engine = with_three_tapes()
    clock, repeated, ends = [0.0], itertools.cycle(costs), []
    for tape in engine.deferred._pending:
        for entry in tape.entries:
            entry.seconds = next(repeated)
    unit = engine.deferred.unit

    def timed():
        cost = engine.deferred._ahead
        ran = unit()
        clock[0] += cost
        ends.append(clock[0])
        return ran

    def pause(seconds):
        clock[0] += seconds

    closes = at_least + late
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_module, "_clock", lambda: clock[0])
        patch.setattr(deferred_module.time, "sleep", pause)
        patch.setattr(deferred_module, "_PAUSE", 0.05)
        patch.setattr(engine.deferred, "unit", timed)
        engine.deferred.serve(lambda: clock[0] >= closes, None, [at_least] * 3)
    if late == 0:
        assert all(end <= at_least + 1e-6 for end in ends)
    # Behind the foreseen end, an operator runs at most twice as long as the peer has been late.
    assert all(end <= max(closes, at_least + 2 * (closes - at_least)) + 1e-6 for end in ends)
    assert not engine.verdict().dirty
