# shellcheck shell=bash
# What the recipes' train.sh have in common; each of them sources this file and calls `train`.
#
# The caller sets
#   MODEL     array: Megatron flags of the model's shape, without its vocabulary
#   VOCAB     size of the vocabulary
#   SMOKE     array: the same flags again with small sizes; the last one given counts
#   SMOKE_RANKS, SMOKE_VOCAB
# and has layout() set, for $memory (GB of one GPU), NODES and LAYOUT (array of flags).

GPUS_PER_NODE=8

# Everything that the models share, and that has no size.
TRAINING=(
    --transformer-impl transformer_engine --bf16 --deterministic-mode
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --group-query-attention
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    # The recompute is the second execution of the forward: protection costs least with it.
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 1000
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 2
    --sparetrain --sparetrain-mode full
)

usage() {
    cat <<END
usage: train.sh MEMORY [--smoke] [--print] [FLAG …]

  MEMORY   of one GPU in GB: $MEMORIES
  --smoke  the same with small sizes, on $SMOKE_RANKS CPU ranks of this machine
  --print  print the command line, one argument a line, and do nothing
  FLAG     more flags of Megatron or --sparetrain…; where one is given twice, the last one counts

environment (all optional)
  DATA_PATH, TOKENIZER_MODEL   indexed data set and Hugging Face tokenizer; default: mock data
  SAVE                         folder of checkpoints, written to and resumed from
  PRETRAIN_SCRIPT              entry script, such as Megatron-LM's pretrain_gpt.py
  MASTER_ADDR, MASTER_PORT, NODE_RANK, PYTHON
END
}

# train "MEMORY …" ARGUMENT …: runs this node's part of the training
train() {
    MEMORIES=$1
    shift
    memory=${1:-}
    if [[ -z $memory || " $MEMORIES " != *" $memory "* ]]; then
        [[ $memory == -h || $memory == --help ]] && { usage; exit 0; }
        { [[ -n $memory ]] && echo "error: no layout for ${memory} GB"; usage; } >&2
        exit 2
    fi
    shift
    local smoke='' print='' argument more=()
    for argument in "$@"; do
        case $argument in
            --smoke) smoke=1 ;;
            --print) print=1 ;;
            *) more+=("$argument") ;;
        esac
    done

    layout
    local examples ranks=$GPUS_PER_NODE vocab=${VOCAB:?}
    examples=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
    local sizes=()
    if [[ -n $smoke ]]; then
        NODES=1 ranks=$SMOKE_RANKS vocab=$SMOKE_VOCAB sizes=("${SMOKE[@]}")
        export SPARETRAIN_CPU=1 CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
    fi

    local data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$vocab")
    if [[ -n ${DATA_PATH:-} ]]; then
        : "${TOKENIZER_MODEL:?is the tokenizer of DATA_PATH}"
        data=(--data-path "$DATA_PATH" --split "99,1,0"
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
    fi
    local checkpoints=()
    if [[ -n ${SAVE:-} ]]; then
        checkpoints=(--save "$SAVE" --load "$SAVE" --save-interval 500)
    fi

    # Megatron's tensor parallelism counts on one queue; the others make kernels reproducible, and
    # are read by their libraries before Megatron has parsed --deterministic-mode.
    export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_ALGO=${NCCL_ALGO:-Ring}
    export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8
    export PYTHONPATH="${examples%/*}${PYTHONPATH:+:$PYTHONPATH}"

    local command=(
        "${PYTHON:-python}" -m torch.distributed.run
        --nnodes "$NODES" --nproc-per-node "$ranks"
        --node-rank "${NODE_RANK:-${SLURM_NODEID:-0}}"
        --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"
        -m sparetrain_megatron "${PRETRAIN_SCRIPT:-$examples/quickstart/pretrain_gpt.py}"
        "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${data[@]}" "${checkpoints[@]}"
        "${sizes[@]}" "${more[@]}"
    )
    if [[ -n $print ]]; then
        printf '%s\n' "${command[@]}"
    else
        exec "${command[@]}"
    fi
}
