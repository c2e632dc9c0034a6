"""Host time of a checkpointed transformer block: unprotected, recorded, bound.

Kernels of negligible size, so that what is measured is Python and the dispatcher: on a GPU this
time has to hide behind kernels that last a few milliseconds a layer. One process, real Megatron;
the variants alternate step by step; `dispatched` is unprotected with a dispatch mode in Python that
hands every operator on, the least that seeing them can cost. Not counted are replays, which run
elsewhere, and gradient accumulation, which is checked naively in every variant.

    python benchmarks/host_time.py --rounds 30 --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import one_process

VARIANTS = ("unprotected", "dispatched", "piggyback", "recorded", "bound")
LAYERS, MICROBATCHES = 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="counted steps of each variant")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times, operators = measure(options.rounds)
    base = statistics.median(times["unprotected"])
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread",
        "operators_a_block": operators,
        "block_us": {},
        "added_us_an_operator": {},
        "added_share": {},
    }
    print(f"\n{operators} operators a block (forward, recompute and backward)")
    print(f"{'variant':12} {'µs a block':>11} {'added µs an operator':>21} {'added':>8}")
    for name in VARIANTS:
        each = statistics.median(times[name])
        added = (each - base) / operators
        result["block_us"][name] = each * 1e6
        result["added_us_an_operator"][name] = added * 1e6
        result["added_share"][name] = each / base - 1
        print(f"{name:12} {each * 1e6:11.0f} {added * 1e6:21.2f} {each / base - 1:8.1%}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of one block (forward, recompute, backward) by variant; operators of a block."""
    one_process.prepare()
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel.random import CheckpointFunction
    from megatron.training import training
    from torch.utils._python_dispatch import TorchDispatchMode

    from sparetrain_megatron import megatron
    from sparetrain_megatron.config import SparetrainConfig
    from sparetrain_megatron.dmr.strategy import Everything, Immediate

    class HandsOn(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    spent = [0.0]
    make_hook = DistributedDataParallel._make_backward_post_hook

    def untimed(model: Any, parameter: Any) -> Any:
        hook = make_hook(model, parameter)

        def call(*unused: Any) -> Any:
            start = time.perf_counter()
            try:
                return hook(*unused)
            finally:
                spent[0] -= time.perf_counter() - start

        return call

    DistributedDataParallel._make_backward_post_hook = untimed
    protection = megatron.attach(SparetrainConfig(enabled=True, dir=tempfile.mkdtemp()))

    def timed(function: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    tensor_parallel.checkpoint = timed(tensor_parallel.checkpoint)
    CheckpointFunction.backward = staticmethod(timed(CheckpointFunction.backward))
    protected = training.train_step
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    seen = [0]
    done = 0

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        name = VARIANTS[done % len(VARIANTS)]
        engine = protection.engine
        protection.enabled = name not in ("unprotected", "dispatched")
        engine.strategy = Immediate() if name == "piggyback" else Everything(rest=False)
        protection._recompute.binds = name == "bound"
        spent[0] = 0.0
        before = sum(engine.statistics.checks.get("deferred", {}).values())
        with HandsOn() if name == "dispatched" else nullcontext():
            result = protected(*args, **kwargs)
        blocks = LAYERS * MICROBATCHES
        if name == "recorded":
            after = sum(engine.statistics.checks.get("deferred", {}).values())
            seen[0] = (after - before) // blocks
        if done >= 3 * len(VARIANTS):  # the first rounds make templates
            times[name].append(spent[0] / blocks)
        done += 1
        return result

    training.train_step = train_step
    one_process.alone(port=29579)
    one_process.train(arguments(rounds))
    # Forward and recompute run the same operators; the recorded ones are recompute and backward.
    return times, seen[0]


def arguments(rounds: int) -> list[str]:
    return f"""
        --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 8
        --max-position-embeddings 8 --attention-dropout 0 --hidden-dropout 0
        --global-batch-size {MICROBATCHES} --vocab-size 511
        --train-iters {len(VARIANTS) * (rounds + 3)} --log-interval 1000
    """.split()


if __name__ == "__main__":
    main()
