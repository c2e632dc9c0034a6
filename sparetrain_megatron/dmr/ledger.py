"""Collects what comparisons found until a verdict asks.

On a CPU a comparison's result is known at once. On a CUDA device it is a flag on the device: the
host does not wait for it before the verdict, which reads all flags in one go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .mismatch import Mismatch


class Ledger:
    """Mismatches found since the last verdict.

    Args:
        on_record: Called with every mismatch when it becomes known.
    """

    def __init__(self, on_record: Callable[[Mismatch], None]) -> None:
        self.mismatches: list[Mismatch] = []
        self._on_record = on_record
        self._flags: list[torch.Tensor] = []
        self._reports: list[Callable[[], Mismatch]] = []

    def check(self, equal: bool | torch.Tensor, report: Callable[[], Mismatch]) -> bool:
        """Takes one comparison's result.

        Args:
            equal: A bool, or a 0-dim bool tensor on a device.
            report: Makes the mismatch; called only if there is one, perhaps much later.

        Returns:
            False if the comparison is already known to have failed.
        """
        if equal is True:
            return True
        if equal is False:
            self.record(report())
            return False
        assert isinstance(equal, torch.Tensor)
        self._flags.append(equal)
        self._reports.append(report)
        return True

    def record(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)
        self._on_record(mismatch)

    def settle(self) -> None:
        """Reads the flags that are still on a device."""
        if self._flags:
            flags, reports = self._flags, self._reports
            self._flags, self._reports = [], []
            for equal, report in zip(torch.stack(flags).tolist(), reports):
                if not equal:
                    self.record(report())

    def collect(self) -> list[Mismatch]:
        """Settles, returns everything found and empties itself."""
        self.settle()
        found, self.mismatches = self.mismatches, []
        return found
