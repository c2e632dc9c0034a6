"""Runs of Megatron with protection attached, and what the tests ask of their results."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparetrain_megatron.faults.spec import FaultSpec
from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.summary import read_summary

from .harness import Hook, RankResult, run_case, succeeded

_attached: Any = None  # this rank's protection, in the forked process


def attach(settings: Mapping[str, Any], also: Hook | None, rank: int) -> None:
    """A ``before`` hook: attaches the protection as a user's own script would."""
    from sparetrain_megatron import megatron
    from sparetrain_megatron.config import SparetrainConfig

    global _attached
    _attached = megatron.attach(SparetrainConfig(enabled=True, cpu=True, **settings))
    if also is not None:
        also(rank)


def injected(rank: int) -> list[dict[str, Any]]:
    """An ``after`` hook: what this rank's injector did."""
    return _attached.injector.records


@dataclass
class ProtectedRun:
    """What a protected training left behind."""

    ranks: list[RankResult]
    inject: tuple[str, ...] = ()
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def faults(self) -> list[dict[str, Any]]:
        """The injected faults that changed a bit."""
        return [record for r in self.ranks for record in r.value or () if record["effect"]]

    @property
    def exit_codes(self) -> list[int | None]:
        return [r.exit_code for r in self.ranks]

    def told(self) -> str:
        """What the product told on the terminal, rank by rank."""
        lines = (line for r in self.ranks for line in r.output.splitlines())
        return "\n".join(line for line in lines if line.startswith("sparetrain:"))


def protected(
    argv: Sequence[str],
    world_size: int,
    directory: Path,
    *,
    also: Hook | None = None,
    after: Hook = injected,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
    inject: Sequence[str] = (),
    te: str | None = None,
    **settings: Any,
) -> ProtectedRun:
    """Trains with protection.

    Args:
        argv: The flags of the entry script.
        world_size: Number of ranks.
        directory: For events and summary.
        also: Called in each rank with its number when protection has been attached.
        after: Called in each rank at its end; by default it tells what was injected.
        env: Additional environment of the ranks.
        timeout: Seconds after which all ranks are killed.
        inject: Faults, as ``FaultSpec`` reads them.
        te: A release of Transformer Engine to run on CPU kernels.
        **settings: Fields of ``SparetrainConfig``.
    """
    inject = tuple(str(FaultSpec.parse(text)) for text in inject)
    settings = {"dir": str(directory), "inject": inject, "mode": "piggyback", **settings}
    before = functools.partial(attach, settings, also)
    ranks = run_case(
        argv, world_size, before=before, after=after, env=env or {}, timeout=timeout, te=te
    )
    return ProtectedRun(ranks, inject, list(read_events(directory)), read_summary(directory))


_unprotected: dict[tuple, list[RankResult]] = {}


def unprotected(
    argv: Sequence[str],
    world_size: int,
    env: Mapping[str, str] | None = None,
    te: str | None = None,
) -> list[RankResult]:
    """The same training without protection; run once a session."""
    key = (tuple(argv), world_size, tuple(sorted((env or {}).items())), te)
    if key not in _unprotected:
        _unprotected[key] = succeeded(run_case(argv, world_size, env=env, te=te))
    return _unprotected[key]


def bits(results: list[RankResult]) -> list[tuple]:
    """What two equal trainings have in common: exact losses, digests of weights and optimizer."""
    return [(r.losses, r.weights, r.optimizer) for r in results]


def assert_same_training(run: ProtectedRun, expected: list[RankResult]) -> None:
    """Every rank ended well, and with the very bits of the expected training."""
    succeeded(run.ranks)
    for mine, theirs in zip(run.ranks, expected, strict=True):
        assert mine.losses == theirs.losses, f"rank {mine.rank}: losses differ"
        assert mine.weights == theirs.weights, f"rank {mine.rank}: weights differ"
        assert mine.optimizer == theirs.optimizer, f"rank {mine.rank}: optimizer differs"
        assert mine.buffers == theirs.buffers, f"rank {mine.rank}: buffers differ"
        assert mine.scales == theirs.scales, f"rank {mine.rank}: scales of FP8 differ"
    assert run.summary is not None
    assert run.summary["unprotected"] == {}


def assert_all_reported(run: ProtectedRun) -> None:
    """Every fault was injected, and has a mismatch of its own iteration, attempt and operator."""
    hit = {record["spec"] for record in run.faults}
    missing = [spec for spec in run.inject if spec not in hit and "rate=" not in spec]
    assert not missing, f"not injected: {missing}"
    found = [_place(event) for event in run.of_kind("mismatch")]
    for fault in run.faults:
        # A wrong optimizer state may have no operator of its own to be seen in.
        places = {_place(fault)}
        if fault["phase"] == "optimizer":
            places.add(_place({**fault, "operator": "step"}))
        assert places & set(found), f"not reported: {fault}\n{run.told()}"


def _place(event: dict[str, Any]) -> tuple:
    return event["rank"], event["iteration"], event["attempt"], event["operator"]
