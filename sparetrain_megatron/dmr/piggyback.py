"""P-DMR: the recompute of activation checkpointing as the second execution of the forward.

The first pass leaves a fingerprint of every operator's output, and of the segment's inputs; the
second pass compares as it goes. Comparing only the segment's last output is not enough: of the
faults in a BF16 recompute that change gradients, 12 to 43 % leave it bitwise equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .fingerprint import Fingerprint
from .mismatch import Mismatch

Digests = tuple[Fingerprint, ...]


def same(a: Digests, b: Digests) -> Any:
    """Whether two tuples of fingerprints are equal: a bool, or a flag on the device."""
    if len(a) != len(b):
        return False
    result: Any = True
    for x, y in zip(a, b):
        equal = x == y
        if equal is True:
            continue
        if equal is False:
            return False
        result = equal if result is True else result & equal
    return result


@dataclasses.dataclass(slots=True)
class Entry:
    """One operator of a pass; a collective's result is filled in when it has arrived."""

    operator: str
    digests: Digests | None = None
    on_arrival: Callable[[Digests], None] | None = None

    def arrived(self, digests: Digests) -> None:
        self.digests = digests
        if self.on_arrival is not None:
            self.on_arrival(digests)


class FirstPass:
    """The fingerprints of one checkpointed segment's first execution.

    Attributes:
        key: Names the kind of segment, the same in every iteration: a segment whose passes can't
            be compared is executed naively from then on.
        inputs: Fingerprints of the segment's inputs.
        indices: Copies of the inputs that are integers, by position: a wrong index would crash the
            recompute before its verdict.
        entries: One for each operator that computes, in order.
        execution: What a fault injector is told: ``only`` where the phase tells the two passes
            apart, else ``primary`` or ``checker``.
        role: ``primary`` or ``checker``, for reports.
        method: What the comparison counts as.
        outputs_only: Operators leave no fingerprints, only what moves between ranks and the
            segment's outputs do: the recompute's own operators are replayed from a tape.
        outputs: Fingerprints of the segment's outputs, if ``outputs_only``.
        void: The recompute has taken another way for a known reason, here or on another rank:
            there is nothing left to compare.
    """

    second = False

    def __init__(
        self,
        key: str,
        inputs: Digests,
        execution: str = "only",
        method: str = "piggyback",
        outputs_only: bool = False,
    ) -> None:
        self.outputs_only = outputs_only
        self.outputs: Digests = ()
        self.key = key
        self.inputs = inputs
        self.execution = execution
        self.role = "primary" if execution == "only" else execution
        self.method = method
        self.entries: list[Entry] = []
        self.indices: dict[int, torch.Tensor] = {}
        self.void = False


class SecondPass:
    """The recompute of the same segment; walks through the first pass's entries."""

    second = True

    def __init__(
        self, first: FirstPass, execution: str = "only", method: str = "piggyback"
    ) -> None:
        self.first = first
        self.outputs_only = first.outputs_only
        self.execution = execution
        self.role = "checker" if execution == "only" else execution
        self.method = method
        self.next = 0
        # One is reported, those that follow from it are counted.
        self.first_mismatch: Mismatch | None = None
        self.departed = False  # the operators are not those of the first pass

    def advance(self, operator: str) -> Entry | None:
        """The first pass's entry for the operator that runs now, or None if there is none."""
        if self.departed:
            return None
        entries = self.first.entries
        if self.next < len(entries) and entries[self.next].operator == operator:
            entry = entries[self.next]
            self.next += 1
            return entry
        self.departed = True
        return None

    @property
    def complete(self) -> bool:
        return not self.departed and self.next == len(self.first.entries)
