"""From profiled iterations to a plan, and from a plan to what the engine is told about a region.

The first iterations run with piggyback and are profiled; then one rank of each pipeline stage plans
for its stage, everybody gets the plans, and from the next iteration on checks are deferred. When
windows turn out to be much shorter or longer than planned for, the iterations that follow are
profiled anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config import FLAGS, SparetrainConfig, parse_size
from .dmr.block import Blocks
from .dmr.engine import Engine
from .dmr.strategy import Immediate, Method, Strategy
from .errors import UsageError
from .plan import Identity, Plan, load_plans, save_plans
from .plan import plan as make_plan
from .profiler import Recorder
from .report.terminal import say

DRIFT = 0.35
"""Windows this much shorter or longer than planned, over several iterations, call for a new plan.
"""

DRIFT_ITERATIONS = 8
SHORTEST = 1e-3
"""Seconds of an iteration below which nobody cares how long windows are."""

HOST_BUDGET = 1 << 30
"""Bytes that deferral may hold on a CPU when nothing is said."""


class Planned:
    """Answers for regions from a plan; for those that no profile tells about, by itself.

    Operators of experts are others each time, in number and sizes: a profile shows but one of the
    ways they have run. They are queued as they run, and go one by one into whatever window comes.

    Args:
        plan: This stage's.
        layers: Number of the layer of each checkpointed block, by (model chunk, index).
        varying: Numbers of the layers with experts, if what these wait for can be a window.
    """

    def __init__(
        self,
        plan: Plan,
        layers: dict[tuple[int, int], int],
        varying: frozenset[int] = frozenset(),
    ) -> None:
        self._plan = plan
        self._layers = layers
        self._varying = varying if plan.mode == "full" else frozenset()
        self._blocks: dict[tuple[int, int, int], Method] = {}
        self._rest: dict[tuple[int, str], set[int | str]] = {}
        self.unplanned = 0
        """Blocks that have come and that the plan doesn't have."""

    def block(self, chunk: int, microbatch: int, index: int) -> Method:
        key = (chunk, microbatch, index)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._method(chunk, microbatch, index)
        return found

    def _method(self, chunk: int, microbatch: int, index: int) -> Method:
        layer = self._layers.get((chunk, index))
        if layer in self._varying:
            return "single"
        choice = self._plan.choice(microbatch, layer, "backward")
        if not choice.known:
            self.unplanned += 1
        if choice.segments:
            parts = {part.phase for segment, _ in choice.segments for part in segment.parts}
            return "segment" if "recompute" in parts else "single"
        # Never naive: all ranks of a tensor-parallel group must reduce alike; see Everything.
        return "single" if choice.windows else "piggyback"

    def defers_rest(self, chunk: int, microbatch: int, phase: str, layer: int | str | None) -> bool:
        if self._varying and not self._layers:
            return True  # nothing is checkpointed: the layers are part of the rest
        key = (microbatch, phase)
        found = self._rest.get(key)
        if found is None:
            found = self._rest[key] = self._deferred_rest(microbatch, phase)
        # What comes behind the last block; between two there is nothing.
        behind = "head" if phase == "forward" else "embedding"
        part = behind if isinstance(layer, int) else layer
        return part in found or any(isinstance(other, int) for other in found)

    def _deferred_rest(self, microbatch: int, phase: str) -> set[int | str]:
        """Where, outside of checkpointed blocks, something is deferred."""
        rows = [r for r in self._plan.rows if r.microbatch == microbatch]
        recomputed = {r.layer for r in rows if r.phase == "recompute"}
        if self._plan.identity.flags.get("recompute_granularity") == "selective":
            recomputed = set()  # a part of each layer only
        return {
            r.layer
            for r in rows
            if r.phase == phase and r.layer is not None and r.layer not in recomputed
            if self._plan.choice(microbatch, r.layer, phase).deferred
        }


