"""The ways to protect a DeepSpeed engine, and what a user's loop may do meanwhile."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.errors import EXIT_USAGE
from tests.deepspeed_matrix import CASES, protected, unprotected
from tests.deepspeed_server import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

FAULT = "iteration=2,rank=1,phase=forward,operator=addmm,nth=2,element=5,bit=14"


def assert_recovers(case: dict[str, Any], directory: Path, **block: Any) -> Any:
    found = protected(case, directory, inject=[FAULT], **block)
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert found.summary["rollbacks"] == 1
    assert found.summary["unprotected"] == {}
    return found


def test_initialize_with_a_loss_that_cannot_be_followed(tmp_path: Path) -> None:
    case = {"stage": 1, "hidden": True, "accumulation": 2, "how": "initialize"}
    found = protected(case, tmp_path / "without")
    assert found.exit_codes == [EXIT_USAGE, EXIT_USAGE], found.told()
    assert "give loss=" in found.told()
    assert_recovers({**case, "closure": True}, tmp_path / "with")


@pytest.mark.acceptance
def test_attach_with_a_loss(tmp_path: Path) -> None:
    case = {"stage": 2, "hidden": True, "closure": True, "accumulation": 2, "how": "attach"}
    assert_recovers(case, tmp_path)


def test_attach_and_close(tmp_path: Path) -> None:
    """An engine whose configuration has no block; closed in the middle, training goes on."""
    case = {"stage": 1, "how": "attach", "iterations": 4}
    found = assert_recovers({**case, "closed_after": 3}, tmp_path)
    assert found.summary["iterations"] == 3


@pytest.mark.parametrize("mode", [pytest.param("piggyback", marks=pytest.mark.acceptance), "full"])
def test_loop_reuses_the_memory_of_its_batches(tmp_path: Path, mode: str) -> None:
    case = {"stage": 1, "accumulation": 3, "static": True}
    if mode == "full":
        case["force"] = {"rest": True}
    assert_recovers(case, tmp_path, mode=mode)


def test_losses_added_up_before_the_verdict_are_set_right(tmp_path: Path) -> None:
    case = {**CASES["loss_outside_direct"], "accumulation": 3}
    found = assert_recovers(case, tmp_path)
    assert found.of_kind("warning") == []


def test_initialize_without_a_block() -> None:
    found = run({"how": "initialize", "demands": True})
    assert found.exit_codes == [EXIT_USAGE, EXIT_USAGE], found.told()
    assert 'the DeepSpeed configuration has no "sparetrain" block' in found.told()


_GUARDED = (
    "from deepspeed.runtime.config import DeepSpeedConfig; import deepspeed.comm;"
    "print(DeepSpeedConfig({'train_batch_size': 1, %s"
    " 'zero_optimization': {'stage': 2, 'sparetrain': True}}).zero_config.stage)"
)


def test_guard_refuses_a_process_without_the_plugin() -> None:
    """DeepSpeed itself refuses the key, as long as nobody takes it out."""
    message = _python(_GUARDED % "'sparetrain': {'enabled': True},")
    assert "sparetrain" in message and "Extra inputs are not permitted" in message


def test_guard_with_the_plugin() -> None:
    attached = "import sparetrain_megatron.deepspeed;" + _GUARDED
    assert _python(attached % "'sparetrain': {'enabled': True},", fails=False).split()[-1] == "2"
    assert 'there is no "sparetrain" block' in _python(attached % "")


def _python(code: str, fails: bool = True, **variables: str) -> str:
    """Runs code in a process of its own; returns what it said."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **variables}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert bool(result.returncode) == fails, result.stdout + result.stderr
    return result.stdout + result.stderr
