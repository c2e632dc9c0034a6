"""DeepSpeed's and torch's checkpointed blocks.

Their checkpoint functions are met below their names, at what every caller of them ends in, so that
a name that was imported before makes no difference.

The reentrant forms run recompute and backward of a block in one call. The others recompute when
autograd asks for the first of the block's tensors, and the backward goes on from there without a
frame of its own: it ends where the gradient of one of the block's inputs is used. There, values may
leave a block by other ways than its outputs, so that every operator's are compared: such a block is
checked singly, never as a segment.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..dmr.block import Block, Blocks
from ..dmr.engine import Engine
from ..dmr.operators import nested_tensors
from ..patching import Patches


class Recompute(Blocks):
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

        # Never unseen: autograd itself accumulates gradients, and hooks reduce them.
        super().__init__(engine, binds=False, watches=True)
        self._kept = kept
        for owner, inputs_of in (
            (checkpointing.CheckpointFunction, lambda ctx: ctx.deepspeed_saved_tensors),
            (torch_checkpoint.CheckpointFunction, lambda ctx: ctx.saved_tensors),
        ):
            forward, backward = owner.forward, owner.backward
            patches.replace(owner, "forward", staticmethod(self._reentrant(forward)))
            backward = self.checkpointed_backward(backward, inputs_of)
            patches.replace(owner, "backward", staticmethod(backward))
        name = "_checkpoint_without_reentrant_generator"
        generator = getattr(torch_checkpoint, name)
        patches.replace(torch_checkpoint, name, self._without_reentrant(generator))
        original = checkpointing.non_reentrant_checkpoint

        @functools.wraps(original)
        def non_reentrant_checkpoint(function: Any, *args: Any) -> Any:
            block = self.block(function)
            if isinstance(block, Block):
                self._end_at_inputs(args)
                function = _Twice(block, self._recompute(block, contextlib.nullcontext))
            return original(function, *args)

        patches.replace(checkpointing, "non_reentrant_checkpoint", non_reentrant_checkpoint)
        self.non_reentrant = (original, non_reentrant_checkpoint)

    def _reentrant(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(ctx: Any, run_function: Any, *args: Any) -> Any:
            return forward(ctx, self.block(run_function), *args)

        return wrapper

    def _recompute(self, block: Block, kept: Any) -> Any:
        def recompute(*args: Any, **kwargs: Any) -> Any:
            self.engine.close_tape()
            with kept():
                return block.second(*args, **kwargs)

        return recompute

    def _end_at_inputs(self, inputs: Any) -> None:
        """Has a block's backward end where it gives a gradient back."""

        def ended(gradients: Any) -> None:
            with self.engine.between_tapes():
                pass

        for tensor in nested_tensors(inputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(ended)

    def _without_reentrant(self, generator: Any) -> Any:
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
            block = self.block(fn)
            if isinstance(block, Block):
                inputs = nested_tensors((*args, *kwargs.values()))
                self._end_at_inputs(inputs)
                context_fn = _both(context_fn, lambda: block.first(inputs))
                # The function itself is called again for the recompute alone. It has to run to its
                # end: an early stop would leave its last operators without a second execution.
                # The backward of its last module has begun already, and so has what that gathers.
                fn, early_stop = self._recompute(block, self._kept), False
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


class _Twice:
    """A block's function: its first call is the forward, and all others are the recompute."""

    def __init__(self, block: Block, recompute: Any) -> None:
        self._block = block
        self._recompute = recompute
        self._ran = False

    def __call__(self, *args: Any) -> Any:
        if self._ran:
            return self._recompute(*args)
        self._ran = True
        with self._block.first(nested_tensors(args)):
            return self._block.function(*args)


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
