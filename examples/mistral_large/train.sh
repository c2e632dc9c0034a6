#!/usr/bin/env bash
# Mistral-Large 2 (123B), protected, on 4 nodes of 8 GPUs; README.md explains. Run it on every node:
#   MASTER_ADDR=node0 NODE_RANK=0 ./train.sh 94
# or try it on a CPU:
#   ./train.sh 94 --smoke
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../recipe.sh"

MODEL=(
    --num-layers 88 --hidden-size 12288 --ffn-hidden-size 28672
    --num-attention-heads 96 --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --rotary-base 1000000
    --make-vocab-size-divisible-by 16
)
VOCAB=32768

layout() {
    NODES=4
    case $memory in
        80 | 94) LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
            --micro-batch-size 1 --global-batch-size 32
        ) ;;
        # Half as many stages and twice as many replicas: smaller bubbles, more memory.
        141) LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2
            --micro-batch-size 1 --global-batch-size 32
        ) ;;
    esac
}

SMOKE=(
    --num-layers 4 --hidden-size 96 --ffn-hidden-size 224
    --num-attention-heads 6 --num-query-groups 2 --kv-channels 16
    --seq-length 32 --max-position-embeddings 32
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
    --micro-batch-size 1 --global-batch-size 4 --train-iters 7
)
SMOKE_RANKS=2 SMOKE_VOCAB=256

train '80 94 141' "$@"
