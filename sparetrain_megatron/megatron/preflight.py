"""What is refused before training starts: settings under which something would go unchecked.

A setting is on this list until it has been tested with faults, not because it could never work.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from .. import hostdevice
from ..errors import UsageError
from ..foreign import seam

SUPPORTED = ((0, 17), (0, 19))
"""Oldest and newest release of Megatron-Core that this version has been run with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """One setting of Megatron.

    Attributes:
        flag: What the user wrote, or has to write.
        why: Why it can't be protected.
        instead: What to do.
        applies: Whether these arguments have it.
        hides: It only hides operators from the checks: without strict mode it may pass, counted.
    """

    flag: str
    why: str
    instead: str
    applies: Callable[[Any], bool]
    hides: bool = False


def _given(*names: str) -> Callable[[Any], bool]:
    return lambda args: any(getattr(args, name, None) for name in names)


def _above(name: str, limit: int) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _uses_te(args: Any) -> bool:
    return getattr(args, "transformer_impl", None) == "transformer_engine" and _installed(
        "transformer_engine"
    )


_REMOVE = "remove it"

REFUSALS = (
    Refusal(
        "--cuda-graph-impl",
        "captured graphs bypass the recompute and every check",
        _REMOVE,
        lambda args: (
            getattr(args, "enable_cuda_graph", False)
            or getattr(args, "external_cuda_graph", False)
            or (getattr(args, "cuda_graph_impl", None) or "none") != "none"
        ),
    ),
    Refusal(
        "--use-megatron-fsdp",
        "its hooks gather and release parameters behind the checks",
        "use --use-distributed-optimizer",
        _given("use_megatron_fsdp", "use_custom_fsdp"),
    ),
    Refusal(
        "--use-torch-fsdp2",
        "its hooks gather and release parameters behind the checks",
        "use --use-distributed-optimizer",
        _given("use_torch_fsdp2"),
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        "offloaded activations are not recomputed",
        _REMOVE,
        _given("cpu_offloading", "cpu_offloading_num_layers"),
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        "offloaded activations are not recomputed",
        _REMOVE,
        _given("fine_grained_activation_offloading"),
    ),
    Refusal(
        "--optimizer-cpu-offload",
        "its step has not been tested with faults",
        _REMOVE,
        _given("optimizer_cpu_offload"),
    ),
    Refusal("--fp16", "rollback of the loss scale is not tested", "use --bf16", _given("fp16")),
    Refusal(
        "--fp4-format",
        "its kernels have not been tested with faults",
        "use --fp8-format",
        _given("fp4", "fp4_format"),
        hides=True,
    ),
    Refusal(
        "--fp8-recipe",
        "only per-tensor scaling has been tested with faults",
        "use delayed or tensorwise",
        lambda args: (
            bool(getattr(args, "fp8", None) or getattr(args, "fp8_format", None))
            and getattr(args, "fp8_recipe", "delayed") not in ("delayed", "tensorwise")
        ),
        hides=True,
    ),
    Refusal(
        "--fp8-recipe tensorwise with --sequence-parallel",
        "Transformer Engine then reduces the largest value over ranks inside the kernel, which "
        "can't be executed twice",
        "use --fp8-recipe delayed",
        lambda args: (
            bool(getattr(args, "fp8", None) or getattr(args, "fp8_format", None))
            and getattr(args, "fp8_recipe", None) == "tensorwise"
            and bool(getattr(args, "sequence_parallel", False))
            and getattr(args, "tensor_model_parallel_size", 1) > 1
        ),
        hides=True,
    ),
    Refusal(
        "--fp8-param-gather",
        "parameters in FP8 have not been tested with faults",
        _REMOVE,
        _given("fp8_param", "fp8_param_gather"),
    ),
    Refusal(
        "--tp-comm-overlap",
        "collectives inside matrix products are not seen by the checks",
        _REMOVE,
        _given("tp_comm_overlap"),
    ),
    Refusal(
        "--context-parallel-size",
        "its attention has not been tested with faults",
        "set it to 1",
        _above("context_parallel_size", 1),
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "its schedule has not been tested with faults",
        _REMOVE,
        _given("overlap_moe_expert_parallel_comm"),
    ),
    Refusal(
        "--delay-wgrad-compute",
        "its schedule has not been tested with faults",
        _REMOVE,
        _given("delay_wgrad_compute"),
    ),
    Refusal(
        "--moe-token-dispatcher-type flex",
        "its communication is not seen by the checks",
        "use alltoall",
        lambda args: (
            getattr(args, "moe_token_dispatcher_type", None) == "flex"
            and bool(getattr(args, "num_experts", None))
        ),
    ),
    Refusal(
        "--mtp-num-layers",
        "multi-token prediction has not been tested with faults",
        _REMOVE,
        _above("mtp_num_layers", 0),
    ),
    Refusal(
        "--hybrid-layer-pattern",
        "kernels of state-space layers are not seen by the checks",
        "use a transformer",
        _given("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"),
        hides=True,
    ),
    Refusal(
        "--use-ring-exchange-p2p",
        "it communicates outside of torch.distributed's operators",
        _REMOVE,
        _given("use_ring_exchange_p2p"),
    ),
    Refusal(
        "--use-precision-aware-optimizer",
        "its step has not been tested with faults",
        _REMOVE,
        _given("use_precision_aware_optimizer"),
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        "parameters would be gathered before the optimizer's step has been verified",
        _REMOVE,
        _given("overlap_param_gather_with_optimizer_step"),
    ),
    Refusal(
        "--optimizer",
        "only adam and sgd step every parameter by itself, as the check of the step needs",
        "use adam or sgd",
        lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
    ),
    Refusal(
        "--transformer-impl transformer_engine",
        "what the kernels of releases before 2.8 read and write is not known",
        "use Transformer Engine 2.8 or newer, or --transformer-impl local",
        lambda args: _uses_te(args) and (seam.installed_version() or (0, 0)) < (2, 8),
        hides=True,
    ),
    Refusal(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "the backward of fused attention may add in any order, so two executions differ on healthy "
        "hardware",
        "set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment",
        lambda args: (
            _uses_te(args)
            and not hostdevice.installed()
            and os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
        ),
    ),
    Refusal(
        "--moe-permute-fusion",
        "Transformer Engine's Triton kernels are not seen by the checks",
        _REMOVE,
        _given("moe_permute_fusion"),
        hides=True,
    ),
    Refusal(
        "--cross-entropy-fusion-impl te",
        "Transformer Engine's Triton kernels are not seen by the checks",
        "use --cross-entropy-fusion-impl native",
        lambda args: (
            bool(getattr(args, "cross_entropy_loss_fusion", False))
            and getattr(args, "cross_entropy_fusion_impl", None) == "te"
        ),
        hides=True,
    ),
)


