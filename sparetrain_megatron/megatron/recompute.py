"""P-DMR at Megatron's activation checkpointing.

``tensor_parallel.checkpoint`` is the one attribute that every caller looks up (full recompute of the
transformer block, selective recompute of attention, MLP and MoE). It runs the function without grad in
the forward and again with grad in the backward; which of the two a call is, grad mode tells.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..dmr.engine import Engine
from ..patching import Patches


class Recompute:
    """Makes the recompute the second execution of the forward."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core import tensor_parallel

        self._engine = engine
        original = tensor_parallel.checkpoint

        @functools.wraps(original)
        def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
            if engine.is_active and engine.piggyback:
                function = _Segment(engine, function)
            return original(function, distribute_saved_activations, *args)

        patches.replace(tensor_parallel, "checkpoint", checkpoint)


class _Segment:
    """A checkpointed function: its first call is the forward, its second the recompute."""

    def __init__(self, engine: Engine, function: Any) -> None:
        self._engine = engine
        self._function = function
        self._first: Any = None
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        self._key = f"{name.split('.<locals>')[0]}:{code.co_firstlineno if code else ''}"

    def __call__(self, *args: Any) -> Any:
        engine = self._engine
        inputs = [a for a in args if isinstance(a, torch.Tensor)]
        if not torch.is_grad_enabled():
            key = f"{self._key}@{engine.position.layer}"
            self._first = first = engine.first_pass(key, inputs)
            if first is None:
                return self._function(*args)
            with engine.within(first):
                return self._function(*args)
        first, self._first = self._first, None
        if first is None:
            with engine.at(phase="recompute"):
                return self._function(*args)
        with engine.at(phase="recompute"):
            second = engine.second_pass(first, inputs)
            with engine.within(second):
                output = self._function(*args)
            layer = engine.position.layer
            engine.close_second_pass(second)
        # The backward of this segment follows, and belongs to the layer just recomputed.
        engine.position.layer = layer
        return output
