"""Fingerprint of a tensor in device memory, as a Triton kernel.

The tensor's bytes are read as little-endian words of 8, the last one filled up with zeros. Word
``i`` goes through a bijection chosen by ``i`` (splitmix64 of ``word + (i + 1) * golden ratio``),
and the results are added modulo 2**64:

- one changed word always changes the sum, since its mix is a bijection;
- swapped, shifted or negated words change it as two random sums differ, since position enters;
- addition of integers is associative, so blocks, their order and atomics don't matter, and the
  plain torch reference gives the same 64 bits.

The value stays on the device: nothing here makes the host wait.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .bits import as_integers, dense

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_BLOCK = 1024  # words that a program reads at a time
_PROGRAMS_PER_PROCESSOR = 8
_UNITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _fingerprint_kernel(
    data,  # pointer to unsigned integers of 8 / PER_WORD bytes
    out,  # pointer to one int64, zero unless ALONE
    units,  # how many of them
    words,
    PER_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,  # whether a single program runs
):
    GOLDEN: tl.constexpr = 0x9E3779B97F4A7C15
    MIX_1: tl.constexpr = 0xBF58476D1CE4E5B9
    MIX_2: tl.constexpr = 0x94D049BB133111EB
    UNIT_BITS: tl.constexpr = 64 // PER_WORD
    total = tl.zeros((BLOCK,), tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for begin in range(first, words, step):
        i = begin + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.zeros((BLOCK,), tl.uint64)
        for part in tl.static_range(PER_WORD):
            unit = i * PER_WORD + part
            value = tl.load(data + unit, mask=unit < units, other=0).to(tl.uint64)
            word |= value << (part * UNIT_BITS)
        z = word + (i + 1).to(tl.uint64, bitcast=True) * GOLDEN
        z = (z ^ (z >> 30)) * MIX_1
        z = (z ^ (z >> 27)) * MIX_2
        z = z ^ (z >> 31)
        total += tl.where(i < words, z.to(tl.int64, bitcast=True), 0)
    result = tl.sum(total, axis=0)
    if ALONE:
        tl.store(out, result)
    else:
        tl.atomic_add(out, result, sem="relaxed")


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Fingerprint of a strided tensor's values in row-major order (dense layouts: memory order).

    Args:
        tensor: Any dtype and size, on the current CUDA device; not modified.

    Returns:
        A 0-dim int64 tensor on the same device; 0 for an empty tensor. Dtype and shape do not
        enter it.
    """
    tensor = _dense(tensor)
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    # The widest load that the address and the size allow.
    unit = next(u for u in (8, 4, 2, 1) if (tensor.data_ptr() | size) % u == 0)
    words = (size + 7) // 8
    programs = min(triton.cdiv(words, _BLOCK), _programs(tensor.device))
    alone = programs == 1
    make = torch.empty if alone else torch.zeros
    out = make((), dtype=torch.int64, device=tensor.device)
    _fingerprint_kernel[(programs,)](
        triton.reinterpret(tensor, _UNITS[unit]),
        out,
        size // unit,
        words,
        PER_WORD=8 // unit,
        BLOCK=_BLOCK,
        ALONE=alone,
    )
    return out


def fingerprint_reference(tensor: torch.Tensor) -> torch.Tensor:
    """The same value as ``fingerprint``, from plain torch operators on any device; slow."""
    data = as_integers(_dense(tensor))
    flat = data.as_strided((data.numel(),), (1,))
    flat = flat.contiguous().view(torch.uint8)
    padded = torch.zeros((flat.numel() + 7) // 8 * 8, dtype=torch.uint8, device=tensor.device)
    padded[: flat.numel()] = flat
    z = padded.view(torch.int64)
    z = z + torch.arange(1, z.numel() + 1, device=z.device) * _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return (z ^ _shift_right(z, 31)).sum()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements lie one after the other in memory."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg() or not dense(tensor):
        # The integer view keeps NaN payloads and negative zeros through the copy.
        return as_integers(tensor).contiguous()
    return tensor


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * processors


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64, whose own shift is arithmetic."""
    return (z >> count) & ((1 << (64 - count)) - 1)
