"""Replaced attributes of other people's modules, remembered so that they can be put back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A list of attribute replacements that is undone in reverse order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Replaces ``target.name``; an attribute that was not there before is removed on undo."""
        # vars() and not getattr(): an inherited attribute must come back as inherited, and a
        # staticmethod or a descriptor as itself.
        self._replaced.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Puts everything back, newest first."""
        while self._replaced:
            target, name, before = self._replaced.pop()
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)
