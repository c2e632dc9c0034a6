"""Patches on other people's code: each named, in one list, undone in reverse."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attributes of foreign objects that were replaced, so that they can be put back."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Sets ``owner.name`` and returns what was there.

        Raises:
            AttributeError: ``owner`` has no such attribute: the upstream code has changed.
        """
        original = getattr(owner, name)
        self._done.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)
        return original

    def undo(self) -> None:
        while self._done:
            owner, name, own = self._done.pop()
            if own is _MISSING:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, own)
