"""What an iteration changes before its verdict, and how it is put back."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from ..module_values import ModuleValues

_COUNTERS = (
    "micro_steps",
    "_unmanaged_backward_count",
    "_is_gradient_accumulation_boundary",
    "_force_grad_boundary",
    "_running_engine_step",
    "_manual_backward_expected",
)


class Snapshot:
    """The state at the start of an iteration.

    Random generators, module buffers, what modules keep beside them, and the engine's counters. Not
    needed: parameters, optimizer state, learning rate and global counters, which change only after
    the last verdict.

    Args:
        engine: The DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._tracker = _copied(checkpointing.get_cuda_rng_tracker().get_states())
        self._counters = {n: getattr(engine, n) for n in _COUNTERS if hasattr(engine, n)}
        self._micro_offset = getattr(engine.module, "micro_offset", None)
        self._values = ModuleValues([engine.module])
        self._buffers = [(b, b.detach().clone()) for b in engine.module.buffers()]

    def restore(self) -> None:
        """Puts everything back. All communication of the attempt must have ended."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        # The tracker adopts the dictionary it is given and changes it later: give it a copy.
        checkpointing.get_cuda_rng_tracker().set_states(_copied(self._tracker))
        self._values.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for name, value in self._counters.items():
            setattr(self._engine, name, value)
        if self._micro_offset is not None:
            self._engine.module.micro_offset = self._micro_offset


def _copied(states: dict[str, Any]) -> dict[str, Any]:
    return {name: state.clone() for name, state in states.items()}
