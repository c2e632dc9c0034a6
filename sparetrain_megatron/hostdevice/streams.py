"""Streams and events of a device that has only one, synchronous queue: the CPU itself.

Work is finished when the call that issued it returns, so waiting never has anything to do. Events
still take the time, because Megatron's straggler detector reads ``elapsed_time``.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Notes the present time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    cuda_stream = 0
    stream_id = 0
    priority = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority, as on an NVIDIA device."""
        return (0, -1)

    def wait_stream(self, stream: Any) -> None:
        """Returns at once."""

    def wait_event(self, event: Any) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Records ``event``, or a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event


class NoContext:
    """Stands in for ``torch.cuda.stream``, ``.device`` and others that have nothing to switch."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> NoContext:
        return self

    def __exit__(self, *_exc: Any) -> None:
        pass


CURRENT_STREAM = Stream()
