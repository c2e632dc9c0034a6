"""Small helpers of the core's tests: an engine of its own, and models without any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sparetrain_megatron.dmr.engine import Engine
from sparetrain_megatron.dmr.mismatch import Mismatch
from sparetrain_megatron.faults.injector import Injector
from sparetrain_megatron.faults.spec import FaultSpec
from sparetrain_megatron.report.summary import Statistics


class Watched(Engine):
    """An engine that keeps what it found.

    Args:
        specs: Faults, as ``--sparetrain-inject`` takes them.
        options: Of :class:`Engine`.
    """

    def __init__(self, *specs: str, **options: Any) -> None:
        self.found: list[Mismatch] = []
        self.counters = Statistics()
        injector = Injector([FaultSpec.parse(spec) for spec in specs], 0)
        super().__init__(self.counters, injector, on_mismatch=self.found.append, **options)
        self.learns = True  # tests look at the tapes that have ended
        self.begin(1, 1)

    def protect(self, call: Callable[[], Any]) -> Any:
        """Runs a call under protection, and a verdict after it."""
        with self.active():
            result = call()
        self.outcome = self.verdict()
        return result

    @property
    def operators(self) -> list[str]:
        """Short names of the operators that mismatched."""
        return [mismatch.operator for mismatch in self.found]


class Block(torch.nn.Module):
    """Attention with dropout and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        x = x + torch.nn.functional.dropout(weights, 0.1, self.training) @ v
        return x + torch.nn.functional.dropout(self.mlp(x), 0.1, self.training)


class Model(torch.nn.Module):
    """Embedding, blocks (checkpointed if asked for) and a head tied to nothing."""

    def __init__(self, width: int = 16, blocks: int = 2, recompute: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 32)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def train(
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    recompute: bool = True,
    around: Callable[[Callable[[], Any]], Any] = lambda step: step(),
) -> dict[str, torch.Tensor]:
    """Trains a model from a fixed seed; each step is run by ``around``.

    Returns:
        Parameters, optimizer state, losses and the generator's state at the end, by name.
    """
    torch.manual_seed(7)
    model = Model(recompute=recompute).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[torch.Tensor] = []

    def step() -> None:
        tokens = torch.randint(32, (2, 9))
        optimizer.zero_grad(set_to_none=False)
        for half in tokens.split(1):  # two microbatches: gradients are accumulated
            logits = model(half[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), half[0, 1:])
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for _ in range(steps):
        around(step)
    result = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for i, state in enumerate(optimizer.state.values()):
        result.update((f"{name} {i}", value.clone()) for name, value in state.items())
    return {**result, "losses": torch.stack(losses), "generator": torch.get_rng_state()}


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names under which two results hold different bytes."""
    assert a.keys() == b.keys()
    return [name for name in a if not _same(a[name], b[name])]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def checks(counters: Statistics, methods: Sequence[str] = ("naive", "piggyback")) -> int:
    """Number of operators that were checked."""
    return sum(sum(counters.checks.get(method, {}).values()) for method in methods)
