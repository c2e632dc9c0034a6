"""Transformer Engine on a CPU: its real Python layer over kernels written with torch.

Transformer Engine's Python package is pure Python; all its kernels are functions of one extension
module, ``transformer_engine_torch``. ``install`` puts a module with CPU kernels in that place and
imports the real package on top. It plays a Hopper GPU: BF16, and FP8 with one scale a tensor
(delayed and current scaling), products of FP8 by ``torch._scaled_mm``. Fused attention is reported
as unavailable, so attention is Transformer Engine's unfused one.

For tests and trials, as the rest of ``hostdevice``. Needs only the wheel ``transformer-engine``.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from importlib.metadata import version
from typing import Any
from unittest.mock import MagicMock

import torch

from sparetrain_megatron.hostdevice.te import enums, gemm, layers, optimizers, quantize

EXTENSION = "transformer_engine_torch"
CAPABILITY = (9, 0)

_KERNELS: dict[str, Any] = {
    **layers.KERNELS,
    **{
        function.__name__: function
        for function in (
            quantize.create_empty_quantized_tensor,
            quantize.quantize,
            quantize.dequantize,
            quantize.fp8_transpose,
            quantize.bgrad_quantize,
            quantize.split_quantize,
            quantize.multi_tensor_quantize,
            quantize.compute_amax,
            quantize.fused_amax_and_scale_update_after_reduction,
            gemm.generic_gemm,
            gemm.te_general_grouped_gemm,
            optimizers.multi_tensor_l2norm,
            optimizers.multi_tensor_scale,
            optimizers.multi_tensor_adam,
            optimizers.fused_multi_row_padding,
            optimizers.fused_multi_row_unpadding,
            optimizers.swap_first_dims,
        )
    },
    "multi_tensor_scale_tensor": optimizers.multi_tensor_scale,
}
_CLASSES = (
    "CommOverlapCore",
    "CommOverlapBase",
    "CommOverlapP2PBase",
    "CommOverlap",
    "CommOverlapP2P",
    "CommOverlapHelper",
)


class FP8TensorMeta:
    """Scales and histories of one module's tensors."""

    scale: Any = None
    scale_inv: Any = None
    amax_history: Any = None


def installed() -> bool:
    """Whether Transformer Engine runs on CPU kernels in this process."""
    return isinstance(sys.modules.get(EXTENSION), _Extension)


def install() -> None:
    """Imports ``transformer_engine.pytorch`` over CPU kernels; does nothing the second time.

    ``hostdevice.install`` must have been called. Comes before Megatron is imported, which looks for
    Transformer Engine only once.

    Raises:
        RuntimeError: There is no stand-in device, or Transformer Engine has been imported already.
        ImportError: The wheel ``transformer-engine`` is not installed.
    """
    from sparetrain_megatron import hostdevice

    if installed():
        return
    if not hostdevice.installed():
        raise RuntimeError("hostdevice.install() has to be called before hostdevice.te.install()")
    if "transformer_engine" in sys.modules:
        raise RuntimeError("transformer_engine has been imported already")
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.loader is None:
        raise ImportError("transformer-engine is not installed")
    _play_hopper()
    _stand_in_for_onnx()
    sys.modules[EXTENSION] = extension()
    # Its common part then loads neither the core library nor CUDA's.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    try:
        package = importlib.util.module_from_spec(spec)
        sys.modules["transformer_engine"] = package
        import transformer_engine.common as common

        # It would load the extension from a shared library and overwrite sys.modules.
        common.load_framework_extension = lambda framework: None
        spec.loader.exec_module(package)
    finally:
        del os.environ["NVTE_PROJECT_BUILDING"]
    import transformer_engine.pytorch  # noqa: F401


class _Extension(types.ModuleType):
    """The stand-in module; what it lacks raises only when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{EXTENSION}.{name} has no CPU kernel")

        missing.__name__ = name
        # Everyone who asks gets the same object, as of a real module.
        setattr(self, name, missing)
        return missing


def extension() -> types.ModuleType:
    """A module with CPU kernels in the place of ``transformer_engine_torch``."""
    release = version("transformer-engine").split(".")
    numbers = (int(release[0]), int(release[1]))
    module = _Extension(EXTENSION)
    vars(module).update(enums.enumerations(numbers))
    for name in _CLASSES:
        setattr(module, name, type(name, (), {}))
    no_backend = module.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    answers: dict[str, Any] = {
        "get_cublasLt_version": 130100,
        "get_cudnn_version": 92000,
        "get_num_cublas_streams": 4,
        "get_stream_priority_range": (0, -5),
        "ubuf_built_with_mpi": False,
        "device_supports_multicast": False,
        "nvte_built_with_cublasmp": False,
        # Since 2.20 with a reason.
        "get_fused_attn_backend": (no_backend, "CPU") if numbers >= (2, 20) else no_backend,
    }
    for name, value in answers.items():
        setattr(module, name, _answer(value))
    module.get_grouped_gemm_setup_workspace_size = lambda count: 1024 * count  # type: ignore
    module.FP8TensorMeta = FP8TensorMeta  # type: ignore[attr-defined]
    for name, kernel in _KERNELS.items():
        setattr(module, name, _without_grad(kernel))
    return module


def _without_grad(kernel: Any) -> Any:
    """Kernels take no part in autograd."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return kernel(*args, **kwargs)

    return call


def _answer(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _play_hopper() -> None:
    """FP8 needs a newer device than the one that ``hostdevice.surface`` plays."""
    properties = torch.cuda.get_device_properties(0)
    newer = types.SimpleNamespace(**vars(properties))
    newer.major, newer.minor = CAPABILITY
    torch.cuda.get_device_capability = _answer(CAPABILITY)
    torch.cuda.get_device_properties = _answer(newer)


def _stand_in_for_onnx() -> None:
    """``transformer_engine.pytorch.onnx_extensions`` imports both at the top."""
    for name in ("onnx", "onnxscript"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            spec = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = MagicMock(__spec__=spec, __name__=name)
