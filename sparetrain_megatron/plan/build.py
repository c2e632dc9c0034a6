"""Writes a draft down as a plan."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .fine import DEMOTED, can_defer, worth_deferring
from .plan import (
    Method,
    Pattern,
    Plan,
    RegionMethod,
    Row,
    Segment,
    SegmentUse,
    Totals,
    Why,
    letters,
)
from .profile import Operator, Run

if TYPE_CHECKING:
    from .planner import Draft, Planner


@dataclasses.dataclass(slots=True)
class _Sums:
    """Seconds and numbers of operators of one pattern."""

    seconds: dict[Method, float]
    operators: dict[Method, int]
    runs: int = 0


def build(planner: Planner, draft: Draft, budget: int) -> Plan:
    """The plan of a draft.

    Args:
        planner: What the draft was made from.
        draft: The choice.
        budget: What the user allowed, in bytes.
    """
    writer = _Writer(planner, draft)
    writer.write()
    slots = planner.timeline.slots
    return Plan(
        identity=planner.profile.identity,
        rank=planner.profile.rank,
        stage=planner.profile.stage,
        mode=planner.mode,
        window_use=planner.window_use,
        operators=tuple(tuple(o.name for o in t.operators) for t in planner.profile.templates),
        patterns=tuple(writer.patterns),
        segments=tuple(writer.segments),
        windows=tuple(slots[o].used(draft.used.get(o, 0.0)) for o in sorted(writer.windows)),
        rows=tuple(writer.rows),
        totals=writer.totals(budget),
    )


class _Writer:
    def __init__(self, planner: Planner, draft: Draft) -> None:
        self._planner = planner
        self._draft = draft
        self.patterns: list[Pattern] = []
        self.segments: dict[Segment, int] = {}
        self.rows: list[Row] = []
        self.windows: set[int] = set()
        """Ordinals of those with work."""

        self._sums: list[_Sums] = []
        self._numbers: dict[tuple, int] = {}

    def write(self) -> None:
        """Goes through the blocks, in order: every region is in exactly one."""
        profile, draft = self._planner.profile, self._draft
        turns: dict[int, int] = {}
        for place in draft.places:
            uses = tuple(
                SegmentUse(self.segments.setdefault(c.segment, len(self.segments)), window)
                for c, window in place.segments
            )
            replays = 0
            for candidate, _ in place.segments:
                replays |= candidate.replays
            start = 0
            for index, number in enumerate(place.stretch.templates):
                step = place.stretch.first + index
                run = profile.steps[step]
                assert isinstance(run, Run)
                template = profile.templates[number]
                mask = (1 << len(template.operators)) - 1
                covered, replayed = place.covered >> start & mask, replays >> start & mask
                start += len(template.operators)
                variant = draft.at[step]
                windows: tuple[int, ...] = ()
                slots: tuple[int, ...] = ()
                if variant is not None:
                    turn = turns.get(id(variant), 0)
                    turns[id(variant)] = turn + 1
                    outcome = variant.outcome[turn].tolist()
                    windows = tuple(sorted({o for o in outcome if o >= 0}))
                    places = {window: slot for slot, window in enumerate(windows)}
                    kinds = tuple(self._planner.timeline.slots[w].window.kind for w in windows)
                    slots = tuple(places.get(o, o) for o in outcome)
                else:
                    kinds = ()
                sparse = step in draft.sparse
                key = (number, covered, bool(replayed), sparse, id(variant), slots, kinds)
                pattern = self._numbers.get(key)
                if pattern is None:
                    pattern = self._numbers[key] = len(self.patterns)
                    queued = dict(zip(variant.ordinals, slots)) if variant else {}
                    self._add(number, covered, bool(replayed), sparse, queued, kinds)
                self._sums[pattern].runs += 1
                mine = uses if replayed else ()
                self.windows.update(windows, (use.window for use in mine))
                self.rows.append(
                    Row(run.microbatch, run.layer, template.phase, pattern, windows, mine)
                )

    def _add(
        self,
        number: int,
        covered: int,
        replayed: bool,
        sparse: bool,
        queued: Mapping[int, int],
        kinds: Sequence[str],
    ) -> None:
        """A new pattern.

        Args:
            number: The template.
            covered: Operators whose check a segment takes over, as bits.
            replayed: Whether any of its operators are in a segment.
            sparse: Whether P-DMR takes the output's fingerprint only.
            queued: By ordinal, what phase 3 came to: one of the row's windows, or why not.
            kinds: Kinds of the row's windows.
        """
        planner = self._planner
        template = planner.profile.templates[number]
        methods: list[Method] = []
        whys: list[Why] = []
        slots = []
        for ordinal, operator in enumerate(template.operators):
            slot = queued.get(ordinal, -1)
            assigned = planner.assigned[number][ordinal]
            if planner.mode == "naive":
                method, why = Method.NAIVE, Why.MODE
            elif assigned is not None:
                method, why = assigned
            elif covered >> ordinal & 1:
                method, why = Method.DDMR_INTER, Why.SEGMENT
            elif slot >= 0:
                inter = kinds[slot] == "inter"
                method = Method.DDMR_INTER if inter else Method.DDMR_INTRA
                why = Why.SINGLE
            else:
                method, why = Method.NAIVE, self._why_naive(operator, slot)
            methods.append(method)
            whys.append(why)
            slots.append(max(slot, -1))
        single = any(slot >= 0 for slot in slots)
        seconds = dict.fromkeys(Method, 0.0)
        count = dict.fromkeys(Method, 0)
        for method, operator in zip(methods, template.operators):
            seconds[method] += operator.check_seconds
            count[method] += 1
        self._sums.append(_Sums(seconds, count))
        kind: RegionMethod = "naive"
        if replayed:
            kind = "segment"
        elif single:
            kind = "single"
        elif Method.PDMR in methods:
            kind = "piggyback"
        text, reasons = letters(methods, whys)
        self.patterns.append(
            Pattern(
                template=number,
                method=kind,
                methods=text,
                why=reasons,
                slots=tuple(slots) if single else (),
                fingerprints="output" if sparse else "all",
            )
        )

    def _why_naive(self, operator: Operator, outcome: int) -> Why:
        if self._planner.mode in ("naive", "piggyback"):
            return Why.MODE
        if not can_defer(operator):
            return Why.WRITES
        if not worth_deferring(operator, self._planner.profile.costs):
            return Why.SHORT
        return Why.DEMOTED if outcome == DEMOTED else Why.LEFT

    def totals(self, budget: int) -> Totals:
        """Adds up what the rows cost."""
        planner, draft, profile = self._planner, self._draft, self._planner.profile
        seconds = dict.fromkeys(Method, 0.0)
        operators = dict.fromkeys(Method, 0)
        fingerprints = replays = piggyback = 0.0
        for pattern, sums in zip(self.patterns, self._sums):
            number, runs = pattern.template, sums.runs
            for method in Method:
                seconds[method] += runs * sums.seconds[method]
                operators[method] += runs * sums.operators[method]
            if planner.mode == "naive":
                continue
            sparse = pattern.fingerprints == "output"
            fingerprints += runs * planner.fingerprint_seconds(number, sparse)
            piggyback += runs * planner.fingerprint_seconds(number, False)
            replays += runs * planner.replay_seconds(number)
            piggyback += runs * planner.replay_seconds(number)
            piggyback += runs * planner.unrecomputed_seconds(number)
        deferred = seconds[Method.DDMR_INTER] + seconds[Method.DDMR_INTRA]
        causes = {
            "naive": seconds[Method.NAIVE],
            "record": max(0.0, deferred - draft.segment_net - draft.single_net),
            "fingerprint": fingerprints,
            "piggyback": replays,
        }
        gains = {}
        if planner.mode != "naive":
            gains["phase1"] = sum(seconds.values()) - piggyback
        if planner.mode in ("coarse", "full"):
            gains["phase2"] = draft.segment_net + draft.sparse_net
        if planner.mode == "full":
            gains["phase3"] = draft.single_net
        critical = sum(causes.values())
        step = profile.step_seconds
        overhead = critical / step if step else 0.0
        return Totals(
            step_seconds=step,
            critical_seconds=critical,
            critical=causes,
            overhead=overhead,
            floor=min(overhead, floor_seconds(planner) / step if step else 0.0),
            seconds={str(method): value for method, value in seconds.items()},
            operators={str(method): value for method, value in operators.items()},
            window_seconds=profile.window_seconds,
            in_windows=sum(draft.used.values()),
            budget=budget,
            planned_budget=draft.budget,
            peak_held=draft.peak,
            gains=gains,
        )


def floor_seconds(planner: Planner) -> float:
    """Seconds of checks that fit in no window, however they are planned and whatever they hold:
    those that cannot wait, and those that the windows after them, used to the full, don't hold."""
    timeline, profile = planner.timeline, planner.profile
    never = [0.0] * len(profile.templates)
    work: list[list[float]] = []
    for number, template in enumerate(profile.templates):
        places = [window.after for window in template.windows]
        parts = [0.0] * (len(places) + 1)
        for ordinal, operator in enumerate(template.operators):
            assigned = planner.assigned[number][ordinal]
            if assigned and assigned[0] is Method.PDMR:
                continue
            if assigned or (operator.mutating and not operator.overwrites):
                never[number] += operator.check_seconds
            else:
                parts[bisect.bisect_right(places, ordinal)] += operator.check_seconds
        work.append(parts)
    floor = queue = 0.0
    for step, entry in enumerate(profile.steps):
        if timeline.drains[step]:
            floor += queue
            queue = 0.0
        parts = [0.0, 0.0]
        if isinstance(entry, Run):
            parts = work[entry.template]
            floor += never[entry.template]
        for place, ordinal in enumerate(timeline.at[step]):
            queue = max(0.0, queue + parts[place] - timeline.slots[ordinal].window.seconds)
        queue += parts[-1]
    return floor + queue
