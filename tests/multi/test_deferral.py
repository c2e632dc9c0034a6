"""Mode full on real Megatron: nothing changes, everything is found, memory stays in its budget."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from sparetrain_megatron.plan import Profile, load_plans
from sparetrain_megatron.plan.profile import Window
from tests import protection
from tests.megatron_cases import CASES
from tests.protection import (
    ProtectedRun,
    assert_same_training,
    protected,
    unprotected,
)

FULL: dict[str, Any] = {"mode": "full", "profile_iters": 1}


# --- in the ranks ---------------------------------------------------------------------------------


def force(method: str, rest: bool, binds: bool, also: Any, rank: int) -> None:
    """An ``also`` hook: defers everything, whether a plan would or not, and watches what is held.

    Args:
        method: Of blocks.
        rest: Whether what lies outside of blocks is deferred.
        binds: Whether blocks are bound.
        also: A further hook, or None.
    """
    from sparetrain_megatron.dmr.deferred import Deferred
    from sparetrain_megatron.dmr.strategy import Everything
    from sparetrain_megatron.planning import Planning

    protected = protection._attached
    protected._recompute.binds = binds
    adopt = Planning._adopt

    def forced(planning: Planning, plan: Any) -> None:
        adopt(planning, plan)
        planning.follow(Everything(rest=rest, method=method))

    Planning._adopt = forced
    watch(Deferred)
    if also is not None:
        also(rank)


def watch(deferred: Any) -> None:
    """Compares the account of what is held with an own one, at every push and every step."""
    seen = protection._attached.seen = {"most": 0, "pushed": 0, "bound": 0}

    def account(queue: Any) -> None:
        tapes = [*queue._pending] + ([queue._tape] if queue._tape is not None else [])
        tapes = [tape for tape in tapes if any(k in queue._bytes for k in tape.storages())]
        held = {
            key: size
            for tape in tapes
            for key, size in tape.storages().items()
            if key not in queue.constants
        }
        assert sum(held.values()) == queue.held_bytes
        assert queue.budget is None or queue.held_bytes <= queue.budget
        seen["most"] = max(seen["most"], queue.held_bytes)

    for name in ("push", "unit"):
        original = getattr(deferred, name)

        def watched(queue: Any, *args: Any, original: Any = original, name: str = name) -> Any:
            result = original(queue, *args)
            if name == "push":
                seen["pushed"] += 1
            if name == "push" or not queue:
                account(queue)
            return result

        setattr(deferred, name, watched)


def go_wrong(rank: int, call: int, backward: bool, here: int) -> None:
    """An ``also`` hook: a wrong bit that no operator that is seen has made.

    Args:
        rank: Where.
        call: Of an MLP's forward on this rank, from 1.
        backward: The gradient of its input is hit, not its output.
        here: This rank.
    """
    import ctypes

    from megatron.core.transformer.mlp import MLP

    protected = protection._attached
    forward, calls = MLP.forward, [0]

    def flip(tensor: Any) -> None:
        address = tensor.data_ptr() + tensor.element_size() - 1  # sign and exponent
        ctypes.c_uint8.from_address(address).value ^= 1
        protected.seen["unseen"] = protected.engine._unseen

    def wrong(mlp: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        hit = here == rank and calls[0] == call
        if hit and backward:
            hidden.register_hook(flip)
        output = forward(mlp, hidden, *args, **kwargs)
        if hit and not backward:
            flip(output[0])
        return output

    MLP.forward = wrong


def tell(rank: int) -> dict[str, Any]:
    """An ``after`` hook: faults, and what became of deferral."""
    protected = protection._attached
    deferred = protected.engine.deferred
    templates = protected._recompute.templates.values()
    return {
        "faults": protected.injector.records,
        "templates": [t.runs for t in templates if t is not None],
        "unbound": sum(t is None for t in templates),
        "operators": dict(deferred.operators),
        "budget": deferred.budget,
        "kept": len(protected.engine.closed),
        **getattr(protected, "seen", {}),
    }


def run_full(
    name: str,
    directory: Path,
    english: Path | None = None,
    *,
    flags: str = "",
    method: str = "segment",
    rest: bool = True,
    binds: bool = True,
    forced: bool = True,
    ranks: int | None = None,
    also: Any = None,
    **settings: Any,
) -> tuple[ProtectedRun, list[dict[str, Any]]]:
    """Trains in mode full; returns the run and what each rank told."""
    case = CASES[name]
    also = functools.partial(force, method, rest, binds, also) if forced else also
    run = protected(
        [*case.argv(english), *flags.split()],
        ranks or case.world_size,
        directory,
        also=also,
        after=tell,
        **{**FULL, **settings},
    )
    told = [r.value or {} for r in run.ranks]
    for result in run.ranks:
        result.value = (result.value or {}).get("faults", [])
    return run, told


def assert_transparent(name: str, english: Path, run: ProtectedRun) -> None:
    case = CASES[name]
    assert_same_training(run, unprotected(case.argv(english), case.world_size))
    assert run.of_kind("mismatch") == run.of_kind("rollback") == []
    assert run.summary["mismatches"] == 0
    assert run.summary["checks"]["deferred"]


# --- transparent ----------------------------------------------------------------------------------

NAMES = [
    "pp2_full_recompute",
    "interleaved_pp2",
    "tp2",
    "tp2_sequence_parallel",
    "dp2_overlap",
    "dropout_full_recompute",
    "llama",
    "pp2_tp2",
    "pp2_dp2",
    "pp2_selective_recompute",
    "pp2_selective_layernorm",
]
SAMPLE = {"pp2_full_recompute", "tp2_sequence_parallel", "dp2_overlap", "llama"}
MATRIX = [
    pytest.param(
        name,
        method,
        id=f"{name}-{method}",
        marks=() if name in SAMPLE and method == "segment" else pytest.mark.acceptance,
    )
    for name in NAMES
    for method in ("segment", "single")
    if method == "segment" or "--recompute-granularity" in CASES[name].flags
]


@pytest.mark.parametrize("name, method", MATRIX)
def test_training_is_bitwise_that_of_an_unprotected_run(
    megatron, english: Path, tmp_path: Path, name: str, method: str
) -> None:
    run, told = run_full(name, tmp_path, english, method=method)
    assert_transparent(name, english, run)
    for rank in told:
        assert rank["pushed"] > 0
        assert rank["kept"] == 0
        assert sum(rank["operators"].values()) > 0
        assert rank["most"] <= rank["budget"]


@pytest.mark.parametrize(
    "name, mode",
    [
        ("pp2_full_recompute", "full"),
        *(
            pytest.param(name, mode, marks=pytest.mark.acceptance)
            for name in ("llama", "interleaved_pp2", "pp2_tp2", "tp2", "dp2_overlap")
            for mode in ("coarse", "full")
        ),
    ],
)
def test_by_plan(megatron, english: Path, tmp_path: Path, name: str, mode: str) -> None:
    """What a plan really decides, with nothing forced."""
    run, _ = run_full(name, tmp_path, english, mode=mode, forced=False)
    case = CASES[name]
    assert_same_training(run, unprotected(case.argv(english), case.world_size))
    assert run.summary["mismatches"] == 0
    plans = load_plans(tmp_path / "plan.json")
    stages = dict.fromkeys((0, 1), "--pipeline-model-parallel-size" in case.flags)
    assert set(plans) == {stage for stage, there in stages.items() if there or stage == 0}
    assert {plan.mode for plan in plans.values()} == {mode}
    for rank in range(case.world_size):
        assert json.loads((tmp_path / f"profile.rank{rank}.json").read_text())["rank"] == rank


# --- bound blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, microbatches",
    [
        ("llama", 4),
        ("interleaved_pp2", 4),
        pytest.param("pp2_full_recompute", 4, marks=pytest.mark.acceptance),
        pytest.param("pp2_dp2", 2, marks=pytest.mark.acceptance),
    ],
)
def test_blocks_are_bound(
    megatron, english: Path, tmp_path: Path, name: str, microbatches: int
) -> None:
    """Each of a rank's two layers has a template of its own, in one model chunk or in two."""
    run, told = run_full(name, tmp_path / "bound", english)
    assert_transparent(name, english, run)
    # Three iterations, of which the first microbatch is recorded.
    assert [rank["templates"] for rank in told] == [[3 * microbatches - 1] * 2] * len(told)
    assert all(rank["unbound"] == 0 for rank in told)
    if name == "interleaved_pp2":
        # Its schedule waits for most transfers later than it begins them: windows, too.
        for number in range(2):
            profile = Profile.load(tmp_path / "bound" / f"profile.rank{number}.json")
            windows = [step for step in profile.steps if isinstance(step, Window)]
            assert sum(window.what == "pipeline" for window in windows) > 3 * microbatches
    seen, told = run_full(name, tmp_path / "seen", english, binds=False)
    assert_transparent(name, english, seen)
    assert all(rank["templates"] == [] for rank in told)


