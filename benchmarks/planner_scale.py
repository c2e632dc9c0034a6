"""How long planning takes, and what memory: 16,384 GPUs, and growth with each dimension.

python benchmarks/planner_scale.py [--out FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparetrain_megatron.plan import plan
from sparetrain_megatron.simulator.layout import Layout
from sparetrain_megatron.simulator.machine import machine
from sparetrain_megatron.simulator.model import Shape, shape
from sparetrain_megatron.simulator.synthesise import Assumptions, Step, pieces

LARGE = Layout(tensor=8, pipeline=16, data=128, global_batch=2048)
"""16,384 GPUs: 16 stages; ranks of the same stage have the same plan."""

SMALL = Layout(tensor=8, pipeline=8, data=1, global_batch=32)


def measure(model: Shape, layout: Layout) -> dict[str, Any]:
    """Plans all stages; seconds of this process's CPU time and the largest memory so far."""
    device = machine("h100")
    device = dataclasses.replace(device, memory=1 << 42)
    assumptions = Assumptions()
    began = time.process_time()
    step = Step(pieces(model, layout, device, assumptions), layout, device.memory, assumptions)
    profiles = [step.profile(stage)[0] for stage in range(layout.pipeline)]
    synthesised = time.process_time()
    for profile in profiles:
        plan(profile, 16 << 30)
    planned = time.process_time()
    return {
        "gpus": layout.gpus,
        "layers": model.layers,
        "microbatches": layout.microbatches,
        "stages": layout.pipeline,
        "operators": sum(profile.operator_count() for profile in profiles),
        "synthesis_s": synthesised - began,
        "planning_s": planned - synthesised,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the measurements; 1 when the large one is over 10 s or 2 GB."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--large-only", action="store_true")
    args = parser.parse_args(argv)
    large = shape("llama3-405b")
    results: dict[str, Any] = {"schema": 1, "kind": "planner scale"}
    results["large"] = first = measure(large, LARGE)
    _show("16,384 GPUs", first)
    if not args.large_only:
        for what, values in (("layers", (32, 64, 128)), ("stages", (4, 8, 16))):
            results[what] = []
            for value in values:
                model, layout = dataclasses.replace(large, layers=64), SMALL
                if what == "layers":
                    model = dataclasses.replace(model, layers=value)
                else:
                    layout = dataclasses.replace(layout, pipeline=value)
                results[what].append(measure(model, layout))
                _show(f"{what} {value}", results[what][-1])
        results["microbatches"] = []
        for value in (16, 32, 64, 128):
            layout = dataclasses.replace(SMALL, global_batch=value)
            model = dataclasses.replace(large, layers=64)
            results["microbatches"].append(measure(model, layout))
            _show(f"microbatches {value}", results["microbatches"][-1])
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(first["synthesis_s"] + first["planning_s"] > 10 or first["peak_mib"] > 2000)


def _show(what: str, one: dict[str, Any]) -> None:
    print(
        f"{what:18} {one['operators']:>10,} operators  profiles {one['synthesis_s']:.2f} s  "
        f"plans {one['planning_s']:.2f} s  peak {one['peak_mib']:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
