"""The parallel layout: how a model is cut over GPUs, and the memory that each stage needs."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparetrain_megatron.errors import UsageError

from .machine import GIB, Machine
from .model import Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees and batch.

    Attributes:
        virtual: Chunks of layers a stage (interleaved schedule); 1: plain 1F1B.
        expert: Expert parallel degree, over ranks of the same stage (tensor ranks included).
        global_batch: Sequences a step.
        micro_batch: Sequences a microbatch.
        recompute: Whether layers are checkpointed and recomputed as a whole.
        distribute_saved: Whether checkpoints are cut over the tensor-parallel ranks where there is
            no sequence parallelism to do it (Megatron's `--distribute-saved-activations`).
        distributed_optimizer: Whether the optimizer's state is cut over the data-parallel ranks.
        reserve: Bytes that the context, NCCL's buffers and fragmentation take.
    """

    tensor: int = 8
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    global_batch: int = 16
    micro_batch: int = 1
    recompute: bool = True
    sequence_parallel: bool = True
    distribute_saved: bool = False
    distributed_optimizer: bool = True
    reserve: float = 5 * GIB

    @property
    def gpus(self) -> int:
        """Of the whole job."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def microbatches(self) -> int:
        """A step, on each rank."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def sharded(self) -> int:
        """Ranks over which activations between the tensor-parallel regions are cut."""
        return self.tensor if self.sequence_parallel else 1

    def stage_layers(self, shape: Shape) -> list[list[int]]:
        """Layers (from 1) of each virtual stage, in the order in which a microbatch passes.

        Entry `chunk * pipeline + stage` is a stage's chunk. Where they don't divide evenly, the
        first ones have one more, but for the last ones, which have the head.
        """
        pieces = self.pipeline * self.virtual
        each, more = divmod(shape.layers, pieces)
        found, at = [], 1
        for piece in range(pieces):
            count = each + (piece < more)
            found.append(list(range(at, at + count)))
            at += count
        return found

    def validate(self, shape: Shape, machine: Machine) -> None:
        """Checks that the model can be cut so.

        Raises:
            UsageError: Names every degree that doesn't fit, and why.
        """
        wrong: list[str] = []
        degrees = ("tensor", "pipeline", "virtual", "data", "expert", "context", "micro_batch")
        wrong += [
            f"{name} {getattr(self, name)}: should be at least 1"
            for name in (*degrees, "global_batch")
            if getattr(self, name) < 1
        ]
        if wrong:
            raise UsageError("layout: " + "; ".join(wrong))
        if shape.heads % self.tensor:
            wrong.append(f"tensor {self.tensor} doesn't divide {shape.heads} attention heads")
        if shape.kv_heads % self.tensor and self.tensor % shape.kv_heads:
            wrong.append(f"tensor {self.tensor} doesn't go with {shape.kv_heads} KV heads")
        if (shape.shared or shape.ffn) % self.tensor:
            wrong.append(f"tensor {self.tensor} doesn't divide the MLP")
        if self.pipeline * self.virtual > shape.layers:
            wrong.append(f"{self.pipeline} x {self.virtual} stages for {shape.layers} layers")
        if self.virtual > 1 and self.pipeline < 2:
            wrong.append("virtual stages need a pipeline")
        if self.virtual > 1 and shape.layers % (self.pipeline * self.virtual):
            wrong.append(f"interleaving needs {shape.layers} layers to divide evenly")
        if self.global_batch % (self.data * self.micro_batch):
            wrong.append(
                f"global batch {self.global_batch} is no multiple of data {self.data} x "
                f"micro batch {self.micro_batch}"
            )
        elif self.virtual > 1 and self.microbatches % self.pipeline:
            wrong.append(
                f"interleaving needs {self.microbatches} microbatches to be a multiple of "
                f"{self.pipeline} stages"
            )
        if shape.sequence % (self.context * self.sharded):
            wrong.append(f"sequence {shape.sequence} doesn't divide over its ranks")
        if self.expert > 1 and not shape.experts:
            wrong.append(f"expert {self.expert}: the model has no experts")
        elif shape.experts and shape.experts % self.expert:
            wrong.append(f"expert {self.expert} doesn't divide {shape.experts} experts")
        if self.gpus // self.pipeline % self.expert:
            wrong.append(
                f"expert {self.expert} doesn't divide the {self.gpus // self.pipeline} ranks of a "
                "stage"
            )
        if self.tensor > machine.per_node:
            wrong.append(f"tensor {self.tensor}: a node has {machine.per_node} GPUs")
        if wrong:
            raise UsageError("layout: " + "; ".join(wrong))

    def describe(self) -> dict[str, Any]:
        """Plain values, for identities and reports."""
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual": self.virtual,
            "data": self.data,
            "expert": self.expert,
            "context": self.context,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "sequence_parallel": self.sequence_parallel,
            "distribute_saved": self.distribute_saved,
            "distributed_optimizer": self.distributed_optimizer,
            "gpus": self.gpus,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on a GPU of one stage.

    Attributes:
        weights: Parameters in BF16 and gradients in FP32.
        optimizer: Master copy and Adam's two moments, FP32.
        held: Kept of one microbatch from its forward to its backward, a layer.
        working: The most that a layer, the head or a communication needs in passing.
        reserve: Context, buffers, fragmentation.
        parameters: On this GPU.
        updated: Parameters that this GPU's optimizer updates.
    """

    weights: float
    optimizer: float
    held: float
    working: float
    reserve: float
    parameters: float
    updated: float

    @property
    def static(self) -> float:
        """What is there throughout."""
        return self.weights + self.optimizer + self.reserve


WEIGHT_BYTES = 2 + 4  # BF16 parameter, FP32 gradient
OPTIMIZER_BYTES = 12  # FP32 master and two moments


def stage_memory(shape: Shape, layout: Layout, stage: int) -> StageMemory:
    """Memory of one pipeline stage."""
    layers = layout.stage_layers(shape)
    mine = [n for i in range(layout.virtual) for n in layers[i * layout.pipeline + stage]]
    first, last = stage == 0, stage == layout.pipeline - 1
    dense = len(mine) * shape.dense_parameters / layout.tensor
    tables = (first + (last and not (shape.tied and first))) * shape.table_parameters
    dense += tables / layout.tensor
    experts = len(mine) * shape.expert_parameters / layout.expert
    shards = layout.data * layout.context if layout.distributed_optimizer else 1
    expert_replicas = layout.tensor * layout.data * layout.context / layout.expert
    expert_shards = max(1.0, expert_replicas) if layout.distributed_optimizer else 1
    updated = dense / shards + experts / expert_shards
    tokens = shape.sequence // layout.context * layout.micro_batch
    row = 2 * tokens * shape.hidden
    width = 2 * tokens * ((shape.up + 1) * (shape.shared or shape.ffn)) / layout.tensor
    attention = 2 * tokens * (2 * shape.hidden + 2 * shape.kv) / layout.tensor
    routed = (
        2 * tokens * shape.topk / layout.tensor * ((shape.up + 1) * shape.ffn + 2 * shape.hidden)
    )
    full = 4 * row / layout.sharded + 2 * row + width + attention + (routed if shape.experts else 0)
    checkpoint = row / (layout.tensor if layout.distribute_saved else layout.sharded)
    held = checkpoint if layout.recompute else full
    logits = tokens * shape.vocabulary / layout.tensor * (2 + 4 + 4) if last else 0
    # Activations of a layer, and the gradients of the largest of them.
    working = max(2 * full, logits)
    return StageMemory(
        weights=WEIGHT_BYTES * (dense + experts),
        optimizer=OPTIMIZER_BYTES * updated,
        held=held,
        working=working,
        reserve=layout.reserve,
        parameters=dense + experts,
        updated=updated,
    )
