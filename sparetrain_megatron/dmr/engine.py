"""One engine a rank: what runs how, what was found, and the verdict.

The adapters tell it where in the step the rank is; the interceptor asks it what to do with an
operator; at a verdict it exchanges fingerprints, agrees with all ranks and says whether the
iteration stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import naive
from .collectives import Collectives
from .deferred import Deferred
from .fingerprint import Fingerprint
from .interceptor import Guarded, Interceptor
from .interfaces import Counting, Injecting, Observing
from .ledger import Ledger
from .mismatch import Mismatch
from .operators import Operator
from .passes import Passes
from .piggyback import FirstPass, SecondPass
from .position import Position
from .recording import Recording
from .second_device import SecondDevice
from .strategy import Immediate, Strategy
from .tape import Source, Tape


class UnprotectedOperator(RuntimeError):
    """Strict mode met an operator that cannot be executed twice."""


@dataclasses.dataclass(slots=True, frozen=True)
class Verdict:
    """What all ranks agreed on.

    Attributes:
        dirty: Some rank found a mismatch.
        mine: What this rank found.
    """

    dirty: bool
    mine: tuple[Mismatch, ...]


class Engine(Passes, Recording):
    """Protection of one rank.

    Args:
        statistics: Counters, shared with the report.
        injector: Puts faults in; its ``armed`` is False when there are none.
        piggyback: Whether the recompute may serve as the second execution of the forward.
        strict: Refuse an operator that can't be protected, rather than only count it.
        repairs: Whether a wrong integer may be replaced by the majority of three executions, so
            that the rest of the discarded iteration does not crash. Off when mismatches are only
            reported.
        copy_limit: Bytes that copies for one operator's check may take; larger writes are checked
            slice by slice. 0: no limit.
        reductions: Share of reductions that are done a second time.
        on_mismatch: Called with each mismatch when it becomes known.
    """

    def __init__(
        self,
        statistics: Counting,
        injector: Injecting,
        *,
        piggyback: bool = True,
        strict: bool = True,
        repairs: bool = True,
        copy_limit: int = 256 << 20,
        reductions: float = 1.0,
        second_device: SecondDevice | None = None,
        on_mismatch: Callable[[Mismatch], None] = lambda mismatch: None,
    ) -> None:
        self.statistics = statistics
        self.injector = injector
        self.piggyback = piggyback
        self.strict = strict
        self.repairs = repairs
        self.repairs_all = False
        """Whether wrong numbers of any type are replaced too: when no verdict follows."""
        self.waits_together = False
        """Whether the wait for the other ranks' verdict is served; alike on all ranks."""
        self.copy_limit = copy_limit
        self.reductions = reductions
        self.second_device = second_device or SecondDevice()
        self.device = torch.device("cpu")
        self.set_executor: Callable[[Any], Any] | None = None
        self.position = Position()
        self.ordinal = 0
        self.passes: list[FirstPass | SecondPass] = []
        self.collectives = Collectives(self)
        self.deferred = Deferred(self)
        self.tape: Tape | None = None
        self.rest: Callable[[], bool] | None = None
        """Whether what follows here, outside of blocks, is deferred; None outside of a step."""
        self.learns = False
        """Whether tapes that end are kept: of a block that may become a template."""
        self.closed: list[Tape] = []
        """Tapes of the present block."""
        self.binding: dict[Source, Fingerprint] | None = None
        """Fingerprints of what leaves the block that runs unseen."""
        self.beside = False
        """Whether what runs is no part of a region that could be deferred."""
        self._unseen = False
        self.observer: Observing | None = None
        self.waited = 0.0
        """Seconds in windows since the start."""
        self._window_opened = 0.0
        self.strategy: Strategy = Immediate(piggyback)
        self.ledger = Ledger(self._recorded)
        self._on_mismatch = on_mismatch
        self._interceptor = Interceptor(self)
        self._depth = 0
        self._accumulators: dict[int, list[tuple[int, int]]] = {}
        self._open: dict[int, FirstPass] = {}
        self._naive_segments: set[str] = set()
        self._new_naive_segments: set[str] = set()  # until all ranks know of them
        self._evidence: dict[tuple, int] = {}
        self._counts: dict[str, dict[Operator, int]] = defaultdict(lambda: defaultdict(int))
        self._once: dict[str, int] = defaultdict(int)

    # --- switching on and off --------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Protects what runs inside; may be nested."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
            else:
                with self._interceptor, self._compiled_graphs(True):
                    yield
        finally:
            self._depth -= 1

    @property
    def is_active(self) -> bool:
        return self._depth > 0 and self._interceptor.enabled

    @property
    def sees(self) -> bool:
        """Whether an operator that ran now would be seen: not in one, nor in a bound block."""
        if not self.is_active:
            return False
        return any(mode is self._interceptor for mode in _get_current_dispatch_mode_stack())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Lets what runs inside pass through: the product's own work."""
        before, self._interceptor.enabled = self._interceptor.enabled, False
        try:
            with self._compiled_graphs(False):
                yield
        finally:
            self._interceptor.enabled = before

    @contextlib.contextmanager
    def _compiled_graphs(self, protected: bool) -> Iterator[None]:
        """Has compiled graphs executed by :meth:`run`, or by themselves."""
        if self.set_executor is None:
            yield
            return
        before = self.set_executor(self if protected else None)
        try:
            yield
        finally:
            self.set_executor(before)

    def begin(self, iteration: int, attempt: int) -> None:
        """Starts an attempt at an iteration."""
        self.position.iteration, self.position.attempt = iteration, attempt
        self.position.microbatch = self.position.layer = None
        self.position.phase = "forward"
        self.ordinal = 0
        self.repairs_all = False
        self.injector.begin(iteration, attempt)
        self.second_device.begin(iteration, attempt)

    @contextlib.contextmanager
    def at(self, **where: Any) -> Iterator[None]:
        """Sets fields of the position for what runs inside."""
        position = self.position
        before = {name: getattr(position, name) for name in where}
        for name, value in where.items():
            setattr(position, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(position, name, value)

    def run(self, name: str, call: Callable[[], list[Any]], phase_backward: bool) -> list[Any]:
        """Executes a compiled graph twice and compares; see ``compiled.Executor``."""
        self.ordinal += 1
        self.cut_tape()
        return naive.graph(self, name, call)

    def protect_compiled(self, set_executor: Callable[[Any], Any]) -> None:
        """Has compiled graphs executed by :meth:`run`.

        Args:
            set_executor: ``compiled.set_executor``.
        """
        self.set_executor = set_executor
        self._interceptor = Guarded(self)

    def foreign(
        self,
        operator: Operator,
        function: Callable[..., Any],
        tensors: tuple,
        state: Sequence[torch.Tensor],
        state_of: Callable[[Any], Sequence[torch.Tensor]],
    ) -> None:
        """Executes a kernel that the dispatcher doesn't see, as an operator; see ``foreign.py``.

        Args:
            operator: Its class, and which of ``tensors`` it writes.
            function: Executes it on flat tensors and returns flat tensors.
            tensors: Its arguments.
            state: Further tensors that it changes; not by an operator that is recorded.
            state_of: The values after it, among its results. Nobody will hold these any longer:
                they are compared with the values that they have now.
        """
        if state:
            with self.paused():
                self.deferred.before_write(state)
                if self.tape is not None and any(map(self.tape.is_internal, state)):
                    self.cut_tape()
                if self.tape is not None:
                    for tensor in state:
                        self.tape.forget(tensor)
        results = self._interceptor.foreign(operator, function, tensors)
        if self.tape is not None:
            for tensor in state_of(results):
                self.tape.mark(tensor)

    # --- counting --------------------------------------------------------------------------------

    def count(self, method: str, operator: Operator, seconds: float) -> None:
        self._counts[method][operator] += 1
        self.statistics.seconds_in_checks += seconds

    def count_once(self, name: str) -> None:
        self._once[name] += 1

    def flush_counts(self) -> None:
        """Moves the counts of checks into the statistics."""
        for method, counts in self._counts.items():
            for operator, number in counts.items():
                self.statistics.count_check(method, operator.kind_name, number)
        self._counts.clear()
        run_once = self.statistics.run_once
        for name, number in self._once.items():
            run_once[name] = run_once.get(name, 0) + number
        self._once.clear()

    def held(self, size: int) -> None:
        """A check holds this many bytes now."""
        if size > self.statistics.peak_bytes_held:
            self.statistics.peak_bytes_held = size

    def unprotected(self, name: str) -> None:
        """An operator that computes ran without a check.

        Raises:
            UnprotectedOperator: In strict mode.
        """
        counts = self.statistics.unprotected
        counts[name] = counts.get(name, 0) + 1
        if self.strict:
            raise UnprotectedOperator(name)

    # --- what the adapters mark ------------------------------------------------------------------

    def mark_accumulators(self, buffers: Sequence[torch.Tensor]) -> None:
        """Declares gradient buffers: an operator that writes into one is gradient accumulation."""
        for buffer in buffers:
            low = int(buffer.storage_offset()) * buffer.element_size()
            size = buffer.numel() * buffer.element_size()
            key = buffer.untyped_storage()._cdata
            self._accumulators.setdefault(key, []).append((low, low + size))

    def is_accumulator(self, operator: Operator, args: tuple, kwargs: dict[str, Any]) -> bool:
        if not self._accumulators or self.position.phase not in ("backward", "recompute"):
            return False
        for tensor in operator.written_tensors(args, kwargs):
            ranges = self._accumulators.get(tensor.untyped_storage()._cdata)
            if ranges:
                low = tensor.storage_offset() * tensor.element_size()
                if any(a <= low < b for a, b in ranges):
                    return True
        return False

    # --- reporting -------------------------------------------------------------------------------

    def reporter(
        self, operator: str, method: str, *, later: bool = False
    ) -> Callable[[], Mismatch]:
        """Something that makes a mismatch at the present position.

        Args:
            later: It may be called when the position has moved on.
        """
        position, ordinal = self.position, self.ordinal
        if self.device.type == "cpu" and not later:
            return lambda: Mismatch(position.copy(), operator, method, ordinal=ordinal)
        position = position.copy()
        return lambda: Mismatch(position, operator, method, ordinal=ordinal)

    def _recorded(self, mismatch: Mismatch) -> None:
        self.statistics.mismatches += 1
        self._on_mismatch(mismatch)

    # --- the verdict -----------------------------------------------------------------------------

    def verdict(self, *, final: bool = True) -> Verdict:
        """Settles everything open and agrees with all ranks; collective over the world.

        Args:
            final: All communication of the iteration has been waited for, sums of gradients too.
        """
        self.close_tape()
        if self.waits_together and dist.is_initialized() and dist.get_world_size() > 1:
            self._wait_for_others()
        if self.deferred and self.collectives.in_flight():
            # Gradients are being summed meanwhile: a window.
            self.deferred.serve(lambda: not self.collectives.in_flight())
        self.deferred.drain()
        start = time.perf_counter()
        with self.paused(), torch.no_grad():
            for first in list(self._open.values()):
                if first.entries:
                    self._departed(first.key)
            self._open.clear()
            if dist.is_initialized() and dist.get_world_size() > 1:
                found, dirty = self._agree(final)
            else:
                self.collectives.settle_all(reductions=final)
                self.collectives.forget()
                found = self.ledger.collect()
                dirty = bool(found)
                self._naive_segments |= self._new_naive_segments
                self._new_naive_segments.clear()
        self.flush_counts()
        self.statistics.injected = len(self.injector.records)
        self.statistics.seconds_in_checks += time.perf_counter() - start
        return Verdict(dirty, tuple(found))

    def _wait_for_others(self) -> None:
        """The last stage is done before the first: waiting for it is a window like any other."""
        with self.paused():
            flag = torch.zeros(1, dtype=torch.int32, device=self.device)
            work = dist.all_reduce(flag, async_op=True)
        self.window_opens("inter", "verdict")
        self.deferred.serve(work.is_completed)
        work.wait()
        self.window_closes()

    def _agree(self, final: bool) -> tuple[list[Mismatch], bool]:
        """What this rank found, and whether any rank found something."""
        self.collectives.settle_all(reductions=final)
        bad = self.collectives.channels.exchange()
        self.second_device.exchange(self)
        found = self.ledger.collect()
        flags = torch.tensor(
            [bool(found or bad), bool(bad), bool(self._new_naive_segments)],
            dtype=torch.int32,
            device=self.device,
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        dirty, moved_wrong, naive_segments = flags.tolist()
        if moved_wrong:
            self.collectives.channels.locate(bad)
            found += self.ledger.collect()
        self.collectives.forget()
        if naive_segments:
            # On all ranks from the same moment: naive segments do their reductions twice.
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, sorted(self._new_naive_segments))
            self._naive_segments.update(key for keys in everyone for key in keys)
            self._new_naive_segments.clear()
        if dirty:
            self.second_device.decide(self, found)
        return found, bool(dirty)

    @property
    def suspicious(self) -> bool:
        """Whether this rank has found something since the last verdict; makes the host wait."""
        with self.paused():
            self.ledger.settle()
        return bool(self.ledger.mismatches)

    def discard(self) -> None:
        """Forgets everything of an attempt that is not kept."""
        self._open.clear()
        self.passes.clear()
        self.collectives.abandon()
        self.ledger.collect()
        self.second_device.abandon()
        self.deferred.abandon()
        self.tape = self.binding = self.rest = None
        self.closed.clear()
