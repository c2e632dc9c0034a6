"""What Megatron's optimizer calls on lists of tensors, and row padding for grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .quantize import plain

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = [plain(t).float().norm() for t in tensor_lists[0]]
    each = torch.stack(norms) if norms else torch.zeros(0)
    return each.norm().reshape(1), each if per_tensor else torch.zeros(0)


def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: Lists, scale: Any) -> None:
    for source, target in zip(*tensor_lists):
        plain(target).copy_(plain(source).float() * scale)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists of gradients, parameters and both moments, and of main parameters if there are any.

    Mode 0 adds the weight decay to the gradient, mode 1 (AdamW) to the update.
    """
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for tensors in zip(*tensor_lists):
        grad, parameter, m, v = (plain(t) for t in tensors[:4])
        main = plain(tensors[4]) if len(tensors) > 4 else parameter
        grad = grad.float()
        if mode == 0:
            grad = grad + weight_decay * main.float()
        m.mul_(beta1).add_(grad * (1 - beta1))
        v.mul_(beta2).add_(grad * grad * (1 - beta2))
        update = (m.float() / first) / ((v.float() / second).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * main.float()
        main.copy_(main.float() - lr * update)
        if main is not parameter:
            parameter.copy_(main)


def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, rows: Sequence[int], padded: Sequence[int]
) -> None:
    """Each group of rows is followed by zeros up to its padded length."""
    source = target = 0
    plain(output).zero_()
    for count, length in zip(rows, padded):
        plain(output)[target : target + count] = plain(input)[source : source + count]
        source, target = source + count, target + length


def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, rows: Sequence[int], unpadded: Sequence[int]
) -> None:
    source = target = 0
    for length, count in zip(rows, unpadded):
        plain(output)[target : target + count] = plain(input)[source : source + count]
        source, target = source + length, target + count


def swap_first_dims(tensor: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    swapped = plain(tensor).transpose(0, 1).contiguous()
    if out is None:
        return swapped
    out.copy_(swapped)
    return out
