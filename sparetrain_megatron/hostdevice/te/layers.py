"""Norms, activations, softmax and rotary embeddings; inside in FP32, derivatives written out.

Derivatives are formulas and not autograd's, because a replay runs below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .enums import TORCH
from .quantize import bgrad_quantize, finished, plain

Function = Callable[[torch.Tensor], torch.Tensor]


# --- norms ---------------------------------------------------------------------------------------


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return plain(weight).float() + (1.0 if zero_centered else 0.0)


def _dtype(otype: Any) -> torch.dtype:
    return otype if isinstance(otype, torch.dtype) else TORCH[int(otype)]


def rmsnorm_fwd(
    input: Any,
    weight: Any,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    x = plain(input).float()
    rsigma = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    y = x * rsigma * _gamma(weight, zero_centered_gamma)
    return [finished(y, quantizer, ln_out, _dtype(otype)), None, rsigma.reshape(-1)]


def rmsnorm_bwd(
    dz: Any, x: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
) -> list[torch.Tensor]:
    dy, values = plain(dz).float().reshape(x.shape), plain(x).float()
    factor = rsigma.view(*x.shape[:-1], 1)
    normed = values * factor
    t = dy * _gamma(gamma, zero_centered_gamma)
    dx = factor * (t - normed * (t * normed).mean(-1, keepdim=True))
    dgamma = (dy * normed).reshape(-1, x.shape[-1]).sum(0)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype)]


def layernorm_fwd(
    input: Any,
    weight: Any,
    bias: Any,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    x = plain(input).float()
    mu = x.mean(-1, keepdim=True)
    rsigma = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
    y = (x - mu) * rsigma * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        y = y + plain(bias).float()
    return [finished(y, quantizer, ln_out, _dtype(otype)), mu.reshape(-1), rsigma.reshape(-1)]


def layernorm_bwd(
    dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
) -> list[torch.Tensor]:
    dy, values = plain(dz).float().reshape(x.shape), plain(x).float()
    rows = (*x.shape[:-1], 1)
    normed = (values - mu.view(rows)) * rsigma.view(rows)
    t = dy * _gamma(gamma, zero_centered_gamma)
    dx = rsigma.view(rows) * (
        t - t.mean(-1, keepdim=True) - normed * (t * normed).mean(-1, keepdim=True)
    )
    dgamma = (dy * normed).reshape(-1, x.shape[-1]).sum(0)
    dbeta = dy.reshape(-1, x.shape[-1]).sum(0)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]


# --- activations ---------------------------------------------------------------------------------

_ROOT = 0.7978845608028654  # sqrt(2 / pi)
_CUBE = 0.044715


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(_ROOT * (x + _CUBE * x**3)))


def gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(_ROOT * (x + _CUBE * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * x * x)


def _sigmoid_times(slope: float) -> tuple[Function, Function]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(slope * x)

    def derivative(x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(slope * x)
        return s + slope * x * s * (1 - s)

    return function, derivative


_ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "gelu": (gelu, gelu_derivative),
    "relu": (lambda x: x.clamp_min(0), lambda x: (x > 0).float()),
    "silu": _sigmoid_times(1.0),
    "srelu": (lambda x: x.clamp_min(0) ** 2, lambda x: 2 * x.clamp_min(0)),
    "qgelu": _sigmoid_times(1.702),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "sreglu": "srelu", "qgeglu": "qgelu"}


def _elementwise(name: str) -> dict[str, Any]:
    function, derivative = _ACTIVATIONS[name]

    def forward(input: Any, quantizer: Any) -> Any:
        return finished(function(plain(input).float()), quantizer, dtype=input.dtype)

    def gradient(grad: Any, input: Any) -> torch.Tensor:
        x = plain(input).float()
        return (plain(grad).float().reshape(x.shape) * derivative(x)).to(input.dtype)

    def backward(grad: Any, input: Any, quantizer: Any) -> Any:
        return finished(gradient(grad, input), quantizer)

    def with_bias(grad: Any, input: Any, quantizer: Any) -> list[Any]:
        return list(bgrad_quantize(gradient(grad, input), quantizer))

    return {name: forward, f"d{name}": backward, f"dbias_d{name}": with_bias}


def _gated(name: str) -> dict[str, Any]:
    function, derivative = _ACTIVATIONS[_GATED[name]]

    def forward(input: Any, quantizer: Any) -> Any:
        gate, up = plain(input).float().chunk(2, -1)
        return finished(function(gate) * up, quantizer, dtype=input.dtype)

    def backward(grad: Any, input: Any, quantizer: Any) -> Any:
        gate, up = plain(input).float().chunk(2, -1)
        dy = plain(grad).float().reshape(gate.shape)
        dx = torch.cat([dy * up * derivative(gate), dy * function(gate)], -1)
        return finished(dx, quantizer, dtype=input.dtype)

    return {name: forward, f"d{name}": backward}


# --- softmax -------------------------------------------------------------------------------------


def _softmax(x: torch.Tensor, scale: float, mask: Any, blocked: float) -> torch.Tensor:
    scores = plain(x).float() * scale
    if mask is not None:
        scores = scores.masked_fill(mask, blocked)
    return torch.softmax(scores, -1).to(x.dtype)


def scaled_softmax_forward(input: Any, scale: float) -> torch.Tensor:
    return _softmax(input, scale, None, 0.0)


def scaled_masked_softmax_forward(input: Any, mask: Any, scale: float) -> torch.Tensor:
    return _softmax(input, scale, mask.bool(), -10000.0)


def scaled_upper_triang_masked_softmax_forward(input: Any, scale: float) -> torch.Tensor:
    queries, keys = input.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return _softmax(input, scale, future, float("-inf"))


def scaled_softmax_backward(output_grads: Any, results: Any, scale: float) -> torch.Tensor:
    y, dy = plain(results).float(), plain(output_grads).float()
    return ((dy - (dy * y).sum(-1, keepdim=True)) * y * scale).to(results.dtype)


# --- rotary embeddings ---------------------------------------------------------------------------


def _rotate(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool, sign: float) -> torch.Tensor:
    """x: [s, b, h, d]; freqs: [s, 1, 1, d'] with d' <= d, the rest passes through."""
    width = freqs.shape[-1]
    values = plain(x).float()
    turned, rest = values[..., :width], values[..., width:]
    angles = freqs[: x.shape[0]].float()
    if interleaved:
        pairs = turned.unflatten(-1, (-1, 2))
        other = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    turned = turned * angles.cos() + sign * other * angles.sin()
    return torch.cat([turned, rest], -1).to(x.dtype)


def _rope(sign: float) -> Callable[..., torch.Tensor]:
    def fused_rope(input: Any, freqs: Any, *rest: Any) -> torch.Tensor:
        # In 2.8 the backward has no start_positions.
        start_positions, layout, interleaved, cu_seqlens, cp_size, _ = [None, *rest][-6:]
        if start_positions is not None or cu_seqlens is not None or cp_size > 1:
            raise NotImplementedError("this rotary embedding has no CPU kernel")
        in_order = input.transpose(0, 1) if int(layout) == 1 else input  # b s h d
        result = _rotate(in_order, freqs, interleaved, sign)
        return (result.transpose(0, 1) if int(layout) == 1 else result).contiguous()

    return fused_rope


KERNELS: dict[str, Any] = {
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "scaled_softmax_forward": scaled_softmax_forward,
    "scaled_softmax_backward": scaled_softmax_backward,
    "scaled_masked_softmax_forward": scaled_masked_softmax_forward,
    "scaled_masked_softmax_backward": scaled_softmax_backward,
    "scaled_upper_triang_masked_softmax_forward": scaled_upper_triang_masked_softmax_forward,
    "scaled_upper_triang_masked_softmax_backward": scaled_softmax_backward,
    "scaled_aligned_causal_masked_softmax_forward": scaled_upper_triang_masked_softmax_forward,
    "scaled_aligned_causal_masked_softmax_backward": scaled_softmax_backward,
    "fused_rope_forward": _rope(1.0),
    "fused_rope_backward": _rope(-1.0),
}
for _name in _ACTIVATIONS:
    KERNELS |= _elementwise(_name)
for _name in _GATED:
    KERNELS |= _gated(_name)
