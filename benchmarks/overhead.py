"""What protection costs when nothing is hidden: naive and piggyback against unprotected training.

Real Megatron in one process on a machine at rest; the variants alternate step by step, so that a
drift of the machine's speed touches all of them alike.

    python benchmarks/overhead.py --hidden 512 --rounds 7 --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_process

VARIANTS = (
    "unprotected",
    "unprotected, deterministic",
    "interception alone",
    "fingerprints alone",
    "piggyback",
    "naive",
    "piggyback, deterministic",
    "naive, deterministic",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7, help="counted steps of each variant")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times = measure(options)
    base = statistics.median(times["unprotected"])
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread",
        "settings": {k: v for k, v in vars(options).items() if k != "json"},
        "step_s": base,
        "variants": {},
    }
    print(f"\nunprotected step: {base:.3f} s (median of {options.rounds})")
    print(f"{'variant':30} {'ratio':>7} {'lowest':>8} {'highest':>8}")
    for name in VARIANTS:
        ratios = [a / b for a, b in zip(times[name], times["unprotected"])]
        row = {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        result["variants"][name] = row
        print(f"{name:30} {row['ratio']:7.3f} {row['lowest']:8.3f} {row['highest']:8.3f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Trains, one variant a step in turn; seconds of each step by variant, first round left out."""
    one_process.prepare()
    import torch
    from megatron.training import training

    from sparetrain_megatron import megatron
    from sparetrain_megatron.config import SparetrainConfig

    folder = tempfile.mkdtemp()
    protection = megatron.attach(SparetrainConfig(enabled=True, dir=folder))
    protected = training.train_step
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    done = 0

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        name = VARIANTS[done % len(VARIANTS)]
        with variant(protection, name):
            start = time.perf_counter()
            result = protected(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        if done >= len(VARIANTS):
            times[name].append(seconds)
        done += 1
        return result

    training.train_step = train_step
    one_process.alone(port=29577)
    one_process.train(arguments(options))
    return times


@contextlib.contextmanager
def variant(protection: Any, name: str) -> Iterator[None]:
    """Sets everything up for one step of a variant."""
    import torch

    from sparetrain_megatron.dmr import naive

    engine = protection.engine
    saved = naive.pure, naive.mutating, naive.scalar, naive.check_pure
    protection.enabled = not name.startswith("unprotected")
    engine.piggyback = name.startswith(("piggyback", "fingerprints"))
    alone = name in ("interception alone", "fingerprints alone")
    if alone:
        naive.pure = naive.mutating = naive.scalar = _once
        naive.check_pure = lambda *args: None
    steps = protection._hooks.steps if protection._hooks else []
    for step in steps:
        step.once = alone
    if name.endswith("deterministic"):
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        naive.pure, naive.mutating, naive.scalar, naive.check_pure = saved
        protection.enabled, engine.piggyback = True, True
        for step in steps:
            step.once = False


def _once(engine: Any, operator: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    return func(*args, **kwargs)


def arguments(options: argparse.Namespace) -> list[str]:
    hidden = options.hidden
    inner = hidden * 8 // 3 // 64 * 64
    text = f"""
        --num-layers {options.layers} --hidden-size {hidden} --ffn-hidden-size {inner}
        --num-attention-heads {hidden // 64} --group-query-attention
        --num-query-groups {max(1, hidden // 256)}
        --seq-length {options.sequence} --max-position-embeddings {options.sequence}
        --global-batch-size {options.microbatches} --vocab-size {options.vocabulary - 1}
        --train-iters {len(VARIANTS) * (options.rounds + 1)} --log-interval 1000
    """
    return text.split()


if __name__ == "__main__":
    main()
