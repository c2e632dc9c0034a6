"""Scalars go to Megatron's own writers."""

from __future__ import annotations

import sys
import types

from sparetrain_megatron.megatron import metrics
from sparetrain_megatron.report.summary import Statistics


class Writer:
    def __init__(self) -> None:
        self.values: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.values[name] = (value, iteration)

    def log(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, iteration)


def with_writers(monkeypatch, tensorboard, wandb) -> None:
    module = types.ModuleType("megatron.training.global_vars")
    module.get_tensorboard_writer = lambda: tensorboard
    module.get_wandb_writer = lambda: wandb
    training = types.ModuleType("megatron.training")
    training.global_vars = module
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)


def test_both_writers_get_every_scalar(monkeypatch) -> None:
    tensorboard, wandb = Writer(), Writer()
    with_writers(monkeypatch, tensorboard, wandb)
    statistics = Statistics(rollbacks=2, seconds_in_checks=1.0, seconds_total=4.0)
    statistics.count_check("naive", "pure", 7)
    metrics.log(statistics, 12)
    assert tensorboard.values == wandb.values
    assert tensorboard.values["sparetrain/operators checked"] == (7, 12)
    assert tensorboard.values["sparetrain/share of time in checks"] == (0.25, 12)
    assert tensorboard.values["sparetrain/rollbacks"] == (2, 12)


def test_without_writers_nothing_happens(monkeypatch) -> None:
    with_writers(monkeypatch, None, None)
    metrics.log(Statistics(), 1)
