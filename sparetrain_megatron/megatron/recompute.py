"""Checkpointed blocks: the recompute as second execution, or as part of a segment to replay.

``tensor_parallel.checkpoint`` is the one attribute that every caller looks up (full recompute of the
transformer block, selective recompute of attention, MLP and MoE). It runs the function without grad
in the forward and again with grad in the backward; which of the two a call is, grad mode tells.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..dmr.engine import Engine
from ..patching import Patches


class Recompute:
    """Installs the wrappers for one engine.

    Attributes:
        index: How many blocks have been checkpointed in the forward of the present microbatch.
        layers: Number of the (last) layer in each block, by (model chunk, index).
    """

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel.random import CheckpointFunction

        self.chunk = 0
        self.index = 0
        self.layers: dict[tuple[int, int], int] = {}
        self._engine = engine
        original = tensor_parallel.checkpoint

        @functools.wraps(original)
        def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
            if engine.is_active and engine.piggyback:
                function = _Block(engine, function, self._method())
            return original(function, distribute_saved_activations, *args)

        patches.replace(tensor_parallel, "checkpoint", checkpoint)
        backward = CheckpointFunction.backward

        @functools.wraps(backward)
        def checkpointed_backward(ctx: Any, *gradients: Any) -> Any:
            if not engine.is_active:
                return backward(ctx, *gradients)
            # The block has a tape of its own, or none; what lies outside goes on with another.
            resume = engine.tape is not None
            engine.close_tape()
            try:
                return backward(ctx, *gradients)
            finally:
                engine.close_tape()
                if resume:
                    engine.open_tape()

        patches.replace(CheckpointFunction, "backward", staticmethod(checkpointed_backward))

    def begin_microbatch(self, chunk: int) -> None:
        self.chunk, self.index = chunk, 0

    def layer_ran(self, number: int) -> None:
        """A transformer layer ran in the forward, in a block if any has been begun."""
        if self.index:
            self.layers[self.chunk, self.index - 1] = number

    def _method(self) -> str:
        microbatch = self._engine.position.microbatch or 0
        method = self._engine.strategy.block(self.chunk, microbatch, self.index)
        self.index += 1
        return method


class _Block:
    """A checkpointed function: its first call is the forward, its second the recompute."""

    def __init__(self, engine: Engine, function: Any, method: str) -> None:
        self._engine = engine
        self._function = function
        self._method = method
        self._first: Any = None
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        self._key = f"{name.split('.<locals>')[0]}:{code.co_firstlineno if code else ''}"

    def __call__(self, *args: Any) -> Any:
        inputs = [a for a in args if isinstance(a, torch.Tensor)]
        if torch.is_grad_enabled():
            return self._recompute(args, inputs)
        engine = self._engine
        resume = engine.tape is not None
        engine.close_tape()
        try:
            return self._forward(args, inputs)
        finally:
            if resume:
                engine.open_tape()

    def _forward(self, args: tuple, inputs: list[torch.Tensor]) -> Any:
        engine = self._engine
        if self._method == "naive":
            return self._function(*args)
        key = f"{self._key}@{engine.position.layer}"
        first = self._first = engine.first_pass(key, inputs, self._method == "segment")
        if first is None:
            return self._function(*args)
        with engine.within(first):
            output = self._function(*args)
        engine.close_first_pass(first, _tensors(output))
        return output

    def _recompute(self, args: tuple, inputs: list[torch.Tensor]) -> Any:
        engine = self._engine
        first, self._first = self._first, None
        with engine.at(phase="recompute"):
            if first is None:
                return self._function(*args)
            second = engine.second_pass(first, inputs)
            if self._method == "segment":
                engine.open_tape()
            with engine.within(second):
                output = self._function(*args)
            if self._method == "segment":
                engine.compare_outputs(first, _tensors(output))
            elif self._method == "single":
                engine.open_tape()
            layer = engine.position.layer
            engine.close_second_pass(second)
        # The backward of this block follows, and belongs to the layer just recomputed.
        engine.position.layer = layer
        return output


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]
