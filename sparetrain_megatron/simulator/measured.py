"""From measured profiles to another layout: what was measured of a layer, in another pipeline."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Mode, Profile, Run, Template, Window

from .layout import Layout, StageMemory
from .simulate import Simulation, simulate_pieces
from .synthesise import Assumptions, Pieces

_NAMES = {
    "pipeline": ("pipeline", "pipeline_model_parallel_size"),
    "virtual": ("virtual", "virtual_pipeline_model_parallel_size"),
    "tensor": ("tensor", "tensor_model_parallel_size"),
    "expert": ("expert", "expert_model_parallel_size"),
    "context": ("context", "context_parallel_size"),
    "global_batch": ("global_batch", "global_batch_size"),
    "micro_batch": ("micro_batch", "micro_batch_size"),
}
"""Where an identity has each degree, in simulated profiles and in Megatron's."""


def simulate_measured(
    profiles: Sequence[Profile],
    changes: Mapping[str, Any],
    assumptions: Assumptions,
    modes: Sequence[Mode],
    budget: int | None = None,
    message: float | None = None,
) -> Simulation:
    """Simulates a layout from profiles of another one.

    A layer's regions are taken as they were measured and scaled: with the size of the microbatch,
    and inversely with the tensor-parallel degree (its windows: by the share that each rank sends).
    The pipeline, its waits and the number of layers a stage are made anew.

    Args:
        profiles: Of one job, best one of each pipeline stage.
        changes: Degrees of `Layout` that differ from the measured ones.
        message: Seconds that one between stages takes; None: the median of the measured waits,
            which have waiting for a late neighbour in them.

    Raises:
        UsageError: Not of one job; nothing to scale from; or a degree that can't be scaled.
    """
    profiles = sorted(profiles, key=lambda profile: profile.stage)
    for profile in profiles[1:]:
        differences = profile.identity.differences(profiles[0].identity)
        if differences:
            raise UsageError("profiles of several jobs: " + "; ".join(differences))
    old = measured_layout(profiles[0])
    new = dataclasses.replace(old, **changes)
    for name in ("expert", "context"):
        if getattr(new, name) != getattr(old, name):
            raise UsageError(f"{name} {getattr(new, name)}: measured profiles can't be scaled so")
    if new.tensor > 1 and old.tensor == 1:
        raise UsageError(
            f"tensor {new.tensor}: the profiles are of tensor 1 and have no collectives to scale"
        )
    if new.data > 1 and new.data != old.data:
        raise UsageError(f"data {new.data}: measured profiles can't be scaled so")
    parts, capacity = _pieces(profiles, old, new)
    if message is not None:
        parts = dataclasses.replace(parts, wire=message)
    source = "the median wait measured" if message is None else "as given"
    said = [
        f"operators as measured on {len(profiles)} stage(s) of "
        f"TP {old.tensor}, PP {old.pipeline}; scaled to TP {new.tensor}, PP {new.pipeline}",
        f"a message between stages takes {parts.wire * 1e3:.3g} ms, {source}",
        *assumptions.sentences(),
    ]
    return simulate_pieces(parts, new, capacity, assumptions, modes, budget, said)


