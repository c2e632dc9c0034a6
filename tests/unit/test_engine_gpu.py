"""The engine on a CUDA device: flags stay there until the verdict; naive, compared and deferred."""

from __future__ import annotations

import pytest
import torch

from tests.unit.protected import Model, Watched

pytestmark = pytest.mark.gpu


def _step(model: torch.nn.Module) -> None:
    tokens = torch.arange(48, device="cuda").reshape(2, 24) % 32
    model.zero_grad()
    model(tokens).float().logsumexp(-1).mean().backward()


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def _engine(*specs: str) -> Watched:
    engine = Watched(*specs)
    engine.device = torch.device("cuda", torch.cuda.current_device())
    return engine


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    yield Model().cuda().eval()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deferred", [False, True])
def test_clean_steps_raise_no_alarm_and_change_no_bit(model, deferred):
    _step(model)
    expected = _gradients(model)
    engine = _engine()

    def step() -> None:
        if deferred:
            engine.open_tape()
        _step(model)
        engine.close_tape()

    engine.protect(step)
    assert not engine.outcome.dirty
    assert all(torch.equal(a, b) for a, b in zip(expected, _gradients(model)))


@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_a_fault_is_found_at_the_verdict(model, execution):
    engine = _engine(f"iteration=1,operator=addmm,execution={execution},bit=20")
    engine.protect(lambda: _step(model))
    assert engine.outcome.dirty
    assert "addmm" in engine.operators
