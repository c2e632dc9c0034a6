"""Where calls of foreign kernels are caught: every name in any module that stands for one.

Replacing the extension module's attributes alone would miss most calls: Transformer Engine imports
kernels by name, and with ``*``, into many modules. So every attribute of a module of Transformer
Engine, Apex or Megatron that *is* the original is replaced; a module that is imported later takes
its names from the extension module, where they are replaced as well.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import Any

from ..dmr.engine import Engine
from ..dmr.foreign import ForeignKernel, UnknownKernel
from ..dmr.operators import vouch
from ..patching import Patches
from . import apex, transformer_engine
from .objects import take_apart
from .table import Library

_CALLERS = ("transformer_engine", "megatron", "apex")


def protect(engine: Engine, patches: Patches) -> list[str]:
    """Has all calls of known libraries' kernels go through the engine while it is active.

    Args:
        engine: This rank's engine.
        patches: Undo it.

    Returns:
        The extension modules that were found.
    """
    for namespace in transformer_engine.OPERATORS:
        vouch(namespace)
    found = []
    for library in _libraries():
        module = _extension(library.module)
        if module is not None:
            replace_everywhere(_stand_ins(engine, library, module), patches, library.module)
            found.append(library.module)
    return found


def _libraries() -> list[Library]:
    return [transformer_engine.library(installed_version()), *apex.libraries()]


def installed_version() -> tuple[int, int] | None:
    """(major, minor) of Transformer Engine; None if it is not installed."""
    text = getattr(sys.modules.get("transformer_engine"), "__version__", None)
    if text is None:
        try:
            text = importlib.metadata.version("transformer-engine")
        except importlib.metadata.PackageNotFoundError:
            return None
    major, minor = str(text).split(".")[:2]
    return int(major), int(minor)


def _extension(name: str) -> types.ModuleType | None:
    """The extension module. Transformer Engine's is loaded by its package alone."""
    if name in sys.modules:
        return sys.modules[name]
    if name == transformer_engine.MODULE or importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def _stand_ins(engine: Engine, library: Library, module: types.ModuleType) -> dict[int, Any]:
    """What replaces which function, by the original's identity."""
    stand_ins: dict[int, Any] = {}
    for name, function in list(vars(module).items()):
        if name.startswith("_") or name in library.harmless or not _is_function(function):
            continue
        kernel = library.kernels.get(name)
        if kernel is not None:
            stand_ins[id(function)] = ForeignKernel(engine, kernel, function, take_apart)
        else:
            why = library.unprotected.get(name)
            text = f"{library.name}.{name}" + (f" ({why})" if why else "")
            stand_ins[id(function)] = UnknownKernel(engine, text, function)
    return stand_ins


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def replace_everywhere(stand_ins: dict[int, Any], patches: Patches, *modules: str) -> None:
    """Replaces functions in every module of Transformer Engine, Apex or Megatron that names them.

    Args:
        stand_ins: What replaces a function, by its identity.
        patches: Undo it.
        modules: Names of further modules.
    """
    for module in _callers(modules):
        for name, value in list(vars(module).items()):
            stand_in = stand_ins.get(id(value))
            if stand_in is not None:
                patches.replace(module, name, stand_in)


def _callers(further: tuple[str, ...]) -> Iterable[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (
            name in further or name.split(".")[0] in _CALLERS
        ):
            yield module
