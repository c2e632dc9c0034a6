"""Pretrain a GPT with Megatron-Core: an entry script for people without a Megatron-LM checkout.

It takes Megatron's own flags, as Megatron-LM's pretrain_gpt.py does, and needs only the
megatron-core wheel (0.17 or later). Dense and mixture-of-experts models, both transformer
implementations, tensor, pipeline, data and expert parallelism; context parallelism and multi-token
prediction are left to Megatron-LM's script.

    torchrun --nproc-per-node 2 examples/quickstart/pretrain_gpt.py --num-layers 4 ... --mock-data
"""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments, get_args, get_tokenizer, pretrain
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# The wheel carries the compiled helper of the data sets but no Makefile to compile it with.
if not Path(dataset_utils.__file__).with_name("Makefile").exists():
    dataset_utils.compile_helpers = lambda: None


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Builds this rank's part of the model.

    Args:
        pre_process: Whether the part begins with the embedding.
        post_process: Whether it ends with the output layer.
        vp_stage: Index of the virtual pipeline stage, if there are any.
        config: The transformer's configuration; by default from the flags.
        pg_collection: Process groups; by default Megatron's global ones.

    Raises:
        SystemExit: A flag asks for what this script leaves to Megatron-LM's.
    """
    args = get_args()
    if args.context_parallel_size > 1:
        raise SystemExit("--context-parallel-size: this script does not split sequences")
    if args.mtp_num_layers:
        raise SystemExit("--mtp-num-layers: this script builds no multi-token prediction")
    config = config or arguments.core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator | None, vp_stage: int | None) -> dict[str, torch.Tensor]:
    """Reads the next microbatch on the first tensor-parallel rank and broadcasts it to the others.

    Returns:
        tokens, labels, loss_mask and position_ids, [b, s] each, and attention_mask, [b, 1, s, s];
        nothing on pipeline stages in the middle, which need none of it.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    data = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    fields = {
        torch.int64: ["tokens", "labels", "position_ids"],
        torch.float32: ["loss_mask"],
        torch.bool: ["attention_mask"] * get_args().create_attention_mask_in_dataloader,
    }
    batch = {}
    for dtype, names in fields.items():
        if names:
            batch.update(tensor_parallel.broadcast_data(names, data, dtype))
    return batch


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the losses of one microbatch.

    Args:
        loss_mask: [b, s], 0 where a token does not count.
        losses: [b, s] cross entropy.

    Returns:
        The sum, the number of tokens in it, and both together for the log.
    """
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * loss_mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator | None, model: Any) -> tuple[torch.Tensor, partial]:
    """Runs the model on the next microbatch; returns its output and the loss function for it."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Builds the train, validation and test data sets, with so many samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def reads_data() -> bool:
        first = mpu.get_tensor_model_parallel_rank() == 0
        return first and is_first_or_last_pipeline_stage(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()


# Every rank takes part in building, so that Megatron's builder can order who writes the index.
build_datasets.is_distributed = True


def main() -> None:
    """Trains as the flags say."""
    # 0.19 recommends a model configuration; a builder function is what all versions take.
    warnings.filterwarnings("ignore", message=r"\s*It is recommended to use a ModelConfig")
    training = {
        "train_valid_test_dataset_provider": build_datasets,
        "model_provider": build_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if not hasattr(arguments, "parse_and_validate_args"):  # 0.17 parses in pretrain()
        pretrain(**training)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args()
    pretrain(pretrain_cfg_container_from_args(args), **training)


if __name__ == "__main__":
    main()
