"""Matrix products: FP8 by ``torch._scaled_mm``, the rest in FP32 and rounded once.

As on Hopper, an FP8 product reads both operands along the dimension that is summed over: where a
plain product would read columns, the transposed copy is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .enums import FLOAT8, TORCH
from .layers import gelu, gelu_derivative
from .quantize import dequantize, is_quantized, plain, quantize, shape_of


def _rows(operand: Any, along_last: bool) -> torch.Tensor:
    """FP8 data as a matrix whose rows run along the summed dimension."""
    if along_last:
        data = operand._data
        flat = data.reshape(-1, data.shape[-1])
    else:
        if operand._transpose is None or operand._transpose_invalid:
            raise RuntimeError("an FP8 product needs the operand's transpose")
        flat = operand._transpose.reshape(operand._transpose.shape[0], -1)
    return flat.view(FLOAT8[int(operand._fp8_dtype)])


def _matrix(operand: Any) -> torch.Tensor:
    if is_quantized(operand):
        operand = dequantize(operand, 4)
    operand = plain(operand)
    return operand.reshape(-1, operand.shape[-1]).float()


def _product(A: Any, transa: bool, B: Any, transb: bool, dtype: torch.dtype) -> torch.Tensor:
    """op(B) op(A): cuBLAS's column-major op(A) op(B), seen in row-major order."""
    if is_quantized(A) and is_quantized(B):
        a, b = _rows(A, along_last=transa), _rows(B, along_last=not transb)
        return torch._scaled_mm(
            b, a.t(), B._scale_inv.reshape(()), A._scale_inv.reshape(()), out_dtype=dtype
        )
    a, b = _matrix(A), _matrix(B)
    return ((b.t() if transb else b) @ (a.t() if transa else a)).to(dtype)


def _gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    grad: bool,
    accumulate: bool,
    use_gelu: bool = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """One product with its epilogue; returns D, the bias's gradient and what GeLU was given."""
    of_a, of_b = shape_of(A), shape_of(B)
    columns = math.prod(of_a[:-1]) if transa else of_a[-1]
    shape = ((of_b[-1],) if transb else of_b[:-1]) + (columns,)
    has_bias = bias is not None and bias.numel() > 0
    if math.prod(of_a) == 0 or math.prod(of_b) == 0:
        result = torch.zeros(shape, dtype=dtype)
    else:
        exact = accumulate or use_gelu or (has_bias and not grad)
        result = _product(A, transa, B, transb, torch.float32 if exact else dtype).reshape(shape)
        if alpha != 1.0:
            result = result * alpha
    bias_grad = before_gelu = None
    if has_bias:
        assert bias is not None
        if grad:
            bias_grad = _matrix(B).sum(0).to(bias.dtype)
        else:
            result = result + plain(bias).float()
    if use_gelu:
        if grad:
            assert gelu_in is not None
            result = result * gelu_derivative(plain(gelu_in).float()).reshape(shape)
        else:
            before_gelu = result.to(torch.bfloat16)
            result = gelu(result.float())
    if D is None:
        return result.to(dtype), bias_grad, before_gelu
    into = plain(D).view(shape)
    if accumulate:
        into.add_(result)
    else:
        into.copy_(result)
    return D, bias_grad, before_gelu


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Returns D, the bias's gradient, the input of GeLU and ``extra_output``."""
    if comm_overlap is not None:
        raise NotImplementedError("communication inside a matrix product has no CPU kernel")
    if output_dtype is not None:
        dtype = TORCH[int(output_dtype)]
    else:
        dtype = D.dtype if D is not None else A.dtype
    into = None if is_quantized(D) else D
    result, bias_grad, before_gelu = _gemm(
        A, transA, B, transB, into, dtype, bias, grad, accumulate, gelu, gelu_in, alpha
    )
    if quantizer is not None:
        result = quantize(result, quantizer, D if is_quantized(D) else None)
    return [result, bias_grad, before_gelu, extra_output]


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Any,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """One product an expert; with ``grad`` the gradients of biases go into ``bias``."""
    offset = 0
    for i in range(len(A)):
        if single_output:
            of_b = shape_of(B[i])
            rows = of_b[-1] if transb else math.prod(of_b[:-1])
            into = plain(D[0])[offset : offset + rows]
            offset += rows
        else:
            into = D[i]
        _, bias_grad, _ = _gemm(
            A[i],
            transa,
            B[i],
            transb,
            into if into.numel() else None,
            TORCH[int(D_type)],
            bias[i] if bias[i].numel() else None,
            grad,
            accumulate,
        )
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
    return bias
