"""The engine's part in P-DMR: the passes of a checkpointed segment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import naive
from .bits import difference
from .fingerprint import fingerprint
from .mismatch import Mismatch
from .operators import Kind, Operator
from .own_work import own_work
from .piggyback import Digests, Entry, FirstPass, SecondPass, same
from .second_device import Call, combine

_INDEX_TYPES = (torch.int16, torch.int32, torch.int64)
_ANY = Operator("", Kind.PURE)


class Passes:
    """Methods of :class:`~sparetrain_megatron.dmr.engine.Engine`, in a file of their own."""

    passes: list[FirstPass | SecondPass]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The engine's own attributes."""

    @own_work
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
        if self.repairs and any(t.dtype in _INDEX_TYPES for t in inputs):
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

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside belongs to one pass only: it is executed twice at once."""
        before, self.passes = self.passes, []
        try:
            yield
        finally:
            self.passes = before

    @own_work
    def second_pass(self, first: FirstPass, inputs: Sequence[torch.Tensor]) -> SecondPass:
        """Opens the recompute of a segment; its inputs must be what they were."""
        self._open.pop(id(first), None)
        if self.injector.armed:
            with self.at(phase="held"):
                self.injector.visit(self.position, "checkpoint_input", "only", list(inputs))
        equal = same(first.inputs, tuple(fingerprint(t) for t in inputs))
        if equal is not True:
            with self.at(phase="held"):
                self.ledger.check(equal, self.reporter("checkpoint_input", "piggyback"))
        if first.indices:
            with self.paused():
                for i, value in first.indices.items():
                    inputs[i].data.copy_(value)  # not seen by autograd
        return SecondPass(first)

    @own_work
    def close_first_pass(self, first: FirstPass, outputs: Sequence[torch.Tensor]) -> None:
        """Ends the first execution."""
        if first.outputs_only:
            if self.collectives.arriving:
                self.collectives.look_at(outputs)
            first.outputs = tuple(fingerprint(t) for t in outputs)

    @own_work
    def compare_outputs(self, first: FirstPass, outputs: Sequence[torch.Tensor]) -> None:
        """Compares a recompute's outputs with the forward's; they leave its tape here."""
        if self.collectives.arriving:
            self.collectives.look_at(outputs)
        digests = tuple(fingerprint(t) for t in outputs)
        equal = first.void or same(first.outputs, digests)
        if equal is not True:
            self.ledger.check(equal, self.reporter("segment", "piggyback"))
        if self.binding is not None:
            self.binding.update((("output", i), digest) for i, digest in enumerate(digests))
        if self.tape is not None:
            for i, (tensor, digest) in enumerate(zip(outputs, digests)):
                self.tape.mark(tensor, digest, ("output", i))

    def close_second_pass(self, second: SecondPass) -> None:
        """Ends a recompute. One that left operators out has verified nothing of them."""
        # After a wrong number it may have; then there is nothing wrong with the software.
        if not (second.complete or second.first.void or self.suspicious):
            self._departed(second.first.key)

    def decides(self, name: str, produced: Sequence[torch.Tensor]) -> Any:
        """As :meth:`observe`, for a decision on which the sizes of what follows depend.

        Args:
            name: Who decides.
            produced: The decision.

        Returns:
            Whether a recompute decides otherwise than the forward did: a bool, or a flag on the
            device.
        """
        if self.collectives.arriving:
            self.collectives.look_at(produced)
        digests: Digests = tuple(fingerprint(t) for t in produced)
        otherwise: Any = False
        for running in self.passes:
            if isinstance(running, FirstPass):
                running.entries.append(Entry(name, digests))
                continue
            entry = running.advance(name)
            if entry is None or entry.digests is None:
                continue
            equal = same(entry.digests, digests)
            self.ledger.check(equal, self._otherwise(name, running, (*entry.digests, *digests)))
            differs = (not equal) if isinstance(equal, bool) else ~equal
            otherwise = differs if otherwise is False else otherwise | differs
        return otherwise

    def _otherwise(
        self, name: str, running: SecondPass, evidence: Digests
    ) -> Callable[[], Mismatch]:
        report = self.reporter(name, running.method, later=True)

        def otherwise() -> Mismatch:
            mismatch = report()
            mismatch.evidence = evidence
            mismatch.note = f"the recompute's {name} decides otherwise than the forward's"
            if running.method == "piggyback":
                self._recognise(running.first.key, mismatch)
            return mismatch

        return otherwise

    def decided_otherwise(self) -> None:
        """A recompute has departed from the forward on some rank that this one works with.

        What differs from now on follows from that, and has been recorded there.
        """
        for running in self.passes:
            if isinstance(running, SecondPass):
                running.departed = running.first.void = True

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
        waiting: list[tuple[SecondPass | None, Entry]] = []
        for running in self.passes:
            if isinstance(running, FirstPass):
                entry = Entry(name)
                running.entries.append(entry)
                waiting.append((None, entry))
            else:
                first = running.advance(name)
                if first is not None:
                    waiting.append((running, first))

        def observe(tensors: list[torch.Tensor]) -> None:
            digests = tuple(fingerprint(t) for t in tensors)
            for second, entry in waiting:
                if second is None:
                    entry.arrived(digests)
                else:
                    self._compare(second, entry, digests, tensors, None)

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
        for a, b in zip(right, found):
            differ, elements, positions = difference(a, b)
            if differ:
                mismatch.elements_differ, mismatch.elements = differ, elements
                mismatch.bits = positions
                return

    def _recognise(self, key: str, mismatch: Mismatch) -> None:
        """A difference that comes back with the very same bits is no accident of the hardware."""
        position = mismatch.position
        where = (key, mismatch.operator, position.iteration, position.microbatch, mismatch.ordinal)
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
