"""What one rank's step consists of: operators, data flow, windows of communication, memory.

Layers repeat over microbatches, so operators are written down once a *template*, and the step is a
list of runs of templates and of windows between them. A *region* is one run: one microbatch, one
layer, one phase. An operator's *ordinal* is its place among the operators of its region that
compute (views, allocations and the like are not counted), from 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from .files import Data, read_json, validated, write_json

SCHEMA: Literal[1] = 1
"""Version of the file's schema; raised whenever a field changes its meaning."""

Phase = Literal["forward", "recompute", "backward", "accumulate", "clip", "optimizer"]
WindowKind = Literal["inter", "intra"]
What = Literal["pipeline", "tensor", "data", "gather", "expert"]
Scalar = bool | int | float | str | None

Seconds = float
Bytes = int


class Identity(Data):
    """What a plan depends on; a plan made for another identity is refused."""

    megatron: str = ""
    """Version of Megatron-Core (or of the framework in its place)."""

    model: dict[str, Scalar] = Field(default_factory=dict)
    """Shape: layers, hidden, ffn, heads, sequence, micro_batch, experts, dtype, …"""

    layout: dict[str, Scalar] = Field(default_factory=dict)
    """Parallel layout: pipeline, virtual, tensor, data, expert, context, microbatches, …"""

    flags: dict[str, Scalar] = Field(default_factory=dict)
    """Whatever else changes the operators: recompute, sequence_parallel, …"""

    def differences(self, other: Identity) -> list[str]:
        """What differs, one string each: `layout pipeline: 2, not 4`."""
        found = []
        if self.megatron != other.megatron:
            found.append(f"Megatron version: {self.megatron}, not {other.megatron}")
        for part in ("model", "layout", "flags"):
            mine, theirs = getattr(self, part), getattr(other, part)
            for key in sorted(mine.keys() | theirs.keys()):
                a, b = (side.get(key, "not given") for side in (mine, theirs))
                if a != b:
                    found.append(f"{part} {key}: {a}, not {b}")
        return found


class Operator(Data):
    """One operator of a region. It produces one value, known by the operator's ordinal."""

    name: str
    """Short name, `mm`."""

    seconds: Seconds = Field(ge=0)
    """Time of one execution, median over the profiled iterations."""

    spread: Seconds = Field(default=0.0, ge=0)
    """Distance between the quartiles of that time."""

    check: Seconds | None = Field(default=None, ge=0)
    """Time of a second execution with its comparison (and copies, where it writes); None: as
    `seconds`, and nothing for a collective."""

    written: Bytes = Field(default=0, ge=0)
    """Size of the value that it produces."""

    held: Bytes = Field(default=0, ge=0)
    """What must be kept to run it again alone: storages of its inputs, without parameters."""

    inputs: tuple[int, ...] = ()
    """Values it reads: the ordinal of an operator of this region, or ~k for external value k.
    Parameters and constants are left out: they are not held."""

    overwrites: tuple[int, ...] = ()
    """Values, as in `inputs`, that it writes in place. A mutating operator without any writes
    memory from outside the block, such as a gradient buffer."""

    recomputed: bool = False
    """Belongs to a checkpointed segment: runs in its forward and again in its recompute."""

    mutating: bool = False
    random: bool = False
    integer: bool = False
    """Its result is an index or a count, which is checked at once."""

    collective: bool = False
    replay: Seconds | None = Field(default=None, ge=0)
    """For the operators behind which a recompute stops early: time of the communication that
    would have to be replayed to run this one again (B_c). None: it is recomputed anyway."""

    @property
    def check_seconds(self) -> Seconds:
        """Time of its check, wherever it runs."""
        if self.check is not None:
            return self.check
        return 0.0 if self.collective else self.seconds


class External(Data):
    """A value that a region reads and did not produce."""

    bytes: Bytes = Field(ge=0)
    phase: Phase | None = None
    """The region of the same microbatch and layer, just before this one, that has it; None: it
    comes from elsewhere."""

    value: int | None = None
    """Its number there, as in `Operator.inputs`."""

    @model_validator(mode="after")
    def _both_or_none(self) -> External:
        if (self.phase is None) != (self.value is None):
            raise ValueError("phase and value are given together or not at all")
        return self


class Window(Data):
    """A time in which the device waits for communication."""

    kind: WindowKind
    """Whether the communicating group spans hosts (inter) or not (intra)."""

    what: What
    """pipeline send and receive, tensor-parallel collective, data-parallel gradient reduction,
    parameter gathering, expert all-to-all."""

    seconds: Seconds = Field(ge=0)
    """How long it is open, median."""

    spread: Seconds = Field(default=0.0, ge=0)
    dynamic: bool = False
    """Its length changes from iteration to iteration with the data (experts)."""


class InnerWindow(Window):
    """A window inside a region, at the same place in every run of the template."""

    after: int = Field(ge=0)
    """How many of the region's operators run before it opens."""


