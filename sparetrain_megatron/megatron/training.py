"""The protected training step: attempts, verdicts, rollback, and what is reported of them.

    train_step
      zero gradients
      schedule (forward, recompute, backward of all microbatches)
        verdict "gradients"      before gradients are finalized
      finalize gradients, clip
        verdict "optimizer"      before anything of the optimizer changes
      inner step (its own local rollback), copy and gather parameters
        verdict "parameters"     repaired from the verified main parameters

A dirty verdict never leaves a schedule in the middle, since the peers would hang: the attempt is
finished on all ranks, discarded and repeated.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from ..config import SparetrainConfig
from ..dmr.engine import Engine, UnprotectedOperator, Verdict
from ..dmr.mismatch import Mismatch, device_name, host_name
from ..dmr.second_device import SecondDevice
from ..dmr.strategy import Everything
from ..errors import EXIT_ABORTED, EXIT_EXHAUSTED, UsageError
from ..faults.injector import Injector
from ..faults.spec import FaultSpec
from ..patching import Patches
from ..report.events import EventLog
from ..report.summary import Statistics, write_summary
from ..report.terminal import interval_line, mismatch_line, print_summary, say
from .optimizer import Discarded, OptimizerHooks
from .pipeline import Pipeline
from .preflight import check, megatron_version
from .recompute import Recompute
from .regions import Regions
from .state import Snapshot, Validation, replayed, schedule_allowed

EXIT_BARRIER_SECONDS = 15.0
"""How long a rank that is about to stop waits for the others' reports."""


