"""The operator tape: operators recorded so that they can be executed again from what is held of
them.

A *value* is a slot (one storage) and a geometry, so views cost nothing and disappear. A slot is a
*boundary*, read but not produced by the tape's operators, which is held by reference; or
*internal*, produced by an operator of the tape, not held, and produced again on replay. What is
compared are the fingerprints of values that *leave* the tape: alive when it is closed, or read by
an operator that writes outside of it. Nothing else can affect training.

A replay runs the recorded operators in order, below autograd: no modules, hooks, gradient buffers
or collectives. It is a generator, one operator a step, so that a window can be left when it closes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from .fingerprint import Fingerprint, fingerprint
from .mismatch import Mismatch
from .naive import generator_of, results
from .operators import Kind, Operator, tensors_of
from .position import Position

if TYPE_CHECKING:
    from .engine import Engine


Source = tuple[str, int]
"""A name for a value at a block's boundary: ``("input", 0)``, ``("accumulate", address)``, …"""


class Ref:
    """A tensor argument of a recorded operator: a slot and a geometry."""

    __slots__ = ("dtype", "offset", "size", "slot", "stride")

    def __init__(self, slot: int, tensor: torch.Tensor) -> None:
        self.slot = slot
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def get(self, values: list[Any]) -> torch.Tensor:
        """The tensor, from any tensor on the slot's storage."""
        base = values[self.slot]
        if base.dtype is self.dtype:
            if (
                base.size() == self.size
                and base.stride() == self.stride
                and base.storage_offset() == self.offset
            ):
                return base
            return torch.as_strided(base, self.size, self.stride, self.offset)
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), self.offset, self.size, self.stride)


_NOWHERE = Ref(-1, torch.empty(0))


@dataclasses.dataclass(slots=True)
class Entry:
    """One recorded operator.

    Attributes:
        outputs: For each returned tensor the slot it opens, or None if it lives in a known one.
        state: The generator's state before it, for a random operator.
        seconds: How long it took when it was recorded, where the host waits for it.
    """

    operator: Operator
    func: Any
    args: Any
    kwargs: Any
    outputs: list[int | None]
    state: torch.Tensor | None
    phase: str
    reads: list[int]
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class Leaving:
    """A value that leaves the tape after ``after`` operators, and its fingerprint.

    Attributes:
        error: Found in a replay: what the operator raised instead.
    """

    after: int
    ref: Ref
    digest: Fingerprint
    source: Source | None = None
    error: str = ""


