"""Finds the engines to protect: whatever makes a ``DeepSpeedEngine``, its ``__init__`` is run."""

from __future__ import annotations

import atexit
import functools
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import SparetrainConfig
from ..errors import UsageError
from ..patching import Patches
from ..protection import EXIT_BARRIER_SECONDS
from .block import get_sparetrain_config, without_guard

if TYPE_CHECKING:
    from .base import DeepSpeedProtection

Loss = Callable[..., Any]

_patches = Patches()
_installed = False
_protected: list[DeepSpeedProtection] = []
_override: SparetrainConfig | None = None
_required = False
_seen = False
"""Whether an engine has been made at all."""


def install(override: SparetrainConfig | None = None, required: bool = False) -> None:
    """Has every engine that is made from now on looked at; idempotent.

    Args:
        override: Protect with this configuration whatever the block says.
        required: An engine without the block is an error.
    """
    global _installed, _override, _required
    if override is not None:
        _override = override
    _required = _required or required
    if _installed:
        return
    import torch.distributed as dist
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    for owner in (DeepSpeedEngine, PipelineEngine):
        original = owner.__init__
        wrapper = functools.wraps(original)(_made(original, owner, PipelineEngine))
        _patches.replace(owner, "__init__", wrapper)
    initialize = DeepSpeedConfig._initialize_params

    @functools.wraps(initialize)
    def _initialize_params(parsed: Any, param_dict: dict[str, Any]) -> Any:
        return initialize(parsed, without_guard(param_dict, protected=_override is not None))

    _patches.replace(DeepSpeedConfig, "_initialize_params", _initialize_params)
    original_destroy = dist.destroy_process_group

    @functools.wraps(original_destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        close()  # the last moment at which the ranks' counters can be gathered
        return original_destroy(*args, **kwargs)

    _patches.replace(dist, "destroy_process_group", destroy_process_group)
    atexit.register(_at_exit)
    _installed = True


def _made(original: Any, owner: type, pipeline: type) -> Any:
    def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:
        # PipelineEngine goes on when DeepSpeedEngine's own __init__ has returned.
        outermost = owner is pipeline or not isinstance(engine, pipeline)
        config = _config_of(kwargs)
        if outermost and config is not None and config.enabled:
            from .refusals import check

            check(_dictionary(kwargs), config)
        original(engine, *args, **kwargs)
        if not outermost:
            return
        global _seen
        _seen = True
        if config is None and _required:
            raise UsageError(
                'the DeepSpeed configuration has no "sparetrain" block, so nothing would be '
                'protected; add "sparetrain": {"enabled": true}'
            )
        if config is not None and not config.enabled:
            engine.sparetrain_disabled = True
        elif config is not None:
            _attach(engine, config)

    return __init__


def _dictionary(kwargs: dict[str, Any]) -> dict[str, Any]:
    parsed = kwargs.get("config_class")
    return getattr(parsed, "_param_dict", None) or {}


def _config_of(kwargs: dict[str, Any]) -> SparetrainConfig | None:
    return _override or get_sparetrain_config(_dictionary(kwargs))


def attach(
    engine: Any, config: SparetrainConfig | None = None, loss: Loss | None = None
) -> DeepSpeedProtection:
    """Protects an engine.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        config: With ``enabled`` set; default: the block in the engine's configuration.
        loss: See :func:`sparetrain_megatron.deepspeed.initialize`.

    Returns:
        The protection; its ``close`` undoes everything.

    Raises:
        UsageError: There is no configuration, or something can't be protected.
    """
    protection: DeepSpeedProtection | None = getattr(engine, "sparetrain", None)
    if protection is None:
        dictionary = engine._config._param_dict
        config = config or get_sparetrain_config(dictionary)
        if config is None or not config.enabled:
            raise UsageError(
                'nothing to attach: give a configuration, or "sparetrain": {"enabled": true} in '
                "DeepSpeed's JSON"
            )
        from .refusals import check

        check(dictionary, config)
        protection = _attach(engine, config)
    protection.loss = loss or protection.loss
    return protection


def _attach(engine: Any, config: SparetrainConfig) -> DeepSpeedProtection:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from .engine import EngineProtection
    from .pipeline import PipelineProtection

    kind = PipelineProtection if isinstance(engine, PipelineEngine) else EngineProtection
    protection = kind(engine, config)
    protection.attach()
    _protected.append(protection)
    return protection


def attached() -> list[DeepSpeedProtection]:
    """The protected engines of this process."""
    return list(_protected)


def close() -> None:
    """Writes the summaries and undoes the protection of all engines; collective, idempotent."""
    while _protected:
        _protected.pop().close()


def finish() -> None:
    """Ends a script that was to be protected.

    Raises:
        UsageError: It has made no engine, so nothing was protected.
    """
    close()
    if not _seen:
        raise UsageError("the script has made no DeepSpeed engine; nothing was protected")


def _at_exit() -> None:
    """A script that ends without a word still leaves its summary, where the ranks still answer."""
    import torch.distributed as dist

    if not _protected or not dist.is_initialized() or hasattr(sys, "last_value"):
        return
    # No thread can be started any more; the signal's default ends a process that waits in vain.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(EXIT_BARRIER_SECONDS))
    try:
        close()
    except RuntimeError:  # a peer has gone without
        pass
    finally:
        signal.alarm(0)
