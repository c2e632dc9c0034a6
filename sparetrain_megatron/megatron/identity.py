"""What a plan for Megatron depends on."""

from __future__ import annotations

from typing import Any

from ..plan import Identity


def identity(args: Any) -> Identity:
    """What a plan depends on, from Megatron's arguments."""
    from megatron.core import __version__

    def of(*names: str) -> dict[str, Any]:
        return {name: getattr(args, name, None) for name in names}

    return Identity(
        megatron=str(__version__),
        model=of(
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "seq_length",
            "micro_batch_size",
            "num_experts",
            "bf16",
            "swiglu",
            "normalization",
            "position_embedding_type",
        ),
        layout={
            **of(
                "world_size",
                "pipeline_model_parallel_size",
                "virtual_pipeline_model_parallel_size",
                "tensor_model_parallel_size",
                "expert_model_parallel_size",
                "context_parallel_size",
                "global_batch_size",
            )
        },
        flags=of(
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "sequence_parallel",
            "use_distributed_optimizer",
            "overlap_grad_reduce",
        ),
    )


def plans_for_stage() -> bool:
    """Whether this rank is the one of its pipeline stage that plans."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
