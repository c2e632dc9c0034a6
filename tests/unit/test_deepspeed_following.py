"""Losses added up before the verdict, and losses that can't be followed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def follow(loss: torch.Tensor, use: Any) -> Any:
    """Has a loop use a loss; the follower."""
    from sparetrain_megatron.deepspeed.following import Follower

    follower = Follower()
    follower.follow([loss])
    with follower:
        use(loss)
    return follower


def test_a_sum_is_set_right() -> None:
    total, loss = torch.tensor(1.0), torch.tensor(5.0)
    kept: list[torch.Tensor] = []

    def use(value: torch.Tensor) -> None:
        nonlocal total
        total += value.detach() / 2  # a tensor of the loop's
        kept.append(total * 3)  # and what comes of it

    follower = follow(loss, use)
    assert total.item() == 3.5
    for right in (7.0, 2.0):  # also when a repetition is discarded, too
        loss.fill_(right)
        assert follower.set_right()
        assert total.item() == 1 + right / 2
        assert kept[0].item() == 3 * total.item()


def test_numbers_and_decisions_cannot_be_set_right() -> None:
    loss = torch.tensor(float("nan"))
    read = follow(loss, lambda value: value.item())
    decided = follow(loss, lambda value: bool(torch.isnan(value)))
    loss.fill_(1.0)
    assert not read.set_right()
    assert not decided.set_right()
    unchanged = follow(loss, lambda value: value.item())
    assert unchanged.set_right()


def followed(loss_of: Any) -> Any:
    """A loss computed outside of a forward, and the function that computes it again."""
    from sparetrain_megatron.deepspeed.recording import LossTape

    outputs = torch.arange(3.0, requires_grad=True) * 2
    with LossTape(outputs, lambda *_: None) as tape:
        loss = loss_of(outputs)
    return tape, loss


def test_a_sum_beside_the_loss_is_no_obstacle() -> None:
    total = torch.zeros(())

    def loss_of(outputs: torch.Tensor) -> torch.Tensor:
        loss = outputs.square().sum()
        total.add_(loss.detach())
        return loss

    tape, loss = followed(loss_of)
    again = tape.seal(loss)
    assert again(torch.ones(3)).item() == 3
    assert total.item() == loss.item()  # not added a second time
    assert tape.spoilt


def test_a_loss_through_such_a_sum_is_one() -> None:
    from sparetrain_megatron.deepspeed.recording import NotReplayable

    total = torch.zeros(())
    tape, loss = followed(lambda outputs: total.add_(outputs.sum()) * 2)
    with pytest.raises(NotReplayable, match="changed in place"):
        tape.seal(loss)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def test_a_loss_through_a_users_own_function_is_one() -> None:
    from sparetrain_megatron.deepspeed.recording import NotReplayable

    tape, loss = followed(lambda outputs: Double.apply(outputs).sum())
    with pytest.raises(NotReplayable, match=r"autograd\.Function"):
        tape.seal(loss)
