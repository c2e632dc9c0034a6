"""From templates and a schedule to one profile a stage.

The same both ways: whether the templates were worked out from a shape (`pieces`) or measured
(`measured.py`), the schedule is run once without protection, and what every stage goes through is
written down as the profiler would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from sparetrain_megatron.plan import Costs, Identity, Memory, Profile, Run, Template, Window

from . import operators
from .layout import Layout, StageMemory, stage_memory
from .machine import Machine
from .model import Shape
from .operators import Overlap
from .schedule import Compute, Exchange, Program, Span, most_in_flight, programs, run


@dataclasses.dataclass(frozen=True, slots=True)
class Assumptions:
    """What nothing else says.

    Attributes:
        overlap: What hides tensor-parallel collectives.
        bubbles: Whether checks also run while a stage waits for a neighbour that is late, and at
            the step's end for the other stages; otherwise only while a message is on its way.
        data_windows: Whether they also run during data-parallel reductions.
        pipeline_windows: Whether checks run during the pipeline's transfers at all.
        intra_use: Share of a collective's time inside a node that checks get, beside the
            collective's own kernels.
        host_gap: Seconds that a GPU waits for its host in each pass of a layer (forward, recompute,
            backward). No window: a host that is late can't launch checks either.
        fingerprints: Whether every checked value is fingerprinted, at memory speed.
        record: Seconds to record an operator for later.
        window_use: Share of each window that is planned for.
        expert_spread: How much more than the mean the busiest expert's rank gets.
    """

    overlap: Overlap = "none"
    bubbles: bool = True
    data_windows: bool = True
    pipeline_windows: bool = True
    intra_use: float = 1.0
    host_gap: float = 0.0
    fingerprints: bool = True
    record: float = 2e-6
    window_use: float = 0.9
    expert_spread: float = 0.2

    def sentences(self) -> list[str]:
        """For people."""
        overlaps = {
            "none": "tensor-parallel collectives are exposed",
            "backward": "the backward's reductions run beside the weight gradients",
            "async": "tensor-parallel collectives are cut up and run beside matrix products",
        }
        return [
            overlaps[self.overlap],
            "waits for late stages are " + ("used" if self.bubbles else "not used"),
            "data-parallel reductions are " + ("used" if self.data_windows else "not used"),
            *([] if self.pipeline_windows else ["windows of the pipeline are not used"]),
            *(
                []
                if self.intra_use == 1
                else [f"checks get {self.intra_use:.0%} of collectives inside a node"]
            ),
            *(
                [f"a layer waits {self.host_gap * 1e3:g} ms for the host in each pass"]
                if self.host_gap
                else []
            ),
            "fingerprints run at memory speed" if self.fingerprints else "comparing costs nothing",
            f"recording an operator takes {self.record * 1e6:g} µs",
            f"{self.window_use:.0%} of each window is planned for",
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """What a step is made of.

    Attributes:
        layer: Templates of a layer: forward, recompute (if any), backward.
        embedding: Forward and backward, or nothing.
        head: Forward and backward, or nothing.
        update: For each stage what runs after the pipeline: clipping, optimizer.
        wire: Seconds of a message between stages.
        wire_inside: Whether neighbouring stages are in the same node.
        reduce: For each stage seconds of the data-parallel reduction, and of the gathering.
        reduce_inside: Whether that is in the same node.
        memory: For each stage.
        layers: For each virtual stage its layers.
    """

    layer: tuple[Template, ...]
    embedding: tuple[Template, ...]
    head: tuple[Template, ...]
    update: tuple[tuple[Template, ...], ...]
    wire: float
    wire_inside: bool
    reduce: tuple[tuple[float, float], ...]
    reduce_inside: bool
    memory: tuple[StageMemory, ...]
    layers: tuple[tuple[int, ...], ...]
    costs: Costs
    model: dict[str, Any]


def pieces(shape: Shape, layout: Layout, machine: Machine, assumptions: Assumptions) -> Pieces:
    """Works out a step's pieces from shapes alone.

    Raises:
        UsageError: The layout doesn't fit the model.
    """
    layout.validate(shape, machine)
    memory = tuple(stage_memory(shape, layout, stage) for stage in range(layout.pipeline))
    tokens = shape.sequence // layout.context * layout.micro_batch
    message = 2 * tokens * shape.hidden / layout.sharded
    stride = layout.gpus // layout.pipeline
    inside = machine.inside(layout.pipeline, stride)
    wire = 0.0
    if layout.pipeline > 1:
        wire = (machine.nvlink if inside else machine.wire).send(message)
    replicas = layout.data * layout.context
    link = machine.link(replicas, layout.tensor)
    reduce = []
    for stage in memory:
        gradients = operators.gradient_bytes(stage)
        if layout.distributed_optimizer:
            parameters = stage.parameters * 2
            times = (link.all_gather(gradients, replicas), link.all_gather(parameters, replicas))
        else:
            times = (link.all_reduce(gradients, replicas), 0.0)
        reduce.append(times)
    overlap = assumptions.overlap

    def compared(templates: tuple[Template, ...]) -> tuple[Template, ...]:
        if not assumptions.fingerprints:
            return templates
        return tuple(operators.with_comparison(t, machine) for t in templates)

    return Pieces(
        layer=compared(operators.layer(shape, layout, machine, overlap, assumptions.expert_spread)),
        embedding=compared(operators.embedding(shape, layout, machine, overlap)),
        head=compared(operators.head(shape, layout, machine, overlap)),
        update=tuple(operators.update(stage, machine) for stage in memory),
        wire=wire,
        wire_inside=inside,
        reduce=tuple(reduce),
        reduce_inside=machine.inside(replicas, layout.tensor),
        memory=memory,
        layers=tuple(map(tuple, layout.stage_layers(shape))),
        costs=operators.costs(machine, assumptions.fingerprints, assumptions.record),
        model={
            "name": shape.name,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "ffn": shape.ffn,
            "heads": shape.heads,
            "sequence": shape.sequence,
            "experts": shape.experts,
        },
    )


Served = tuple[Literal["exchange", "data", "flush"], int]
"""Which wait of a stage a profile's window is: its kind, and the item of the program."""


