"""A protected run with faults on other releases of Megatron-Core.

`MEGATRON_CORE_DIRS` names folders of unpacked wheels, separated by colons:

    pip install --no-deps --target wheels/0.17 megatron-core==0.17.1
    pip install --no-deps --target wheels/0.18 megatron-core==0.18.2
    MEGATRON_CORE_DIRS=wheels/0.17:wheels/0.18 pytest -m acceptance tests/multi/test_versions.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIRECTORIES = [d for d in os.environ.get("MEGATRON_CORE_DIRS", "").split(os.pathsep) if d]
FLAGS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 1e-3 --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 257 --log-interval 1
    --eval-iters 0 --eval-interval 1000 --pipeline-model-parallel-size 2 --bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --sparetrain --sparetrain-cpu
""".split()
FAULTS = (
    "iteration=2,rank=0,phase=forward,operator=mm,bit=14",
    "iteration=3,rank=1,microbatch=2,phase=backward,operator=mm,bit=13",
    "iteration=4,rank=0,phase=clip",
)


@pytest.mark.acceptance
@pytest.mark.skipif(not DIRECTORIES, reason="MEGATRON_CORE_DIRS is not set")
@pytest.mark.parametrize("directory", DIRECTORIES)
def test_recovers_on_another_release(directory: str, english: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "sparetrain_megatron"]
    command += [str(ROOT / "examples/quickstart/pretrain_gpt.py"), "--data-path", english, *FLAGS]
    command += ["--sparetrain-dir", str(tmp_path)]
    for fault in FAULTS:
        command += ["--sparetrain-inject", fault]
    path = os.pathsep.join([str(Path(directory).resolve()), str(ROOT)])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["injected"] == summary["mismatches"] == summary["rollbacks"] == len(FAULTS)
    assert not summary["unprotected"]
