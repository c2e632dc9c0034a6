"""Protects what `torch.compile` compiled: every compiled graph is one foreign kernel.

To dynamo an active dispatch mode means "run eagerly": other bits, another speed. A mode whose
``ignore_compile_internals()`` is true is exempt: compiled code runs under it. Its insides, however,
are hidden from the mode; so they enter here, at the one place that all of them pass, forward and
backward: the call of Inductor's compiled graph, a function from flat tensors to flat tensors whose
results include everything that is saved for backward. What lies between compiled graphs (a graph
break, the copy that writes a mutated input back, another backend's operators) is dispatched, and
seen, as ever.

Dynamo has no part in this: no guard depends on it, and with ``set_executor(None)`` the same
compiled code goes on by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sparetrain_megatron.errors import UsageError

_TAG = "+sparetrain"


class Executor(Protocol):
    """Decides how often compiled graphs run, and compares."""

    def run(self, name: str, call: CompiledCall, phase_backward: bool) -> Sequence[torch.Tensor]:
        """Executes a compiled graph, with all dispatch modes off.

        Args:
            name: ``compiled:`` and the name of the source function.
            call: Executes the graph once; gives the tensors that it produced.
            phase_backward: Whether this is a backward graph.

        Returns:
            The result of one of the calls, or tensors like it.
        """

    def unprotected(self, name: str) -> None:
        """Counts, or refuses by an exception, a compiled graph that can't be executed twice."""


