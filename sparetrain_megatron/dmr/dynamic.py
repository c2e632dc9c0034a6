"""What a window takes of the queue, decided while the program runs.

A *dynamic* window (the all-to-all of experts, a pipeline's bubble) is as long as the slowest peer
makes it: pending second executions go into it one operator at a time until it closes. A *static*
one (a collective of tensor parallelism) is about as long each time: the tapes that fit it best go
first, so that it ends with as many of them done, and their memory free, as it has room for. Either
is left at the first operator that ends after it has closed.

An operator that would probably still run when the window closes is not begun: it would keep the
peers waiting, who wait for this rank in the next collective. How long a window will be open is told
by the bytes that cross and by how long its like have been open before; see :func:`in_time`.

What comes out of operators as they run (how often, of which sizes) need not be known before: this
is how the experts' operators are checked, which are others in every iteration.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

EXACT = 10
"""Among up to so many pending tapes the best subset is found by looking at all."""

REMEMBERED = 9
"""Windows of a kind whose length is remembered."""

LIKE = 32
"""Windows whose lengths tell how long one of their like will be open."""

RISK = 4
"""An operator begins if at most one in so many of a window's like closed while it would run."""

STEADY = 0.25
"""A window is static while half of those before it were within this share of their median."""

_SLACK = 1 + 1e-9  # sums of the same seconds in another order


class Windows:
    """How long the windows of this rank have been, by what they wait for."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._paces: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=LIKE))

    def room(self, key: Hashable) -> float | None:
        """Seconds that a window will be open; None for a dynamic one, or one not known yet.

        Args:
            key: What it waits for: windows with the same key move as much between the same ranks.
        """
        lengths = self._lengths.get(key)
        if lengths is None or len(lengths) < 3:
            return None
        low, middle, high = statistics.quantiles(lengths, n=4, method="inclusive")
        return low if high - low <= STEADY * middle else None

    def like(self, key: Hashable, size: int) -> list[float]:
        """How many seconds windows like this one have been open, in order; none before three have.

        Args:
            key: What it waits for: windows with the same key move their bytes equally fast.
            size: Bytes that cross; lengths are those of windows in which as many do.
        """
        paces = self._paces.get(key, ())
        return sorted(size * pace for pace in paces) if len(paces) >= 3 else []

    def closed(self, key: Hashable, seconds: float) -> None:
        """A window has closed after so many seconds."""
        self._lengths[key].append(seconds)

    def crossed(self, key: Hashable, size: int, seconds: float) -> None:
        """So many bytes have crossed in so many seconds."""
        if size:
            self._paces[key].append(seconds / size)


def in_time(seconds: float, open_for: float, like: Sequence[float]) -> bool:
    """Whether to begin an operator in a window.

    Args:
        seconds: How long it takes.
        open_for: How long the window has been open.
        like: How long its like have been, in order; not empty. Where it is open for longer than any
            of them, a peer is late, and the longer it has been, the longer it will probably be.
    """
    first = bisect.bisect_right(like, open_for)
    left = len(like) - first
    if not left:
        return seconds <= open_for - like[-1]
    closing = bisect.bisect_left(like, open_for + seconds) - first
    return closing * RISK <= left


def best_fit(seconds: Sequence[float], room: float) -> list[int]:
    """The subset that fills a static window best.

    Args:
        seconds: How long each of the pending takes.
        room: How long the window is.

    Returns:
        Indices of those to take, in order. Their sum does not exceed ``room``; up to ``EXACT``
        pending no other subset's is larger, beyond that the longest are taken first.
    """
    limit = room * _SLACK
    if sum(seconds) <= limit:
        return list(range(len(seconds)))
    if len(seconds) <= EXACT:
        sums: dict[float, tuple[int, ...]] = {0.0: ()}
        for index, one in enumerate(seconds):
            for total, taken in list(sums.items()):
                if total + one <= limit:
                    sums.setdefault(total + one, (*taken, index))
        return list(sums[max(sums)])
    longest = []
    for index in sorted(range(len(seconds)), key=lambda i: -seconds[i]):
        if seconds[index] <= limit:
            longest.append(index)
            limit -= seconds[index]
    return sorted(longest)