class Planning:
    """Profiles, plans, and sets the engine's strategy.

    Args:
        engine: This rank's engine.
        config: Mode, plan file, number of iterations, memory budget.
        blocks: This rank's checkpointed blocks: their layers, and whether they are ever bound.
        identity: What a plan depends on.
        varying: See :class:`Planned`.
        directory: Where profiles and the plan go.
        leads: Whether this rank plans for its stage; true on one rank of each.
        spell: How the user writes a field of the configuration.
        warn: Reports something that the user should know of.
    """

    def __init__(
        self,
        engine: Engine,
        config: SparetrainConfig,
        blocks: Blocks,
        identity: Identity,
        directory: Path,
        *,
        leads: bool,
        varying: frozenset[int] = frozenset(),
        spell: Callable[[str], str] = FLAGS.__getitem__,
        warn: Callable[[str], None] = say,
    ) -> None:
        self.varying = varying
        self._engine = engine
        self._config = config
        self._blocks = blocks
        self._directory = directory
        self._identity = identity
        self._budget = budget_bytes(config, engine.device)
        self._recorder: Recorder | None = None
        self._expected: float | None = None
        self._follows = False  # it was told how to defer
        self._waits: list[float] = []
        self._warn = warn
        self._told = 0
        self.plan: Plan | None = None
        self.leads = leads
        engine.deferred.budget = self._budget
        engine.waits_together = True
        if not self._budget:
            # Nothing can be deferred: the strategy stays what it is in mode piggyback.
            self._follows = True
            return
        if config.plan is not None:
            check_plan(config.plan, spell("plan"), identity, [engine.position.stage])
            self._adopt(load_plans(config.plan)[engine.position.stage])
        else:
            self._profile()

    @property
    def profiling(self) -> bool:
        return self._recorder is not None

    def follow(self, strategy: Strategy) -> None:
        """Defers as a strategy says, whatever a plan would."""
        self._recorder = self._engine.observer = None
        self._follows = True
        self._engine.strategy = strategy

    def _profile(self) -> None:
        self._engine.strategy = Immediate()
        engine = self._engine
        self._recorder = Recorder(
            engine.position,
            engine.deferred.constants,
            lambda: bool(engine.passes),
            lambda: engine.beside,
        )
        self._engine.observer = self._recorder

    def attempt_discarded(self) -> None:
        """A rollback: the attempt's times are of no use."""
        if self._recorder is not None:
            self._recorder.discard()

    def iteration_ended(self, seconds: float, waited: float) -> Plan | None:
        """An iteration stands.

        Args:
            seconds: How long it took.
            waited: How long the rank waited in windows.

        Returns:
            The plan, if it has just been made.
        """
        if self._recorder is None:
            self._watch(waited)
            return None
        self._recorder.iteration(seconds)
        # One more than asked for: the first iteration warms up, and leaves the most common shape.
        if self._recorder.iterations < self._config.profile_iters:
            return None
        return self._make()

    def _make(self) -> Plan:
        """Plans; collective over the world."""
        engine, recorder = self._engine, self._recorder
        assert recorder is not None
        rank, stage = engine.position.rank, engine.position.stage
        profile = recorder.profile(
            self._identity, rank, stage, engine.device, binds=self._blocks.binds
        )
        profile.save(self._directory / f"profile.rank{rank}.json")
        mine = None
        if self.leads:
            mine = make_plan(profile, self._budget, self._config.mode)
        everyone: list[Any] = [None] * dist.get_world_size()
        with engine.paused():
            dist.all_gather_object(everyone, mine)
        plans = {plan.stage: plan for plan in everyone if plan is not None}
        if rank == 0:
            save_plans(self._directory / "plan.json", plans)
        self._recorder = engine.observer = None
        self._adopt(plans[stage])
        return plans[stage]

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._engine.strategy = Planned(plan, self._blocks.layers, self.varying)
        # Windows of a plan made here are those of profiled iterations, in which peers kept each
        # other waiting with their own checks: what it comes to is seen in the first iterations.
        self._expected = None if self._config.plan is None else plan.totals.window_seconds
        self._waits.clear()

    def _watch(self, waited: float) -> None:
        """Profiles again when the windows are not what they were; agreed on by all ranks."""
        if self._follows:
            return
        self._tell_unplanned()
        self._waits.append(waited)
        if len(self._waits) < DRIFT_ITERATIONS:
            return
        usual = statistics.median(self._waits)
        self._waits.clear()
        if self._expected is None:
            self._expected = usual
        drifted = abs(usual - self._expected) > DRIFT * self._expected and usual > SHORTEST
        flag = torch.tensor([int(drifted)], dtype=torch.int32, device=self._engine.device)
        with self._engine.paused():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            if self._engine.position.rank == 0:
                say("windows have drifted from the plan's: profiling again")
            self._config = self._config.model_copy(update={"plan": None})
            self._profile()

    def _tell_unplanned(self) -> None:
        strategy = self._engine.strategy
        if isinstance(strategy, Planned) and strategy.unplanned > self._told:
            if not self._told:
                self._warn(
                    f"{strategy.unplanned} checkpointed blocks of an iteration are not in the "
                    "plan, as when the number of microbatches grows; their backward is checked at "
                    "once"
                )
            self._told = strategy.unplanned


def planned(plan: Plan) -> str:
    """What a rank tells of its stage's plan."""
    totals = plan.totals
    return (
        f"planned: {totals.overhead:.1%} expected on stage {plan.stage} "
        f"(floor {totals.floor:.1%}), at most {totals.peak_held / 2**20:,.1f} MiB held"
    )


def check_plan(path: Path, spelled: str, identity: Identity, stages: Iterable[int]) -> None:
    """Checks that a plan was made for this job.

    Args:
        path: The plan's file.
        spelled: How the user writes that setting.
        identity: Of this job, on these stages.
        stages: Pipeline stages that it has to be for.

    Raises:
        UsageError: It was not; names the setting and what differs.
    """
    plans, stages = load_plans(path), sorted(stages)
    missing = [stage for stage in stages if stage not in plans]
    if missing:
        has = ", ".join(map(str, sorted(plans)))
        raise UsageError(
            f"{spelled} {path}: has no plan for pipeline stage {missing[0]}, only for {has}"
        )
    for stage in stages:
        try:
            plans[stage].refuse_unless_for(identity)
        except UsageError as error:
            raise UsageError(f"{spelled} {path}: {error}") from None


def budget_bytes(config: SparetrainConfig, device: torch.device) -> int:
    """What deferral may hold on this device, in bytes."""
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else 8 * HOST_BUDGET
    if config.memory_budget is not None:
        if config.memory_budget.strip() == "0":
            return 0
        return parse_size(config.memory_budget, total=total)
    if not cuda:
        return HOST_BUDGET
    return int(0.8 * max(0, total - torch.cuda.max_memory_reserved(device)))