class CompiledCall:
    """One execution of a compiled graph, which can be repeated as long as this object is kept.

    Attributes:
        graph: Identifies the compiled graph in this process. One source function has several (with
            and without gradients, other shapes), and their bits may differ: never compare results
            of different graphs.
    """

    __slots__ = ("_generators", "_graph", "_inputs", "_outputs", "_produced", "_states", "_written")

    def __init__(self, graph: CompiledFxGraph, inputs: list[Any]) -> None:
        self._graph = graph
        self._inputs = inputs
        self._outputs: Any = None  # of the first call, without what it produced
        self._produced: list[int] = []  # positions of those in the outputs
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []  # inputs, and their old values
        self._generators: list[torch.Generator] = []
        self._states: list[torch.Tensor] = []

    @property
    def graph(self) -> int:
        return self._graph._sparetrain_graph  # type: ignore

    @torch.no_grad()
    def __call__(self) -> list[torch.Tensor]:
        """Executes the graph from the same inputs and generator states as the first time.

        Returns:
            New tensors: what the graph computed, then copies of the inputs that it wrote.
        """
        if self._outputs is None:
            return self._first()
        for written, old in self._written:
            written.copy_(old)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        outputs = _original_call(self._graph, list(self._inputs))
        return [outputs[i] for i in self._produced] + self._copies()

    def _first(self) -> list[torch.Tensor]:
        tensors = [value for value in self._inputs if isinstance(value, torch.Tensor)]
        for index in self._graph.mutated_input_idxs:
            self._written.append((self._inputs[index], self._inputs[index].clone()))
        generators = [torch.default_generator]
        devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
        generators += [torch.cuda.default_generators[index] for index in sorted(devices)]
        states = [generator.get_state() for generator in generators]
        outputs = _original_call(self._graph, list(self._inputs))
        for generator, state in zip(generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                self._generators.append(generator)
                self._states.append(state)
        # What is saved for backward may be an input itself.
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        results = list(outputs)
        self._produced = [
            index
            for index, value in enumerate(outputs)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in known
        ]
        produced = [outputs[index] for index in self._produced]
        for index in self._produced:
            results[index] = None
        self._outputs = results
        return produced + self._copies()

    def _copies(self) -> list[torch.Tensor]:
        return [written.clone() for written, _ in self._written]

    def outputs(self, results: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What the graph returns, with these results in the places of those it computed."""
        if self._outputs is None:
            raise RuntimeError("an executor must call the compiled graph at least once")
        outputs = list(self._outputs)
        for index, result in zip(self._produced, results, strict=False):
            outputs[index] = result
        return tuple(outputs)


_original_call = CompiledFxGraph.__call__
_original_post_compile = CompiledFxGraph.post_compile
_original_settings: tuple[bool, str] | None = None
_executor: Executor | None = None
_numbers = itertools.count()
_names: dict[Any, str] = {}  # of source functions, by dynamo's compile id


def install() -> None:
    """Lets compiled graphs ask the executor, if one is set; idempotent.

    Must come before anything is compiled. Until ``set_executor`` nothing runs differently.

    Raises:
        UsageError: If this version of torch runs compiled functions eagerly under any mode.
    """
    global _original_settings
    if _original_settings is not None:
        return
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        raise UsageError(
            f"torch {torch.__version__} cannot run compiled functions under protection; "
            "use a newer one, or --disable-jit-fuser"
        )
    _original_settings = (
        torch._functorch.config.donated_buffer,
        torch.compiler.config.cache_key_tag,
    )
    # A backward graph may otherwise use the memory of saved tensors for its results, and then a
    # second execution reads something else. Caches on disk don't tell such graphs apart.
    torch._functorch.config.donated_buffer = False
    torch.compiler.config.cache_key_tag += _TAG
    CompiledFxGraph.__call__ = _call  # type: ignore
    CompiledFxGraph.post_compile = _post_compile  # type: ignore


def uninstall() -> None:
    """Undoes ``install``; compiled functions stay compiled."""
    global _original_settings
    set_executor(None)
    if _original_settings is None:
        return
    CompiledFxGraph.__call__ = _original_call  # type: ignore
    CompiledFxGraph.post_compile = _original_post_compile  # type: ignore
    torch._functorch.config.donated_buffer, torch.compiler.config.cache_key_tag = _original_settings
    _original_settings = None


def set_executor(executor: Executor | None) -> Executor | None:
    """Sets who executes compiled graphs from now on; None lets them run by themselves.

    Returns:
        Who did until now.
    """
    global _executor
    before, _executor = _executor, executor
    return before


def _call(self: CompiledFxGraph, inputs: list[Any]) -> Any:
    executor = _executor
    if executor is None:
        return _original_call(self, inputs)
    name = getattr(self, "_sparetrain_name", "compiled:?")
    with _disable_current_modes():
        obstacle = _obstacle(self)
        if obstacle:
            executor.unprotected(f"{name} ({obstacle})")
            return _original_call(self, inputs)
        call = CompiledCall(self, list(inputs))
        if isinstance(inputs, list):
            inputs.clear()  # the calling convention: the callee drops them
        return call.outputs(executor.run(name, call, bool(self.fx_kwargs["is_backward"])))


def _post_compile(self: CompiledFxGraph, *args: Any, **kwargs: Any) -> None:
    """Runs once for every graph, whether it was compiled or came from a cache."""
    _original_post_compile(self, *args, **kwargs)
    cudagraphs = (kwargs.get("graph_kwargs") or args[2])["cudagraphs"]
    self._sparetrain_name = f"compiled:{_source_name()}"  # type: ignore
    self._sparetrain_graph = next(_numbers)  # type: ignore
    self._sparetrain_obstacle = "CUDA graphs reuse their outputs" if cudagraphs else ""  # type: ignore


def _obstacle(graph: CompiledFxGraph) -> str:
    """Why a graph can't be executed twice; empty if it can."""
    return getattr(graph, "_sparetrain_obstacle", "compiled before protection was installed")


def _source_name() -> str:
    """Name of the function that dynamo is compiling, or whose backward is being compiled."""
    from torch._dynamo.symbolic_convert import tls

    compile_id = torch._guards.CompileContext.current_compile_id()
    translator = getattr(tls, "current_tx", None)
    if translator is not None:
        _names[compile_id] = translator.f_code.co_name
    return _names.get(compile_id, "?")
