"""The Megatron configurations in which protection has to be invisible, as data.

All are tiny: four layers of width 64, four microbatches of two sequences of 64 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_COMMON = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 4
    --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 8
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0
"""
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_MOE = f"""
    --num-layers 2 --disable-bias-linear --moe-ffn-hidden-size 96 {_FULL_RECOMPUTE}
"""
_ALLTOALL = "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
_ALLGATHER = "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2"
_TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax"
_EXPERT_BIAS = """
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-2 --moe-router-load-balancing-type none
"""
_LLAMA = """
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights
"""


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        name: Short name, also the test's id.
        world_size: Number of ranks.
        flags: Megatron flags beside the common ones.
        english: Whether it trains on the English data set instead of mock data.
        dropout: Whether Megatron's default dropout of 0.1 stays.
    """

    name: str
    world_size: int
    flags: str = ""
    english: bool = False
    dropout: bool = False

    def argv(self, english: Path | None = None) -> list[str]:
        """All flags of the entry script.

        Args:
            english: Prefix of the English data set; needed if the case trains on it.
        """
        text = " ".join((_COMMON, "" if self.dropout else _NO_DROPOUT, self.flags))
        if not self.english:
            return [*text.split(), "--mock-data"]
        assert english is not None, f"{self.name} trains on the English data set"
        cache = ["--data-cache-path", f"{english}-cache"]
        return [*text.split(), "--data-path", str(english), "--split", "90,5,5", *cache]


_PP2 = "--pipeline-model-parallel-size 2"
_TP2 = "--tensor-model-parallel-size 2"

CASES = {
    case.name: case
    for case in (
        Case("single_fp32", 1),
        Case("single_bf16", 1, "--bf16"),
        Case("pp2", 2, _PP2),
        Case("pp2_full_recompute", 2, f"{_PP2} {_FULL_RECOMPUTE}"),
        Case(
            "pp2_selective_recompute",
            2,
            f"{_PP2} --recompute-granularity selective --recompute-modules core_attn",
        ),
        Case(
            "pp2_selective_layernorm",
            2,
            f"{_PP2} --recompute-granularity selective --recompute-modules core_attn layernorm",
        ),
        Case("tp2", 2, _TP2),
        Case("tp2_sequence_parallel", 2, f"{_TP2} --sequence-parallel"),
        Case("dp2_distributed_optimizer_bf16", 2, "--use-distributed-optimizer --bf16"),
        Case(
            "dp2_overlap",
            2,
            "--use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather",
        ),
        Case(
            "interleaved_pp2",
            2,
            f"{_PP2} --num-virtual-stages-per-pipeline-rank 2 {_FULL_RECOMPUTE}",
        ),
        Case("dropout_full_recompute", 1, _FULL_RECOMPUTE, dropout=True),
        Case("pp2_tp2", 4, f"{_PP2} {_TP2}"),
        Case("pp2_dp2", 4, f"{_PP2} {_FULL_RECOMPUTE} --use-distributed-optimizer --bf16"),
        Case("llama", 2, f"{_PP2} {_LLAMA} {_FULL_RECOMPUTE} --bf16", english=True),
        Case(
            "moe_ep2",
            2,
            "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
            "--expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear",
        ),
        Case(
            "moe_top1_alltoall",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 8 {_TOP1} --moe-aux-loss-coeff 0.01",
        ),
        Case(
            "moe_top2_alltoall_bf16",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
            "--moe-z-loss-coeff 1e-3 --bf16 --use-distributed-optimizer",
        ),
        Case(
            "moe_top1_allgather_bf16",
            2,
            f"{_MOE} {_ALLGATHER} --num-experts 8 {_TOP1} --moe-aux-loss-coeff 0.01 "
            "--bf16 --use-distributed-optimizer",
        ),
        Case(
            "moe_top2_allgather",
            2,
            f"{_MOE} {_ALLGATHER} --num-experts 4 --moe-router-topk 2 "
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
        ),
        Case(
            "moe_shared_expert",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
            "--moe-shared-expert-intermediate-size 64",
        ),
        Case(
            "moe_shared_expert_overlap",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
            "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
        ),
        Case(
            "moe_expert_bias",
            2,
            f"{_MOE} {_ALLTOALL} {_EXPERT_BIAS} --num-experts 8 --moe-router-topk 2 --bf16 "
            "--use-distributed-optimizer",
        ),
        Case(
            "moe_global_aux_loss",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 4 --moe-router-topk 2 "
            "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
        ),
        Case(
            "moe_pp2_ep2",
            4,
            f"{_MOE} {_ALLTOALL} {_PP2} --num-experts 8 --moe-router-topk 2 "
            "--moe-aux-loss-coeff 0.01 --bf16 --use-distributed-optimizer",
        ),
        Case(
            "moe_tp2_ep2",
            4,
            f"{_MOE} {_ALLTOALL} {_TP2} --sequence-parallel --num-experts 4 --moe-router-topk 2 "
            "--moe-aux-loss-coeff 0.01 --bf16 --use-distributed-optimizer",
        ),
        Case(
            "moe_tp2_ep2_etp1",
            2,
            f"{_MOE} {_ALLTOALL} {_TP2} --sequence-parallel --expert-tensor-parallel-size 1 "
            "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01",
        ),
        Case(
            "moe_tp2_allgather",
            2,
            f"{_MOE} {_TP2} --sequence-parallel --moe-token-dispatcher-type allgather "
            "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01",
        ),
        Case(
            "moe_capacity",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
            "--moe-expert-capacity-factor 1.0 --bf16 --use-distributed-optimizer",
        ),
        Case(
            "moe_padded_capacity",
            2,
            f"{_MOE} {_ALLTOALL} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
            "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
        ),
        Case(
            "moe_no_recompute",
            2,
            f"{_MOE.replace(_FULL_RECOMPUTE, '')} {_ALLTOALL} --num-experts 4 "
            f"{_TOP1} --moe-aux-loss-coeff 0.01",
        ),
    )
}
