"""What protection costs: every stage is planned, and the schedule runs again with the plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, get_args

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Mode, Plan, Profile, Run, plan

from .layout import Layout
from .machine import GIB, Machine
from .model import Shape
from .schedule import Compute, Span
from .synthesise import Assumptions, Pieces, Served, Step, Tail, pieces

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclasses.dataclass(slots=True)
class ModeResult:
    """One mode's cost.

    Attributes:
        overhead: Of the step's time, against no protection.
        gain_vs_naive: Throughput over naive's, less one.
        shares: Share of the checks' time by method.
        floor: Checks that fit in no window whatever the plan, of the busiest stage, as a share of
            the step.
        held: The most bytes that deferral holds on any stage.
        spans: When each item of each stage runs under protection.
    """

    overhead: float
    step_seconds: float
    gain_vs_naive: float
    shares: dict[str, float]
    floor: float
    held: int
    in_windows: float
    plans: dict[int, Plan]
    spans: list[list[Span]]
    tails: list[Tail]
    window_work: list[list[float]]
    """For each stage and item of its program, seconds of checks in that exchange."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "overhead": self.overhead,
            "gain_vs_naive": self.gain_vs_naive,
            "step_s": self.step_seconds,
            "floor": self.floor,
            "share_by_method": self.shares,
            "held_bytes": self.held,
            "seconds_in_windows": self.in_windows,
        }


