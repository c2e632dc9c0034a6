"""Checkpointed blocks: the recompute as second execution, or as part of a segment to replay.

A checkpointed function is called twice: in the forward, and again in the backward to recompute what
was not kept. An adapter puts a :class:`Block` in its place and tells where its backward runs; how
the block is checked is the strategy's answer, asked when the block begins.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .fingerprint import Fingerprint
from .operators import nested_tensors
from .side_doors import Watcher
from .tape import Source
from .template import Template, make, same_operators

if TYPE_CHECKING:
    from .engine import Engine
    from .piggyback import FirstPass


class Blocks:
    """The blocks of one rank.

    Args:
        engine: This rank's engine.
        binds: Whether blocks run unseen once they have a template.
        watches: Whether blocks may give values away beside their outputs; see ``side_doors.py``.

    Attributes:
        chunk: Number of the model chunk whose forward runs.
        index: How many blocks have been checkpointed in the forward of the present microbatch.
        layers: Number of the (last) layer in each block, by (model chunk, index).
        closed: Whether a block gives away nothing but its outputs, by (model chunk, index).
        templates: Of blocks that are bound, by (model chunk, index); None where one can't be made.
    """

    def __init__(self, engine: Engine, binds: bool = True, watches: bool = False) -> None:
        self.engine = engine
        self.binds = binds
        self.watches = watches
        self.closed: dict[tuple[int, int], bool] = {}
        self.chunk = 0
        self.index = 0
        self.layers: dict[tuple[int, int], int] = {}
        self.templates: dict[tuple[int, int], Template | None] = {}

    def begin_microbatch(self, chunk: int = 0) -> None:
        """The forward of a microbatch starts."""
        self.chunk, self.index = chunk, 0

    def layer_ran(self, number: int) -> None:
        """A transformer layer ran in the forward, in a block if any has been begun."""
        if self.index:
            self.layers[self.chunk, self.index - 1] = number

    def block(self, function: Any) -> Any:
        """A function that is about to be checkpointed, as a block of its own."""
        engine = self.engine
        if not (engine.is_active and engine.piggyback):
            return function
        place = self.chunk, self.index
        method = engine.strategy.block(self.chunk, engine.position.microbatch or 0, self.index)
        self.index += 1
        return Block(self, function, place, method)

    def checkpointed_backward(
        self, backward: Any, inputs_of: Callable[[Any], Any] = lambda ctx: ctx.saved_tensors
    ) -> Any:
        """The backward of a checkpointing ``torch.autograd.Function``, which runs the recompute.

        Args:
            backward: The function's own; its context keeps the block as ``run_function``.
            inputs_of: The block's inputs, from the context.
        """
        engine = self.engine

        @functools.wraps(backward)
        def wrapper(ctx: Any, *gradients: Any) -> Any:
            block = ctx.run_function
            if not engine.is_active or not isinstance(block, Block):
                return backward(ctx, *gradients)
            # The block has a tape of its own, or none; what lies outside goes on with another.
            with engine.between_tapes():
                return block.backward(backward, ctx, gradients, inputs_of)

        return wrapper


class Block:
    """A checkpointed function: its first call is the forward, its second the recompute."""

    def __init__(self, owner: Blocks, function: Any, place: tuple[int, int], method: str) -> None:
        self._owner = owner
        self._engine = owner.engine
        self.function = function
        self._place = place
        self._method = method
        self._ran = False
        self._first: FirstPass | None = None
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        self._key = f"{name.split('.<locals>')[0]}:{code.co_firstlineno if code else ''}"

    def __call__(self, *args: Any) -> Any:
        if self._ran:
            return self.second(*args)
        outputs: list[torch.Tensor] = []
        with self.first(nested_tensors(args), outputs):
            result = self.function(*args)
            outputs += nested_tensors(result)
        return result

    @contextlib.contextmanager
    def first(
        self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor] | None = None
    ) -> Iterator[None]:
        """The forward runs inside.

        Args:
            inputs: The block's.
            outputs: A list that will hold what the block returns. Without it, or where values may
                leave the block by other ways, it can't be a segment, whose outputs alone are
                compared.
        """
        engine = self._engine
        self._ran = True
        if self._method == "segment" and not (outputs is not None and self._is_closed()):
            self._method = "single"
        with engine.between_tapes(), self._watched(outputs):
            first = None
            if self._method != "naive":
                key = f"{self._key}@{engine.position.layer}"
                first = engine.first_pass(key, inputs, self._method == "segment")
            if first is None:
                yield
                return
            with engine.within(first), self._unseen():
                yield
            engine.close_first_pass(first, outputs or [])
            self._first = first

    def _is_closed(self) -> bool:
        return not self._owner.watches or self._owner.closed.get(self._place, False)

    @contextlib.contextmanager
    def _watched(self, outputs: list[torch.Tensor] | None) -> Iterator[None]:
        """Finds out of a block's first forward whether it may be a segment."""
        engine, owner = self._engine, self._owner
        if outputs is None or not owner.watches or self._place in owner.closed:
            yield
            return
        before = engine.observer
        watcher = engine.observer = Watcher(engine)
        try:
            yield
        finally:
            engine.observer = before
        owner.closed[self._place] = watcher.nothing_but(outputs)

    def second(self, *args: Any, **kwargs: Any) -> Any:
        """The recompute. A tape that it opens goes on with the backward that follows."""
        engine = self._engine
        position = engine.position
        first, self._first = self._first, None
        before = position.layer
        with engine.at(phase="recompute"):
            if first is None or not engine.is_active:
                output = self.function(*args, **kwargs)
            else:
                output = self._compared(first, args, kwargs)
            layer = position.layer
        # The backward of this block follows, and belongs to the layer just recomputed.
        position.layer = layer if layer is not None else before
        return output

    def _compared(self, first: FirstPass, args: tuple, kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        second = engine.second_pass(first, nested_tensors((*args, *kwargs.values())))
        if self._method == "segment" and engine.binding is None:
            engine.open_tape()
        with engine.within(second):
            output = self.function(*args, **kwargs)
        if self._method == "segment":
            engine.compare_outputs(first, nested_tensors(output))
        elif self._method == "single":
            engine.open_tape()
        engine.close_second_pass(second)
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

    def _unseen(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.unseen() if self._bound() else contextlib.nullcontext()

    def backward(
        self, original: Any, ctx: Any, gradients: tuple, inputs_of: Callable[[Any], Any]
    ) -> Any:
        """The recompute and the backward behind it."""
        engine = self._engine
        if self._method != "segment" or self._first is None:
            return original(ctx, *gradients)
        inputs, incoming = nested_tensors(inputs_of(ctx)), nested_tensors(gradients)
        template = self._owner.templates.get(self._place) if self._bound() else None
        if template is not None and template.fits(inputs, incoming) and not template.due():
            return self._run_bound(template, original, ctx, gradients, inputs, incoming)
        engine.learns = self._owner.binds and engine.observer is None
        try:
            result = original(ctx, *gradients)
            engine.close_tape(nested_tensors(result))
            if engine.learns:
                self._learn(inputs, incoming)
        finally:
            engine.learns = False
            engine.closed.clear()
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
        engine.push_bound(template, inputs, incoming, digests, nested_tensors(result))
        return result

    def _learn(self, inputs: list[torch.Tensor], incoming: list[torch.Tensor]) -> None:
        """Makes the block's template from its first recorded run; compares with it later on."""
        engine, owner = self._engine, self._owner
        tapes = engine.closed
        known = owner.templates.get(self._place)
        if self._place not in owner.templates:
            made = None
            if len(tapes) == 1:
                made = make(tapes[0], inputs, incoming, engine.deferred.constants)
            owner.templates[self._place] = made
        elif known is not None and not (len(tapes) == 1 and same_operators(known, tapes[0])):
            # It does not do the same every time, so it is recorded from now on.
            owner.templates[self._place] = None
