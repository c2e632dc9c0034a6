"""Protection of training with Megatron-LM.

from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron import megatron
megatron.attach(SparetrainConfig(enabled=True))   # before megatron.training.pretrain(...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import SparetrainConfig
    from .training import Protection

__all__ = ["attach"]


def attach(config: SparetrainConfig) -> Protection:
    """Attaches the protection to this process's Megatron; call before ``pretrain``.

    Args:
        config: With ``enabled`` set.

    Returns:
        The attached protection; its ``detach`` undoes everything.

    Raises:
        UsageError: Something that can't be protected is asked for.
    """
    from ..errors import UsageError
    from .training import Protection

    if not config.enabled:
        raise UsageError("attach needs a configuration with enabled=True")
    protection = Protection(config)
    protection.attach()
    return protection
