"""Whether a checkpointed block gives anything away beside its outputs.

Of a block that is checked as a segment the forward's outputs alone are compared. A value that its
forward leaves elsewhere, in a module's attribute or a buffer, would escape; so the first forward of
a block is watched, and one that does such things is checked operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .operators import Kind, Operator, tensors_of

if TYPE_CHECKING:
    from .engine import Engine


class Watcher:
    """An observer of the engine, in the place of another one that it hands everything on to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inner = engine.observer
        self._outside = False
        self._made: dict[int, Any] = {}  # weak references to storages made inside

    def watch(
        self, handler: Callable[..., Any], operator: Operator, func: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Has an operator executed, and looks where its results are."""
        if self._inner is None:
            output = handler(operator, func, args, kwargs)
        else:
            output = self._inner.watch(handler, operator, func, args, kwargs)
        if self._engine.beside or operator.kind is Kind.COLLECTIVE:
            return output
        known = {t.untyped_storage()._cdata for t in tensors_of(args, kwargs)}
        written = operator.written_tensors(args, kwargs)
        self._outside |= any(t.untyped_storage()._cdata not in self._made for t in written)
        self._note([t for t in tensors_of([output]) if t.untyped_storage()._cdata not in known])
        return output

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self._made[storage._cdata] = storage._weak_ref()

    def allocated(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory made inside, which an operator will write."""
        if self._inner is not None:
            self._inner.allocated(tensors)
        if not self._engine.beside:
            self._note(tensors)

    def stepped(self, seconds: float, check: float) -> None:
        if self._inner is not None:
            self._inner.stepped(seconds, check)

    def window_opens(self, kind: str, name: str) -> None:
        if self._inner is not None:
            self._inner.window_opens(kind, name)

    def window_closes(self) -> None:
        if self._inner is not None:
            self._inner.window_closes()

    def nothing_but(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether nothing of what was made is left but these; ends watching."""
        mine = {t.untyped_storage()._cdata for t in outputs}
        left = False
        for key, weak in self._made.items():
            left |= key not in mine and not torch.UntypedStorage._expired(weak)
            torch.UntypedStorage._free_weak_ref(weak)
        self._made.clear()
        return not left and not self._outside
