"""A DMR plan: for every operator of one rank's step, how, where and why it is checked.

Written compactly: regions that are treated alike share a *pattern* (one letter an operator), and
segments of the same shape share their description; a row says which region has which.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, TypeAdapter

from sparetrain_megatron.errors import UsageError

from .files import Data, read_json, validated, write_json
from .profile import Bytes, Identity, Phase, Seconds, What, WindowKind

SCHEMA: Literal[1] = 1
"""Version of the file's schema; raised whenever a field changes its meaning."""

Mode = Literal["naive", "piggyback", "coarse", "full"]
RegionMethod = Literal["segment", "single", "naive", "piggyback"]


class Method(enum.StrEnum):
    """How an operator is checked."""

    PDMR = "P-DMR"
    DDMR_INTER = "D-DMR_inter"
    DDMR_INTRA = "D-DMR_intra"
    NAIVE = "naive"

    @property
    def deferred(self) -> bool:
        return self in (Method.DDMR_INTER, Method.DDMR_INTRA)


class Why(enum.StrEnum):
    """Why an operator has its method."""

    RECOMPUTED = "the recompute is its second execution"
    REPLAY = "replaying its communication costs more than twice its time"
    SEGMENT = "replayed with its segment, of which only the boundary is held"
    SINGLE = "its inputs are held until a window with room"
    MODE = "the mode allows nothing else"
    COLLECTIVE = "collective: what it moves is checked on its own"
    INTEGER = "an integer result is checked at once"
    WRITES = "it writes memory from outside, which would have to be copied"
    SHORT = "recording it costs as much as checking it"
    DEMOTED = "the shortest, when the queue exceeded the memory budget"
    LEFT = "no later window had room"


_LETTERS = {
    Method.PDMR: "P",
    Method.DDMR_INTER: "E",  # inter-node
    Method.DDMR_INTRA: "A",  # intra-node
    Method.NAIVE: "N",
}
_METHODS = {letter: method for method, letter in _LETTERS.items()}
_WHYS = {chr(ord("a") + i): why for i, why in enumerate(Why)}
_WHY_LETTERS = {why: letter for letter, why in _WHYS.items()}


class WindowUse(NamedTuple):
    """A window that the plan gives work to."""

    ordinal: int
    """Place among all windows of the iteration, from 0."""

    kind: WindowKind
    what: What
    nth: int
    """Place among the windows of its `what`, from 0."""

    seconds: Seconds
    """How long it is open."""

    used: Seconds
    """How long it is planned to work."""

    dynamic: bool


class Part(NamedTuple):
    """Consecutive operators of one region."""

    phase: Phase
    start: int
    stop: int
    visit: int = 0
    """Which region of that phase, where a microbatch and layer has several."""


class Segment(Data):
    """Operators that are recorded and replayed together (AGC); the shape, not the place."""

    parts: tuple[Part, ...]
    """What is replayed, in this order. Operators between the parts are not: a collective, or
    one that writes memory from outside."""

    operators: int
    boundary: Bytes
    """What is held from the region until the window."""

    transient: Bytes
    """Largest amount alive inside, during the replay."""

    replay: Seconds
    saved: Seconds
    """Time of checks that it takes off the critical path."""

    gain: Seconds
    """`saved` less what the replay runs although P-DMR covers it."""


class SegmentUse(NamedTuple):
    """A segment of one region and the window that replays it."""

    segment: int
    window: int


class Pattern(Data):
    """How the operators of a region are checked; a letter each, by ordinal."""

    template: int
    method: RegionMethod
    methods: str
    """P: P-DMR, E: D-DMR_inter, A: D-DMR_intra, N: naive."""

    why: str
    """a, b, c, …: in the order of `Why`."""

    slots: tuple[int, ...] = ()
    """For singly deferred operators, which of the row's windows; -1 for others; empty: none."""

    fingerprints: Literal["all", "output"] = "all"
    """Under P-DMR: of every operator, or, where the whole recompute is replayed as part of a
    segment, of the region's output alone."""


class Row(NamedTuple):
    """One region."""

    microbatch: int | None
    layer: int | str | None
    phase: Phase
    pattern: int
    windows: tuple[int, ...] = ()
    segments: tuple[SegmentUse, ...] = ()


