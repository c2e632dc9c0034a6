"""Megatron with Transformer Engine's layers: protected, it trains the same and recovers."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from tests import protection
from tests.megatron_cases import CASES
from tests.protection import (
    assert_all_reported,
    assert_same_training,
    protected,
    unprotected,
)
from tests.te import NEWEST, RELEASES

pytestmark = pytest.mark.usefixtures("megatron")

_TE = "--transformer-impl transformer_engine --bf16"
_DELAYED = "--fp8-format hybrid --fp8-recipe delayed"
_TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_LLAMA = """
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights
"""
_EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --moe-aux-loss-coeff 0.01 --disable-bias-linear
"""
_SHORT = "--train-iters 3 --num-layers 2"


@dataclasses.dataclass(frozen=True)
class Case:
    """Flags beside those of Transformer Engine, and how many ranks."""

    flags: str
    ranks: int = 1

    def argv(self) -> list[str]:
        return [*CASES["single_fp32"].argv(), *f"{_TE} {_SHORT} {self.flags}".split()]


_CASES = {
    "bf16": Case(_LLAMA),
    "delayed": Case(_DELAYED),
    "tensorwise": Case(f"{_LLAMA} {_TENSORWISE}"),
    "delayed_recompute": Case(f"{_LLAMA} {_DELAYED} {_FULL}"),
    "tensorwise_recompute": Case(f"{_TENSORWISE} {_FULL}"),
    "experts_delayed": Case(f"{_EXPERTS} {_DELAYED}"),
    "experts_delayed_recompute": Case(f"{_EXPERTS} {_DELAYED} {_FULL}"),
    "delayed_clipped": Case(f"{_DELAYED} --clip-grad 0.01"),
    "delayed_dp2": Case(f"{_DELAYED} --use-distributed-optimizer", 2),
    "delayed_pp2_recompute": Case(f"{_DELAYED} {_FULL} --pipeline-model-parallel-size 2", 2),
    "delayed_tp2": Case(f"{_DELAYED} --tensor-model-parallel-size 2 --sequence-parallel", 2),
    "experts_ep2": Case(f"{_EXPERTS} {_DELAYED} --expert-model-parallel-size 2", 2),
    "experts_ep2_recompute": Case(
        f"{_EXPERTS} {_DELAYED} {_FULL} --expert-model-parallel-size 2", 2
    ),
    "experts_ep2_tensorwise": Case(
        f"{_EXPERTS} {_TENSORWISE} {_FULL} --expert-model-parallel-size 2", 2
    ),
    "experts_ep2_bf16": Case(f"{_EXPERTS} {_FULL} --expert-model-parallel-size 2", 2),
}


def defer_everything(rank: int) -> None:
    """An ``also`` hook: whatever can be is recorded and executed again later."""
    from sparetrain_megatron.dmr.strategy import Everything

    protection._attached.engine.strategy = Everything(rest=True)


def defer_and_watch(rank):
    """An ``also`` hook: everything is deferred, and it is counted what is replayed in which window,
    by what that waits for; the empty name stands for outside of windows."""
    from sparetrain_megatron.dmr import tape

    defer_everything(rank)
    engine = protection._attached.engine
    counts = engine.replayed = collections.Counter()
    # Within one machine windows are so short that no grouped product would be begun in time.
    engine.collectives.windows.like = lambda key, size: []
    opens, closes, execute = engine.window_opens, engine.window_closes, tape.execute
    window = [""]

    def window_opens(kind, name):
        window[0] = name
        opens(kind, name)

    def window_closes():
        window[0] = ""
        closes()

    def watched(entry, *args):
        counts[window[0], entry.operator.name] += 1
        execute(entry, *args)

    engine.window_opens, engine.window_closes, tape.execute = window_opens, window_closes, watched


def replayed(rank):
    """An ``after`` hook: faults, and what :func:`defer_and_watch` has counted."""
    return protection._attached.injector.records, protection._attached.engine.replayed


def run(case, directory, te=NEWEST, **options):
    return protected(case.argv(), case.ranks, directory, te=te, **options)


def expected(case, te=NEWEST):
    return unprotected(case.argv(), case.ranks, te=te)


def _sample(names, *usual):
    """All names; those that are not usual belong to the acceptance run."""
    return [n if n in usual else pytest.param(n, marks=pytest.mark.acceptance) for n in names]


@pytest.mark.parametrize("name", _sample(_CASES, "delayed_recompute"))
def test_transparent(name, tmp_path):
    case = _CASES[name]
    result = run(case, tmp_path)
    assert_same_training(result, expected(case))
    assert not result.of_kind("mismatch"), result.told()
    assert not result.summary["unprotected"]
    if "recompute" in name:
        assert result.summary["checks"]["piggyback"]["pure"] > 100


@pytest.mark.acceptance
@pytest.mark.parametrize("version", RELEASES[:-1])
def test_transparent_with_older_releases(version, tmp_path):
    case = _CASES["delayed_recompute"]
    result = run(case, tmp_path, te=version)
    assert_same_training(result, expected(case, te=version))
    assert not result.of_kind("mismatch"), result.told()


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ["delayed", "delayed_recompute", "experts_delayed"])
def test_transparent_when_deferred(name, tmp_path):
    case = _CASES[name]
    result = run(case, tmp_path, also=defer_everything)
    assert_same_training(result, expected(case))
    assert not result.of_kind("mismatch"), result.told()
    assert result.summary["checks"]["deferred"]["pure"] > 500