class Tape:
    """A list of recorded operators of one region.

    Attributes:
        position: Where in the step it was recorded.
        entries: The operators.
        held: For each slot the held tensor, or None for an internal one.
        computing: How many entries compute something.
        held_bytes: What the boundary holds, constants left out.
        transient_bytes: The most that a replay allocates at one time.
        seconds: What its operators took as they were recorded, where the host waits for them.
        bindable: The region did nothing beside recorded operators and gradient accumulation, so
            that it may run unseen; see ``template.py``.
    """

    def __init__(self, position: Position, constants: Set[int] = frozenset()) -> None:
        self._constants = constants
        self._sizes: dict[int, int] = {}
        self._reads: list[int] = []  # slots of the arguments encoded since the last record
        self.position = position.copy()
        self.entries: list[Entry] = []
        self.held: list[torch.Tensor | None] = []
        self.leaving: list[Leaving] = []
        self.computing = 0
        self.held_bytes = 0
        self.transient_bytes = 0
        self.seconds = 0.0
        self.bindable = True
        self._slots: dict[int, int] = {}
        self._alive: dict[int, Any] = {}  # weak references to internal storages
        self._released: set[int] = set()  # internal slots whose memory is no longer the tape's
        self._bases: dict[int, Ref] = {}  # whole-storage geometry of internal slots
        self._partial: dict[int, list[Ref]] = {}  # uninitialised slots: what was written of them

    # --- recording -----------------------------------------------------------------------------

    def is_internal(self, tensor: torch.Tensor) -> bool:
        slot = self._slots.get(tensor.untyped_storage()._cdata)
        return slot is not None and slot in self._alive

    def encode(self, value: Any) -> Any:
        """An argument by value: tensors become references, lists are walked, the rest is kept."""
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = len(self.held)
                # Detached: the framework may swap the memory of the tensor it passed.
                self.held.append(value.detach())
                if key not in self._constants:
                    self.held_bytes += value.untyped_storage().nbytes()
            self._reads.append(slot)
            return Ref(slot, value)
        if isinstance(value, (list, tuple)):
            return type(value)([self.encode(item) for item in value])
        return value

    def record(
        self,
        operator: Operator,
        func: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        state: torch.Tensor | None,
        phase: str,
        seconds: float = 0.0,
    ) -> None:
        """Adds an operator that has run.

        Args:
            args, kwargs: Encoded before it ran.
            output: What it returned.
            seconds: How long it took.
        """
        self.seconds += seconds
        computes = operator.kind is not Kind.UNINITIALISED
        outputs: list[int | None] = []
        for tensor in [output] if isinstance(output, torch.Tensor) else tensors_of([output]):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._slots:
                if computes and self._slots[key] in outputs:
                    # Several results in one allocation.
                    slot = self._slots[key]
                    self._partial.setdefault(slot, [self._bases[slot]]).append(Ref(slot, tensor))
                outputs.append(None)
                continue
            slot = self._slots[key] = len(self.held)
            self.held.append(None)
            self._alive[slot] = storage._weak_ref()
            self._sizes[slot] = storage.nbytes()
            if computes:
                self._bases[slot] = Ref(slot, tensor)
            else:
                self._partial[slot] = []
            outputs.append(slot)
        if computes:
            self.computing += 1
            if self._partial and operator.kind is Kind.MUTATING:
                for position, name in operator.written:
                    value = args[position] if position < len(args) else kwargs.get(name)
                    for ref in _refs(value):
                        if ref.slot in self._partial:
                            self._partial[ref.slot].append(ref)
        reads, self._reads = self._reads, []
        entry = Entry(operator, func, args, kwargs, outputs, state, phase, reads, seconds)
        self.entries.append(entry)

    def mark(
        self,
        tensor: torch.Tensor,
        digest: Fingerprint | None = None,
        source: Source | None = None,
    ) -> None:
        """A value leaves the tape here, with the bits it has now.

        Args:
            digest: Its fingerprint, if it is known.
            source: Its name, if it has one.
        """
        slot = self._slots.get(tensor.untyped_storage()._cdata)
        if slot is not None and slot in self._alive:
            if digest is None:
                digest = fingerprint(tensor)
            ref = Ref(slot, tensor.detach())
            self.leaving.append(Leaving(len(self.entries), ref, digest, source))

    def forget(self, tensor: torch.Tensor) -> None:
        """The tensor's storage will hold something else from now on; its slot keeps what it had."""
        key = tensor.untyped_storage()._cdata
        slot = self._slots.get(key)
        if slot is None or slot in self._alive:
            return
        held = self.held[slot]
        assert held is not None
        self.held[slot] = _on_storage(held, held.untyped_storage().clone())
        del self._slots[key]

    def release(self, tensor: torch.Tensor) -> bool:
        """A value leaves the tape here for good: its memory is somebody else's from now on.

        Returns:
            False if other values of the tape share its memory, so that the tape has to end.
        """
        storage = tensor.untyped_storage()
        slot = self._slots.get(storage._cdata)
        if slot is None or slot not in self._alive:
            return True
        if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() < storage.nbytes():
            return False
        self.mark(tensor)
        torch.UntypedStorage._free_weak_ref(self._alive.pop(slot))
        self._released.add(slot)
        del self._slots[storage._cdata]
        return True

    def close(self, returned: Sequence[torch.Tensor] = ()) -> None:
        """Ends recording: internal values that are still alive leave the tape.

        Args:
            returned: Tensors that the region gives back, whose values get names.
        """
        names = {t.untyped_storage()._cdata: ("result", i) for i, t in enumerate(returned)}
        for slot, weak in self._alive.items():
            if not torch.UntypedStorage._expired(weak):
                storage = torch.UntypedStorage._new_with_weak_ptr(weak)
                if storage is not None and storage.nbytes():
                    self._leave(slot, storage, names.get(storage._cdata))
            torch.UntypedStorage._free_weak_ref(weak)
        internal = self._alive.keys() | self._released
        self._slots.clear()
        self._alive = {}
        self._bases.clear()
        self._partial.clear()
        self._schedule(internal)

    def _leave(self, slot: int, storage: torch.UntypedStorage, source: Source | None) -> None:
        refs = self._partial.get(slot)
        if refs is None:
            refs = [self._bases[slot]]
        for ref in refs:
            view = torch.empty(0, dtype=ref.dtype, device=storage.device)
            view.set_(storage, ref.offset, ref.size, ref.stride)
            self.leaving.append(Leaving(len(self.entries), ref, fingerprint(view), source))

    def _schedule(self, internal: set[int]) -> None:
        """Computes when each value is compared and when it may be dropped during a replay."""
        last: dict[int, int] = {}
        for i, entry in enumerate(self.entries):
            for slot in entry.reads:
                last[slot] = i
            last.update((slot, i) for slot in entry.outputs if slot is not None)
        checks: dict[int, list[Leaving]] = defaultdict(list)
        for value in self.leaving:
            after = value.after - 1
            checks[after].append(value)
            last[value.ref.slot] = max(last.get(value.ref.slot, 0), after)
        drops: dict[int, list[int]] = defaultdict(list)
        for slot, i in last.items():
            if slot in internal:
                drops[i].append(slot)
        self.bound(dict(checks), dict(drops))
        live = 0
        for i, entry in enumerate(self.entries):
            live += sum(self._sizes[slot] for slot in entry.outputs if slot is not None)
            self.transient_bytes = max(self.transient_bytes, live)
            live -= sum(self._sizes[slot] for slot in self.drops.get(i, ()))

    def reschedule(self, original: Tape) -> None:
        """Computes anew what depends on the entries, some of ``original``'s left out."""
        self._sizes = original._sizes
        self._schedule({s for entry in self.entries for s in entry.outputs if s is not None})

    def bound(self, checks: dict[int, list[Leaving]], drops: dict[int, list[int]]) -> None:
        """Sets what is compared after each operator, and which slots are not needed any longer."""
        self._checks, self.drops = checks, drops

    # --- what it holds ---------------------------------------------------------------------------

    def storages(self) -> dict[int, int]:
        """Bytes by storage of everything held."""
        found = {}
        for tensor in self.held:
            if tensor is not None:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        return found

    def replace(self, key: int, storage: torch.UntypedStorage) -> None:
        """Puts a private copy in the place of a held storage that is about to be written."""
        for lists in (self.held, self._values) if self._values is not None else (self.held,):
            for i, tensor in enumerate(lists):
                if tensor is not None and tensor.untyped_storage()._cdata == key:
                    lists[i] = _on_storage(tensor, storage)
        slot = self._slots.pop(key, None)
        if slot is not None and slot in self._alive:
            self._slots[key] = slot

    # --- replay ----------------------------------------------------------------------------------

    _values: list[Any] | None = None
    _next = 0

    @property
    def ahead(self) -> float:
        """Seconds that the next step of a replay will take."""
        return self.entries[self._next].seconds if self._next < len(self.entries) else 0.0

    def replay(self, engine: Engine, found: list[Leaving]) -> Iterator[None]:
        """Executes the tape again, one operator a step; call inside :func:`below_autograd`.

        It ends at the first operator with a difference: what follows may crash on a wrong index.

        Args:
            found: Values that came out different are appended.
        """
        injector = engine.injector
        values = self._values = list(self.held)
        self._next = 0
        for i, entry in enumerate(self.entries):
            try:
                execute(entry, values, injector, self.position)
                found += self._different(engine, i, values)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # it, or the comparison, refuses a wrong size or index
                found.append(Leaving(i + 1, _NOWHERE, 0, error=f"{type(error).__name__}: {error}"))
            if found:
                break
            for slot in self.drops.get(i, ()):
                values[slot] = None
            self._next = i + 1
            yield
        self._values = None

    def _different(self, engine: Engine, i: int, values: list[Any]) -> Iterator[Leaving]:
        """Values that leave after an operator and are not what they were."""
        for value in self._checks.get(i, ()):
            equal = fingerprint(value.ref.get(values)) == value.digest
            if equal is False:
                yield value
            elif equal is not True:
                engine.ledger.check(equal, self.reporter(engine, value))

    def reporter(self, engine: Engine, value: Leaving) -> Any:
        position = self.position.copy()
        index = min(value.after, len(self.entries)) - 1
        entry = self.entries[index]
        for earlier in reversed(self.entries[: index + 1]):
            if value.ref.slot in earlier.outputs:
                entry = earlier
                break
        position.phase = entry.phase
        name, count = entry.operator.name, self.computing

        def report() -> Mismatch:
            mismatch = Mismatch(position, name, "deferred")
            if count > 1:
                mismatch.note = f"in a segment of {count} operators that ends with this one"
            if value.error:
                mismatch.note = f"its second execution failed: {value.error}"
            return mismatch

        return report


