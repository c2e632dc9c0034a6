"""What silent corruption costs a long run, with and without protection against it.

Corruptions come at a constant rate. Each strategy differs in how many it notices, how long it takes
to notice, and what a repetition costs. Closed forms, so that the assumptions are all in sight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sparetrain_megatron.errors import UsageError

ROLLBACK_STEPS = 0.99
"""Protected steps that a rollback takes, as `benchmarks/rollback.py` measured with injected faults:
finding out, restoring and the schedule's second run. The optimizer's step is not repeated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A training run and its surroundings.

    Attributes:
        gpus: Of the job.
        hours: Of useful training.
        rate: Silent corruptions a GPU-hour that change a value of the step.
        step: Seconds of a step without protection.
        rollback: Seconds that a rollback takes; None: `ROLLBACK_STEPS` protected steps.
        restart: Seconds to stop a job and start it from a checkpoint.
        checkpoint: Seconds between checkpoints.
    """

    gpus: int
    hours: float
    rate: float
    step: float
    rollback: float | None = None
    restart: float = 900.0
    checkpoint: float = 3600.0

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.hours <= 0 or self.step <= 0:
            raise UsageError("GPUs, hours and seconds of a step should be positive")
        negative = ("rate", "rollback", "restart", "checkpoint")
        wrong = [name for name in negative if (getattr(self, name) or 0) < 0]
        if wrong:
            raise UsageError(f"{', '.join(wrong)}: should not be negative")

    @property
    def corruptions(self) -> float:
        """Expected number, over the useful time."""
        return self.rate * self.gpus * self.hours


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What to expect.

    Attributes:
        wasted: Hours beyond the useful ones: overhead, repeated work, restarts.
        undetected: Corruptions that stay in the parameters.
        latency: Hours from a corruption that is noticed to its being noticed, mean.
    """

    strategy: str
    wasted: float
    undetected: float
    latency: float

    def share(self, run: Run) -> float:
        """Wasted hours for each useful one."""
        return self.wasted / run.hours

    def clean(self) -> float:
        """Probability that the run ends without an undetected corruption."""
        return math.exp(-self.undetected)

    def to_dict(self, run: Run) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "wasted_hours": self.wasted,
            "wasted_share": self.share(run),
            "undetected": self.undetected,
            "probability_clean": self.clean(),
            "latency_hours": self.latency,
        }


def unprotected(run: Run) -> Outcome:
    """Nothing is noticed, nothing is repeated."""
    return Outcome("unprotected", 0.0, run.corruptions, 0.0)


def periodic_replay(run: Run, every: float = 100, found: float = 0.999) -> Outcome:
    """One step in `every` is run a second time and compared; after a difference the run goes back
    to a checkpoint from before.

    A fault that lasts is found at the next replay, one that passes only when it falls into a
    replayed step: what is reckoned with here are faults that pass.

    Args:
        every: Steps from replay to replay.
        found: Share of the corruptions of a replayed step that the replay finds.
    """
    if every < 1:
        raise UsageError(f"a replay every {every} steps: should be at least 1")
    noticed = run.corruptions * found / every
    repeated = (run.restart + run.checkpoint / 2 + run.step) / 3600
    wasted = run.hours / every + noticed * repeated
    return Outcome("periodic replay", wasted, run.corruptions - noticed, run.step / 3600)


def loss_spikes(
    run: Run, visible: float = 0.1, false_alarms: float = 0.0, delay: float = 600.0
) -> Outcome:
    """A spike of the loss or of the gradient's norm makes the run go back to a checkpoint.

    Args:
        visible: Share of the corruptions that make one.
        false_alarms: Spikes an hour that have another cause.
        delay: Seconds until somebody or something decides to go back.
    """
    noticed = run.corruptions * visible
    repeated = (run.restart + run.checkpoint / 2 + delay) / 3600
    wasted = (noticed + false_alarms * run.hours) * repeated
    return Outcome("reruns on loss spikes", wasted, run.corruptions - noticed, delay / 3600)


def sparetrain(run: Run, overhead: float, missed: float = 0.0) -> Outcome:
    """Every operator twice; a step with a difference is run again.

    Args:
        overhead: Of the protected step, as a share of the unprotected one.
        missed: Share of the corruptions that no comparison sees (the same wrong value twice, or a
            place that is not checked).
    """
    protected = run.step * (1 + overhead)
    # The longer step is exposed longer.
    faults = run.corruptions * (1 + overhead)
    noticed = faults * (1 - missed)
    chance = min(0.999, run.rate * run.gpus * protected / 3600)  # of a fault in the step again
    rollback = ROLLBACK_STEPS * protected if run.rollback is None else run.rollback
    repeated = rollback / (1 - chance) / 3600
    wasted = overhead * run.hours + noticed * repeated
    return Outcome("SpareTrain", wasted, faults - noticed, protected / 3600)


def compare(
    run: Run,
    overhead: float,
    *,
    missed: float = 0.0,
    every: float = 100,
    visible: float = 0.1,
    false_alarms: float = 0.0,
) -> Sequence[Outcome]:
    """All four strategies on one run."""
    return (
        unprotected(run),
        periodic_replay(run, every),
        loss_spikes(run, visible, false_alarms),
        sparetrain(run, overhead, missed),
    )
