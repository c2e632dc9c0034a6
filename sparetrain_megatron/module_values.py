"""Values that modules compute once and keep: tables of positions, masks, a gate's distribution.

A module may make such a value in a forward and use it in every later one. If a fault hits the
making, the iteration is discarded; but the value would stay, both executions would read it from
then on, and nothing would ever differ. So what modules have come to keep in a discarded iteration
is taken away from them again, to be made, and checked, anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .dmr.operators import nested_tensors

_OTHERS = {"_parameters", "_modules"}  # put back, or left alone, by other means


class ModuleValues:
    """What modules keep at the start of an iteration, in attributes and in dicts of theirs.

    Values that are part of a graph are no concern: they can't outlast an iteration.

    Args:
        models: All modules below them are looked at.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._kept = [
            (owner, {n: value for n, value in owner.items() if value is None or _is_kept(value)})
            for model in models
            for module in model.modules()
            for owner in _dicts(module)
        ]

    def restore(self) -> None:
        """Takes away what has been added, and puts back what has been replaced."""
        for owner, before in self._kept:
            for name, value in list(owner.items()):
                if value is before.get(name) or not _is_kept(value):
                    continue
                if name in before:
                    owner[name] = before[name]
                else:
                    del owner[name]


def _dicts(module: torch.nn.Module) -> list[dict[Any, Any]]:
    attributes = vars(module)
    inner = [v for name, v in attributes.items() if type(v) is dict and name not in _OTHERS]
    return [attributes, *inner]


def _is_kept(value: Any) -> bool:
    """A tensor outside of any graph, or a list or tuple of such."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if type(value) in (list, tuple):
        tensors = nested_tensors(value)
        return bool(tensors) and not any(t.requires_grad for t in tensors)
    return False