class Protection:
    """Everything the plugin does in one process.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: SparetrainConfig) -> None:
        self.config = config
        self.enabled = True
        """Set to False, steps run unprotected; for measurements."""
        self.statistics = Statistics()
        self.rank = int(os.environ.get("RANK", "0"))
        specs = [FaultSpec.parse(text) for text in config.inject]
        self.injector = Injector(specs, self.rank)
        self.engine = Engine(
            self.statistics,
            self.injector,
            piggyback=config.effective_mode != "naive",
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
        self._directory: Any = None
        self._hooks: OptimizerHooks | None = None
        self._optimizer: Any = None
        self._model: list[Any] = []
        self._schedule: Any = None
        self._schedule_arguments: dict[str, Any] = {}
        self._snapshot: Snapshot | None = None
        self._dirty: Verdict | None = None

    # --- attaching -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Replaces the functions of Megatron that this product has to be part of."""
        from megatron.training import training

        if os.environ.get("TORCH_COMPILE_DISABLE", "0") != "1":
            from ..dmr import compiled  # brings Inductor with it

            compiled.install()
            self.engine.protect_compiled(compiled.set_executor)
        self._recompute = Recompute(self.engine, self.patches)
        if self.config.effective_mode in ("coarse", "full"):
            self._pipeline = Pipeline(self.engine, self.patches)
            self.engine.strategy = Everything(rest=self.config.effective_mode == "full")
        self._validation = Validation(self.engine, self.patches)
        self._regions = Regions(self.engine, self.patches, self._recompute)
        for name, wrapper in (
            ("setup_model_and_optimizer", self._setup),
            ("train_step", self._train_step),
            ("train", self._train),
            ("training_log", self._training_log),
            ("disable_forward_pre_hook", self._disable_forward_pre_hook),
        ):
            original = getattr(training, name)
            self.patches.replace(training, name, functools.wraps(original)(wrapper(original)))

    def detach(self) -> None:
        """Undoes :meth:`attach`."""
        self.patches.undo()
        if self.engine.set_executor is not None:
            from ..dmr import compiled

            compiled.uninstall()
            self.engine.set_executor = None

    def _setup(self, original: Any) -> Any:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            megatron_version()
            for refusal in check(get_args(), self.config.strict):
                self.statistics.unprotected[refusal.flag] = 1
                if self.rank == 0:
                    say(f"warning: {refusal.flag}: {refusal.why}; counted as unprotected")
            return original(*args, **kwargs)

        return setup_model_and_optimizer

    def _prepare(self, model: list[Any], optimizer: Any, config: Any) -> None:
        """At the first step, when everything has been built."""
        from megatron.core import parallel_state
        from megatron.training import get_args

        args = get_args()
        engine = self.engine
        self._model, self._optimizer = model, optimizer
        self._directory = self.config.directory(args.save)
        self.events = EventLog(self._directory, self.rank)
        engine.device = next(model[0].parameters()).device
        engine.position.stage = parallel_state.get_pipeline_model_parallel_rank()
        for group in (
            parallel_state.get_data_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            if group is not None and group.size() > 1:
                engine.second_device.group = group
                break
        engine.deferred.mark_constants([p for chunk in model for p in chunk.parameters()])
        for chunk in model:
            buffers = [*chunk.buffers] if isinstance(chunk.buffers, list) else []
            buffers += getattr(chunk, "expert_parallel_buffers", [])
            engine.mark_accumulators([b.grad_data for b in buffers])
        self._wrap_finalize(config)
        self._hooks = OptimizerHooks(
            engine,
            self.patches,
            optimizer,
            chunk=self.config.optimizer_chunk_bytes,
            attempts=self.config.max_rollbacks if self.config.on_mismatch == "rollback" else 0,
            before_step=self._before_step,
            on_redo=self._redo_chunk,
        )
        original = optimizer.step
        self.patches.replace(optimizer, "step", functools.wraps(original)(self._step(original)))
        if self.rank == 0:
            self.events.emit(
                "plan",
                mode=self.config.effective_mode,
                config=self.config.model_dump(mode="json"),
                world_size=dist.get_world_size(),
                host=host_name(),
                device=device_name(),
            )
            for notice in self.config.notices():
                say(f"warning: {notice}")
                self.events.emit("warning", message=notice)

    # --- the step ------------------------------------------------------------------------------

    def _train_step(self, original: Any) -> Any:
        signature = inspect.signature(original)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            if not self.enabled:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            values = bound.arguments
            if self._hooks is None:
                self._prepare(values["model"], values["optimizer"], values["config"])
            iteration = values.get("iteration")
            if iteration is None:
                iteration = get_args().curr_iteration
            values["forward_backward_func"] = self._protect_schedule(
                values["forward_backward_func"]
            )
            start = time.perf_counter()
            self.engine.begin(iteration + 1, 1)
            self._snapshot = None
            try:
                with self.engine.active(), self.engine.at(phase="accumulate"):
                    result = original(*bound.args, **bound.kwargs)
                    self._late()
            except UnprotectedOperator as error:
                raise UsageError(
                    f"operator {error} can't be executed twice; --no-sparetrain-strict trains on "
                    "without protection of it, and counts it"
                ) from None
            self.statistics.iterations += 1
            self.statistics.seconds_total += time.perf_counter() - start
            return result

        return train_step

    def _protect_schedule(self, original: Any) -> Any:
        @functools.wraps(original)
        def forward_backward_func(**kwargs: Any) -> Any:
            if kwargs.get("forward_only"):  # an evaluation changes nothing
                return original(**kwargs)
            kwargs["data_iterator"] = replayed(kwargs["data_iterator"])
            self._schedule, self._schedule_arguments = original, kwargs
            with self.engine.paused():
                self._snapshot = Snapshot(self._model, kwargs["data_iterator"])
            return self._forward_backward()

        return forward_backward_func

    def _forward_backward(self) -> Any:
        """Runs the schedule until the verdict on its gradients is clean."""
        while True:
            self._dirty = None
            self._regions.begin()
            with self.engine.at(phase="forward"):
                result = self._schedule(**self._schedule_arguments)
            if self._dirty is None:
                return result
            self._rollback(self._dirty, "gradients")

    def _wrap_finalize(self, config: Any) -> None:
        original = config.finalize_model_grads_func

        @functools.wraps(original)
        def finalize_model_grads(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.engine.is_active:
                return original(model, *args, **kwargs)
            verdict = self.engine.verdict(final=False)
            if self._takes_back(verdict, "gradients"):
                self._dirty = verdict
                with self.engine.paused():
                    for chunk in model:
                        settings = getattr(chunk, "ddp_config", None)
                        if settings is not None and settings.overlap_grad_reduce:
                            chunk.finish_grad_sync()
                return None
            self._validation.confirm()
            with self.engine.at(phase="accumulate", layer=None, microbatch=None):
                return original(model, *args, **kwargs)

        self.patches.replace(config, "finalize_model_grads_func", finalize_model_grads)

    def _before_step(self) -> None:
        verdict = self.engine.verdict()
        if self._takes_back(verdict, "optimizer"):
            self._dirty = verdict
            raise Discarded
        self._validation.confirm()

    def _step(self, original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            engine = self.engine
            if not engine.is_active:
                return original(*args, **kwargs)
            while True:
                self._hooks.applied = False
                try:
                    with engine.at(phase="clip", layer=None, microbatch=None):
                        result = self._clip_and_step(original, *args, **kwargs)
                    if not self._hooks.applied:
                        self._before_step()  # the update was skipped; so is what led to it checked
                    break
                except Discarded:
                    self._rollback(self._dirty, "optimizer")
                    with schedule_allowed():
                        self._forward_backward()
            self._verify_parameters()
            engine.repairs_all = engine.repairs
            return result

        return step

    def _late(self) -> None:
        """What was found after the last verdict, in the averages for the log: repaired already."""
        with self.engine.paused():
            found = self.engine.ledger.collect()
        if found:
            action = "repaired" if self.engine.repairs_all else "report"
            self._emit_verdict(Verdict(True, tuple(found)), "averages", action)

    def _clip_and_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the optimizer's own step.

        Raises:
            Discarded: Gradients can't be trusted.
        """
        try:
            return original(*args, **kwargs)
        except Exception:
            # A wrong norm may be a number that Python refuses, such as the root of a negative one.
            # This comes after the norm's last reduction, so the next thing that the other ranks
            # do together is the verdict.
            if not self._hooks.applied and self.engine.suspicious:
                self._before_step()
            raise

    def _verify_parameters(self) -> None:
        """The third verdict: parameters as copied and gathered; repaired, since the inner step stood."""
        engine = self.engine
        for repairs in range(self.config.max_rollbacks + 1):
            exhausted = self._any(self._hooks.exhausted)
            verdict = engine.verdict()
            if not self._takes_back(verdict, "parameters"):
                return
            if exhausted or repairs == self.config.max_rollbacks:
                self._stop(EXIT_EXHAUSTED, verdict, "parameters")
            self._emit_verdict(verdict, "parameters", "rollback")
            iteration, attempt = engine.position.iteration, engine.position.attempt
            self._event("rollback", iteration=iteration, attempt=attempt, scope="parameters")
            engine.discard()
            engine.begin(iteration, attempt + 1)
            with engine.at(phase="optimizer", layer=None):
                self._hooks.write_parameters(self._model)

    def _any(self, mine: bool) -> bool:
        if dist.get_world_size() == 1:
            return mine
        flag = torch.tensor([int(mine)], dtype=torch.int32, device=self.engine.device)
        with self.engine.paused():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            return bool(flag.item())

    # --- verdicts ------------------------------------------------------------------------------

    def _takes_back(self, verdict: Verdict, point: str) -> bool:
        """Whether a verdict discards what it is about; stops the run where that is asked for."""
        if not verdict.dirty:
            return False
        if self.config.on_mismatch == "report":
            self._emit_verdict(verdict, point, "report")
            return False
        if self.config.on_mismatch == "abort":
            self._stop(EXIT_ABORTED, verdict, point)
        return True

    def _rollback(self, verdict: Verdict, point: str) -> None:
        """Discards the attempt, restores what it changed and starts the next one."""
        engine = self.engine
        iteration, attempt = engine.position.iteration, engine.position.attempt
        if attempt > self.config.max_rollbacks:
            self._stop(EXIT_EXHAUSTED, verdict, point)
        self._emit_verdict(verdict, point, "rollback")
        self._event("rollback", iteration=iteration, attempt=attempt, scope="iteration")
        self.statistics.rollbacks += 1
        with engine.paused():
            engine.discard()
            self._snapshot.restore(self._optimizer)
            self._validation.forget()
        if self.rank == 0:
            say(
                f"iteration {iteration} is discarded on all ranks and repeated "
                f"(attempt {attempt + 1} of {self.config.max_rollbacks + 1})"
            )
        engine.begin(iteration, attempt + 1)
        if self._overlapped_gather():
            # The parameters themselves may have arrived wrong: what overlaps with the forward is
            # looked at by this iteration's verdict alone. This gathering belongs to the next one.
            with engine.at(phase="optimizer", layer=None):
                self._hooks.write_parameters(self._model)

    def _overlapped_gather(self) -> bool:
        return any(
            getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)
            for chunk in self._model
        )

    def _redo_chunk(self, found: list[Mismatch]) -> None:
        position = self.engine.position
        self._event(
            "rollback",
            iteration=position.iteration,
            attempt=position.attempt,
            scope="optimizer chunk",
        )
        say(
            f"rank {self.rank}: a chunk of the optimizer's step of iteration {position.iteration} "
            "is undone and repeated"
        )

    def _mismatch(self, mismatch: Mismatch) -> None:
        event = mismatch.to_event()
        say(mismatch_line(event))
        self._event("mismatch", **event)

    def _emit_verdict(self, verdict: Verdict, point: str, action: str) -> None:
        position = self.engine.position
        self._event(
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

    def _event(self, kind: Any, **fields: Any) -> None:
        if self.events is not None:
            self.events.emit(kind, **fields)

    def _stop(self, code: int, verdict: Verdict, point: str) -> None:
        """Ends the run on all ranks: they have agreed on the verdict, so all of them get here.

        Raises:
            SystemExit: With the exit code.
        """
        position = self.engine.position
        action = "abort" if code == EXIT_ABORTED else "exhausted"
        self._emit_verdict(verdict, point, action)
        self.engine.flush_counts()
        where = "; ".join(mismatch_line(m.to_event()) for m in verdict.mine)
        why = (
            "--sparetrain-on-mismatch abort"
            if code == EXIT_ABORTED
            else f"every one of {position.attempt} attempts mismatched"
        )
        if verdict.mine or self.rank == 0:
            say(
                f"rank {self.rank} on {host_name()} ({device_name()}): stopping in iteration "
                f"{position.iteration} with exit code {code}: {why}. {where}"
            )
        # Teardown may hang on a peer that is gone: the process ends in bounded time anyway.
        watchdog = threading.Timer(EXIT_BARRIER_SECONDS, os._exit, (code,))
        watchdog.daemon = True
        watchdog.start()
        with self.engine.paused():
            self._write_summary()
        if self.events is not None:
            self.events.close()
        raise SystemExit(code)

    # --- the rest of the run -------------------------------------------------------------------

    def _disable_forward_pre_hook(self, original: Any) -> Any:
        def disable_forward_pre_hook(*args: Any, **kwargs: Any) -> Any:
            # Gathers all parameters outside of any step: before a checkpoint or an evaluation.
            if self._hooks is None or kwargs.get("param_sync") is False:
                return original(*args, **kwargs)
            with self.engine.active(), self.engine.at(phase="communication"):
                result = original(*args, **kwargs)
                self._verify_parameters()
            return result

        return disable_forward_pre_hook

    def _training_log(self, original: Any) -> Any:
        def training_log(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            result = original(*args, **kwargs)
            iteration = self.engine.position.iteration
            if iteration and iteration % get_args().log_interval == 0:
                if dist.get_rank() == dist.get_world_size() - 1:
                    say(interval_line(self.statistics))
                self._event(
                    "iteration",
                    iteration=iteration,
                    operators_checked=self.statistics.operators_checked,
                    mismatches=self.statistics.mismatches,
                    rollbacks=self.statistics.rollbacks,
                    seconds_in_checks=self.statistics.seconds_in_checks,
                    seconds_in_windows=self.statistics.seconds_in_windows,
                    seconds_total=self.statistics.seconds_total,
                )
            return result

        return training_log

    def _train(self, original: Any) -> Any:
        def train(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._hooks is not None:
                self._write_summary()
            return result

        return train

    def _write_summary(self) -> None:
        """Gathers the counters of all ranks; collective."""
        self.engine.flush_counts()
        self.statistics.injected = len(self.injector.records)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.statistics.to_dict())
        if self.rank == 0:
            merged = Statistics.merge([Statistics.from_dict(p) for p in parts])
            write_summary(self._directory, merged, self.config, len(parts))
            print_summary(merged, world_size=len(parts), directory=self._directory)
