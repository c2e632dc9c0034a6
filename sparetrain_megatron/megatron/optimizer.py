"""The optimizer: the verdict before parameters change, the inner step, the copies after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..dmr.engine import Engine
from ..dmr.mismatch import Mismatch
from ..dmr.optimizer_step import CheckedStep
from ..patching import Patches


class Discarded(Exception):
    """All ranks found that gradients can't be trusted, and left the optimizer's step together."""


class OptimizerHooks:
    """Wraps one Megatron optimizer (chained or not).

    Args:
        engine: This rank's engine.
        optimizer: What ``get_megatron_optimizer`` returned.
        chunk: Bytes of optimizer state to copy at one time.
        attempts: How often a chunk of the step may be repeated.
        before_step: Called when gradients are ready and nothing has been written yet; may raise
            :class:`Discarded` (on all ranks alike).
        on_redo: Called with what was found whenever a chunk is stepped again.
    """

    def __init__(
        self,
        engine: Engine,
        patches: Patches,
        optimizer: Any,
        *,
        chunk: int,
        attempts: int,
        before_step: Callable[[], None],
        on_redo: Callable[[list[Mismatch]], None],
    ) -> None:
        self._engine = engine
        self.steps: list[CheckedStep] = []
        self.applied = False
        """Whether the present step has got as far as changing parameters."""

        ready = optimizer.step_with_ready_grads

        @functools.wraps(ready)
        def step_with_ready_grads() -> Any:
            if not engine.is_active:
                return ready()
            before_step()
            self.applied = True
            with engine.at(phase="optimizer", layer=None):
                return ready()

        patches.replace(optimizer, "step_with_ready_grads", step_with_ready_grads)
        self._leaves = [o for o in leaves(optimizer) if not getattr(o, "is_stub_optimizer", False)]
        for leaf in self._leaves:
            inner = leaf.optimizer
            checked = CheckedStep(engine, inner, inner.step, chunk, attempts, on_redo)
            self.steps.append(checked)
            patches.replace(inner, "step", checked)

    @property
    def exhausted(self) -> bool:
        return any(step.exhausted for step in self.steps)

    def write_parameters(self, model: list[Any]) -> None:
        """Writes the model's parameters from the main parameters again, and gathers them.

        The main parameters have been verified, so this is how a fault in the copy, or in the
        gathering, of the first time is undone.
        """
        for leaf in self._leaves:
            if hasattr(leaf, "_copy_main_params_to_model_params"):
                leaf._copy_main_params_to_model_params()
        for chunk in model:
            settings = getattr(chunk, "ddp_config", None)
            if settings is not None and settings.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that hold parameters, chains flattened."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [x for o in chained for x in leaves(o)]
