"""A tensor's fingerprint: a short value that differs when any bit, or the position of any element,
does.

On a CPU it is XXH3 (64 bits of its 128-bit variant's strength are kept) over the tensor's own
memory, at the speed of a plain read. On a CUDA device it is a Triton kernel, see
``fingerprint_triton``; the value then stays on the device.
"""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import torch
import xxhash

from .bits import as_integers, dense

Fingerprint: TypeAlias = "int | torch.Tensor"

_hash = xxhash.xxh3_64_intdigest
_char = ctypes.c_char


def memory_fingerprint(address: int, size: int) -> int:
    """Fingerprint of ``size`` bytes at ``address`` of this process's memory."""
    return _hash((_char * size).from_address(address))


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Fingerprint of a strided tensor's values in row-major order (dense layouts: in memory order).

    Args:
        tensor: Any dtype, any device; not modified.

    Returns:
        64 bits: an int for a CPU tensor, a 0-dim int64 tensor on its device for a CUDA tensor.
        Dtype and shape do not enter it.
    """
    if tensor.device.type != "cpu":
        from .fingerprint_triton import fingerprint as device_fingerprint

        return device_fingerprint(tensor)
    count = tensor.numel()
    if count == 0:
        return 0
    if tensor.is_conj() or tensor.is_neg() or not (tensor.is_contiguous() or dense(tensor)):
        # The integer view keeps NaN payloads and negative zeros through the copy.
        tensor = as_integers(tensor).contiguous()
        count = tensor.numel()
    return memory_fingerprint(tensor.data_ptr(), count * tensor.element_size())


_MASK = (1 << 64) - 1


def mix(value: int, index: int) -> int:
    """One word of a sum that does not depend on the order in which its words are added."""
    z = (value + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
