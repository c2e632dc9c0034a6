"""Checkpointed blocks: the recompute as second execution, or as part of a segment to replay.

``tensor_parallel.checkpoint`` is the one attribute that every caller looks up (full recompute of
the transformer block, selective recompute of attention, MLP and MoE). It runs the function without
grad in the forward and again with grad in the backward; which of the two a call is, grad mode
tells.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ..dmr.engine import Engine
from ..dmr.fingerprint import Fingerprint
from ..dmr.tape import Source
from ..dmr.template import Template, make, same_operators
from ..patching import Patches


class Recompute:
    """Installs the wrappers for one engine.

    Attributes:
        index: How many blocks have been checkpointed in the forward of the present microbatch.
        layers: Number of the (last) layer in each block, by (model chunk, index).
        templates: Of blocks that are bound, by (model chunk, index); None where one can't be made.
        binds: Whether blocks are bound at all.
    """

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.tensor_parallel.random import CheckpointFunction

        self.chunk = 0
        self.index = 0
        self.layers: dict[tuple[int, int], int] = {}
        self.templates: dict[tuple[int, int], Template | None] = {}
        self.binds = True
        self.engine = engine
        original = tensor_parallel.checkpoint

        @functools.wraps(original)
        def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
            return original(self.block(function), distribute_saved_activations, *args)

        patches.replace(tensor_parallel, "checkpoint", checkpoint)
        self.wrap_backward(CheckpointFunction, patches)
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

    def block(self, function: Any) -> Any:
        """A function that is about to be checkpointed, as a block of its own."""
        if not (self.engine.is_active and self.engine.piggyback):
            return function
        return _Block(self, function, (self.chunk, self.index), self._method())

    def wrap_backward(self, owner: Any, patches: Patches) -> None:
        """Wraps the backward of a checkpointing function, which runs the recompute.

        Args:
            owner: A ``torch.autograd.Function`` that keeps the block as ``run_function``.
        """
        engine, backward = self.engine, owner.backward

        @functools.wraps(backward)
        def checkpointed_backward(ctx: Any, *gradients: Any) -> Any:
            block = ctx.run_function
            if not engine.is_active or not isinstance(block, _Block):
                return backward(ctx, *gradients)
            # The block has a tape of its own, or none; what lies outside goes on with another.
            engine.close_tape()
            try:
                return block.backward(backward, ctx, gradients)
            finally:
                engine.close_tape()
                engine.resume_tape()

        patches.replace(owner, "backward", staticmethod(checkpointed_backward))

    def begin_microbatch(self, chunk: int) -> None:
        self.chunk, self.index = chunk, 0

    def layer_ran(self, number: int) -> None:
        """A transformer layer ran in the forward, in a block if any has been begun."""
        if self.index:
            self.layers[self.chunk, self.index - 1] = number

    def _method(self) -> str:
        microbatch = self.engine.position.microbatch or 0
        method = self.engine.strategy.block(self.chunk, microbatch, self.index)
        self.index += 1
        return method


class _Block:
    """A checkpointed function: its first call is the forward, its second the recompute."""

    def __init__(
        self, owner: Recompute, function: Any, place: tuple[int, int], method: str
    ) -> None:
        self._owner = owner
        self._engine = owner.engine
        self._function = function
        self._place = place
        self._method = method
        self._first: Any = None
        self._template: Template | None = None
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        self._key = f"{name.split('.<locals>')[0]}:{code.co_firstlineno if code else ''}"

    def __call__(self, *args: Any) -> Any:
        inputs = _tensors(args)
        if torch.is_grad_enabled():
            return self._recompute(args, inputs)
        engine = self._engine
        engine.close_tape()
        try:
            return self._forward(args, inputs)
        finally:
            engine.resume_tape()

    def _forward(self, args: tuple, inputs: list[torch.Tensor]) -> Any:
        engine = self._engine
        if self._method == "naive":
            return self._function(*args)
        key = f"{self._key}@{engine.position.layer}"
        first = self._first = engine.first_pass(key, inputs, self._method == "segment")
        if first is None:
            return self._function(*args)
        with engine.within(first), engine.unseen() if self._bound() else contextlib.nullcontext():
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
            if self._method == "segment" and engine.binding is None:
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

    # --- bound blocks --------------------------------------------------------------------------

    def _bound(self) -> bool:
        """Whether this run of the block is unseen: it has a template, and no fault is to hit it."""
        engine, owner = self._engine, self._owner
        return (
            owner.binds
            and self._method == "segment"
            and owner.templates.get(self._place) is not None
            and not engine.injector.armed
            and engine.observer is None
        )

    def backward(self, original: Any, ctx: Any, gradients: tuple) -> Any:
        """The recompute and the backward behind it."""
        engine = self._engine
        if self._method != "segment" or self._first is None:
            return original(ctx, *gradients)
        inputs, incoming = _tensors(ctx.saved_tensors), _tensors(gradients)
        template = self._owner.templates.get(self._place) if self._bound() else None
        if template is not None and template.fits(inputs, incoming) and not template.due():
            return self._run_bound(template, original, ctx, gradients, inputs, incoming)
        engine.closed.clear()
        result = original(ctx, *gradients)
        engine.close_tape(_tensors(result))
        self._learn(inputs, incoming)
        return result

    def _run_bound(
        self,
        template: Template,
        original: Any,
        ctx: Any,
        gradients: tuple,
        inputs: list[torch.Tensor],
        incoming: list[torch.Tensor],
    ) -> Any:
        engine = self._engine
        digests: dict[Source, Fingerprint] = {}
        engine.binding = digests
        try:
            with engine.unseen():
                result = original(ctx, *gradients)
        finally:
            engine.binding = None
        engine.push_bound(template, inputs, incoming, digests, _tensors(result))
        return result

    def _learn(self, inputs: list[torch.Tensor], incoming: list[torch.Tensor]) -> None:
        """Makes the block's template from its first recorded run; compares with it later on."""
        engine, owner = self._engine, self._owner
        tapes = list(engine.closed)
        engine.closed.clear()
        if not owner.binds or engine.observer is not None:
            return
        known = owner.templates.get(self._place)
        if self._place not in owner.templates:
            made = None
            if len(tapes) == 1:
                made = make(tapes[0], inputs, incoming, engine.deferred.constants)
            owner.templates[self._place] = made
        elif known is not None and not (len(tapes) == 1 and same_operators(known, tapes[0])):
            # It does not do the same every time, so it is recorded from now on.
            owner.templates[self._place] = None


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]