@dataclasses.dataclass(slots=True)
class Simulation:
    """A simulated step, without protection and under each mode."""

    step: Step
    modes: dict[Mode, ModeResult]
    said: list[str]
    """Assumptions, as sentences."""

    def critical_share(self, mode: Mode) -> float:
        """Checks outside of windows on the stage with most of them, as a share of the step.

        What timers around the checkers see. The step's `overhead` may be less, where a stage has
        time to spare, or more, where delays add up from stage to stage.
        """
        plans = self.modes[mode].plans.values()
        most = max(sum(plan.totals.critical.values()) for plan in plans)
        return most / self.step.step_seconds

    @property
    def peak_bytes(self) -> list[int]:
        """The most in use on each stage, without protection."""
        found = []
        for stage, memory in enumerate(self.step.pieces.memory):
            found.append(int(memory.static + memory.working + self.step.most_held(stage)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for scripts."""
        step = self.step
        windows = step.window_seconds()
        return {
            "schema": 1,
            "kind": "simulation",
            "model": step.pieces.model,
            "layout": step.layout.describe(),
            "step_s": step.step_seconds,
            "idle_share": step.idle_share,
            "windows_s": windows,
            "memory_bytes": {"stages": self.peak_bytes, "capacity": int(step.capacity)},
            "assumptions": self.said,
            "modes": {mode: result.to_dict() for mode, result in self.modes.items()},
        }


def simulate(
    shape: Shape,
    layout: Layout,
    machine: Machine,
    assumptions: Assumptions = Assumptions(),  # noqa: B008 (immutable)
    modes: Sequence[Mode] = MODES,
    budget: int | None = None,
) -> Simulation:
    """Simulates a model's training step.

    Args:
        budget: Bytes that deferral may hold on a GPU; None: what is left.

    Raises:
        UsageError: The layout doesn't fit the model, or the memory.
    """
    parts = pieces(shape, layout, machine, assumptions)
    said = [
        f"machine {machine.name}: {machine.matmul / 1e12:.0f} TFLOP/s in the best matrix products, "
        f"{machine.memory_rate / 1e12:.2f} TB/s of memory, {machine.memory / GIB:.0f} GiB",
        f"sequences of {shape.sequence} tokens, {layout.micro_batch} a microbatch",
        f"a message between stages takes {parts.wire * 1e3:.3g} ms",
        f"{layout.reserve / GIB:g} GiB of a GPU for context, buffers and fragmentation",
        *assumptions.sentences(),
    ]
    return simulate_pieces(parts, layout, machine.memory, assumptions, modes, budget, said)


def simulate_pieces(
    parts: Pieces,
    layout: Layout,
    capacity: float,
    assumptions: Assumptions,
    modes: Sequence[Mode],
    budget: int | None = None,
    said: Sequence[str] = (),
) -> Simulation:
    """The same from pieces, worked out or measured.

    Raises:
        UsageError: The layout doesn't fit the memory.
    """
    step = Step(parts, layout, capacity, assumptions)
    result = Simulation(step, {}, list(said))
    short = [
        f"stage {stage} needs {peak / GIB:.1f} GiB"
        for stage, peak in enumerate(result.peak_bytes)
        if peak > capacity
    ]
    if short:
        raise UsageError(f"does not fit into {capacity / GIB:.0f} GiB: " + "; ".join(short))
    profiles = [step.profile(stage) for stage in range(layout.pipeline)]
    # Naive is what the others are compared to.
    for mode in sorted({"naive", *modes}, key=MODES.index):
        result.modes[mode] = _protected(step, profiles, mode, budget, assumptions.window_use)
    naive = result.modes["naive"].step_seconds
    for mode_result in result.modes.values():
        mode_result.gain_vs_naive = naive / mode_result.step_seconds - 1
    result.modes = {mode: r for mode, r in result.modes.items() if mode in modes}
    return result


def _protected(
    step: Step,
    profiles: Sequence[tuple[Profile, dict[int, Served]]],
    mode: Mode,
    budget: int | None,
    window_use: float,
) -> ModeResult:
    stages = len(profiles)
    plans: dict[int, Plan] = {}
    extra: list[dict[Compute, float]] = []
    updating: list[float] = []
    work = [[0.0] * len(program) for program in step.programs]
    data_work, flush_work = [0.0] * stages, [0.0] * stages
    for stage, (profile, served) in enumerate(profiles):
        made = plans[stage] = plan(profile, budget, mode, window_use)
        here, after = _added(step, stage, profile, made)
        extra.append(here)
        updating.append(after)
        for use in made.windows:
            kind, item = served.get(use.ordinal, (None, -1))
            if kind == "exchange":
                work[stage][item] = use.used
            elif kind == "data":
                data_work[stage] = use.used
            elif kind == "flush":
                flush_work[stage] = use.used
    spans = step.run(extra, work)
    tails = step.finish(spans, updating, data_work, flush_work)
    seconds = max(tail.end for tail in tails)
    totals = [made.totals for made in plans.values()]
    checks = sum(sum(t.seconds.values()) for t in totals)
    shares = {
        method: sum(t.seconds[method] for t in totals) / checks if checks else 0.0
        for method in totals[0].seconds
    }
    return ModeResult(
        overhead=seconds / step.step_seconds - 1,
        step_seconds=seconds,
        gain_vs_naive=0.0,
        shares=shares,
        floor=max(t.floor for t in totals),
        held=max(t.peak_held for t in totals),
        in_windows=max(t.in_windows for t in totals),
        plans=plans,
        spans=spans,
        tails=tails,
        window_work=work,
    )


def _added(
    step: Step, stage: int, profile: Profile, made: Plan
) -> tuple[dict[Compute, float], float]:
    """Seconds that a plan adds to each computation of the pipeline, and behind it.

    What is known by operator (naive checks) is added where it is; recording, fingerprints and
    replayed communication, which a plan gives as sums, in proportion to the regions' time.
    """
    checks = []
    for pattern in made.patterns:
        template = profile.templates[pattern.template]
        checks.append(
            sum(o.check_seconds for o, m in zip(template.operators, pattern.methods) if m == "N")
        )
    runs = [entry for entry in profile.steps if isinstance(entry, Run)]
    spread = sum(value for cause, value in made.totals.critical.items() if cause != "naive")
    weights = [sum(o.seconds for o in template.operators) for template in profile.templates]
    pipelined = sum(weights[r.template] for r in runs if r.microbatch is not None)
    share = spread / pipelined if pipelined else 0.0
    rows = zip(runs, made.rows)
    added: dict[Compute, float] = {}
    for item in step.programs[stage]:
        if isinstance(item, Compute):
            regions = len(step.regions(stage, item))
            added[item] = sum(
                checks[row.pattern] + share * weights[run.template]
                for run, row in itertools.islice(rows, regions)
            )
    return added, sum(checks[row.pattern] for _, row in rows)
