"""Counters of a run, and the file `summary.json` they end in.

`docs/files.md` documents every field.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

SCHEMA = 1
"""Version of the file's schema; raised whenever a field changes its meaning."""

FILE_NAME = "summary.json"

# Ranks work side by side, so what every rank counts alike, or measures on the same clock, is not
# added up over ranks.
_LARGEST = {
    "iterations",
    "rollbacks",
    "seconds_in_checks",
    "seconds_in_windows",
    "seconds_total",
    "peak_bytes_held",
}


@dataclass
class Statistics:
    """What one rank (or, merged, all ranks) did; the engine increments plain numbers."""

    iterations: int = 0
    """Iterations whose result was kept."""

    checks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Operators executed twice and compared: method, then class of operator, then count."""

    run_once: dict[str, int] = field(default_factory=dict)
    """Operators that compute nothing (views, allocations, …) and run once: class to count."""

    unprotected: dict[str, int] = field(default_factory=dict)
    """Operators that compute and were not checked: name to count."""

    reductions_checked: int = 0
    """Reductions between ranks that were done a second time and compared."""

    reductions_not_doubled: int = 0
    """Reductions between ranks that were done once."""

    communications_checked: int = 0
    """Values moved between ranks whose fingerprints were compared."""

    mismatches: int = 0
    """Comparisons that failed."""

    rollbacks: int = 0
    """Iterations that were discarded and repeated (all ranks repeat together)."""

    seconds_in_checks: float = 0.0
    """Time in checks on the critical path, outside windows, in seconds."""

    seconds_in_windows: float = 0.0
    """Time in checks inside windows of communication, in seconds."""

    seconds_total: float = 0.0
    """Time of all iterations, in seconds."""

    peak_bytes_held: int = 0
    """Largest memory that checks held at one time on one device, in bytes."""

    injected: int = 0
    """Faults that were injected."""

    second_device_checks: int = 0
    """Operators that a peer device repeated."""

    def count_check(self, method: str, kind: str, number: int = 1) -> None:
        """Counts `number` checked operators of class `kind` by `method`."""
        by_class = self.checks.setdefault(method, {})
        by_class[kind] = by_class.get(kind, 0) + number

    @property
    def operators_checked(self) -> int:
        """Operators executed twice and compared, over all methods and classes."""
        return sum(sum(by_class.values()) for by_class in self.checks.values())

    @property
    def share_in_checks(self) -> float:
        """Share of the iterations' time that checks took outside windows, 0 to 1."""
        return self.seconds_in_checks / self.seconds_total if self.seconds_total else 0.0

    @classmethod
    def merge(cls, parts: Iterable[Statistics]) -> Statistics:
        """One for all ranks: counts are added; iterations, rollbacks, seconds and the peak of
        memory are the largest of any rank."""
        merged = cls()
        for part in parts:
            for method, by_class in part.checks.items():
                merged.checks.setdefault(method, {})
                for kind, number in by_class.items():
                    merged.count_check(method, kind, number)
            for entry in fields(cls):
                name, new = entry.name, getattr(part, entry.name)
                old = getattr(merged, name)
                if name in _LARGEST:
                    setattr(merged, name, max(old, new))
                elif name in ("run_once", "unprotected"):
                    setattr(merged, name, dict(Counter(old) + Counter(new)))
                elif name != "checks":
                    setattr(merged, name, old + new)
        return merged

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for gathering over ranks."""
        return {**asdict(self), "operators_checked": self.operators_checked}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Statistics:
        """The inverse of `to_dict`; unknown keys are ignored."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def write_summary(
    directory: str | os.PathLike[str],
    statistics: Statistics,
    config: BaseModel,
    world_size: int,
) -> Path:
    """Writes `summary.json` in one step: a reader sees the old file or the new one, never a half.

    Args:
        directory: Made when it doesn't exist.
        statistics: Merged over all ranks.
        config: The run's configuration; written as it is.
        world_size: Number of ranks.

    Returns:
        The file's path.
    """
    path = Path(directory) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "schema": SCHEMA,
        "world_size": world_size,
        "config": config.model_dump(mode="json"),
        **statistics.to_dict(),
    }
    temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(summary, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def read_summary(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The content of `summary.json`, or None when the run has not written one.

    Raises:
        ValueError: Not JSON, or a schema that this version cannot read.
    """
    path = Path(directory) / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        summary = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(summary, dict) or summary.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not of schema {SCHEMA}, which this version reads")
    return summary