def test_a_block_with_dropout_is_not_bound(megatron, tmp_path: Path) -> None:
    _, (rank,) = run_full("dropout_full_recompute", tmp_path)
    assert rank["templates"] == []
    assert rank["unbound"] == 4


# Two layers a stage, four microbatches: 16 calls an iteration; the third begins with the 33rd.
@pytest.mark.parametrize(
    "where, rank, call, backward",
    [
        ("forward", 1, 33, False),
        ("recompute", 1, 36, False),
        ("backward", 1, 36, True),
        pytest.param("recompute", 0, 38, False, marks=pytest.mark.acceptance),
        pytest.param("backward", 0, 37, True, marks=pytest.mark.acceptance),
    ],
)
def test_what_goes_wrong_in_a_bound_block_is_found(
    megatron, tmp_path: Path, where: str, rank: int, call: int, backward: bool
) -> None:
    also = functools.partial(go_wrong, rank, call, backward)
    run, told = run_full("pp2_full_recompute", tmp_path, also=also)
    assert told[rank]["unseen"] is True
    assert run.of_kind("mismatch")
    assert run.summary["rollbacks"] == 1
    case = CASES["pp2_full_recompute"]
    assert_same_training(run, unprotected(case.argv(), case.world_size))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, budget",
    [
        ("pp2_full_recompute", "300KiB"),
        *(
            pytest.param(name, budget, marks=pytest.mark.acceptance)
            for name in ("pp2_full_recompute", "llama", "dp2_overlap", "tp2_sequence_parallel")
            for budget in ("1KiB", "64KiB", "1MiB", "1GiB")
        ),
    ],
)
def test_held_bytes_stay_within_the_budget(
    megatron, english: Path, tmp_path: Path, name: str, budget: str
) -> None:
    from sparetrain_megatron.config import parse_size

    run, told = run_full(name, tmp_path, english, memory_budget=budget)
    case = CASES[name]
    assert_same_training(run, unprotected(case.argv(english), case.world_size))
    assert run.summary["mismatches"] == 0
    for rank in told:
        assert rank["budget"] == parse_size(budget)
        assert rank["most"] <= rank["budget"]
    if budget == "300KiB":
        assert any(rank["operators"].get("demoted", 0) for rank in told)
        assert all(rank["most"] > 0 for rank in told)


