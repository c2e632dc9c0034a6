"""What is checked beside an open tape, which goes on after it."""

from __future__ import annotations

import pytest
import torch

from sparetrain_megatron.dmr.deferred import below_autograd
from tests.unit.protected import Watched


def backward_and_reduce(engine: Watched, shared: bool = False) -> None:
    """A tape produces a gradient; a hook in its middle reduces that in place."""
    bucket = torch.zeros(8)
    with engine.active():
        engine.open_tape()
        gradient = torch.arange(8.0) * 3
        leaving = gradient[:4] if shared else gradient
        with engine.beside_tape([leaving]):
            assert engine.tape is None
            leaving.div_(2)
            bucket[: leaving.numel()].copy_(leaving)
            scratch = torch.empty(4)
            scratch.fill_(1)
        rest = (scratch + 1) * 2
        engine.close_tape()
    assert rest.tolist() == [4.0] * 4
    assert bucket[1].item() == 1.5


@pytest.mark.parametrize("shared", [False, True])
def test_no_alarm(shared: bool) -> None:
    engine = Watched()
    backward_and_reduce(engine, shared)
    assert len(engine.closed) == (2 if shared else 1)  # it ends where it can't give a part away
    assert not engine.verdict().dirty


@pytest.mark.parametrize(
    "operator, method", [("mul", "deferred"), ("div_", "naive"), ("copy_", "naive")]
)
@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_faults_are_found(operator: str, method: str, execution: str) -> None:
    engine = Watched(f"iteration=1,operator={operator},execution={execution},element=2,bit=20")
    backward_and_reduce(engine)
    assert engine.verdict().dirty
    assert [(m.operator, m.method) for m in engine.found] == [(operator, method)]


def test_what_has_been_given_away_is_replayed_as_it_was() -> None:
    """The replay compares with what left, whatever has become of its memory."""
    engine = Watched()
    backward_and_reduce(engine)
    with below_autograd():
        while engine.deferred.unit():
            pass
    assert engine.found == []
    assert not engine.verdict().dirty
