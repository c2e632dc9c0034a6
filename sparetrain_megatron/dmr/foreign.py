"""Kernels that the dispatcher doesn't see: each call becomes an operator on a flat list of tensors.

A kernel called through a binding of its own (Transformer Engine, Apex) takes lists, quantised
tensors and quantizers, and nobody declares what it writes. A :class:`Kernel` declares it. A call is
then taken apart into its tensors and a skeleton of everything else; with these it is an operator
like any other: executed twice, fingerprinted under piggyback, or recorded on a tape, by the same
code.

Three things are special to such a call:

* The primary runs on the caller's own objects and returns the kernel's own result; every other
  execution runs on objects put together again from the skeleton and other tensors. The caller may
  therefore empty or reuse its objects afterwards.
* *State*, such as a quantizer's amax, which a call reads and changes. Its value before is an
  argument, its value after a result; only the primary touches the live one.
* *Scratch* memory is passed on as it is, never copied and never compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .operators import Kind, Operator

if TYPE_CHECKING:
    from .engine import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """An argument that a kernel writes.

    Attributes:
        parameter: Its name.
        when: Name of an argument that has to be true for it.
        start: Of a list, the first item that is written.
    """

    parameter: str
    when: str | None = None
    start: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """What a call of one kernel reads, writes and draws. Whatever it takes it may read.

    Attributes:
        name: As it is reported, with the name of its library: ``te.generic_gemm``.
        parameters: Names of its parameters in order.
        writes: Those that it writes.
        scratch: Those whose contents mean nothing before and after.
        random: It draws from a generator: an argument, or its device's default one.
        undefined: Positions of returned values that have no defined contents.
        itemwise: A list of lists of tensors whose items are computed each by itself: a large call
            may be made as several of fewer items.
    """

    name: str
    parameters: tuple[str, ...] = ()
    writes: tuple[Write, ...] = ()
    scratch: frozenset[str] = frozenset()
    random: bool = False
    undefined: frozenset[int] = frozenset()
    itemwise: str | None = None


@dataclasses.dataclass(slots=True)
class Parts:
    """An object that holds tensors, taken apart.

    Attributes:
        tensors: Its tensors.
        put_together: Makes an equal object that holds other tensors in their places.
        state: Indices of the tensors that a call changes although the object is only an argument.
        copies: Indices of the tensors that hold the same values once more, in another layout. One
            execution of a call may make them and another not, as they are asked for.
    """

    tensors: list[torch.Tensor]
    put_together: Callable[[Sequence[torch.Tensor]], Any]
    state: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


class Results(tuple[torch.Tensor, ...]):
    """What an execution gave.

    Attributes:
        copies: How many at its end are :attr:`Parts.copies`.
    """

    copies = 0


class Unsupported(Exception):
    """A call that can't be executed a second time; the text says what it does."""


TakeApart = Callable[[Any], Parts | None]
"""Takes an argument apart; None: it is not an object that holds tensors.

Raises :class:`Unsupported`.
"""


