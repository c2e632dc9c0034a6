"""Phase 2, the choice: which blocks are replayed as a segment in which window between nodes.

Blocks are served by the next window after their backward; those that it has no room for, by later
ones. Among the blocks of a window the choice is made at once: giving the first block the segment of
the largest gain may cost the others their memory or time. Where windows are short and memory is
plenty, a block may do better with its operators deferred one by one (two units of compute instead
of three): such blocks are left to phase 3, and the time and memory that they need with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .segments import Candidate
from .timeline import Account, Stretch, Timeline

MOST_SEGMENTS = 4
"""Segments of one block; more than one only where collectives cut it."""

MOST_WAITING = 64
"""Blocks of earlier windows that a window considers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Singly:
    """A block's uncovered operators, deferred one by one: an estimate.

    Attributes:
        net: Seconds that it takes off the critical path.
        check: Seconds in the window.
        held: Bytes.
        covers: The operators, as bits by number.
    """

    net: float
    check: float
    held: int
    covers: int


@dataclasses.dataclass(slots=True)
class Place:
    """A block in the step, and the segments it got: (candidate, ordinal of the window)."""

    stretch: Stretch
    covered: int = 0
    segments: list[tuple[Candidate, int]] = dataclasses.field(default_factory=list)
    singly: bool = False


Shape = tuple[int, ...]


