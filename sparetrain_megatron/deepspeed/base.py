"""Protected DeepSpeed engines: attempts, verdicts and rollback around the user's own loop.

    forward, backward (, step)     a microbatch; kept, so that it can be done again
    step at the boundary
      verdict "gradients"          dirty: gradients are forgotten, the kept microbatches done again
      DeepSpeed's step             clipping and copies are repaired on the spot; the inner step has
                                   its own local rollback
      verdict "parameters"         repaired from the verified main parameters

A dirty verdict never leaves an iteration in the middle, since the peers would hang.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..config import SparetrainConfig
from ..dmr.engine import UnprotectedOperator, Verdict
from ..dmr.operators import vouch
from ..dmr.optimizer_step import CheckedStep
from ..errors import EXIT_ABORTED, EXIT_EXHAUSTED, UsageError
from ..planning import Planning
from ..protection import Protection
from .block import spell
from .checkpointing import Recompute
from .experts import prepare
from .identity import identity, plans_for_stage
from .refusals import check_checkpointing
from .regions import Regions
from .state import Snapshot
from .windows import Waits
from .zero import gradients_of

_QUESTIONS = ("mkldnn::_is_mkldnn_bf16_supported", "mkldnn::_is_mkldnn_fp16_supported")
"""Operators that DeepSpeed asks about the machine: without tensors, and so without side effects."""


class DeepSpeedProtection(Protection):
    """What all kinds of engines have in common.

    Args:
        engine: The DeepSpeed engine.
        config: The run's configuration.
    """

    def __init__(self, engine: Any, config: SparetrainConfig) -> None:
        super().__init__(config)
        self.deepspeed = engine
        self.loss: Callable[..., Any] | None = None
        self._snapshot: Snapshot | None = None
        self._steps: list[CheckedStep] = []
        self._known_mismatches = 0
        self._activity = contextlib.ExitStack()
        self._started = self._waited = 0.0
        self.planning: Planning | None = None

    def spell(self, field: str) -> str:
        return spell(field)

    # --- attaching -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Replaces the methods of this engine that this product has to be part of."""
        deepspeed, engine = self.deepspeed, self.engine
        for name in _QUESTIONS:
            vouch(name)
        self.protect_compiled_graphs()
        self.gradients = gradients_of(deepspeed, engine, self.patches)
        for optimizer in self.gradients.inner():
            step = CheckedStep(
                engine,
                optimizer,
                optimizer.step,
                self.config.optimizer_chunk_bytes,
                self.config.max_rollbacks,
                self.redo_chunk,
            )
            self._steps.append(step)
            self.patches.replace(optimizer, "step", self._inner_step(step))
        self.recompute = Recompute(engine, self.patches, self.gradients.kept)
        self._regions = Regions(engine, deepspeed.module, self.recompute)
        parameter = next(deepspeed.module.parameters(), None)
        engine.device = deepspeed.device if parameter is None else parameter.device
        prepare(deepspeed.module, engine.device)
        if dist.get_world_size() > 1:
            engine.second_device.group = dist.group.WORLD
        self.refuse_faults_outside(dist.get_world_size())
        engine.deferred.mark_constants(self.gradients.constants())
        self.wrap()
        self.open_reports(self.config.directory())
        if self.config.defers:
            Waits(engine, self.patches)
            self.planning = Planning(
                engine,
                self.config,
                self.recompute,
                identity(deepspeed),
                self.config.directory(),
                leads=plans_for_stage(deepspeed),
                spell=spell,
                warn=self.warn,
            )
        deepspeed.sparetrain = self

    def wrap(self) -> None:
        """Wraps the methods of the engine that a training loop calls."""
        raise NotImplementedError

    def _inner_step(self, step: CheckedStep) -> Any:
        def wrapper(closure: Any = None) -> None:
            # From here on parameters have changed: copies of them follow.
            self.engine.position.phase = "optimizer"
            step(closure)

        # Schedulers of torch have put this mark on the method that is replaced.
        wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return wrapper

    def close(self) -> None:
        """Writes the summary (collective) and undoes everything."""
        from . import hooks

        self.leave()
        self.write_summary()
        self.detach()
        self._regions.remove()
        if self in hooks._protected:
            hooks._protected.remove(self)
        if self.events is not None:
            self.events.close()
        del self.deepspeed.sparetrain

    # --- when the checks are on ----------------------------------------------------------------

    def enter(self) -> None:
        """Operators are checked from now on."""
        if not self.engine.is_active:
            self._activity.enter_context(self.engine.active())

    def leave(self) -> None:
        """Operators pass unchecked until :meth:`enter`."""
        self._activity.close()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Does not stay on when an error leaves what runs inside.

        Raises:
            UsageError: An operator can't be protected, and strict mode refuses it.
        """
        try:
            yield
        except UnprotectedOperator as error:
            self.leave()
            raise UsageError(
                f"operator {error} can't be executed twice; {spell('strict')}: false trains on "
                "without protection of it, and counts it"
            ) from None
        except BaseException:
            self.leave()
            raise

    @contextlib.contextmanager
    def deferring(self, phase: str) -> Iterator[None]:
        """What runs inside of one microbatch's phase waits for a window, if the plan says so."""
        with self.engine.deferring_rest(0, self.engine.position.microbatch or 0, phase):
            yield

    # --- an iteration --------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        self._started, self._waited = time.perf_counter(), self.engine.waited
        check_checkpointing()
        self.engine.begin(self.deepspeed.global_steps + 1, 1)
        self._snapshot = Snapshot(self.deepspeed)

    def end_iteration(self) -> None:
        self.leave()
        self._snapshot = None
        self.statistics.iterations += 1
        seconds = time.perf_counter() - self._started
        self.statistics.seconds_total += seconds
        self.plan(self.planning, seconds, self.engine.waited - self._waited)
        every = self.deepspeed.steps_per_print()
        if every and self.engine.position.iteration % every == 0:
            self.report_interval(speaks=dist.get_rank() == dist.get_world_size() - 1)

    def restore(self, verdict: Verdict) -> None:
        assert self._snapshot is not None
        self.gradients.discard()
        self._snapshot.restore()
        if self.planning is not None:
            self.planning.attempt_discarded()

    def resume(self) -> None:
        with self.engine.at(phase="communication", layer=None, microbatch=None):
            self.gradients.reload()

    def apply(self, step: Callable[[], Any]) -> Any:
        """DeepSpeed's own step, on gradients that have been verified."""
        engine = self.engine
        # Some groups have been stepped when others are clipped, so nothing can be taken back as a
        # whole: a wrong value is replaced where it is found.
        engine.repairs_all = engine.repairs
        self._known_mismatches = self.statistics.mismatches
        try:
            with engine.at(phase="clip", layer=None, microbatch=None):
                result = step()
                self.verify_parameters()
        finally:
            engine.repairs_all = False
        return result

    def look_at_step(self) -> bool:
        """Reports what was repaired on the spot; stops the run where that is asked for."""
        engine = self.engine
        with engine.paused():
            found = engine.ledger.collect()
        # On a device the third execution decides unseen.
        torn = engine.device.type == "cpu" and any(
            m.method == "naive" and m.wrong == "unknown" for m in found
        )
        given_up = any(s.exhausted for s in self._steps) or (torn and engine.repairs)
        mine = Verdict(True, tuple(found))
        if found:
            self.emit_verdict(mine, "optimizer", "repaired" if engine.repairs else "report")
        # A chunk of the inner step that was repeated has left nothing to collect.
        new = self.statistics.mismatches > self._known_mismatches
        if self.config.on_mismatch == "abort" and self.on_any_rank(new):
            self.stop(EXIT_ABORTED, mine, "optimizer")
        if self.on_any_rank(given_up):
            self.stop(EXIT_EXHAUSTED, mine, "optimizer")
        return False

    def write_parameters(self) -> None:
        self.engine.repairs_all = self.engine.repairs  # a new attempt begins without
        self.gradients.write_parameters()
