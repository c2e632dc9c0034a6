"""Hugging Face's Trainer with DeepSpeed, as a user's script: one import, and a block in the JSON.

    torchrun --nproc-per-node 2 -m tests.trainer_case DS_CONFIG.json RESULT_DIR

Trains a randomly initialised Llama for a few steps and leaves the logged losses and a digest of the
weights, a file a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset


class Random(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(128, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def main(config: str, results: Path) -> None:
    if "sparetrain" in json.loads(Path(config).read_text()):
        import sparetrain_megatron.deepspeed  # noqa: F401
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    # A helper that is not needed, and takes a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    set_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    arguments = TrainingArguments(
        output_dir=str(results / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        deepspeed=config,
        use_cpu=True,
        learning_rate=1e-3,
        gradient_checkpointing=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Random())
    trainer.train()
    digest = hashlib.sha256()
    for _, parameter in trainer.model_wrapped.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"losses": logged, "weights": digest.hexdigest()}
    (results / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
