"""Hugging Face's Trainer: the block in DeepSpeed's JSON and one import are all that it takes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.report.events import read_events
from tests.deepspeed_server import ROOT

MISSING = [
    name
    for name in ("deepspeed", "transformers", "accelerate")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.acceptance,
]

FAULTS = [
    # In the first of two microbatches: its loss has been added to the log's by the verdict.
    "iteration=2,rank=0,microbatch=1,phase=forward,operator=mm,nth=3,element=5,bit=29",
    "iteration=3,rank=1,microbatch=2,phase=backward,operator=mm,nth=3,element=5,bit=29",
]


def run(directory: Path, stage: int, block: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Trains; what each rank left."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if block is not None:
        config["sparetrain"] = {"enabled": True, "dir": str(directory / "sparetrain"), **block}
    directory.mkdir()
    path = directory / "ds.json"
    path.write_text(json.dumps(config))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m tests.trainer_case"
    result = subprocess.run(
        [sys.executable, *launcher.split(), str(path), str(directory)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mode", ["piggyback", "full"])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_and_logged_losses(tmp_path: Path, stage: int, mode: str) -> None:
    expected = run(tmp_path / "plain", stage, None)
    extra = {"profile_iters": 1} if mode == "full" else {}
    found = run(tmp_path / "protected", stage, {"mode": mode, "inject": FAULTS, **extra})
    assert found == expected
    events = list(read_events(tmp_path / "protected" / "sparetrain"))
    seen = {(e["rank"], e["iteration"]) for e in events if e["kind"] == "mismatch"}
    assert seen == {(0, 2), (1, 3)}
    assert [e for e in events if e["kind"] == "warning"] == []
