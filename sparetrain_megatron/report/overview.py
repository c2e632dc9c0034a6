"""What the files of a run say, put together: the content of `sparetrain report`."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparetrain_megatron.report import runs
from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.summary import Statistics, read_summary
from sparetrain_megatron.report.terminal import (
    make_table,
    pairs_table,
    render,
    statistics_facts,
    statistics_tables,
)

SCHEMA = 1
"""Version of `to_dict`'s schema."""

_PLACE = ("rank", "host", "device", "layer", "phase", "operator", "method")

LISTED = 4
"""Iterations that a table names; of more it says how many."""


@dataclass
class Overview:
    """Events and summary of one run, counted."""

    directory: Path
    summary: dict[str, Any] | None = None
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    """Every `mismatch` event."""
    rollbacks: list[dict[str, int]] = field(default_factory=list)
    """`iteration`, `attempt` (the discarded one), `times`; all ranks repeat together, so their
    events of one rollback count as one."""
    warnings: list[str] = field(default_factory=list)
    """Texts of `warning` events, each once."""
    earlier: list[str] = field(default_factory=list)
    """Folders of finished runs that were set aside in this one."""

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Overview:
        """Reads the files of a run.

        Raises:
            ValueError: There is nothing of a run in `directory`, or in an unknown schema.
            OSError: A file cannot be read.
        """
        overview = cls(Path(directory))
        if not overview.directory.is_dir():
            raise ValueError(f"{directory}: no such folder")
        overview.summary = read_summary(directory)
        rollbacks: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        warnings: dict[str, None] = {}
        seen = False
        for event in read_events(directory):
            seen = True
            if event["kind"] == "mismatch":
                overview.mismatches.append(event)
            elif event["kind"] == "rollback":
                place = (event.get("iteration", 0), event.get("attempt", 1))
                rollbacks[place][event["rank"]] += 1
            elif event["kind"] == "warning":
                warnings[str(event.get("message", ""))] = None
        overview.earlier = [path.name for path in runs.earlier(directory)]
        if not seen and overview.summary is None:
            raise ValueError(
                f"{directory}: neither summary.json nor events.rank*.jsonl; "
                "give the --sparetrain-dir of a run"
            )
        overview.rollbacks = [
            {"iteration": iteration, "attempt": attempt, "times": max(by_rank.values())}
            for (iteration, attempt), by_rank in sorted(rollbacks.items())
        ]
        overview.warnings = list(warnings)
        return overview

    def suspects(self) -> list[dict[str, Any]]:
        """Mismatches counted by rank, host, device, layer, phase, operator and method, most first.

        Each has `wrong` too: how often which execution was found to be wrong; and `iterations`,
        ascending.
        """
        counts: Counter[tuple[Any, ...]] = Counter()
        wrong: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        iterations: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        for event in self.mismatches:
            place = tuple(event.get(key) for key in _PLACE)
            counts[place] += 1
            wrong[place][str(event.get("wrong") or "unknown")] += 1
            if isinstance(event.get("iteration"), int):
                iterations[place].add(event["iteration"])
        return [
            {
                **dict(zip(_PLACE, place, strict=True)),
                "count": count,
                "wrong": dict(wrong[place]),
                "iterations": sorted(iterations[place]),
            }
            for place, count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `sparetrain report --json`."""
        return {
            "schema": SCHEMA,
            "directory": str(self.directory),
            "summary": self.summary,
            "suspects": self.suspects(),
            "mismatches": self.mismatches,
            "rollbacks": self.rollbacks,
            "warnings": self.warnings,
            "earlier": self.earlier,
        }

    def render(self, *, color: bool = False, width: int) -> str:
        """Tables for the terminal."""
        tables = []
        if self.summary is None:
            title = f"{self.directory}: no summary.json, the run has not ended regularly"
            tables.append(pairs_table(title, [("mismatches", f"{len(self.mismatches):,}")]))
        else:
            statistics = Statistics.from_dict(self.summary)
            facts = statistics_facts(statistics, world_size=self.summary["world_size"])
            tables.append(pairs_table(str(self.directory), facts))
            tables += statistics_tables(statistics)
        suspects = [
            [
                *("" if suspect[key] is None else suspect[key] for key in _PLACE),
                suspect["count"],
                _shortened(suspect["iterations"]),
                ", ".join(f"{who} {number}" for who, number in suspect["wrong"].items()),
            ]
            for suspect in self.suspects()
        ]
        if suspects:
            columns = (">rank", *_PLACE[1:], ">count", "iterations", "wrong")
            tables.append(make_table("mismatches", columns, suspects))
        if self.rollbacks:
            headings = (">iteration", ">discarded attempt", ">times")
            tables.append(
                make_table("rollbacks", headings, (entry.values() for entry in self.rollbacks))
            )
        if self.warnings:
            tables.append(make_table("warnings", ("text",), ([text] for text in self.warnings)))
        if self.earlier:
            rows = [[str(self.directory / name)] for name in self.earlier]
            tables.append(make_table("earlier runs in this folder", ("",), rows))
        return render(tables, color=color, width=width)


def _shortened(iterations: list[int]) -> str:
    """`3, 7`, or `3, 7, 9, 12 and 5 more`."""
    text = ", ".join(map(str, iterations[:LISTED]))
    more = len(iterations) - LISTED
    return f"{text} and {more:,} more" if more > 0 else text