def test_without_a_budget_it_is_piggyback(megatron, tmp_path: Path) -> None:
    case = CASES["pp2_full_recompute"]
    run, told = run_full("pp2_full_recompute", tmp_path / "full", memory_budget="0", forced=False)
    plain = protected(case.argv(), case.world_size, tmp_path / "piggyback", mode="piggyback")
    assert_same_training(run, unprotected(case.argv(), case.world_size))
    assert run.summary["checks"] == plain.summary["checks"]
    assert "deferred" not in run.summary["checks"]
    assert all(rank["operators"] == {} for rank in told)
    assert not (tmp_path / "full" / "plan.json").exists()


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_is_used_again_and_refused_for_another_model(megatron, tmp_path: Path) -> None:
    name = "pp2_full_recompute"
    case = CASES[name]
    _first, _ = run_full(name, tmp_path / "first", forced=False)
    plan = tmp_path / "first" / "plan.json"
    assert plan.exists()
    again = {"mode": "full", "plan": str(plan)}
    run = protected(case.argv(), 2, tmp_path / "again", **again)
    assert_same_training(run, unprotected(case.argv(), 2))
    assert run.summary["mismatches"] == 0
    assert not list((tmp_path / "again").glob("profile.*"))
    for flags, difference in (
        ("--hidden-size 32", "hidden_size"),
        ("--global-batch-size 4", "global_batch_size"),
        ("--pipeline-model-parallel-size 1", "pipeline_model_parallel_size"),
    ):
        run = protected([*case.argv(), *flags.split()], 2, tmp_path / "other", **again)
        assert all(code not in (0, None) for code in run.exit_codes), flags
        assert any(difference in r.output for r in run.ranks), run.ranks[0].output[-2000:]


# --- faults ---------------------------------------------------------------------------------------

