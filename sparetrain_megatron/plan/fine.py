"""Phase 3: operators that are left are deferred one by one, through a queue.

The step is scanned in execution order. At each window everything unassigned since the last one
joins the queue; while the queue's tensors exceed the memory budget, the operator with the shortest
run time is demoted to naive; the window takes the subset that fits it best.

A step has millions of operators but few kinds: the same operator of the same template. The queue
counts kinds. Within a kind, operators join and leave in order, so a window's share is a slice.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from .profile import Costs, Operator, Template
from .timeline import Account, Slot, Timeline

LEFT, DEMOTED = -1, -2
"""Outcomes that are not a window's ordinal."""

EXACT = 10
"""Up to so many operators in the queue, the best subset is found by looking at all."""

_SLACK = 1 + 1e-9  # sums of the same seconds in another order


def worth_deferring(operator: Operator, costs: Costs) -> bool:
    """Whether recording and fingerprinting an operator costs less than checking it at once."""
    return operator.check_seconds > costs.record + costs.fingerprint * operator.written


def can_defer(operator: Operator) -> bool:
    """Whether an operator can be held back alone at all."""
    return not (operator.collective or operator.integer or operator.mutating)


class Variant:
    """Regions of one template in which the same operators are left to this phase.

    Attributes:
        ordinals: Those operators.
        steps: The profile's steps that are such regions, in order.
        others: Operators that are recorded with them, wherever one of them is deferred.
        outcome: For each step and operator the window's ordinal, LEFT or DEMOTED.
    """

    def __init__(
        self, number: int, template: Template, ordinals: Sequence[int], others: int = 0
    ) -> None:
        self.template_number = number
        self.template = template
        self.ordinals = tuple(ordinals)
        self.steps: list[int] = []
        self.others = others
        self.outcome = np.empty((0, 0), dtype=np.int32)


