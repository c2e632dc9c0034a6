"""The queue of tapes whose second execution waits for a window, and what it may hold.

Soundness: before an operator writes a storage that a pending tape reads, the tape gets a private
copy; everything pending is executed before parameters change. Held memory is accounted in bytes of
storages; when a tape would exceed the budget, the oldest are executed at once ("demoted").
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .dynamic import best_fit, in_time
from .tape import Leaving, Tape

if TYPE_CHECKING:
    from .engine import Engine

_clock = time.perf_counter
_PAUSE = 1e-4
"""Seconds between two looks at a window that nothing fits into at the moment."""


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Nothing of autograd and no function or dispatch mode takes part in a replay."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


class Deferred:
    """Pending second executions of one rank.

    Args:
        engine: This rank's engine.
        budget: Bytes that pending tapes may hold; None for no limit.

    Attributes:
        held_bytes: What pending tapes hold now, constants left out.
        in_windows: Seconds of replays inside windows.
        outside: Seconds of replays outside, by reason.
        operators: Replayed operators, by where.
    """

    def __init__(self, engine: Engine, budget: int | None = None) -> None:
        self.budget = budget
        self.held_bytes = 0
        self.in_windows = 0.0
        self.outside: dict[str, float] = defaultdict(float)
        self.operators: dict[str, int] = defaultdict(int)
        self._engine = engine
        self._pending: deque[Tape] = deque()
        self._running: Iterator[None] | None = None
        self._tape: Tape | None = None
        self._found: list[Leaving] = []
        self._readers: dict[int, set[Tape]] = defaultdict(set)
        self._bytes: dict[int, int] = {}
        self._transient = 0  # the most that a pending tape's replay allocates
        self.constants: set[int] = set()

    def __bool__(self) -> bool:
        return self._running is not None or bool(self._pending)

    def mark_constants(self, tensors: Sequence[torch.Tensor]) -> None:
        """Storages that live through the step anyway: parameters, tables."""
        self.constants.update(t.untyped_storage()._cdata for t in tensors)

    # --- adding ----------------------------------------------------------------------------------

    def fits(self, tape: Tape) -> bool:
        """Whether a tape can be held beside what is pending, its replay's own memory included."""
        if self.budget is None:
            return True
        need = self.held_bytes + tape.held_bytes + max(self._transient, tape.transient_bytes)
        return need <= self.budget

    def demote(self) -> None:
        """Executes the oldest pending tape's next operator at once."""
        start = _clock()
        with below_autograd():
            self.unit()
        seconds = _clock() - start
        self.outside["demoted"] += seconds
        self.operators["demoted"] += 1
        self._engine.statistics.seconds_in_checks += seconds

    def push(self, tape: Tape) -> None:
        """Takes a closed tape; executes older ones first where memory would not suffice."""
        if not tape.computing:
            return
        while self and not self.fits(tape):
            self.demote()
        self._pending.append(tape)
        if self.fits(tape):
            self._transient = max(self._transient, tape.transient_bytes)
            self._index(tape)
        else:
            # Too large even alone: executed before anything else happens, so nothing is held.
            self.drain("demoted")

    def _index(self, tape: Tape) -> None:
        for key, size in tape.storages().items():
            self._readers[key].add(tape)
            if key not in self.constants and key not in self._bytes:
                self._bytes[key] = size
                self.held_bytes += size
        assert self.budget is None or self.held_bytes <= self.budget
        self._engine.held(self.held_bytes)

    def _release(self, tape: Tape) -> None:
        for key in tape.storages():
            readers = self._readers.get(key)
            if readers is not None:
                readers.discard(tape)
                if not readers:
                    del self._readers[key]
                    self.held_bytes -= self._bytes.pop(key, 0)

    # --- executing -------------------------------------------------------------------------------

    def unit(self) -> bool:
        """Executes one pending operator; False when there is none."""
        if self._running is None:
            if not self._pending:
                return False
            self._tape = self._pending[0]
            self._pending.popleft()
            self._hold_faults(self._tape)
            self._found = []
            self._running = self._tape.replay(self._engine, self._found)
        if next(self._running, self) is self:
            self._finish()
        return True

    def _finish(self) -> None:
        tape, found = self._tape, self._found
        assert tape is not None
        self._running = self._tape = None
        if found:
            self._judge(tape, found)
        self._release(tape)
        self._transient = max((t.transient_bytes for t in self._pending), default=0)

    def _judge(self, tape: Tape, found: list[Leaving]) -> None:
        """A third execution says whether the primary or the checker was wrong."""
        engine = self._engine
        again: list[Leaving] = []
        for _ in tape.replay(engine, again):
            pass
        mismatch = tape.reporter(engine, found[0])()
        mismatch.followed_by = len(found) - 1
        # The third agrees with the primary's fingerprints: the second one was wrong.
        mismatch.wrong = "primary" if again else "checker"
        if again:
            held = "the primary, or what was held to execute it again"
            mismatch.note = f"{held}; {mismatch.note}" if mismatch.note else held
        engine.ledger.record(mismatch)

    def _hold_faults(self, tape: Tape) -> None:
        injector = self._engine.injector
        if not injector.armed:
            return
        place = tape.position.copy()
        place.phase = "held"
        for tensor in tape.held:
            if tensor is not None and tensor.untyped_storage()._cdata not in self.constants:
                # What is held alone is what can go wrong unseen: a copy takes the fault.
                key = tensor.untyped_storage()._cdata
                tensor = _unexpanded(tensor)
                copy = tensor.clone(memory_format=torch.preserve_format)
                if injector.visit(place, "boundary", "only", [copy]):
                    storage = tensor.untyped_storage().clone()
                    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
                    view.copy_(copy)
                    tape.replace(key, storage)
                    self._move(tape, key, storage)
                    return

    def _move(self, tape: Tape, key: int, storage: torch.UntypedStorage) -> None:
        """One tape holds a storage of its own in the place of a shared one."""
        readers = self._readers[key]
        readers.discard(tape)
        if not readers:
            del self._readers[key]
            self.held_bytes -= self._bytes.pop(key, 0)
        self._readers[storage._cdata] = {tape}
        self._bytes[storage._cdata] = storage.nbytes()
        self.held_bytes += storage.nbytes()

    def drain(self, why: str = "drained") -> None:
        """Executes everything pending, on the critical path."""
        if not self:
            return
        start, count = _clock(), 0
        with below_autograd():
            while self.unit():
                count += 1
        seconds = _clock() - start
        self.outside[why] += seconds
        self.operators[why] += count
        self._engine.statistics.seconds_in_checks += seconds

    def serve(
        self,
        closed: Callable[[], bool],
        room: float | None = None,
        like: Sequence[float] = (),
    ) -> None:
        """Executes pending operators, one at a time, until the window has closed.

        Args:
            closed: Whether it has.
            room: How long it will be open, if that is known; see ``dynamic.py``.
            like: How long its like have been open, in order, if that is known.
        """
        if not self:
            return
        if room is not None:
            self._arrange(room)
        start, count, idle = _clock(), 0, 0.0
        with below_autograd():
            while not closed():
                now = _clock()
                if like and not in_time(self._ahead, now - start, like):
                    time.sleep(_PAUSE)
                    idle += _clock() - now
                elif self.unit():
                    count += 1
                else:
                    break
        seconds = _clock() - start - idle
        self.in_windows += seconds
        self.operators["window"] += count
        self._engine.statistics.seconds_in_windows += seconds

    @property
    def _ahead(self) -> float:
        """Seconds that the next operator will take."""
        if self._tape is not None:
            return self._tape.ahead
        return self._pending[0].ahead if self._pending else 0.0

    def _arrange(self, room: float) -> None:
        """Puts those first that fit a window best; what has been begun goes on before them."""
        pending = [*self._pending]
        first = best_fit([tape.seconds for tape in pending], room)
        self._pending = deque(pending[i] for i in first)
        chosen = {*first}
        self._pending.extend(tape for i, tape in enumerate(pending) if i not in chosen)

    # --- what the framework does meanwhile -------------------------------------------------------

    def before_write(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are about to be written: pending tapes that read them get a private copy."""
        if not self._readers:
            return
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            readers = self._readers.get(key)
            if not readers:
                continue
            copy = tensor.untyped_storage().clone()
            for tape in list(readers):
                tape.replace(key, copy)
            self._readers[copy._cdata] = self._readers.pop(key)
            size = self._bytes.pop(key, None)
            if size is not None:
                self._bytes[copy._cdata] = size

    def abandon(self) -> None:
        """Forgets everything: the iteration is discarded."""
        self._pending.clear()
        self._running = self._tape = None
        self._readers.clear()
        self._bytes.clear()
        self.held_bytes = self._transient = 0


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without dimensions in which one element stands for many."""
    for dimension, (size, stride) in enumerate(zip(tensor.size(), tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
