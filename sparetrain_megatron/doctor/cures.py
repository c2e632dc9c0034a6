"""Which switch makes an operator reproducible, or protected."""

from __future__ import annotations

import re

DETERMINISTIC = "--deterministic-mode"

_CURES: tuple[tuple[str, str], ...] = (
    (r"compiled:.*", "--disable-jit-fuser, or TORCH_COMPILE_DISABLE=1 in the environment"),
    # Sums of indexed elements, in whatever order threads get there.
    (
        r"(scatter|index_add|index_put|_index_put_impl|index_reduce|put|embedding|cumsum|histc"
        r"|bincount|kthvalue|median|grid_sampler|upsample|max_pool|avg_pool|adaptive|reflection_pad"
        r"|replication_pad|nll_loss2d|ctc_loss|segment_reduce).*",
        f"{DETERMINISTIC} (torch's deterministic kernels)",
    ),
    (
        r".*(attention|attn).*",
        f"{DETERMINISTIC}, or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment",
    ),
    (
        r"(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|_scaled_mm|_grouped_mm|gemm|.*gemm.*)",
        f"{DETERMINISTIC}, or CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment",
    ),
    (r"(convolution|cudnn).*", f"{DETERMINISTIC} (deterministic cuDNN)"),
    (
        r".*(all_reduce|reduce_scatter|allreduce).*",
        f"{DETERMINISTIC}, or NCCL_ALGO=Ring in the environment",
    ),
)


def cure(operator: str) -> str | None:
    """The switch that is known to make an operator reproducible.

    Args:
        operator: Short name, as in events.

    Returns:
        None if none is known.
    """
    name = operator.rpartition("::")[2]
    for pattern, switch in _CURES:
        if re.fullmatch(pattern, name):
            return switch
    return None
