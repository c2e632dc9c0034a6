"""Without a fault nothing changes: protected training has the bits of the unprotected one."""

from pathlib import Path

import pytest

from tests.harness import RankResult, succeeded
from tests.megatron_cases import CASES
from tests.protection import ProtectedRun, assert_same_training, bits, protected, unprotected

RECOMPUTE = {name for name, case in CASES.items() if "--recompute-granularity" in case.flags}
# Without recompute the two modes are the same.
MATRIX = [(name, "piggyback") for name in CASES] + [
    (name, "naive") for name in CASES if name in RECOMPUTE
]
SAMPLE = {
    ("pp2_full_recompute", "piggyback"),
    ("pp2_full_recompute", "naive"),
    ("tp2_sequence_parallel", "piggyback"),
    ("dp2_overlap", "piggyback"),
    ("dropout_full_recompute", "piggyback"),
}


def sampled(matrix: list[tuple], sample: set[tuple]) -> list:
    """Those outside of the sample run with ``make acceptance`` only."""
    marks = pytest.mark.acceptance
    return [
        pytest.param(*entry, id="-".join(entry), marks=() if entry in sample else marks)
        for entry in matrix
    ]


def assert_nothing_found(run: ProtectedRun) -> None:
    assert run.of_kind("mismatch") == run.of_kind("rollback") == run.of_kind("verdict") == []
    assert run.summary["mismatches"] == run.summary["rollbacks"] == 0
    assert run.summary["unprotected"] == {}
    assert run.summary["operators_checked"] > 0
    assert run.summary["reductions_not_doubled"] == 0


@pytest.mark.parametrize("name, mode", sampled(MATRIX, SAMPLE))
def test_training_is_bitwise_that_of_an_unprotected_run(
    megatron, english: Path, tmp_path: Path, name: str, mode: str
) -> None:
    case = CASES[name]
    argv = case.argv(english)
    run = protected(argv, case.world_size, tmp_path, mode=mode)
    assert_same_training(run, unprotected(argv, case.world_size))
    assert_nothing_found(run)
    assert run.summary["iterations"] == 4
    piggyback = sum(run.summary["checks"].get("piggyback", {}).values())
    if mode == "naive":
        assert piggyback == 0
    elif name in RECOMPUTE:
        assert piggyback > 0
    if case.world_size > 1:
        assert run.summary["communications_checked"] + run.summary["reductions_checked"] > 0


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ["tp2", "dp2_distributed_optimizer_bf16", "pp2_tp2"])
def test_sampled_reductions_are_counted_and_change_nothing(
    megatron, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    run = protected(case.argv(), case.world_size, tmp_path, reductions=0.25)
    assert_same_training(run, unprotected(case.argv(), case.world_size))
    assert run.summary["mismatches"] == 0
    assert run.summary["reductions_not_doubled"] > run.summary["reductions_checked"] > 0


@pytest.mark.parametrize(
    "name, protected_first",
    [
        ("llama", True),
        ("llama", False),
        pytest.param("dp2_overlap", True, marks=pytest.mark.acceptance),
        pytest.param("dp2_overlap", False, marks=pytest.mark.acceptance),
    ],
)
def test_a_checkpoint_is_the_same_with_and_without_protection(
    megatron, english: Path, tmp_path: Path, name: str, protected_first: bool
) -> None:
    case = CASES[name]
    whole = unprotected(case.argv(english), case.world_size)
    saved = tmp_path / "saved"
    flags = [*case.argv(english), "--save", str(saved), "--save-interval", "2"]

    def train(flags: list[str], with_protection: bool) -> list[RankResult]:
        if with_protection:
            run = protected(flags, case.world_size, tmp_path / "events")
            succeeded(run.ranks)
            assert_nothing_found(run)
            return run.ranks
        return unprotected(flags, case.world_size)

    first = train(flags, protected_first)
    assert bits(first) == bits(whole)
    for file in (saved / "iter_0000002").rglob("*"):
        if file.is_file():
            assert b"sparetrain" not in file.read_bytes(), f"{file.name} knows of the plugin"
    # Make it look as if it had stopped after the second iteration.
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train([*flags, "--load", str(saved)], not protected_first)
    assert [r.losses for r in resumed] == [r.losses[2:] for r in whole]
    assert [(r.weights, r.optimizer) for r in resumed] == [(r.weights, r.optimizer) for r in whole]
