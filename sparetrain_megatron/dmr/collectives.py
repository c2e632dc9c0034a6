"""Values that move between ranks, and sums over ranks.

A *moved* value (send/receive, broadcast, gather, scatter, all-to-all) must arrive as it left: it is
fingerprinted where it leaves and where it arrives, and the fingerprints are exchanged in one go at
the next verdict. A *reduction* is arithmetic, and a wrong sum agrees on every rank: it is done a
second time from the same inputs and compared.

A result must not be read before the framework has waited for it, and that wait is invisible here. But
no correct program touches the result earlier either; so a result is looked at when the first operator
touches its bytes, or at the verdict.

[Note: order] Second reductions and exchanges are issued in program order, which is the same on all
ranks of a group, so they can't deadlock; nothing here depends on a rank's own timing.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import bits
from .fingerprint import fingerprint
from .mismatch import Mismatch
from .operators import Operator, tensors_of

if TYPE_CHECKING:
    from .engine import Engine

# Short names as users write them, for reports and fault specs.
_NAMES = {
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
_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}
_NO_VALUE = {"barrier", "monitored_barrier_", "check_for_nan"}


@dataclasses.dataclass(slots=True, eq=False)
class _Arrival:
    """A result that may still be on its way."""

    tensor: torch.Tensor
    storage: int
    low: int
    high: int
    reduction: bool
    settle: Callable[[torch.Tensor], None]


@dataclasses.dataclass(slots=True)
class _Channel:
    """What moved between this rank and one peer of one group in one direction since the verdict."""

    digests: list[Any] = dataclasses.field(default_factory=list)
    places: list[tuple[str, Any]] = dataclasses.field(default_factory=list)


class Collectives:
    """Runs the collectives of one rank and remembers what has to be compared.

    Attributes:
        arriving: Results not looked at yet, by storage. While it is empty operators need not ask.
    """

    def __init__(self, engine: Engine) -> None:
        self.arriving: dict[int, list[_Arrival]] = {}
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self._sent: dict[tuple[str, int], _Channel] = defaultdict(_Channel)
        self._received: dict[tuple[str, int], _Channel] = defaultdict(_Channel)
        self._point_to_point: set[tuple[str, int]] = set()
        self._collective_groups: set[str] = set()
        self._reductions_seen: dict[str, int] = defaultdict(int)

    # --- issuing -------------------------------------------------------------------------------------

    def run(self, operator: Operator, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Issues a collective once and arranges for its result to be checked."""
        named = dict(zip((a.name for a in func._schema.arguments), args), **kwargs)
        name = _NAMES.get(operator.name)
        group = named.get("process_group")
        engine = self._engine
        if operator.name in _NO_VALUE:
            engine.count_once("barrier")
            return func(*args, **kwargs)
        if name is None or group is None:
            engine.unprotected(operator.name)
            return func(*args, **kwargs)
        group = dist.ProcessGroup.unbox(group)
        if group.size() == 1:
            # Nothing moves; what is left is a copy on this device.
            return self._alone(name, func, args, kwargs, named)
        self._groups[group.group_name] = group
        if name in _REDUCTIONS:
            return self._reduction(name, func, args, kwargs, named, group)
        return self._moved(name, func, args, kwargs, named, group)

    def _alone(self, name: str, func: Any, args: tuple, kwargs: dict, named: dict) -> Any:
        inputs = [fingerprint(t) for t in _inputs(name, named)]
        output = func(*args, **kwargs)
        report = self._engine.reporter(name, "communication", later=True)
        for result, expected in zip(tensors_of(_outputs(name, named)), inputs):
            self._arrive(
                result,
                name,
                lambda t, expected=expected: self._engine.ledger.check(
                    fingerprint(t) == expected, report
                ),
            )
        self._engine.statistics.communications_checked += len(inputs)
        return output

    def _reduction(
        self, name: str, func: Any, args: tuple, kwargs: dict, named: dict, group: Any
    ) -> Any:
        engine = self._engine
        results = _outputs(name, named)
        # Only the root's result of a `reduce` has a defined value.
        defined = name != "reduce" or group.rank() == named["root_rank"]
        if engine.passes:
            # Forward and recompute reduce the same values: the second pass is the second reduction.
            output = func(*args, **kwargs)
            observe = engine.observe_later(name)
            if defined:
                self._arrive_all(results, name, observe)
            else:
                observe([])
            engine.statistics.reductions_checked += engine.passes[-1].second
            return output
        count = self._reductions_seen[group.group_name]
        self._reductions_seen[group.group_name] += 1
        # The same choice on every rank of the group, spread evenly.
        rate = engine.reductions
        if int((count + 1) * rate) == int(count * rate):
            engine.statistics.reductions_not_doubled += 1
            output = func(*args, **kwargs)
            self._arrive_all(results, name, lambda tensors: None)
            return output
        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return copies.setdefault(id(value), bits.clone_span(value))
            if isinstance(value, (list, tuple)):
                return type(value)(copied(v) for v in value)
            return value

        again_args, again_kwargs = tuple(copied(a) for a in args), copied_values(kwargs, copied)
        engine.held(sum(t.numel() * t.element_size() for t in copies.values()))
        output = func(*args, **kwargs)
        second = func(*again_args, **again_kwargs)
        work = _work_of(second)
        engine.statistics.reductions_checked += 1
        report = engine.reporter(name, "reduction", later=True)

        def compare(tensors: list[torch.Tensor]) -> None:
            if work is not None:
                work.wait()
            if not defined:
                return
            for mine in tensors:
                other = copies[id(mine)]
                equal = bits.equal(mine, other)
                if equal is False:
                    mismatch = report()
                    differ, elements, positions = bits.difference(mine, other)
                    mismatch.elements_differ, mismatch.elements = differ, elements
                    mismatch.bits = positions
                    engine.ledger.record(mismatch)
                else:
                    engine.ledger.check(equal, report)

        self._arrive_all(results, name, compare)
        return output

    def _moved(
        self, name: str, func: Any, args: tuple, kwargs: dict, named: dict, group: Any
    ) -> Any:
        engine = self._engine
        key = group.group_name
        if name in ("send", "recv"):
            self._point_to_point.add((key, int(named["dst" if name == "send" else "src"])))
        else:
            self._collective_groups.add(key)
        for peers, tensor in _departures(name, named, group):
            digest = fingerprint(tensor)
            for peer in peers:
                channel = self._sent[key, peer]
                channel.digests.append(digest)
                channel.places.append((name, None))
        output = func(*args, **kwargs)
        arrivals = list(_arrivals(name, named, group))
        observe = engine.observe_later(name) if engine.passes and arrivals else None
        left = [len(arrivals)]
        for peer, tensor in arrivals:
            channel = self._received[key, peer]
            slot = len(channel.digests)
            position = engine.position.copy()
            channel.digests.append(None)
            channel.places.append((name, position))

            def settle(t: torch.Tensor, channel: _Channel = channel, slot: int = slot) -> None:
                channel.digests[slot] = fingerprint(t)
                left[0] -= 1
                if observe is not None and left[0] == 0:
                    observe([t for _, t in arrivals])

            self._arrive(tensor, name, settle)
        engine.statistics.communications_checked += len(arrivals)
        return output

    # --- arrival -------------------------------------------------------------------------------------

    def _arrive(
        self, tensor: torch.Tensor, name: str, settle: Callable[[torch.Tensor], None]
    ) -> None:
        engine = self._engine
        tensor = tensor.detach()
        place = engine.position.copy()
        place.phase = "communication"

        def looked_at(t: torch.Tensor) -> None:
            if engine.injector.armed:
                engine.injector.visit(place, name, "primary", [t])
            settle(t)

        if tensor.numel() == 0:
            settle(tensor)
            return
        low = tensor.storage_offset() * tensor.element_size()
        high = low + bits.span(tensor) * tensor.element_size()
        storage = tensor.untyped_storage()._cdata
        arrival = _Arrival(tensor, storage, low, high, name in _REDUCTIONS, looked_at)
        self.arriving.setdefault(storage, []).append(arrival)

    def _arrive_all(
        self,
        tensors: list[torch.Tensor],
        name: str,
        settle: Callable[[list[torch.Tensor]], None],
    ) -> None:
        """As :meth:`_arrive` for results that are looked at together; the originals are passed on."""
        left = [len(tensors)]

        def one(_: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                settle(tensors)

        for tensor in tensors:
            self._arrive(tensor, name, one)

    def touch(self, operator: Operator, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operator is about to read or write these: looks at results among them first.

        Some transports (gloo's reduce-scatter) deliver a result by a copy into it while they are
        waited for; the copy's target is therefore not looked at yet.
        """
        if operator.name == "copy_":
            args = args[1:]
        for tensor in tensors_of(args, kwargs):
            if tensor.layout is not torch.strided:
                continue
            waiting = self.arriving.get(tensor.untyped_storage()._cdata)
            if not waiting:
                continue
            size = tensor.element_size()
            low = tensor.storage_offset() * size
            high = low + bits.span(tensor) * size
            ready = [a for a in waiting if a.low < high and low < a.high]
            for arrival in ready:
                self._settle(arrival)

    def _settle(self, arrival: _Arrival) -> None:
        waiting = self.arriving[arrival.storage]
        waiting.remove(arrival)
        if not waiting:
            del self.arriving[arrival.storage]
        arrival.settle(arrival.tensor)

    def settle_all(self, reductions: bool) -> None:
        """Looks at everything that has arrived.

        Args:
            reductions: Also at sums. Gradients may still be on their way when the schedule ends, and
                are waited for when gradients are finalized.
        """
        for arrival in [a for waiting in self.arriving.values() for a in waiting]:
            if reductions or not arrival.reduction:
                self._settle(arrival)

    # --- the exchange --------------------------------------------------------------------------------

    def exchange(self, reductions: bool = True) -> None:
        """Compares fingerprints with the peers; collective over every group that moved values.

        Args:
            reductions: See :meth:`settle_all`.
        """
        self.settle_all(reductions)
        device = self._engine.device
        pairs: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []
        for key in sorted(self._collective_groups):
            group = self._groups[key]
            size = group.size()
            mine = torch.stack([_summary(self._sent, key, peer, device) for peer in range(size)])
            theirs = torch.empty_like(mine)
            dist.all_to_all_single(theirs, mine, group=group)
            for peer in range(size):
                expected = _summary(self._received, key, peer, device)
                pairs.append((key, peer, theirs[peer], expected))
        requests = []
        for key, peer in sorted(self._point_to_point):
            group = self._groups[key]
            mine = _summary(self._sent, key, peer, device)
            theirs = torch.empty_like(mine)
            other = dist.get_global_rank(group, peer)
            # Receives first: with sends first, gloo's transfers are serialised.
            requests.append(dist.irecv(theirs, src=other, group=group))
            requests.append(dist.isend(mine, dst=other, group=group))
            pairs.append((key, peer, theirs, _summary(self._received, key, peer, device)))
        for request in requests:
            request.wait()
        for key, peer, theirs, expected in pairs:
            equal = torch.equal(theirs, expected) if device.type == "cpu" else (theirs == expected)
            if isinstance(equal, torch.Tensor):
                equal = equal.all()
            self._engine.ledger.check(equal, self._reporter(key, peer))
        self.forget()

    def _reporter(self, key: str, peer: int) -> Callable[[], Mismatch]:
        engine = self._engine
        places = self._received[key, peer].places
        source = dist.get_global_rank(self._groups[key], peer)

        def report() -> Mismatch:
            kinds = sorted({name for name, _ in places})
            position = places[0][1] if len(places) == 1 else engine.position.copy()
            position.phase = "communication"
            mismatch = Mismatch(position, "+".join(kinds), "communication")
            mismatch.note = (
                f"{len(places)} value(s) received from rank {source} in group {key} are not the "
                "ones it sent, or this rank's copy changed before it was read"
            )
            return mismatch

        return report

    def abandon(self) -> None:
        """Drops everything: the iteration has been discarded and all its transfers have ended."""
        self.arriving.clear()
        self.forget()

    def forget(self) -> None:
        """Drops what has been compared."""
        self._sent.clear()
        self._received.clear()
        self._point_to_point.clear()
        self._collective_groups.clear()


def copied_values(kwargs: dict[str, Any], copied: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: copied(value) for name, value in kwargs.items()}


def _work_of(result: Any) -> Any:
    work = result[-1] if isinstance(result, (tuple, list)) else result
    return dist._Work.unbox(work) if isinstance(work, torch.ScriptObject) else work


_K1, _K2 = -7046029254386353131, -4658895280553007687  # odd 64-bit constants of splitmix64


def _summary(
    channels: dict[tuple[str, int], _Channel], key: str, peer: int, device: torch.device
) -> torch.Tensor:
    """Two words for all that moved through one channel: [count, mixed fingerprints], int64.

    The same integer arithmetic on every device, so that a CPU and a CUDA rank would agree.
    """
    channel = channels.get((key, peer))
    if channel is None:
        return torch.zeros(2, dtype=torch.int64, device=device)
    words = [
        d if isinstance(d, torch.Tensor) else torch.tensor(_signed(d), device=device)
        for d in channel.digests
    ]
    values = torch.stack(words).to(torch.int64)
    place = torch.arange(1, len(words) + 1, dtype=torch.int64, device=device)
    mixed = (values ^ (place * _K1)) * _K2
    mixed = (mixed ^ (mixed >> 32)) * _K1
    return torch.stack([place[-1], (mixed ^ (mixed >> 29)).sum()])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# --- which tensors leave, arrive and come out, by operator ---------------------------------------------


def _pieces(tensor: torch.Tensor, sizes: list[int], count: int) -> list[torch.Tensor]:
    return list(tensor.split(sizes) if sizes else tensor.chunk(count))


def _departures(name: str, named: dict, group: Any) -> Iterator[tuple[list[int], torch.Tensor]]:
    """(peers, tensor) for everything this rank gives away; its own share counts too."""
    everyone = list(range(group.size()))
    root = named.get("root_rank")
    if name == "send":
        for tensor in named["tensors"]:
            yield [int(named["dst"])], tensor
    elif name == "broadcast" and group.rank() == root:
        for tensor in named["tensors"]:
            yield [p for p in everyone if p != root], tensor
    elif name == "all_gather":
        for tensor in _inputs(name, named):
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


def _arrivals(name: str, named: dict, group: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """(peer, tensor) for everything this rank receives, in the order in which it left the peer."""
    root = named.get("root_rank")
    if name == "recv":
        for tensor in named["tensors"]:
            yield int(named["src"]), tensor
    elif name == "broadcast" and group.rank() != root:
        for tensor in named["tensors"]:
            yield int(root), tensor
    elif name == "all_gather":
        for output in _outputs(name, named):
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


def _inputs(name: str, named: dict) -> list[torch.Tensor]:
    for key in ("input_tensors", "inputs", "input_list", "input_tensor", "input", "tensors"):
        if key in named:
            return tensors_of(named[key])
    return []


def _outputs(name: str, named: dict) -> list[Any]:
    keys = ("output_tensors", "outputs", "output_lists", "output_list")
    for key in (*keys, "output_tensor", "output", "tensors"):
        if key in named:
            value = named[key]
            return list(value) if isinstance(value, (list, tuple)) else [value]
    return []
