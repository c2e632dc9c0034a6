"""Where in the training step an operator runs."""

from __future__ import annotations

import dataclasses

PHASES = (
    "forward",
    "recompute",
    "backward",
    "accumulate",
    "clip",
    "optimizer",
    "communication",
    "held",
)


@dataclasses.dataclass(slots=True)
class Position:
    """A place in the step, kept up to date by the adapters and copied into what is reported.

    Attributes:
        iteration: Training iteration, 1 is the first of the job (a resumed job goes on counting).
        attempt: 1 for the first try of an iteration, one more after each rollback.
        microbatch: Index within the iteration from 1, or None outside forward and backward.
        stage: Pipeline stage of this rank (with virtual stages: the physical one).
        rank: Global rank.
        layer: Number of the transformer layer from 1, ``"embedding"``, ``"head"``, or None.
        phase: One of :data:`PHASES`.
    """

    iteration: int = 0
    attempt: int = 1
    microbatch: int | None = None
    stage: int = 0
    rank: int = 0
    layer: str | int | None = None
    phase: str = "forward"

    def copy(self) -> Position:
        return dataclasses.replace(self)
