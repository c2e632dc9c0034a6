"""DeepSpeed's own Adam for offloaded states: a C++ kernel that no dispatcher sees.

``DeepSpeedCPUAdam.step`` calls it once a parameter, and it writes the parameter and both moments in
place. That call is made an operator here, so that it is counted and can be given faults; that it is
executed twice, and put back where the two differ, is the checked step's business, see
``dmr/optimizer_step.py``. The kernel keeps powers of the betas, which a repetition of the same step
leaves as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dmr.engine import Engine
from ..dmr.operators import Kind, Operator
from ..patching import Patches

_UPDATE = Operator(
    "adam_update",
    Kind.MUTATING,
    written=((0, "params"), (2, "exp_avg"), (3, "exp_avg_sq")),
    fresh=False,
)


def protect(engine: Engine, patches: Patches, optimizer: torch.optim.Optimizer) -> bool:
    """Has the kernel's calls go through the engine.

    Returns:
        Whether the optimizer is one that has this kernel.
    """
    kernels = getattr(optimizer, "ds_opt_adam", None)
    if type(optimizer).__name__ != "DeepSpeedCPUAdam" or not hasattr(kernels, "adam_update"):
        return False
    patches.replace(optimizer, "ds_opt_adam", _Kernels(engine, kernels))
    return True


class _Kernels:
    """Stands in for the extension module."""

    def __init__(self, engine: Engine, kernels: Any) -> None:
        self._engine = engine
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def adam_update(self, *args: Any) -> Any:
        settings, tensors = args[:-4], args[-4:]
        if not self._engine.sees:
            return self._kernels.adam_update(*args)

        def update(*written: torch.Tensor) -> tuple[()]:
            self._kernels.adam_update(*settings, *written)
            return ()

        return self._engine.foreign(_UPDATE, update, tensors, (), lambda results: ())
