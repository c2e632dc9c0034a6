"""Checkpointed blocks: the recompute as the second execution of the forward.

DeepSpeed's and torch's checkpoint functions are met below their names, at what every caller of them
ends in, so that a name that was imported before makes no difference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..dmr.engine import Engine
from ..dmr.operators import nested_tensors
from ..dmr.piggyback import FirstPass
from ..patching import Patches


class Recompute:
    """Installs the wrappers for one engine.

    Args:
        kept: A context in which parameters that are gathered for the recompute stay gathered.
    """

    def __init__(
        self,
        engine: Engine,
        patches: Patches,
        kept: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        from deepspeed.runtime.activation_checkpointing import checkpointing
        from torch.utils import checkpoint as torch_checkpoint

        self._engine = engine
        self._kept = kept
        for owner in (checkpointing.CheckpointFunction, torch_checkpoint.CheckpointFunction):
            forward = owner.forward
            patches.replace(owner, "forward", staticmethod(self._reentrant(forward)))
        name = "_checkpoint_without_reentrant_generator"
        generator = getattr(torch_checkpoint, name)
        patches.replace(torch_checkpoint, name, self._without_reentrant(generator))
        original = checkpointing.non_reentrant_checkpoint

        @functools.wraps(original)
        def non_reentrant_checkpoint(function: Any, *args: Any) -> Any:
            return original(self._block(function), *args)

        patches.replace(checkpointing, "non_reentrant_checkpoint", non_reentrant_checkpoint)
        self.non_reentrant = (original, non_reentrant_checkpoint)

    def _block(self, function: Any) -> Any:
        if self._engine.is_active and self._engine.piggyback:
            return Block(self._engine, function)
        return function

    def _reentrant(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(ctx: Any, run_function: Any, *args: Any) -> Any:
            return forward(ctx, self._block(run_function), *args)

        return wrapper

    def _whole(self, block: Block) -> Any:
        def recompute(*args: Any, **kwargs: Any) -> Any:
            with self._kept():
                return block.second(*args, **kwargs)

        return recompute

    def _without_reentrant(self, generator: Any) -> Any:
        engine = self._engine

        @functools.wraps(generator)
        def wrapper(
            fn: Any,
            preserve_rng_state: Any,
            context_fn: Any,
            determinism_check: Any,
            debug: Any,
            early_stop: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if engine.is_active and engine.piggyback:
                block = Block(engine, fn)
                inputs = nested_tensors((*args, *kwargs.values()))
                context_fn = _both(context_fn, lambda: block.first(inputs))
                # The function itself is called again for the recompute alone. It has to run to its
                # end: an early stop would leave its last operators without a second execution.
                # The backward of its last module has begun already, and so has what that gathers.
                fn, early_stop = self._whole(block), False
            return generator(
                fn,
                preserve_rng_state,
                context_fn,
                determinism_check,
                debug,
                early_stop,
                *args,
                **kwargs,
            )

        return wrapper


def _both(context_fn: Any, first: Any) -> Any:
    def contexts() -> tuple[Any, Any]:
        forward, recompute = context_fn()
        stack = contextlib.ExitStack()

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with stack, forward, first():
                yield

        return entered(), recompute

    return contexts


class Block:
    """A checkpointed function: its first call is the forward, its second the recompute."""

    def __init__(self, engine: Engine, function: Any) -> None:
        self._engine = engine
        self._function = function
        self._first: FirstPass | None = None
        self._ran = False
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        self._key = f"{name.split('.<locals>')[0]}:{code.co_firstlineno if code else ''}"

    def __call__(self, *args: Any) -> Any:
        if self._ran:
            return self.second(*args)
        with self.first(nested_tensors(args)):
            return self._function(*args)

    @contextlib.contextmanager
    def first(self, inputs: list[torch.Tensor]) -> Iterator[None]:
        """The forward runs inside."""
        engine = self._engine
        self._ran = True
        first = engine.first_pass(f"{self._key}@{engine.position.layer}", inputs)
        if first is None:
            yield
            return
        with engine.within(first):
            yield
        engine.close_first_pass(first, [])
        self._first = first

    def second(self, *args: Any, **kwargs: Any) -> Any:
        """The recompute."""
        engine = self._engine
        first, self._first = self._first, None
        position = engine.position
        before = position.layer
        with engine.at(phase="recompute"):
            if first is None or not engine.is_active:
                output = self._function(*args, **kwargs)
            else:
                second = engine.second_pass(first, nested_tensors((*args, *kwargs.values())))
                with engine.within(second):
                    output = self._function(*args, **kwargs)
                engine.close_second_pass(second)
            layer = position.layer
        # The backward of this block follows, and belongs to the layer just recomputed.
        position.layer = layer if layer is not None else before
        return output
