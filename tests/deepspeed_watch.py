"""Watches, in one rank, that deferred checks touch nothing of DeepSpeed's."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from sparetrain_megatron.dmr.tape import _refs

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "reduce",
    "broadcast",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
)


class Watch:
    """Installs itself on one protected engine.

    Attributes:
        problems: What should not have happened.
        counts: How often something was looked at.
    """

    def __init__(self, engine: Any) -> None:
        self.problems: list[str] = []
        self.counts = {"replays": 0, "hooks": 0, "released": 0, "discards": 0, "steps": 0}
        self._replaying = False
        protection = engine.sparetrain
        self._deferred = protection.engine.deferred
        self._engine = engine
        self._around_replays()
        for module in engine.module.modules():
            module.register_forward_pre_hook(lambda *_: self._hook("forward"))
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: self._hook("gradient"))
        for name in _COLLECTIVES:
            original = getattr(dist, name)
            setattr(dist, name, functools.wraps(original)(self._not_in_replay(original, name)))
        self._after_discards(protection.gradients)
        for optimizer in protection.gradients.inner():
            original = optimizer.step
            optimizer.step = functools.wraps(original)(self._drained(original))

    def _around_replays(self) -> None:
        unit, push = self._deferred.unit, self._deferred.push

        def pushed(tape: Any) -> None:
            self._check(tape)
            push(tape)

        self._deferred.push = pushed

        def watched() -> bool:
            before = self._state()
            self._replaying = True
            try:
                return unit()
            finally:
                self._replaying = False
                self.counts["replays"] += 1
                for (name, old), (_, new) in zip(before, self._state()):
                    if old != new:
                        self.problems.append(f"a replay changed {name}: {old} -> {new}")

        self._deferred.unit = watched

    def _state(self) -> list[tuple[str, Any]]:
        """Where parameters and gradients are, and whether they are gathered."""
        found = []
        for name, parameter in self._engine.module.named_parameters():
            status = getattr(parameter, "ds_status", None)
            self.counts["released"] += str(status).endswith("NOT_AVAILABLE")
            gradient = None if parameter.grad is None else parameter.grad.data_ptr()
            found.append((name, (status, parameter.data.data_ptr(), gradient)))
        return found

    def _check(self, tape: Any) -> None:
        """A replay calls operators alone, and writes nothing but what it has produced itself."""
        for entry in tape.entries:
            if getattr(entry.func, "namespace", "") not in ("aten", "prims"):
                self.problems.append(f"a tape has {entry.func}")
            for position, _ in entry.operator.written:
                for ref in _refs(entry.args[position] if position < len(entry.args) else None):
                    if tape.held[ref.slot] is not None:
                        self.problems.append(f"{entry.operator.name} writes what is held")

    def _hook(self, name: str) -> None:
        self.counts["hooks"] += 1
        if self._replaying:
            self.problems.append(f"a replay fired a {name} hook")

    def _not_in_replay(self, original: Any, name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._replaying:
                self.problems.append(f"a replay issued {name}")
            return original(*args, **kwargs)

        return collective

    def _after_discards(self, gradients: Any) -> None:
        discard = gradients.discard

        def watched() -> None:
            discard()
            self.counts["discards"] += 1
            zero = self._engine.optimizer
            for key, bucket in getattr(zero, "ipg_buckets", {}).items():
                if bucket.params or bucket.elements:
                    self.problems.append(f"bucket {key} is not empty after a rollback")
            for name in ("averaged_gradients", "all_grad_tensors"):
                kept = getattr(zero, name, None) or {}
                if any(value is not None for value in kept.values()):
                    self.problems.append(f"{name} has values after a rollback")
            for name, parameter in self._engine.module.named_parameters():
                gradient = parameter.grad
                if gradient is not None and bool(gradient.any()):
                    self.problems.append(f"{name} has a gradient after a rollback")

        gradients.discard = watched

    def _drained(self, step: Any) -> Any:
        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            self.counts["steps"] += 1
            if self._deferred or self._deferred.held_bytes:
                self.problems.append("checks are pending when the optimizer steps")
            return step(*args, **kwargs)

        return optimizer_step


def account(deferred: Any) -> list[int]:
    """A list of one number: the most bytes that have been held at one time."""
    most, index = [0], deferred._index

    def watched(tape: Any) -> None:
        index(tape)
        most[0] = max(most[0], deferred.held_bytes)

    deferred._index = watched
    return most
