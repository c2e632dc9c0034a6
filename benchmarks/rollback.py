"""What a rollback costs: real Megatron, real faults, iterations that are discarded and repeated.

Trains a small Llama-style model on two pipeline stages of this machine under protection, injects a
fault into some of the iterations, and compares how long those took with the others. What they take
longer is all of a rollback: finding out which of two values was wrong, agreeing, restoring, and the
schedule's second run; what follows the verdict on gradients runs once.

    python benchmarks/rollback.py [--mode piggyback] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparetrain_megatron.report.events import read_events

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5
"""Iterations that are not counted: the first ones compile, allocate and profile."""

FAULTS = (
    "rank=1,phase=backward,operator=mm,bit=13",
    "rank=0,phase=forward,operator=mm,bit=12",
    "rank=1,phase=recompute,operator=mul,bit=14",
    "rank=0,phase=backward,operator=mul,bit=11",
    "rank=1,phase=clip,bit=30",
)
EVERY = 4
"""Iterations from one fault to the next."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="piggyback", help="of protection")
    parser.add_argument("--rounds", type=int, default=2, help="times each fault is injected")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def specs(rounds: int) -> list[str]:
    """Fault specs, one every few iterations."""
    faults = FAULTS * rounds
    return [f"iteration={WARM_UP + EVERY * (i + 1)},{fault}" for i, fault in enumerate(faults)]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the training and returns its events.

    Raises:
        SystemExit: It failed.
    """
    faults = specs(options.rounds)
    last = WARM_UP + EVERY * (len(faults) + 1)
    flags = f"""
        --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size {options.hidden}
        --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
        --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --bf16
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --micro-batch-size 1 --global-batch-size 8 --train-iters {last} --lr 1e-4
        --mock-data --tokenizer-type NullTokenizer --vocab-size 511 --num-workers 0
        --log-interval 1 --eval-iters 0 --eval-interval 1000
        --sparetrain --sparetrain-cpu --sparetrain-mode {options.mode}
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "sparetrain_megatron"),
            str(ROOT / "examples/quickstart/pretrain_gpt.py"),
            *flags.split(),
            *("--sparetrain-dir", folder),
            *(word for spec in faults for word in ("--sparetrain-inject", spec)),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        )
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            sys.exit(f"rollback.py: training failed:\n{done.stderr[-4000:]}")
        return list(read_events(folder))


def durations(events: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of each iteration, from rank 0's counters at each interval of the log."""
    found: dict[int, float] = {}
    before = 0.0
    for event in events:
        if event["kind"] == "iteration" and event["rank"] == 0:
            found[event["iteration"]] = event["seconds_total"] - before
            before = event["seconds_total"]
    return found


def summary(events: Sequence[Mapping[str, Any]], rounds: int) -> dict[str, Any]:
    """What rollbacks cost.

    Args:
        events: Of the run.
        rounds: As given to `specs`.

    Raises:
        ValueError: Not every fault, or not only they, led to one rollback.
    """
    seconds = durations(events)
    faulty = [WARM_UP + EVERY * (i + 1) for i in range(len(FAULTS) * rounds)]
    repeated = [e["iteration"] for e in events if e["kind"] == "rollback" and e["rank"] == 0]
    if repeated != faulty:
        raise ValueError(f"iterations {repeated} were repeated, not {faulty}")
    clean = [s for i, s in seconds.items() if i > WARM_UP and i not in faulty]
    step = statistics.median(clean)
    costs = [seconds[iteration] - step for iteration in faulty]
    return {
        "clean_step_s": step,
        "clean_quartiles_s": statistics.quantiles(clean, n=4)[::2],
        "rollbacks": len(costs),
        "rollback_s": statistics.median(costs),
        "rollback_steps": statistics.median(costs) / step,
        "rollback_steps_most": max(costs) / step,
        "each": [{"fault": f, "rollback_s": s} for f, s in zip(specs(rounds), costs)],
    }


def main() -> None:
    options = parse()
    try:
        found = summary(measure(options), options.rounds)
    except ValueError as error:
        sys.exit(f"rollback.py: {error}")
    print(
        f"protected step {found['clean_step_s'] * 1e3:.0f} ms, a rollback "
        f"{found['rollback_s'] * 1e3:.0f} ms: {found['rollback_steps']:.2f} steps "
        f"(at most {found['rollback_steps_most']:.2f})"
    )
    if options.json:
        result = {
            "schema": 1,
            "kind": "rollback",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per rank",
            "load_average": os.getloadavg()[1],
            "settings": {"mode": options.mode, "hidden": options.hidden},
            **found,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
