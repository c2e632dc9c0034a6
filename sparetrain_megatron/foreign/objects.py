"""Transformer Engine's quantised tensors and quantizers, taken apart into plain tensors.

By attributes and class names, so that nothing of Transformer Engine is imported: storage classes
were called ``...TensorBase`` up to 2.8 and ``...TensorStorage`` since.

FP8 bytes are shown to the core as FP8 and not as the integers that hold them: a wrong integer could
be a wrong index and is checked at once, a wrong FP8 value can wait like any other number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dmr.foreign import Parts, Unsupported

_FORMATS = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
_COPIES = ("_transpose", "_columnwise")
_STATE = {
    # Delayed scaling: the kernel raises the amax by what it sees; the scale is only read.
    "Float8Quantizer": ("amax",),
    # Up to 2.16 current scaling has both as buffers that the kernel fills.
    "Float8CurrentScalingQuantizer": ("amax", "scale"),
    "Float8BlockQuantizer": (),
    "MXFP8Quantizer": (),
}


def take_apart(value: Any) -> Parts | None:
    """The tensors of one of Transformer Engine's objects; None if it is none.

    Raises:
        Unsupported: Executing a kernel on it again would do more than compute.
    """
    if value is None or type(value) in (torch.Tensor, bool, int, float, str):
        return None
    if hasattr(value, "prepare_for_saving") and hasattr(value, "update_usage"):
        return _quantized(value)
    if hasattr(value, "set_usage") and hasattr(value, "make_empty"):
        return _quantizer(value)
    if type(value).__name__.startswith("CommOverlap"):
        raise Unsupported("communication inside of it")
    return None


def _quantized(value: Any) -> Parts:
    """A quantised tensor becomes a bare storage: kernels take either, and it needs no autograd."""
    kind = _FORMATS.get(int(getattr(value, "_fp8_dtype", None) or 0))
    if kind is None:
        raise Unsupported(f"{type(value).__name__} is not taken apart")
    storage = type(value)
    if issubclass(storage, torch.Tensor):
        storage = next(
            c
            for c in storage.__mro__
            if c.__name__.endswith(("TensorStorage", "TensorBase"))
            and "Quantized" not in c.__name__
        )
    rest = dict(vars(value))
    names = [name for name, item in rest.items() if isinstance(item, torch.Tensor)]
    if not any(rest[name].numel() for name in names if "scale" not in name):
        names = []  # an expert without tokens: nobody has written its scale
    tensors = []
    for name in names:
        tensor = rest.pop(name)
        data = tensor.dtype is torch.uint8 and "scale" not in name
        tensors.append(tensor.detach().view(kind) if data else tensor.detach())
    if issubclass(type(value), torch.Tensor):
        rest["_dtype"] = value.dtype

    def put_together(given: Sequence[torch.Tensor]) -> Any:
        made = object.__new__(storage)
        vars(made).update(rest)
        for name, tensor in zip(names, given):
            vars(made)[name] = tensor.view(torch.uint8) if tensor.dtype is kind else tensor
        return made

    # Data for products that sum along the other dimension.
    copies = tuple(i for i, name in enumerate(names) if name.startswith(_COPIES))
    return Parts(tensors, put_together, copies=copies)


def _quantizer(value: Any) -> Parts:
    kind = type(value).__name__
    if kind not in _STATE:
        raise Unsupported(f"{kind} is not taken apart")
    if getattr(value, "with_amax_reduction", False):
        group = getattr(value, "amax_reduction_group", None)
        if group is not None and torch.distributed.get_world_size(group) > 1:
            raise Unsupported("an all-reduce inside of it")
    rest = dict(vars(value))
    names = [name for name, item in rest.items() if isinstance(item, torch.Tensor)]
    tensors = [rest.pop(name) for name in names]
    cls = type(value)

    def put_together(given: Sequence[torch.Tensor]) -> Any:
        made = object.__new__(cls)
        vars(made).update(rest)
        vars(made).update(zip(names, given))
        return made

    state = tuple(i for i, name in enumerate(names) if name in _STATE[kind])
    return Parts(tensors, put_together, state)
