"""An engine whose forward, backward and step the user's loop calls."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..config import SparetrainConfig
from ..dmr.engine import Verdict
from ..errors import EXIT_EXHAUSTED, UsageError
from ..replay import private
from .base import DeepSpeedProtection
from .block import spell
from .following import Follower
from .recording import LossTape, Microbatch, NotReplayable, tensors_of


def _standing_for(original: Any, method: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class EngineProtection(DeepSpeedProtection):
    """An engine whose forward, backward and step the user's loop calls."""

    def __init__(self, engine: Any, config: SparetrainConfig) -> None:
        super().__init__(engine, config)
        self._microbatches: list[Microbatch] = []
        self._following = contextlib.ExitStack()
        self._follower = Follower()
        self._losses = contextlib.ExitStack()

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
        self._losses.close()
        super().leave()

    def end_iteration(self) -> None:
        super().end_iteration()
        self._microbatches.clear()
        self._follower = Follower()

    # --- what the loop calls -------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        deepspeed = self.deepspeed
        if not (self.enabled and deepspeed.module.training and torch.is_grad_enabled()):
            return self._original["forward"](*args, **kwargs)
        with self.guarded():
            self._losses.close()
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
            microbatch.inputs = tensors_of((args, kwargs))
            self._following.enter_context(microbatch.tape)
            return outputs

    def _run_forward(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        position = self.engine.position
        # The loss is computed at the same place.
        position.phase, position.microbatch, position.layer = "forward", number, "embedding"
        self.recompute.begin_microbatch()
        self.engine.begin_rest(0, number, "forward")  # until the backward begins
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
        self.engine.close_tape()
        with self.engine.at(phase="backward", layer="head"), self.deferring("backward"):
            result = backward(loss)
        self._keep_from_loop(microbatch)
        scalars = [t for t in map(_there, microbatch.originals) if t is not None and not t.dim()]
        self._follower.follow([loss, *scalars])
        self._losses.close()
        self._losses.enter_context(self._follower)
        return result

    def _follow_to(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        microbatch.original_loss = weakref.ref(loss)
        tape, microbatch.tape = microbatch.tape, None
        assert tape is not None
        self._follower.lost |= bool(tape.spoilt)
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
            self._losses.close()
            self._stop_following("no backward follows a forward")
            managed = deepspeed.managed_gradient_accumulation()
            if managed and not deepspeed.is_gradient_accumulation_boundary():
                self._microbatches[-1].steps.append((args, kwargs))
                result = original(*args, **kwargs)
                self.leave()
                self._losses.enter_context(self._follower)
                return result
            while True:
                verdict = self.engine.verdict()
                if not self.takes_back(verdict, "gradients"):
                    break
                self._refuse_if_not_replayable(verdict)
                self.rollback(verdict, "gradients")
                self._replay(verdict)
                with self.engine.paused():
                    if not self._follower.set_right():
                        self.warn(
                            "the loop has used a loss before it was verified in a way that can't "
                            "be set right: what it logs of iteration "
                            f"{self.engine.position.iteration} may be wrong"
                        )
            result = self.apply(functools.partial(original, *args, **kwargs))
            self.end_iteration()
            return result

    def _keep_from_loop(self, microbatch: Microbatch) -> None:
        """What the loop holds it may write, unseen, from now on: a batch's memory above all."""
        outputs = map(_there, (*microbatch.originals, microbatch.original_loss))
        held = [*microbatch.inputs, *(t for t in outputs if t is not None)]
        microbatch.inputs = []
        with self.engine.paused():
            self.engine.deferred.before_write(held)

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
                self.engine.close_tape()
                with self.engine.at(phase="backward", layer="head"), self.deferring("backward"):
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
            tensor = _there(reference)
            if tensor is not None and tensor.shape == value.shape:
                tensor.data.copy_(value.data)


def _there(reference: Any) -> torch.Tensor | None:
    """What a weak reference, if it is one, still refers to."""
    return None if reference is None else reference()
