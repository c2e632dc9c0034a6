"""Scalars for TensorBoard and Weights & Biases, where Megatron itself logs to them."""

from __future__ import annotations

from ..report.summary import Statistics

PREFIX = "sparetrain/"


def scalars(statistics: Statistics) -> dict[str, float]:
    """What is logged: the counters of one rank over the run so far. Rollbacks are all ranks'."""
    return {
        "operators checked": statistics.operators_checked,
        "mismatches": statistics.mismatches,
        "rollbacks": statistics.rollbacks,
        "share of time in checks": statistics.share_in_checks,
        "seconds in checks": statistics.seconds_in_checks,
        "seconds in windows": statistics.seconds_in_windows,
        "peak bytes held": statistics.peak_bytes_held,
    }


def log(statistics: Statistics, iteration: int) -> None:
    """Logs the scalars on the rank that has Megatron's writers; does nothing on the others."""
    from megatron.training import global_vars

    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if not (writer or wandb):
        return
    values = {PREFIX + name: value for name, value in scalars(statistics).items()}
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)