def measured_layout(profile: Profile) -> Layout:
    """The layout that a profile was measured on, as far as its identity says."""
    values: dict[str, Any] = {}
    everything = {**profile.identity.model, **profile.identity.layout}
    for name, keys in _NAMES.items():
        for key in keys:
            value = everything.get(key)
            if isinstance(value, int) and value > 0:
                values[name] = int(value)
    layout = Layout(**{"tensor": 1, **values})
    world = everything.get("world_size") or everything.get("gpus")
    if isinstance(world, int):
        rest = layout.tensor * layout.pipeline * layout.context
        layout = dataclasses.replace(layout, data=max(1, world // rest))
    numbers = {s.microbatch for s in profile.steps if isinstance(s, Run)} - {None}
    if numbers and layout.microbatches != len(numbers):
        batch = len(numbers) * layout.data * layout.micro_batch
        layout = dataclasses.replace(layout, global_batch=batch)
    return dataclasses.replace(layout, reserve=0.0)


def _pieces(profiles: Sequence[Profile], old: Layout, new: Layout) -> tuple[Pieces, float]:
    size = new.micro_batch / old.micro_batch * old.tensor / new.tensor

    def share(tensor: int) -> float:
        return (tensor - 1) / tensor

    sent = new.micro_batch / old.micro_batch
    if old.tensor > 1:
        sent *= share(new.tensor) / share(old.tensor)
    scale = _Scale(size, sent)
    layer = tuple(
        scale.template(template)
        for phase in ("forward", "recompute", "backward")
        if (template := _most_frequent(profiles, phase, int)) is not None
    )
    if len(layer) < 2:
        raise UsageError("the profiles have no forward and backward of a numbered layer")
    ends: dict[str, tuple[Template, ...]] = {}
    for name in ("embedding", "head"):
        both = [_most_frequent(profiles, phase, str, name) for phase in ("forward", "backward")]
        ends[name] = tuple(scale.template(t) for t in both if t) if all(both) else ()
    layers = _total_layers(profiles)
    stages = range(new.pipeline)
    pieces = new.pipeline * new.virtual
    if pieces > layers:
        raise UsageError(f"{pieces} stages for {layers} layers")
    cut = [
        tuple(range(i * layers // pieces + 1, (i + 1) * layers // pieces + 1))
        for i in range(pieces)
    ]
    # Parameters, and with them the optimizer, go with the layers of a stage.
    parameters = (layers / new.pipeline) / (layers / old.pipeline) * old.tensor / new.tensor
    updating = _Scale(parameters, 1.0)
    update = tuple(
        updating.template(template)
        for phase in ("clip", "optimizer")
        if (template := _most_frequent(profiles, phase, None)) is not None
    )
    waits = [
        step.seconds
        for profile in profiles
        for step in profile.steps
        if isinstance(step, Window) and step.what == "pipeline" and step.seconds > 0
    ]
    wire = (statistics.median(waits) if waits else 0.0) * new.micro_batch / old.micro_batch
    if new.pipeline > 1 and not waits:
        raise UsageError("the profiles have no pipeline windows to say what a message takes")
    inside = all(
        step.kind == "intra"
        for profile in profiles
        for step in profile.steps
        if isinstance(step, Window) and step.what == "pipeline"
    )
    reduce = sum(
        step.seconds
        for step in profiles[0].steps
        if isinstance(step, Window) and step.what == "data"
    )
    memory = profiles[0].memory
    low = min(memory.in_use, default=memory.peak)
    stage = StageMemory(
        weights=low * parameters,
        optimizer=0.0,
        held=layer[0].externals[0].bytes if layer[0].externals else 0.0,
        working=max(0.0, (memory.peak - low) * size),
        reserve=0.0,
        parameters=0.0,
        updated=0.0,
    )
    result = Pieces(
        layer=layer,
        embedding=ends["embedding"],
        head=ends["head"],
        update=tuple(update for _ in stages),
        wire=wire,
        wire_inside=inside and bool(waits),
        reduce=tuple((reduce * parameters, 0.0) for _ in stages),
        reduce_inside=False,
        memory=tuple(stage for _ in stages),
        layers=tuple(cut),
        costs=profiles[0].costs,
        model=dict(profiles[0].identity.model),
    )
    return result, float(memory.capacity or 1 << 62)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    """Factors for operators (time and sizes) and for the windows inside a region."""

    operators: float
    windows: float

    def template(self, template: Template) -> Template:
        by = self.operators
        return template.model_copy(
            update={
                "operators": tuple(
                    o.model_copy(
                        update={
                            "seconds": o.seconds * by,
                            "check": None if o.check is None else o.check * by,
                            "written": int(o.written * by),
                            "held": int(o.held * by),
                        }
                    )
                    for o in template.operators
                ),
                "externals": tuple(
                    e.model_copy(update={"bytes": int(e.bytes * by)}) for e in template.externals
                ),
                "windows": tuple(
                    w.model_copy(update={"seconds": w.seconds * self.windows})
                    for w in template.windows
                ),
            }
        )


def _most_frequent(
    profiles: Sequence[Profile], phase: str, kind: type | None, name: str | None = None
) -> Template | None:
    """The template that most regions of a phase run; of several stages the median by time."""
    found = []
    for profile in profiles:
        runs = collections.Counter(
            step.template
            for step in profile.steps
            if isinstance(step, Run)
            and profile.templates[step.template].phase == phase
            and (kind is None or isinstance(step.layer, kind))
            and (name is None or step.layer == name)
        )
        if runs:
            found.append(profile.templates[runs.most_common(1)[0][0]])
    if not found:
        return None
    times = [sum(o.seconds for o in template.operators) for template in found]
    return found[times.index(statistics.median_low(times))]


def _total_layers(profiles: Sequence[Profile]) -> int:
    for key in ("layers", "num_layers"):
        value = profiles[0].identity.model.get(key)
        if isinstance(value, int) and value > 0:
            return value
    numbers = {s.layer for p in profiles for s in p.steps if isinstance(s, Run)}
    return max((n for n in numbers if isinstance(n, int)), default=0)
