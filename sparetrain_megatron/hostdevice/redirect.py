"""Sends every request for a CUDA device to the CPU: a torch function mode and where it is entered.

The mode sees each torch function before it runs. It is thread-local, and torch switches it off
inside the function that it handed on; ``enter_everywhere`` closes these two gaps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sparetrain_megatron.hostdevice._patches import Patches

CPU = torch.device("cpu")
_Tensor = torch.Tensor
_CUDA_TYPE = "torch.cuda."


def is_cuda_device(device: Any) -> bool:
    """Whether ``device``, as a caller may write it, names a CUDA device.

    Args:
        device: A string, an index, a ``torch.device`` or None.
    """
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    # Megatron writes `device=torch.cuda.current_device()` throughout, an index.
    return isinstance(device, int) and not isinstance(device, bool)


def _same_tensor(_func: Callable, args: tuple, _kwargs: dict) -> torch.Tensor:
    """``Tensor.cuda`` and ``Tensor.pin_memory``: the tensor is already where it should be."""
    return args[0]


def _copy_to_host(_func: Callable, args: tuple, _kwargs: dict) -> torch.Tensor:
    """``Tensor.cpu``: on a GPU it makes a copy and never an alias.

    DistributedOptimizer keeps the result while the source is overwritten
    (optimizer/distrib_optimizer.py, the gathering of parameter state for a checkpoint).
    """
    return args[0].clone()


def _to(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """``Tensor.to(device)`` with the device in the place of a positional argument."""
    if len(args) > 1 and is_cuda_device(args[1]):
        args = (args[0], CPU, *args[2:])
    return func(*args, **kwargs)


def _type(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``Tensor.type``: answers as for a CUDA tensor, and takes such a name.

    DistributedOptimizer sorts parameters by it and accepts only ``torch.cuda.*Tensor``
    (optimizer/distrib_optimizer.py, ``build_model_and_main_param_groups``).
    """
    if len(args) == 1 and not kwargs:
        name = func(*args)
        # A mode may be entered twice (see enter_everywhere); then the prefix is there already.
        return name if name.startswith(_CUDA_TYPE) else name.replace("torch.", _CUDA_TYPE, 1)
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace(_CUDA_TYPE, "torch."), *args[2:])
    return func(*args, **kwargs)


def _true(_func: Callable, _args: tuple, _kwargs: dict) -> bool:
    """``Tensor.is_cuda`` and ``Tensor.is_pinned``.

    The all-to-all token dispatcher of the experts only moves tensors "to the device" when they
    are not there (transformer/moe/moe_utils.py, ``maybe_move_tensor_to_cpu``).
    """
    return True


_HANDLERS: dict[Callable, Callable[[Callable, tuple, dict], Any]] = {
    _Tensor.cuda: _same_tensor,
    _Tensor.pin_memory: _same_tensor,
    _Tensor.cpu: _copy_to_host,
    _Tensor.to: _to,
    _Tensor.type: _type,
    vars(torch._C.TensorBase)["is_cuda"].__get__: _true,
    _Tensor.is_pinned: _true,
}


class HostDeviceMode(TorchFunctionMode):
    """Runs on CPU tensors what was written for the tensors of one CUDA device."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if kwargs:
            if is_cuda_device(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                # Pinning asks the CUDA driver (data loaders, CPU offload, async checkpoints).
                kwargs = {**kwargs, "pin_memory": False}
        else:
            kwargs = {}
        handler = _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(func, args, kwargs)


def enter_everywhere(patches: Patches) -> HostDeviceMode:
    """Enters the mode in this thread, in every new thread and around the autograd engine.

    Args:
        patches: Where the replaced attributes are remembered.

    Returns:
        The mode entered in this thread.
    """
    # torch.autograd.backward is itself a function that the mode hands on, and the mode is off while
    # it runs: without this, the backward of custom autograd functions and recomputation
    # (tensor_parallel/random.py, CheckpointFunction.backward) would ask for a real device.
    run_engine = torch.autograd.graph._engine_run_backward

    def run_engine_in_mode(*args: Any, **kwargs: Any) -> Any:
        with HostDeviceMode():
            return run_engine(*args, **kwargs)

    patches.set(torch.autograd.graph, "_engine_run_backward", run_engine_in_mode)
    patches.set(torch.autograd, "_engine_run_backward", run_engine_in_mode)

    # Threads of data loaders and of checkpoint writers.
    run_thread = threading.Thread.run

    def run_thread_in_mode(self: threading.Thread) -> None:
        with HostDeviceMode():
            run_thread(self)

    patches.set(threading.Thread, "run", run_thread_in_mode)

    mode = HostDeviceMode()
    mode.__enter__()
    return mode
