"""A large write cut into calls that write a part each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from .operators import Operator, tensors_of

Slice: TypeAlias = tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]
"""Arguments of one call, by position and by name, and what it writes."""


def cut(
    operator: Operator,
    args: tuple,
    kwargs: dict[str, Any],
    written: Sequence[torch.Tensor],
    limit: int,
) -> list[Slice] | None:
    """Cuts a call into calls that write at most ``limit`` bytes each; None if it can't be cut."""
    if operator.elementwise and len(written) == 1:
        return cut_one(args, kwargs, written[0], limit)
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and len(a)]
    lengths = {len(a) for a in lists}
    if len(lengths) != 1 or not (args and isinstance(args[0], (list, tuple))):
        return None
    (count,) = lengths
    sizes = [0] * count
    for position, _ in operator.written:
        for i, t in enumerate(args[position] if position < len(args) else ()):
            sizes[i] += t.numel() * t.element_size()
    bounds, total = [0], 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            bounds.append(i)
            total = 0
        total += size
    bounds.append(count)

    def part(value: Any, low: int, high: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return value[low:high]
        return value

    calls = []
    for low, high in zip(bounds, bounds[1:]):
        a = tuple(part(v, low, high) for v in args)
        k = {name: part(v, low, high) for name, v in kwargs.items()}
        calls.append((a, k, operator.written_tensors(a, k)))
    return calls


def cut_one(
    args: tuple, kwargs: dict[str, Any], target: torch.Tensor, limit: int
) -> list[Slice] | None:
    """As :func:`cut`, for an elementwise call that writes ``target``, its first argument."""
    # Multiples of 64 elements keep every slice's vector loops as they are in the whole.
    step = max(64, limit // target.element_size() // 64 * 64)
    for t in tensors_of(args, kwargs):
        if t.numel() != 1 and (t.size() != target.size() or not t.is_contiguous()):
            return None

    def part(value: Any, low: int) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == target.numel():
            return value.view(-1)[low : low + step]
        return value

    calls = []
    for low in range(0, target.numel(), step):
        a = tuple(part(v, low) for v in args)
        k = {name: part(v, low) for name, v in kwargs.items()}
        calls.append((a, k, [a[0]]))
    return calls
