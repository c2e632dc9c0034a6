"""Phase 2, the shapes: candidate segments (AGC) of a block, from its data flow.

A candidate takes one range of operators of each region of the block, typically of the recompute and
of the backward that uses it. Never across a collective: its result would have to be communicated
again, so the range ends before it and the result is held as part of another segment's boundary.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from .blocks import Block
from .plan import Segment
from .profile import Costs

MOST_CANDIDATES = 4096
"""Candidates that are looked at for a block; beyond, ranges begin and end where little is alive."""

KEPT_PER_OCTAVE = 3
"""Candidates kept among those with about the same boundary."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A segment and what it covers.

    Attributes:
        covers: Operators whose check it takes over, as bits of an integer by their number.
        replays: All operators in it, likewise.
        net: Seconds that it takes off the critical path, recording paid.
        worth: The same, with the fingerprints of P-DMR that it makes needless.
    """

    segment: Segment
    covers: int
    replays: int
    net: float
    worth: float


def candidates(block: Block, costs: Costs) -> list[Candidate]:
    """Candidates worth considering, the largest gain first; none is worse than another in all of
    saved time, gain, time of the replay, and memory."""
    if not block.operators or all(a is not None for a in block.assigned):
        return []
    members = _enumerate(block)
    figures = _weigh(block, members, costs)
    found = []
    for index in _worth_keeping(figures, _pieces(block, members)):
        numbers = np.flatnonzero(members[index]).tolist()
        covered = [n for n in numbers if block.assigned[n] is None]
        segment = Segment(
            parts=block.parts(numbers),
            operators=len(numbers),
            boundary=int(figures.boundary[index]),
            transient=block.transient(numbers),
            replay=float(figures.replay[index]),
            saved=float(figures.saved[index]),
            gain=float(figures.gain[index]),
        )
        found.append(
            Candidate(
                segment,
                _bits(covered),
                _bits(numbers),
                float(figures.net[index]),
                float(figures.worth[index]),
            )
        )
    return sorted(found, key=lambda c: (-c.segment.gain, c.segment.boundary))


def _bits(numbers: list[int]) -> int:
    return sum(1 << number for number in numbers)


def _enumerate(block: Block) -> np.ndarray:
    """Which operators each candidate has: bool, [candidates, operators]."""
    most = max(3, int(MOST_CANDIDATES ** (1 / len(block.regions))) - 1)
    masks = []
    for region in block.regions:
        ranges = _ranges(block, region, most)
        mask = np.zeros((len(ranges) + 1, len(region)), dtype=bool)  # the last: nothing of it
        for row, (start, stop) in enumerate(ranges):
            mask[row, start:stop] = True
        masks.append(mask)
    picks = np.array(list(itertools.product(*(range(len(mask)) for mask in masks))))
    members = np.concatenate([mask[picks[:, i]] for i, mask in enumerate(masks)], axis=1)
    for number, operator in enumerate(block.operators):
        if operator.mutating:
            # A replay must not write what training uses: only values that it makes itself.
            own = members[:, number]
            for value in block.overwrites[number] or (-1,):
                inside = 0 <= value < len(block.operators)
                own = own & members[:, value] if inside else np.zeros_like(own)
            members[:, number] = own
    return np.unique(members, axis=0)


def _ranges(block: Block, region: range, most: int) -> list[tuple[int, int]]:
    """Ranges of ordinals without a collective, at most about `most`."""
    pieces, start = [], 0
    for ordinal, number in enumerate([*region, None]):
        if number is None or block.operators[number].collective:
            if ordinal > start:
                pieces.append([start, ordinal])
            start = ordinal + 1
    total = len(pieces)
    for cut in _waists(block, region):
        for cuts in pieces:
            if cuts[0] < cut < cuts[-1] and total + len(cuts) <= most:
                cuts.append(cut)
                cuts.sort()
                total += len(cuts) - 1
    return [pair for cuts in pieces for pair in itertools.combinations(cuts, 2)]


def _waists(block: Block, region: range) -> list[int]:
    """Places to cut a region, those first across which the fewest bytes are alive."""
    alive = np.zeros(len(region) + 1, dtype=np.int64)
    last_use: dict[int, int] = {}
    for number in region:
        for value in block.inputs[number]:
            last_use[value] = number
    for value, number in last_use.items():
        if value in region:
            alive[value - region.start + 1 : number - region.start + 1] += block.sizes[value]
    return np.argsort(alive[1:-1], kind="stable").__add__(1).tolist()


@dataclasses.dataclass(slots=True)
class _Figures:
    """Arrays with one value a candidate."""

    saved: np.ndarray
    gain: np.ndarray
    net: np.ndarray
    worth: np.ndarray
    replay: np.ndarray
    boundary: np.ndarray


def _weigh(block: Block, members: np.ndarray, costs: Costs) -> _Figures:
    count = len(block.operators)
    sizes = np.array(block.sizes, dtype=np.float64)
    reads = np.zeros((count, len(sizes)), dtype=np.float32)
    for number, values in enumerate(block.inputs):
        reads[number, list(values)] = 1
    open_ = np.array([assigned is None for assigned in block.assigned])
    seconds = np.array([operator.seconds for operator in block.operators])
    checks = np.array([operator.check_seconds for operator in block.operators])
    weights = members.astype(np.float32)
    produced = np.zeros((len(members), len(sizes)), dtype=bool)
    produced[:, :count] = members
    boundary = ((weights @ reads > 0) & ~produced) @ sizes
    read_outside = (1 - weights) @ reads[:, :count] > 0
    never_read = ~reads[:, :count].any(axis=0)
    leaving = (members & (read_outside | never_read)) @ sizes[:count]
    saved = members @ (checks * open_)
    covered_before = members @ (seconds * ~open_)
    recording = _recording(block, members, costs) + leaving * costs.fingerprint
    return _Figures(
        saved=saved,
        gain=saved - covered_before - recording,
        net=saved - recording,
        worth=saved - recording + _needless(block, members, costs),
        replay=members @ seconds,
        boundary=boundary,
    )


def _recording(block: Block, members: np.ndarray, costs: Costs) -> np.ndarray:
    """Seconds to record each candidate, fingerprints left out."""
    if not block.has_recompute:
        # Outside of checkpointed blocks a region is recorded as a whole or not at all.
        recorded = np.zeros(len(members))
        for region in block.regions:
            recorded += len(region) * members[:, region].any(axis=1)
        return recorded * costs.record
    bound = costs.record if costs.bound is None else costs.bound
    return members.sum(axis=1) * np.where(_whole(block, members), bound, costs.record)


def _whole(block: Block, members: np.ndarray) -> np.ndarray:
    """Which candidates replay the whole recompute."""
    whole = np.zeros(len(members), dtype=bool)
    for number, phase in enumerate(block.phases):
        compared = block.compared(number)
        if phase == "recompute" and compared:
            whole |= members[:, compared].all(axis=1)
    return whole


def _needless(block: Block, members: np.ndarray, costs: Costs) -> np.ndarray:
    """Seconds of fingerprints, in the forward and in the recompute, that each candidate saves: all
    but the output's, where the whole recompute is replayed."""
    saved = np.zeros(len(members))
    for number, phase in enumerate(block.phases):
        compared = block.compared(number)
        if phase == "recompute" and compared:
            sizes = [block.operators[operator].written for operator in compared]
            whole = members[:, compared].all(axis=1)
            each = costs.fingerprint * sum(sizes[:-1]) + costs.observe * (len(compared) - 1)
            saved += 2 * each * whole
    return saved


