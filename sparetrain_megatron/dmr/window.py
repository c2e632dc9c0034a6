"""Windows: time in which this rank waits for communication, given to pending second executions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine


class Waiter:
    """Tells when requests have completed where only waiting for them can tell.

    On gloo, ``is_completed`` of a send or receive never turns true before ``wait``; a thread waits
    (it releases the interpreter's lock) and the window is served meanwhile.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Sequence[Any], threading.Event, list[Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._loop, name="sparetrain-waiter", daemon=True).start()

    def _loop(self) -> None:
        while True:
            requests, done, errors = self._requests.get()
            try:
                for request in requests:
                    request.wait()
            except BaseException as error:  # a transport error belongs to the caller's thread
                errors.append(error)
            finally:
                done.set()

    def start(self, requests: Sequence[Any]) -> tuple[threading.Event, Callable[[], None]]:
        """Begins to wait.

        Returns:
            An event that is set on completion, and a function that waits for it and raises what
            went wrong.
        """
        done, errors = threading.Event(), []  # type: ignore[var-annotated]
        self._requests.put((requests, done, errors))

        def finish() -> None:
            done.wait()
            if errors:
                raise errors[0]

        return done, finish


class Windows:
    """Serves windows that only waiting can tell the end of.

    Args:
        engine: This rank's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiter: Waiter | None = None

    def wait(self, requests: Sequence[Any], group: Any, name: str) -> None:
        """Waits until all requests have completed, and serves the window meanwhile.

        Args:
            requests: What has a ``wait``.
            group: Whose communication it is.
            name: ``recv_prev``, ``all_gather``, …
        """
        if not requests:
            return
        engine = self._engine
        engine.window_opens("inter" if engine.collectives.spans_hosts(group) else "intra", name)
        if not engine.deferred:
            for request in requests:
                request.wait()
        else:
            self._waiter = self._waiter or Waiter()
            done, finish = self._waiter.start(requests)
            engine.deferred.serve(done.is_set)
            finish()
        engine.window_closes()
