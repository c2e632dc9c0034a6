"""Values that move between ranks, and sums over ranks.

A *moved* value (send/receive, broadcast, gather, scatter, all-to-all) must arrive as it left: it is
fingerprinted where it leaves and where it arrives, and the fingerprints are exchanged in one go at
the next verdict. A *reduction* is arithmetic, and a wrong sum agrees on every rank: it is done a
second time from the same inputs and compared.

A result must not be read before the framework has waited for it, and that wait is invisible here. But
no correct program touches the result earlier either; so a result is looked at when the first operator
touches its bytes, or at the verdict.

Integers (sizes, counts, tokens) are moved, or summed, three times and the majority is taken before
anybody uses them: a wrong one would crash what follows, long before the verdict.

[Note: order] Second reductions and exchanges are issued in program order, which is the same on all
ranks of a group, so they can't deadlock; nothing here depends on a rank's own timing.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import bits
from .fingerprint import fingerprint
from .mismatch import Mismatch
from .operators import Operator, tensors_of
from .position import Position
from .window import Waiter

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
    transfers: Sequence[_Transfer]  # what brings it, and its repetitions

    @property
    def by_copy(self) -> bool:
        """Whether the transport may deliver it by a copy."""
        return any(t.name == "reduce_scatter" for t in self.transfers)


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
        self.ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._spans: dict[str, bool] = {}
        self._waiter: Waiter | None = None
        self._sending: list[_Transfer] = []  # repetitions that nothing arrives from

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
            return self._alone(name, func, args, kwargs, named)
        self._groups[group.group_name] = group
        call = _Transfer(name, func, args, kwargs, named, group)
        output = self._reduction(call) if name in _REDUCTIONS else self._moved(call)
        if not named.get("async_op", True):
            # The caller waits as soon as we return: a window.
            self._serve(call)
        return output

    def _serve(self, call: _Transfer) -> None:
        engine = self._engine
        engine.window_opens("inter" if self.spans_hosts(call.group) else "intra", call.name)
        if engine.deferred:
            transfers = [call, *call.repeats]
            if call.name == "reduce_scatter":
                # Gloo delivers it by a copy when it is waited for, and never says it is complete.
                self._waiter = self._waiter or Waiter()
                done, finish = self._waiter.start(transfers)
                engine.deferred.serve(done.is_set)
                finish()
            else:
                engine.deferred.serve(lambda: all(t.completed for t in transfers))
        engine.window_closes()

    def spans_hosts(self, group: Any) -> bool:
        """Whether a group has ranks on several hosts."""
        key = group.group_name
        if key not in self._spans:
            local = self.ranks_per_host
            hosts = {rank // local for rank in dist.get_process_group_ranks(group)}
            self._spans[key] = len(hosts) > 1
        return self._spans[key]

    def in_flight(self) -> bool:
        """Whether sums of gradients are still on their way."""
        return any(
            not transfer.completed
            for waiting in self.arriving.values()
            for arrival in waiting
            for transfer in arrival.transfers
        )

    def _alone(self, name: str, func: Any, args: tuple, kwargs: dict, named: dict) -> Any:
        """A group of one: nothing moves; what is left is a copy on this device."""
        inputs = [fingerprint(t) for t in _inputs(name, named)]
        output = func(*args, **kwargs)
        engine = self._engine
        report = engine.reporter(name, "communication", later=True)
        for result, expected in zip(tensors_of(_outputs(name, named)), inputs):

            def settle(t: torch.Tensor, expected: Any = expected) -> None:
                engine.ledger.check(fingerprint(t) == expected, report)

            self._arrive(result, None, settle)
        return output

    def _reduction(self, call: _Transfer) -> Any:
        engine, name = self._engine, call.name
        results = tensors_of(_outputs(name, call.named))
        # Only the root's result of a `reduce` has a defined value.
        defined = name != "reduce" or call.group.rank() == call.named["root_rank"]
        integers = call.integers
        if engine.passes and not integers:
            # Forward and recompute reduce the same values: the second pass is the second reduction.
            output = call.issue()
            observe = engine.observe_later(name)
            settle = observe if defined else lambda tensors: observe([])
            self._arrive_all(results, name, settle, [call])
            engine.statistics.reductions_checked += engine.passes[-1].second
            return output
        if not integers and not self._chosen(call.group.group_name):
            engine.statistics.reductions_not_doubled += 1
            output = call.issue()
            self._arrive_all(results, name, lambda tensors: None)
            return output
        repeats = [call.repeat() for _ in range(2 if integers or engine.repairs_all else 1)]
        engine.held(sum(r.size for r in repeats))
        output = call.issue()
        for repeat in repeats:
            repeat.issue()
        engine.statistics.reductions_checked += 1
        report = engine.reporter(name, "reduction", later=True)

        def compare(tensors: list[torch.Tensor]) -> None:
            for repeat in repeats:
                repeat.wait()
            for mine in tensors if defined else ():
                self._agree(mine, [repeat.of(mine) for repeat in repeats], report)

        self._arrive_all(results, name, compare, [call, *repeats])
        if engine.passes:
            self._arrive_all(results, None, engine.observe_later(name))
        return output

    def _agree(
        self, mine: torch.Tensor, others: list[torch.Tensor], report: Callable[[], Mismatch]
    ) -> None:
        """Compares a result with its repetitions; takes the majority where there are two of them."""
        engine = self._engine
        before = mine.clone() if len(others) == 2 and engine.repairs else None
        if before is not None:
            mine.copy_(bits.majority((before, *others)))
        for other in others:
            first = mine if before is None else before
            equal = bits.equal(first, other)
            if equal is False:
                mismatch = report()
                differ, elements, positions = bits.difference(first, other)
                mismatch.elements_differ, mismatch.elements = differ, elements
                mismatch.bits = positions
                engine.ledger.record(mismatch)
                return
            engine.ledger.check(equal, report)

    def _chosen(self, key: str) -> bool:
        """Whether this reduction is done twice: the same on every rank of the group, spread evenly."""
        count = self._reductions_seen[key]
        self._reductions_seen[key] += 1
        rate = self._engine.reductions
        return int((count + 1) * rate) != int(count * rate)

    def _moved(self, call: _Transfer) -> Any:
        engine, name, key = self._engine, call.name, call.group.group_name
        if name in ("send", "recv"):
            peer = int(call.named["dst" if name == "send" else "src"])
            self._point_to_point.add((key, peer))
        else:
            self._collective_groups.add(key)
        for peers, tensor in _departures(name, call.named, call.group):
            digest = fingerprint(tensor)
            for peer in peers:
                channel = self._sent[key, peer]
                channel.digests.append(digest)
                channel.places.append((name, None))
        repeats = call.repeats = [call.repeat() for _ in range(2)] if call.integers else []
        output = call.issue()
        for repeat in repeats:
            repeat.issue()
        arrivals = list(_arrivals(name, call.named, call.group))
        again = [list(_arrivals(name, r.named, call.group)) for r in repeats]
        observe = engine.observe_later(name) if engine.passes and arrivals else None
        left = [len(arrivals)]
        report = engine.reporter(name, "communication", later=True)
        for i, (peer, tensor) in enumerate(arrivals):
            channel = self._received[key, peer]
            slot = len(channel.digests)
            place = engine.position.copy()
            channel.digests.append(None)
            channel.places.append((name, place))
            others = [copies[i][1] for copies in again]

            def settle(
                t: torch.Tensor,
                channel: _Channel = channel,
                slot: int = slot,
                others: list[torch.Tensor] = others,
            ) -> None:
                if others:
                    for repeat in repeats:
                        repeat.wait()
                    self._agree(t, others, report)
                channel.digests[slot] = fingerprint(t)
                left[0] -= 1
                if observe is not None and left[0] == 0:
                    observe([t for _, t in arrivals])

            self._arrive(tensor, name, settle, [call, *repeats], place)
        if not arrivals:
            self._sending.extend(repeats)
        engine.statistics.communications_checked += len(arrivals)
        return output

    # --- arrival -------------------------------------------------------------------------------------

    def _arrive(
        self,
        tensor: torch.Tensor,
        name: str | None,
        settle: Callable[[torch.Tensor], None],
        transfers: Sequence[_Transfer] = (),
        place: Position | None = None,
    ) -> None:
        """Has a result looked at when it is first used.

        Args:
            name: For fault injection; None where nothing has moved.
            place: Where in the step, if the caller keeps it; completed when it is looked at.
        """
        engine = self._engine
        tensor = tensor.detach()
        place = place or engine.position.copy()
        place.phase = "communication"

        def looked_at(t: torch.Tensor) -> None:
            if place.microbatch is None:
                # Between stages: it belongs to the microbatch that uses it.
                place.microbatch = engine.position.microbatch
            if name is not None and engine.injector.armed:
                engine.injector.visit(place, name, "primary", [t])
            settle(t)

        if tensor.numel() == 0:
            settle(tensor)
            return
        low = tensor.storage_offset() * tensor.element_size()
        high = low + bits.span(tensor) * tensor.element_size()
        storage = tensor.untyped_storage()._cdata
        arrival = _Arrival(tensor, storage, low, high, name in _REDUCTIONS, looked_at, transfers)
        self.arriving.setdefault(storage, []).append(arrival)

    def _arrive_all(
        self,
        tensors: list[torch.Tensor],
        name: str | None,
        settle: Callable[[list[torch.Tensor]], None],
        transfers: Sequence[_Transfer] = (),
    ) -> None:
        """As :meth:`_arrive` for results that are looked at together; the originals are passed on."""
        left = [len(tensors)]

        def one(_: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                settle(tensors)

        for tensor in tensors:
            self._arrive(tensor, name, one, transfers)

    def touch(self, operator: Operator, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operator is about to read or write these: looks at results among them first.

        Some transports (gloo's reduce-scatter) deliver a result by a copy into it while they are
        waited for; such a copy's target is therefore not looked at yet.
        """
        if operator.name == "copy_":
            self.look_at(tensors_of(args[:1]), copied_into=True)
            args = args[1:]
        self.look_at(tensors_of(args, kwargs))

    def look_at(self, tensors: Sequence[torch.Tensor], copied_into: bool = False) -> None:
        """These are about to be read; the framework has waited for those that were on their way.

        Args:
            copied_into: They are about to be the target of a copy, perhaps of the result itself.
        """
        for tensor in tensors:
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
                if not (copied_into and arrival.by_copy):
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

    def exchange(self, reductions: bool = True) -> list[tuple[str, int]]:
        """Compares fingerprints with the peers; collective over every group that moved values.

        Args:
            reductions: See :meth:`settle_all`.

        Returns:
            The channels, (group, peer), from which something arrived that was not sent. What moved
            is kept until :meth:`forget`.
        """
        self.settle_all(reductions)
        device = self._engine.device
        channels: list[tuple[str, int]] = []
        theirs: list[torch.Tensor] = []
        for key in sorted(self._collective_groups):
            size = self._groups[key].size()
            mine = torch.stack([_summary(self._sent, key, peer, device) for peer in range(size)])
            sent_to_me = torch.empty_like(mine)
            dist.all_to_all_single(sent_to_me, mine, group=self._groups[key])
            channels += [(key, peer) for peer in range(size)]
            theirs += list(sent_to_me)
        pairs = sorted(self._point_to_point)
        outgoing = [_summary(self._sent, *pair, device) for pair in pairs]
        theirs += self._swap(pairs, outgoing, [torch.empty_like(t) for t in outgoing])
        channels += pairs
        if not channels:
            return []
        expected = [_summary(self._received, *channel, device) for channel in channels]
        equal = (torch.stack(theirs) == torch.stack(expected)).all(dim=1)
        return [channel for channel, same in zip(channels, equal.tolist()) if not same]

    def locate(self, bad: list[tuple[str, int]]) -> None:
        """Finds which values of the bad channels are wrong, and records them.

        Collective over the same groups as :meth:`exchange`; for when any rank has a bad channel.
        """
        device = self._engine.device
        for key in sorted(self._collective_groups):
            group = self._groups[key]
            size = group.size()
            out = [_words(self._sent.get((key, peer)), device) for peer in range(size)]
            counts = torch.tensor([t.numel() for t in out], dtype=torch.int64, device=device)
            incoming = torch.empty_like(counts)
            dist.all_to_all_single(incoming, counts, group=group)
            sizes = incoming.tolist()
            received = torch.empty(sum(sizes), dtype=torch.int64, device=device)
            dist.all_to_all_single(
                received, torch.cat(out), sizes, [t.numel() for t in out], group=group
            )
            for peer, words in enumerate(received.split(sizes)):
                if (key, peer) in bad:
                    self._record(key, peer, words.tolist())
        pairs = sorted(self._point_to_point)
        out = [_words(self._sent.get(pair), device) for pair in pairs]
        counts_out = [torch.tensor([t.numel()], device=device) for t in out]
        counts_in = self._swap(pairs, counts_out, [torch.empty_like(c) for c in counts_out])
        spaces = [torch.empty(int(c), dtype=torch.int64, device=device) for c in counts_in]
        for pair, words in zip(pairs, self._swap(pairs, out, spaces)):
            if pair in bad:
                self._record(*pair, words.tolist())

    def _swap(
        self, pairs: list[tuple[str, int]], out: list[torch.Tensor], into: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Sends one tensor to each point-to-point peer and receives one from each."""
        requests: list[Any] = []
        # Receives first: with sends first, gloo's transfers are serialised. A peer to which nothing
        # is to be sent has nothing to receive either.
        for (key, peer), tensor in zip(pairs, into):
            group = self._groups[key]
            if tensor.numel():
                source = dist.get_global_rank(group, peer)
                requests.append(dist.irecv(tensor, src=source, group=group))
        for (key, peer), tensor in zip(pairs, out):
            group = self._groups[key]
            if tensor.numel():
                target = dist.get_global_rank(group, peer)
                requests.append(dist.isend(tensor, dst=target, group=group))
        for request in requests:
            request.wait()
        return into

    def _record(self, key: str, peer: int, sent: list[int]) -> None:
        engine = self._engine
        channel = self._received[key, peer]
        mine = _words(channel, engine.device).tolist()
        wrong = [i for i, (a, b) in enumerate(zip(sent, mine)) if a != b]
        source = dist.get_global_rank(self._groups[key], peer)
        if not wrong:  # one side counts more values than the other
            name, position = "communication", engine.position.copy()
        else:
            name, position = channel.places[wrong[0]]
        position.phase = "communication"
        mismatch = Mismatch(position, name, "communication")
        mismatch.followed_by = max(0, len(wrong) - 1)
        mismatch.note = (
            f"not what rank {source} sent, or changed before it was read: "
            f"{len(wrong)} of {len(mine)} values from that rank"
        )
        engine.ledger.record(mismatch)

    def abandon(self) -> None:
        """Drops everything: the iteration is discarded, and the framework has ended its transfers."""
        for waiting in self.arriving.values():
            for arrival in waiting:
                for transfer in arrival.transfers[1:]:
                    transfer.wait()
        self.arriving.clear()
        self.forget()

    def forget(self) -> None:
        """Drops what has been compared."""
        self._sent.clear()
        self._received.clear()
        self._point_to_point.clear()
        self._collective_groups.clear()
        for repeat in self._sending:
            repeat.wait()
        self._sending.clear()


class _Transfer:
    """One call of a collective operator, which can be issued again with copies of its tensors."""

    def __init__(
        self, name: str, func: Any, args: tuple, kwargs: dict, named: dict, group: Any
    ) -> None:
        self.name, self.func, self.args, self.kwargs = name, func, args, kwargs
        self.named, self.group = named, group
        self.repeats: list[_Transfer] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._work: Any = None

    @property
    def integers(self) -> bool:
        tensors = tensors_of(self.args, self.kwargs)
        return not any(t.is_floating_point() or t.is_complex() for t in tensors)

    @property
    def size(self) -> int:
        """Bytes of the copies."""
        return sum(t.numel() * t.element_size() for t in self._copies.values())

    def repeat(self) -> _Transfer:
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
        again = _Transfer(self.name, self.func, args, kwargs, named, self.group)
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


_K1, _K2 = -7046029254386353131, -4658895280553007687  # odd 64-bit constants of splitmix64


def _summary(
    channels: dict[tuple[str, int], _Channel], key: str, peer: int, device: torch.device
) -> torch.Tensor:
    """Two words for all that moved through one channel: [count, mixed fingerprints], int64.

    The same integer arithmetic on every device, so that a CPU and a CUDA rank would agree.
    """
    values = _words(channels.get((key, peer)), device)
    place = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=device)
    mixed = (values ^ (place * _K1)) * _K2
    mixed = (mixed ^ (mixed >> 32)) * _K1
    count = torch.tensor(values.numel(), dtype=torch.int64, device=device)
    return torch.stack([count, (mixed ^ (mixed >> 29)).sum()])


def _words(channel: _Channel | None, device: torch.device) -> torch.Tensor:
    """The fingerprints of one channel, int64, in order."""
    digests = channel.digests if channel is not None else []
    if not any(isinstance(d, torch.Tensor) for d in digests):
        return torch.tensor([_signed(d) for d in digests], dtype=torch.int64, device=device)
    return torch.stack(
        [
            d if isinstance(d, torch.Tensor) else torch.tensor(_signed(d), device=device)
            for d in digests
        ]
    ).to(torch.int64)


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
