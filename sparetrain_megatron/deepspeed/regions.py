"""Tells the engine which layer an operator belongs to.

A transformer's layers are the children of its outermost ``ModuleList`` (a pipeline module's: its
own list). In the backward, which has no modules, a hook on each layer's output says when its
gradients begin.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dmr.block import Blocks
from ..dmr.engine import Engine
from .recording import tensors_of


class Regions:
    """Hooks on the layers of one module.

    Args:
        engine: This rank's engine.
        module: The model.
        blocks: Told which layer ran.
    """

    def __init__(self, engine: Engine, module: torch.nn.Module, blocks: Blocks) -> None:
        self._engine = engine
        self._blocks = blocks
        self._handles: list[Any] = []
        for number, layer in _layers(module):
            self._hook(number, layer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, number: int, layer: torch.nn.Module) -> None:
        engine = self._engine
        position = engine.position

        def before(module: Any, args: Any) -> None:
            if engine.is_active:
                if position.layer == "embedding":
                    self._on_gradient(args, "embedding")
                position.layer = number

        def after(module: Any, args: Any, output: Any) -> None:
            if engine.is_active:
                self._on_gradient(output, number)
                if position.phase == "forward":
                    self._blocks.layer_ran(number)
                    position.layer = "head"

        # First before all others: what they fetch belongs to the layer.
        self._handles.append(layer.register_forward_pre_hook(before, prepend=True))
        self._handles.append(layer.register_forward_hook(after))

    def _on_gradient(self, values: Any, layer: int | str) -> None:
        position = self._engine.position

        def reached(gradients: Any) -> None:
            position.layer = layer

        for tensor in tensors_of(values):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)


def _layers(module: torch.nn.Module) -> list[tuple[int, torch.nn.Module]]:
    functions: Any = getattr(module, "forward_funcs", None)
    if functions is not None:  # a stage of a pipeline
        start: Any = module._local_start
        return [
            (start + i + 1, f) for i, f in enumerate(functions) if isinstance(f, torch.nn.Module)
        ]
    lists = [(n, m) for n, m in module.named_modules() if isinstance(m, torch.nn.ModuleList)]
    # The outermost first: a layer's experts may be more than there are layers.
    _, found = max(lists, key=lambda entry: (-entry[0].count("."), len(entry[1])), default=("", ()))
    return [(i + 1, layer) for i, layer in enumerate(found)]
