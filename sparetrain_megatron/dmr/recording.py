"""The engine's part in deferral: opening and closing tapes, bound blocks, windows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _pop_mode_temporarily

from .fingerprint import Fingerprint, fingerprint
from .operators import Kind, Operator
from .own_work import own_work
from .tape import Source, Tape
from .template import Template

BOUND = Operator("bound", Kind.PURE)


_NOTHING = contextlib.nullcontext()


class _Seen:
    """Entered and left for every parameter of a bound block, so it is no generator."""

    __slots__ = ("_engine", "_executor")

    def __init__(self, engine: Recording) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        engine = self._engine
        engine._unseen = False
        engine._interceptor.__enter__()
        if engine.set_executor is not None:
            self._executor = engine.set_executor(engine)

    def __exit__(self, *error: Any) -> None:
        engine = self._engine
        if engine.set_executor is not None:
            engine.set_executor(self._executor)
        engine._interceptor.__exit__(*error)
        engine._unseen = True


class Recording:
    """Methods of :class:`~sparetrain_megatron.dmr.engine.Engine`, in a file of their own."""

    tape: Tape | None
    passes: list[Any]
    closed: list[Tape]
    learns: bool
    binding: dict[Source, Fingerprint] | None
    waited: float
    rest: Callable[[], bool] | None
    beside: bool
    _unseen: bool
    _window_opened: float

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The engine's own attributes."""

    def open_tape(self) -> None:
        """Operators are recorded from now on, and executed again in a window."""
        self.close_tape()
        self.tape = Tape(self.position, self.deferred.constants)

    def begin_rest(self, chunk: int, microbatch: int, phase: str) -> None:
        """From here on what lies outside of blocks waits for a window where the strategy says so.

        Args:
            chunk: The rank's model chunk.
            microbatch: Whose forward or backward it is.
            phase: Which of the two.
        """

        def deferred() -> bool:
            return self.strategy.defers_rest(chunk, microbatch, phase, self.position.layer)

        self.close_tape()
        self.rest = deferred
        if deferred():
            self.open_tape()

    @contextlib.contextmanager
    def deferring_rest(self, chunk: int, microbatch: int, phase: str) -> Iterator[None]:
        """As :meth:`begin_rest`, for what runs inside."""
        self.begin_rest(chunk, microbatch, phase)
        try:
            yield
        finally:
            self.close_tape()
            self.rest = None

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
    def between_tapes(self) -> Iterator[None]:
        """What runs inside is no part of the open tape, which ends; after it another begins."""
        before = self.tape is not None
        self.close_tape()
        try:
            yield
        finally:
            self.close_tape()
            if self.rest() if self.rest is not None else before:
                self.open_tape()

    @contextlib.contextmanager
    def beside_tape(self, leaving: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """What runs inside is checked by itself, and the open tape goes on after it.

        For what reads and writes nothing of the tape but values that leave it here, such as the
        gathering of parameters and the reduction of gradients.

        Args:
            leaving: These values; what runs inside may write them.
        """
        if self.tape is not None:
            self.tape.bindable = False
            # Not `all`, which would stop at the first that makes the tape end.
            if False in [self.tape.release(tensor) for tensor in leaving]:
                self.cut_tape()
        before = self.tape, self.passes, self.beside
        self.tape, self.passes, self.beside = None, [], True
        try:
            yield
        finally:
            self.tape, self.passes, self.beside = before

    @own_work
    def frees(self, tensors: Sequence[torch.Tensor]) -> None:
        """The framework takes the memory of these away under everybody who holds them.

        Tapes that read them, pending ones and the open one, get private copies.
        """
        self.deferred.before_write(tensors)
        if self.tape is not None:
            for tensor in tensors:
                self.tape.forget(tensor)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Operators run without the interceptor: those of a bound block."""
        with _pop_mode_temporarily(), self._compiled_graphs(False):
            self._unseen = True
            try:
                yield
            finally:
                self._unseen = False

    def seen(self) -> contextlib.AbstractContextManager[Any]:
        """The interceptor takes part again, for a moment inside of :meth:`unseen`."""
        return _Seen(self) if self._unseen else _NOTHING

    @own_work
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

    @own_work
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

    @own_work
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
                if self.learns:
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
