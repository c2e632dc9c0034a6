"""What was found when two executions differed."""

from __future__ import annotations

import dataclasses
import functools
import socket
from typing import Any

import torch

from .position import Position


@functools.cache
def host_name() -> str:
    return socket.gethostname()


@functools.cache
def device_name() -> str:
    """This rank's device, with its UUID where it has one."""
    if torch.version.cuda is None or not torch._C._cuda_getDeviceCount():
        return "cpu"
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"cuda:{index}" + (f" {uuid}" if uuid else "")


@dataclasses.dataclass(slots=True)
class Mismatch:
    """Two executions of one operator gave different bits.

    Attributes:
        position: Where in the step; for moved values, where they were received.
        operator: Short name.
        method: ``naive``, ``piggyback``, ``communication``, ``reduction`` or ``second_device``.
        elements_differ, elements: How many of how many elements; None where only fingerprints
            were at hand.
        bits: Bit positions that differ anywhere, 0 is the least significant; None if unknown.
        wrong: ``primary`` or ``checker`` where a third execution sided with the other one,
            ``sender``/``receiver``, ``software`` for a difference that comes back identically, a
            device when another device decided, else ``unknown``.
        ordinal: How many operators had run in this attempt.
        followed_by: Further mismatches of the same region that follow from this one.
        evidence: What identifies the difference, to recognise it when it comes back.
        note: Anything that a reader should know.
    """

    position: Position
    operator: str
    method: str
    elements_differ: int | None = None
    elements: int | None = None
    bits: list[int] | None = None
    wrong: str = "unknown"
    ordinal: int = 0
    followed_by: int = 0
    evidence: tuple[Any, ...] = ()
    note: str = ""

    def to_event(self) -> dict[str, Any]:
        """Plain values, as they stand in ``events.rank*.jsonl``."""
        return {
            **dataclasses.asdict(self.position),
            "host": host_name(),
            "device": device_name(),
            "operator": self.operator,
            "method": self.method,
            "elements_differ": self.elements_differ,
            "elements": self.elements,
            "bits": self.bits,
            "wrong": self.wrong,
            "ordinal": self.ordinal,
            "followed_by": self.followed_by,
            "note": self.note,
        }
