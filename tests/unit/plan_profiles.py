"""Synthetic profiles for the tests of the planner."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

import pytest

from sparetrain_megatron.plan import (
    Costs,
    External,
    Identity,
    InnerWindow,
    Memory,
    Method,
    Operator,
    Plan,
    Profile,
    Run,
    Template,
    Window,
)
from sparetrain_megatron.plan.fine import can_defer, worth_deferring
from sparetrain_megatron.plan.plan import Why
from sparetrain_megatron.plan.timeline import Timeline

MB = 1 << 20


def op(
    name: str, seconds: float, inputs: tuple[int, ...] = (), size: int = MB, **flags
) -> Operator:
    """An operator that reads `inputs` of `size` bytes each and writes as much."""
    flags.setdefault("held", size * len(inputs))
    flags.setdefault("written", size)
    return Operator(name=name, seconds=seconds, inputs=inputs, **flags)


def layer(
    unit: float = 1e-3, depth: int = 10, size: int = MB, collectives: bool = False
) -> tuple[Template, Template, Template]:
    """A checkpointed layer: a chain of `depth` operators, recomputed and then run backward.

    Each backward operator reads the gradient and its forward's input; every third one has a weight
    gradient too, which is accumulated outside. Forward : recompute : backward = 1 : 1 : 2.

    Args:
        unit: Seconds of the whole forward.
        depth: Operators of the forward.
        size: Bytes of each value.
        collectives: Whether two of the operators of each pass are collectives, with windows.
    """
    each = unit / depth
    at = {depth // 2, depth - 1} if collectives else set()
    chain = []
    for i in range(depth):
        source = (i - 1,) if i else (~0,)
        if i in at:
            chain.append(op("all_reduce_", 0.0, source, size, collective=True, recomputed=True))
        else:
            chain.append(op(f"mm{i}", each, source, size, recomputed=True))
    windows = tuple(
        InnerWindow(kind="intra", what="tensor", seconds=each, after=i + 1) for i in sorted(at)
    )
    forward = Template(
        phase="forward", operators=chain, externals=[External(bytes=size)], windows=windows
    )
    recompute = forward.model_copy(update={"phase": "recompute"})
    externals = [External(bytes=size)]  # the gradient
    operators: list[Operator] = []
    places = []
    gradient = ~0
    for i in reversed(range(depth)):
        externals.append(External(bytes=size, phase="recompute", value=i - 1 if i else ~0))
        saved = ~(len(externals) - 1)
        if i in at:
            operators.append(op("all_reduce_", 0.0, (gradient,), size, collective=True))
            places.append(len(operators))
        else:
            operators.append(op(f"mm{i}_grad", 2 * each, (gradient, saved), size))
        before, gradient = gradient, len(operators) - 1
        if i % 3 == 0 and i not in at:
            operators.append(op(f"mm{i}_weight", each, (before, saved), size))
            operators.append(
                op("add_", each / 10, (len(operators) - 1,), size, mutating=True, written=0)
            )
    backward = Template(
        phase="backward",
        operators=operators,
        externals=externals,
        windows=tuple(
            InnerWindow(kind="intra", what="tensor", seconds=2 * each, after=p) for p in places
        ),
    )
    return forward, recompute, backward


def schedule(stage: int, stages: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """1F1B of one stage: `("F" or "B", microbatch)`, microbatches from 1."""
    ahead = min(stages - stage, microbatches)
    for m in range(1, ahead):
        yield "F", m
    for m in range(1, microbatches + 1):
        if m + ahead - 1 <= microbatches:
            yield "F", m + ahead - 1
        yield "B", m


def pipeline(
    layers: int = 4,
    microbatches: int = 4,
    stage: int = 0,
    stages: int = 2,
    window: float = 3e-3,
    capacity: int = 0,
    costs: Costs = Costs(),  # noqa: B008 (immutable)
    **of_layer,
) -> Profile:
    """One stage of a pipeline under 1F1B with full recompute.

    Args:
        layers: Of this stage.
        window: Seconds that each transfer takes.
        of_layer: As in `layer`.
    """
    steps: list[Run | Window] = []
    opened = Window(kind="inter", what="pipeline", seconds=window)
    for what, m in schedule(stage, stages, microbatches):
        numbers = range(1, layers + 1)
        if what == "F":
            if stage > 0:
                steps.append(opened)
            steps += [Run(template=0, microbatch=m, layer=n) for n in numbers]
            if stage < stages - 1:
                steps.append(opened)
        else:
            if stage < stages - 1:
                steps.append(opened)
            for n in reversed(numbers):
                steps.append(Run(template=1, microbatch=m, layer=n))
                steps.append(Run(template=2, microbatch=m, layer=n))
            if stage > 0:
                steps.append(opened)
    steps.append(Run(template=3))
    adam = Template(phase="optimizer", operators=[op("adam_", 1e-3, mutating=True)])
    return Profile(
        identity=Identity(
            megatron="0.19.2",
            model={"layers": layers * stages, "hidden": 64},
            layout={"pipeline": stages, "microbatches": microbatches},
            flags={"recompute": "full"},
        ),
        rank=stage,
        stage=stage,
        costs=costs,
        templates=(*layer(**of_layer), adam),
        steps=steps,
        memory=Memory(peak=100 * MB, capacity=capacity),
    )


def verify(profile: Profile, plan: Plan, budget: int) -> None:
    """Walks through a plan, independently of how it was made, and asserts what must hold."""
    runs = [(i, step) for i, step in enumerate(profile.steps) if isinstance(step, Run)]
    assert [(r.microbatch, r.layer) for _, r in runs] == [r[:2] for r in plan.rows]
    windows = []  # (step, operators of the step that run before, window)
    for index, step in enumerate(profile.steps):
        if isinstance(step, Run):
            windows += [(index, w.after, w) for w in profile.templates[step.template].windows]
        else:
            windows.append((index, 0, step))
    drains = [
        index
        for index, run in runs
        if run.drains or profile.templates[run.template].phase in ("clip", "optimizer")
    ]
    # Moments at which the most is held: when a window opens, and the end of each step.
    moments: list[tuple[int, float, int | None]] = []
    for index in range(len(profile.steps)):
        here = [i for i, window in enumerate(windows) if window[0] == index]
        moments += [(index, windows[i][1], i) for i in here]
        moments.append((index, math.inf, None))
    opens = {window: moment for moment, (_, _, window) in enumerate(moments)}
    singles = [0] * len(moments)
    held = [0] * len(profile.steps)
    waiting = [0] * len(profile.steps)
    transient = [0] * len(profile.steps)
    used = [0.0] * len(windows)
    critical = 0.0
    blocks: set[tuple] = set()
    stretches = Timeline(profile, plan.window_use).stretches
    phases = {  # of the block that each step is part of
        index: [profile.templates[t].phase for t in stretch.templates]
        for stretch in stretches
        for index in range(stretch.first, stretch.last + 1)
    }
    firsts = {i: s.first for s in stretches for i in range(s.first, s.last + 1)}
    regions: dict[int, dict[tuple[str, int], int]] = {}  # of each block: operators by (phase, nth)
    for stretch in stretches:
        here = regions[stretch.first] = {}
        for t in stretch.templates:
            phase = profile.templates[t].phase
            nth = sum(other == phase for other, _ in here)
            here[phase, nth] = len(profile.templates[t].operators)
    recorded = 0
    early = profile.recompute_stops_early
    for (index, run), row in zip(runs, plan.rows):
        template = profile.templates[run.template]
        pattern = plan.patterns[row.pattern]
        assignments = list(plan.assignments(row))
        assert pattern.template == run.template
        assert len(assignments) == len(template.operators)  # each exactly once
        for ordinal, (operator, one) in enumerate(zip(template.operators, assignments)):
            assert one.method.deferred == (one.window is not None)
            p_dmr = operator.recomputed and not operator.collective and not operator.integer
            if early and operator.replay is not None and operator.replay > 2 * operator.seconds:
                p_dmr = False
            assert (one.method is Method.PDMR) == (p_dmr and plan.mode != "naive")
            if one.method is Method.NAIVE:
                critical += operator.check_seconds
            if one.method is Method.PDMR and early and operator.replay is not None:
                critical += operator.seconds + operator.replay
            if one.method.deferred:
                step, after, window = windows[one.window.ordinal]
                assert (step, after) > (index, ordinal) if step == index else step > index
                assert not any(index < drain <= step for drain in drains)
                assert one.method.endswith(window.kind)
                assert not operator.collective and not operator.integer
                if one.why is Why.SINGLE:
                    assert not operator.mutating
                    used[one.window.ordinal] += operator.check_seconds
                    critical += profile.costs.record
                    critical += profile.costs.fingerprint * operator.written
                    joins = bisect.bisect_right(moments, (index, ordinal, math.inf))
                    for moment in range(joins, opens[one.window.ordinal] + 1):
                        singles[moment] += operator.held
        alone = [one for one in assignments if one.why is Why.SINGLE]
        if alone and not row.segments and "recompute" not in phases[index]:
            # Outside of checkpointed blocks a region is recorded as a whole.
            recorded += sum(
                one.method.deferred is False
                and not (
                    one.method is Method.NAIVE
                    and can_defer(operator)
                    and worth_deferring(operator, profile.costs)
                    and operator.held <= plan.totals.planned_budget
                )
                for operator, one in zip(template.operators, assignments)
            )
        for use in row.segments:
            segment = plan.segments[use.segment]
            here = [part for part in segment.parts if part.phase == template.phase]
            assert here
            for part in here:
                inside = template.operators[part.start : part.stop]
                assert inside and not any(operator.collective for operator in inside)
            step, _, window = windows[use.window]
            assert window.kind == "inter" and step > index
            # The block's first region holds; the others name the same segment.
            if (run.microbatch, run.layer, use) not in blocks:
                blocks.add((run.microbatch, run.layer, use))
                touched = segment.operators
                if "recompute" not in phases[index]:
                    parts = {(part.phase, part.visit) for part in segment.parts}
                    touched = sum(
                        size for place, size in regions[firsts[index]].items() if place in parts
                    )
                recorded += touched
                used[use.window] += segment.replay
                transient[step] = max(transient[step], segment.transient)
                for place in range(index, step + 1):
                    held[place] += segment.boundary
    totals = plan.totals
    for moment, (step, _, _) in enumerate(moments):
        waiting[step] = max(waiting[step], singles[moment])
    held = [a + b for a, b in zip(held, waiting)]
    in_use = profile.memory.in_use or (profile.memory.peak,) * len(profile.steps)
    for here, extra, other in zip(held, transient, in_use):
        assert here + extra <= budget
        if profile.memory.capacity:
            assert here + extra <= max(0, profile.memory.capacity - other)
    assert max(map(sum, zip(held, transient)), default=0) <= totals.peak_held <= budget
    for seconds, (_, _, window) in zip(used, windows):
        assert seconds <= window.seconds * plan.window_use * (1 + 1e-6)
    assert sum(used) == pytest.approx(totals.in_windows)
    for use in plan.windows:
        assert use.used == pytest.approx(used[use.ordinal])
    if not profile.costs.fingerprint:
        recorded *= profile.costs.record
        assert critical + recorded == pytest.approx(totals.critical_seconds)
    assert totals.critical_seconds == pytest.approx(sum(totals.critical.values()))
    assert sum(totals.operators.values()) == profile.operator_count()
    assert totals.floor <= totals.overhead * (1 + 1e-9)
