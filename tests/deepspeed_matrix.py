"""What the tests of the DeepSpeed adapters train, in which modes, and with which faults."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from sparetrain_megatron.faults.spec import FaultSpec
from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.summary import read_summary
from tests.deepspeed_server import Ranks, run

_MOE = {"num_experts": 2, "ep_size": 2, "k": 1}
_PIPELINE = {"pipeline": True, "accumulation": 4}

CASES: dict[str, dict[str, Any]] = {
    f"zero{stage}_{dtype}_{accumulation}{'_checkpointed' * bool(checkpoint)}": {
        "stage": stage,
        "bf16": dtype == "bf16",
        "accumulation": accumulation,
        "checkpoint": checkpoint,
    }
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
    for accumulation in (1, 4)
    for checkpoint in (None, "torch")
}
CASES |= {
    f"{name}_zero{stage}_{dtype}": {**settings, "stage": stage, "bf16": dtype == "bf16"}
    for stage in (0, 1)
    for dtype in ("fp32", "bf16")
    for name, settings in {
        "pipeline": _PIPELINE,
        "pipeline_checkpointed": {**_PIPELINE, "interval": 1},
        "pipeline_reentrant": {**_PIPELINE, "interval": 1, "use_reentrant": True},
    }.items()
}
CASES |= {
    f"{checkpoint}_zero{stage}": {"stage": stage, "checkpoint": checkpoint, "dropout": 0.1}
    for stage in (1, 3)
    for checkpoint in ("torch_reentrant", "deepspeed", "deepspeed_non_reentrant")
}
CASES |= {
    f"moe_k{k}_zero{stage}{'_checkpointed' * checkpointed}": {
        "stage": stage,
        "moe": {**_MOE, "k": k},
        "checkpoint": "torch" if checkpointed else None,
    }
    for stage in (0, 1, 2)
    for k in (1, 2)
    for checkpointed in (False, True)
}
CASES |= {
    f"offload_zero{stage}_{accumulation}": {
        "stage": stage,
        "offload": True,
        "accumulation": accumulation,
    }
    for stage in (2, 3)
    for accumulation in (1, 4)
}
CASES |= {
    "cpu_adam_zero2_bf16": {"stage": 2, "offload": True, "cpu_adam": True, "bf16": True},
    "cpu_adam_zero3": {"stage": 3, "offload": True, "cpu_adam": True, "accumulation": 2},
    "persistent_parameters": {"stage": 3, "persistence": 100000, "accumulation": 2},
    "loss_outside": {"stage": 0, "outside": True, "accumulation": 2},
    "loss_outside_direct": {"stage": 2, "outside": True, "direct": True},
    "told_boundary": {"stage": 1, "told": True, "accumulation": 3},
    "overlap_zero2": {"stage": 2, "config": {"zero_optimization": {"stage": 2}}},
}

MODES: dict[str, dict[str, Any]] = {
    "naive": {"mode": "naive"},
    "piggyback": {"mode": "piggyback"},
    "full": {"mode": "full"},
}


REPRESENTATIVE = (
    "zero0_fp32_4_checkpointed",
    "zero0_bf16_1",
    "zero1_bf16_4_checkpointed",
    "zero2_bf16_1_checkpointed",
    "zero3_fp32_4_checkpointed",
    "pipeline_checkpointed_zero1_bf16",
    "pipeline_reentrant_zero0_fp32",
    "torch_reentrant_zero3",
    "deepspeed_zero1",
    "deepspeed_non_reentrant_zero1",
    "moe_k1_zero1_checkpointed",
    "moe_k2_zero2",
    "offload_zero2_4",
    "cpu_adam_zero3",
    "persistent_parameters",
    "loss_outside_direct",
    "told_boundary",
)
"""Cases for modes that do less than ``full``, which runs all: each setting at least once."""

CELLS = [(name, "full") for name in CASES]
CELLS += [(name, mode) for mode in ("piggyback", "naive") for name in REPRESENTATIVE]


def in_mode(case: dict[str, Any], mode: str) -> dict[str, Any]:
    """A case; in mode full everything is deferred that can be, whether a plan would or not."""
    return {**case, "force": {"rest": True}} if mode == "full" else case


def faults(case: dict[str, Any], mode: str) -> list[str]:
    """One fault for each part of the step, on both ranks in turn, and one in a repetition."""
    specs = [
        "iteration=1,rank=0,phase=forward,nth=9,element=5,bit=14",
        "iteration=2,rank=1,phase=backward,nth=11,element=5,bit=14",
        "iteration=2,rank=0,attempt=2,phase=backward,nth=12,element=5,bit=14",
        "iteration=3,rank=1,phase=accumulate,nth=2,element=5,bit=14",
        "iteration=4,rank=0,phase=communication,nth=1,element=5,bit=14",
        "iteration=5,rank=1,phase=optimizer,nth=3,element=5,bit=13",
        "iteration=5,rank=0,phase=clip,nth=2,element=5,bit=13",
        "iteration=6,rank=0,execution=checker,phase=backward,nth=8,element=5,bit=13",
    ]
    if case.get("cpu_adam"):
        # One call a parameter: its offloaded part is one.
        specs = [s.replace("phase=optimizer,nth=3", "operator=adam_update") for s in specs]
    if mode == "full":
        specs.append("iteration=4,attempt=2,rank=1,phase=held,nth=2,element=5,bit=13")
    # In mode naive nobody asks which of a block's two executions it is.
    if mode != "naive" and (case.get("checkpoint") or case.get("interval")):
        specs.append("iteration=6,attempt=2,rank=1,phase=recompute,nth=7,element=5,bit=13")
    return [str(FaultSpec.parse(spec)) for spec in specs]


@functools.cache
def _unprotected(case: str) -> Ranks:
    return run(json.loads(case))


def unprotected(case: dict[str, Any]) -> Ranks:
    return _unprotected(json.dumps(case, sort_keys=True))


def protected(case: dict[str, Any], directory: Path, **block: Any) -> Ranks:
    ranks = run({**case, "block": {"enabled": True, "dir": str(directory), **block}})
    ranks.events = list(read_events(directory))
    ranks.summary = read_summary(directory)
    return ranks
