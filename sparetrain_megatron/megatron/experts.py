"""Mixture of experts: what the router does in one pass of a checkpointed block only.

Auxiliary losses, the z-loss and the count of tokens for the expert bias run only where gradients
are wanted: under checkpointing in the recompute, not in the forward (transformer/moe/router.py).
There is nothing to compare them with, so they are executed twice at once.
"""

from __future__ import annotations

import functools
from typing import Any

from ..dmr.engine import Engine
from ..patching import Patches

_METHODS = (
    "_apply_aux_loss",
    "_apply_seq_aux_loss",
    "_apply_global_aux_loss",
    "apply_z_loss",
    "_apply_expert_bias",
)


class Experts:
    """Installs the wrappers for one engine."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core.transformer.moe import router

        self._engine = engine
        for name in _METHODS:
            if hasattr(router.TopKRouter, name):
                original = getattr(router.TopKRouter, name)
                patches.replace(router.TopKRouter, name, self._aside(original))
        name = "compute_routing_scores_for_aux_loss"
        if hasattr(router, name):
            patches.replace(router, name, self._aside(getattr(router, name)))

    def _aside(self, original: Any) -> Any:
        engine = self._engine

        @functools.wraps(original)
        def aside(*args: Any, **kwargs: Any) -> Any:
            if not engine.passes:
                return original(*args, **kwargs)
            with engine.aside():
                return original(*args, **kwargs)

        return aside
