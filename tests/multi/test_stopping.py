"""How a protected run ends when it can't go on, or may not; who was wrong; and a rank that dies."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest

from sparetrain_megatron.errors import EXIT_ABORTED, EXIT_EXHAUSTED
from tests.megatron_cases import CASES
from tests.protection import (
    ProtectedRun,
    assert_all_reported,
    assert_same_training,
    protected,
    unprotected,
)


def train(tmp_path: Path, name: str, *faults: str, english: Path | None = None, **settings):
    case = CASES[name]
    return protected(
        case.argv(english), case.world_size, tmp_path, inject=faults, timeout=120, **settings
    )


def assert_stopped(run: ProtectedRun, code: int, since: float, action: str) -> None:
    """All ranks ended with the code, soon after the last verdict, and told why."""
    assert [r.exit_code for r in run.ranks] == [code] * len(run.ranks), run.told()
    assert not any(r.timed_out for r in run.ranks)
    verdicts = [v for v in run.of_kind("verdict") if v["action"] == action]
    assert {v["rank"] for v in verdicts} == set(range(len(run.ranks)))
    assert since - max(v["time"] for v in verdicts) < 30
    assert run.summary is not None
    assert run.summary["mismatches"] == len(run.of_kind("mismatch")) > 0


# --- a fault that does not go away ---------------------------------------------

ALWAYS = {
    "forward": ("pp2_full_recompute", "rank=0,phase=forward,layer=1,operator=mm,bit=27"),
    "backward": ("pp2_full_recompute", "rank=1,phase=backward,layer=4,operator=mm,bit=27"),
    "optimizer": ("pp2_full_recompute", "rank=1,phase=optimizer,operator=lerp_,nth=2,bit=25"),
    "recv": ("pp2_full_recompute", "rank=1,phase=communication,operator=recv,bit=20"),
    "clip": ("pp2_full_recompute", "rank=0,phase=clip,operator=mul,nth=2,bit=20"),
    "held": ("pp2_full_recompute", "rank=0,phase=held,bit=20"),
    "all_reduce": ("pp2_tp2", "rank=3,phase=communication,operator=all_reduce,nth=5,bit=20"),
    "all_gather": ("dp2_overlap", "rank=0,phase=communication,operator=all_gather,bit=14"),
    "copy": ("dp2_overlap", "rank=1,phase=optimizer,operator=copy_,nth=2,bit=14"),
    "checker": ("tp2", "rank=1,phase=backward,operator=mm,execution=checker,bit=14"),
}
DEFAULT_ALWAYS = {"forward", "backward", "optimizer", "all_gather"}


@pytest.mark.parametrize(
    "where",
    [w if w in DEFAULT_ALWAYS else pytest.param(w, marks=pytest.mark.acceptance) for w in ALWAYS],
)
def test_a_fault_in_every_attempt_ends_all_ranks(megatron, tmp_path: Path, where: str) -> None:
    name, fault = ALWAYS[where]
    run = train(tmp_path, name, f"iteration=2,repeat=always,{fault}")
    assert_stopped(run, EXIT_EXHAUSTED, time.time(), "exhausted")
    assert run.summary["config"]["max_rollbacks"] == 2
    assert run.summary["iterations"] == 1
    assert any("exit code 76" in r.output for r in run.ranks)


def test_no_rollback_allowed(megatron, tmp_path: Path) -> None:
    fault = "iteration=2,rank=0,phase=backward,operator=mm"
    run = train(tmp_path, "pp2", fault, max_rollbacks=0)
    assert_stopped(run, EXIT_EXHAUSTED, time.time(), "exhausted")
    assert run.summary["rollbacks"] == 0


@pytest.mark.acceptance
@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_as_many_attempts_as_are_allowed(megatron, tmp_path: Path, repeat: int) -> None:
    fault = f"iteration=2,rank=0,phase=backward,operator=mm,bit=30,repeat={repeat}"
    run = train(tmp_path, "pp2", fault)
    if repeat > 2:
        assert_stopped(run, EXIT_EXHAUSTED, time.time(), "exhausted")
    else:
        assert_same_training(run, unprotected(CASES["pp2"].argv(), 2))
        assert run.summary["rollbacks"] == repeat


# --- what follows a mismatch ----------------------------------------------------

POINTS = [
    "rank=1,phase=backward,layer=4,operator=mm,bit=27",
    "rank=0,phase=clip,operator=mul,nth=3,bit=27",
    "rank=0,phase=optimizer,operator=addcdiv_,nth=3,bit=27",
    "rank=0,phase=optimizer,operator=copy_,nth=3,bit=13",
]


@pytest.mark.parametrize(
    "fault",
    [p if i == 0 else pytest.param(p, marks=pytest.mark.acceptance) for i, p in enumerate(POINTS)],
)
def test_abort_stops_at_the_first_mismatch(megatron, english, tmp_path: Path, fault: str) -> None:
    run = train(tmp_path, "llama", f"iteration=2,{fault}", on_mismatch="abort", english=english)
    assert_stopped(run, EXIT_ABORTED, time.time(), "abort")
    assert run.summary["iterations"] == 1


@pytest.mark.parametrize(
    "fault",
    [p if i == 0 else pytest.param(p, marks=pytest.mark.acceptance) for i, p in enumerate(POINTS)],
)
def test_report_goes_on_with_the_damage(megatron, english, tmp_path: Path, fault: str) -> None:
    case = CASES["llama"]
    run = train(tmp_path, "llama", f"iteration=2,{fault}", on_mismatch="report", english=english)
    assert [r.exit_code for r in run.ranks] == [0, 0], run.told()
    assert_all_reported(run)
    assert run.summary["rollbacks"] == 0
    assert {v["action"] for v in run.of_kind("verdict")} == {"report"}
    expected = unprotected(case.argv(english), case.world_size)
    assert [r.weights for r in run.ranks] != [r.weights for r in expected]


# --- a rank that dies in the middle of a rollback -------------------------------


def die_while_restoring(victim: int, how: str, rank: int) -> None:
    """A hook: the victim's process ends when it has put back half of the state."""
    from sparetrain_megatron.megatron import state

    if rank != victim:
        return

    def die(data_iterator: object) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)

    state.rewind = die


