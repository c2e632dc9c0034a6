"""What protection does in one process whatever framework trains: verdicts, rollback, stop, reports.

A framework's adapter derives from :class:`Protection`, says how an attempt is undone and repeated,
and asks here what a verdict means.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config import FLAGS, SparetrainConfig
from .dmr.engine import Engine, Verdict
from .dmr.mismatch import Mismatch, device_name, host_name
from .dmr.second_device import SecondDevice
from .errors import EXIT_ABORTED, EXIT_EXHAUSTED, UsageError
from .faults.injector import Injector
from .faults.spec import FaultSpec
from .patching import Patches
from .plan import load_plans
from .planning import Planning, planned
from .report import runs
from .report.events import EventLog
from .report.summary import Statistics, write_summary
from .report.terminal import interval_line, mismatch_line, print_summary, say

EXIT_BARRIER_SECONDS = 15.0
"""How long a rank that is about to stop waits for the others' reports."""


class Protection:
    """Engine, counters, events and decisions of one rank.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: SparetrainConfig) -> None:
        self.config = config
        if config.plan is not None:
            try:
                load_plans(config.plan)
            except UsageError as error:
                raise UsageError(f"{self.spell('plan')}: {error}") from None
        self.enabled = True
        """Set to False, steps run unprotected; for measurements."""
        self.statistics = Statistics()
        self.rank = int(os.environ.get("RANK", "0"))
        specs = [FaultSpec.parse(text) for text in config.inject]
        self.injector = Injector(specs, self.rank)
        self.engine = Engine(
            self.statistics,
            self.injector,
            piggyback=config.mode != "naive",
            strict=config.strict,
            repairs=config.on_mismatch != "report",
            copy_limit=config.optimizer_chunk_bytes,
            reductions=config.reductions,
            second_device=SecondDevice(
                config.second_device,
                config.second_device_after_mismatch and config.on_mismatch != "report",
            ),
            on_mismatch=self._mismatch,
        )
        self.engine.position.rank = self.rank
        self.patches = Patches()
        self.events: EventLog | None = None
        self._directory: Path | None = None

    # --- what a framework's adapter says -------------------------------------------------------

    def restore(self, verdict: Verdict) -> None:
        """Puts back what the discarded attempt has changed; the engine is paused meanwhile."""
        raise NotImplementedError

    def resume(self) -> None:
        """What the next attempt has to begin with, checked as a part of it."""

    def look_at_step(self) -> bool:
        """Whether, on any rank, a part of the optimizer's step stays wrong; collective."""
        raise NotImplementedError

    def write_parameters(self) -> None:
        """Copies and gathers the parameters again, from the verified main parameters."""
        raise NotImplementedError

    def spell(self, field: str) -> str:
        """How the user writes a field of the configuration."""
        return FLAGS[field]

    # --- attaching -----------------------------------------------------------------------------

    def refuse_faults_outside(self, world_size: int, iterations: int | None = None) -> None:
        """Refuses fault specs that name a rank or an iteration that the run doesn't have.

        Args:
            world_size: Ranks.
            iterations: The last one's number; None where it isn't known.

        Raises:
            UsageError: Names the flag, the spec and what there is.
        """
        for text in self.config.inject:
            spec = FaultSpec.parse(text)
            if spec.rank is not None and spec.rank >= world_size:
                why = f"rank={spec.rank}: the job's ranks are 0 to {world_size - 1}"
            elif iterations and spec.iteration is not None and spec.iteration > iterations:
                why = f"iteration={spec.iteration}: the run ends with iteration {iterations}"
            else:
                continue
            raise UsageError(f"{self.spell('inject')} {text}: {why}")

    def protect_compiled_graphs(self) -> None:
        """Has what ``torch.compile`` makes executed twice, too."""
        if os.environ.get("TORCH_COMPILE_DISABLE", "0") != "1":
            from .dmr import compiled  # brings Inductor with it

            compiled.install()
            self.engine.protect_compiled(compiled.set_executor)

    def detach(self) -> None:
        """Undoes all patches."""
        self.patches.undo()
        if self.engine.set_executor is not None:
            from .dmr import compiled

            compiled.uninstall()
            self.engine.set_executor = None

    def open_reports(self, directory: Path) -> None:
        """Opens the event log and says what is going to be protected how; collective."""
        self._directory = directory
        self._set_aside(directory)
        self.events = EventLog(directory, self.rank)
        if self.rank == 0:
            if self.events.path.exists():
                say(f"{directory} has events of a run that did not end; this run's are added")
            mode = self.config.mode
            say(f"protection is on, mode {mode}; events and summary go to {directory}")
            self.events.emit(
                "plan",
                mode=self.config.mode,
                config=self.config.model_dump(mode="json"),
                world_size=dist.get_world_size(),
                host=host_name(),
                device=device_name(),
            )

    def _set_aside(self, directory: Path) -> None:
        """Keeps the files of a finished run in the same folder apart from this one's."""
        target = [runs.finished(directory) if self.rank == 0 else None]
        if self.rank == 0 and target[0] is not None:
            runs.set_aside(directory, target[0], self.config.plan)
            say(f"{directory} has a finished run: its files are now in {target[0]}")
        if dist.get_world_size() > 1:
            with self.engine.paused():
                dist.broadcast_object_list(target, src=0)
        if self.rank != 0 and target[0] is not None:
            # Where the folder is a node's own, the first rank has not seen these.
            runs.set_aside(directory, target[0], self.config.plan)

    # --- verdicts ------------------------------------------------------------------------------

    def takes_back(self, verdict: Verdict, point: str) -> bool:
        """Whether a verdict discards what it is about; stops the run where that is asked for.

        Args:
            point: ``gradients``, ``optimizer`` or ``parameters``.
        """
        if not verdict.dirty:
            return False
        if self.config.on_mismatch == "report":
            self.emit_verdict(verdict, point, "report")
            return False
        if self.config.on_mismatch == "abort":
            self.stop(EXIT_ABORTED, verdict, point)
        return True

    def rollback(self, verdict: Verdict, point: str) -> None:
        """Discards the attempt, restores what it changed and starts the next one."""
        engine = self.engine
        iteration, attempt = engine.position.iteration, engine.position.attempt
        if attempt > self.config.max_rollbacks:
            self.stop(EXIT_EXHAUSTED, verdict, point)
        self.emit_verdict(verdict, point, "rollback")
        self.event("rollback", iteration=iteration, attempt=attempt, scope="iteration")
        self.statistics.rollbacks += 1
        with engine.paused():
            engine.discard()
            self.restore(verdict)
        if self.rank == 0:
            say(
                f"iteration {iteration} is discarded on all ranks and repeated "
                f"(attempt {attempt + 1} of {self.config.max_rollbacks + 1})"
            )
        engine.begin(iteration, attempt + 1)
        self.resume()

    def late(self, point: str) -> None:
        """What was found after the last verdict: repaired already, and reported here."""
        with self.engine.paused():
            found = self.engine.ledger.collect()
        if found:
            action = "repaired" if self.engine.repairs_all else "report"
            self.emit_verdict(Verdict(True, tuple(found)), point, action)

    def redo_chunk(self, found: list[Mismatch]) -> None:
        """A chunk of the optimizer's step is undone and repeated."""
        position = self.engine.position
        self.event(
            "rollback",
            iteration=position.iteration,
            attempt=position.attempt,
            scope="optimizer chunk",
        )
        say(
            f"rank {self.rank}: a chunk of the optimizer's step of iteration {position.iteration} "
            "is undone and repeated"
        )

    def on_any_rank(self, mine: bool) -> bool:
        """Whether it holds on at least one rank; collective."""
        if dist.get_world_size() == 1:
            return mine
        flag = torch.tensor([int(mine)], dtype=torch.int32, device=self.engine.device)
        with self.engine.paused():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            return bool(flag.item())

    def stop(self, code: int, verdict: Verdict, point: str, why: str = "") -> None:
        """Ends the run on all ranks: they have agreed on the verdict, so all of them get here.

        Args:
            why: The reason, where neither ``abort`` nor the number of attempts is.

        Raises:
            SystemExit: With the exit code.
        """
        position = self.engine.position
        action = "abort" if code == EXIT_ABORTED else "exhausted"
        self.emit_verdict(verdict, point, action)
        self.engine.flush_counts()
        where = "; ".join(mismatch_line(m.to_event()) for m in verdict.mine)
        if code == EXIT_ABORTED:
            why = f"{self.spell('on_mismatch')} abort"
        elif not why:
            why = f"every one of {position.attempt} attempts mismatched"
        if verdict.mine or self.rank == 0:
            say(
                f"rank {self.rank} on {host_name()} ({device_name()}): stopping in iteration "
                f"{position.iteration} with exit code {code}: {why}. {where}"
            )
        # Teardown may hang on a peer that is gone: the process ends in bounded time anyway.
        self.end_in_bounded_time(code)
        with self.engine.paused():
            self.write_summary()
        if self.events is not None:
            self.events.close()
        raise SystemExit(code)

    @staticmethod
    def end_in_bounded_time(code: int) -> threading.Timer:
        """Ends the process if it is neither ended nor this cancelled some time later."""
        watchdog = threading.Timer(EXIT_BARRIER_SECONDS, os._exit, (code,))
        watchdog.daemon = True
        watchdog.start()
        return watchdog

    def verify_parameters(self) -> None:
        """The last verdict: parameters as copied and gathered; written again, as the step stands.

        Collective. Stops the run when they stay wrong.
        """
        engine = self.engine
        for repairs in range(self.config.max_rollbacks + 1):
            exhausted = self.look_at_step()
            verdict = engine.verdict()
            if not self.takes_back(verdict, "parameters"):
                return
            if exhausted or repairs == self.config.max_rollbacks:
                self.stop(EXIT_EXHAUSTED, verdict, "parameters")
            self.emit_verdict(verdict, "parameters", "rollback")
            iteration, attempt = engine.position.iteration, engine.position.attempt
            self.event("rollback", iteration=iteration, attempt=attempt, scope="parameters")
            engine.discard()
            engine.begin(iteration, attempt + 1)
            with engine.at(phase="optimizer", layer=None):
                self.write_parameters()

    def plan(self, planning: Planning | None, seconds: float, waited: float) -> None:
        """An iteration stands: it may have been the last to be profiled.

        Args:
            planning: None where nothing is deferred.
            seconds: How long it took.
            waited: How long the rank waited in windows.
        """
        plan = None if planning is None else planning.iteration_ended(seconds, waited)
        if planning is None or plan is None:
            return
        if planning.leads:
            self.event("plan", mode=plan.mode, stage=plan.stage, totals=plan.totals.model_dump())
        if self.rank == 0:
            say(planned(plan))

    # --- reports -------------------------------------------------------------------------------

    def event(self, kind: Any, **fields: Any) -> None:
        if self.events is not None:
            self.events.emit(kind, **fields)

    def warn(self, message: str) -> None:
        say(f"warning: {message}")
        self.event("warning", message=message)

    def _mismatch(self, mismatch: Mismatch) -> None:
        event = mismatch.to_event()
        say(mismatch_line(event))
        self.event("mismatch", **event)

    def emit_verdict(self, verdict: Verdict, point: str, action: str) -> None:
        position = self.engine.position
        self.event(
            "verdict",
            iteration=position.iteration,
            attempt=position.attempt,
            point=point,
            mismatches=len(verdict.mine),
            action=action,
            findings=[
                {
                    "ordinal": m.ordinal,
                    "operator": m.operator,
                    "wrong": m.wrong,
                    "followed_by": m.followed_by,
                    "note": m.note,
                }
                for m in verdict.mine
            ],
        )

    def report_interval(self, speaks: bool) -> None:
        """The counters so far, as an event and, on the rank that speaks, a line."""
        self.engine.flush_counts()
        statistics = self.statistics
        if speaks:
            say(interval_line(statistics, self.rank, dist.get_world_size()))
        if self.rank != 0:
            return  # one file of them, not one for each of thousands of ranks
        self.event(
            "iteration",
            iteration=self.engine.position.iteration,
            operators_checked=statistics.operators_checked,
            mismatches=statistics.mismatches,
            rollbacks=statistics.rollbacks,
            seconds_in_checks=statistics.seconds_in_checks,
            seconds_in_windows=statistics.seconds_in_windows,
            seconds_total=statistics.seconds_total,
        )

    def write_summary(self) -> None:
        """Gathers the counters of all ranks; collective."""
        self.engine.flush_counts()
        self.statistics.injected = len(self.injector.records)
        parts: list[Any] = [None] * dist.get_world_size()
        hits = [record["spec"] for record in self.injector.records]
        dist.all_gather_object(parts, {**self.statistics.to_dict(), "hits": hits})
        if self.rank == 0 and self._directory is not None:
            merged = Statistics.merge([Statistics.from_dict(p) for p in parts])
            write_summary(self._directory, merged, self.config, len(parts))
            print_summary(merged, world_size=len(parts), directory=self._directory)
            self._name_idle_specs({spec for part in parts for spec in part["hits"]})

    def _name_idle_specs(self, hit: set[str]) -> None:
        """A fault that never came about looks like one that did no harm, so it is named."""
        specs = [str(FaultSpec.parse(text)) for text in self.config.inject]
        idle = [spec for spec in specs if spec not in hit]
        if idle:
            self.warn(
                f"{len(idle)} of {len(specs)} fault specs never matched an operator: "
                + "; ".join(idle)
            )
