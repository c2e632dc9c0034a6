#!/usr/bin/env bash
# Llama-3-70B, protected, on nodes of 8 GPUs; README.md explains. Run it on every node:
#   MASTER_ADDR=node0 NODE_RANK=0 ./train.sh 94
# or try it on a CPU:
#   ./train.sh 94 --smoke
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../recipe.sh"

MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000
    --make-vocab-size-divisible-by 16
)
VOCAB=128256

layout() {
    case $memory in
        # Three nodes, and 80 layers are no multiple of three: the last stage has the head as well.
        80) NODES=3 LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 3
            --pipeline-model-parallel-layout 'Et*27|t*27|t*26L'
            --micro-batch-size 1 --global-batch-size 32
        ) ;;
        94) NODES=4 LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2
            --micro-batch-size 1 --global-batch-size 32
        ) ;;
        141) NODES=4 LAYOUT=(
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2
            --micro-batch-size 2 --global-batch-size 32
        ) ;;
    esac
    if [[ $memory == 80 ]]; then
        SMOKE_RANKS=3
        SMOKE+=(
            --tensor-model-parallel-size 1 --pipeline-model-parallel-layout 'Et*2|t*2|tL'
            --num-layers 5
        )
    fi
}

SMOKE=(
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128
    --num-attention-heads 4 --num-query-groups 2 --kv-channels 16
    --seq-length 32 --max-position-embeddings 32 --tensor-model-parallel-size 2
    --micro-batch-size 1 --global-batch-size 4 --train-iters 7
)
SMOKE_RANKS=4 SMOKE_VOCAB=256

train '80 94 141' "$@"
