"""What the user's loop did between two optimizer steps, so that it can be done again.

A loop calls the engine's forward, computes a loss, calls backward and step, microbatch by
microbatch. Forward's inputs are kept as copies; what happens between forward and backward, the
loss, is followed by a function mode and kept as the list of torch functions that were called.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NotReplayable(Exception):
    """The loss can't be computed again from the forward's outputs; the message says why."""


@dataclasses.dataclass(slots=True)
class _Known:
    """Stands for a value that is computed again: the ``index``-th."""

    index: int


@dataclasses.dataclass(slots=True)
class _Call:
    function: Any
    args: Any
    kwargs: Any
    results: list[int]


class LossTape(TorchFunctionMode):
    """Follows a loss from the forward's outputs.

    Only calls that use the outputs, or what came of them, are kept.

    Args:
        outputs: What the forward returned.
        on_backward: Called with the tensor, arguments and keywords of a ``tensor.backward(…)``.
    """

    def __init__(self, outputs: Any, on_backward: Callable[..., Any]) -> None:
        super().__init__()
        self.off = False
        self.spoilt: dict[int, Any] = {}
        """Tensors that are not made of the outputs but were changed by them, and what is made of
        these: sums for a log, for example."""
        self._on_backward = on_backward
        self._calls: list[_Call] = []
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []
        self._numbers: dict[int, tuple[float, int]] = {}
        self._free_numbers = False
        self._count = 0
        found = tensors_of(outputs)
        self._outputs = [self._know(t) for t in found]
        self._ends = {t.grad_fn for t in found}
        self.originals = [weakref.ref(t) for t in found]

    def _know(self, value: Any) -> int:
        index = self._count
        self._count += 1
        self._known[id(value)] = index
        self._kept.append(value)  # or its id would be another's
        return index

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.off:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._on_backward(func, *args, **kwargs)
        values = [*args, *kwargs.values()]
        if self.spoilt and any(id(t) in self.spoilt for t in tensors_of(values)):
            result = func(*args, **kwargs)
            self._spoil(tensors_of(result))
            return result
        if not self._uses_known(values):
            return func(*args, **kwargs)
        versions = [(t, t._version) for t in tensors_of(values) if id(t) not in self._known]
        encoded, named = self._encode(args), self._encode(kwargs)
        result = func(*args, **kwargs)
        changed = [t for t, version in versions if t._version != version]
        if changed:
            self._spoil(changed)
            return result
        if isinstance(result, (bool, int, float)):
            # A number goes its own way from here; that it may come back into the loss is checked
            # when it is computed again.
            self._numbers[id(result)] = (result, self._count)
            self._calls.append(_Call(func, encoded, named, [self._know(result)]))
            return result
        results = [self._known.get(id(t), -1) for t in tensors_of(result)]
        if results and any(r < 0 for r in results):
            results = [self._know(t) if r < 0 else r for t, r in zip(tensors_of(result), results)]
        if results or writes(func):
            self._calls.append(_Call(func, encoded, named, results))
        return result

    def _spoil(self, tensors: list[torch.Tensor]) -> None:
        self.spoilt.update((id(t), t) for t in tensors)

    def _uses_known(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._uses_known(v) for v in value)
        if isinstance(value, dict):
            return any(self._uses_known(v) for v in value.values())
        return isinstance(value, torch.Tensor) and id(value) in self._known

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or id(value) in self._numbers:
            index = self._known.get(id(value))
            return value if index is None else _Known(index)
        if isinstance(value, float):
            self._free_numbers = True
        if type(value) in (list, tuple):
            return type(value)(self._encode(v) for v in value)
        if type(value) is dict:
            return {k: self._encode(v) for k, v in value.items()}
        return value

    def seal(self, loss: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """Ends following.

        Args:
            loss: What backward is called on.

        Returns:
            A function that computes the loss from the outputs of another forward.

        Raises:
            NotReplayable: It can't be computed again.
        """
        index = self._known.get(id(loss))
        calls, outputs, obstacle = self._calls, self._outputs, ""
        if id(loss) in self.spoilt:
            obstacle = "a tensor that is not made of the outputs is changed in place"
        numbers = {i: value for value, i in self._numbers.values()}
        ambiguous = bool(numbers) and self._free_numbers
        self._kept, self._known, self._numbers = [], {}, {}
        if _of_users(loss.grad_fn, self._ends):
            obstacle = "the loss goes through an autograd.Function in Python"
        self._ends.clear()  # they hold the graph
        if index is None:
            obstacle = obstacle or "the loss is not made of the forward's outputs"
        if obstacle or index is None:
            raise NotReplayable(obstacle)
        position = index

        def again(new_outputs: Any) -> torch.Tensor:
            values: dict[int, Any] = dict(zip(outputs, tensors_of(new_outputs), strict=True))
            for call in calls:
                result = call.function(*_decode(call.args, values), **_decode(call.kwargs, values))
                if call.results and call.results[0] in numbers:
                    values[call.results[0]] = result
                    if ambiguous and result != numbers[call.results[0]]:
                        raise NotReplayable(
                            "a number taken from the outputs may be part of the loss, and it is "
                            "another one now"
                        )
                    continue
                for i, tensor in zip(call.results, tensors_of(result)):
                    values[i] = tensor
            return values[position]

        return again


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")}


def writes(function: Any) -> bool:
    """Whether a torch function changes its first argument, by its name."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__")


def _of_users(node: Any, ends: set[Any]) -> bool:
    """Whether a Python function is in the graph behind a node, up to ``ends``.

    What such a function does is not seen, or seen as what it does inside.
    """
    seen, left = set(ends) | {None}, [node]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        left += [following for following, _ in node.next_functions]
    return False


def _decode(value: Any, values: dict[int, Any]) -> Any:
    if isinstance(value, _Known):
        return values[value.index]
    if type(value) in (list, tuple):
        return type(value)(_decode(v, values) for v in value)
    if type(value) is dict:
        return {k: _decode(v, values) for k, v in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in an output: nested lists, tuples, dictionaries and data classes, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            t for field in dataclasses.fields(value) for t in tensors_of(getattr(value, field.name))
        ]
    return []


@dataclasses.dataclass(slots=True)
class Microbatch:
    """One forward and what belonged to it."""

    args: tuple
    kwargs: dict[str, Any]
    tape: LossTape | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    obstacle: str = ""
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """What the forward was given, until the backward has ended."""
    originals: list[Any] = dataclasses.field(default_factory=list)
    original_loss: Any = None
    backward: Callable[[torch.Tensor], Any] | None = None
    boundary: bool | None = None
    """What the loop has told the engine of the accumulation boundary; None if it counts itself."""
    steps: list[tuple[tuple, dict[str, Any]]] = dataclasses.field(default_factory=list)
