"""Progress of a long command, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as Bar

from .terminal import say

SECONDS = 10.0
"""From one line to the next, where there is no terminal."""


class Progress:
    """Counts what has been done; may be advanced by several threads.

    Args:
        what: What is counted, in plural: `faults`.
        total: How many there are.
        stream: Where lines go; standard error by default.
        seconds: From one line to the next.
    """

    def __init__(
        self, what: str, total: int, stream: TextIO | None = None, seconds: float = SECONDS
    ) -> None:
        self._what = what
        self._total = total
        self._stream = stream
        self._seconds = seconds
        self._start = self._said = time.monotonic()
        self._lock = threading.Lock()
        self.done = 0

    def advance(self) -> None:
        """One more is done."""
        with self._lock:
            self.done += 1
            now = time.monotonic()
            if now - self._said >= self._seconds:
                self._said = now
                self._line(now)

    def _line(self, now: float) -> None:
        passed = now - self._start
        say(f"{self.done:,} of {self._total:,} {self._what}, {passed:,.0f} s", self._stream)


class _OnTerminal(Progress):
    def __init__(self, what: str, total: int, bar: Bar) -> None:
        super().__init__(what, total)
        self._bar = bar
        self._task = bar.add_task(what, total=total)

    def advance(self) -> None:
        with self._lock:
            self.done += 1
            self._bar.advance(self._task)


@contextmanager
def progress(what: str, total: int) -> Generator[Progress]:
    """Shows progress while the block runs; short commands show nothing off a terminal."""
    if not sys.stderr.isatty():
        yield Progress(what, total)
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        yield _OnTerminal(what, total, bar)
