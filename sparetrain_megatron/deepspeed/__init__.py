"""Protection of training with DeepSpeed: a ``"sparetrain"`` block in its JSON, and one import.

    import sparetrain_megatron.deepspeed   # engines whose configuration has the block are protected

From this import on every ``DeepSpeedEngine`` (and ``PipelineEngine``) that is made looks for the
block in its configuration. :func:`initialize` is ``deepspeed.initialize`` for code that wants to
say so; :func:`attach` protects an engine whose configuration has no block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .hooks import Loss, attach, attached, close, finish, install

if TYPE_CHECKING:
    from .base import DeepSpeedProtection

__all__ = [
    "DeepSpeedProtection",
    "attach",
    "attached",
    "close",
    "finish",
    "initialize",
    "install",
]


def initialize(*args: Any, loss: Loss | None = None, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, for a configuration with a ``"sparetrain"`` block.

    Args:
        *args, **kwargs: Those of ``deepspeed.initialize``.
        loss: ``loss(outputs, *inputs)`` computes the loss from what the engine's forward returned
            and was given, for a loss that can't be followed from the forward's outputs by itself.

    Returns:
        Engine, optimizer, data loader and scheduler.

    Raises:
        UsageError: The block is missing or wrong, or something can't be protected.
    """
    import deepspeed

    from ..errors import UsageError

    install()
    returned = deepspeed.initialize(*args, **kwargs)
    protection = getattr(returned[0], "sparetrain", None)
    if protection is None and not getattr(returned[0], "sparetrain_disabled", False):
        raise UsageError(
            'the DeepSpeed configuration has no "sparetrain" block; add '
            '"sparetrain": {"enabled": true}'
        )
    if protection is not None:
        protection.loss = loss
    return returned


def __getattr__(name: str) -> Any:
    if name == "DeepSpeedProtection":
        from .base import DeepSpeedProtection

        return DeepSpeedProtection
    raise AttributeError(name)


install()