@pytest.mark.parametrize(
    "name, victim, how",
    [
        ("pp2_full_recompute", 0, "kill"),
        pytest.param("pp2_full_recompute", 1, "exit", marks=pytest.mark.acceptance),
        pytest.param("dp2_overlap", 1, "kill", marks=pytest.mark.acceptance),
    ],
)
def test_a_rank_dies_in_the_middle_of_a_rollback(
    megatron, tmp_path: Path, name: str, victim: int, how: str
) -> None:
    """Resumed from the last checkpoint the training gives the weights of the uninterrupted run."""
    argv = CASES[name].argv()
    whole = unprotected(argv, 2)
    flags = [*argv, "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    fault = "iteration=3,rank=1,phase=backward,operator=mm,bit=27"
    run = protected(
        flags,
        2,
        tmp_path / "events",
        inject=[fault],
        also=functools.partial(die_while_restoring, victim, how),
        timeout=60,
    )
    assert run.ranks[victim].exit_code == (-signal.SIGKILL if how == "kill" else 9)
    assert run.ranks[1 - victim].exit_code != 0
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    resumed = protected(
        [*flags, "--load", str(tmp_path / "saved")], 2, tmp_path / "events", inject=[fault]
    )
    assert [r.exit_code for r in resumed.ranks] == [0, 0], resumed.told()
    assert resumed.summary["rollbacks"] == 1
    for mine, theirs in zip(resumed.ranks, whole):
        assert (mine.weights, mine.optimizer) == (theirs.weights, theirs.optimizer)
        assert mine.losses == theirs.losses[2:]


# --- a second device --------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "dp2_distributed_optimizer_bf16",
        pytest.param("tp2", marks=pytest.mark.acceptance),
        pytest.param("pp2", marks=pytest.mark.acceptance),
    ],
)
def test_a_device_that_repeats_its_error_is_found_by_a_peer(
    megatron, tmp_path: Path, name: str
) -> None:
    fault = "iteration=2,rank=1,phase=backward,operator=mm,execution=both,nth=3,bit=14"
    run = train(tmp_path, name, fault, second_device=1.0)
    assert_same_training(run, unprotected(CASES[name].argv(), 2))
    assert_all_reported(run)
    (mismatch,) = run.of_kind("mismatch")
    assert mismatch["method"] == "second_device"
    assert mismatch["rank"] == 1
    assert run.summary["second_device_checks"] > 1000


@pytest.mark.parametrize("execution", ["primary", "checker"])
@pytest.mark.parametrize(
    "name",
    ["tp2", pytest.param("dp2_distributed_optimizer_bf16", marks=pytest.mark.acceptance)],
)
def test_after_a_mismatch_a_peer_says_who_was_wrong(
    megatron, tmp_path: Path, name: str, execution: str
) -> None:
    fault = f"iteration=2,rank=0,phase=backward,operator=mm,execution={execution},nth=2,bit=14"
    run = train(tmp_path, name, fault)
    assert_same_training(run, unprotected(CASES[name].argv(), 2))
    (verdict, *_) = [v for v in run.of_kind("verdict") if v["rank"] == 0]
    (finding,) = verdict["findings"]
    assert finding["wrong"].startswith(execution)
    assert "rank 1" in finding["note"]
    assert run.summary["second_device_checks"] == 1


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ["pp2_full_recompute", "tp2", "dp2_overlap", "pp2_tp2"])
def test_sampled_checks_by_a_peer_raise_no_alarm(megatron, tmp_path: Path, name: str) -> None:
    run = train(tmp_path, name, second_device=0.05)
    assert_same_training(run, unprotected(CASES[name].argv(), CASES[name].world_size))
    assert run.summary["mismatches"] == 0
    assert run.summary["second_device_checks"] > 100
