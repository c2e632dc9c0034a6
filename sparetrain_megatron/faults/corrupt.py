"""Changes bits of a tensor's memory, for every dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BURST = 4


class Place(NamedTuple):
    """Where a tensor was corrupted.

    Attributes:
        element: Index into the flattened tensor.
        bit: Bit of that element, 0 the least significant.
        effect: Whether any bit changed.
    """

    element: int
    bit: int
    effect: bool


def width(dtype: torch.dtype) -> int:
    """Number of bits of an element that a fault can flip (1 for bool: it stays 0 or 1)."""
    return 1 if dtype is torch.bool else 8 * dtype.itemsize


@torch.no_grad()
def corrupt(tensor: torch.Tensor, pattern: str, element: int, bit: int) -> Place:
    """Corrupts a tensor in place, underneath autograd and version counters.

    Args:
        tensor: Any non-empty strided tensor.
        pattern: ``bit``, ``swap``, ``shift``, ``burst`` or ``negate``.
        element: Index into the flattened tensor; wraps around.
        bit: Bit of the element; wraps around.

    Returns:
        The place that was hit. ``swap`` and ``shift`` go on to the next place whose bits differ;
        ``effect`` is False when there is none.
    """
    element %= tensor.numel()
    bit %= width(tensor.dtype)
    if pattern in ("bit", "burst"):
        count = 1 if pattern == "bit" else min(_BURST, tensor.numel())
        _flip(tensor, [(element + i) % tensor.numel() for i in range(count)], bit)
        return Place(element, bit, True)
    if pattern == "negate":
        return Place(element, bit, _negate(tensor))
    found = _swap(tensor, element) if pattern == "swap" else _shift(tensor, element)
    return Place(element if found is None else found, bit, found is not None)


def _bits(tensor: torch.Tensor, itemsize: int | None = None) -> torch.Tensor:
    """An integer tensor over the same memory; complex numbers get a last dimension of parts.

    It is made from the storage, not as a view: a view would share the version counter, and
    autograd would then report the fault as an in-place modification.
    """
    size: tuple[int, ...] = tuple(tensor.size())
    stride, offset = tensor.stride(), tensor.storage_offset()
    itemsize = itemsize or min(tensor.itemsize, 8)
    parts = tensor.itemsize // itemsize
    if parts > 1:
        size = (*size, parts)
        stride = (*(step * parts for step in stride), 1)
        offset *= parts
    bits = torch.empty(0, dtype=_INTEGERS[itemsize], device=tensor.device)
    return bits.set_(tensor.untyped_storage(), offset, size, stride)


def _index(shape: Sequence[int], element: int) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        index.append(element % extent)
        element //= extent
    return tuple(reversed(index))


def _mask(bit: int, bits: int) -> int:
    """``1 << bit`` as a signed integer of that many bits."""
    return -(1 << bit) if bit == bits - 1 else 1 << bit


def _flip(tensor: torch.Tensor, elements: Sequence[int], bit: int) -> None:
    bits = _bits(tensor)
    word = 8 * bits.itemsize
    # Elements of an expanded tensor may share memory: an even number of flips would cancel.
    done = set()
    for element in elements:
        index = _index(tensor.shape, element)
        address = sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        if address in done:
            continue
        done.add(address)
        if tensor.itemsize > bits.itemsize:
            index = (*index, bit // word)
        bits[index] ^= _mask(bit % word, word)


def _negate(tensor: torch.Tensor) -> bool:
    for dim, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)  # expanded: one place in memory, negated once
    if tensor.dtype is torch.bool:
        _bits(tensor).bitwise_xor_(1)
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        bits = _bits(tensor, tensor.itemsize // 2 if tensor.is_complex() else None)
        word = 8 * bits.itemsize
        bits.bitwise_xor_(_mask(word - 1, word))
        return True
    bits = _bits(tensor)
    before = bits.clone()
    bits.neg_()
    return not torch.equal(before, bits)


def _swap(tensor: torch.Tensor, element: int) -> int | None:
    """Exchanges the first two differing neighbours from an element on; returns the first's index.

    Neighbours follow each other in the flattened tensor.
    """
    bits = _bits(tensor)
    elements = bits.reshape(tensor.numel(), -1)
    differing = (elements[1:] != elements[:-1]).any(dim=1).nonzero().flatten()
    if differing.numel() == 0:
        return None
    later = differing[differing >= element]
    first = int(later[0] if later.numel() else differing[0])
    left, right = elements[first].clone(), elements[first + 1].clone()
    shape = (*tensor.shape,)
    bits[_index(shape, first)] = right.reshape(bits[_index(shape, first)].shape)
    bits[_index(shape, first + 1)] = left.reshape(bits[_index(shape, first + 1)].shape)
    return first


def _shift(tensor: torch.Tensor, element: int) -> int | None:
    """Rotates the first row from an element's on that isn't constant; returns its first index."""
    if tensor.dim() == 0 or tensor.shape[-1] < 2:
        return None
    bits = _bits(tensor)
    length = tensor.shape[-1]
    rows = bits.reshape(tensor.numel() // length, length, -1)
    uneven = (rows[:, 1:] != rows[:, :-1]).flatten(1).any(dim=1).nonzero().flatten()
    if uneven.numel() == 0:
        return None
    later = uneven[uneven >= element // length]
    row = int(later[0] if later.numel() else uneven[0])
    target = bits[_index(tensor.shape[:-1], row)]
    target.copy_(rows[row].roll(1, dims=0).reshape(target.shape))
    return row * length