def execute(entry: Entry, values: list[Any], injector: Any, position: Position) -> None:
    """Executes one recorded operator on the slots' values."""
    args, kwargs = _decode(entry.args, values), entry.kwargs
    if kwargs:
        kwargs = {name: _decode(value, values) for name, value in kwargs.items()}
    if entry.state is None:
        output = entry.func(*args, **kwargs)
    else:
        generator = generator_of(args, kwargs)
        now = generator.get_state()
        generator.set_state(entry.state)
        output = entry.func(*args, **kwargs)
        generator.set_state(now)
    tensors = [output] if isinstance(output, torch.Tensor) else tensors_of([output])
    if injector.armed and entry.operator.kind is not Kind.UNINITIALISED:
        place = position.copy()
        place.phase = entry.phase
        written = entry.operator.written_tensors(args, kwargs)
        injector.visit(
            place, entry.operator.name, "checker", results(entry.operator, output, written)
        )
    for slot, tensor in zip(entry.outputs, tensors):
        if slot is not None:
            values[slot] = tensor


def _decode(value: Any, values: list[Any]) -> Any:
    if type(value) is Ref:
        return value.get(values)
    if isinstance(value, (list, tuple)):
        return type(value)([_decode(item, values) for item in value])
    return value


def _refs(value: Any) -> list[Ref]:
    if type(value) is Ref:
        return [value]
    if isinstance(value, (list, tuple)):
        return [ref for item in value for ref in _refs(item)]
    return []


def _on_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
