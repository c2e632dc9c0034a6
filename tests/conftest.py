"""Rules and fixtures for the whole test suite."""

import atexit
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from tests import harness

if "TORCH_EXTENSIONS_DIR" not in os.environ:
    # Megatron compiles a helper for selective recompute; a lock that a killed process has left in
    # the user's own cache would make every later one wait for ever.
    _extensions = tempfile.TemporaryDirectory(prefix="torch-extensions-")
    atexit.register(_extensions.cleanup)
    os.environ["TORCH_EXTENSIONS_DIR"] = _extensions.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def megatron():
    """``harness.run_case``, where Megatron is installed."""
    # Not by importing it: the tests' own process stays free of Megatron and of the stand-in device.
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    return harness.run_case


@pytest.fixture(scope="session")
def english(megatron, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of the quickstart's English data set."""
    prefix = tmp_path_factory.mktemp("data") / "english"
    script = harness.ROOT / "examples" / "quickstart" / "english_text.py"
    harness.succeeded(megatron([str(prefix)], world_size=1, script=script))
    return prefix
