"""Mixture of experts on real Megatron: nothing changes, everything is found, no router hangs it."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.plan import Profile, load_plans
from tests import protection
from tests.megatron_cases import CASES
from tests.multi.test_deferral import run_full
from tests.protection import (
    ProtectedRun,
    assert_all_reported,
    assert_same_training,
    protected,
    unprotected,
)

NAMES = [name for name in CASES if name.startswith("moe_")]
METHODS = ("segment", "single")
_acceptance = pytest.mark.acceptance


def expected(name: str) -> Any:
    case = CASES[name]
    return unprotected(case.argv(), case.world_size)


def run(name: str, directory: Path, method: str, **settings: Any) -> ProtectedRun:
    """Trains under piggyback, or with everything deferred by a method."""
    if method == "piggyback":
        case = CASES[name]
        return protected(case.argv(), case.world_size, directory, **settings)
    return run_full(name, directory, method=method, **settings)[0]


def sampled(names: Sequence[str], methods: Sequence[str], sample: set[tuple[str, str]]) -> list:
    return [
        pytest.param(n, m, id=f"{n}-{m}", marks=() if (n, m) in sample else _acceptance)
        for n in names
        for m in methods
        if m != "single" or "--recompute-granularity" in CASES[n].flags
    ]


# --- transparent (under piggyback and naive: test_transparent.py) ---------------------------------


@pytest.mark.parametrize(
    "name, method", sampled(NAMES, METHODS, {("moe_top2_alltoall_bf16", "segment")})
)
def test_deferred_training_is_bitwise_that_of_an_unprotected_run(
    megatron, tmp_path: Path, name: str, method: str
) -> None:
    result, told = run_full(name, tmp_path, method=method)
    assert_same_training(result, expected(name))
    assert result.of_kind("mismatch") == []
    for rank in told:
        assert rank["operators"]["window"] > 0
        # What a router decides is another thing each time.
        assert rank["templates"] == []
        assert rank["most"] <= rank["budget"]


@pytest.mark.acceptance
@pytest.mark.parametrize("name", NAMES)
def test_by_plan(megatron, tmp_path: Path, name: str) -> None:
    result, _ = run_full(name, tmp_path, forced=False)
    assert_same_training(result, expected(name))
    assert result.of_kind("mismatch") == []


LATE = 0.02


def come_late(rank: int) -> None:
    """An ``also`` hook: rank 1 keeps its peer waiting before every exchange of tokens."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    forward = MoELayer.forward

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE * rank)
        return forward(*args, **kwargs)

    MoELayer.forward = late


def test_the_forecast_knows_of_the_waits_inside_layers(megatron, tmp_path: Path) -> None:
    """Also while nothing is deferred yet, so that nobody but the framework would wait."""
    name = "moe_top2_alltoall_bf16"
    result, _ = run_full(name, tmp_path, forced=False, also=come_late)
    assert_same_training(result, expected(name))
    waits = 2 * 2 * 4 * LATE  # forward and recompute of two layers, in four microbatches
    profile = Profile.load(tmp_path / "profile.rank0.json")
    waited = sum(w.seconds for w in profile.windows() if w.what in ("expert", "tensor"))
    assert waited > 0.25 * waits
    (plan,) = load_plans(tmp_path / "plan.json").values()
    assert plan.totals.window_seconds > 0.25 * waits


@pytest.mark.acceptance
@pytest.mark.parametrize("budget", ["4KiB", "64KiB", "512KiB"])
@pytest.mark.parametrize("name", ["moe_ep2", "moe_top1_allgather_bf16", "moe_pp2_ep2"])
def test_held_bytes_stay_within_the_budget(
    megatron, tmp_path: Path, name: str, budget: str
) -> None:
    result, told = run_full(name, tmp_path, method="single", memory_budget=budget)
    assert_same_training(result, expected(name))
    assert result.of_kind("mismatch") == []
    for rank in told:
        assert rank["most"] <= rank["budget"]
        if budget == "4KiB":
            assert rank["operators"]["demoted"] > 0


def test_experts_on_one_rank_are_not_bound(megatron, tmp_path: Path) -> None:
    """Without collectives inside, the block is one tape; its shapes change all the same."""
    name = "moe_top2_alltoall_bf16"
    flags = "--expert-model-parallel-size 1"
    result, (rank,) = run_full(name, tmp_path, flags=flags, ranks=1)
    assert_same_training(result, unprotected([*CASES[name].argv(), *flags.split()], 1))
    assert result.of_kind("mismatch") == []
    assert (rank["templates"], rank["unbound"]) == ([], 2)


# --- recovering -----------------------------------------------------------------------------------