@pytest.mark.acceptance
def test_transparent_naive(tmp_path):
    case = _CASES["delayed_recompute"]
    result = run(case, tmp_path, mode="naive")
    assert_same_training(result, expected(case))
    assert not result.of_kind("mismatch"), result.told()


_FAULTS = {
    "gemm_forward": ("delayed", "phase=forward,operator=te.generic_gemm,nth=3,bit=6"),
    "gemm_backward": ("delayed", "phase=backward,operator=te.generic_gemm,nth=5,bit=6"),
    "weight_gradient": ("delayed", "phase=backward,operator=te.generic_gemm,nth=2,bit=1"),
    "quantize": ("delayed", "phase=forward,operator=te.quantize,nth=6,element=9,bit=2"),
    "amax": ("delayed", "phase=forward,operator=te.quantize,nth=6,output=2,bit=20"),
    "norm": ("delayed", "phase=forward,operator=te.layernorm_fwd,nth=2,element=5,bit=3"),
    "norm_backward": ("delayed", "phase=backward,operator=te.layernorm_bwd,bit=9"),
    "recompute": ("delayed_recompute", "phase=recompute,operator=te.rmsnorm_fwd,nth=2,bit=4"),
    "swiglu": ("delayed_recompute", "phase=forward,operator=silu,nth=2,bit=9"),
    "scales": ("delayed", "operator=te.fused_amax_and_scale_update_after_reduction,bit=22"),
    "current": ("tensorwise", "phase=forward,operator=te.quantize,nth=6,element=9,bit=2"),
    "grouped": ("experts_delayed", "phase=forward,operator=te.te_general_grouped_gemm,bit=9"),
    "grouped_backward": ("experts_delayed", "phase=backward,operator=te.te_general_grouped_gemm"),
    "grouped_ep2": ("experts_ep2", "rank=1,phase=forward,operator=te.te_general_grouped_gemm"),
    "split_quantize": ("experts_delayed", "phase=forward,operator=te.split_quantize,bit=4"),
    "norm_of_gradients": ("delayed", "phase=clip,operator=te.multi_tensor_l2norm,bit=25"),
    "scaling_of_gradients": (
        "delayed_clipped",
        "phase=clip,operator=te.multi_tensor_scale_tensor,bit=25",
    ),
    "optimizer": ("delayed", "phase=optimizer,operator=te.multi_tensor_adam,bit=22"),
}


@pytest.mark.parametrize("name", _sample(_FAULTS, "gemm_forward"))
def test_finds_a_fault_and_recovers(name, tmp_path):
    """Losses, weights, optimizer, scales and amax histories end as if nothing had happened."""
    case, fault = _FAULTS[name]
    result = run(_CASES[case], tmp_path, inject=[f"iteration=2,{fault}"])
    assert_same_training(result, expected(_CASES[case]))
    assert_all_reported(result)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ["gemm_forward", "quantize", "amax", "grouped"])
def test_finds_a_fault_when_deferred(name, tmp_path):
    case, fault = _FAULTS[name]
    spec = f"iteration=2,execution=checker,{fault}"
    result = run(_CASES[case], tmp_path, inject=[spec], also=defer_everything)
    assert_same_training(result, expected(_CASES[case]))
    assert result.of_kind("mismatch") and result.faults


@pytest.mark.acceptance
def test_first_iteration_begins_anew(tmp_path):
    """Scales and histories that the discarded attempt has made are as if it had not."""
    case = _CASES["delayed"]
    fault = "iteration=1,microbatch=4,phase=backward,operator=te.generic_gemm,bit=6"
    result = run(case, tmp_path, inject=[fault])
    assert_same_training(result, expected(case))
    assert_all_reported(result)


GROUPED = "te.te_general_grouped_gemm"


@pytest.mark.parametrize(
    "name",
    _sample(
        ["experts_ep2_bf16", "experts_ep2_recompute", "experts_ep2_tensorwise", "experts_ep2"],
        "experts_ep2_recompute",
    ),
)
def test_grouped_products_wait_for_the_all_to_alls_of_dispatch_and_combine(name, tmp_path):
    case = _CASES[name]
    result = run(case, tmp_path, also=defer_and_watch, after=replayed)
    counts = [r.value[1] for r in result.ranks]
    assert_same_training(result, expected(case))
    assert not result.of_kind("mismatch"), result.told()
    for rank in counts:
        assert rank["all_to_all", GROUPED] > 0, rank
        every = sum(number for (_, operator), number in rank.items() if operator == GROUPED)
        # Four in the backward of each of two layers, two microbatches, three iterations.
        assert every >= 4 * 2 * 2 * 3


@pytest.mark.acceptance
@pytest.mark.parametrize("phase", ["recompute", "backward"])
@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_finds_a_fault_in_a_grouped_product_that_waits(phase, execution, tmp_path):
    case = _CASES["experts_ep2_recompute"]
    fault = f"iteration=2,rank=1,phase={phase},execution={execution},operator={GROUPED},nth=2,bit=9"
    result = run(case, tmp_path, inject=[fault], also=defer_and_watch, after=replayed)
    for rank in result.ranks:
        rank.value = rank.value[0]
    assert_same_training(result, expected(case))
    assert result.faults
    assert {m["rank"] for m in result.of_kind("mismatch")} >= {1}
    assert result.summary["rollbacks"] == 1
