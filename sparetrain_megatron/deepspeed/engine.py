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
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..config import SparetrainConfig
from ..dmr.engine import UnprotectedOperator, Verdict
from ..dmr.operators import vouch
from ..dmr.optimizer_step import CheckedStep
from ..errors import EXIT_ABORTED, EXIT_EXHAUSTED, UsageError
from ..protection import Protection
from .block import spell
from .checkpointing import Recompute
from .recording import LossTape, Microbatch, NotReplayable, private, tensors_of
from .refusals import check_checkpointing
from .regions import Regions
from .state import Snapshot
from .zero import gradients_of

_QUESTIONS = ("mkldnn::_is_mkldnn_bf16_supported", "mkldnn::_is_mkldnn_fp16_supported")
"""Operators that DeepSpeed asks about the machine: without tensors, and so without side effects."""


def _standing_for(original: Any, method: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


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
        self._started = 0.0

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
        self._regions = Regions(engine, deepspeed.module)
        parameter = next(deepspeed.module.parameters(), None)
        engine.device = deepspeed.device if parameter is None else parameter.device
        if dist.get_world_size() > 1:
            engine.second_device.group = dist.group.WORLD
        self.refuse_faults_outside(dist.get_world_size())
        self.wrap()
        self.open_reports(self.config.directory())
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

    # --- an iteration --------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        self._started = time.perf_counter()
        check_checkpointing()
        self.engine.begin(self.deepspeed.global_steps + 1, 1)
        self._snapshot = Snapshot(self.deepspeed)

    def end_iteration(self) -> None:
        self.leave()
        self._snapshot = None
        self.statistics.iterations += 1
        self.statistics.seconds_total += time.perf_counter() - self._started
        every = self.deepspeed.steps_per_print()
        if every and self.engine.position.iteration % every == 0:
            self.report_interval(speaks=dist.get_rank() == dist.get_world_size() - 1)

    def restore(self, verdict: Verdict) -> None:
        assert self._snapshot is not None
        self.gradients.discard()
        self._snapshot.restore()

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
                self._verify_parameters()
        finally:
            engine.repairs_all = False
        return result

    def _verify_parameters(self) -> None:
        engine = self.engine
        for repairs in range(self.config.max_rollbacks + 1):
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
            verdict = engine.verdict()
            if not self.takes_back(verdict, "parameters"):
                return
            if repairs == self.config.max_rollbacks:
                self.stop(EXIT_EXHAUSTED, verdict, "parameters")
            self.emit_verdict(verdict, "parameters", "rollback")
            iteration, attempt = engine.position.iteration, engine.position.attempt
            self.event("rollback", iteration=iteration, attempt=attempt, scope="parameters")
            engine.discard()
            engine.begin(iteration, attempt + 1)
            engine.repairs_all = engine.repairs
            with engine.at(phase="optimizer", layer=None):
                self.gradients.write_parameters()


class EngineProtection(DeepSpeedProtection):
    """An engine whose forward, backward and step the user's loop calls."""

    def __init__(self, engine: Any, config: SparetrainConfig) -> None:
        super().__init__(engine, config)
        self._microbatches: list[Microbatch] = []
        self._following = contextlib.ExitStack()

    def wrap(self) -> None:
        deepspeed = self.deepspeed
        self._original = {
            name: getattr(deepspeed, name) for name in ("forward", "backward", "step")
        }
        for name, wrapper in (
            ("forward", self._forward),
            ("backward", self._backward),
            ("step", self._step),
        ):
            original = self._original[name]
            self.patches.replace(deepspeed, name, _standing_for(original, wrapper))

    def leave(self) -> None:
        self._following.close()
        super().leave()

    # --- what the loop calls -------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        deepspeed = self.deepspeed
        if not (self.enabled and deepspeed.module.training and torch.is_grad_enabled()):
            return self._original["forward"](*args, **kwargs)
        with self.guarded():
            self._stop_following("a forward is followed by another one before its backward")
            if not self._microbatches:
                self.begin_iteration()
            with self.engine.paused():
                microbatch = Microbatch(private(args), private(kwargs))
            self._microbatches.append(microbatch)
            self.enter()
            outputs = self._run_forward(len(self._microbatches), args, kwargs)
            microbatch.tape = LossTape(outputs, functools.partial(self._direct, microbatch))
            microbatch.originals = microbatch.tape.originals
            self._following.enter_context(microbatch.tape)
            return outputs

    def _run_forward(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        position = self.engine.position
        # The loss is computed at the same place.
        position.phase, position.microbatch, position.layer = "forward", number, "embedding"
        outputs = self._original["forward"](*args, **kwargs)
        position.layer = "head"
        return outputs

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        original = self._original["backward"]
        if not self._microbatches:
            return original(loss, *args, **kwargs)
        with self.guarded():
            self._following.close()
            return self._run_backward(loss, lambda value: original(value, *args, **kwargs))

    def _direct(self, microbatch: Microbatch, func: Any, tensor: Any, *args: Any, **kw: Any) -> Any:
        """``tensor.backward()`` without the engine's; called by the tape, which is to end."""
        if microbatch.tape is not None:
            microbatch.tape.off = True
        return self._run_backward(tensor, lambda value: func(value, *args, **kw))

    def _run_backward(self, loss: torch.Tensor, backward: Callable[[Any], Any]) -> Any:
        microbatch = self._microbatches[-1]
        if microbatch.backward is None:
            self._follow_to(microbatch, loss)
            microbatch.backward = backward
            microbatch.boundary = self.deepspeed._is_gradient_accumulation_boundary
        elif not microbatch.obstacle:
            microbatch.obstacle = "more than one backward follows a forward"
        with self.engine.at(phase="backward", layer="head"):
            return backward(loss)

    def _follow_to(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        microbatch.original_loss = weakref.ref(loss)
        tape, microbatch.tape = microbatch.tape, None
        assert tape is not None
        if self.loss is not None:
            return
        try:
            microbatch.loss = tape.seal(loss)
        except NotReplayable as error:
            microbatch.obstacle = str(error)
            message = (
                f"an iteration can't be repeated: {error}; give loss=… to "
                "sparetrain_megatron.deepspeed.initialize or attach, "
            )
            if self.config.strict and self.config.on_mismatch == "rollback":
                raise UsageError(f"{message}or set {spell('on_mismatch')} to abort") from None
            if self.statistics.iterations == 0:
                self.warn(f"{message}or a mismatch ends the run")

    def _stop_following(self, obstacle: str) -> None:
        self._following.close()
        last = self._microbatches[-1] if self._microbatches else None
        if last is not None and last.tape is not None:
            last.tape = None
            last.obstacle = obstacle

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        deepspeed, original = self.deepspeed, self._original["step"]
        if not self._microbatches:
            return original(*args, **kwargs)
        with self.guarded():
            self._stop_following("no backward follows a forward")
            managed = deepspeed.managed_gradient_accumulation()
            if managed and not deepspeed.is_gradient_accumulation_boundary():
                self._microbatches[-1].steps.append((args, kwargs))
                result = original(*args, **kwargs)
                self.leave()
                return result
            while True:
                verdict = self.engine.verdict()
                if not self.takes_back(verdict, "gradients"):
                    break
                self._refuse_if_not_replayable(verdict)
                self.rollback(verdict, "gradients")
                self._replay(verdict)
            result = self.apply(functools.partial(original, *args, **kwargs))
            self._microbatches.clear()
            self.end_iteration()
            return result

    # --- repeating it --------------------------------------------------------------------------

    def _refuse_if_not_replayable(self, verdict: Verdict) -> None:
        obstacles = [m.obstacle for m in self._microbatches if m.obstacle]
        if obstacles:
            why = f"the iteration can't be repeated: {obstacles[0]}"
            self.stop(EXIT_EXHAUSTED, verdict, "gradients", why)

    def _replay(self, verdict: Verdict) -> None:
        """Does all microbatches of the iteration again."""
        for number, microbatch in enumerate(self._microbatches, start=1):
            with self.engine.paused():
                args, kwargs = private(microbatch.args), private(microbatch.kwargs)
            outputs = self._run_forward(number, args, kwargs)
            new = tensors_of(outputs)
            if microbatch.backward is not None:
                try:
                    if microbatch.loss is not None:
                        loss = microbatch.loss(outputs)
                    else:
                        assert self.loss is not None
                        loss = self.loss(outputs, *args, **kwargs)
                except NotReplayable as error:
                    self.stop(EXIT_EXHAUSTED, verdict, "gradients", str(error))
                if microbatch.boundary is not None:
                    self.deepspeed.set_gradient_accumulation_boundary(microbatch.boundary)
                with self.engine.at(phase="backward", layer="head"):
                    microbatch.backward(loss)
                new.append(loss)
            with self.engine.paused(), torch.no_grad():
                self._correct([*microbatch.originals, microbatch.original_loss], new)
            for args, kwargs in microbatch.steps:
                self._original["step"](*args, **kwargs)

    @staticmethod
    def _correct(originals: list[Any], new: list[torch.Tensor]) -> None:
        """What the loop still holds of the discarded attempt, its loss above all, is set right."""
        for reference, value in zip(originals, new):
            tensor = reference() if reference is not None else None
            if tensor is not None and tensor.shape == value.shape:
                tensor.data.copy_(value.data)
