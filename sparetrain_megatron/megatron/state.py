"""What an iteration changes before its verdict, and how it is put back."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch

from ..dmr.engine import Engine
from ..module_values import ModuleValues
from ..patching import Patches
from ..replay import Replayed, private
from .transformer_engine import Fp8State


def replayed(data_iterator: Any) -> Any:
    """The iterator, or the list of them (one a virtual stage), made repeatable; None stays None."""
    if isinstance(data_iterator, list):
        return [replayed(d) for d in data_iterator]
    return None if data_iterator is None else Replayed(data_iterator)


def rewind(data_iterator: Any) -> None:
    for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
        if iterator is not None:
            iterator.rewind()


class Snapshot:
    """The state at the start of an iteration, as far as an iteration changes it before its verdict.

    Random generators, module buffers, scales and amax histories of FP8 and the data are put back;
    gradients are zeroed; caches that may hold a value computed by the discarded attempt are
    emptied, those of modules and those of functions. Not needed: parameters, optimizer state,
    learning rate and consumed samples, which change only after the last verdict.

    Args:
        model: Model chunks of this rank.
        data_iterator: What :func:`replayed` returned.
    """

    def __init__(self, model: Sequence[torch.nn.Module], data_iterator: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        self._model = model
        self._data = data_iterator
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._tracker = _copied_states(get_cuda_rng_tracker().get_states())
        self._values = ModuleValues(model)
        self._buffers = [
            (buffer, buffer.detach().clone())
            for chunk in model
            # Megatron's DDP wrapper has an attribute of that name.
            for buffer in torch.nn.Module.buffers(chunk)
            if buffer is not None
        ]
        self._fp8 = Fp8State(model)
        self._metrics = {k: _entry(v) for k, v in _expert_metrics().items()}
        self._lengths = {k: private(v) for k, v in _length_counters().items()}

    def _set_length_counters(self) -> None:
        from megatron.training import training

        for name, value in self._lengths.items():
            setattr(training, name, private(value))

    def restore(self, optimizer: Any) -> None:
        """Puts everything back. All communication of the attempt must have ended.

        Args:
            optimizer: Its gradients are zeroed as at the start of a step.
        """
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        # The tracker adopts the dictionary it is given and changes it later: give it a copy.
        get_cuda_rng_tracker().set_states(_copied_states(self._tracker))
        self._values.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
            self._fp8.restore()
        metrics = _expert_metrics()
        metrics.clear()
        metrics.update((k, _entry(v)) for k, v in self._metrics.items())
        self._set_length_counters()
        for chunk in self._model:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        rewind(self._data)
        clear_caches()


def _expert_metrics() -> dict[str, Any]:
    """Sums of auxiliary losses for the log, which the forward adds to; empty without experts."""
    try:  # from 0.18 on
        from megatron.core.transformer.moe import moe_logging

        return moe_logging.get_moe_metrics_tracker()._metrics
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        return moe_utils.get_moe_layer_wise_logging_tracker()


def _entry(entry: Any) -> Any:
    """A metric with tensors of its own; process groups in it stay the same ones."""
    if isinstance(entry, dict):
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entry.items()}
    copied = copy.copy(entry)
    for name, value in vars(copied).items():
        if isinstance(value, torch.Tensor):
            setattr(copied, name, value.clone())
    return copied


def _length_counters() -> dict[str, Any]:
    """Counters of packed sequences' lengths, which reading the data adds to (0.19)."""
    from megatron.training import training

    names = ("_seqlen_stats_in_iteration", "_seqlen_stats_active")
    return {name: getattr(training, name) for name in names if hasattr(training, name)}


def _copied_states(states: dict[str, Any]) -> dict[str, Any]:
    return {
        name: state.clone() if isinstance(state, torch.Tensor) else copy.copy(state)
        for name, state in states.items()
    }


def clear_caches() -> None:
    """Empties functools caches of Megatron: one may keep what a faulty operator computed.

    RotaryEmbedding.forward is such a cache: a wrong value in it would be used, but never computed
    again, so never compared, in every later iteration.
    """
    for function in _caches():
        function.cache_clear()


@functools.cache
def _caches() -> list[Any]:
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # the collector does not tell of objects that it has been told to leave alone
    found = [
        thing
        for thing in gc.get_objects()
        # Not isinstance, which would follow a weak proxy to an object that is gone.
        if issubclass(type(thing), functools._lru_cache_wrapper)
        and str(getattr(thing, "__module__", "")).startswith(("megatron.", "transformer_engine."))
    ]
    if frozen:
        gc.freeze()
    return found


class Validation:
    """Megatron's checks for NaN and spikes, while the values they look at have not been verified.

    A wrong value may be a NaN. The check would end the process in the middle of a schedule, and the
    peers would hang; so its error is kept until the verdict, and dropped with the attempt if that
    is discarded (core/rerun_state_machine.py, ``RerunStateMachine.validate_result``).
    """

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core.rerun_state_machine import RerunStateMachine

        self._error: Exception | None = None
        original = RerunStateMachine.validate_result

        @functools.wraps(original)
        def validate_result(machine: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(machine, *args, **kwargs)
            except RuntimeError as error:
                if not engine.is_active:
                    raise
                self._error = self._error or error

        patches.replace(RerunStateMachine, "validate_result", validate_result)

    def confirm(self) -> None:
        """The values stand: raises what a check has found in them."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """The attempt is discarded, and what Megatron's checks think of it with it."""
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        self._error = None
        machine = get_rerun_state_machine()
        if hasattr(machine, "validation_counts"):
            machine.validation_counts = defaultdict(int)
            machine.rerun_requested = False


@contextlib.contextmanager
def schedule_allowed() -> Iterator[None]:
    """Lets the schedule run again from within the optimizer's step.

    Megatron's rerun state machine takes loss validation outside of its own loop for a mistake
    (core/rerun_state_machine.py, ``validate_result``).
    """
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    machine = get_rerun_state_machine()
    before = machine.state
    machine.state = RerunState.INITIAL_RUN
    try:
        yield
    finally:
        machine.state = before
