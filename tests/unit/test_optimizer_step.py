"""The optimizer's step, executed twice a chunk at a time."""

import pytest
import torch

from sparetrain_megatron.dmr.optimizer_step import CheckedStep
from tests.unit.protected import Watched, different

SIZES = (7, 1, 12, 5)


class CountingInTheGroup(torch.optim.Optimizer):
    """Counts its steps in the parameter group, as fused Adams do; its state grows in step two."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                if group["step"] > 1:
                    slow = state.setdefault("slow", torch.zeros_like(parameter))
                    state["momentum"].add_(slow.add_(parameter.grad), alpha=0.1)
                parameter.sub_(state["momentum"], alpha=group["lr"] / group["step"])


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "counting in the group": CountingInTheGroup,
}

# One that writes parameters.
UPDATES = {
    "adamw": "_foreach_addcdiv_",
    "adamw one by one": "addcdiv_",
    "adamw fused": "_fused_adamw_",
    "adam amsgrad": "addcdiv_",
    "sgd": "add_",
    "sgd without state": "add_",
    "counting in the group": "sub_",
}


class Trained:
    """Parameters with an optimizer in two groups, protected unless `engine` is None."""

    def __init__(self, name, engine=None, chunk=1 << 20, attempts=2):
        generator = torch.Generator().manual_seed(1)
        self.parameters = [torch.nn.Parameter(torch.rand(n, generator=generator)) for n in SIZES]
        for parameter in self.parameters:
            parameter.grad = torch.rand(parameter.shape, generator=generator)
        groups = [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "lr": 0.3}]
        self.optimizer = OPTIMIZERS[name](groups)
        self.engine, self.redone = engine, []
        self.step = self.optimizer.step
        if engine is not None:
            self.step = CheckedStep(
                engine, self.optimizer, self.optimizer.step, chunk, attempts, self.redone.append
            )

    def run(self, steps=3):
        for number in range(steps):
            for parameter in self.parameters:
                parameter.grad.mul_(0.9)
            if self.engine is None:
                self.step()
                continue
            self.engine.begin(number + 1, 1)
            with self.engine.active(), self.engine.at(phase="optimizer"):
                self.step()
            self.engine.outcome = self.engine.verdict()
        return self

    @property
    def result(self):
        result = {f"parameter {i}": p.detach().clone() for i, p in enumerate(self.parameters)}
        for i, parameter in enumerate(self.parameters):
            for name, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    result[f"{name} {i}"] = value.clone()
        for i, group in enumerate(self.optimizer.param_groups):
            result[f"step {i}"] = torch.tensor(group.get("step", 0))
        return result


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_transparent(name, chunk):
    engine = Watched()
    protected = Trained(name, engine, chunk).run()
    assert different(Trained(name).run().result, protected.result) == []
    assert engine.found == []
    assert protected.redone == []
    assert sum(engine.counters.checks["naive"].values()) > 0


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_what_is_held_fits_the_chunk(chunk):
    engine = Watched()
    Trained("adamw", engine, chunk).run()
    largest = max(SIZES) * 4 * 3 + 4  # the least is one parameter with its two moments and count
    everything = sum(SIZES) * 4 * 3 + 4 * len(SIZES)
    assert engine.counters.peak_bytes_held <= max(chunk, largest)
    if chunk > everything:
        assert engine.counters.peak_bytes_held == everything


def test_parameters_stay_the_same_tensors():
    engine = Watched("iteration=2,phase=optimizer,operator=_foreach_addcdiv_,bit=20")
    trained = Trained("adamw", engine, 1).run(1)
    states = [trained.optimizer.state[p]["exp_avg"] for p in trained.parameters]
    addresses = [t.data_ptr() for t in (*states, *trained.parameters)]
    trained.run(2)
    assert trained.redone
    after = [trained.optimizer.state[p]["exp_avg"] for p in trained.parameters]
    assert all(a is b for a, b in zip(states, after, strict=True))
    assert [t.data_ptr() for t in (*after, *trained.parameters)] == addresses


@pytest.mark.parametrize("execution", ["primary", "checker"])
@pytest.mark.parametrize("iteration", [1, 2])  # in the first one, state does not exist yet
@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fault_is_undone(name, chunk, iteration, execution):
    spec = f"iteration={iteration},phase=optimizer,execution={execution}"
    engine = Watched(f"{spec},operator={UPDATES[name]},nth=1,bit=22")
    trained = Trained(name, engine, chunk).run()
    assert len(engine.injector.records) == 1
    assert engine.found
    assert different(Trained(name).run().result, trained.result) == []
    assert not engine.outcome.dirty
    assert len(trained.redone) == 1
    assert {m.wrong for m in engine.found} <= {execution, "unknown"}


@pytest.mark.parametrize("nth", range(1, 30))
def test_a_fault_in_any_operator_is_found(nth):
    engine = Watched(f"iteration=2,phase=optimizer,nth={nth},bit=31")
    trained = Trained("adamw one by one", engine).run(2)
    assert len(engine.injector.records) == 1
    assert engine.found
    assert different(Trained("adamw one by one").run(2).result, trained.result) == []


def test_only_the_wrong_chunk_is_repeated():
    engine = Watched("iteration=1,phase=optimizer,operator=sub_,nth=3,bit=22")
    steps = []
    trained = Trained("counting in the group", engine, chunk=1)
    step = trained.step._step
    trained.step._step = lambda: (steps.append(None), step())
    trained.run(1)
    assert len(trained.redone) == 1
    assert len(steps) == 2 * len(SIZES) + 2


def test_a_fault_that_repeats_always_exhausts():
    engine = Watched("iteration=1,phase=optimizer,operator=_foreach_addcdiv_,bit=22,repeat=always")
    trained = Trained("adamw", engine).run(1)
    assert trained.step.exhausted
    assert len(trained.redone) == 2
    assert engine.outcome.dirty


def test_a_repetition_may_fail_too():
    specs = [
        f"iteration=1,attempt={n},phase=optimizer,operator=_foreach_addcdiv_,bit={20 + n}"
        for n in (1, 2)
    ]
    engine = Watched(*specs)
    trained = Trained("adamw", engine).run(1)
    assert len(engine.injector.records) == 2
    assert different(Trained("adamw").run(1).result, trained.result) == []
    assert not trained.step.exhausted


def test_report_only():
    """Without repairs the primary's result stays, and the verdict knows."""
    engine = Watched("iteration=1,phase=optimizer,bit=22", repairs=False)
    trained = Trained("sgd", engine).run(1)
    assert trained.redone == []
    assert engine.outcome.dirty
    assert different(Trained("sgd").run(1).result, trained.result)


