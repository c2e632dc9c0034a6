"""Quantising to FP8 with one scale a tensor: delayed scaling and current scaling.

What a Hopper GPU does: an FP8 tensor has its data, and where a matrix product will need it, a
transposed copy. Block scaling and MXFP8 are not played here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .enums import FLOAT8, LARGEST, TORCH

_DELAYED = "Float8Quantizer"
_CURRENT = "Float8CurrentScalingQuantizer"


def is_quantized(value: Any) -> bool:
    """Whether it is one of Transformer Engine's FP8 tensors, or the storage of one."""
    return hasattr(value, "_fp8_dtype")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def shape_of(value: Any) -> tuple[int, ...]:
    """Logical shape of a tensor, quantised or not."""
    if not is_quantized(value):
        return tuple(value.shape)
    if value._data is not None:
        return tuple(value._data.shape)
    last, *leading = value._transpose.shape
    return (*leading, last)


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: Any = None,
    pin_memory: bool = False,
) -> Any:
    """An FP8 tensor with the memory that the quantizer's usages ask for."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    if type(quantizer).__name__ not in (_DELAYED, _CURRENT):
        raise NotImplementedError(f"{type(quantizer).__name__} has no CPU kernels")
    shape = tuple(int(n) for n in shape)
    values: dict[str, Any] = {
        "quantizer": quantizer,
        "fp8_dtype": quantizer.dtype,
        "data": torch.empty(shape, dtype=torch.uint8) if quantizer.rowwise_usage else None,
        "fp8_scale_inv": torch.empty(1),
        "data_transpose": None,
    }
    if quantizer.columnwise_usage:
        values["data_transpose"] = torch.empty((shape[-1], *shape[:-1]), dtype=torch.uint8)
    if quantizer.internal:
        # Called Float8TensorBase before 2.9.
        storage = next(
            c
            for c in Float8Tensor.__mro__
            if c.__name__ in ("Float8TensorStorage", "Float8TensorBase")
        )
        return storage(**values, fake_dtype=dtype)
    values |= {"shape": shape, "dtype": dtype}
    try:
        return Float8Tensor(**values, device=torch.device("cpu"))
    except TypeError:
        return Float8Tensor(**values)


def scale_of(amax: torch.Tensor, largest: float, epsilon: float, power_of_2: bool) -> torch.Tensor:
    """The scale that current scaling derives from the largest magnitude."""
    amax = amax.float().clamp_min(epsilon) if epsilon else amax.float()
    scale = largest / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)
    if power_of_2:  # the exponent's bits alone
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Casts to FP8; delayed scaling raises the quantizer's ``amax`` as the kernel does."""
    if noop is not None and float(noop) != 0:
        return output
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype)
    values = plain(tensor).contiguous().float()
    if values.numel() == 0:
        return output
    amax = values.abs().max().reshape(1)
    kind = int(quantizer.dtype)
    if type(quantizer).__name__ == _DELAYED:
        torch.maximum(quantizer.amax, amax.view_as(quantizer.amax), out=quantizer.amax)
        scale = quantizer.scale.reshape(1)
    else:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(
                amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group
            )
        scale = scale_of(amax, LARGEST[kind], quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    limit = LARGEST[kind]
    data = (values * scale).clamp(-limit, limit).to(FLOAT8[kind]).view(torch.uint8)
    output._scale_inv.copy_(1 / scale)
    if quantizer.rowwise_usage:
        if output._data is None:
            output._data = torch.empty(data.shape, dtype=torch.uint8)
        output._data.copy_(data.view(output._data.shape))
    else:
        output._data = None
    if quantizer.columnwise_usage:
        if output._transpose is None:
            output._transpose = torch.empty((data.shape[-1], *data.shape[:-1]), dtype=torch.uint8)
        output._transpose.copy_(fp8_transpose(data).view(output._transpose.shape))
    else:
        output._transpose = None
    output._transpose_invalid = output._transpose is None
    return output


def finished(
    values: torch.Tensor, quantizer: Any, output: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """How a fused kernel leaves its result: in high precision, or quantised."""
    values = values if dtype is None else values.to(dtype)
    if quantizer is not None:
        return quantize(values, quantizer, output)
    if output is None:
        return values
    output.copy_(values)
    return output


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    if input._data is not None:
        values = input._data.view(FLOAT8[int(input._fp8_dtype)]).float() * input._scale_inv
    else:
        kind = FLOAT8[int(input._fp8_dtype)]
        rows = input._transpose.reshape(input._transpose.shape[0], -1).view(kind)
        values = (rows.float() * input._scale_inv).t()
    return values.reshape(shape_of(input)).to(TORCH[int(otype)]).contiguous()


def fp8_transpose(input: torch.Tensor, dtype: Any = None, *, out: Any = None) -> torch.Tensor:
    """[..., k] to [k, ...], as a matrix of k columns is transposed."""
    flat = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    turned = flat.t().contiguous().view(input.shape[-1], *input.shape[:-1])
    if out is None:
        return turned
    out.copy_(turned.view(out.shape))
    return out


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    bias = input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype)
    return bias, input.contiguous() if quantizer is None else quantize(input, quantizer)


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    parts = torch.split(plain(tensor), list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list)]


def multi_tensor_quantize(tensors: Sequence[torch.Tensor], quantizers: Sequence[Any]) -> list[Any]:
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensors, quantizers)]


def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    amax.copy_(plain(tensor).abs().max().float().reshape(amax.shape))


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Delayed scaling, once a pass: histories move on by one, scales follow from them."""
    offset = 0
    for history, scale in zip(amax_histories, scales):
        length, count = history.shape
        new = amax_reduction_buffer[offset : offset + count]
        offset += count
        amax = new.clone()
        if length > 1:
            if amax_compute_algo == "max":
                amax = torch.maximum(history[1:].amax(0), new)
            history.copy_(torch.roll(history, -1, 0))
            history[-1] = new
        history[0] = 0
        fresh = LARGEST[int(fp8_dtype)] / amax / 2**margin
        fresh = torch.where(torch.isinf(fresh), torch.finfo(torch.float32).max, fresh)
        scale.copy_(torch.where((amax > 0) & torch.isfinite(amax), fresh, scale))