class _Slot:
    """The place of a tensor in a skeleton."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Object:
    """The place of an object with tensors in a skeleton."""

    __slots__ = ("put_together", "slots")

    def __init__(self, put_together: Any, slots: list[int]) -> None:
        self.put_together = put_together
        self.slots = slots


class Call:
    """One call, executable again from other tensors as often as wanted.

    Attributes:
        tensors: Its flat arguments: the tensors it reads or writes, and generators.
        operator: What it is to the interceptor.
        result: What the primary returned, the kernel's own object.
    """

    __slots__ = (
        "_args",
        "_function",
        "_kernel",
        "_kwargs",
        "_live",
        "_live_state",
        "_places",
        "_state",
        "_take_apart",
        "operator",
        "result",
        "tensors",
    )

    def __init__(
        self,
        kernel: Kernel,
        function: Callable[..., Any],
        take_apart: TakeApart,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._kernel = kernel
        self._function = function
        self._take_apart = take_apart
        self.tensors: list[Any] = []
        self.result: Any = None
        self._places: dict[int, int] = {}  # of tensors by identity: an alias stays an alias
        self._state: list[int] = []
        self._live_state: list[torch.Tensor] = []
        values: dict[str, Any] = dict(zip(kernel.parameters, args)) | kwargs
        written: list[int] = []
        encoded: dict[str, Any] = {}
        for name, value in values.items():
            if name in kernel.scratch:
                encoded[name] = value
                continue
            encoded[name] = skeleton = self._encode(value)
            for write in kernel.writes:
                if write.parameter == name and (write.when is None or values.get(write.when)):
                    items = skeleton[write.start :] if write.start else skeleton
                    written += [i for i in _slots(items) if self._is_written(i)]
        extra = tuple(self._encode(value) for value in args[len(kernel.parameters) :])
        self._args = (*(encoded[name] for name in kernel.parameters[: len(args)]), *extra)
        self._kwargs = {name: encoded[name] for name in kwargs}
        self._live: tuple[Any, Any, list[Any]] | None = (args, kwargs, list(self.tensors))
        self._places.clear()
        self.operator = _operator(kernel, tuple(dict.fromkeys(written)))

    def _is_written(self, slot: int) -> bool:
        return slot not in self._state and self.tensors[slot].numel() > 0

    @property
    def live_state(self) -> list[torch.Tensor]:
        """The tensors of state that the primary will change."""
        return self._live_state

    def state_of(self, results: Results) -> tuple[torch.Tensor, ...]:
        """The state after the call."""
        end = len(results) - results.copies
        return results[end - len(self._state) : end]

    def _encode(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._encode(item) for item in value])
        if isinstance(value, dict):
            return {name: self._encode(item) for name, item in value.items()}
        if isinstance(value, torch.Generator):
            return _Slot(self._place(value))
        parts = self._take_apart(value)
        if parts is None:
            return _Slot(self._place(value)) if isinstance(value, torch.Tensor) else value
        slots = []
        for i, tensor in enumerate(parts.tensors):
            known = len(self.tensors)
            slot = self._place(tensor, state=i in parts.state)
            slots.append(slot)
            if slot == known and i in parts.state:
                self._state.append(slot)
                self._live_state.append(tensor)
        return _Object(parts.put_together, slots)

    def _place(self, tensor: Any, state: bool = False) -> int:
        place = self._places.get(id(tensor))
        if place is None:
            place = self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor.clone() if state else tensor)
        return place

    def __call__(self, *tensors: Any) -> Results:
        """Executes the kernel; the first time that it gets the caller's tensors is the primary.

        Returns:
            The tensors that it returned, the state after it, then copies. Aliases of arguments are
            left out: what is written is compared where it stands.
        """
        live = self._live
        if live is not None and all(a is b for a, b in zip(tensors, live[2], strict=True)):
            # Objects are not kept any longer than the caller keeps them.
            self._live = None
            state, self._live_state = self._live_state, []
            output = self.result = self._function(*live[0], **live[1])
            after = [tensor.clone() for tensor in state]
        else:
            given = list(tensors)
            for i in self._state:
                given[i] = given[i].clone()
            args = _decode(self._args, given)
            output = self._function(*args, **_decode(self._kwargs, given))
            after = [given[i] for i in self._state]
        known = {_storage(t) for t in tensors if isinstance(t, torch.Tensor)}
        fresh: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for i, item in enumerate(output if isinstance(output, (list, tuple)) else (output,)):
            if i not in self._kernel.undefined:
                self._collect(item, known, fresh, copies)
        results = Results((*fresh, *after, *copies))
        results.copies = len(copies)
        return results

    def _collect(
        self, value: Any, known: set[int], fresh: list[torch.Tensor], copies: list[torch.Tensor]
    ) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self._collect(item, known, fresh, copies)
            return
        parts = self._take_apart(value)
        if parts is None:
            parts = Parts([value] if isinstance(value, torch.Tensor) else [], _nothing)
        for i, tensor in enumerate(parts.tensors):
            if _storage(tensor) not in known:
                (copies if i in parts.copies else fresh).append(tensor)


def _nothing(tensors: Sequence[torch.Tensor]) -> None:
    return None


class ForeignKernel:
    """Stands in for a kernel's function; calls enter the engine's interceptor.

    Args:
        engine: Protects them while it is active.
        kernel: What the kernel does.
        function: The original.
        take_apart: For the objects among its arguments.
    """

    def __init__(
        self,
        engine: Engine,
        kernel: Kernel,
        function: Callable[..., Any],
        take_apart: TakeApart = lambda value: None,
    ) -> None:
        self.kernel = kernel
        self.function = function
        self._engine = engine
        self._take_apart = take_apart
        self.__name__ = getattr(function, "__name__", kernel.name)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._engine.sees:
            return self.function(*args, **kwargs)
        result = None
        for part in self._portions(args):
            result = self._once(part, kwargs)
        return result

    def _portions(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The call as several that write no more than the engine copies at one time."""
        kernel, limit = self.kernel, self._engine.copy_limit
        place = kernel.parameters.index(kernel.itemwise) if kernel.itemwise else len(args)
        if place >= len(args) or not limit:
            yield args
            return
        lists = args[place]
        low = room = 0
        for i, item in enumerate(zip(*lists)):
            size = sum(t.numel() * t.element_size() for t in item)
            if i > low and size > room:
                yield (*args[:place], [each[low:i] for each in lists], *args[place + 1 :])
                low = i
            room = (limit if i == low else room) - size
        yield (*args[:place], [each[low:] for each in lists], *args[place + 1 :])

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        with engine.paused():
            try:
                call = Call(self.kernel, self.function, self._take_apart, args, kwargs)
            except Unsupported as reason:
                engine.unprotected(f"{self.kernel.name} ({reason})")
                return self.function(*args, **kwargs)
        # What the caller passed and what it gets back is its own: a recorded call keeps neither.
        tensors, call.tensors = tuple(call.tensors), []
        engine.foreign(call.operator, call, tensors, call.live_state, call.state_of)
        result, call.result = call.result, None
        return result


class UnknownKernel:
    """Stands in for a function of a library of kernels that nothing is known about."""

    def __init__(self, engine: Engine, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self._engine = engine
        self.__name__ = getattr(function, "__name__", name)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine.sees:
            self._engine.unprotected(self.name)
        return self.function(*args, **kwargs)


_operators: dict[tuple[str, tuple[int, ...]], Operator] = {}


def _operator(kernel: Kernel, written: tuple[int, ...]) -> Operator:
    key = (kernel.name, written)
    operator = _operators.get(key)
    if operator is None:
        operator = _operators[key] = Operator(
            kernel.name,
            Kind.MUTATING if written else Kind.PURE,
            kernel.random,
            tuple((i, "") for i in written),
        )
    return operator


def _decode(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, _Object):
        return value.put_together([tensors[i] for i in value.slots])
    if type(value) in (list, tuple):
        return type(value)([_decode(item, tensors) for item in value])
    if isinstance(value, Mapping):
        return {name: _decode(item, tensors) for name, item in value.items()}
    return value


def _slots(skeleton: Any) -> Iterator[int]:
    if isinstance(skeleton, _Slot):
        yield skeleton.index
    elif isinstance(skeleton, _Object):
        yield from skeleton.slots
    elif isinstance(skeleton, (list, tuple)):
        for item in skeleton:
            yield from _slots(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
