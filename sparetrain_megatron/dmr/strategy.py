"""Which second executions wait for a window: asked when a region begins, answered by a plan."""

from __future__ import annotations

from typing import Literal, Protocol

Method = Literal["segment", "single", "piggyback", "naive"]
"""How a checkpointed block is checked.

``segment``: recompute and backward are replayed together from their boundary (AGC).
``single``: the recompute is compared with the forward, the backward alone is replayed.
``piggyback``: the recompute is compared with the forward, the backward is checked naively.
``naive``: both are checked naively.
"""


class Strategy(Protocol):
    """What the adapters ask."""

    def block(self, chunk: int, microbatch: int, index: int) -> Method:
        """For a checkpointed block: the ``index``-th, from 0, of a microbatch in a model chunk."""

    def defers_rest(self, chunk: int, microbatch: int, phase: str, layer: int | str | None) -> bool:
        """Whether what lies outside of checkpointed blocks is replayed, too, rather than naive.

        Asked at the start of a microbatch's forward or backward, and after each block in it.

        Args:
            layer: What comes next: ``embedding``, ``head``, or the layer in which a block has
                ended, whose rest may follow.
        """


class Immediate:
    """Nothing is deferred."""

    def __init__(self, piggyback: bool = True) -> None:
        self._method: Method = "piggyback" if piggyback else "naive"

    def block(self, chunk: int, microbatch: int, index: int) -> Method:
        return self._method

    def defers_rest(self, chunk: int, microbatch: int, phase: str, layer: int | str | None) -> bool:
        return False


class Everything:
    """Every block is a segment; ``rest``: everything outside of blocks is deferred as well."""

    def __init__(self, rest: bool, method: Method = "segment") -> None:
        self._rest = rest
        self._method = method

    def block(self, chunk: int, microbatch: int, index: int) -> Method:
        return self._method

    def defers_rest(self, chunk: int, microbatch: int, phase: str, layer: int | str | None) -> bool:
        return self._rest
