"""DeepSpeed in mode full: by plan, in a budget, with many faults, touching nothing of its own."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.plan import load_plans
from tests.deepspeed_matrix import CASES, faults, in_mode, protected, unprotected

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def some(default: str, *others: str) -> Any:
    marked = [pytest.param(name, marks=pytest.mark.acceptance) for name in others]
    return pytest.mark.parametrize("name", [default, *marked])


@some(
    "zero3_fp32_4_checkpointed",
    "zero0_bf16_4",
    "zero1_bf16_1_checkpointed",
    "zero2_fp32_4",
    "offload_zero3_4",
    "deepspeed_zero3",
    "moe_k1_zero2_checkpointed",
    "persistent_parameters",
)
def test_replays_touch_nothing_of_deepspeeds(tmp_path: Path, name: str) -> None:
    """No collective, hook, parameter or gradient; buckets are clean after a rollback."""
    case = {**CASES[name], "iterations": 6}
    found = protected(
        {**in_mode(case, "full"), "watch": True},
        tmp_path,
        mode="full",
        inject=faults(case, "full"),
    )
    assert found.bits == unprotected(case).bits
    for rank in found.results:
        assert rank is not None
        assert rank["problems"] == []
        counts = rank["watched"]
        assert counts["replays"] > 100 and counts["discards"] >= 4 and counts["steps"] >= 6
        assert counts["hooks"] > 100
        if case["stage"] == 3 and "persistence" not in case:
            assert counts["released"] > 1000


@some(
    "pipeline_checkpointed_zero1_fp32",
    "zero1_bf16_4_checkpointed",
    "zero3_fp32_4_checkpointed",
    "zero2_bf16_4",
    "torch_reentrant_zero3",
    "pipeline_zero0_fp32",
    "moe_k1_zero2_checkpointed",
    "offload_zero3_4",
)
def test_by_plan(tmp_path: Path, name: str) -> None:
    """What a plan really decides; the same plan from its file does not profile again."""
    case = {**CASES[name], "iterations": 6}
    first, again = tmp_path / "first", tmp_path / "again"
    found = protected(case, first, mode="full", profile_iters=2, inject=faults(case, "full")[-3:])
    assert found.bits == unprotected(case).bits
    stages = {0, 1} if case.get("pipeline") else {0}
    plans = load_plans(first / "plan.json")
    assert set(plans) == stages
    assert plans[0].identity.megatron.startswith("deepspeed ")
    for rank in (0, 1):
        profile = json.loads((first / f"profile.rank{rank}.json").read_text())
        assert profile["rank"] == rank
        # The planner counts on no saving that there is not: blocks are never bound here.
        assert profile["costs"].get("bound") is None
    found = protected(case, again, mode="full", plan=str(first / "plan.json"))
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert found.summary["mismatches"] == 0
    assert not (again / "profile.rank0.json").exists()


@pytest.mark.acceptance
def test_plan_of_another_engine_is_refused(tmp_path: Path) -> None:
    case = {**CASES["zero1_fp32_1"], "iterations": 2}
    protected(case, tmp_path / "first", mode="full", profile_iters=1)
    other = {**case, "stage": 2}
    found = protected(
        other, tmp_path / "other", mode="full", plan=str(tmp_path / "first" / "plan.json")
    )
    assert found.exit_codes == [2, 2], found.told()
    assert "zero_stage" in found.told()


@some("zero3_fp32_4_checkpointed", "zero1_bf16_4_checkpointed", "pipeline_zero0_fp32")
def test_memory_budget(tmp_path: Path, name: str) -> None:
    """What does not fit is executed at once; with no memory nothing is deferred."""
    case = CASES[name]
    budget = 48 << 10
    found = protected(
        in_mode(case, "full"), tmp_path / "some", mode="full", memory_budget=str(budget)
    )
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert found.summary["mismatches"] == 0
    assert [r["most_held"] <= budget for r in found.results if r] == [True, True]
    assert [r["replayed"].get("demoted", 0) > 0 for r in found.results if r] == [True, True]
    found = protected(case, tmp_path / "none", mode="full", memory_budget="0")
    assert found.bits == unprotected(case).bits
    assert found.summary is not None
    assert "deferred" not in found.summary["checks"]


PHASES = ("forward", "backward", "recompute", "held", "accumulate", "communication")


def many(seed: int, case: dict[str, Any], number: int) -> list[str]:
    """A fault an iteration: in any phase that may be deferred, either execution, any bit."""
    choose = random.Random(seed)
    phases = PHASES if case.get("checkpoint") or case.get("interval") else PHASES[:2] + PHASES[3:]
    specs = []
    for iteration in range(1, number + 1):
        phase = choose.choice(phases)
        execution = choose.choice(("primary", "checker"))
        if phase in ("held", "communication"):
            execution = "primary"
        specs.append(
            f"iteration={iteration},rank={choose.randrange(2)},phase={phase},"
            f"execution={execution},nth={choose.randint(1, 30)},"
            f"element={choose.randrange(10**6)},bit={choose.randrange(32)}"
        )
    return specs


@pytest.mark.acceptance
@pytest.mark.parametrize("method", ["segment", "single"])
@pytest.mark.parametrize(
    "name",
    [
        "zero1_bf16_4_checkpointed",
        "zero2_fp32_4",
        "zero3_fp32_4_checkpointed",
        "torch_reentrant_zero3",
        "deepspeed_zero1",
        "pipeline_reentrant_zero1_bf16",
        "moe_k2_zero1_checkpointed",
    ],
)
def test_no_fault_that_does_harm_is_missed(tmp_path: Path, name: str, method: str) -> None:
    number = 40
    case = {**CASES[name], "iterations": number}
    specs = many(len(name), case, number)
    found = protected(
        {**case, "force": {"rest": True, "method": method}}, tmp_path, mode="full", inject=specs
    )
    assert found.bits == unprotected(case).bits
    injected = [f for r in found.results if r for f in r["faults"]]
    assert len({f["spec"] for f in injected}) > number * 0.6
