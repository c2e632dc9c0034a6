"""What protection is measured against: Megatron alone gives the same bits every time."""

from pathlib import Path

import pytest

from tests.harness import RankResult, succeeded
from tests.megatron_cases import CASES

# One case of each kind of parallelism in the default run.
SAMPLE = {"pp2_full_recompute", "tp2_sequence_parallel", "dp2_overlap", "llama"}


def bits(results: list[RankResult]) -> list[tuple]:
    """What two equal trainings have in common."""
    return [(r.losses, r.weights, r.optimizer) for r in results]


@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.acceptance) for n in CASES],
)
def test_two_runs_give_the_same_bits(megatron, english: Path, name: str) -> None:
    case = CASES[name]
    runs = [succeeded(megatron(case.argv(english), case.world_size)) for _ in ("first", "second")]
    assert bits(runs[0]) == bits(runs[1])
    assert all(len(rank.losses) == 4 and rank.weights and rank.optimizer for rank in runs[0])
    losses = [losses["lm loss"] for losses in runs[0][-1].losses]
    assert losses[-1] < losses[0], "it does not learn"


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "name", ["pp2_full_recompute", "pp2_selective_recompute", "pp2_selective_layernorm"]
)
def test_recompute_does_not_change_bits(megatron, name: str) -> None:
    plain, recomputed = (succeeded(megatron(CASES[n].argv(), 2)) for n in ("pp2", name))
    assert bits(plain) == bits(recomputed)


def test_data_parallel_ranks_hold_the_same_weights(megatron) -> None:
    ranks = succeeded(megatron(CASES["dp2_overlap"].argv(), 2))
    assert ranks[0].weights == ranks[1].weights
    assert ranks[0].optimizer != ranks[1].optimizer, "each has its own shard"


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("dp2_overlap", marks=pytest.mark.acceptance)]
)
def test_a_resumed_training_continues_bit_by_bit(
    megatron, english: Path, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    flags = [*case.argv(english), "--save", str(tmp_path), "--save-interval", "2"]
    whole = succeeded(megatron(flags, case.world_size))
    # Make it look as if it had stopped after the second iteration.
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = succeeded(megatron([*flags, "--load", str(tmp_path)], case.world_size))
    assert [r.losses for r in resumed] == [r.losses[2:] for r in whole]
    assert [(r.weights, r.optimizer) for r in resumed] == [(r.weights, r.optimizer) for r in whole]
