"""Megatron's fusions compiled by Inductor (``jit_fuser``) stay compiled, and are executed twice."""

from pathlib import Path

import pytest

from tests.harness import RankResult, run_case, succeeded
from tests.megatron_cases import CASES
from tests.protection import assert_all_reported, assert_same_training, bits, protected

# Compiled by Megatron: SwiGLU and its backward; bias, dropout and residual.
ARGV = [*CASES["dropout_full_recompute"].argv(), *"--swiglu --disable-bias-linear --bf16".split()]


def compile_again(rank: int) -> None:
    """A hook: undoes ``TORCH_COMPILE_DISABLE=1``, which torch has read already."""
    import torch._dynamo

    torch._dynamo.config.disable = False


@pytest.fixture(scope="module")
def compiled(
    megatron, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], list[RankResult]]:
    """An environment in which torch compiles, and an unprotected training in it."""
    environment = {
        "TORCH_COMPILE_DISABLE": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        # No pool of processes for a handful of small graphs.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    results = succeeded(run_case(ARGV, 1, env=environment, before=compile_again, timeout=400))
    assert bits(results) != bits(succeeded(run_case(ARGV, 1))), "nothing was compiled"
    return environment, results


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((), id="no_fault"),
        pytest.param(
            (
                "iteration=1,phase=forward,layer=2,operator=compiled:swiglu,element=5,bit=14",
                "iteration=2,phase=recompute,layer=4,element=9,bit=12,nth=3,"
                "operator=compiled:bias_dropout_add_fused_train",
                "iteration=3,phase=backward,layer=3,operator=compiled:swiglu_back,bit=14",
                "iteration=4,phase=backward,operator=compiled:swiglu_back,execution=checker",
            ),
            id="faults",
            marks=pytest.mark.acceptance,
        ),
    ],
)
def test_compiled_fusions_are_executed_twice(
    compiled, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    environment, expected = compiled
    run = protected(
        ARGV, 1, tmp_path, env=environment, also=compile_again, timeout=400, inject=faults
    )
    assert_same_training(run, expected)
    assert run.summary["checks"]["naive"]["compiled"] > 0
    assert run.summary["checks"]["piggyback"]["pure"] > 0
    if faults:
        assert_all_reported(run)
    else:
        assert run.summary["mismatches"] == 0
