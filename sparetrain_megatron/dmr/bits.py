"""Comparing tensors bit for bit.

Float equality is wrong here: NaN differs from itself, +0 equals -0, and FP8 has no equality. On a
CPU the comparison is `memcmp`; on a CUDA device it stays on the device and gives a flag tensor, so
that no operator makes the host wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def span(tensor: torch.Tensor) -> int:
    """Elements between the first and the last one that a strided tensor touches, inclusive."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.size(), tensor.stride()))


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each in a place of its own, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size())):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def alike_and_dense(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one size lie in memory in the same way, without holes."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() and dense(a)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen as integers of the same width; complex as pairs."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.size() == b.size()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool | torch.Tensor:
    """Whether two strided tensors hold the same bits.

    Args:
        a, b: Tensors of any dtype, on the same device.

    Returns:
        A bool, or on a CUDA device a 0-dim bool tensor that nobody has waited for.
    """
    if not same_geometry(a, b):
        return False
    count = a.numel()
    if count == 0:
        return True
    if a.device.type == "cpu":
        if not alike_and_dense(a, b) or a.is_conj() or a.is_neg():
            a, b = as_integers(a).contiguous(), as_integers(b).contiguous()
            count = a.numel()
        return _memcmp(a.data_ptr(), b.data_ptr(), count * a.element_size()) == 0
    return (as_integers(a) == as_integers(b)).all()


def difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, list[int] | None]:
    """How two tensors differ: (elements that differ, elements, bit positions that differ anywhere).

    Makes the host wait on a CUDA device; for reports only.
    """
    if not same_geometry(a, b):
        return max(a.numel(), b.numel()), max(a.numel(), b.numel()), None
    x = as_integers(a).contiguous().view(-1)
    y = as_integers(b).contiguous().view(-1)
    changed = x ^ y
    count = int((changed != 0).sum())
    width = 8 * x.element_size()
    bits = [bit for bit in range(width) if bool(((changed >> bit) & 1).any())]
    return count, x.numel(), bits


def majority(candidates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bitwise majority of three tensors of integers or booleans."""
    a, b, c = candidates
    if a.dtype is torch.bool:
        return (a & b) | (a & c) | (b & c)
    a, b, c = (as_integers(t) for t in (a, b, c))
    return ((a & b) | (a & c) | (b & c)).view(candidates[0].dtype)


def clone_span(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy with the same strides and the same alignment (modulo 64 bytes).

    Small matrix products give other bits when an operand's alignment differs; a view into a
    gradient buffer is copied alone, not with the whole buffer.
    """
    count = span(tensor)
    if count == 0:
        return tensor.clone()
    pad = (tensor.data_ptr() % 64) // tensor.element_size()
    memory = torch.empty(count + pad, dtype=tensor.dtype, device=tensor.device)
    copy = memory.as_strided(tensor.size(), tensor.stride(), pad)
    copy.copy_(tensor)
    return copy