class Totals(Data):
    """What the plan should cost."""

    step_seconds: Seconds
    """The unprotected step."""

    critical_seconds: Seconds
    """What protection adds to it."""

    critical: dict[str, Seconds]
    """The same by cause: naive, record, fingerprint, piggyback."""

    overhead: float
    """`critical_seconds` as a share of `step_seconds`."""

    floor: float
    """Checks that fit in no window, whatever the plan, as a share of `step_seconds`."""

    seconds: dict[str, Seconds]
    """Time of the operators' checks by method, wherever they run."""

    operators: dict[str, int]
    window_seconds: Seconds
    """Time of all windows."""

    in_windows: Seconds
    """Time of replays inside windows."""

    budget: Bytes
    """What deferral may hold."""

    planned_budget: Bytes
    """What the plan was made for: less, where a smaller budget gave a cheaper plan."""

    peak_held: Bytes
    """The most that is held at one time, a replay's transient included."""

    gains: dict[str, Seconds]
    """Time that each phase takes off the critical path, from naive on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """What happens to one operator."""

    method: Method
    why: Why
    window: WindowUse | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RegionChoice:
    """What happens to one region; what the run time asks for.

    Attributes:
        method: For the region as a whole. "segment": the operators of `segments` are recorded;
            "single": operators are recorded one by one; "piggyback": their fingerprints are taken.
        operators: Names in order; a sequence that departs from it is not the planned one.
        overrides: Ordinals that are not treated as the region is: naive ones among deferred,
            deferred ones outside a segment, and so on.
        windows: Ordinals of singly deferred operators and the windows that they wait for.
        segments: Segments with their windows; the regions of one block name the same.
        fingerprints: As in `Pattern`.
        known: False where the plan has no such region: everything is naive.
    """

    method: RegionMethod
    operators: tuple[str, ...] = ()
    overrides: Mapping[int, Method] = dataclasses.field(default_factory=dict)
    windows: Mapping[int, WindowUse] = dataclasses.field(default_factory=dict)
    segments: tuple[tuple[Segment, WindowUse], ...] = ()
    fingerprints: str = "all"
    known: bool = True

    @property
    def deferred(self) -> bool:
        """Whether anything of the region waits for a window."""
        return bool(self.segments or self.windows)

    @property
    def window(self) -> WindowUse | None:
        """The region's first window, or None when nothing is deferred."""
        if self.segments:
            return min((use for _, use in self.segments), key=lambda use: use.ordinal)
        return min(self.windows.values(), key=lambda use: use.ordinal, default=None)


UNKNOWN = RegionChoice("naive", known=False)

Place = tuple[int | None, int | str | None, str]
_DEFAULTS = {"piggyback": Method.PDMR, "naive": Method.NAIVE}