SCENARIOS: dict[str, tuple[str, list[str]]] = {
    # From the second iteration on: the first one is profiled.
    "pipeline": (
        "pp2_full_recompute",
        [
            "iteration=2,rank=0,phase=forward,layer=1,operator=mm,nth=2,element=77,bit=20",
            "iteration=2,rank=1,attempt=2,phase=recompute,layer=4,operator=mm,nth=3,element=5,bit=29",
            "iteration=3,rank=1,phase=backward,layer=3,operator=mm,nth=4,element=100,bit=12",
            "iteration=3,rank=0,attempt=2,phase=accumulate,layer=2,operator=add_,nth=5,bit=22",
            "iteration=4,rank=1,phase=communication,operator=recv,nth=2,element=40,bit=10",
            "iteration=4,attempt=2,rank=1,phase=optimizer,operator=addcdiv_,nth=2,element=3,bit=21",
        ],
    ),
    "what_waits": (
        "pp2_full_recompute",
        [
            # The second execution itself, what it is held for, and what P-DMR holds.
            "iteration=2,rank=0,execution=checker,phase=backward,operator=mm,nth=7,bit=30",
            "iteration=2,rank=1,attempt=2,phase=held,operator=boundary,nth=2,element=9,bit=30",
            "iteration=3,rank=0,phase=held,layer=1,operator=boundary,nth=1,element=1,bit=30",
            "iteration=4,rank=0,phase=held,operator=checkpoint_input,nth=3,element=1000,bit=25",
            "iteration=4,rank=1,attempt=2,execution=checker,phase=recompute,operator=mm,nth=4,bit=30",
        ],
    ),
    "tensor_parallel": (
        "tp2_sequence_parallel",
        [
            "iteration=2,rank=0,phase=communication,operator=all_gather,nth=9,element=50,bit=27",
            "iteration=2,rank=1,attempt=2,phase=forward,operator=mm,nth=4,element=8,bit=27",
            "iteration=3,rank=1,phase=communication,operator=reduce_scatter,nth=4,element=8,bit=23",
            "iteration=4,rank=1,phase=backward,layer=2,operator=mm,nth=2,element=60,bit=28",
        ],
    ),
    "data_parallel_overlapped": (
        "dp2_overlap",
        [
            "iteration=2,rank=0,phase=communication,operator=reduce_scatter,element=99,bit=13",
            "iteration=3,rank=1,phase=communication,operator=all_gather,element=123,bit=14",
            "iteration=4,rank=1,phase=backward,layer=3,operator=mm,nth=3,element=70,bit=14",
        ],
    ),
    "interleaved": (
        "interleaved_pp2",
        [
            "iteration=2,rank=0,microbatch=3,phase=forward,layer=3,operator=mm,nth=2,bit=27",
            "iteration=3,rank=1,microbatch=2,phase=backward,layer=2,operator=mm,nth=1,bit=27",
            "iteration=4,rank=1,phase=communication,operator=recv,nth=5,element=64,bit=16",
        ],
    ),
    "llama": (
        "llama",
        [
            "iteration=2,rank=0,phase=recompute,layer=1,operator=mm,nth=2,element=40,bit=14",
            "iteration=3,rank=1,phase=backward,layer=4,operator=mul,nth=3,element=40,bit=14",
            "iteration=4,rank=1,phase=backward,layer=head,operator=mm,nth=3,element=900,bit=14",
        ],
    ),
    "dropout": (
        "dropout_full_recompute",
        [
            "iteration=2,phase=forward,layer=2,operator=bernoulli_,nth=2,element=30,bit=30",
            "iteration=3,phase=recompute,layer=3,operator=bernoulli_,element=8,bit=30",
            "iteration=4,phase=backward,layer=1,operator=mul,element=8,bit=30",
        ],
    ),
}
DEFAULT = {"pipeline", "what_waits"}


@pytest.mark.parametrize(
    "scenario, method",
    [
        pytest.param(
            scenario,
            method,
            marks=() if scenario in DEFAULT and method == "segment" else pytest.mark.acceptance,
        )
        for scenario, (name, _) in SCENARIOS.items()
        for method in ("segment", "single")
        if method == "segment" or "--recompute-granularity" in CASES[name].flags
    ],
)
def test_faults_are_found_and_taken_back(
    megatron, english: Path, tmp_path: Path, scenario: str, method: str
) -> None:
    name, faults = SCENARIOS[scenario]
    case = CASES[name]
    run, _ = run_full(name, tmp_path, english, method=method, inject=faults)
    assert_same_training(run, unprotected(case.argv(english), case.world_size))
    assert run.summary["injected"] == len(faults)
    assert run.summary["rollbacks"] > 0
    attempts = {(m["iteration"], m["attempt"]) for m in run.of_kind("mismatch")}
    assert {(fault["iteration"], fault["attempt"]) for fault in run.faults} <= attempts


def test_a_segment_holds_a_twentieth_of_what_its_operators_would(
    megatron, english: Path, tmp_path: Path
) -> None:
    from sparetrain_megatron.plan import Profile
    from sparetrain_megatron.plan.planner import Planner

    run_full("llama", tmp_path, english, forced=False)
    planner = Planner(Profile.load(tmp_path / "profile.rank0.json"), 0.9, "full")
    compared = 0
    for shape, block in planner.blocks.items():
        whole = [c for c in planner.candidates[shape] if "recompute" in str(c.segment.parts)]
        if block.has_recompute and whole:
            best = max(whole, key=lambda candidate: candidate.worth)
            singly = sum(
                operator.held
                for number, operator in enumerate(block.operators)
                if best.covers >> number & 1
            )
            assert best.segment.boundary <= 0.05 * singly
            compared += 1
    assert compared
