"""What is refused when an engine is made: settings under which something would go unchecked.

A setting is on this list until it has been tested with faults, not because it could never work.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import SparetrainConfig
from ..errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """One setting of DeepSpeed.

    Attributes:
        key: Its path in the JSON.
        why: Why it can't be protected.
        values: The values that are refused; empty: any but the absence of it, false, 0 and null.
    """

    key: str
    why: str
    values: tuple[Any, ...] = ()


_UNTESTED = "its rollback has not been tested with faults"
_HIDDEN = "its kernels are not seen by the checks"

REFUSALS = (
    Refusal("fp16.enabled", "rollback of the loss scale is not tested; use bf16"),
    Refusal("amp.enabled", "rollback of the loss scale is not tested; use bf16"),
    Refusal("torch_autocast.enabled", _UNTESTED),
    Refusal("zero_optimization.zenflow", "it updates parameters outside of the optimizer's step"),
    Refusal("zero_optimization.offload_optimizer.device", _UNTESTED, ("nvme",)),
    Refusal("zero_optimization.offload_optimizer.super_offload", _UNTESTED),
    Refusal("zero_optimization.offload_param.device", _UNTESTED, ("cpu", "nvme")),
    Refusal("zero_optimization.zero_quantized_weights", _HIDDEN),
    Refusal("zero_optimization.zero_quantized_nontrainable_weights", _HIDDEN),
    Refusal("zero_optimization.zero_quantized_gradients", _HIDDEN),
    Refusal("compile.deepcompile", "its passes replace the graph behind the checks"),
    Refusal("activation_checkpointing.cpu_checkpointing", "offloaded inputs are not fingerprinted"),
    Refusal(
        "activation_checkpointing.partition_activations", "partitioned inputs are not fingerprinted"
    ),
    Refusal("activation_checkpointing.contiguous_memory_optimization", _UNTESTED),
    Refusal("hybrid_engine.enabled", _UNTESTED),
    Refusal("tensor_parallel.autotp_size", _UNTESTED),
    Refusal("expert_parallel.enabled", _UNTESTED),
    Refusal("data_efficiency.enabled", "its batches can't be replayed"),
    Refusal("curriculum_learning.enabled", "its batches can't be replayed"),
    Refusal("progressive_layer_drop.enabled", "its random choices are not put back"),
    Refusal("compression_training", _UNTESTED),
    Refusal("sparse_gradients", _UNTESTED),
    Refusal("autotuning.enabled", "it measures time, and protection takes some"),
    Refusal("flops_profiler.enabled", "it would count the second executions"),
)

_STEPS_ALONE = {"adam", "adamw", "sgd", "adagrad"}
"""Types of ``optimizer`` that step every parameter by itself, as the check of the step needs."""


def check(dictionary: dict[str, Any], config: SparetrainConfig) -> None:
    """Looks at DeepSpeed's configuration before the engine is built.

    Raises:
        UsageError: One line a refused setting, naming its key.
    """
    lines = []
    for refusal in REFUSALS:
        value = _at(dictionary, refusal.key)
        refused = value in refusal.values if refusal.values else bool(value)
        if refused and value != "auto":
            got = "" if isinstance(value, (dict, bool)) else f" {value}"
            lines.append(f"{refusal.key}{got} is not supported with sparetrain: {refusal.why}")
    optimizer = _at(dictionary, "optimizer.type")
    if optimizer is not None and str(optimizer).lower() not in _STEPS_ALONE:
        lines.append(
            f"optimizer.type {optimizer} is not supported with sparetrain: only "
            f"{', '.join(sorted(_STEPS_ALONE))} step every parameter by itself, as the check of "
            "the step needs"
        )
    if lines:
        raise UsageError("\n".join(lines))


def check_checkpointing() -> None:
    """As :func:`check`, for what ``deepspeed.checkpointing.configure`` was given.

    Raises:
        UsageError: One line a refused setting.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    for name, key in (
        ("PARTITION_ACTIVATIONS", "partition_activations"),
        ("CPU_CHECKPOINT", "cpu_checkpointing"),
        ("CONTIGUOUS_CHECKPOINTING", "contiguous_memory_optimization"),
    ):
        if getattr(checkpointing, name, False):
            raise UsageError(
                f"activation_checkpointing.{key} is not supported with sparetrain: its inputs are "
                "not fingerprinted"
            )


def _at(dictionary: dict[str, Any], path: str) -> Any:
    value: Any = dictionary
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