def _pieces(block: Block, members: np.ndarray) -> np.ndarray:
    """Numbers the candidates by the stretches between collectives in which they cover anything.

    Only candidates of the same stretches take each other's place: those of others may be had too.
    """
    open_ = np.array([assigned is None for assigned in block.assigned])
    walls = np.array([operator.collective for operator in block.operators])
    walls[[region.start for region in block.regions if region]] = True
    starts = np.unique([0, *np.flatnonzero(walls)])
    touched = np.logical_or.reduceat(members & open_, starts, axis=1)
    return np.unique(touched, axis=0, return_inverse=True)[1].reshape(-1)


def _worth_keeping(figures: _Figures, pieces: np.ndarray) -> list[int]:
    return [
        index
        for piece in range(int(pieces.max()) + 1)
        for index in _best_of(figures, np.flatnonzero(pieces == piece))
    ]


def _best_of(figures: _Figures, among: np.ndarray) -> list[int]:
    order = among[np.lexsort((figures.boundary[among], -figures.gain[among]))]
    order = order[(figures.gain[order] > 0) & (figures.net[order] > 0)]
    criteria = np.stack([figures.worth, figures.gain, -figures.replay, -figures.boundary], axis=1)
    kept: list[int] = []
    best = np.empty((len(order), 4))
    for index in order.tolist():
        if kept and (best[: len(kept)] >= criteria[index]).all(axis=1).any():
            continue
        best[len(kept)] = criteria[index]
        kept.append(index)
    octaves: dict[int, list[int]] = {}
    for index in kept:
        octaves.setdefault(int(figures.boundary[index]).bit_length(), []).append(index)
    few: set[int] = set()
    for group in octaves.values():
        few |= set(sorted(group, key=lambda i: -figures.worth[i])[:KEPT_PER_OCTAVE])
        few |= set(
            sorted(group, key=lambda i: -figures.worth[i] / max(figures.replay[i], 1e-12))[:2]
        )
    return [index for index in kept if index in few]
