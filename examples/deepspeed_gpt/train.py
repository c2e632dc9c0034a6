"""Trains a small GPT on English text with DeepSpeed; protection is the JSON's "sparetrain" block.

    export DS_ACCELERATOR=cpu      # without a GPU
    cd examples/deepspeed_gpt
    torchrun --standalone --nproc-per-node 2 -m sparetrain_megatron train.py \
        --deepspeed --deepspeed_config ds_config.json

Nothing here knows of the protection. The text is that of Python's reference manual as ``pydoc``
shows it; every byte is a token.
"""

import argparse
import os
from pydoc_data.topics import topics

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Returns the loss; its layers are recomputed in the backward."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inputs, labels = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=ids.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def english() -> torch.Tensor:
    text = "\n".join(text for _, text in sorted(topics.items()))
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = Gpt(args.layers, args.width, args.heads, args.length)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    text = english()
    rank, micro_batch = torch.distributed.get_rank(), engine.train_micro_batch_size_per_gpu()
    generator = torch.Generator().manual_seed(100 + rank)
    for iteration in range(1, args.iterations + 1):
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            starts = torch.randint(len(text) - args.length - 1, (micro_batch,), generator=generator)
            ids = torch.stack([text[s : s + args.length + 1] for s in starts.tolist()])
            loss = engine(ids.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if rank == 0:
            print(
                f"iteration {iteration}: loss {torch.stack(losses).mean().item():.6f}", flush=True
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