def faults(name: str) -> list[str]:
    """One of each kind, on both ranks and layers; two attempts in every iteration."""
    flags = CASES[name].flags
    bit = 14 if "--bf16" in flags else 30  # of an exponent: routes change, too
    first, last = 0, CASES[name].world_size - 1
    layers = (1, 2)
    second = "recompute" if "--recompute-granularity" in flags else "backward"
    moved = "all_to_all" if "alltoall" in flags else "reduce_scatter"
    # Query, key and value, projection, what experts share, the router, the experts.
    shared = 2 if "--moe-shared" in flags and "overlap" not in flags else 0
    router, expert = (f"operator=mm,nth={n + shared},pattern=burst" for n in (3, 5))
    return [
        f"iteration=2,rank={first},phase=forward,layer={layers[0]},{router},bit={bit}",
        f"iteration=2,attempt=2,rank={last},phase={second},layer={layers[1]},{router},bit={bit}",
        f"iteration=3,rank={first},phase=forward,layer={layers[0]},operator=index_select,element=40,bit={bit}",
        f"iteration=3,attempt=2,rank={last},phase=forward,layer={layers[1]},{expert},element=7,bit={bit}",
        f"iteration=4,rank={last},phase=communication,operator={moved},nth=5,element=40,bit=13",
        f"iteration=4,attempt=2,rank={first},phase=backward,layer={layers[0]},{expert},element=7,bit={bit}",
    ]


SAMPLE = {("moe_expert_bias", "piggyback"), ("moe_top1_alltoall", "segment")}


@pytest.mark.parametrize("name, method", sampled(NAMES, ("piggyback", *METHODS), SAMPLE))
def test_faults_are_found_and_taken_back(megatron, tmp_path: Path, name: str, method: str) -> None:
    specs = faults(name)
    result = run(name, tmp_path, method, inject=specs)
    assert_same_training(result, expected(name))
    assert len(result.faults) == len(specs), [f["spec"] for f in result.faults]
    found = {(m["iteration"], m["attempt"]) for m in result.of_kind("mismatch")}
    assert {(fault["iteration"], fault["attempt"]) for fault in result.faults} == found
    if method == "piggyback":
        assert_all_reported(result)
    # A wrong number made operators differ, not the software.
    assert not [m for m in result.of_kind("mismatch") if m["wrong"] == "software"]


ROUTER_STATE = {
    "tokens_per_expert": ("moe_expert_bias", "phase=recompute,layer=1,operator=add_,nth=1,bit=22"),
    "expert_bias": ("moe_expert_bias", "phase=accumulate,operator=sign,bit=23"),
    "sum_of_tokens": ("moe_expert_bias", "phase=communication,operator=all_reduce,nth=1,bit=22"),
    "aux_loss": ("moe_global_aux_loss", "phase=recompute,layer=2,operator=div,nth=1,bit=20"),
}


@pytest.mark.acceptance
@pytest.mark.parametrize("method", ("piggyback", *METHODS))
@pytest.mark.parametrize("state", ROUTER_STATE)
def test_faults_in_the_router_s_own_state(
    megatron, tmp_path: Path, state: str, method: str
) -> None:
    name, fault = ROUTER_STATE[state]
    result = run(name, tmp_path, method, inject=[f"iteration=3,rank=1,{fault}"])
    assert_same_training(result, expected(name))
    assert_all_reported(result)


# --- a router that decides otherwise in the recompute ---------------------------------------------


def decide_otherwise(rank: int) -> None:
    """An ``also`` hook: rank 0's second router resolves a tie differently in one recompute."""
    from megatron.core.transformer.moe import router

    engine = protection._attached.engine
    original = router.topk_routing_with_score_function

    @functools.wraps(original)
    def topk(*args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(*args, **kwargs)
        position = engine.position
        place = (position.iteration, position.attempt, position.microbatch, position.layer)
        if rank == 0 and position.phase == "recompute" and place == (3, 1, 2, 2):
            with engine.paused():
                # One token in four goes to the other rank's experts: other counts everywhere.
                routing_map.data[::4] = routing_map.data[::4].roll(routing_map.shape[1] // 2, 1)
                probs.data[::4] = probs.data[::4].roll(routing_map.shape[1] // 2, 1)
        return probs, routing_map

    router.topk_routing_with_score_function = topk


@pytest.mark.parametrize(
    "name, method",
    [
        pytest.param(name, method, marks=() if (name, method) in sample else _acceptance)
        for sample in [{("moe_top1_alltoall", "piggyback"), ("moe_top1_alltoall", "segment")}]
        for name in (
            "moe_top1_alltoall",
            "moe_top1_allgather_bf16",
            "moe_expert_bias",
            "moe_tp2_ep2",
            "moe_capacity",
            "moe_padded_capacity",
        )
        for method in ("piggyback", *METHODS)
    ],
)
def test_another_decision_in_the_recompute_names_the_router(
    megatron, tmp_path: Path, name: str, method: str
) -> None:
    """No rank hangs or crashes, and the other one blames none of its own operators for it."""
    if method == "piggyback":
        case = CASES[name]
        result = protected(case.argv(), case.world_size, tmp_path, also=decide_otherwise)
    else:
        result, _ = run_full(name, tmp_path, method=method, also=decide_otherwise)
    assert_same_training(result, expected(name))
    everything = result.of_kind("mismatch")
    # Replayed, that rank's own recompute is not what it was, either.
    assert {m["rank"] for m in everything} == {0}, result.told()
    (found,) = (m for m in everything if m["operator"] == "router")
    assert found["layer"] == 2
    assert (found["iteration"], found["attempt"], found["phase"]) == (3, 1, "recompute")
    assert "decides otherwise" in found["note"]
    assert result.summary["rollbacks"] == 1
