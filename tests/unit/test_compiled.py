"""Compiled functions under protection: same bits, still compiled, forward and backward twice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparetrain_megatron.dmr import compiled
from sparetrain_megatron.dmr.bits import equal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Watch(TorchDispatchMode):
    """Stands in for the interceptor: sees operators, lets compiled code run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@dataclass
class Twice:
    """Runs everything twice; may corrupt one execution."""

    corrupt: int | None = None
    returns: int = 0
    runs: list[tuple[str, bool]] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    differences: int = 0
    unprotected_names: list[str] = field(default_factory=list)

    def run(
        self, name: str, call: compiled.CompiledCall, phase_backward: bool
    ) -> Sequence[torch.Tensor]:
        assert torch._C._len_torch_dispatch_stack() == 0
        self.runs.append((name, phase_backward))
        self.graphs.append(call.graph)
        results = [call(), call()]
        self.produced.append(len(results[0]))
        if self.corrupt is not None:
            results[self.corrupt][0].view(torch.uint8).flatten()[0] ^= 1
        for a, b in zip(*results, strict=True):
            assert a.data_ptr() != b.data_ptr()
            self.differences += not equal(a, b)
        return results[self.returns]

    def unprotected(self, name: str) -> None:
        self.unprotected_names.append(name)


def swiglu(y: torch.Tensor) -> torch.Tensor:
    gate, up = torch.chunk(y, 2, -1)
    return F.silu(gate) * up


def project(x: torch.Tensor, w: torch.Tensor, *, scale: float, keep: list) -> dict:
    """Kernels of Inductor's and of ATen's; saves an intermediate; nested results; options."""
    hidden = torch.tanh(x @ w) * scale
    return {"hidden": [hidden @ keep[0], None], "input": x, "scale": scale}


def drop(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x * 2, 0.5)


def count(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total += x.sum(0)
    return x * 3


@pytest.fixture(scope="module")
def functions() -> Iterator[dict[str, Callable]]:
    """The functions, compiled once; their graphs are reused by all tests."""
    compiled.install()
    torch._dynamo.reset()
    yield {f.__name__: torch.compile(f) for f in (swiglu, project, drop, count)}
    compiled.uninstall()
    torch._dynamo.reset()


@pytest.fixture
def protect() -> Iterator[Callable[..., Twice]]:
    def set_executor(**options) -> Twice:
        executor = Twice(**options)
        compiled.set_executor(executor)
        return executor

    yield set_executor
    compiled.set_executor(None)


def tensors(*shapes: tuple[int, ...], grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad) for shape in shapes
    ]


def swiglu_step(function: Callable) -> list[torch.Tensor]:
    (y,) = tensors((64, 256))
    out = function(y)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    (grad,) = torch.autograd.grad(out, y, weights)
    return [out.detach(), grad]


def project_step(function: Callable) -> list[torch.Tensor]:
    x, w, v = tensors((8, 16), (16, 24), (24, 4))
    result = function(x, w, scale=1.5, keep=[v])
    assert result["input"] is x and result["scale"] == 1.5 and result["hidden"][1] is None
    out = result["hidden"][0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, w, v])]


STEPS = {"swiglu": swiglu_step, "project": project_step}


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_same_bits_and_still_compiled(functions, protect, name):
    step, function = STEPS[name], functions[name]
    executor = protect()
    with Watch() as mode:
        first = step(function)  # compiles under the mode
    assert executor.runs == [(f"compiled:{name}", False), (f"compiled:{name}", True)]
    assert executor.differences == 0 and not executor.unprotected_names
    assert not {"silu", "sigmoid", "tanh", "mm"} & set(mode.seen)
    compiled.set_executor(None)
    graphs = counters["stats"]["unique_graphs"]
    assert same(step(function), first)
    compiled.set_executor(executor)
    with Watch():
        assert same(step(function), first)
    compiled.set_executor(None)
    assert same(step(function), first)
    assert counters["stats"]["unique_graphs"] == graphs
    assert executor.graphs[:2] == executor.graphs[2:]


