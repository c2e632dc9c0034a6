"""Megatron's checkpointed blocks.

``tensor_parallel.checkpoint`` is the one attribute that every caller looks up (full recompute of
the transformer block, selective recompute of attention, MLP and MoE). It runs the function without
grad in the forward and again with grad in the backward.
"""

from __future__ import annotations

import functools
from typing import Any

from ..dmr.block import Blocks
from ..dmr.engine import Engine
from ..patching import Patches


class Recompute(Blocks):
    """Installs the wrappers for one engine."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.tensor_parallel.random import (
            CheckpointFunction,
            CheckpointWithoutOutput,
        )

        super().__init__(engine)
        original = tensor_parallel.checkpoint

        @functools.wraps(original)
        def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
            return original(self.block(function), distribute_saved_activations, *args)

        patches.replace(tensor_parallel, "checkpoint", checkpoint)
        self.wrap_backward(CheckpointFunction, patches)
        discard = CheckpointWithoutOutput.discard_output_and_register_recompute

        @functools.wraps(discard)
        def discard_output(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            if engine.is_active:
                engine.frees(checkpoint.outputs or ())
            return discard(checkpoint, *args, **kwargs)

        patches.replace(
            CheckpointWithoutOutput, "discard_output_and_register_recompute", discard_output
        )
        make_hook = DistributedDataParallel._make_backward_post_hook

        @functools.wraps(make_hook)
        def make_backward_post_hook(model: Any, parameter: Any) -> Any:
            hook = make_hook(model, parameter)

            def post_hook(*unused: Any) -> Any:
                if engine.binding is not None and parameter.grad is not None:
                    engine.gradient_ready(parameter.main_grad.data_ptr(), parameter.grad)
                with engine.seen():
                    return hook(*unused)

            return post_hook

        patches.replace(
            DistributedDataParallel, "_make_backward_post_hook", make_backward_post_hook
        )

    def wrap_backward(self, owner: Any, patches: Patches) -> None:
        """Wraps the backward of a checkpointing function, which runs the recompute.

        Args:
            owner: A ``torch.autograd.Function`` that keeps the block as ``run_function``.
        """
        backward = self.checkpointed_backward(owner.backward)
        patches.replace(owner, "backward", staticmethod(backward))
