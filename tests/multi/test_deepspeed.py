"""DeepSpeed: protected training is bitwise the unprotected one, and stays it with faults injected.

Two ranks on gloo; ``tests.deepspeed_case`` is what they train.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.errors import EXIT_ABORTED, EXIT_EXHAUSTED, EXIT_USAGE
from sparetrain_megatron.faults.spec import FaultSpec
from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.summary import read_summary
from tests.deepspeed_server import Ranks, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

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
    "persistent_parameters": {"stage": 3, "persistence": 100000, "accumulation": 2},
    "loss_outside": {"stage": 0, "outside": True, "accumulation": 2},
    "loss_outside_direct": {"stage": 2, "outside": True, "direct": True},
    "told_boundary": {"stage": 1, "told": True, "accumulation": 3},
    "overlap_zero2": {"stage": 2, "config": {"zero_optimization": {"stage": 2}}},
}

TRANSPARENT_BY_DEFAULT = {"zero1_bf16_4_checkpointed"}
RECOVERING_BY_DEFAULT = {
    "zero1_bf16_4_checkpointed",
    "zero3_fp32_4_checkpointed",
    "pipeline_checkpointed_zero1_fp32",
    "loss_outside_direct",
}


def faults(case: dict[str, Any]) -> list[str]:
    """One fault for each part of the step, on both ranks in turn, and one in a repetition."""
    specs = [
        "iteration=1,rank=0,phase=forward,nth=9,element=5,bit=14",
        "iteration=2,rank=1,phase=backward,nth=11,element=5,bit=14",
        "iteration=2,rank=0,attempt=2,phase=backward,nth=4,element=5,bit=13",
        "iteration=3,rank=1,phase=accumulate,nth=2,element=5,bit=14",
        "iteration=4,rank=0,phase=communication,nth=1,element=5,bit=14",
        "iteration=5,rank=1,phase=optimizer,nth=3,element=5,bit=13",
        "iteration=5,rank=0,phase=clip,nth=2,element=5,bit=13",
        "iteration=6,rank=0,execution=checker,phase=backward,nth=8,element=5,bit=13",
    ]
    if case.get("checkpoint") or case.get("interval"):
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


def cases(default: set[str]) -> list[Any]:
    return [n if n in default else pytest.param(n, marks=pytest.mark.acceptance) for n in CASES]


@pytest.mark.parametrize("name", cases(TRANSPARENT_BY_DEFAULT))
def test_transparent_and_complete(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    found = protected(case, tmp_path)
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert found.summary["mismatches"] == 0
    assert found.summary["unprotected"] == {}
    assert found.summary["iterations"] == 3
    if case.get("checkpoint") or case.get("interval"):
        assert sum(found.summary["checks"]["piggyback"].values()) > 50
    assert [r["problems"] for r in found.results if r] == [[], []]


@pytest.mark.parametrize("name", cases(RECOVERING_BY_DEFAULT))
def test_recovers_bitwise(tmp_path: Path, name: str) -> None:
    case = {**CASES[name], "iterations": 6}
    specs = faults(case)
    found = protected(case, tmp_path, inject=specs)
    assert found.bits == unprotected(case).bits
    injected = [f for r in found.results if r for f in r["faults"]]
    assert {f["spec"] for f in injected} == set(specs)
    assert found.summary is not None
    assert found.summary["unprotected"] == {}
    seen = {(m["rank"], m["iteration"], m["attempt"]) for m in found.of_kind("mismatch")}
    assert {(f["rank"], f["iteration"], f["attempt"]) for f in injected if f["effect"]} <= seen
    assert found.summary["rollbacks"] >= 5
    assert [r["problems"] for r in found.results if r] == [[], []]


@pytest.mark.acceptance
def test_naive_mode(tmp_path: Path) -> None:
    case = CASES["zero1_bf16_4_checkpointed"]
    found = protected(case, tmp_path, mode="naive")
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert list(found.summary["checks"]) == ["naive"]


@pytest.mark.parametrize("name", ["zero2_fp32_4", "pipeline_zero0_fp32"])
@pytest.mark.parametrize("phase", ["backward,operator=mm", "optimizer,operator=addcdiv_", "clip"])
@pytest.mark.parametrize("action", ["abort", "exhausted"])
@pytest.mark.acceptance
def test_stops(tmp_path: Path, name: str, phase: str, action: str) -> None:
    if action == "exhausted" and phase.startswith("clip"):
        pytest.skip("clipping is repaired by a third execution")
    spec = f"iteration=2,rank=1,phase={phase},bit=14"
    settings: dict[str, Any] = {"inject": [f"{spec},repeat=always"]}
    if action == "abort":
        settings = {"inject": [spec], "on_mismatch": "abort"}
    found = protected(CASES[name], tmp_path, **settings)
    code = EXIT_ABORTED if action == "abort" else EXIT_EXHAUSTED
    assert found.exit_codes == [code, code], found.told()
    assert found.of_kind("verdict")[-1]["action"] == action
    assert found.summary is not None


@pytest.mark.acceptance
def test_report_goes_on_with_the_damage(tmp_path: Path) -> None:
    case = CASES["zero2_fp32_4"]
    spec = "iteration=2,rank=1,phase=backward,nth=11,element=5,bit=29"
    found = protected(case, tmp_path, inject=[spec], on_mismatch="report")
    assert found.bits != unprotected(case).bits
    assert {v["action"] for v in found.of_kind("verdict")} == {"report"}


REFUSED: dict[str, dict[str, Any]] = {
    "fp16.enabled": {"fp16": {"enabled": True}},
    "zero_optimization.zenflow": {
        "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1, "select_strategy": "auto"}}
    },
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "zero_optimization.offload_optimizer.device nvme": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        }
    },
    "activation_checkpointing.cpu_checkpointing": {
        "activation_checkpointing": {"cpu_checkpointing": True}
    },
    "activation_checkpointing.partition_activations": {
        "activation_checkpointing": {"partition_activations": True}
    },
    "optimizer.type Lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_refusals_name_the_key(key: str) -> None:
    from sparetrain_megatron.config import SparetrainConfig
    from sparetrain_megatron.deepspeed.refusals import check
    from sparetrain_megatron.errors import UsageError

    with pytest.raises(UsageError, match=key.replace(".", r"\.")):
        check(REFUSED[key], SparetrainConfig(enabled=True))


def test_a_refusal_ends_all_ranks(tmp_path: Path) -> None:
    case = {"config": REFUSED["activation_checkpointing.partition_activations"]}
    found = protected(case, tmp_path)
    # The first to refuse may end while the other one still waits for it.
    assert EXIT_USAGE in found.exit_codes
    assert 0 not in found.exit_codes
    assert "activation_checkpointing.partition_activations is not supported" in found.told()
