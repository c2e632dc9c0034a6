"""Bound tapes: a block that runs the same operators every microbatch is recorded once, then only
bound.

A dense layer's operators don't change. Its tape is recorded once a shape and becomes a *template*:
its boundary slots are named by where they come from (the block's n-th input, the n-th incoming
gradient, a constant), and so are the values that leave it (the n-th output, the gradient that goes
into a parameter's buffer, the n-th outgoing gradient). From then on the block runs unseen by the
interceptor, without any Python per operator: its boundary is held, the leaving values are
fingerprinted by the hooks where they appear, and the replay executes the template's operators.

A template is for one geometry of the inputs. It is not made where something could escape it: random
operators, collectives, values from elsewhere. One in :data:`SAMPLE` runs is recorded in full and
compared with its template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .fingerprint import Fingerprint
from .foreign import Call
from .operators import Kind, ignores_first
from .own_work import own_work
from .position import Position
from .tape import Entry, Leaving, Ref, Source, Tape

SAMPLE = 32
"""One in so many runs of a bound block is recorded in full and compared with its template."""

Geometry = tuple[Any, ...]


def geometry(tensors: Sequence[torch.Tensor]) -> Geometry:
    """What a template depends on: shapes, layouts and dtypes of the boundary, and what shares
    memory in it."""
    storages = [t.untyped_storage() for t in tensors]
    first = {storage._cdata: i for i, storage in reversed(list(enumerate(storages)))}
    return tuple(
        (t.dtype, t.size(), t.stride(), t.storage_offset(), storage.nbytes(), first[storage._cdata])
        for t, storage in zip(tensors, storages)
    )


@dataclasses.dataclass(slots=True)
class Template:
    """A recorded tape whose boundary has names instead of tensors.

    Attributes:
        inputs: Geometry of the block's inputs.
        gradients: Geometry of the incoming gradients.
        sources: For each slot where it comes from; None for an internal one.
        constants: Tensors of constant slots.
        leaving: (after, ref, source) of each value that leaves.
    """

    inputs: Geometry
    gradients: Geometry
    entries: list[Entry]
    sources: list[Source | None]
    constants: dict[int, torch.Tensor]
    leaving: list[tuple[int, Ref, Source]]
    drops: dict[int, list[int]]
    computing: int
    held_bytes: int
    transient_bytes: int
    seconds: float
    operators: list[Any]
    """Functions of all operators of the recorded run, in order."""

    runs: int = 0

    @own_work
    def fits(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> bool:
        return geometry(inputs) == self.inputs and geometry(gradients) == self.gradients

    def due(self) -> bool:
        """Counts a run; whether it is to be recorded in full."""
        self.runs += 1
        return self.runs % SAMPLE == 0

    def bind(
        self,
        position: Position,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        digests: dict[Source, Fingerprint],
    ) -> Tape | None:
        """A tape to replay, with this run's boundary; None if a leaving value did not appear."""
        tape = Tape(position)
        tape.entries = self.entries
        tape.computing, tape.seconds = self.computing, self.seconds
        tape.held_bytes, tape.transient_bytes = self.held_bytes, self.transient_bytes
        held: list[torch.Tensor | None] = []
        for slot, source in enumerate(self.sources):
            if source is None:
                held.append(None)
            elif source[0] == "constant":
                held.append(self.constants[slot])
            else:
                origin = inputs if source[0] == "input" else gradients
                held.append(origin[source[1]].detach())
        tape.held = held
        checks: dict[int, list[Leaving]] = {}
        for after, ref, source in self.leaving:
            digest = digests.get(source)
            if digest is None:
                return None
            checks.setdefault(after - 1, []).append(Leaving(after, ref, digest, source))
        tape.bound(checks, self.drops)
        return tape


def make(
    tape: Tape,
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    constants: set[int],
) -> Template | None:
    """A template from a closed tape of a block; None if something of it has no name.

    Args:
        inputs: The block's tensor inputs.
        gradients: The incoming gradients.
        constants: Storages of parameters.
    """
    if not tape.bindable or any(entry.state is not None for entry in tape.entries):
        return None  # it does more than compute, or is random
    if any(isinstance(entry.func, Call) for entry in tape.entries):
        return None  # what a foreign call takes beside tensors may be another thing each time
    named: dict[int, Source] = {}
    for kind, tensors in (("gradient", gradients), ("input", inputs)):
        for i, tensor in enumerate(tensors):
            named[tensor.untyped_storage()._cdata] = (kind, i)
    sources: list[Source | None] = []
    fixed: dict[int, torch.Tensor] = {}
    aside: set[int] = set()
    for slot, held in enumerate(tape.held):
        source: Source | None = None
        if held is not None:
            key = held.untyped_storage()._cdata
            source = named.get(key)
            if source is None and (key in constants or _content_ignored(tape, slot)):
                source = ("constant", slot)
                fixed[slot] = held
            elif source is None and held.dtype in (torch.uint8, torch.bool):
                aside.add(slot)
            elif source is None:
                return None
        sources.append(source)
    kept = _without(tape, aside)
    if any(slot in aside for entry in kept.entries for slot in entry.reads):
        return None
    if any(value.source is None for value in kept.leaving):
        return None
    return Template(
        geometry(inputs),
        geometry(gradients),
        kept.entries,
        sources,
        fixed,
        [(value.after, value.ref, value.source) for value in kept.leaving if value.source],
        kept.drops,
        sum(entry.operator.kind is not Kind.UNINITIALISED for entry in kept.entries),
        sum(
            storage.nbytes()
            for storage in (t.untyped_storage() for t in (*inputs, *gradients, *fixed.values()))
            if storage._cdata not in constants
        ),
        kept.transient_bytes,
        tape.seconds,
        operators=[entry.func for entry in tape.entries],
    )


def _content_ignored(tape: Tape, slot: int) -> bool:
    """Whether a slot is only ever the first argument of ``beta = 0`` products: a scratch buffer."""
    readers = [entry for entry in tape.entries if slot in entry.reads]
    return bool(readers) and all(
        ignores_first(entry.operator, entry.kwargs)
        and entry.reads.count(slot) == 1
        and entry.reads[0] == slot
        for entry in readers
    )


def _without(tape: Tape, aside: set[int]) -> Tape:
    """The tape without bookkeeping on bytes that are no part of the computation.

    Megatron compares the states of random generators around dropout, even at probability 0.
    """
    kept = Tape(tape.position)
    numbers = [0]
    for entry in tape.entries:
        if entry.reads and all(slot in aside for slot in entry.reads):
            aside.update(slot for slot in entry.outputs if slot is not None)
        else:
            kept.entries.append(entry)
        numbers.append(len(kept.entries))
    for value in tape.leaving:
        if value.ref.slot not in aside:
            after = numbers[min(value.after, len(tape.entries))]
            kept.leaving.append(dataclasses.replace(value, after=after))
    kept.reschedule(tape)
    return kept


def same_operators(template: Template, tape: Tape) -> bool:
    """Whether a fully recorded run did what the template says."""
    return template.operators == [entry.func for entry in tape.entries]
