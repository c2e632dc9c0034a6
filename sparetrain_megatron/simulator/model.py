"""Shapes of models, and how many parameters they have."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from sparetrain_megatron.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped-query attention and gated MLPs; all layers alike.

    Attributes:
        ffn: Of the MLP, or of one expert.
        experts: Routed experts of every layer; 0: dense.
        topk: Experts that a token goes to.
        shared: Size of the shared expert.
        gated: Whether the MLP has a gate (SwiGLU).
        tied: Whether embedding and head share their weights.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int = 8192
    experts: int = 0
    topk: int = 1
    shared: int = 0
    gated: bool = True
    tied: bool = False

    @property
    def kv(self) -> int:
        """Columns of keys, or of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def up(self) -> int:
        """Matrices that go into the MLP: two with a gate."""
        return 2 if self.gated else 1

    @property
    def dense_parameters(self) -> int:
        """Of a layer, without routed experts."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv)
        width = self.shared if self.experts else self.ffn
        router = self.hidden * self.experts
        return attention + (self.up + 1) * self.hidden * width + router + 2 * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of a layer's routed experts."""
        return self.experts * (self.up + 1) * self.hidden * self.ffn

    @property
    def table_parameters(self) -> int:
        """Of the embedding, or of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        tables = self.table_parameters * (1 if self.tied else 2)
        return self.layers * (self.dense_parameters + self.expert_parameters) + tables


SHAPES = {
    "llama3-70b": Shape("llama3-70b", 80, 8192, 28672, 64, 8, 128256),
    "mistral-large": Shape("mistral-large", 88, 12288, 28672, 96, 8, 32768),
    "llama4-scout": Shape(
        "llama4-scout", 48, 5120, 8192, 40, 8, 202048, experts=16, topk=1, shared=8192
    ),
    "llama3-405b": Shape("llama3-405b", 126, 16384, 53248, 128, 8, 128256),
}


def shape(name: str) -> Shape:
    """A preset.

    Raises:
        UsageError: No such preset.
    """
    if name not in SHAPES:
        raise UsageError(f"--preset {name}: should be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def from_megatron(arguments: Sequence[str]) -> tuple[Shape, dict[str, int | bool]]:
    """Reads a Megatron argument list.

    Args:
        arguments: Megatron's flags, as given to its training script; others are ignored.

    Returns:
        The shape, and what the flags say about the layout (keywords of `Layout`).

    Raises:
        UsageError: A flag that is needed is missing, or no number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in (*_SHAPE_FLAGS, *_LAYOUT_FLAGS):
        parser.add_argument(f"--{flag}", type=int)
    for flag in ("swiglu", "untie-embeddings-and-output-weights", *_LAYOUT_SWITCHES):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--recompute-granularity")
    try:
        args, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(f"Megatron's arguments: {error}") from error
    values = {flag: getattr(args, flag.replace("-", "_")) for flag in _SHAPE_FLAGS}
    needed = ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
    missing = [flag for flag in needed if not values[flag]]
    if missing:
        raise UsageError("Megatron's arguments lack --" + ", --".join(missing))
    hidden, heads = values["hidden-size"], values["num-attention-heads"]
    ffn = values["moe-ffn-hidden-size"] or values["ffn-hidden-size"]
    vocabulary = values["padded-vocab-size"] or values["vocab-size"] or 51200
    found = Shape(
        name="from Megatron's arguments",
        layers=values["num-layers"],
        hidden=hidden,
        ffn=ffn or (4 * hidden * 2 // 3 // 64 * 64 if args.swiglu else 4 * hidden),
        heads=heads,
        kv_heads=values["num-query-groups"] or heads,
        vocabulary=vocabulary,
        sequence=values["seq-length"],
        experts=values["num-experts"] or 0,
        topk=values["moe-router-topk"] or 2,
        shared=values["moe-shared-expert-intermediate-size"] or 0,
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
    )
    layout: dict[str, int | bool] = {}
    for flag, name in _LAYOUT_FLAGS.items():
        value = getattr(args, flag.replace("-", "_"))
        if value is not None:
            layout[name] = value
    for flag, name in _LAYOUT_SWITCHES.items():
        if getattr(args, flag.replace("-", "_")):
            layout[name] = True
    layout["recompute"] = args.recompute_granularity == "full"
    return found, layout


_SHAPE_FLAGS = (
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "seq-length",
    "padded-vocab-size",
    "vocab-size",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
)
_LAYOUT_FLAGS = {
    "tensor-model-parallel-size": "tensor",
    "pipeline-model-parallel-size": "pipeline",
    "num-virtual-stages-per-pipeline-rank": "virtual",
    "expert-model-parallel-size": "expert",
    "context-parallel-size": "context",
    "global-batch-size": "global_batch",
    "micro-batch-size": "micro_batch",
}
_LAYOUT_SWITCHES = {
    "sequence-parallel": "sequence_parallel",
    "distribute-saved-activations": "distribute_saved",
    "use-distributed-optimizer": "distributed_optimizer",
}
