"""How foreign kernels are declared: one line each, read into :class:`Kernel`.

A line is ``name: parameters``, the parameters in their order, each with a mark for what happens to
it:

=============  ====================================================================================
``x``          is read, if it is a tensor or holds tensors
``x!``         is also written (a checker gets a copy)
``x!flag``     is written if the argument ``flag`` is true
``x!1``        is a list (of lists) of which the items from the second on are written
``x#``         is scratch memory: neither copied nor compared
=============  ====================================================================================

and after ``;`` words for the whole: ``random`` (draws from a generator), ``undefined 2`` (the third
result has no defined contents), ``itemwise x`` (each item of the lists in ``x`` is computed by
itself). ``name@2.13:`` holds from that release on, up to the next line of that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..dmr.foreign import Kernel, Write

Version = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    """The kernels of one extension module.

    Attributes:
        name: What stands before the kernels' names in reports.
        module: The extension module.
        kernels: What each function does.
        harmless: Functions that compute nothing of the training: queries, allocations, settings.
        unprotected: Functions that can't be executed twice yet, and why.
    """

    name: str
    module: str
    kernels: Mapping[str, Kernel]
    harmless: frozenset[str] = frozenset()
    unprotected: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read(library: str, text: str, version: Version | None = None) -> dict[str, Kernel]:
    """Reads declarations.

    Args:
        library: Stands before the kernels' names in reports.
        text: Lines as described above; ``#`` at the start of a line begins a comment.
        version: The library's release; None: the newest that is known.
    """
    kernels: dict[str, Kernel] = {}
    for line in text.strip().splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        names, _, rest = line.partition(":")
        parameters, _, words = rest.partition(";")
        for name in names.split():
            name, _, since = name.partition("@")
            if since and version is not None and version < _version(since):
                continue
            kernels[name] = _kernel(f"{library}.{name}", parameters.split(), words.split())
    return kernels


def _kernel(name: str, parameters: list[str], words: list[str]) -> Kernel:
    names, writes, scratch = [], [], set()
    for parameter in parameters:
        plain, mark, condition = parameter.rstrip("#").partition("!")
        names.append(plain)
        if parameter.endswith("#"):
            scratch.add(plain)
        elif mark and condition.isdigit():
            writes.append(Write(plain, start=int(condition)))
        elif mark:
            writes.append(Write(plain, when=condition or None))
    undefined = {int(words[i + 1]) for i, word in enumerate(words) if word == "undefined"}
    itemwise = next((words[i + 1] for i, word in enumerate(words) if word == "itemwise"), None)
    return Kernel(
        name,
        tuple(names),
        tuple(writes),
        frozenset(scratch),
        "random" in words,
        frozenset(undefined),
        itemwise,
    )


def _version(text: str) -> Version:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
