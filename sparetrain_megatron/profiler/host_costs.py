"""What recording and fingerprinting cost on this host, measured.

A tiny operator and a view of its result, as in a transformer block, run plainly, recorded and
fingerprinted, on an engine of their own. On a GPU host times are what matters here, too: kernels
are launched and not waited for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..dmr.engine import Engine
from ..dmr.fingerprint import fingerprint
from ..dmr.piggyback import FirstPass
from ..plan.profile import Costs

OPERATORS, ROUNDS = 100, 5
BYTES = 4 << 20
COLD = 2.0
"""Host time between large kernels ÷ that in a loop, where all caches are warm; compare
benchmarks/host_time.py."""

BOUND = 0.15
"""Cost of an operator of a bound block ÷ that of recording it; benchmarks/host_time.py."""


def measure(device: torch.device, binds: bool) -> Costs:
    """Measures; takes some tens of milliseconds.

    Args:
        device: The rank's.
        binds: Whether blocks will be bound.
    """
    engine = Engine(_Counters(), _Unarmed(), strict=False)  # type: ignore[arg-type]
    small = torch.ones(64, device=device)

    def work() -> None:
        for _ in range(OPERATORS):
            torch.add(small, small).view(-1)

    def recorded() -> None:
        with engine.active():
            engine.open_tape()
            work()
            engine.close_tape()
        engine.deferred.abandon()

    def observed() -> None:
        with engine.active(), engine.within(FirstPass("", ())):
            work()

    with torch.no_grad():
        plain = _shortest(work, device)
        record = COLD * max(0.0, _shortest(recorded, device) - plain) / OPERATORS
        observe = COLD * max(0.0, _shortest(observed, device) - plain) / OPERATORS
        large = torch.ones(BYTES // 4, device=device)
        once = _shortest(lambda: fingerprint(small), device)
        whole = _shortest(lambda: fingerprint(large), device)
    return Costs(
        record=record,
        observe=observe,
        fingerprint=max(0.0, whole - once) / BYTES,
        bound=BOUND * record if binds else None,
    )


def _shortest(work: Callable[[], Any], device: torch.device) -> float:
    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    work()
    return min(timed() for _ in range(ROUNDS))


class _Unarmed:
    armed = False

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []


class _Counters(SimpleNamespace):
    """Counts that nobody reads."""

    def __init__(self) -> None:
        super().__init__(seconds_in_checks=0.0, peak_bytes_held=0, unprotected=defaultdict(int))
