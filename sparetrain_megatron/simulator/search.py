"""Which layout under this memory takes the least time for a protected step?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Mode
from sparetrain_megatron.report.progress import progress

from .layout import Layout, stage_memory
from .machine import Machine
from .model import Shape
from .schedule import most_in_flight, programs
from .simulate import Simulation, simulate
from .synthesise import Assumptions, Step, pieces


@dataclasses.dataclass(slots=True)
class Found:
    """One layout that fits.

    Attributes:
        unprotected: Seconds of its step without protection.
        simulation: With protection; only for those that were looked at closely.
    """

    layout: Layout
    unprotected: float
    simulation: Simulation | None = None

    def protected(self, mode: Mode) -> float:
        """Seconds of its step under a mode; infinite where that wasn't simulated."""
        return self.simulation.modes[mode].step_seconds if self.simulation else float("inf")


def search(
    shape: Shape,
    base: Layout,
    machine: Machine,
    gpus: int,
    assumptions: Assumptions = Assumptions(),  # noqa: B008 (immutable)
    mode: Mode = "full",
    closely: int = 4,
) -> list[Found]:
    """Layouts of `gpus` GPUs, the one with the shortest protected step first.

    All that fit are run without protection; with it, the `closely` fastest ones, and any that is
    faster unprotected than the best of those protected.

    Args:
        base: What isn't searched: batch, context, recompute, optimizer, reserve.

    Raises:
        UsageError: No layout fits.
    """
    found: list[Found] = []
    valid = list(layouts(shape, base, machine, gpus))
    with progress("layouts without protection", len(valid)) as shown:
        for layout in valid:
            if fits(shape, layout, machine):
                parts = pieces(shape, layout, machine, assumptions)
                step = Step(parts, layout, machine.memory, assumptions)
                found.append(Found(layout, step.step_seconds))
            shown.advance()
    if not found:
        raise UsageError(
            f"no layout of {shape.name} on {gpus} GPUs fits into {machine.memory / (1 << 30):.0f} "
            "GiB each"
        )
    found.sort(key=lambda one: one.unprotected)
    best = float("inf")
    with progress("layouts with protection", min(closely, len(found))) as shown:
        for number, one in enumerate(found):
            if number >= closely and one.unprotected >= best:
                break  # protection never makes a step shorter
            one.simulation = simulate(shape, one.layout, machine, assumptions, (mode,))
            best = min(best, one.protected(mode))
            shown.advance()
    return sorted(found, key=lambda one: (one.protected(mode), one.unprotected))


def layouts(shape: Shape, base: Layout, machine: Machine, gpus: int) -> Iterator[Layout]:
    """All layouts of so many GPUs that are valid for the model."""
    powers = [1 << i for i in range(machine.per_node.bit_length())]
    experts = [e for e in range(1, shape.experts + 1) if shape.experts % e == 0] or [1]
    for tensor, pipeline, expert in itertools.product(powers, range(1, 33), experts):
        rest, over = divmod(gpus, tensor * pipeline * base.context)
        if over or not rest:
            continue
        for virtual in (1, 2, 4):
            layout = dataclasses.replace(
                base, tensor=tensor, pipeline=pipeline, data=rest, expert=expert, virtual=virtual
            )
            try:
                layout.validate(shape, machine)
            except UsageError:
                continue
            yield layout


def fits(shape: Shape, layout: Layout, machine: Machine) -> bool:
    """Whether every stage's memory is enough, counting the activations that 1F1B keeps."""
    layers = [len(some) for some in layout.stage_layers(shape)]
    memories = [stage_memory(shape, layout, stage) for stage in range(layout.pipeline)]
    # The schedule is long: first what needs none.
    if any(memory.static + memory.working > machine.memory for memory in memories):
        return False
    schedule = programs(layout.pipeline, layout.microbatches, layout.virtual)
    return all(
        memory.static
        + memory.working
        + memory.held * most_in_flight(program, layers[stage :: layout.pipeline])
        <= machine.memory
        for stage, (memory, program) in enumerate(zip(memories, schedule))
    )
