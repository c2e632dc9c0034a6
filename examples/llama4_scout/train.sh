#!/usr/bin/env bash
# Llama-4-Scout (109B, 16 experts), protected, on 4 nodes of 8 GPUs; README.md explains. Run it on
# every node:
#   MASTER_ADDR=node0 NODE_RANK=0 ./train.sh 94
# or try it on a CPU:
#   ./train.sh 94 --smoke
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../recipe.sh"

MODEL=(
    --num-layers 48 --hidden-size 5120 --ffn-hidden-size 8192
    --num-attention-heads 40 --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000
    --make-vocab-size-divisible-by 16
    # Every fourth layer has no position embedding (NoPE).
    --no-rope-freq 4 --qk-l2-norm
    # Every layer: 16 experts, of which a token takes one, and one that all tokens take.
    --num-experts 16 --moe-ffn-hidden-size 8192 --moe-shared-expert-intermediate-size 8192
    --moe-router-topk 1 --moe-router-score-function sigmoid --moe-apply-probs-on-input
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
VOCAB=202048

layout() {
    NODES=4
    case $memory in
        94) LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
            --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
            --micro-batch-size 1 --global-batch-size 32
        ) ;;
        # Half as many stages and twice as many replicas: smaller bubbles, more memory.
        141) LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2
            --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
            --micro-batch-size 1 --global-batch-size 32
        ) ;;
    esac
}

SMOKE=(
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 64
    --num-attention-heads 4 --num-query-groups 2 --kv-channels 16
    --seq-length 32 --max-position-embeddings 32
    --num-experts 4 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --expert-model-parallel-size 2
    --micro-batch-size 1 --global-batch-size 4 --train-iters 7
)
SMOKE_RANKS=4 SMOKE_VOCAB=256

train '94 141' "$@"