class Queue:
    """The queue over one step.

    A *kind* is one operator of one variant, by its index from the shortest to the longest; a *span*
    is what joins together: a variant's operators between two of its windows.
    """

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._spans: dict[int, list[tuple[int, int, float, int]]] = {}
        self._joined: list[int] = []  # by span: how many of its runs have joined
        kinds: list[tuple[Operator, int, np.ndarray]] = []
        for variant in variants:
            kinds += self._add(variant)
        kinds.sort(key=lambda kind: kind[0].check_seconds)  # stable: the earlier is demoted first
        # By kind:
        self._seconds = [operator.check_seconds for operator, _, _ in kinds]
        self._held = [operator.held for operator, _, _ in kinds]
        self._span = [span for _, span, _ in kinds]
        self._outcome = [column for _, _, column in kinds]
        self._head = [0] * len(kinds)  # how many have left the queue
        self._written = [0] * len(kinds)  # of how many of them the outcome is written down
        self.count = 0
        self.seconds = 0.0
        self.held = 0

    def _add(self, variant: Variant) -> list[tuple[Operator, int, np.ndarray]]:
        variant.outcome = np.full((len(variant.steps), len(variant.ordinals)), LEFT, np.int32)
        spans, kinds = [], []
        start = 0
        for place in [
            *(w.after for w in variant.template.windows),
            len(variant.template.operators),
        ]:
            stop = bisect.bisect_left(variant.ordinals, place)
            some = [variant.template.operators[o] for o in variant.ordinals[start:stop]]
            span = len(self._joined)
            self._joined.append(0)
            spans.append(
                (span, len(some), sum(o.check_seconds for o in some), sum(o.held for o in some))
            )
            for column, operator in enumerate(some, start):
                kinds.append((operator, span, variant.outcome[:, column]))
            start = stop
        self._spans[id(variant)] = spans
        return kinds

    def join(self, variant: Variant, position: int) -> None:
        """A run's operators up to its window number `position` (from the one before)."""
        span, count, seconds, held = self._spans[id(variant)][position]
        self._joined[span] += 1
        self.count += count
        self.seconds += seconds
        self.held += held

    def demote(self, budget: int) -> None:
        """Demotes the shortest while the queue holds more than `budget` bytes."""
        joined, head, excess = self._joined, self._head, self.held - budget
        for kind, span in enumerate(self._span):
            number = joined[span] - head[kind]
            held = self._held[kind]
            if not number or not held:
                continue  # demoting what holds nothing wins nothing
            if number * held > excess:
                number = -(-excess // held)
            head[kind] += number  # written down as demoted when the next ones are taken
            excess -= number * held
            self.count -= number
            self.seconds -= number * self._seconds[kind]
            if excess <= 0:
                break
        self.held = budget + excess

    def serve(self, slot: Slot, room: float) -> float:
        """Gives a window the subset that fits it best; returns its seconds."""
        limit = room * _SLACK
        if self.seconds <= limit:
            numbers = [self._joined[span] - head for span, head in zip(self._span, self._head)]
            taken = [(kind, number) for kind, number in enumerate(numbers) if number]
        elif self.count <= EXACT and not slot.window.dynamic:
            taken = self._best(limit)
        else:
            taken = self._longest_first(limit)
        used = 0.0
        for kind, number in taken:
            self._write_demoted(kind)
            start = self._head[kind]
            self._outcome[kind][start : start + number] = slot.ordinal
            self._head[kind] = self._written[kind] = start + number
            self.held -= number * self._held[kind]
            used += number * self._seconds[kind]
            self.count -= number
        # Not a difference of large sums when nothing is left.
        self.seconds = self.seconds - used if self.count else 0.0
        return used

    def _write_demoted(self, kind: int) -> None:
        start, stop = self._written[kind], self._head[kind]
        if start < stop:
            self._outcome[kind][start:stop] = DEMOTED

    def drop(self) -> None:
        """What waits is checked naively: nothing may be pending from here on."""
        for kind, span in enumerate(self._span):
            self._write_demoted(kind)
            self._head[kind] = self._written[kind] = self._joined[span]
        self.count, self.seconds, self.held = 0, 0.0, 0

    def _best(self, limit: float) -> list[tuple[int, int]]:
        """Of all subsets of a small queue the longest; of equally long ones, what frees most."""
        sums: dict[float, tuple[int, tuple[int, ...]]] = {0.0: (0, ())}
        for kind, seconds in enumerate(self._seconds):
            for _ in range(self._joined[self._span[kind]] - self._head[kind]):
                for total, (freed, picked) in list(sums.items()):
                    bigger = total + seconds
                    if bigger <= limit:
                        more = freed + self._held[kind]
                        if bigger not in sums or sums[bigger][0] < more:
                            sums[bigger] = (more, (*picked, kind))
        picked = sums[max(sums)][1]
        return [(kind, picked.count(kind)) for kind in sorted(set(picked))]

    def _longest_first(self, limit: float) -> list[tuple[int, int]]:
        taken = []
        kind = bisect.bisect_right(self._seconds, limit) - 1
        while kind >= 0:
            number = self._joined[self._span[kind]] - self._head[kind]
            if number:
                seconds = self._seconds[kind]
                if seconds > 0:
                    number = min(number, int(limit / seconds))
                if number:
                    taken.append((kind, number))
                    limit -= number * seconds
                    kind = min(kind, bisect.bisect_right(self._seconds, limit))
            kind -= 1
        return taken


def schedule(
    timeline: Timeline,
    account: Account,
    room: list[float],
    variants: Sequence[Variant],
    at: Sequence[Variant | None],
) -> int:
    """Assigns the operators of all variants: fills in their `outcome`.

    Args:
        timeline: The step.
        account: Memory that is left; only read.
        room: Seconds left in each window, by ordinal; what is used is taken from it.
        variants: All kinds of region with something left.
        at: The variant of each of the profile's steps.

    Returns:
        The most bytes that the queue and what was held before it take together.
    """
    queue = Queue(variants)
    free, taken = account.free.tolist(), account.taken.tolist()
    peak = 0
    lowest = None  # the least memory left since the last scheduling point
    for step, (variant, windows, drains) in enumerate(zip(at, timeline.at, timeline.drains)):
        if drains:
            queue.drop()
            lowest = None
        lowest = free[step] if lowest is None else min(lowest, free[step])
        for position, ordinal in enumerate(windows):
            if variant is not None:
                queue.join(variant, position)
            if queue.count:
                if queue.held > lowest:
                    account.bound = True
                    queue.demote(lowest)
                peak = max(peak, queue.held + taken[step])
                if queue.count:
                    room[ordinal] -= queue.serve(timeline.slots[ordinal], room[ordinal])
            lowest = free[step]
        if variant is not None:
            queue.join(variant, len(windows))
    queue.drop()
    return peak
