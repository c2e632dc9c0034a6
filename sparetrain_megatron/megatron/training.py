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
import gc
import inspect
import time
from typing import Any

import torch.distributed as dist

from .. import protection
from ..config import FLAGS, SparetrainConfig
from ..dmr.engine import UnprotectedOperator, Verdict
from ..errors import UsageError
from ..planning import Planning, check_plan
from ..report.terminal import say
from . import metrics, transformer_engine
from .experts import Experts, expert_layers
from .identity import identity, plans_for_stage
from .optimizer import Discarded, OptimizerHooks
from .pipeline import Pipeline
from .preflight import check, megatron_version
from .recompute import Recompute
from .regions import Regions
from .state import Snapshot, Validation, replayed, schedule_allowed

CPU_CHUNK = 8 << 20


class Protection(protection.Protection):
    """Everything the plugin does in one process.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: SparetrainConfig) -> None:
        super().__init__(config)
        self._hooks: Any = None  # OptimizerHooks, from the first step on
        self._optimizer: Any = None
        self._model: list[Any] = []
        self._schedule: Any = None
        self._schedule_arguments: dict[str, Any] = {}
        self._snapshot: Any = None  # Snapshot, from the first schedule on
        self._dirty: Any = None  # the verdict that discards the present attempt
        self.planning: Planning | None = None

    # --- attaching -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Replaces the functions of Megatron that this product has to be part of."""
        from megatron.training import training

        self.protect_compiled_graphs()
        self._recompute = Recompute(self.engine, self.patches)
        transformer_engine.attach(self.engine, self.patches, self._recompute)
        if self.config.defers:
            self._pipeline = Pipeline(self.engine, self.patches)
        self._experts = Experts(self.engine, self.patches)
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

    def _setup(self, original: Any) -> Any:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            megatron_version()
            self._refuse_early(get_args())
            for refusal in check(get_args(), self.config.strict):
                self.statistics.unprotected[refusal.flag] = 1
                if self.rank == 0:
                    say(f"warning: {refusal.flag}: {refusal.why}; counted as unprotected")
            return original(*args, **kwargs)

        return setup_model_and_optimizer

    def _refuse_early(self, args: Any) -> None:
        """What would otherwise only be found when the model has been built, or never."""
        # A run that resumes goes on with the checkpoint's numbers, up to the same last one.
        self.refuse_faults_outside(args.world_size, args.train_iters)
        if self.config.plan is not None:
            stages = range(args.pipeline_model_parallel_size)
            check_plan(self.config.plan, FLAGS["plan"], identity(args), stages)

    def _prepare(self, model: list[Any], optimizer: Any, config: Any) -> None:
        """At the first step, when everything has been built."""
        from megatron.core import parallel_state
        from megatron.training import get_args

        args = get_args()
        engine = self.engine
        self._model, self._optimizer = model, optimizer
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
            chunk=self._optimizer_chunk(),
            attempts=self.config.max_rollbacks if self.config.on_mismatch == "rollback" else 0,
            before_step=self._before_step,
            on_redo=self.redo_chunk,
        )
        original = optimizer.step
        self.patches.replace(optimizer, "step", functools.wraps(original)(self._step(original)))
        self.open_reports(self.config.directory(args.save))
        if self.config.defers:
            directory = self.config.directory(args.save)
            self.planning = Planning(
                engine,
                self.config,
                self._recompute,
                identity(args),
                directory,
                leads=plans_for_stage(),
                varying=expert_layers(model),
                warn=self.warn,
            )

    def _optimizer_chunk(self) -> int:
        """On a CPU a chunk that stays in the caches is stepped twice in less time."""
        chunk = self.config.optimizer_chunk_bytes
        return min(chunk, CPU_CHUNK) if self.engine.device.type == "cpu" else chunk

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
            start, waited = time.perf_counter(), self.engine.waited
            self.engine.begin(iteration + 1, 1)
            self._snapshot = None
            try:
                with self.engine.active(), self.engine.at(phase="accumulate"):
                    result = original(*bound.args, **bound.kwargs)
                    self.late("averages")
            except UnprotectedOperator as error:
                raise UsageError(
                    f"operator {error} can't be executed twice; --no-sparetrain-strict trains on "
                    "without protection of it, and counts it"
                ) from None
            self.statistics.iterations += 1
            if self.statistics.iterations == 1:
                # What has been built stays: tapes are many objects, and with them come collections
                # that would each look at all of Megatron's again, for a quarter of a second.
                gc.collect()
                gc.freeze()
            seconds = time.perf_counter() - start
            self.statistics.seconds_total += seconds
            self.plan(self.planning, seconds, self.engine.waited - waited)
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
            self.rollback(self._dirty, "gradients")

    def _wrap_finalize(self, config: Any) -> None:
        original = config.finalize_model_grads_func

        @functools.wraps(original)
        def finalize_model_grads(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.engine.is_active:
                return original(model, *args, **kwargs)
            verdict = self.engine.verdict(final=False)
            if self.takes_back(verdict, "gradients"):
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
        if self.takes_back(verdict, "optimizer"):
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
                    self.rollback(self._dirty, "optimizer")
                    with schedule_allowed():
                        self._forward_backward()
            self.verify_parameters()
            engine.repairs_all = engine.repairs
            return result

        return step

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

    def look_at_step(self) -> bool:
        return self.on_any_rank(self._hooks.exhausted)

    def write_parameters(self) -> None:
        self._hooks.write_parameters(self._model)

    # --- rollback ------------------------------------------------------------------------------

    def restore(self, verdict: Verdict) -> None:
        self._snapshot.restore(self._optimizer)
        self._validation.forget()
        # What disagreed may be a template that is not true any longer.
        self._recompute.templates.clear()
        if self.planning is not None:
            self.planning.attempt_discarded()

    def resume(self) -> None:
        if self._overlapped_gather():
            # The parameters themselves may have arrived wrong: what overlaps with the forward is
            # looked at by this iteration's verdict alone. This gathering belongs to the next one.
            with self.engine.at(phase="optimizer", layer=None):
                self.write_parameters()

    def _overlapped_gather(self) -> bool:
        return any(
            getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)
            for chunk in self._model
        )

    # --- the rest of the run -------------------------------------------------------------------

    def _disable_forward_pre_hook(self, original: Any) -> Any:
        def disable_forward_pre_hook(*args: Any, **kwargs: Any) -> Any:
            # Gathers all parameters outside of any step: before a checkpoint or an evaluation.
            if self._hooks is None or kwargs.get("param_sync") is False:
                return original(*args, **kwargs)
            with self.engine.active(), self.engine.at(phase="communication"):
                result = original(*args, **kwargs)
                self.verify_parameters()
            return result

        return disable_forward_pre_hook

    def _training_log(self, original: Any) -> Any:
        def training_log(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            result = original(*args, **kwargs)
            iteration = self.engine.position.iteration
            if iteration and iteration % get_args().log_interval == 0:
                self.report_interval(speaks=dist.get_rank() == dist.get_world_size() - 1)
                metrics.log(self.statistics, iteration)
            return result

        return training_log

    def _train(self, original: Any) -> Any:
        def train(*args: Any, **kwargs: Any) -> Any:
            regular = True
            try:
                return original(*args, **kwargs)
            except SystemExit as stop:
                # --exit-interval and the like; with another code the ranks need not be together.
                regular = not stop.code
                raise
            except BaseException:
                regular = False
                raise
            finally:
                if regular and self._hooks is not None:
                    self.write_summary()

        return train