@dataclasses.dataclass(slots=True)
class Tail:
    """The end of the step after a stage's last backward; seconds from the step's beginning."""

    pipeline_end: float
    reduced: float
    barrier: float
    updated: float
    end: float


class Step:
    """One unprotected step of all stages, and the profiles of it."""

    def __init__(
        self, parts: Pieces, layout: Layout, capacity: float, assumptions: Assumptions
    ) -> None:
        self.pieces = parts
        self.layout = layout
        self.capacity = capacity
        self.assumptions = assumptions
        self.programs: list[Program] = programs(
            layout.pipeline, layout.microbatches, layout.virtual
        )
        self._regions: dict[tuple[int, str, int], list[tuple[int, int | str]]] = {}
        self.templates = (*parts.layer, *parts.embedding, *parts.head)
        self._durations = [duration(template) for template in self.templates]
        self.spans = self.run()
        self.tails = self.finish(self.spans)
        self.step_seconds = max(tail.end for tail in self.tails)

    def regions(self, stage: int, compute: Compute) -> list[tuple[int, int | str]]:
        """Templates and layers that a computation runs, in order."""
        key = (stage, compute.kind, compute.chunk)
        found = self._regions.get(key)
        if found is None:
            found = self._regions[key] = self._regions_of(*key)
        return found

    def _regions_of(self, stage: int, kind: str, chunk: int) -> list[tuple[int, int | str]]:
        parts, layout = self.pieces, self.layout
        piece = chunk * layout.pipeline + stage
        per_layer = len(parts.layer)
        embeds = piece == 0 and bool(parts.embedding)
        heads = piece == layout.pipeline * layout.virtual - 1 and bool(parts.head)
        embedding = per_layer
        head = per_layer + len(parts.embedding)
        found: list[tuple[int, int | str]] = []
        if kind == "F":
            if embeds:
                found.append((embedding, "embedding"))
            found += [(0, number) for number in parts.layers[piece]]
            if heads:
                found.append((head, "head"))
            return found
        if heads:
            found.append((head + 1, "head"))
        for number in reversed(parts.layers[piece]):
            found += [(template, number) for template in range(1, per_layer)]
        if embeds:
            found.append((embedding + 1, "embedding"))
        return found

    def run(
        self,
        extra: Sequence[dict[Compute, float]] | None = None,
        work: Sequence[Sequence[float]] | None = None,
    ) -> list[list[Span]]:
        """Runs the schedule.

        Args:
            extra: For each stage, seconds that protection adds to each computation.
            work: For each stage and item, seconds of checks in its exchanges.
        """
        known: dict[tuple[int, str, int], float] = {}

        def seconds(stage: int, compute: Compute) -> float:
            key = (stage, compute.kind, compute.chunk)
            if key not in known:
                regions = self.regions(stage, compute)
                known[key] = sum(self._durations[t] for t, _ in regions)
                known[key] += self.assumptions.host_gap * sum(
                    isinstance(layer, int) for _, layer in regions
                )
            return known[key] + (extra[stage].get(compute, 0.0) if extra else 0.0)

        blocking = self.layout.virtual == 1
        return run(self.programs, seconds, self.pieces.wire, work, blocking)

    def finish(
        self,
        spans: Sequence[Sequence[Span]],
        extra: Sequence[float] | None = None,
        data_work: Sequence[float] | None = None,
        flush_work: Sequence[float] | None = None,
    ) -> list[Tail]:
        """The end of the step: reduction, clipping behind a barrier, optimizer, gathering."""
        parts = self.pieces
        stages = range(len(spans))
        ends = [mine[-1].end for mine in spans]
        reduced = [
            ends[s] + max(parts.reduce[s][0], data_work[s] if data_work else 0.0) for s in stages
        ]
        barrier = max(reduced[s] + (flush_work[s] if flush_work else 0.0) for s in stages)
        tails = []
        for s in stages:
            updating = sum(map(duration, parts.update[s])) + (extra[s] if extra else 0.0)
            updated = barrier + updating
            tails.append(Tail(ends[s], reduced[s], barrier, updated, updated + parts.reduce[s][1]))
        return tails

    @property
    def compute_seconds(self) -> list[float]:
        """For each stage, seconds in operators."""
        each = [
            sum(o.seconds for o in template.operators if not o.collective)
            for template in self.templates
        ]
        found = []
        for stage, program in enumerate(self.programs):
            total = sum(
                each[template]
                for item in program
                if isinstance(item, Compute)
                for template, _ in self.regions(stage, item)
            )
            total += sum(duration(template) for template in self.pieces.update[stage])
            found.append(total)
        return found

    @property
    def idle_share(self) -> float:
        """Share of all stages' time in which no operator runs."""
        return 1 - sum(self.compute_seconds) / (self.step_seconds * len(self.programs))

    def window_seconds(self) -> dict[str, float]:
        """Seconds of waiting a stage, mean: by what for, used by checks or not."""
        found = dict.fromkeys(("pipeline", "bubble", "tensor", "expert", "data", "gather"), 0.0)
        stages = len(self.programs)
        for stage, (program, spans, tail) in enumerate(zip(self.programs, self.spans, self.tails)):
            for item, span in zip(program, spans):
                if isinstance(item, Exchange):
                    found["pipeline"] += span.wire / stages
                    found["bubble"] += (span.seconds - span.wire) / stages
                    continue
                for template, _ in self.regions(stage, item):
                    for window in self.templates[template].windows:
                        found[window.what] += window.seconds / stages
            found["bubble"] += (tail.barrier - tail.reduced) / stages
            found["data"] += (tail.reduced - tail.pipeline_end) / stages
            found["gather"] += (self.step_seconds - tail.updated) / stages
        return found

    def most_held(self, stage: int) -> float:
        """The most bytes of activations that a stage keeps for backwards, at one time."""
        layers = [len(some) for some in self.pieces.layers[stage :: self.layout.pipeline]]
        return most_in_flight(self.programs[stage], layers) * self.pieces.memory[stage].held

    # --- profiles ----------------------------------------------------------------------------

    def profile(self, stage: int) -> tuple[Profile, dict[int, Served]]:
        """A stage's profile, and which wait each of its windows outside of regions is."""
        parts, memory = self.pieces, self.pieces.memory[stage]
        update = parts.update[stage]
        templates = (*map(self._as_used, self.templates), *update)
        inner = [len(template.windows) for template in templates]
        steps: list[Run | Window] = []
        in_use: list[int] = []
        served: dict[int, Served] = {}
        ordinal = 0
        held = 0.0  # activations kept for the backward

        def opened(kind: Served, window: Window) -> None:
            nonlocal ordinal
            if window.seconds > 0:
                served[ordinal] = kind
                ordinal += 1
                steps.append(window)
                in_use.append(int(memory.static + held))

        for index, (item, span) in enumerate(zip(self.programs[stage], self.spans[stage])):
            if isinstance(item, Exchange):
                opened(("exchange", index), self._pipeline_window(span))
                continue
            for template, number in self.regions(stage, item):
                steps.append(Run(template=template, microbatch=item.microbatch, layer=number))
                ordinal += inner[template]
                if isinstance(number, int):
                    if templates[template].phase == "forward":
                        held += memory.held
                    in_use.append(int(memory.static + held + memory.working))
                    if templates[template].phase == "backward":
                        held -= memory.held
                else:
                    in_use.append(int(memory.static + held + memory.working))
        tail = self.tails[stage]
        if self.assumptions.data_windows:
            kind: Literal["inter", "intra"] = "intra" if parts.reduce_inside else "inter"
            seconds = parts.reduce[stage][0]
            opened(("data", -1), Window(kind=kind, what="data", seconds=seconds))
        if self.assumptions.bubbles:
            seconds = max(0.0, tail.barrier - tail.reduced)
            opened(("flush", -1), Window(kind="inter", what="pipeline", seconds=seconds))
        for number in range(len(self.templates), len(templates)):
            steps.append(Run(template=number, drains=True))
            in_use.append(int(memory.static))
        return (
            Profile(
                identity=Identity(
                    model=parts.model,
                    layout=self.layout.describe(),
                    flags={"simulated": True},
                ),
                rank=stage * (self.layout.gpus // self.layout.pipeline),
                stage=stage,
                seconds=self.step_seconds,
                costs=parts.costs,
                templates=templates,
                steps=tuple(steps),
                memory=Memory(in_use=tuple(in_use), peak=max(in_use), capacity=int(self.capacity)),
            ),
            served,
        )

    def _as_used(self, template: Template) -> Template:
        """A template whose windows are as long as checks may use them."""
        share = self.assumptions.intra_use
        if share == 1 or not template.windows:
            return template
        windows = tuple(
            w.model_copy(update={"seconds": w.seconds * (share if w.kind == "intra" else 1.0)})
            for w in template.windows
        )
        return template.model_copy(update={"windows": windows})

    def _pipeline_window(self, span: Span) -> Window:
        seconds = 0.0
        if self.assumptions.pipeline_windows:
            seconds = span.seconds if self.assumptions.bubbles else span.wire
        kind: Literal["inter", "intra"] = "intra" if self.pieces.wire_inside else "inter"
        return Window(kind=kind, what="pipeline", seconds=max(0.0, seconds))


def duration(template: Template) -> float:
    """Seconds of a region, windows inside it included."""
    compute = sum(o.seconds for o in template.operators if not o.collective)
    return compute + sum(window.seconds for window in template.windows)