def check(args: Any, strict: bool) -> list[Refusal]:
    """Looks at Megatron's parsed arguments before the model is built.

    Args:
        args: ``megatron.training.get_args()``.
        strict: Refuse what hides operators, too.

    Returns:
        What hides operators and is let pass, to be counted as unprotected.

    Raises:
        UsageError: One line a refused setting, with what to do.
    """
    found = [refusal for refusal in REFUSALS if refusal.applies(args)]
    refused = [r for r in found if strict or not r.hides]
    if refused:
        lines = []
        for r in refused:
            hint = " (or --no-sparetrain-strict, to train on and count it)" if r.hides else ""
            lines.append(f"{r.flag} is not supported with --sparetrain: {r.why}; {r.instead}{hint}")
        raise UsageError("\n".join(lines))
    return found


def megatron_version() -> tuple[int, int]:
    """(major, minor) of the installed Megatron-Core.

    Raises:
        UsageError: It is older than what this version supports.
    """
    from megatron.core import __version__

    major, minor = (int(part) for part in str(__version__).split(".")[:2])
    if (major, minor) < SUPPORTED[0]:
        raise UsageError(
            f"Megatron-Core {__version__} is not supported; "
            f"{SUPPORTED[0][0]}.{SUPPORTED[0][1]} is the oldest release that is"
        )
    return major, minor
