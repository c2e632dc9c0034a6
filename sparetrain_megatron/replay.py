"""The data of one iteration, kept so that it can be read again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


class Replayed:
    """A data iterator whose microbatches of one iteration can be read again.

    The first reading passes the loader's own objects on; a repetition gets copies that were taken
    then, since a batch may be modified in place.

    Args:
        source: The loader's iterator.
        before: Called before the loader goes on, with what it gave out last: it may write there.
    """

    def __init__(self, source: Any, before: Callable[[Any], None] = lambda value: None) -> None:
        self._source = source
        self._before = before
        self._last: Any = None
        self._kept: list[Any] = []
        self._next = 0

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        if self._next < len(self._kept):
            value = private(self._kept[self._next])
        else:
            self._before(self._last)
            value = self._last = next(self._source)
            self._kept.append(private(value))
        self._next += 1
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def rewind(self) -> None:
        """The next reading begins with the first microbatch again."""
        self._next = 0


def private(value: Any) -> Any:
    """A copy of a batch, which may be changed in place later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = private(item)
        return copied
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(private(v) for v in value)
    return copy.copy(value)