class Plan(Data):
    """The plan of one rank; ranks of the same stage have the same."""

    identity: Identity
    rank: int = 0
    stage: int = 0
    mode: Mode
    window_use: float
    """Share of each window that is planned for."""

    operators: tuple[tuple[str, ...], ...]
    """Names of the operators of each template."""

    patterns: tuple[Pattern, ...]
    segments: tuple[Segment, ...]
    windows: tuple[WindowUse, ...]
    """Those with work, in order."""

    rows: tuple[Row, ...]
    """All regions of the step, in order."""

    totals: Totals

    def refuse_unless_for(self, identity: Identity) -> None:
        """Checks that the plan is for this run.

        Raises:
            UsageError: Names every difference.
        """
        differences = self.identity.differences(identity)
        if differences:
            raise UsageError("the plan is for another run: " + "; ".join(differences))

    def choice(
        self, microbatch: int | None, layer: int | str | None, phase: str, visit: int = 0
    ) -> RegionChoice:
        """What happens to a region; all naive for one that the plan doesn't have.

        Args:
            microbatch: As in `Position`.
            layer: As in `Position`.
            phase: As in `Position`.
            visit: Which one, from 0, where a microbatch and layer has several of the phase.
        """
        choices = self._choices
        index = self._places.get((microbatch, layer, phase), ())
        if visit >= len(index):
            return UNKNOWN
        row = index[visit]
        found = choices.get(row)
        if found is None:
            found = choices[row] = self._choice(self.rows[row])
        return found

    def assignments(self, row: Row) -> Iterator[Assignment]:
        """The operators of a region, by ordinal."""
        pattern = self.patterns[row.pattern]
        replayed = self._segment_windows(row)
        for ordinal, (letter, why) in enumerate(zip(pattern.methods, pattern.why)):
            slot = pattern.slots[ordinal] if pattern.slots else -1
            window = row.windows[slot] if slot >= 0 else None
            method = _METHODS[letter]
            if method.deferred and window is None:
                window = replayed.get(ordinal)
            use = None if window is None else self._windows[window]
            yield Assignment(method, _WHYS[why], use)

    @cached_property
    def _windows(self) -> dict[int, WindowUse]:
        return {use.ordinal: use for use in self.windows}

    @cached_property
    def _places(self) -> dict[Place, list[int]]:
        places: dict[Place, list[int]] = {}
        for index, row in enumerate(self.rows):
            places.setdefault(row[:3], []).append(index)
        return places

    @cached_property
    def _choices(self) -> dict[int, RegionChoice]:
        return {}

    def _visit(self, row: Row) -> int:
        """How many regions of the same phase come before this one in its block."""
        for visit, index in enumerate(self._places[row[:3]]):
            if self.rows[index] is row:
                return visit
        return 0

    def _segment_windows(self, row: Row) -> dict[int, int]:
        """Ordinals that a segment of this region replays, and in which window."""
        found: dict[int, int] = {}
        visit = self._visit(row) if row.segments else 0
        for use in row.segments:
            segment = self.segments[use.segment]
            for part in segment.parts:
                if (part.phase, part.visit) == (row.phase, visit):
                    for ordinal in range(part.start, part.stop):
                        found.setdefault(ordinal, use.window)
        return found

    def _choice(self, row: Row) -> RegionChoice:
        pattern = self.patterns[row.pattern]
        assigned = list(self.assignments(row))
        replayed = self._segment_windows(row)
        overrides, windows = {}, {}
        for ordinal, one in enumerate(assigned):
            single = bool(pattern.slots) and pattern.slots[ordinal] >= 0
            if single and one.window is not None:
                windows[ordinal] = one.window
            if pattern.method == "segment":
                usual = ordinal in replayed and not single and one.method is not Method.NAIVE
            elif pattern.method == "single":
                usual = single
            else:
                usual = one.method is _DEFAULTS[pattern.method]
            if not usual:
                overrides[ordinal] = one.method
        segments = tuple((self.segments[u.segment], self._windows[u.window]) for u in row.segments)
        return RegionChoice(
            pattern.method,
            self.operators[pattern.template],
            overrides,
            windows,
            segments,
            pattern.fingerprints,
        )


def letters(methods: list[Method], whys: list[Why]) -> tuple[str, str]:
    """The two strings of a pattern."""
    return "".join(_LETTERS[m] for m in methods), "".join(_WHY_LETTERS[w] for w in whys)


class _PlanFile(Data):
    kind: Literal["plan"] = "plan"
    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")
    plans: tuple[Plan, ...]

    model_config = Data.model_config | {"populate_by_name": True}


def save_plans(path: str | os.PathLike[str], plans: Mapping[int, Plan]) -> Path:
    """Writes the plans of a job's stages into one file, in one step.

    Args:
        path: `plan.json`.
        plans: One plan a pipeline stage.
    """
    adapter = TypeAdapter(Plan)
    content = {
        "kind": "plan",
        "schema": SCHEMA,
        "plans": [adapter.dump_python(plans[stage], mode="json") for stage in sorted(plans)],
    }
    return write_json(path, json.dumps(content, separators=(",", ":")))


def load_plans(path: str | os.PathLike[str]) -> dict[int, Plan]:
    """Reads a file of `save_plans`: the plans by stage.

    Raises:
        UsageError: Unreadable or not plans of this schema; names the file and the field.
    """
    content = read_json(path, "plan", SCHEMA)
    plans = validated(_PlanFile, content, path).plans
    if len({plan.stage for plan in plans}) < len(plans):
        raise UsageError(f"{path}: has two plans for the same stage")
    return {plan.stage: plan for plan in plans}
