"""What one rank does when: compute, windows, checkers; and where the checkers' time goes.

Hangs itself on the engine from outside, so that a training run without it pays nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


class Recorder:
    """Measures of one rank, for one step at a time.

    ``seconds_in_checks`` of the engine is split by what was running: ``naive`` (operators executed
    twice at once), ``optimizer`` (its step, executed twice), ``recording`` (of tapes),
    ``closing`` (of tapes, with the fingerprints of what leaves them), ``drained`` (replays outside
    of windows), ``verdict`` (agreement of the ranks), ``fingerprints`` (piggyback), ``other``.
    """

    def __init__(self, protection: Any) -> None:
        from sparetrain_megatron.dmr import optimizer_step
        from sparetrain_megatron.dmr.tape import Tape

        self._engine = engine = protection.engine
        self._statistics = engine.statistics
        self._stack = ["other"]
        self._seen = 0.0
        self._tapes: dict[Any, int] = {}
        self.detailed = self.protected = False
        self.reset()
        self._wrap_count(engine)
        self._wrap(engine, "close_tape", "closing")
        self._wrap(engine, "verdict", "verdict")
        self._wrap(engine.deferred, "drain", "drained")
        self._wrap(optimizer_step.CheckedStep, "_one", "optimizer")
        self._wrap_serve(engine.deferred)
        self._wrap_push(engine.deferred)
        self._wrap_replay(Tape)
        self._wrap_windows(engine, protection._pipeline)
        self._wrap_collectives()

    def reset(self) -> None:
        """A step begins."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.waited_in_verdicts = 0.0
        self.in_windows = self.cpu_in_windows = 0.0
        self.peak_held = 0
        self.windows: list[tuple[float, float, float]] = []  # opened, completed, left
        self.by_window: dict[str, float] = defaultdict(float)  # replays, by what was waited for
        self._what = ""
        self.longest_overrun = 0.0
        self.inside: list[Interval] = []
        self.outside: list[Interval] = []
        self.verdicts: list[Interval] = []
        self.operators: dict[str, float] = defaultdict(float)
        self.work: list[list[float]] = []  # when it was there to be done, its seconds
        self._tapes = {}
        self._opened = self._completed = 0.0
        self._seen = self._statistics.seconds_in_checks

    def details(self, start: float) -> dict[str, Any]:
        """The recorded step, in seconds from ``start``."""

        def moved(intervals: Sequence[Sequence[float]]) -> list[list[float]]:
            return [[round(t - start, 6) for t in interval] for interval in intervals]

        return {
            "windows": moved(self.windows),
            "inside": moved(self.inside),
            "outside": moved(union(self.outside)),
            "verdicts": moved(self.verdicts),
            "operators": dict(sorted(self.operators.items(), key=lambda item: -item[1])),
            "work": [[round(t - start, 6), round(s, 6)] for t, s in self.work],
        }

    # --- hooks -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Gives the seconds since the last time to what was running."""
        now = self._statistics.seconds_in_checks
        self.seconds[self._stack[-1]] += now - self._seen
        self._seen = now

    @contextmanager
    def _running(self, category: str) -> Iterator[None]:
        self.flush()
        self._stack.append(category)
        checks = self._statistics.seconds_in_checks
        start, cpu = time.perf_counter(), time.thread_time() - self.cpu_in_windows
        try:
            yield
        finally:
            self.flush()
            self._stack.pop()
            end = time.perf_counter()
            if category == "verdict":
                # Ranks wait for each other here; unprotected, they do in the gradients' norm.
                spent = time.thread_time() - self.cpu_in_windows - cpu
                counted = self._statistics.seconds_in_checks - checks
                self.waited_in_verdicts += max(0.0, counted - spent)
                if self.detailed:
                    self.verdicts.append((start, end))
            elif self.detailed:
                # Of the optimizer's chunk one execution is the training's own.
                self.outside.append((start, start + self._statistics.seconds_in_checks - checks))

    def _wrap(self, owner: Any, name: str, category: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._running(category):
                return original(*args, **kwargs)

        setattr(owner, name, timed)

    def _wrap_count(self, engine: Any) -> None:
        original = engine.count
        names = {"deferred": "recording", "piggyback": "fingerprints"}

        def count(method: str, operator: Any, seconds: float) -> None:
            original(method, operator, seconds)
            if self._stack[-1] != "optimizer":
                self.seconds[names.get(method, method)] += seconds
                self._seen += seconds
            if self.detailed:
                now = time.perf_counter()
                self.outside.append((now - seconds, now))
                self.operators[f"{method} {operator.name} {engine.position.phase}"] += seconds

        engine.count = count

    def _wrap_serve(self, deferred: Any) -> None:
        original = deferred.serve

        def serve(closed: Any, *args: Any) -> None:
            start, cpu = time.perf_counter(), time.thread_time()
            replayed = deferred.in_windows
            open_at = [start]

            def watched() -> bool:
                over: bool = closed()
                if not over:
                    open_at[0] = time.perf_counter()
                return over

            original(watched, *args)
            end = time.perf_counter()
            # It was still open before the last operator: that one is all that can be too long.
            self.longest_overrun = max(self.longest_overrun, end - open_at[0])
            replayed = deferred.in_windows - replayed
            self.in_windows += replayed
            self.by_window[self._what] += replayed
            self.cpu_in_windows += time.thread_time() - cpu
            if self.detailed:
                self.inside.append((start, end))

        deferred.serve = serve

    def _wrap_push(self, deferred: Any) -> None:
        original = deferred.push

        def push(tape: Any) -> None:
            if self.detailed:
                self._tapes[tape] = len(self.work)
                self.work.append([time.perf_counter(), 0.0])
            original(tape)
            self.peak_held = max(self.peak_held, deferred.held_bytes)

        deferred.push = push

    def _wrap_replay(self, tape_type: Any) -> None:
        original = tape_type.replay

        def replay(tape: Any, *args: Any) -> Iterator[None]:
            operators = original(tape, *args)
            entry = self._tapes.get(tape)
            if entry is None:
                yield from operators
                return
            while True:
                start = time.perf_counter()
                try:
                    next(operators)
                except StopIteration:
                    return
                finally:
                    self.work[entry][1] += time.perf_counter() - start
                yield

        tape_type.replay = replay

    def _wrap_windows(self, engine: Any, pipeline: Any) -> None:
        opens, closes, wait = engine.window_opens, engine.window_closes, pipeline._wait

        def window_opens(*what: Any) -> None:
            self._opened = self._completed = time.perf_counter()
            self._what = what[1]
            opens(*what)

        def window_closes() -> None:
            closes()
            self.windows.append((self._opened, self._completed, time.perf_counter()))

        def waits(*what: Any) -> None:
            *what, requests = what
            wait(*what, [*requests, self] if requests else requests)

        engine.window_opens, engine.window_closes = window_opens, window_closes
        pipeline._wait = waits

    def _wrap_collectives(self) -> None:
        """Unprotected, the engine does not see that ranks wait in the gradients' norm, say."""
        import torch.distributed as dist
        from megatron.core.tensor_parallel import mappings

        for owner, name in (
            (dist, "all_reduce"),
            (dist, "broadcast"),
            (dist, "all_to_all_single"),
            (mappings, "dist_all_gather_func"),
        ):
            original = getattr(owner, name)

            def call(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                if self.protected:
                    return original(*args, **kwargs)
                start = time.perf_counter()
                result = original(*args, **kwargs)
                end = time.perf_counter()
                if end - start > 1e-4:  # a group of one waits for nobody
                    self.windows.append((start, end, end))
                return result

            setattr(owner, name, call)

    def wait(self) -> None:
        """As the last of a window's requests: when the others have completed."""
        self._completed = time.perf_counter()


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals in order, overlapping or touching ones joined."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + 1e-6:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def unhidden(windows: Sequence[Sequence[float]], work: Sequence[Sequence[float]]) -> float:
    """Seconds of work that no order of execution could have put into the windows.

    Work that arrives at a moment or later fits only into windows from then on: the largest surplus
    over all moments remains.

    Args:
        windows: (opened, completed, left), in seconds.
        work: (arrived, seconds).
    """
    events = [(w[0], -(w[1] - w[0])) for w in windows] + [(t, s) for t, s in work]
    surplus = largest = 0.0
    for _, seconds in sorted(events, reverse=True):
        surplus += seconds
        largest = max(largest, surplus)
    return largest


COLOURS = {
    "compute": "#b8c4d0",
    "waiting: windows, verdicts": "#f3ecd8",
    "checkers in windows": "#2a9d5c",
    "checkers outside": "#c8442e",
}


def draw(steps: dict[str, list[dict[str, Any]]], title: str, path: Path) -> None:
    """Draws one iteration per mode and rank.

    Args:
        steps: For each mode, for each rank: ``seconds``, and as ``details`` what
            :meth:`Recorder.details` gives.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    height = 0.9 + 1.35 * len(steps)
    figure, axes = pyplot.subplots(len(steps), 1, figsize=(12, height), sharex=True, squeeze=False)
    for axis, (mode, ranks) in zip(axes[:, 0], steps.items()):
        for rank, step in enumerate(ranks):
            bar = (len(ranks) - 1 - rank - 0.4, 0.8)
            details = step["details"]
            waits = [(w[0], w[2] - w[0]) for w in details["windows"]]
            waits += [(a, b - a) for a, b in details["verdicts"]]
            layers = {
                "compute": [(0.0, step["seconds"])],
                "waiting: windows, verdicts": waits,
                "checkers in windows": [(a, b - a) for a, b in details["inside"]],
                "checkers outside": [(a, b - a) for a, b in details["outside"]],
            }
            for name, spans in layers.items():
                axis.broken_barh(spans, bar, facecolors=COLOURS[name], linewidth=0)
        axis.set_yticks(range(len(ranks)), [f"rank {r}" for r in reversed(range(len(ranks)))])
        axis.set_title(mode, loc="left", fontsize=10)
        axis.set_frame_on(False)
    axes[-1, 0].set_xlabel("seconds of one iteration")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="upper right",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
