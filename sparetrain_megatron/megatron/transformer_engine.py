"""What Transformer Engine needs beside the kernels' seam: its checkpointing and its FP8 state.

Megatron recomputes with ``te_checkpoint`` where FP8 is on. Some of what happens then belongs to
only one of the two, forward and recompute: quantising the weights, in the first microbatch, putting
the forward's scales aside and back again, and what is made once and kept. It is checked as if there
were no recompute.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..dmr.engine import Engine
from ..foreign import seam
from ..patching import Patches
from .recompute import Recompute

_ASIDE = (
    "copy_forward_fp8_meta_tensors_for_recompute",
    "get_old_fp8_meta_tensors_for_recompute",
    "restore_fp8_meta_tensors",
)


def attach(engine: Engine, patches: Patches, recompute: Recompute) -> None:
    """Protects foreign kernels, and what is recomputed through Transformer Engine."""
    seam.protect(engine, patches)
    if "transformer_engine.pytorch" not in sys.modules:
        return
    from megatron.core.extensions import transformer_engine as extension
    from transformer_engine.pytorch import distributed

    checkpoint = extension.te_checkpoint

    @functools.wraps(checkpoint)
    def te_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(recompute.block(function), *args, **kwargs)

    seam.replace_everywhere({id(checkpoint): te_checkpoint}, patches)
    recompute.wrap_backward(distributed._CheckpointFunction, patches)
    _keep_apart(engine, patches)


def _keep_apart(engine: Engine, patches: Patches) -> None:
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import utils
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.module import base

    for name in _ASIDE:
        original = getattr(FP8GlobalStateManager, name)  # bound to the class, or static
        patches.replace(FP8GlobalStateManager, name, staticmethod(_apart(engine, original)))
    module = base.TransformerEngineBaseModule
    methods = [(DotProductAttention, "init_fp8_metadata"), (module, "init_fp8_metadata")]
    functions = [utils.get_full_cu_seqlens]
    if hasattr(base, "quantize_weight"):
        functions.append(base.quantize_weight)
    else:
        methods.append((module, "get_weight_workspace"))
    for owner, name in methods:
        patches.replace(owner, name, _apart(engine, getattr(owner, name)))
    seam.replace_everywhere({id(f): _apart(engine, f) for f in functions}, patches)


def _apart(engine: Engine, function: Any) -> Any:
    """Keeps a function's operators out of the passes of forward and recompute."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_passes(engine):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _without_passes(engine: Engine) -> Iterator[None]:
    passes, engine.passes = engine.passes, []
    try:
        yield
    finally:
        engine.passes = passes


class Fp8State:
    """Scales and amax histories of delayed scaling, which change in every microbatch.

    Args:
        model: Model chunks of this rank.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._model = model
        self._saved = {
            id(state): (state, state.scale.clone(), state.amax_history.clone())
            for state in self._states()
        }

    def _states(self) -> Iterator[Any]:
        for chunk in self._model:
            for module in chunk.modules():
                meta = getattr(module, "fp8_meta", None)
                if isinstance(meta, dict):
                    for key in ("scaling_fwd", "scaling_bwd"):
                        if hasattr(meta.get(key), "amax_history"):
                            yield meta[key]

    def restore(self) -> None:
        """Puts back what was there; what has been made since is made new."""
        _forget_lengths()
        for state in self._states():
            _, scale, history = self._saved.get(id(state), (None, None, None))
            if scale is None or history is None:
                state.scale.fill_(1)
                state.amax_history.zero_()
            else:
                state.scale.copy_(scale)
                state.amax_history.copy_(history)


def _forget_lengths() -> None:
    """Empties a cache that may hold what the discarded attempt computed wrong."""
    utils = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.utils")
    if utils is not None:
        utils._cu_seqlens_cache.clear()
