"""The event log of one rank: one JSON object a line, `events.rank{rank}.jsonl`.

`docs/files.md` documents every field.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

SCHEMA = 1
"""Version of the lines' schema; raised whenever a field changes its meaning."""

Kind = Literal["plan", "mismatch", "verdict", "rollback", "iteration", "warning"]
KINDS: tuple[str, ...] = get_args(Kind)


class EventLog:
    """Appends events of one rank to its file.

    The file (and its folder) is made on the first event, so that a large job without events
    leaves no empty files. A resumed run appends to the file of the run before. Every event is
    one write to the operating system, so it survives the process ending without clean-up.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        self.path = Path(directory) / f"events.rank{rank}.jsonl"
        self.rank = rank
        self._descriptor: int | None = None

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Appends one event.

        Args:
            kind: One of `KINDS`.
            **fields: Plain values (others are written as strings). They cannot replace
                `schema`, `kind`, `time` and `rank`, except `rank` by an equal value.

        Raises:
            ValueError: An unknown kind, or a reserved field.
            OSError: The file cannot be written.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind of event {kind!r}; known: {', '.join(KINDS)}")
        if fields.pop("rank", self.rank) != self.rank or {"schema", "time"} & fields.keys():
            raise ValueError("schema, time and rank are set by the log itself")
        event = {"schema": SCHEMA, "kind": kind, "time": time.time(), "rank": self.rank, **fields}
        line = json.dumps(event, default=str, ensure_ascii=False) + "\n"
        self._write(line.encode("utf-8", errors="replace"))

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            if not _ends_with_newline(self.path):
                # The run before was killed in the middle of a line; keep ours readable.
                data = b"\n" + data
            self._descriptor = os.open(self.path, flags, 0o644)
        while data:
            data = data[os.write(self._descriptor, data) :]


def read_events(directory: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the events of all ranks, rank by rank, each rank's in order.

    A line that was cut off by a killed process is skipped.

    Raises:
        ValueError: A line has a schema that this version cannot read.
    """
    paths = Path(directory).glob("events.rank*.jsonl")
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if not isinstance(event, dict):
                    continue
                if event.get("schema") != SCHEMA:
                    raise ValueError(
                        f"{path}: schema {event.get('schema')!r}, but this version reads {SCHEMA}"
                    )
                yield event


def _ends_with_newline(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:  # no file yet, or an empty one
        return True
