"""With faults injected, training ends with the bits of a run without any, and all are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_cases import CASES
from tests.protection import (
    assert_all_reported,
    assert_same_training,
    bits,
    protected,
    unprotected,
)


def recover(
    tmp_path: Path,
    name: str,
    faults: list[str],
    *,
    flags: str = "",
    english: Path | None = None,
    **settings,
):
    """Trains with the faults and compares with the same training without faults and protection."""
    case = CASES[name]
    argv = [*case.argv(english), *flags.split()]
    expected = unprotected(argv, case.world_size)
    run = protected(argv, case.world_size, tmp_path, inject=tuple(faults), **settings)
    assert_same_training(run, expected)
    assert_all_reported(run)
    return run


# --- a few rich runs ----------------------------------------------------------

SCENARIOS: dict[str, tuple[str, str, list[str]]] = {
    # Two in one iteration on different ranks, several in one run.
    "pipeline": (
        "pp2_full_recompute",
        "",
        [
            "iteration=1,rank=0,phase=forward,layer=1,operator=mm,nth=2,element=77,bit=20",
            "iteration=1,rank=1,phase=recompute,layer=4,operator=mm,nth=3,element=5,bit=29",
            "iteration=2,rank=1,phase=backward,layer=3,operator=mm,nth=4,element=100,bit=12",
            "iteration=2,rank=0,phase=accumulate,layer=2,operator=add_,nth=5,element=9,bit=22",
            "iteration=3,rank=0,phase=clip,operator=mul,nth=3,element=31,bit=18",
            "iteration=3,attempt=2,rank=1,phase=optimizer,operator=addcdiv_,nth=2,element=3,bit=21",
            "iteration=4,rank=1,phase=communication,operator=recv,nth=2,element=40,bit=10",
            "iteration=4,rank=0,phase=held,nth=1,element=1000,bit=25",
        ],
    ),
    # The checker's own execution, multi-element patterns, the repeated iteration.
    "checker_and_patterns": (
        "pp2_full_recompute",
        "",
        [
            "iteration=1,rank=1,execution=checker,phase=backward,operator=mm,nth=7,bit=30",
            "iteration=1,rank=1,attempt=2,phase=forward,layer=head,operator=mm,nth=2,pattern=swap",
            "iteration=2,rank=0,phase=forward,layer=2,operator=bmm,pattern=shift",
            "iteration=2,rank=1,attempt=2,phase=recompute,operator=tanh,pattern=burst,bit=22",
            "iteration=3,attempt=2,rank=0,execution=checker,phase=optimizer,operator=lerp_,nth=3,bit=19",
            "iteration=3,rank=1,phase=backward,operator=native_layer_norm_backward,pattern=negate",
            "iteration=4,attempt=2,rank=0,execution=checker,phase=clip,operator=linalg_vector_norm,nth=4,bit=2",
            "iteration=4,rank=1,execution=checker,phase=accumulate,operator=add_,nth=11,bit=1",
        ],
    ),
    "tensor_parallel": (
        "tp2_sequence_parallel",
        "",
        [
            "iteration=1,rank=0,phase=communication,operator=all_gather,nth=9,element=50,bit=27",
            "iteration=1,rank=1,phase=communication,operator=reduce_scatter,nth=4,element=8,bit=23",
            "iteration=2,rank=1,phase=communication,operator=all_reduce,nth=2,bit=21",
            "iteration=2,rank=1,phase=communication,operator=broadcast,nth=2,bit=3",
            "iteration=3,rank=0,phase=forward,layer=embedding,operator=embedding,element=60,bit=28",
            "iteration=3,rank=1,phase=backward,layer=2,operator=mm,nth=2,element=60,bit=28",
        ],
    ),
    "data_parallel_overlapped": (
        "dp2_overlap",
        "",
        [
            "iteration=1,rank=0,phase=communication,operator=reduce_scatter,element=99,bit=13",
            "iteration=2,rank=1,phase=communication,operator=all_gather,element=123,bit=14",
            "iteration=3,attempt=2,rank=1,phase=optimizer,operator=copy_,nth=3,element=5,bit=9",
            "iteration=3,rank=0,phase=backward,layer=3,operator=mm,nth=3,element=70,bit=14",
            # What the last iteration gathers is gathered after it.
            "iteration=4,rank=0,phase=communication,operator=all_gather,nth=2,element=7,bit=3",
        ],
    ),
    "dropout": (
        "dropout_full_recompute",
        "",
        [
            "iteration=1,phase=forward,layer=2,operator=bernoulli_,nth=2,element=30,bit=30",
            "iteration=2,phase=recompute,layer=3,operator=bernoulli_,element=8,bit=29",
            "iteration=2,attempt=2,phase=backward,layer=1,operator=mul,element=8,bit=30",
            "iteration=3,phase=recompute,layer=1,operator=div_,nth=5,element=3,bit=23",
        ],
    ),
    "interleaved": (
        "interleaved_pp2",
        "",
        [
            "iteration=1,rank=0,microbatch=3,phase=forward,layer=3,operator=mm,nth=2,bit=27",
            "iteration=2,rank=1,microbatch=2,phase=backward,layer=2,operator=mm,nth=1,bit=27",
            "iteration=3,rank=1,phase=communication,operator=recv,nth=5,element=64,bit=16",
            "iteration=4,rank=0,phase=recompute,layer=1,operator=mm,nth=6,bit=27",
        ],
    ),
    "pipeline_and_tensor_parallel": (
        "pp2_tp2",
        "",
        [
            "iteration=1,rank=3,phase=forward,layer=4,operator=mm,nth=2,element=9,bit=30",
            "iteration=1,rank=0,phase=backward,layer=1,operator=mm,nth=2,element=9,bit=30",
            "iteration=2,rank=2,phase=communication,operator=recv,nth=3,element=17,bit=30",
            "iteration=2,rank=1,phase=communication,operator=all_reduce,nth=12,element=17,bit=30",
            "iteration=3,rank=2,phase=optimizer,operator=addcmul_,nth=5,element=1,bit=15",
            "iteration=4,rank=1,attempt=1,phase=clip,operator=mul,nth=2,element=1,bit=15",
        ],
    ),
    # What only one of the data-parallel ranks of a stage sees.
    "pipeline_and_data_parallel": (
        "pp2_dp2",
        "",
        [
            "iteration=1,rank=3,phase=communication,operator=recv,element=17,bit=12",
            "iteration=2,rank=0,phase=communication,operator=reduce_scatter,element=17,bit=12",
            "iteration=3,rank=1,phase=communication,operator=all_gather,element=50,bit=14",
            "iteration=4,rank=2,phase=forward,layer=3,operator=mm,nth=3,element=9,bit=13",
            "iteration=4,rank=2,phase=accumulate,operator=add_,nth=3,attempt=2,bit=13",
        ],
    ),
    "llama": (
        "llama",
        "",
        [
            "iteration=2,rank=0,phase=forward,layer=1,operator=mm,nth=2,element=40,bit=14",
            "iteration=2,rank=1,phase=recompute,layer=4,operator=silu,nth=2,element=40,bit=11",
            "iteration=3,rank=1,phase=backward,layer=head,operator=mm,nth=3,element=900,bit=14",
            "iteration=4,rank=0,phase=optimizer,operator=copy_,nth=6,element=31,bit=14",
        ],
    ),
}
DEFAULT_SCENARIOS = set(SCENARIOS) - {"interleaved", "pipeline_and_data_parallel"}


@pytest.mark.parametrize(
    "scenario",
    [
        s if s in DEFAULT_SCENARIOS else pytest.param(s, marks=pytest.mark.acceptance)
        for s in SCENARIOS
    ],
)
def test_faults_cost_repeated_iterations_and_nothing_else(
    megatron, english: Path, tmp_path: Path, scenario: str
) -> None:
    name, flags, faults = SCENARIOS[scenario]
    run = recover(tmp_path, name, faults, flags=flags, english=english)
    assert run.summary["rollbacks"] > 0
    assert run.summary["injected"] == len(faults)


# --- every phase in every configuration ---------------------------------------

# Phase, operator, execution; an operator that a configuration does not have is left out below.
KINDS = [
    ("forward", "mm", "primary"),
    ("forward", "mm", "checker"),
    ("recompute", "mm", "primary"),
    ("recompute", "add", "primary"),
    ("backward", "mm", "primary"),
    ("backward", "mm", "checker"),
    ("backward", "sum", "primary"),
    ("accumulate", "add_", "primary"),
    ("accumulate", "add_", "checker"),
    ("clip", "linalg_vector_norm", "primary"),
    ("clip", "mul", "primary"),
    ("clip", "mul", "checker"),
    ("optimizer", "lerp_", "primary"),
    ("optimizer", "addcmul_", "checker"),
    ("optimizer", "addcdiv_", "primary"),
    ("optimizer", "copy_", "primary"),
    ("communication", "recv", "primary"),
    ("communication", "all_reduce", "primary"),
    ("communication", "all_gather", "primary"),
    ("communication", "reduce_scatter", "primary"),
    ("held", "checkpoint_input", "primary"),
]
CONFIGURATIONS = [
    "single_bf16",
    "pp2_full_recompute",
    "pp2_selective_recompute",
    "tp2",
    "tp2_sequence_parallel",
    "dp2_distributed_optimizer_bf16",
    "dp2_overlap",
    "interleaved_pp2",
    "dropout_full_recompute",
    "pp2_tp2",
    "pp2_dp2",
    "llama",
]


def has(configuration: str, phase: str, operator: str) -> bool:
    """Whether a configuration executes that operator in that phase at all."""
    case = CASES[configuration]
    if phase in ("recompute", "held"):
        return "--recompute-granularity full" in case.flags
    if (phase, operator) == ("optimizer", "copy_"):
        return "--bf16" in case.flags
    if operator == "recv":
        return "--pipeline" in case.flags
    if operator == "all_reduce":
        return case.world_size > 1
    if operator in ("all_gather", "reduce_scatter"):
        return "--sequence-parallel" in case.flags or "--use-distributed" in case.flags
    return True


@pytest.mark.acceptance
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_every_phase_in_every_configuration(
    megatron, english: Path, tmp_path: Path, configuration: str, kind: tuple[str, str, str]
) -> None:
    phase, operator, execution = kind
    if not has(configuration, phase, operator):
        pytest.skip("this configuration has no such operator")
    width = 16 if "--bf16" in CASES[configuration].flags and phase != "optimizer" else 32
    where = f"phase={phase},operator={operator},execution={execution}"
    # First and last rank, all kinds of bits: sign, exponent, mantissa.
    first, last = 0, CASES[configuration].world_size - 1
    faults = [
        f"iteration=1,rank={first},{where},nth=1,element=3,bit={width - 2}",
        f"iteration=2,rank={last},{where},nth=2,element=71,bit=0",
        f"iteration=3,rank={first},{where},nth=1,element=900,bit={width - 1}",
        f"iteration=4,rank={last},{where},nth=2,element=12,bit={width // 2}",
    ]
    if operator in ("recv", "reduce_scatter", "copy_"):
        # Some configurations have but one an iteration.
        faults = [fault.replace("nth=2", "nth=1") for fault in faults]
    if (configuration, operator) == ("dp2_overlap", "all_gather"):
        faults.pop(0)  # nothing is gathered before the second iteration
    # A norm below the limit would leave nothing to do for the clipping.
    flags = "--clip-grad 0.1" if phase == "clip" else ""
    recover(tmp_path, configuration, faults, flags=flags, english=english)


PATTERNS = ["swap", "shift", "burst", "negate"]


@pytest.mark.acceptance
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("configuration", ["pp2_full_recompute", "dp2_overlap", "llama"])
def test_wrong_elements_in_numbers(
    megatron, english: Path, tmp_path: Path, configuration: str, pattern: str
) -> None:
    phases = ["forward", "backward", "accumulate", "optimizer"]
    faults = [
        f"iteration={i + 1},rank={i % 2},phase={phase},operator={operator},nth={i + 3},"
        f"pattern={pattern},element={10 * i},bit=7"
        for i, (phase, operator) in enumerate(zip(phases, ["mm", "mm", "add_", "lerp_"]))
    ]
    recover(tmp_path, configuration, faults, english=english)


@pytest.mark.acceptance
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("configuration", ["pp2_full_recompute", "tp2_sequence_parallel", "llama"])
def test_random_faults(
    megatron, english: Path, tmp_path: Path, configuration: str, seed: int
) -> None:
    """About one in ten thousand operators; more than one may hit the same attempt."""
    case = CASES[configuration]
    argv = case.argv(english)
    faults = (f"random,rate=1e-4,seed={seed}",)
    run = protected(argv, case.world_size, tmp_path, inject=faults, max_rollbacks=10)
    assert_same_training(run, unprotected(argv, case.world_size))
    attempts = {(f["iteration"], f["attempt"]) for f in run.faults}
    reported = {(m["iteration"], m["attempt"]) for m in run.of_kind("mismatch")}
    assert attempts <= reported


# --- NaN and Inf --------------------------------------------------------------

# The bits that make a token's loss, between 4 and 8, a NaN: all of the exponent that are not set.
NAN_LOSS = [
    f"iteration={iteration},rank=1,phase=forward,layer=head,operator=log,element=4,bit={bit}"
    for iteration in (1, 3)
    for bit in (24, 25, 26, 27, 28, 29)
]


@pytest.mark.parametrize(
    "flags",
    ["", pytest.param("--rerun-mode disabled", marks=pytest.mark.acceptance)],
    ids=["megatron_checks_for_nan", "rerun_disabled"],
)
def test_a_fault_that_makes_nan(megatron, tmp_path: Path, flags: str) -> None:
    faults = [
        # Huge values in the hidden state, in weights' gradients and in the gathered norm.
        "iteration=2,rank=0,phase=forward,layer=1,operator=native_layer_norm,bit=30",
        "iteration=2,rank=1,attempt=2,phase=backward,layer=4,operator=mm,bit=30",
        "iteration=4,rank=1,phase=communication,operator=all_reduce,nth=1,bit=30",
        *NAN_LOSS,
    ]
    run = recover(tmp_path, "pp2_full_recompute", faults, flags=flags)
    assert run.summary["iterations"] == 4


# --- parameters that are gathered ---------------------------------------------


@pytest.mark.parametrize(
    "name, iteration, save",
    [
        pytest.param("dp2_distributed_optimizer_bf16", 2, False, marks=pytest.mark.acceptance),
        ("dp2_distributed_optimizer_bf16", 4, True),
        pytest.param("dp2_overlap", 3, False, marks=pytest.mark.acceptance),
        pytest.param("dp2_overlap", 4, False, marks=pytest.mark.acceptance),
        ("dp2_overlap", 2, True),
    ],
)
def test_gathered_parameters(
    megatron, tmp_path: Path, name: str, iteration: int, save: bool
) -> None:
    """What arrived wrong is gathered again; a checkpoint saved right after it is right."""
    argv = CASES[name].argv()
    expected = unprotected(argv, 2)
    folder = tmp_path / "saved"
    flags = [*argv, "--save", str(folder), "--save-interval", "2"] if save else argv
    faults = tuple(
        f"iteration={iteration},rank={rank},phase=communication,operator=all_gather,"
        f"nth={nth},element={1000 * nth},bit={bit}"
        for rank, nth, bit in ((0, 1, 14), (1, 2, 3))
    )
    run = protected(flags, 2, tmp_path / "events", inject=faults)
    assert_same_training(run, expected)
    assert_all_reported(run)
    if save:
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        resumed = unprotected([*flags, "--load", str(folder)], 2)
        assert [bits_[1:] for bits_ in bits(resumed)] == [bits_[1:] for bits_ in bits(expected)]
