"""A pipeline engine, whose schedule runs the whole iteration."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from ..dmr.engine import Verdict
from ..replay import Replayed
from .base import DeepSpeedProtection
from .recording import tensors_of


class Discarded(Exception):
    """All ranks found that gradients can't be trusted, and left the schedule together."""


class PipelineProtection(DeepSpeedProtection):
    """An engine whose ``train_batch`` the user's loop calls."""

    _dirty: Verdict | None = None
    _data: Replayed | None = None

    def wrap(self) -> None:
        from deepspeed.runtime.pipe import schedule

        deepspeed = self.deepspeed
        self.engine.position.stage = deepspeed.stage_id
        original, wrapped = self.recompute.non_reentrant
        if deepspeed.module.activation_checkpoint_func is original:
            # DeepSpeed tells the two functions apart by identity.
            self.patches.replace(deepspeed.module, "activation_checkpoint_func", wrapped)
        for name, wrapper in (
            ("train_batch", self._train_batch),
            ("_exec_schedule", self._exec_schedule),
        ):
            method = getattr(deepspeed, name)
            self.patches.replace(deepspeed, name, functools.wraps(method)(wrapper(method)))
        # The map belongs to the class, and so to every engine: this one gets its own.
        own = dict(deepspeed._INSTRUCTION_MAP)
        for instruction, phase in (
            (schedule.ForwardPass, "forward"),
            (schedule.BackwardPass, "backward"),
            (schedule.ReduceTiedGrads, "accumulate"),
            (schedule.ReduceGrads, "accumulate"),
        ):
            own[instruction] = self._instruction(own[instruction], phase)
        own[schedule.OptimizerStep] = self._optimizer_step(own[schedule.OptimizerStep])
        self.patches.replace(deepspeed, "_INSTRUCTION_MAP", own)

    def _train_batch(self, original: Any) -> Any:
        def train_batch(*args: Any, **kwargs: Any) -> Any:
            if not self.enabled:
                return original(*args, **kwargs)
            with self.guarded():
                self.begin_iteration()
                self.enter()
                with self.engine.at(phase="accumulate"):
                    result = original(*args, **kwargs)
                    self.late("averages")
                self.end_iteration()
                return result

        return train_batch

    def _exec_schedule(self, original: Any) -> Any:
        def _exec_schedule(schedule: Any) -> None:
            deepspeed, engine = self.deepspeed, self.engine
            if not engine.is_active:
                return original(schedule)
            source = deepspeed.data_iterator
            self._data = None if source is None else Replayed(source, self._keep_from_loader)
            deepspeed.data_iterator = self._data
            try:
                while True:
                    self._counts = {"forward": 0, "backward": 0}
                    deepspeed.total_loss = deepspeed.total_additional_losses = None
                    try:
                        original(schedule)
                    except Discarded:
                        assert self._dirty is not None
                        self.rollback(self._dirty, "gradients")
                        continue
                    # The averages of the losses come after the last verdict.
                    engine.repairs_all = engine.repairs
                    return None
            finally:
                deepspeed.data_iterator = source

        return _exec_schedule

    def restore(self, verdict: Verdict) -> None:
        super().restore(verdict)
        if self._data is not None:
            self._data.rewind()

    def _keep_from_loader(self, batch: Any) -> None:
        """The loader may write a batch's memory again, by means that no operator is seen of."""
        with self.engine.paused():
            self.engine.deferred.before_write(tensors_of(batch))

    def _instruction(self, method: Any, phase: str) -> Any:
        def instruction(deepspeed: Any, *args: Any, **kwargs: Any) -> Any:
            run = MethodType(method, deepspeed)
            if not self.engine.is_active:
                return run(*args, **kwargs)
            number = None
            layer = "embedding" if phase == "forward" else "head"
            if phase in self._counts:
                self._counts[phase] += 1
                number = self._counts[phase]
            if not number:
                with self.engine.at(phase=phase, microbatch=None, layer=None):
                    return run(*args, **kwargs)
            if phase == "forward":
                self.recompute.begin_microbatch()
            with self.engine.at(phase=phase, microbatch=number, layer=layer), self.deferring(phase):
                return run(*args, **kwargs)

        return instruction

    def _optimizer_step(self, method: Any) -> Any:
        def instruction(deepspeed: Any, *args: Any, **kwargs: Any) -> Any:
            if self.engine.is_active:
                verdict = self.engine.verdict()
                if self.takes_back(verdict, "gradients"):
                    self._dirty = verdict
                    raise Discarded
                return self.apply(lambda: method(deepspeed, *args, **kwargs))
            return method(deepspeed, *args, **kwargs)

        return instruction
