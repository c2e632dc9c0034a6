"""Blocks that leave values elsewhere than in their outputs are no segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparetrain_megatron.dmr.block import Block, Blocks
from sparetrain_megatron.dmr.strategy import Everything
from tests.unit.protected import Watched

kept: dict[str, Any] = {}
buffer = torch.zeros(4)


def plain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1)  # its own value
    return y.relu().view(2, 2)


def keeps(x: torch.Tensor) -> torch.Tensor:
    kept["loss"] = x.square().mean()
    return plain(x)


def writes(x: torch.Tensor) -> torch.Tensor:
    buffer.add_(x)
    return plain(x)


def checkpointed(engine: Watched, blocks: Blocks, function: Callable[..., Any]) -> None:
    """A forward without and a recompute with gradients, as reentrant checkpointing has them."""
    with engine.active():
        blocks.begin_microbatch()
        block = blocks.block(function)
        assert isinstance(block, Block)
        x = torch.arange(4.0)
        with torch.no_grad():
            block(x)
        with engine.between_tapes():
            block(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize("function, closed", [(plain, True), (keeps, False), (writes, False)])
def test_first_forward_tells(function: Callable[..., Any], closed: bool) -> None:
    engine = Watched()
    engine.strategy = Everything(rest=False)
    blocks = Blocks(engine, binds=False, watches=True)
    checkpointed(engine, blocks, function)
    assert blocks.closed == {(0, 0): closed}
    assert engine.observer is None


def test_a_fault_in_what_is_kept_is_found() -> None:
    """Once the block is known, in the forward that leaves it."""
    spec = "iteration=1,phase=forward,operator=mean,nth=2,bit=20"
    engine = Watched(spec)
    engine.strategy = Everything(rest=False)
    blocks = Blocks(engine, binds=False, watches=True)
    for _ in range(2):
        checkpointed(engine, blocks, keeps)
    assert engine.verdict().dirty
    assert engine.operators == ["mean"]


def test_a_closed_block_becomes_a_segment() -> None:
    engine = Watched()
    engine.strategy = Everything(rest=False)
    blocks = Blocks(engine, binds=False, watches=True)
    for _ in range(2):
        checkpointed(engine, blocks, plain)
    assert not engine.verdict().dirty
    assert sum(engine.counters.checks["deferred"].values()) > 3
