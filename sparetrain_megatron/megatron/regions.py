"""Tells the engine which microbatch, layer and phase an operator belongs to.

Wraps the schedules' ``forward_step`` and ``backward_step`` (module globals that every schedule
looks up at call time) and ``TransformerLayer``. In the backward, which has no modules, a hook on
each layer's output says when its gradients begin.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch

from ..dmr.engine import Engine
from ..dmr.operators import nested_tensors
from ..patching import Patches
from .recompute import Recompute

_TAG = "_sparetrain_microbatch"


class Regions:
    """Installs the wrappers for one engine."""

    def __init__(self, engine: Engine, patches: Patches, recompute: Recompute) -> None:
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.transformer_layer import TransformerLayer

        self._engine = engine
        self._recompute = recompute
        self._started: Counter[int] = Counter()
        self._finished = 0
        for name, wrapper in (
            ("forward_step", self._forward_step),
            ("backward_step", self._backward_step),
        ):
            original = getattr(schedules, name)
            patches.replace(schedules, name, functools.wraps(original)(wrapper(original)))
        original = TransformerLayer.__call__
        patches.replace(
            TransformerLayer, "__call__", functools.wraps(original)(self._layer(original))
        )

    def begin(self) -> None:
        """A schedule starts: microbatches are counted from 1 again."""
        self._started.clear()
        self._finished = 0

    def _forward_step(self, original: Any) -> Any:
        def forward_step(
            forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kw: Any
        ) -> Any:
            engine = self._engine
            if not engine.is_active:
                return original(forward_step_func, data_iterator, model, *args, **kw)
            self._started[id(model)] += 1  # each virtual stage counts by itself
            microbatch = self._started[id(model)]
            chunk = _virtual_stage(model)
            self._recompute.begin_microbatch(chunk)
            with (
                engine.at(phase="forward", microbatch=microbatch, layer="embedding"),
                engine.deferring_rest(chunk, microbatch, "forward"),
            ):
                result = original(forward_step_func, data_iterator, model, *args, **kw)
            for tensor in nested_tensors(result[0]):
                setattr(tensor, _TAG, (chunk, microbatch))
            return result

        return forward_step

    def _backward_step(self, original: Any) -> Any:
        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kw: Any) -> Any:
            engine = self._engine
            if not engine.is_active:
                return original(input_tensor, output_tensor, *args, **kw)
            self._finished += 1
            tagged = [getattr(t, _TAG, None) for t in nested_tensors(output_tensor)]
            chunk, microbatch = next((t for t in tagged if t), (0, self._finished))
            with (
                engine.at(phase="backward", microbatch=microbatch, layer="head"),
                engine.deferring_rest(chunk, microbatch, "backward"),
            ):
                return original(input_tensor, output_tensor, *args, **kw)

        return backward_step

    def _layer(self, original: Any) -> Any:
        engine = self._engine

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not engine.is_active:
                return original(layer, *args, **kwargs)
            position = engine.position
            number = layer.layer_number
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if position.layer == "embedding":
                self._on_gradient(hidden, "embedding")
            position.layer = number
            output = original(layer, *args, **kwargs)
            for tensor in nested_tensors(output):
                self._on_gradient(tensor, number)
            if position.phase == "forward":
                self._recompute.layer_ran(number)
                position.layer = "head"
            return output

        return call

    def _on_gradient(self, tensor: Any, layer: int | str) -> None:
        """From the moment that this tensor's gradient is there, the backward is in ``layer``."""
        node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        if node is None:
            return
        position = self._engine.position

        def reached(gradients: Any) -> None:
            position.layer = layer

        node.register_prehook(reached)


def _virtual_stage(model: Any) -> int:
    """Which of the rank's model chunks it is, from 0; data parallelism wraps it, say."""
    while getattr(model, "vp_stage", None) is None and hasattr(model, "module"):
        model = model.module
    return getattr(model, "vp_stage", None) or 0
