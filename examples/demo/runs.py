"""One training run of the demo: start it, follow it, read what it left behind."""

import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.summary import read_summary

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "quickstart" / "pretrain_gpt.py"
ITERATIONS = 40

# A Llama-style model in two pipeline stages, small enough for two CPU cores.
MODEL = """
    --num-layers 4 --hidden-size 192 --ffn-hidden-size 512
    --num-attention-heads 6 --group-query-attention --num-query-groups 2
    --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --seq-length 128 --max-position-embeddings 128
"""
TRAINING = f"""
    --bf16 --pipeline-model-parallel-size 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --micro-batch-size 4 --global-batch-size 16 --train-iters {ITERATIONS} --seed 1234
    --lr 2e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.1
    --log-interval 1 --eval-iters 0 --eval-interval 1000
    --save-interval 1000 --ckpt-format torch
"""
DATA = "--split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0"
_ITERATION = re.compile(
    r"iteration +(\d+)/ *\d+ .*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)"
)


@dataclass
class Run:
    """A finished run.

    Attributes:
        folder: Where its checkpoint, events and logs are.
        losses: The loss of each iteration as Megatron printed it, iteration to text.
        milliseconds: Duration of each iteration, as Megatron printed it.
        events: The protection's events, of all ranks.
        summary: The protection's summary, or None for an unprotected run.
        seconds: Duration of the whole run.
    """

    folder: Path
    losses: dict[int, str] = field(default_factory=dict)
    milliseconds: dict[int, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def mismatches(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == "mismatch"]

    def typical_milliseconds(self) -> float:
        """Median duration of an iteration, the first few left out."""
        return median(ms for iteration, ms in self.milliseconds.items() if iteration > 3)


class RunFailed(Exception):
    """Training stopped with an error; the message has the end of its log."""


def build_data(folder: Path) -> Path:
    """Builds the English data set; returns the path that ``--data-path`` takes.

    Raises:
        RunFailed: It could not be built.
    """
    prefix = folder / "english"
    command = [sys.executable, ROOT / "examples" / "quickstart" / "english_text.py", prefix]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(f"building the data set failed:\n{done.stderr}")
    return prefix


def train(
    folder: Path, data: Path, flags: list[str], progress: Callable[[int], None] = lambda _: None
) -> Run:
    """Trains on two ranks of this machine and waits for the end.

    Args:
        folder: Made for the run's files.
        data: What ``build_data`` returned.
        flags: Further flags: the protection's.
        progress: Called with the number of the last finished iteration.

    Raises:
        RunFailed: Training did not come to its end.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--redirects", "3", "--log-dir", str(logs)),
        *("-m", "sparetrain_megatron", str(SCRIPT)),
        *MODEL.split(),
        *TRAINING.split(),
        *("--data-path", str(data), *DATA.split()),
        *("--save", str(folder / "checkpoint"), "--sparetrain-cpu"),
        *flags,
    ]
    run = Run(folder)
    start = time.monotonic()
    with (folder / "torchrun.log").open("w") as log:
        process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                progress(max(_read_log(logs), default=0))
        finally:
            if process.poll() is None:  # interrupted: torchrun ends its ranks on SIGTERM
                process.terminate()
                process.wait()
    run.seconds = time.monotonic() - start
    if process.returncode != 0:
        raise RunFailed(_last_words(folder, process.returncode))

    for iteration, (ms, loss) in _read_log(logs).items():
        run.losses[iteration], run.milliseconds[iteration] = loss, ms
    protection = folder / "checkpoint" / "sparetrain"
    run.events = list(read_events(protection))
    run.summary = read_summary(protection)
    return run


@dataclass
class Difference:
    """How two runs' final states differ, element by element and bit by bit.

    Attributes:
        weights: Number of weights compared.
        weights_differ: How many of them differ in any bit.
        others_differ: Whether anything else in the optimizer's state differs: moments, FP32
            main parameters, step counts.
        largest: Largest absolute difference between two weights.
    """

    weights: int = 0
    weights_differ: int = 0
    others_differ: bool = False
    largest: float = 0.0

    @property
    def equal(self) -> bool:
        return self.weights > 0 and not self.weights_differ and not self.others_differ


def compare_states(one: Run, other: Run) -> Difference:
    """Compares the last checkpoints of two runs, all ranks, model and optimizer."""
    result = Difference()
    files = sorted(path.relative_to(one.folder) for path in one.folder.glob("**/*_rng.pt"))
    for file in files:
        states = [_load(run.folder / file) for run in (one, other)]
        for a, b in zip(*(_tensors(state["model"]) for state in states), strict=True):
            differs = _bytes(a) != _bytes(b)
            result.weights += a.numel()
            result.weights_differ += int(differs.any(dim=-1).sum())
            if a.is_floating_point():
                gap = (a.double() - b.double()).abs().max().item()
                result.largest = max(result.largest, gap)
        pairs = zip(*(_tensors(state["optimizer"]) for state in states), strict=True)
        result.others_differ |= any(not torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)
    return result


def _load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint that a run has just written; it holds objects of Megatron's classes."""
    with warnings.catch_warnings():
        # Megatron is imported for them, and mentions each library that is not installed.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return torch.load(path, weights_only=False)
        finally:
            logging.disable(logging.NOTSET)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors and numbers in nested dictionaries and lists, in their order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (bool, int, float)):
        yield torch.tensor(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n, element size] bytes of a tensor of n elements; equal bytes, equal value, NaN too."""
    flat = tensor.detach().contiguous().view(-1, 1)
    return flat.view(torch.uint8)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # The demo is the same everywhere: a GPU is left alone.
        "CUDA_VISIBLE_DEVICES": "",
    }


def _read_log(logs: Path) -> dict[int, tuple[float, str]]:
    """Iteration to (milliseconds, loss). Megatron prints them on the last rank."""
    text = "".join(
        path.read_text(errors="replace") for path in logs.glob("*/attempt_0/1/stdout.log")
    )
    return {int(i): (float(ms), loss) for i, ms, loss in _ITERATION.findall(text)}


def _last_words(folder: Path, code: int) -> str:
    parts = [f"training stopped with exit code {code}; its logs are in {folder}"]
    for path in [*sorted(folder.glob("logs/*/attempt_0/*/stderr.log")), folder / "torchrun.log"]:
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            parts += [f"--- end of {path.relative_to(folder)}", *lines[-12:]]
    return "\n".join(parts)