def test_compiled_bits_are_not_those_of_eager_execution(functions):
    """Otherwise the tests above couldn't tell whether compiled code ran."""
    assert not same(swiglu_step(functions["swiglu"]), swiglu_step(swiglu))


def test_results_include_what_is_saved_for_backward(functions, protect):
    executor = protect()
    project_step(functions["project"])
    forward, backward = executor.produced
    assert forward > 1  # the output, and the tanh
    assert backward == 3


@pytest.mark.parametrize("corrupt", [0, 1])
@pytest.mark.parametrize("returns", [0, 1])
def test_the_executor_chooses_the_result(functions, protect, corrupt, returns):
    clean = swiglu_step(functions["swiglu"])
    executor = protect(corrupt=corrupt, returns=returns)
    with Watch():
        faulty = swiglu_step(functions["swiglu"])
    assert executor.differences == 2  # forward and backward
    assert same(clean, faulty) == (corrupt != returns)


def test_backward_twice_through_a_kept_graph(functions, protect):
    executor = protect()
    x, w, v = tensors((8, 16), (16, 24), (24, 4))
    with Watch():
        out = functions["project"](x, w, scale=1.5, keep=[v])["hidden"][0].sum()
        first = torch.autograd.grad(out, [x, w, v], retain_graph=True)
        second = torch.autograd.grad(out, [x, w, v])
    assert same(first, second)
    assert executor.differences == 0
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, [x])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(functions, protect, reentrant):
    function = functions["swiglu"]
    plain = swiglu_step(function)
    executor = protect()
    with Watch():
        outcome = swiglu_step_checkpointed(function, reentrant)
    assert same(outcome, plain)
    assert [backward for _, backward in executor.runs] == [False, False, True]
    assert executor.differences == 0
    # Under no_grad it is another graph than with gradients.
    assert (executor.graphs[0] != executor.graphs[1]) == reentrant


def swiglu_step_checkpointed(function: Callable, reentrant: bool) -> list[torch.Tensor]:
    (y,) = tensors((64, 256))
    out = checkpoint(function, y, use_reentrant=reentrant)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    out.backward(weights)
    return [out.detach(), y.grad]


def test_random_functions_draw_the_same_numbers_again(functions, protect):
    (x,) = tensors((64, 64), grad=False)
    torch.manual_seed(5)
    plain = [functions["drop"](x), functions["drop"](x), torch.rand(3)]
    executor = protect()
    torch.manual_seed(5)
    with Watch():
        protected = [functions["drop"](x), functions["drop"](x), torch.rand(3)]
    assert same(plain, protected)
    assert not equal(plain[0], plain[1])
    assert executor.differences == 0


@pytest.mark.parametrize("corrupt", [None, 1])
def test_written_inputs_are_written_once_and_compared(functions, protect, corrupt):
    x = torch.arange(32.0).reshape(4, 8)  # exact sums
    executor = protect(corrupt=corrupt)
    total = torch.ones(8)
    with torch.no_grad(), Watch():
        functions["count"](x, total)
    assert equal(total, x.sum(0) + 1)
    assert executor.produced == [2]
    assert executor.differences == (corrupt is not None)


def test_graphs_from_before_are_named_as_unprotected(functions, protect, monkeypatch):
    (x,) = tensors((64, 64), grad=False)
    expected = functions["drop"](x).shape
    executor = protect()
    monkeypatch.setattr(compiled, "_obstacle", lambda graph: "reason")
    with Watch():
        assert functions["drop"](x).shape == expected
    assert executor.unprotected_names == ["compiled:drop (reason)"]
    assert not executor.runs


def test_uninstall_restores_torch(functions):
    from torch._inductor.output_code import CompiledFxGraph

    installed = CompiledFxGraph.__call__
    compiled.uninstall()
    try:
        assert CompiledFxGraph.__call__ is not installed
        assert torch._functorch.config.donated_buffer
        assert not torch.compiler.config.cache_key_tag
        graphs = counters["stats"]["unique_graphs"]
        swiglu_step(functions["swiglu"])
        assert counters["stats"]["unique_graphs"] == graphs
    finally:
        compiled.install()
    assert CompiledFxGraph.__call__ is installed
