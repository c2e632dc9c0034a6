"""DeepSpeed: protected training is bitwise the unprotected one, and stays it with faults injected.

Two ranks on gloo; ``tests.deepspeed_case`` is what they train, and ``tests.deepspeed_matrix`` has
the settings.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.errors import EXIT_ABORTED, EXIT_EXHAUSTED, EXIT_USAGE
from tests.deepspeed_matrix import (
    CASES,
    CELLS,
    MODES,
    REPRESENTATIVE,
    faults,
    in_mode,
    protected,
    unprotected,
)
from tests.deepspeed_server import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

TRANSPARENT_BY_DEFAULT = {
    ("zero1_bf16_4_checkpointed", "piggyback"),
    ("zero3_fp32_4_checkpointed", "full"),
}
RECOVERING_BY_DEFAULT = {
    ("zero1_bf16_4_checkpointed", "piggyback"),
    ("zero3_fp32_4_checkpointed", "piggyback"),
    ("pipeline_checkpointed_zero1_fp32", "full"),
    ("loss_outside_direct", "full"),
}


def matrix(default: set[tuple[str, str]]) -> Any:
    """Mode full in every case, the others in some; only ``default`` runs unasked."""
    cells = [
        pytest.param(
            name,
            mode,
            id=f"{name}-{mode}",
            marks=() if (name, mode) in default else pytest.mark.acceptance,
        )
        for name, mode in CELLS
    ]
    return pytest.mark.parametrize("name, mode", cells)


@matrix(TRANSPARENT_BY_DEFAULT)
def test_transparent_and_complete(tmp_path: Path, name: str, mode: str) -> None:
    case = CASES[name]
    found = protected(in_mode(case, mode), tmp_path, **MODES[mode])
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert found.summary["mismatches"] == 0
    assert found.summary["unprotected"] == {}
    assert found.summary["iterations"] == 3
    checks = {method: sum(kinds.values()) for method, kinds in found.summary["checks"].items()}
    if mode == "naive":
        assert list(checks) == ["naive"]
    if mode == "piggyback" and (case.get("checkpoint") or case.get("interval")):
        assert checks["piggyback"] > 50
    if mode == "full":
        assert checks["deferred"] > 50
        replayed = [sum(r["replayed"].values()) for r in found.results if r]
        assert sum(replayed) >= checks["deferred"]
    assert [r["problems"] for r in found.results if r] == [[], []]


@matrix(RECOVERING_BY_DEFAULT)
def test_recovers_bitwise(tmp_path: Path, name: str, mode: str) -> None:
    case = {**CASES[name], "iterations": 6}
    specs = faults(case, mode)
    found = protected(in_mode(case, mode), tmp_path, inject=specs, **MODES[mode])
    assert found.bits == unprotected(case).bits
    injected = [f for r in found.results if r for f in r["faults"]]
    assert {f["spec"] for f in injected} == set(specs)
    assert found.summary is not None
    assert found.summary["unprotected"] == {}
    seen = {(m["rank"], m["iteration"], m["attempt"]) for m in found.of_kind("mismatch")}
    unseen = {(f["rank"], f["iteration"], f["attempt"]) for f in injected if f["effect"]} - seen
    # A replay compares what leaves it: a fault that vanishes before then has done no harm.
    assert len(unseen) <= (2 if mode == "full" else 0)
    assert found.summary["rollbacks"] >= 5
    assert [r["problems"] for r in found.results if r] == [[], []]


def test_a_wrong_value_that_the_model_keeps_goes_with_its_iteration(tmp_path: Path) -> None:
    """Made in the first forward and used in all: it is made, and checked, anew."""
    case = {"stage": 1, "keeps": True, "iterations": 3}
    spec = "iteration=1,rank=0,phase=forward,operator=exp,element=5,bit=20"
    found = protected(case, tmp_path, inject=[spec], **MODES["full"])
    assert [f["spec"] for r in found.results if r for f in r["faults"]] == [spec]
    assert found.of_kind("mismatch")
    assert found.bits == unprotected(case).bits


def test_every_setting_is_in_the_smaller_matrix() -> None:
    def settings(names: Any) -> set[tuple[str, str]]:
        return {
            (key, json.dumps(value))
            for name in names
            for key, value in CASES[name].items()
            if key not in ("config", "accumulation")
        }

    assert settings(REPRESENTATIVE) == settings(CASES)
    for stage in (0, 1, 2, 3):
        cases = [CASES[name] for name in REPRESENTATIVE if CASES[name]["stage"] == stage]
        assert {bool(case.get("checkpoint")) for case in cases} == {False, True}


@pytest.mark.acceptance
def test_a_layer_that_deepspeed_can_not_checkpoint(tmp_path: Path) -> None:
    """Its own error, with and without protection: a layer whose last module has parameters.

    The backward of that module has begun, and its parameters are gathered, before the recompute
    gathers and releases them again; that its gradients arrive then, DeepSpeed does not expect.
    """
    case = {"stage": 3, "checkpoint": "deepspeed_non_reentrant"}
    for ranks in (run(case), protected(case, tmp_path, mode="full")):
        assert ranks.exit_codes == [1, 1]
        assert "The size of tensor a (0) must match" in ranks.told()


@pytest.mark.parametrize("name", ["zero2_fp32_4", "pipeline_zero0_fp32"])
@pytest.mark.parametrize(
    "action, phase",
    [
        ("abort", "backward,operator=mm"),
        ("abort", "optimizer,operator=addcdiv_"),
        ("abort", "clip"),
        ("exhausted", "backward,operator=mm"),
        ("exhausted", "optimizer,operator=addcdiv_"),
        # Not in clipping: a third execution repairs it.
    ],
)
@pytest.mark.acceptance
def test_stops(tmp_path: Path, name: str, phase: str, action: str) -> None:
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
