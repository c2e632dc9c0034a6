"""What Megatron lacks where there is neither a GPU nor Apex or Transformer Engine.

Every function mends one limit, named after the upstream code that has it, and does nothing where
the limit is absent. They change no arithmetic of Megatron's own.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def mend() -> None:
    """Applies all mends once. They last as long as the process."""
    for mend_one in (
        compile_helpers,
        flags_of_fused_kernels,
        torch_norm,
        checkpoint_without_output,
        fused_adam,
        process_memory,
        max_connections,
        generator_warning,
        unequal_parts,
    ):
        mend_one()


def compile_helpers() -> None:
    """training/initialize.py runs ``make`` for the helper of the data sets.

    The wheel ships the built helper and no Makefile. This limit has nothing to do with the device.
    """
    import megatron.core.datasets.utils as utils

    built = _importable("megatron.core.datasets.helpers_cpp")
    if built and not Path(utils.__file__).with_name("Makefile").exists():
        utils.compile_helpers = _nothing


def flags_of_fused_kernels() -> None:
    """training/arguments.py turns on by default what only Apex or Transformer Engine can do.

    Without them, building the model fails. So that the flags of an ordinary run work as they are,
    these defaults fall back, and rank 0 says so.
    """
    import megatron.training.arguments as arguments

    if _marked(arguments.validate_args):
        return
    validate_args = arguments.validate_args

    @functools.wraps(validate_args)
    def validate_supported_args(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        _fall_back(args)
        return validate_args(args, *rest, **kwargs)

    _mark(validate_supported_args)
    arguments.validate_args = validate_supported_args
    # Before parse_and_validate_args existed (0.19), initialize_megatron called it by its own name.
    import megatron.training.initialize as initialize

    if hasattr(initialize, "validate_args"):
        initialize.validate_args = validate_supported_args


def _fall_back(args: Namespace) -> None:
    """Replaces flags that need a missing library, and prints which."""
    from megatron.core.tensor_parallel.random import HAVE_TE

    # What is asked for, whether it can be had, what replaces it, and how that is called as a flag.
    fallbacks = (
        ("transformer_impl", "transformer_engine", HAVE_TE, "local", "--transformer-impl local"),
        ("apply_rope_fusion", True, HAVE_TE, False, "--no-rope-fusion"),
        (
            "gradient_accumulation_fusion",
            True,
            _importable("fused_weight_gradient_mlp_cuda"),
            False,
            "--no-gradient-accumulation-fusion",
        ),
        (
            "masked_softmax_fusion",
            True,
            _importable("scaled_masked_softmax_cuda"),
            False,
            "--no-masked-softmax-fusion",
        ),
    )
    flags = []
    for name, wanted, available, replacement, flag in fallbacks:
        if getattr(args, name) == wanted and not available:
            setattr(args, name, replacement)
            flags.append(flag)
    if flags and int(os.environ.get("RANK", "0")) == 0:
        print(f"the CPU stands in for a CUDA device: {' '.join(flags)}", flush=True)


def torch_norm() -> None:
    """transformer/torch_norm.py refuses sequence parallelism and persistent kernels.

    The norms of Apex and Transformer Engine compute the same; they only mark their weights, so that
    finalize_model_grads sums these gradients over the tensor-parallel group. This does it for
    torch's.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if _marked(WrappedTorchNorm.__new__):
        return
    new = WrappedTorchNorm.__new__

    @functools.wraps(new)
    def new_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.persist_layer_norm = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = _mark(new_marked)


def checkpoint_without_output() -> None:
    """tensor_parallel/random.py: ``self.fp8 = fp8 is not None`` is true for the default ``False``.

    Selective recompute of ``layernorm`` then uses names of Transformer Engine that do not exist.
    """
    import megatron.core.tensor_parallel.random as random

    if random.HAVE_TE or _marked(random.CheckpointWithoutOutput.__init__):
        return
    init = random.CheckpointWithoutOutput.__init__

    @functools.wraps(init)
    def init_without_fp8(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.fp8 = False

    random.CheckpointWithoutOutput.__init__ = _mark(init_without_fp8)


def fused_adam() -> None:
    """optimizer/distrib_optimizer.py cannot load a checkpoint with torch's AdamW; see ``adam``."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    from sparetrain_megatron.hostdevice.adam import FusedAdam

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    # It copies the loaded values into views of FP32 parameters, outside of no_grad.
    cls = distrib_optimizer.DistributedOptimizer
    cls.load_state_dict = torch.no_grad()(cls.load_state_dict)


def process_memory() -> None:
    """dist_checkpointing/strategies/filesystem_async.py cannot save without psutil.

    It asks for the memory of the process around each write, for a line in the debug log, and the
    wheel does not require psutil. This limit has nothing to do with the device.
    """
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    if not filesystem_async.HAVE_PSUTIL:
        filesystem_async._process_memory = lambda: 0


def max_connections() -> None:
    """training/arguments.py wants CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism.

    It orders the kernels of a GPU's queues; the CPU has one queue.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def generator_warning() -> None:
    """tensor_parallel/random.py warns when the CPU's generator moved inside a fork of the device's.

    Here the two are one, so every dropout would warn.
    """

    def is_no_such_warning(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    if not any(_marked(known) for known in logger.filters):
        logger.addFilter(_mark(is_no_such_warning))


def unequal_parts() -> None:
    """tensor_parallel/mappings.py gathers and scatters parts of unequal sizes, which gloo can't.

    Experts that are split over tensor-parallel ranks need it. NCCL's process group makes of such a
    call one broadcast, or one reduction, for each part; so does this.
    """
    import torch.distributed as dist

    if _marked(dist.all_gather):
        return
    gather, scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(gather)
    def all_gather(
        parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _alike(parts):
            return gather(parts, tensor, group, async_op)
        for root, part in enumerate(parts):
            if root == dist.get_rank(group):
                part.copy_(tensor)
            if part.numel():
                dist.broadcast(part, group=group, group_src=root)
        return None

    @functools.wraps(scatter)
    def reduce_scatter(
        output: torch.Tensor,
        parts: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _alike(parts):
            return scatter(output, parts, op, group, async_op)
        for root, part in enumerate(parts):
            total = part.clone(memory_format=torch.contiguous_format)
            if part.numel():
                dist.reduce(total, op=op, group=group, group_dst=root)
            if root == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.all_gather, dist.reduce_scatter = _mark(all_gather), _mark(reduce_scatter)


def _alike(parts: list[torch.Tensor]) -> bool:
    return len({part.shape for part in parts}) <= 1


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _nothing() -> None:
    return None


def _mark(function: Callable[..., Any]) -> Callable[..., Any]:
    function._sparetrain_mend = True  # type: ignore[attr-defined]
    return function


def _marked(function: object) -> bool:
    return getattr(function, "_sparetrain_mend", False)
