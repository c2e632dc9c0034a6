"""What a plan for a DeepSpeed engine depends on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from ..plan import Identity


def identity(engine: Any) -> Identity:
    """From the engine and its configuration."""
    from deepspeed import __version__

    shapes = [
        (name, tuple(getattr(p, "ds_shape", p.shape)))
        for name, p in engine.module.named_parameters()
    ]
    dictionary = engine._config._param_dict
    grid = getattr(engine, "grid", None)
    zero = dictionary.get("zero_optimization") or {}
    return Identity(
        megatron=f"deepspeed {__version__}",
        model={
            "module": type(engine.module).__name__,
            # A stage of a pipeline has parameters of its own.
            "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
            "bf16": engine.bfloat16_enabled(),
        },
        layout={
            "world_size": dist.get_world_size(),
            "pipeline": 1 if grid is None else grid.pipe_parallel_size,
            "data": engine.dp_world_size,
            "accumulation": engine.gradient_accumulation_steps(),
        },
        flags={
            "zero_stage": engine.zero_optimization_stage(),
            "offload_optimizer": bool(engine.zero_use_cpu_optimizer()),
            "reduce_bucket_size": engine.zero_reduce_bucket_size(),
            "overlap_comm": bool(zero.get("overlap_comm", False)),
            "activation_checkpoint_interval": getattr(
                engine.module, "activation_checkpoint_interval", None
            ),
        },
    )


def plans_for_stage(engine: Any) -> bool:
    """Whether this rank is the one of its pipeline stage that plans."""
    grid = getattr(engine, "grid", None)
    if grid is None:
        return dist.get_rank() == 0
    return grid.get_data_parallel_id() == 0 and grid.get_slice_parallel_rank() == 0
