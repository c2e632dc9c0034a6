"""Real Megatron in a benchmark's own process: what those benchmarks set up alike."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FLAGS = """
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --micro-batch-size 1 --lr 1e-4 --lr-decay-style constant
    --tokenizer-type NullTokenizer --mock-data
    --eval-iters 0 --eval-interval 100000 --transformer-impl local
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-rope-fusion
""".split()
"""A Llama-style model, fully recomputed, without kernels that a CPU doesn't have."""


def prepare() -> None:
    """Makes this package importable, and the CPU stand in where there is no GPU."""
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        from sparetrain_megatron import hostdevice

        hostdevice.install()
        hostdevice.prepare_megatron()


def alone(port: int) -> None:
    """Makes this process a job of one rank.

    Args:
        port: Of its store.
    """
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )


def train(flags: Sequence[str]) -> None:
    """Runs the quickstart's script to its end, in this process."""
    sys.argv = ["pretrain_gpt.py", *FLAGS, *flags]
    runpy.run_path(str(ROOT / "examples/quickstart/pretrain_gpt.py"), run_name="__main__")