class Template(Data):
    """The operators of one kind of region, in the order in which they run."""

    phase: Phase
    operators: tuple[Operator, ...] = ()
    externals: tuple[External, ...] = ()
    windows: tuple[InnerWindow, ...] = ()
    name: str = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Template:
        for ordinal, operator in enumerate(self.operators):
            for value in (*operator.inputs, *operator.overwrites):
                if not -len(self.externals) <= value < ordinal:
                    raise ValueError(
                        f"operator {ordinal} ({operator.name}) reads value {value}, which is "
                        "neither an earlier operator's nor an external one"
                    )
            if operator.overwrites and not operator.mutating:
                raise ValueError(f"operator {ordinal} ({operator.name}) overwrites: not mutating")
        places = [window.after for window in self.windows]
        if places != sorted(places) or any(place > len(self.operators) for place in places):
            raise ValueError("windows are not in order, or behind the last operator")
        return self


class Run(Data):
    """One region: a template at a microbatch and layer."""

    template: int = Field(ge=0)
    microbatch: int | None = None
    """From 1; None outside of forward and backward."""

    layer: int | str | None = None
    """Number of the transformer layer from 1, `embedding`, `head`, or None."""

    drains: bool = False
    """Whether everything pending must be checked before this region. Clipping and the optimizer
    always have it so."""


class Costs(Data):
    """What protection itself costs on the critical path."""

    record: Seconds = Field(default=0.0, ge=0)
    """To record one operator for a later replay."""

    fingerprint: Seconds = Field(default=0.0, ge=0)
    """Of one byte's fingerprint."""

    observe: Seconds = Field(default=0.0, ge=0)
    """To take one operator's fingerprint, whatever its size."""

    bound: Seconds | None = Field(default=None, ge=0)
    """As `record`, for an operator of a segment that replays a whole recompute: blocks that do the
    same every time are bound to a template, not recorded. None: they are recorded."""


class Memory(Data):
    """Memory of the device, without what protection holds."""

    in_use: tuple[Bytes, ...] = ()
    """Largest amount in use during each step of the order; empty: as `peak` throughout."""

    peak: Bytes = Field(default=0, ge=0)
    capacity: Bytes = Field(default=0, ge=0)
    """What the process may use; 0: not known."""


class Profile(Data):
    """One rank's step."""

    kind: Literal["profile"] = "profile"
    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")
    identity: Identity = Identity()
    rank: int = 0
    stage: int = 0
    """Pipeline stage of the rank."""

    iterations: int = 1
    """How many iterations the medians are of."""

    seconds: Seconds = Field(default=0.0, ge=0)
    """The unprotected step, median; 0: the sum of operators and windows."""

    spread: Seconds = Field(default=0.0, ge=0)
    recompute_stops_early: bool = False
    """Whether a recompute ends before the segment's last operators (torch's non-reentrant
    checkpoint does, Megatron's does not)."""

    costs: Costs = Costs()
    templates: tuple[Template, ...] = ()
    steps: tuple[Run | Window, ...] = ()
    """Regions and the windows between them, in the order of the step."""

    memory: Memory = Memory()

    model_config = Data.model_config | {"populate_by_name": True}

    @model_validator(mode="after")
    def _is_consistent(self) -> Profile:
        for index, step in enumerate(self.steps):
            if isinstance(step, Run) and step.template >= len(self.templates):
                raise ValueError(f"step {index} runs template {step.template}, which is missing")
        if self.memory.in_use and len(self.memory.in_use) != len(self.steps):
            raise ValueError(
                f"memory in use at {len(self.memory.in_use)} of {len(self.steps)} steps"
            )
        return self

    @property
    def step_seconds(self) -> Seconds:
        """Time of the unprotected step."""
        return self.seconds or self.compute_seconds + self.window_seconds

    @property
    def compute_seconds(self) -> Seconds:
        """Time in operators, collectives left out: their time is in the windows."""
        each = [
            sum(o.seconds for o in template.operators if not o.collective)
            for template in self.templates
        ]
        return sum(each[step.template] for step in self.steps if isinstance(step, Run))

    @property
    def window_seconds(self) -> Seconds:
        """Time in windows."""
        return sum(window.seconds for window in self.windows())

    def windows(self) -> Iterator[Window]:
        """All windows, those inside regions included, in order."""
        for step in self.steps:
            if isinstance(step, Run):
                yield from self.templates[step.template].windows
            else:
                yield step

    def operator_count(self) -> int:
        """Operators of the step."""
        each = [len(template.operators) for template in self.templates]
        return sum(each[step.template] for step in self.steps if isinstance(step, Run))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the profile in one step and returns the path."""
        return write_json(path, self.model_dump_json(by_alias=True, exclude_defaults=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a profile.

        Raises:
            UsageError: Unreadable or not a profile of this schema; names the file and the field.
        """
        return validated(cls, read_json(path, "profile", SCHEMA), path)
