"""Runs that share a folder: a finished one is set aside before the next writes its files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .summary import FILE_NAME

PATTERNS = ("events.rank*.jsonl", "profile.rank*.json", "plan.json", FILE_NAME)
"""A run's files; the summary comes last: without it a run counts as not finished."""


def earlier(directory: str | os.PathLike[str]) -> list[Path]:
    """Folders of the runs that were set aside in a folder, the oldest first."""
    numbers = []
    for path in Path(directory).glob("run-*"):
        match = re.fullmatch(r"run-([0-9]+)", path.name)
        if match and path.is_dir():
            numbers.append((int(match[1]), path))
    return [path for _, path in sorted(numbers)]


def finished(directory: str | os.PathLike[str]) -> Path | None:
    """Where the finished run of a folder has to go; None: there is none in it.

    A run that was killed has left no summary: the next one, which resumes it, adds to its files.
    """
    if not (Path(directory) / FILE_NAME).is_file():
        return None
    before = earlier(directory)
    number = int(before[-1].name.removeprefix("run-")) + 1 if before else 1
    return Path(directory) / f"run-{number}"


def set_aside(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], keep: Path | None = None
) -> None:
    """Moves a run's files into a folder of their own.

    Of several processes that do it at one time, each file is moved by one.

    Args:
        directory: Where they are.
        target: Made when it doesn't exist.
        keep: A file that the next run reads: it is left where it is.
    """
    kept = keep.resolve() if keep is not None else None
    Path(target).mkdir(parents=True, exist_ok=True)
    for pattern in PATTERNS:
        for path in sorted(Path(directory).glob(pattern)):
            if path.resolve() != kept:
                try:
                    os.replace(path, Path(target) / path.name)
                except FileNotFoundError:
                    continue  # another process was faster
