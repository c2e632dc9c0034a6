"""What the core needs of the fault injector, the counters and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .operators import Operator
from .position import Position


class Injecting(Protocol):
    """What the engine needs of a fault injector (:class:`sparetrain_megatron.faults.Injector`)."""

    armed: bool
    records: list[dict[str, Any]]

    def begin(self, iteration: int, attempt: int) -> None: ...
    def visit(
        self, position: Position, operator: str, execution: str, tensors: Sequence[torch.Tensor]
    ) -> bool: ...
    def visit_scalar(
        self, position: Position, operator: str, execution: str, value: Any
    ) -> Any: ...


class Counting(Protocol):
    """What the engine counts in (:class:`sparetrain_megatron.report.summary.Statistics`)."""

    run_once: dict[str, int]
    unprotected: dict[str, int]
    reductions_checked: int
    reductions_not_doubled: int
    communications_checked: int
    mismatches: int
    rollbacks: int
    seconds_in_checks: float
    seconds_in_windows: float
    peak_bytes_held: int
    injected: int
    second_device_checks: int

    def count_check(self, method: str, kind: str, number: int = 1) -> None: ...


class Observing(Protocol):
    """What the engine needs of a profiler (:class:`sparetrain_megatron.profiler.Recorder`)."""

    def watch(
        self, handler: Callable[..., Any], operator: Operator, func: Any, args: tuple, kwargs: dict
    ) -> Any: ...
    def allocated(self, tensors: Sequence[torch.Tensor]) -> None: ...
    def stepped(self, seconds: float, check: float) -> None: ...
    def window_opens(self, kind: str, name: str) -> None: ...
    def window_closes(self) -> None: ...