class Coarse:
    """Chooses segments for all blocks of a step.

    Args:
        timeline: The step.
        account: Memory; what segments hold is taken from it.
        room: Seconds left in each window, by ordinal; what segments need is taken from it.
        candidates: Per kind of block (its templates).
        singly: The alternative per kind of block; empty: segments only.
    """

    def __init__(
        self,
        timeline: Timeline,
        account: Account,
        room: list[float],
        candidates: Mapping[Shape, Sequence[Candidate]],
        singly: Mapping[Shape, Singly],
    ) -> None:
        self._timeline = timeline
        self._account = account
        self._room = room
        self._candidates = candidates
        self._singly = singly
        self._options: dict[tuple[Shape, int], list[Candidate]] = {}
        self._mixes: dict[tuple, list[tuple[Candidate | Singly, int]]] = {}
        self._promised: list[tuple[int, int, int, int, float]] = []
        self.places: list[Place] = []

    def run(self) -> list[Place]:
        """The blocks, in order, with their segments."""
        timeline = self._timeline
        ends = {stretch.last: stretch for stretch in timeline.stretches}
        group: list[Place] = []
        waiting: list[Place] = []
        for step in range(len(timeline.at)):
            if timeline.drains[step]:
                group, waiting = [], []
            if step in ends:
                place = Place(ends[step])
                self.places.append(place)
                if self._candidates.get(place.stretch.templates):
                    group.append(place)
            for ordinal in timeline.at[step]:
                slot = timeline.slots[ordinal]
                if not slot.standalone or slot.window.kind != "inter":
                    continue
                self._serve(ordinal, group)
                waiting = [p for p in waiting if not p.segments and not p.singly]
                if waiting:
                    self._serve(ordinal, waiting[-MOST_WAITING:])
                waiting = (waiting + group)[-MOST_WAITING:]
                group = []
        # Phase 3 shall find what was kept for it.
        for first, last, size, ordinal, seconds in self._promised:
            self._account.hold(first, last, -size)
            self._room[ordinal] += seconds
        return self.places

    def _serve(self, ordinal: int, places: list[Place]) -> None:
        for _ in range(MOST_SEGMENTS):
            alike: dict[tuple[Shape, int], list[Place]] = {}
            for place in places:
                if not place.singly and len(place.segments) < MOST_SEGMENTS:
                    alike.setdefault((place.stretch.templates, place.covered), []).append(place)
            served = [self._share(ordinal, key, some) for key, some in alike.items()]
            if not any(served):
                return

    def _share(self, ordinal: int, key: tuple[Shape, int], places: list[Place]) -> bool:
        """Gives a window's room to blocks of one kind; whether any took it."""
        options = self._options_of(key)
        room = self._room[ordinal]
        if not options or room < min(c.segment.replay for c in options):
            return False
        end = self._timeline.slots[ordinal].step
        first = places[0].stretch.first
        free = self._account.free
        budget, at_end = int(free[first : end + 1].min()), int(free[end])
        reserved = self._account.transient(end)
        mix = self._mix(key, options, len(places), room, budget, at_end, reserved)
        waiting = list(places)
        # What holds most waits least.
        for option, count in sorted(mix, key=lambda item: -_size(item[0])):
            for _ in range(count):
                place = waiting.pop()
                start = place.stretch.first
                if isinstance(option, Singly):
                    place.singly = True
                    self._account.hold(start, end, option.held)
                    self._room[ordinal] -= option.check
                    self._promised.append((start, end, option.held, ordinal, option.check))
                    continue
                segment = option.segment
                self._account.hold(start, end, segment.boundary, segment.transient)
                self._room[ordinal] -= segment.replay
                place.covered |= option.covers
                place.segments.append((option, ordinal))
        return bool(mix)

    def _options_of(self, key: tuple[Shape, int]) -> list[Candidate]:
        options = self._options.get(key)
        if options is None:
            shape, covered = key
            options = [c for c in self._candidates[shape] if not c.covers & covered]
            self._options[key] = options
        return options

    def _mix(
        self,
        key: tuple[Shape, int],
        options: Sequence[Candidate],
        count: int,
        room: float,
        budget: int,
        at_end: int,
        reserved: int,
    ) -> list[tuple[Candidate | Singly, int]]:
        """How many of `count` like blocks take which option: at most two kinds of option, which
        is what the best mix under two constraints (time, memory) needs."""
        memo = (key, count, room, budget, at_end, reserved)
        if memo in self._mixes:
            return self._mixes[memo]
        shape, covered = key
        rows: list[Candidate | Singly] = list(options)
        if shape in self._singly and not covered:
            rows.append(self._singly[shape])
        table = np.array([_row(option, reserved) for option in rows])
        net, gain, seconds, size, transient = table.T
        fits = (seconds <= room) & (size <= budget) & (size + transient <= at_end)
        if not fits.all():
            self._account.bound |= bool(((size > budget) | (size + transient > at_end)).any())
            rows = [row for row, fit in zip(rows, fits) if fit]
            net, gain, seconds, size, transient = table[fits].T
        found: list[tuple[Candidate | Singly, int]] = []
        if rows:
            found = self._best_pair(rows, net, gain, seconds, size, transient, memo)
        self._mixes[memo] = found
        return found

    def _best_pair(
        self,
        rows: list[Candidate | Singly],
        net: np.ndarray,
        gain: np.ndarray,
        seconds: np.ndarray,
        size: np.ndarray,
        transient: np.ndarray,
        memo: tuple,
    ) -> list[tuple[Candidate | Singly, int]]:
        _, count, room, budget, at_end, _ = memo
        a, b = np.triu_indices(len(rows))
        numbers = np.arange(count + 1)
        first = numbers[None, :]  # how many blocks take option a; the second takes what is left
        time_left = room - first * seconds[a][:, None]
        largest = np.maximum(transient[a], transient[b])[:, None]
        bytes_left = np.minimum(budget, at_end - largest) - first * size[a][:, None]
        per_time = np.maximum(seconds[b], 1e-12)[:, None]
        per_byte = np.maximum(size[b], 1)[:, None]
        by_time, by_memory = np.floor(time_left / per_time), np.floor(bytes_left / per_byte)
        second = np.minimum(count - first, np.minimum(by_time, by_memory))
        valid = (time_left >= 0) & (bytes_left >= 0)
        second = np.where(valid, np.maximum(second, 0), 0)
        saved = first * net[a][:, None] + second * net[b][:, None]
        gained = first * gain[a][:, None] + second * gain[b][:, None]
        # Equal times off the critical path: the one with the larger gain repeats less.
        score = np.where(valid, saved * (1 + 1e-6) + 1e-6 * gained, -1.0)
        short_of_memory = by_memory < np.minimum(count - first, by_time)
        self._account.bound |= bool((valid & short_of_memory).any())
        pair, number = np.unravel_index(int(score.argmax()), score.shape)
        picks = [
            (rows[a[pair]], int(number)),
            (rows[b[pair]], int(second[pair, number])),
        ]
        return [(option, n) for option, n in picks if n]


def _size(option: Candidate | Singly) -> int:
    return option.held if isinstance(option, Singly) else option.segment.boundary


def _row(option: Candidate | Singly, reserved: int) -> tuple[float, float, float, int, int]:
    if isinstance(option, Singly):
        return option.net, option.net, option.check, option.held, 0
    segment = option.segment
    transient = max(0, segment.transient - reserved)
    return option.worth, segment.gain, segment.replay, segment.boundary, transient
