"""One rank of ``overlap_deepspeed.py``: a DeepSpeed engine whose steps take the modes in turn."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from overlap_rank import on_a_core
from two_hosts import ShapedLink

ROOT = Path(__file__).resolve().parents[1]
MODES = ("unprotected", "naive", "piggyback", "full", "full, reductions 0.1")
PROFILED = 2
TRIES = 3
TOLERANCE = 0.03
FAST = 1e9


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    rank = on_a_core()
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "deepspeed_gpt")]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    import deepspeed

    # A helper for ranks on one host, which takes a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import sparetrain_megatron.deepspeed  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        deepspeed.init_distributed("gloo", verbose=False)
        run = Run(options, rank, built(options, folder))
        steps = run.all()
        parts: list[Any] = [None] * 2
        dist.all_gather_object(parts, steps)
        if rank == 0:
            Path(options.out).write_text(json.dumps({"ranks": parts, "rate": run.rate}))
        dist.barrier()


def built(options: Any, folder: str) -> Any:
    """The engine: BF16, activation checkpointing in every layer."""
    import deepspeed
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from train import VOCABULARY, Gpt, Layer

    pipeline = options.case == "pipeline"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.microbatches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**6,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": {"zero1": 1, "zero3": 3, "pipeline": 1}[options.case]},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"activation_checkpoint_interval": 1},
        "sparetrain": {
            "enabled": True,
            "mode": "full",
            "profile_iters": PROFILED,
            "dir": folder,
        },
    }
    torch.manual_seed(1)
    heads = options.width // 64

    class Checkpointed(Gpt):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            inputs, labels = ids[:, :-1], ids[:, 1:]
            x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return loss_of(self.head(self.norm(x)), labels)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    if pipeline:
        from deepspeed.pipe import LayerSpec, PipelineModule

        layers = [
            LayerSpec(nn.Embedding, VOCABULARY, options.width),
            *[LayerSpec(Layer, options.width, heads)] * options.layers,
            LayerSpec(nn.Linear, options.width, VOCABULARY),
        ]
        model: nn.Module = PipelineModule(
            layers,
            num_stages=2,
            loss_fn=loss_of,
            partition_method="uniform",
            activation_checkpoint_interval=1,
            checkpointable_layers=["Layer"],
        )
    else:
        model = Checkpointed(options.layers, options.width, heads, options.length)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


class Run:
    """Measures steps.

    Attributes:
        rate: Of the link, in bit/s.
    """

    def __init__(self, options: Any, rank: int, engine: Any) -> None:
        import torch

        self.options = options
        self.rank = rank
        self.engine = engine
        self.protection = engine.sparetrain
        self.link = ShapedLink(os.environ["GLOO_SOCKET_IFNAME"])
        self.rate = 0.0
        self.planned: Any = None
        self._generator = torch.Generator().manual_seed(rank)

    def all(self) -> dict[str, list[dict[str, float]]]:
        """Every mode's steps, in rounds that each begin with another mode."""
        self._set_rate(FAST)
        for _ in range(2):
            self.step("unprotected")
        self._calibrate()
        while self.protection.planning.plan is None:
            self.step("profile")
        self.planned = self.protection.engine.strategy
        self.protection.planning = None  # windows of other modes would seem to have drifted
        for mode in MODES:
            self.step(mode)
        steps: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for index in range(self.options.steps):
            turn = index % len(MODES)
            for mode in MODES[turn:] + MODES[:turn]:
                steps[mode].append(self.step(mode))
        return steps

    def _calibrate(self) -> None:
        """Finds the rate at which an unprotected step is idle for the asked share."""
        fast = self._mean(self.step("unprotected"))
        wanted = fast["cpu"] / (1 - self.options.idle / 100)
        self._set_rate(50e6)
        for _ in range(TRIES):
            self.step("unprotected")
            found = self._mean(self.step("unprotected"))
            idle = 1 - found["cpu"] / found["seconds"]
            self.say(f"{self.rate / 1e6:.1f} Mbit/s: idle {idle:.1%}")
            if abs(idle - self.options.idle / 100) < TOLERANCE:
                break
            # What the link takes of a step is in proportion to 1 ÷ rate.
            factor = max(found["seconds"] - fast["seconds"], 1e-3) / (wanted - fast["seconds"])
            self._set_rate(self.rate * min(8.0, max(0.125, factor)))

    def _mean(self, step: dict[str, float]) -> dict[str, float]:
        import torch.distributed as dist

        parts: list[Any] = [None] * 2
        dist.all_gather_object(parts, step)
        return {key: sum(part[key] for part in parts) / 2 for key in step}

    def _set_rate(self, bits_per_second: float) -> None:
        import torch.distributed as dist

        dist.barrier()
        self.rate = bits_per_second
        self.link.set_rate(bits_per_second)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def step(self, mode: str) -> dict[str, float]:
        """One iteration in a mode."""
        import torch.distributed as dist

        engine = self.protection.engine
        figures, deferred = engine.statistics, engine.deferred
        checks, windows = figures.seconds_in_checks, deferred.in_windows
        drained = sum(deferred.outside.values())
        figures.peak_bytes_held = 0
        dist.barrier()
        start, cpu = time.perf_counter(), time.thread_time()
        with self._in_mode(mode):
            self._iterate()
        step = {
            "seconds": time.perf_counter() - start,
            "cpu": time.thread_time() - cpu,
            "in_checks": figures.seconds_in_checks - checks,
            "in_windows": deferred.in_windows - windows,
            "drained": sum(deferred.outside.values()) - drained,
            "held": figures.peak_bytes_held,
        }
        self.say(f"{mode:20} {step['seconds']:7.2f} s")
        return step

    def _iterate(self) -> None:
        import torch

        engine, length = self.engine, self.options.length

        def batch() -> torch.Tensor:
            return torch.randint(256, (2, length + 1), generator=self._generator)

        if self.options.case == "pipeline":
            batches = (batch() for _ in iter(int, 1))
            engine.train_batch((b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in batches)
            return
        for _ in range(self.options.microbatches):
            loss = engine(batch())
            engine.backward(loss)
            engine.step()

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        from sparetrain_megatron.dmr.strategy import Immediate

        protection, engine = self.protection, self.protection.engine
        if mode == "profile":  # the protection does it by itself
            yield
            return
        before = protection.enabled, engine.piggyback, engine.strategy, engine.reductions
        engine.reductions = 0.1 if mode.endswith("0.1") else 1.0
        protection.enabled = mode != "unprotected"
        engine.piggyback = mode != "naive"
        engine.strategy = self.planned if mode.startswith("full") else Immediate(engine.piggyback)
        try:
            yield
        finally:
            protection.enabled, engine.piggyback, engine.strategy, engine.reductions = before


if __name__ == "__main__":
    main()
