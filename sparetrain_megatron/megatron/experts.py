"""Mixture of experts: what the router does in one pass of a checkpointed block only, and what it
decides.

Auxiliary losses, the z-loss and the count of tokens for the expert bias run only where gradients
are wanted: under checkpointing in the recompute, not in the forward (transformer/moe/router.py).
There is nothing to compare them with, so they are executed twice at once.

The router's decision says how many tokens go where, and with that the sizes of everything up to the
combine. Should the recompute decide otherwise (a fault, a tie that is resolved differently), all
that follows differs on every rank of the expert group, through no fault of theirs. So the decision
is compared before anything is dispatched, and whether it stands goes to the group along with the
counts of tokens, which the ranks exchange anyway: each of them knows before the next collective,
and blames none of its own operators. Sizes always fit, since every pass exchanges its own counts.
Where every expert gets as many tokens as it has room for, there are no counts to exchange, and the
flag goes by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..dmr.engine import Engine
from ..patching import Patches

_METHODS = (
    "_apply_aux_loss",
    "_apply_seq_aux_loss",
    "_apply_global_aux_loss",
    "apply_z_loss",
    "_apply_expert_bias",
    # Casts the bias back to FP32 in the first forward of all.
    "_maintain_float32_expert_bias",
)


def expert_layers(model: Sequence[Any]) -> frozenset[int]:
    """Numbers of the layers whose experts are on several ranks.

    Args:
        model: Model chunks of this rank.
    """
    return frozenset(
        layer.layer_number
        for chunk in model
        for layer in chunk.modules()
        if getattr(layer, "is_moe_layer", False)
        and layer.mlp.token_dispatcher.tp_ep_group.size() > 1
    )


class Experts:
    """Installs the wrappers for one engine."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core.transformer.moe import router, token_dispatcher

        self._engine = engine
        self._departs: bool | torch.Tensor | None = None
        """Whether the decision just made is another than the forward's; None without one."""
        for name in _METHODS:
            if hasattr(router.TopKRouter, name):
                original = getattr(router.TopKRouter, name)
                patches.replace(router.TopKRouter, name, self._aside(original))
        name = "compute_routing_scores_for_aux_loss"
        if hasattr(router, name):
            patches.replace(router, name, self._aside(getattr(router, name)))
        original = router.TopKRouter.routing
        patches.replace(
            router.TopKRouter, "routing", functools.wraps(original)(self._routing(original))
        )
        name = "gather_from_sequence_parallel_region"
        original = getattr(token_dispatcher, name)
        patches.replace(token_dispatcher, name, functools.wraps(original)(self._gather(original)))
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        preprocess = functools.wraps(dispatcher.preprocess)(
            self._preprocess(dispatcher.preprocess, original)
        )
        patches.replace(dispatcher, "preprocess", preprocess)

    def _aside(self, original: Any) -> Any:
        engine = self._engine

        @functools.wraps(original)
        def aside(*args: Any, **kwargs: Any) -> Any:
            if not engine.passes:
                return original(*args, **kwargs)
            with engine.aside():
                return original(*args, **kwargs)

        return aside

    def _routing(self, original: Any) -> Any:
        engine = self._engine

        def routing(*args: Any, **kwargs: Any) -> Any:
            self._departs = None
            result = original(*args, **kwargs)
            if engine.is_active:
                engine.varies()
                if engine.passes:
                    # What decides is the map, [tokens, experts]; weights of the experts follow.
                    self._departs = engine.decides("router", [result[1]])
                    if self._departs is True:
                        engine.decided_otherwise()
            return result

        return routing

    def _gather(self, original: Any) -> Any:
        engine = self._engine

        def gather(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            departs, counts = self._departs, not tensor.is_floating_point()
            if departs is None or not counts or not engine.passes:
                return original(tensor, *args, **kwargs)
            self._departs = None
            recompute = any(running.second for running in engine.passes)
            # Its own comparison would blame the exchange for what the router has decided.
            with engine.aside():
                flag = torch.zeros_like(tensor[:1]) + departs
                gathered = original(torch.cat((tensor, flag)), *args, **kwargs)
                parts = gathered.view(-1, tensor.shape[0] + 1, *tensor.shape[1:])
                # Only a recompute can differ. The dispatcher is about to wait for the counts, too.
                otherwise = recompute and bool(parts[:, -1].any())
                gathered = parts[:, :-1].reshape(-1, *tensor.shape[1:])
            if otherwise:
                engine.decided_otherwise()
            return gathered

        return gather

    def _preprocess(self, original: Any, gather: Any) -> Any:
        engine = self._engine

        def preprocess(dispatcher: Any, routing_map: torch.Tensor, *args: Any, **kw: Any) -> Any:
            result = original(dispatcher, routing_map, *args, **kw)
            departs, group = self._departs, dispatcher.tp_ep_group
            recompute = any(running.second for running in engine.passes)
            if departs is not None and recompute and dispatcher.drop_and_pad and group.size() > 1:
                self._departs = None
                with engine.aside():
                    flag = torch.zeros(1, dtype=torch.int64, device=routing_map.device) + departs
                    otherwise = bool(gather(flag, group=group).any())
                if otherwise:
                    engine.decided_otherwise()
            return result

        return preprocess
