"""One call of a collective operator: its name, what leaves, what arrives, and how to issue it
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import bits
from .operators import tensors_of

# Short names as users write them, for reports and fault specs.
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}
REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}
NO_VALUE = {"barrier", "monitored_barrier_", "check_for_nan"}


class Transfer:
    """One call of a collective operator, which can be issued again with copies of its tensors."""

    def __init__(
        self, name: str, func: Any, args: tuple, kwargs: dict, named: dict, group: Any
    ) -> None:
        self.name, self.func, self.args, self.kwargs = name, func, args, kwargs
        self.named, self.group = named, group
        self.repeats: list[Transfer] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._work: Any = None

    @property
    def integers(self) -> bool:
        tensors = tensors_of(self.args, self.kwargs)
        return not any(t.is_floating_point() or t.is_complex() for t in tensors)

    @property
    def moved(self) -> int:
        """Bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in tensors_of(self.args, self.kwargs))

    @property
    def item(self) -> int:
        """Bytes of one row of what an all-to-all moves."""
        tensor = outputs_of(self.name, self.named)[0]
        return math.prod(tensor.shape[1:]) * int(tensor.element_size())

    @property
    def crossing(self) -> int:
        """Bytes that leave this rank or reach it, whichever is more."""
        if self.name in REDUCTIONS:
            return self.moved
        me = self.group.rank()
        sent = (t for peers, t in departures(self.name, self.named, self.group) if peers != [me])
        got = (t for peer, t in arrivals(self.name, self.named, self.group) if peer != me)
        return max(sum(t.numel() * t.element_size() for t in side) for side in (sent, got))

    @property
    def size(self) -> int:
        """Bytes of the copies."""
        return sum(t.numel() * t.element_size() for t in self._copies.values())

    def repeat(self) -> Transfer:
        """The same call on copies of its tensors as they are now."""
        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in copies:
                    copies[id(value)] = bits.clone_span(value)
                return copies[id(value)]
            if isinstance(value, (list, tuple)):
                return type(value)(copied(v) for v in value)
            return value

        args = tuple(copied(a) for a in self.args)
        kwargs = {name: copied(value) for name, value in self.kwargs.items()}
        named = dict(zip((a.name for a in self.func._schema.arguments), args), **kwargs)
        again = Transfer(self.name, self.func, args, kwargs, named, self.group)
        again._copies = copies
        return again

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy that stands for a tensor of the original call."""
        return self._copies[id(tensor)]

    def issue(self) -> Any:
        result = self.func(*self.args, **self.kwargs)
        self._work = _work_of(result)
        return result

    @property
    def completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _work_of(result: Any) -> Any:
    work = result[-1] if isinstance(result, (tuple, list)) else result
    return dist._Work.unbox(work) if isinstance(work, torch.ScriptObject) else work


def _pieces(tensor: torch.Tensor, sizes: list[int], count: int) -> list[torch.Tensor]:
    return list(tensor.split(sizes) if sizes else tensor.chunk(count))


def departures(name: str, named: dict, group: Any) -> Iterator[tuple[list[int], torch.Tensor]]:
    """(peers, tensor) for everything this rank gives away; its own share counts too."""
    everyone = list(range(group.size()))
    root = int(named.get("root_rank", -1))
    if name == "send":
        for tensor in named["tensors"]:
            yield [int(named["dst"])], tensor
    elif name == "broadcast" and group.rank() == root:
        for tensor in named["tensors"]:
            yield [p for p in everyone if p != root], tensor
    elif name == "all_gather":
        for tensor in inputs_of(name, named):
            yield everyone, tensor
    elif name == "gather":
        for tensor in named["input_tensors"]:
            yield [int(root)], tensor
    elif name == "scatter" and group.rank() == root:
        for tensors in named["input_tensors"]:
            for peer, tensor in enumerate(tensors):
                yield [peer], tensor
    elif name == "all_to_all":
        if "input_tensors" in named:
            pieces = named["input_tensors"]
        else:
            pieces = _pieces(named["input"], list(named["input_split_sizes"]), group.size())
        for peer, tensor in enumerate(pieces):
            yield [peer], tensor


def arrivals(name: str, named: dict, group: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """(peer, tensor) for everything this rank receives, in the order in which it left the peer."""
    root = int(named.get("root_rank", -1))
    if name == "recv":
        for tensor in named["tensors"]:
            yield int(named["src"]), tensor
    elif name == "broadcast" and group.rank() != root:
        for tensor in named["tensors"]:
            yield int(root), tensor
    elif name == "all_gather":
        for output in outputs_of(name, named):
            if isinstance(output, (list, tuple)):
                yield from enumerate(output)
            else:
                yield from enumerate(output.view(-1).chunk(group.size()))
    elif name == "gather" and group.rank() == root:
        for tensors in named["output_tensors"]:
            yield from enumerate(tensors)
    elif name == "scatter":
        for tensor in named["output_tensors"]:
            yield int(root), tensor
    elif name == "all_to_all":
        if "output_tensors" in named:
            yield from enumerate(named["output_tensors"])
        else:
            sizes = list(named["output_split_sizes"])
            yield from enumerate(_pieces(named["output"], sizes, group.size()))


def inputs_of(name: str, named: dict) -> list[torch.Tensor]:
    for key in ("input_tensors", "inputs", "input_list", "input_tensor", "input", "tensors"):
        if key in named:
            return tensors_of(named[key])
    return []


def outputs_of(name: str, named: dict) -> list[Any]:
    keys = ("output_tensors", "outputs", "output_lists", "output_list")
    for key in (*keys, "output_tensor", "output", "tensors"):
        if key in named:
            value = named[key]
            return list(value) if isinstance(value, (list, tuple)) else [value]
    return []
