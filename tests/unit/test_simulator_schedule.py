"""Pipeline schedules: complete, in order, and as long as they should be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparetrain_megatron.simulator.schedule import (
    Compute,
    Exchange,
    most_in_flight,
    programs,
    run,
)

FORWARD, BACKWARD = 1.0, 3.0


def seconds(stage, compute):
    return FORWARD if compute.kind == "F" else BACKWARD


@st.composite
def shapes(draw):
    stages = draw(st.integers(1, 6))
    virtual = draw(st.integers(1, 3)) if stages > 1 else 1
    microbatches = draw(st.integers(1, 12)) if virtual == 1 else stages * draw(st.integers(1, 4))
    return stages, microbatches, virtual


@settings(deadline=None, max_examples=60)
@given(shapes(), st.floats(0, 2), st.randoms(use_true_random=False))
def test_any_schedule_is_sound(shape, wire, random):
    stages, microbatches, virtual = shape
    schedule = programs(stages, microbatches, virtual)
    lengths = {}

    def irregular(stage, compute):
        return lengths.setdefault((stage, compute), random.uniform(0.5, 2))

    spans = run(schedule, irregular, wire, blocking=virtual == 1)
    ends, starts = {}, {}
    for stage, (program, mine) in enumerate(zip(schedule, spans)):
        assert len(program) == len(mine)
        clock = 0.0
        for item, span in zip(program, mine):
            assert span.start == clock  # nothing overlaps and nothing is left out
            assert 0 <= span.wire <= span.seconds + 1e-12
            clock = span.end
            if isinstance(item, Compute):
                piece = item.chunk * stages + stage
                starts[item.kind, item.microbatch, piece] = span.start
                ends[item.kind, item.microbatch, piece] = span.end
    pieces = stages * virtual
    assert len(ends) == 2 * pieces * microbatches  # each exactly once
    for (kind, m, piece), start in starts.items():
        before = piece - 1 if kind == "F" else piece + 1
        if 0 <= before < pieces:
            assert start >= ends[kind, m, before] + wire - 1e-9
        elif kind == "B":
            assert start >= ends["F", m, piece] - 1e-9


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 8), (4, 4), (4, 16), (3, 2)])
def test_1f1b_without_wire_takes_its_bubble(stages, microbatches):
    spans = run(programs(stages, microbatches), seconds, 0.0)
    longest = max(mine[-1].end for mine in spans)
    assert longest == pytest.approx((microbatches + stages - 1) * (FORWARD + BACKWARD))


def test_interleaving_shortens_the_bubble():
    stages, microbatches = 4, 8

    def chunk(stage, compute):
        return seconds(stage, compute) / 2

    plain = run(programs(stages, microbatches), seconds, 0.0)
    halves = run(programs(stages, microbatches, 2), chunk, 0.0, blocking=False)
    bubble = 3 * (FORWARD + BACKWARD)
    work = microbatches * (FORWARD + BACKWARD)
    assert max(s[-1].end for s in plain) == pytest.approx(work + bubble)
    assert max(s[-1].end for s in halves) == pytest.approx(work + bubble / 2)


def test_blocking_exchanges_cost_the_middle_both_ways():
    """A middle stage waits for a transfer each way in each microbatch, with many microbatches."""
    wire, microbatches = 0.5, 64
    spans = run(programs(3, microbatches), seconds, wire)
    longest = max(mine[-1].end for mine in spans)
    each = longest / microbatches
    assert each == pytest.approx(FORWARD + BACKWARD + 2 * wire, rel=0.1)


def test_checks_that_fit_a_wait_cost_nothing():
    schedule = programs(4, 8)
    spans = run(schedule, seconds, 0.25)
    waits = [
        [s.seconds if isinstance(i, Exchange) else 0.0 for i, s in zip(program, mine)]
        for program, mine in zip(schedule, spans)
    ]
    assert run(schedule, seconds, 0.25, waits) == spans
    more = [[2 * w for w in mine] for mine in waits]
    assert max(s[-1].end for s in run(schedule, seconds, 0.25, more)) > max(
        s[-1].end for s in spans
    )


def test_microbatches_in_flight():
    schedule = programs(4, 16)
    assert [most_in_flight(program, [10]) for program in schedule] == [40, 30, 20, 10]
    assert most_in_flight(programs(4, 2)[0], [10]) == 20


def test_a_schedule_that_waits_for_itself_is_refused():
    (first, second) = programs(2, 1)
    with pytest.raises(RuntimeError, match="waits for itself"):
        run([first, second[1:]], seconds, 0.1)
