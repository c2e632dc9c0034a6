"""The engine's part in deferral: opening and closing tapes, bound blocks, windows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _pop_mode_temporarily

from .fingerprint import Fingerprint, fingerprint
from .operators import Kind, Operator
from .tape import Source, Tape
from .template import Template

BOUND = Operator("bound", Kind.PURE)


class Recording:
    """Methods of :class:`~sparetrain_megatron.dmr.engine.Engine`, in a file of their own."""

    tape: Tape | None
    closed: list[Tape]
    binding: dict[Source, Fingerprint] | None
    waited: float
    _unseen: bool
    _window_opened: float

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The engine's own attributes."""

    def open_tape(self) -> None:
        """Operators are recorded from now on, and executed again in a window."""
        self.close_tape()
        self.tape = Tape(self.position, self.deferred.constants)

    def cut_tape(self) -> None:
        """Ends the open tape, if there is one, and begins the next."""
        if self.tape is None:
            return
        self.tape.bindable = False
        if self.tape.entries:
            self.close_tape()
            self.tape = Tape(self.position, self.deferred.constants)
            self.tape.bindable = False

    def varies(self) -> None:
        """What runs here is another thing each time: its region is never bound to a template."""
        if self.tape is not None:
            self.tape.bindable = False

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Operators run without the interceptor: those of a bound block."""
        with _pop_mode_temporarily(), self._compiled_graphs(False):
            self._unseen = True
            try:
                yield
            finally:
                self._unseen = False

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """The interceptor takes part again, for a moment inside of :meth:`unseen`."""
        if not self._unseen:
            yield
            return
        self._unseen = False
        with self._interceptor, self._compiled_graphs(True):
            try:
                yield
            finally:
                self._unseen = True

    def push_bound(
        self,
        template: Template,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        digests: dict[Source, Fingerprint],
        returned: Sequence[torch.Tensor],
    ) -> None:
        """A block has run unseen: its replay waits for a window.

        Args:
            digests: What has left it so far.
            returned: Gradients that it gives back.
        """
        start = time.perf_counter()
        for i, tensor in enumerate(returned):
            digests["result", i] = fingerprint(tensor)
        tape = template.bind(self.position, inputs, gradients, digests)
        if tape is None:
            mismatch = self.reporter("segment", "deferred")()
            mismatch.wrong = "software"
            mismatch.note = "a gradient that the block's template has did not appear"
            self.ledger.record(mismatch)
        else:
            self.deferred.push(tape)
            self._counts["deferred"][BOUND] += tape.computing
        self.statistics.seconds_in_checks += time.perf_counter() - start

    def gradient_ready(self, address: int, gradient: torch.Tensor) -> None:
        """A parameter's gradient goes into its buffer: it leaves the block that is being bound.

        Args:
            address: Of the parameter's place in the buffer.
        """
        if self.binding is not None:
            self.binding["accumulate", address] = fingerprint(gradient)

    def within_budget(self, tape: Tape) -> bool:
        """Makes room for what the open tape holds; ends it, and deferral of its region, if it
        can't.

        Called while recording, where there is a budget.
        """
        deferred = self.deferred
        while deferred and not deferred.fits(tape):
            deferred.demote()
        if deferred.fits(tape):
            return True
        tape.bindable = False
        self.close_tape()
        deferred.drain("demoted")
        return False

    def close_tape(self, returned: Sequence[torch.Tensor] = ()) -> None:
        """Ends recording.

        Args:
            returned: What the recorded region gives back.
        """
        tape, self.tape = self.tape, None
        if tape is not None and tape.entries:
            start = time.perf_counter()
            # The layer is known when its module has run.
            tape.position.layer = self.position.layer
            with torch.no_grad():
                tape.close(returned)
                self.closed.append(tape)
                self.deferred.push(tape)
            self.statistics.seconds_in_checks += time.perf_counter() - start

    def window_opens(self, kind: str, name: str) -> None:
        """This rank begins to wait for communication.

        Args:
            kind: ``inter`` or ``intra``: whether it crosses hosts.
            name: ``all_reduce``, ``recv_prev``, …
        """
        self._window_opened = time.perf_counter()
        if self.observer is not None:
            self.observer.window_opens(kind, name)

    def window_closes(self) -> None:
        """The wait is over."""
        self.waited += time.perf_counter() - self._window_opened
        if self.observer is not None:
            self.observer.window_closes()
