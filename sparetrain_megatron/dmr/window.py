"""Windows: time in which this rank waits for communication, given to pending second executions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any


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
