"""Releases of Transformer Engine's Python package for tests, each in a directory of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASES = ("2.8.0", "2.16.0", "2.20.2")
NEWEST = RELEASES[-1]


@functools.cache
def release(version: str) -> Path:
    """The directory with that release, fetched by pip when it is asked for the first time.

    The package is pure Python; nothing that it would need to run on a GPU is installed.
    """
    cache = os.environ.get("SPARETRAIN_TEST_CACHE") or os.path.expanduser("~/.cache/sparetrain")
    directory = Path(cache) / f"transformer-engine-{version}"
    if not (directory / "transformer_engine" / "pytorch").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        command += ["--target", str(directory), f"transformer-engine=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"transformer-engine {version} can't be had: {done.stderr[-200:]}")
    return directory
