"""One engine a rank: what runs how, what was found, and the verdict.

The adapters tell it where in the step the rank is; the interceptor asks it what to do with an operator;
at a verdict it exchanges fingerprints, agrees with all ranks and says whether the iteration stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _pop_mode_temporarily

from . import naive
from .collectives import Collectives
from .deferred import Deferred
from .fingerprint import Fingerprint, fingerprint
from .interceptor import Guarded, Interceptor
from .ledger import Ledger
from .mismatch import Mismatch
from .operators import Kind, Operator
from .piggyback import Digests, Entry, FirstPass, SecondPass, same
from .position import Position
from .second_device import Call, SecondDevice, combine
from .strategy import Immediate, Strategy
from .tape import Source, Tape
from .template import Template


class Injecting(Protocol):
    """What the engine needs of a fault injector (:class:`sparetrain_megatron.faults.Injector`)."""

    armed: bool
    records: list[dict[str, Any]]

    def begin(self, iteration: int, attempt: int) -> None: ...
    def visit(
        self, position: Position, operator: str, execution: str, tensors: Sequence[torch.Tensor]
    ) -> bool: ...
    def visit_scalar(
        self, position: Position, operator: str, execution: str, value: Any
    ) -> Any: ...


class Counting(Protocol):
    """What the engine counts in (:class:`sparetrain_megatron.report.summary.Statistics`)."""

    run_once: dict[str, int]
    unprotected: dict[str, int]
    reductions_checked: int
    reductions_not_doubled: int
    communications_checked: int
    mismatches: int
    rollbacks: int
    seconds_in_checks: float
    peak_bytes_held: int
    injected: int
    second_device_checks: int

    def count_check(self, method: str, kind: str, number: int = 1) -> None: ...


_INDEX_TYPES = (torch.int16, torch.int32, torch.int64)


class Observing(Protocol):
    """What the engine needs of a profiler (:class:`sparetrain_megatron.profiler.Recorder`)."""

    def watch(
        self, handler: Callable[..., Any], operator: Operator, func: Any, args: tuple, kwargs: dict
    ) -> Any: ...
    def window_opens(self, kind: str, name: str) -> None: ...
    def window_closes(self) -> None: ...


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


class Engine:
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
        self.closed: list[Tape] = []
        """Tapes of the present block."""
        self.binding: dict[Source, Fingerprint] | None = None
        """Fingerprints of what leaves the block that runs unseen."""
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

    # --- switching on and off ------------------------------------------------------------------------

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
        state_of: Callable[[Any], Sequence[torch.Tensor]],
    ) -> None:
        """Executes a kernel that the dispatcher doesn't see, as an operator; see ``foreign.py``.

        Args:
            operator: Its class, and which of ``tensors`` it writes.
            function: Executes it on flat tensors and returns flat tensors.
            tensors: Its arguments.
            state_of: Those of its results that nobody will hold any longer: they are compared with
                the values that they have now.
        """
        results = self._interceptor.foreign(operator, function, tensors)
        if self.tape is not None:
            for tensor in state_of(results):
                self.tape.mark(tensor)

    # --- counting ------------------------------------------------------------------------------------

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

    # --- what the adapters mark ----------------------------------------------------------------------

    def mark_accumulators(self, buffers: Sequence[torch.Tensor]) -> None:
        """Declares gradient buffers: an operator that writes into one is gradient accumulation."""
        for buffer in buffers:
            low = buffer.storage_offset() * buffer.element_size()
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

    # --- deferral ------------------------------------------------------------------------------

    def open_tape(self) -> None:
        """Operators are recorded from now on, and executed again in a window."""
        self.cut_tape()
        self.tape = Tape(self.position, self.deferred.constants)

    def cut_tape(self) -> None:
        """Ends the open tape, if there is one, and begins the next."""
        if self.tape is not None and self.tape.entries:
            self.close_tape()
            self.tape = Tape(self.position, self.deferred.constants)

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
        """Makes room for what the open tape holds; ends it, and deferral of its region, if it can't.

        Called while recording, where there is a budget.
        """
        deferred = self.deferred
        while deferred and not deferred.fits(tape):
            deferred.demote()
        if deferred.fits(tape):
            return True
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

    # --- piggyback -----------------------------------------------------------------------------------

    def first_pass(
        self, key: str, inputs: Sequence[torch.Tensor], outputs_only: bool = False
    ) -> FirstPass | None:
        """Opens the first execution of a checkpointed segment.

        None if it is to run naively, or inside another one's: then it is executed again, and
        compared, with that one.
        """
        if not self.piggyback or not self.is_active or key in self._naive_segments:
            return None
        if any(isinstance(running, FirstPass) for running in self.passes):
            return None
        if self.collectives.arriving:
            self.collectives.look_at(inputs)
        digests = tuple(fingerprint(t) for t in inputs)
        first = FirstPass(key, digests, outputs_only=outputs_only)
        if self.repairs:
            with self.paused():
                first.indices = {
                    i: t.clone() for i, t in enumerate(inputs) if t.dtype in _INDEX_TYPES
                }
        self._open[id(first)] = first
        return first

    @contextlib.contextmanager
    def within(self, running: FirstPass | SecondPass) -> Iterator[None]:
        """Runs a pass: operators leave or compare fingerprints instead of running twice."""
        self.passes.append(running)
        try:
            yield
        finally:
            self.passes.remove(running)

    def second_pass(self, first: FirstPass, inputs: Sequence[torch.Tensor]) -> SecondPass:
        """Opens the recompute of a segment; its inputs must be what they were."""
        self._open.pop(id(first), None)
        with self.at(phase="held"):
            if self.injector.armed:
                self.injector.visit(self.position, "checkpoint_input", "only", list(inputs))
            report = self.reporter("checkpoint_input", "piggyback")
            self.ledger.check(same(first.inputs, tuple(fingerprint(t) for t in inputs)), report)
        with self.paused():
            for i, value in first.indices.items():
                inputs[i].data.copy_(value)  # not seen by autograd
        return SecondPass(first)

    def close_first_pass(self, first: FirstPass, outputs: Sequence[torch.Tensor]) -> None:
        """Ends the first execution."""
        if first.outputs_only:
            if self.collectives.arriving:
                self.collectives.look_at(outputs)
            first.outputs = tuple(fingerprint(t) for t in outputs)

    def compare_outputs(self, first: FirstPass, outputs: Sequence[torch.Tensor]) -> None:
        """Compares a recompute's outputs with the forward's; they leave the tape with these bits."""
        if self.collectives.arriving:
            self.collectives.look_at(outputs)
        digests = tuple(fingerprint(t) for t in outputs)
        self.ledger.check(same(first.outputs, digests), self.reporter("segment", "piggyback"))
        if self.binding is not None:
            self.binding.update((("output", i), digest) for i, digest in enumerate(digests))
        if self.tape is not None:
            for i, (tensor, digest) in enumerate(zip(outputs, digests)):
                self.tape.mark(tensor, digest, ("output", i))

    def close_second_pass(self, second: SecondPass) -> None:
        """Ends a recompute. One that left operators out has verified nothing of them."""
        if not second.complete:
            self._departed(second.first.key)

    def _departed(self, key: str) -> None:
        mismatch = self.reporter(key, "piggyback")()
        mismatch.wrong = "software"
        mismatch.note = (
            "the recompute did not run the operators of the forward; the segment is executed "
            "naively from now on"
        )
        self._new_naive_segments.add(key)
        self.ledger.record(mismatch)

    def observe(
        self, name: str, produced: Sequence[torch.Tensor], again: Call | None = None
    ) -> None:
        """Leaves or compares the fingerprints of what an operator produced in the open passes.

        Args:
            name: The operator's short name.
            produced: What it returned or wrote.
            again: Executes it once more from the same inputs, where that is possible.
        """
        digests: Digests = tuple(fingerprint(t) for t in produced)
        for running in self.passes:
            if isinstance(running, FirstPass):
                running.entries.append(Entry(name, digests))
            else:
                entry = running.advance(name)
                if entry is not None:
                    self._compare(running, entry, digests, produced, again)

    def observe_later(self, name: str) -> Callable[[list[torch.Tensor]], None]:
        """As :meth:`observe` for a collective's result, which is looked at when it has arrived."""
        waiting: list[Callable[[list[torch.Tensor], Digests], None]] = []
        for running in self.passes:
            if isinstance(running, FirstPass):
                entry = Entry(name)
                running.entries.append(entry)
                waiting.append(lambda tensors, digests, entry=entry: entry.arrived(digests))
            else:
                first = running.advance(name)
                if first is not None:
                    waiting.append(
                        lambda tensors, digests, running=running, first=first: self._compare(
                            running, first, digests, tensors, None
                        )
                    )

        def observe(tensors: list[torch.Tensor]) -> None:
            digests = tuple(fingerprint(t) for t in tensors)
            for callback in waiting:
                callback(tensors, digests)

        return observe

    def _compare(
        self,
        running: SecondPass,
        entry: Entry,
        digests: Digests,
        produced: Sequence[torch.Tensor],
        again: Call | None,
    ) -> None:
        if entry.digests is None:
            # The forward's result has not been looked at yet.
            entry.on_arrival = lambda first: self._compare(running, entry, digests, produced, None)
            return
        equal = same(entry.digests, digests)
        if equal is True:
            return
        report = self.reporter(entry.operator, running.method)
        if equal is not False:
            self.ledger.check(equal, report)
            return
        if running.first_mismatch is not None:
            # Follows from the first one: it read what that one produced.
            running.first_mismatch.followed_by += 1
            return
        mismatch = report()
        running.first_mismatch = mismatch
        mismatch.evidence = (*entry.digests, *digests)
        if again is not None:
            self._judge(mismatch, running, entry.digests, digests, produced, again)
            self.second_device.suspect(mismatch, again, combine(entry.digests), combine(digests))
        if running.method == "piggyback":
            self._recognise(running.first.key, mismatch)
        self.ledger.record(mismatch)

    def _judge(
        self,
        mismatch: Mismatch,
        running: SecondPass,
        first: Digests,
        second: Digests,
        produced: Sequence[torch.Tensor],
        again: Call,
    ) -> None:
        third = naive.results(_ANY, again(), ())
        digests = tuple(fingerprint(t) for t in third)
        if same(digests, first):
            mismatch.wrong = running.role
            self._measure(mismatch, third, produced)
        elif same(digests, second):
            mismatch.wrong = running.first.role
            if running.method == "piggyback":
                mismatch.position.phase = "forward"
                mismatch.note = "found in the recompute"

    @staticmethod
    def _measure(
        mismatch: Mismatch, right: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
    ) -> None:
        from .bits import difference

        for a, b in zip(right, found):
            differ, elements, positions = difference(a, b)
            if differ:
                mismatch.elements_differ, mismatch.elements = differ, elements
                mismatch.bits = positions
                return

    def _recognise(self, key: str, mismatch: Mismatch) -> None:
        """A difference that comes back with the very same bits is no accident of the hardware."""
        position = mismatch.position
        where = (key, mismatch.operator, position.iteration, position.microbatch, self.ordinal)
        evidence = (*where, mismatch.evidence)
        seen = self._evidence.get(evidence)
        if seen is not None and seen < position.attempt:
            mismatch.wrong = "software"
            mismatch.note = (
                "forward and recompute differ in the same way in every attempt: nondeterminism of "
                "the software (or a device that repeats its error); the segment is executed "
                "naively from now on"
            )
            self._new_naive_segments.add(key)
        self._evidence[evidence] = position.attempt

    # --- reporting -----------------------------------------------------------------------------------

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

    # --- the verdict ---------------------------------------------------------------------------------

    def verdict(self, *, final: bool = True) -> Verdict:
        """Settles everything open and agrees with all ranks; collective over the world.

        Args:
            final: All communication of the iteration has been waited for, sums of gradients too.
        """
        self.close_tape()
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
        self.tape = self.binding = None
        self.closed.clear()


_ANY = Operator("", Kind.PURE)
BOUND = Operator("bound", Kind.PURE)