@pytest.mark.parametrize("execution", ["primary", "checker"])
def test_an_operator_that_refuses_a_wrong_value(execution):
    """A step count below zero has no root: the error is undone like a wrong value."""

    spec = f"iteration=2,phase=optimizer,execution={execution},operator=add_,nth=1,bit=31"
    engine = Watched(spec)
    trained = Trained("adamw one by one", engine)
    raised = []
    step = trained.step._step

    def refusing():
        try:
            step()
            if any(state["step"] < 0 for state in trained.optimizer.state.values()):
                raise RuntimeError("below zero")
        except RuntimeError as error:
            raised.append(error)
            raise

    trained.step._step = refusing
    trained.run(2)
    assert len(raised) == 1
    assert engine.found
    assert different(Trained("adamw one by one").run(2).result, trained.result) == []


def test_an_error_of_the_trainings_own_is_raised():
    engine = Watched()
    trained = Trained("adamw", engine)
    calls = []

    def failing():
        calls.append(None)
        raise RuntimeError("no such state")

    trained.step._step = failing
    with pytest.raises(RuntimeError, match="no such state"):
        trained.run(1)
    assert len(calls) == 2
    assert [len(g["params"]) for g in trained.optimizer.param_groups] == [3, 1]


def test_lazily_created_state_is_removed_again():
    engine = Watched("iteration=1,phase=optimizer,operator=zeros_like,bit=22")
    trained = Trained("adamw", engine, chunk=1).run(1)
    assert engine.found
    assert different(Trained("adamw").run(1).result, trained.result) == []


def test_steps_counted_in_the_group_are_counted_once():
    for engine in (Watched(), Watched("iteration=2,phase=optimizer,bit=22")):
        trained = Trained("counting in the group", engine, chunk=1).run(3)
        assert [group["step"] for group in trained.optimizer.param_groups] == [3, 3]


def test_no_parameters():
    engine = Watched()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    step = CheckedStep(engine, optimizer, optimizer.step, 100, 2, lambda found: None)
    with engine.active():
        step()
    assert engine.found == []


def test_closures_are_refused():
    trained = Trained("sgd", Watched())
    with pytest.raises(ValueError, match="closure"):
        trained.step(lambda: 0.0)
