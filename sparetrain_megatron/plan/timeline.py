"""A profile spread out for the planners: every window, every block, and the memory account."""

from __future__ import annotations

import dataclasses

import numpy as np

from .plan import WindowUse
from .profile import Profile, Run, Window


@dataclasses.dataclass(slots=True, frozen=True)
class Slot:
    """One window of the iteration.

    Attributes:
        step: The profile's step it is, or is in.
        capacity: Seconds that may be planned.
        standalone: It is a step, not inside a region.
    """

    window: Window
    ordinal: int
    nth: int
    step: int
    capacity: float
    standalone: bool

    def used(self, seconds: float) -> WindowUse:
        """As part of a plan."""
        window = self.window
        return WindowUse(
            self.ordinal,
            window.kind,
            window.what,
            self.nth,
            window.seconds,
            seconds,
            window.dynamic,
        )


@dataclasses.dataclass(slots=True, frozen=True)
class Stretch:
    """Consecutive regions of one microbatch and layer: steps `first` to `last`."""

    templates: tuple[int, ...]
    first: int
    last: int


class Timeline:
    """The step in order.

    Attributes:
        slots: All windows, by ordinal.
        at: For each step the ordinals of its windows.
        drains: For each step whether the queue must be empty before it.
        stretches: All blocks, in order.
    """

    def __init__(self, profile: Profile, window_use: float) -> None:
        self.profile = profile
        self.slots: list[Slot] = []
        self.at: list[range] = []
        self.drains: list[bool] = []
        self.stretches: list[Stretch] = []
        counts: dict[str, int] = {}
        open_: list[int] = []
        place: object = None
        for index, step in enumerate(profile.steps):
            if isinstance(step, Run):
                template = profile.templates[step.template]
                windows: tuple[Window, ...] = template.windows
                drains = step.drains or template.phase in ("clip", "optimizer")
                here = (step.microbatch, step.layer)
                if here != place or drains:
                    self._close(open_, index)
                    place = here
                open_.append(step.template)
            else:
                windows, drains = (step,), False
                self._close(open_, index)
                place = None
            start = len(self.slots)
            for window in windows:
                nth = counts.get(window.what, 0)
                counts[window.what] = nth + 1
                capacity = window.seconds * window_use
                self.slots.append(
                    Slot(
                        window,
                        len(self.slots),
                        nth,
                        index,
                        capacity,
                        not isinstance(step, Run),
                    )
                )
            self.at.append(range(start, len(self.slots)))
            self.drains.append(drains)
        self._close(open_, len(profile.steps))

    def _close(self, open_: list[int], end: int) -> None:
        if open_:
            self.stretches.append(Stretch(tuple(open_), end - len(open_), end - 1))
            open_.clear()


class Account:
    """Bytes that may still be held at each step.

    Attributes:
        free: What is left, in bytes, by step; a replay's transient is taken off at its window.
        bound: Whether memory ever decided anything.
    """

    def __init__(self, profile: Profile, budget: int) -> None:
        allowed = np.full(len(profile.steps), budget, dtype=np.int64)
        memory = profile.memory
        if memory.capacity:
            in_use = np.array(memory.in_use or [memory.peak] * len(profile.steps), dtype=np.int64)
            allowed = np.minimum(allowed, np.maximum(memory.capacity - in_use, 0))
        self.free = allowed
        self._allowed = allowed.copy()
        self._transient = np.zeros_like(allowed)
        self.bound = False

    def transient(self, step: int) -> int:
        """What is set aside for replays at a step."""
        return int(self._transient[step])

    def hold(self, first: int, last: int, size: int, transient: int = 0) -> None:
        """Takes `size` from `first` to `last`, and a replay's transient at `last`."""
        self.free[first : last + 1] -= size
        more = transient - self._transient[last]
        if more > 0:
            self._transient[last] = transient
            self.free[last] -= more

    @property
    def taken(self) -> np.ndarray:
        """What is held at each step, replays' transients included."""
        return self._allowed - self.free

    @property
    def peak(self) -> int:
        """The most that is taken at any step."""
        return int(self.taken.max(initial=0))
