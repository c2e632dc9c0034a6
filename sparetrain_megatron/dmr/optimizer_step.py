"""The optimizer's step, executed twice a chunk at a time, and undone where the two differ.

A chunk is a set of parameters whose state fits a given size. Its old state is copied, the checker
steps it, the old state is put back, the primary steps it; fingerprints of every operator and of the
final state are compared. If they differ the chunk alone is put back and stepped twice again, until
the two agree, so a fault here never costs an iteration, and no copy of the whole optimizer state is
ever needed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .engine import UnprotectedOperator
from .fingerprint import fingerprint
from .mismatch import Mismatch
from .piggyback import FirstPass, SecondPass

if TYPE_CHECKING:
    from .engine import Engine

Digest: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _Saved:
    """A parameter and its optimizer state as they were; a missing entry did not exist yet."""

    parameter: torch.Tensor
    value: torch.Tensor
    state: dict[str, Any] | None


class CheckedStep:
    """Stands in for an optimizer's ``step``.

    Args:
        engine: This rank's engine.
        optimizer: A torch optimizer whose step treats every parameter by itself (Adam, SGD, …).
        step: Its original ``step``.
        chunk: Bytes of old state to keep at one time; one parameter is the least.
        attempts: How often a chunk may be stepped again before it is given up.
        on_redo: Called with the mismatches of each execution that was thrown away.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        chunk: int,
        attempts: int,
        on_redo: Callable[[list[Mismatch]], None],
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._step = step
        self._chunk = chunk
        self._attempts = attempts
        self._on_redo = on_redo
        self.exhausted = False
        self._error: Exception | None = None
        self.once = False
        """Set to True, steps are executed once; for measurements."""

    def __call__(self, closure: Any = None) -> None:
        """Steps all parameters.

        Raises:
            ValueError: A closure was given; it would have to be run twice as well.
        """
        if closure is not None:
            raise ValueError("an optimizer step with a closure can't be checked")
        if self.once or not self._engine.is_active:
            self._step()
            return
        groups = self._optimizer.param_groups
        everything = [group["params"] for group in groups]
        before = [_settings(group) for group in groups]
        after: list[dict[str, Any] | None] = [None] * len(groups)
        # Two executions and their copies are one step to a profiler.
        observer, self._engine.observer = self._engine.observer, None
        own = check = 0.0
        try:
            for chunk in self._chunks(everything):
                for group, parameters in zip(groups, chunk):
                    group["params"] = parameters
                times = self._one(chunk, before)
                own, check = own + times[0], check + times[1]
                for i, parameters in enumerate(chunk):
                    if parameters or after[i] is None:
                        after[i] = _settings(groups[i])
        finally:
            for group, parameters, settings in zip(groups, everything, after):
                group["params"] = parameters
                if settings is not None:
                    group.update(settings)
            self._engine.observer = observer
        if observer is not None:
            observer.stepped(own, check)

    def _chunks(self, everything: list[list[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
        chunks: list[list[list[torch.Tensor]]] = []
        room = 0
        for i, parameters in enumerate(everything):
            for parameter in parameters:
                state = self._optimizer.state.get(parameter, {})
                tensors = [parameter, *(t for t in state.values() if isinstance(t, torch.Tensor))]
                size = sum(t.numel() * t.element_size() for t in tensors)
                if not chunks or size > room:
                    chunks.append([[] for _ in everything])
                    room = self._chunk
                chunks[-1][i].append(parameter)
                room -= size
        return chunks or [everything]

    def _one(
        self, chunk: list[list[torch.Tensor]], settings: list[dict[str, Any]]
    ) -> tuple[float, float]:
        """Steps one chunk until two executions agree; leaves the last one's result in place.

        Returns:
            Seconds of the step itself, and of its check.
        """
        engine = self._engine
        start = time.perf_counter()
        parameters = [p for group in chunk for p in group]
        with engine.paused(), torch.no_grad():
            saved = [self._save(p) for p in parameters]
        engine.held(sum(_bytes(s) for s in saved))

        attempt, redone = engine.position.attempt, 0
        history: list[tuple[Digest, Digest, list[Mismatch]]] = []
        while True:
            first = FirstPass("optimizer", (), execution="checker", method="naive")
            checker = self._run(first, parameters, settings)
            self._undo(saved, settings)
            between = time.perf_counter()
            second = SecondPass(first, execution="primary", method="naive")
            primary = self._run(second, parameters, settings)
            own = time.perf_counter() - between
            found = self._found(checker == primary)
            if checker == primary or not engine.repairs:
                break
            # Both are run again: a fault that always hits one must not outvote the other.
            history.append((checker, primary, found))
            redone += 1
            if redone > self._attempts:
                self.exhausted = True
                break
            self._on_redo(found)
            engine.position.attempt = attempt + redone
            engine.injector.begin(engine.position.iteration, attempt + redone)
            self._undo(saved, settings)
        engine.position.attempt = attempt
        if self._error is not None and not self.exhausted:
            # Both executions raised it (or nothing may be done): it is the training's own.
            raise self._error
        for old_checker, old_primary, earlier in () if self.exhausted else history:
            for mismatch in earlier:
                if mismatch.wrong == "unknown" and primary in (old_checker, old_primary):
                    mismatch.wrong = "primary" if primary == old_checker else "checker"
        if self.exhausted or not engine.repairs:
            # Left to the verdict: here nothing can be done about them.
            engine.ledger.mismatches.extend(found)
        check = time.perf_counter() - start - own
        engine.statistics.seconds_in_checks += check
        return own, check

    def _found(self, equal: bool) -> list[Mismatch]:
        """What the comparison of two executions found.

        Args:
            equal: Whether they ended in the same state.
        """
        engine = self._engine
        found = engine.ledger.collect()
        if not found and not equal:
            mismatch = engine.reporter("step", "naive")()
            mismatch.note = "the optimizer's state differs after two executions of its step"
            engine.ledger.record(mismatch)
            found = engine.ledger.collect()
        return found

    def _run(
        self,
        running: FirstPass | SecondPass,
        parameters: list[torch.Tensor],
        settings: list[dict[str, Any]],
    ) -> Digest:
        """Executes the step once; returns the fingerprint of all that it may have written.

        An error counts as a result too: a wrong number may be one that an operator refuses.
        """
        for group, values in zip(self._optimizer.param_groups, settings):
            _set(group, values)
        self._error = None
        try:
            with self._engine.within(running):
                self._step()
        except UnprotectedOperator:
            raise
        except Exception as error:
            self._error = error
            return (hash((type(error), str(error))),)
        return self._digest(parameters)

    def _save(self, parameter: torch.Tensor) -> _Saved:
        state = self._optimizer.state.get(parameter)
        return _Saved(
            parameter,
            parameter.detach().clone(),
            None if not state else _copied(state),
        )

    def _undo(self, saved: list[_Saved], settings: list[dict[str, Any]]) -> None:
        with self._engine.paused(), torch.no_grad():
            for entry in saved:
                entry.parameter.detach().copy_(entry.value)
                if entry.state is None:
                    self._optimizer.state.pop(entry.parameter, None)
                    continue
                state = self._optimizer.state[entry.parameter]
                for name in list(state):
                    old = entry.state.get(name)
                    if name not in entry.state:
                        del state[name]
                    elif isinstance(old, torch.Tensor):
                        # The tensor stays the same one: buffers and checkpoints point to it.
                        state[name].copy_(old)
                    else:
                        state[name] = old
            for group, values in zip(self._optimizer.param_groups, settings):
                _set(group, values)

    def _digest(self, parameters: list[torch.Tensor]) -> Digest:
        """Fingerprints of parameters, state and settings; makes the host wait on a device."""
        words: list[Any] = []
        with self._engine.paused():
            for parameter in parameters:
                words.append(fingerprint(parameter.detach()))
                for value in self._optimizer.state.get(parameter, {}).values():
                    words.append(
                        fingerprint(value) if isinstance(value, torch.Tensor) else hash(value)
                    )
            for group in self._optimizer.param_groups:
                words.append(hash(repr(sorted(_settings(group).items()))))
        return tuple(int(word) for word in words)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters; some optimizers count steps there."""
    return _copied({name: value for name, value in group.items() if name != "params"})


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Makes a group's settings what they were; one that a step added is removed."""
    for name in [n for n in group if n != "params" and n not in settings]:
        del group[name]
    group.update(_copied(settings))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _bytes(saved: _Saved) -> int:
    tensors = [saved.value, *(saved.state or {}).values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
