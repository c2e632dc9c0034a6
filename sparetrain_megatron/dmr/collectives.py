"""Values that move between ranks, and sums over ranks.

A *moved* value (send/receive, broadcast, gather, scatter, all-to-all) must arrive as it left: it is
fingerprinted where it leaves and where it arrives, and the fingerprints are exchanged in one go at
the next verdict. A *reduction* is arithmetic, and a wrong sum agrees on every rank: it is done a
second time from the same inputs and compared.

A result must not be read before the framework has waited for it, and that wait is invisible here.
But no correct program touches the result earlier either; so a result is looked at when the first
operator touches its bytes, or at the verdict.

Integers (sizes, counts, tokens) are moved, or summed, three times and the majority is taken before
anybody uses them: a wrong one would crash what follows, long before the verdict.

[Note: order] Second reductions and exchanges are issued in program order, which is the same on all
ranks of a group, so they can't deadlock; nothing here depends on a rank's own timing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import bits
from .channels import Channel, Channels
from .dynamic import Windows
from .fingerprint import fingerprint
from .mismatch import Mismatch
from .operators import Operator, tensors_of
from .position import Position
from .transfers import NAMES, NO_VALUE, REDUCTIONS, Transfer, departures, inputs_of, outputs_of
from .transfers import arrivals as arrivals_of
from .window import Waiter

if TYPE_CHECKING:
    from .engine import Engine


_IN_PLACE = {"all_reduce", "broadcast", "reduce"}


@dataclasses.dataclass(slots=True, eq=False)
class _Arrival:
    """A result that may still be on its way."""

    tensor: torch.Tensor
    storage: int
    low: int
    high: int
    reduction: bool
    settle: Callable[[torch.Tensor], None]
    transfers: Sequence[Transfer]  # what brings it, and its repetitions

    @property
    def by_copy(self) -> bool:
        """Whether the transport may deliver it by a copy."""
        return any(t.name == "reduce_scatter" for t in self.transfers)


class Collectives:
    """Runs the collectives of one rank and remembers what has to be compared.

    Attributes:
        arriving: Results not looked at yet, by storage. While it is empty operators need not ask.
    """

    def __init__(self, engine: Engine) -> None:
        self.arriving: dict[int, list[_Arrival]] = {}
        self._engine = engine
        self.channels = Channels(engine)
        self._reductions_seen: dict[str, int] = defaultdict(int)
        self.ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._spans: dict[str, bool] = {}
        self._waiter: Waiter | None = None
        self.windows = Windows()
        self._sending: list[Transfer] = []  # repetitions that nothing arrives from

    # --- issuing ---------------------------------------------------------------------------------

    def run(self, operator: Operator, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Issues a collective once and arranges for its result to be checked."""
        named = dict(zip((a.name for a in func._schema.arguments), args), **kwargs)
        name = NAMES.get(operator.name)
        group = named.get("process_group")
        engine = self._engine
        if operator.name in NO_VALUE:
            engine.count_once("barrier")
            return func(*args, **kwargs)
        if name is None or group is None:
            engine.unprotected(operator.name)
            return func(*args, **kwargs)
        group = dist.ProcessGroup.unbox(group)
        if group.size() == 1:
            return self._alone(name, func, args, kwargs, named)
        call = Transfer(name, func, args, kwargs, named, group)
        output = self._reduction(call) if name in REDUCTIONS else self._moved(call)
        if not named.get("async_op", True):
            # The caller waits as soon as we return: a window.
            self._serve(call)
        return output

    def _serve(self, call: Transfer) -> None:
        engine = self._engine
        engine.window_opens("inter" if self.spans_hosts(call.group) else "intra", call.name)
        start, crossing, room = time.perf_counter(), 0, None
        like: Sequence[float] = ()
        # An all-to-all is as long as the busiest expert makes it.
        size = call.item if call.name == "all_to_all" else call.moved
        key = (call.name, call.group.group_name, size)
        if engine.device.type == "cpu":  # on a GPU the host does not know how long operators take
            room = None if call.name == "all_to_all" else self.windows.room(key)
            crossing = call.crossing
            like = self.windows.like(key, crossing)
        transfers = [call, *call.repeats]
        if engine.deferred and call.name == "reduce_scatter":
            # Gloo delivers it by a copy when it is waited for, and never says it is complete.
            self._waiter = self._waiter or Waiter()
            done, finish = self._waiter.start(transfers)
            engine.deferred.serve(done.is_set, room, like)
            finish()
        else:
            engine.deferred.serve(lambda: all(t.completed for t in transfers), room, like)
            call.wait()  # as the caller is about to do: so that the window's length is known
        engine.window_closes()
        seconds = time.perf_counter() - start
        self.windows.closed(key, seconds)
        self.windows.crossed(key, crossing, seconds)

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

    def stays(self, operator: Operator, args: tuple) -> bool:
        """Whether a collective does nothing at all: in place, in a group of one."""
        if NAMES.get(operator.name) not in _IN_PLACE:
            return False
        # allreduce_(tensors, group, …), and the others likewise
        return dist.ProcessGroup.unbox(args[1]).size() == 1

    def _alone(self, name: str, func: Any, args: tuple, kwargs: dict, named: dict) -> Any:
        """A group of one: nothing moves; what is left is a copy on this device."""
        inputs = [fingerprint(t) for t in inputs_of(name, named)]
        output = func(*args, **kwargs)
        engine = self._engine
        report = engine.reporter(name, "communication", later=True)
        for result, expected in zip(tensors_of(outputs_of(name, named)), inputs):

            def settle(t: torch.Tensor, expected: Any = expected) -> None:
                engine.ledger.check(fingerprint(t) == expected, report)

            self._arrive(result, None, settle)
        return output

    def _reduction(self, call: Transfer) -> Any:
        engine, name = self._engine, call.name
        results = tensors_of(outputs_of(name, call.named))
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
        """Compares a result with its repetitions; takes the majority where there are two."""
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
        """Whether this reduction is done twice: the same on every rank, spread evenly."""
        count = self._reductions_seen[key]
        self._reductions_seen[key] += 1
        rate = self._engine.reductions
        return int((count + 1) * rate) != int(count * rate)

    def _moved(self, call: Transfer) -> Any:
        engine, name, key = self._engine, call.name, call.group.group_name
        channels = self.channels
        side = {"send": "dst", "recv": "src"}.get(name)
        channels.use(call.group, None if side is None else int(call.named[side]))
        for peers, tensor in departures(name, call.named, call.group):
            digest = fingerprint(tensor)
            for peer in peers:
                channel = channels.sent[key, peer]
                channel.digests.append(digest)
                channel.places.append((name, None))
        repeats = call.repeats = [call.repeat() for _ in range(2)] if call.integers else []
        output = call.issue()
        for repeat in repeats:
            repeat.issue()
        arrivals = list(arrivals_of(name, call.named, call.group))
        again = [list(arrivals_of(name, r.named, call.group)) for r in repeats]
        observe = engine.observe_later(name) if engine.passes and arrivals else None
        left = [len(arrivals)]
        report = engine.reporter(name, "communication", later=True)
        for i, (peer, tensor) in enumerate(arrivals):
            channel = channels.received[key, peer]
            slot = len(channel.digests)
            place = engine.position.copy()
            channel.digests.append(None)
            channel.places.append((name, place))
            others = [copies[i][1] for copies in again]

            def settle(
                t: torch.Tensor,
                channel: Channel = channel,
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

    # --- arrival ---------------------------------------------------------------------------------

    def _arrive(
        self,
        tensor: torch.Tensor,
        name: str | None,
        settle: Callable[[torch.Tensor], None],
        transfers: Sequence[Transfer] = (),
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
        low = int(tensor.storage_offset()) * tensor.element_size()
        high = low + bits.span(tensor) * tensor.element_size()
        storage = tensor.untyped_storage()._cdata
        arrival = _Arrival(tensor, storage, low, high, name in REDUCTIONS, looked_at, transfers)
        self.arriving.setdefault(storage, []).append(arrival)

    def _arrive_all(
        self,
        tensors: list[torch.Tensor],
        name: str | None,
        settle: Callable[[list[torch.Tensor]], None],
        transfers: Sequence[Transfer] = (),
    ) -> None:
        """As :meth:`_arrive` for results that are looked at together, as they are."""
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
            reductions: Also at sums. Gradients may still be on their way when the schedule ends,
                and are waited for when gradients are finalized.
        """
        for arrival in [a for waiting in self.arriving.values() for a in waiting]:
            if reductions or not arrival.reduction:
                self._settle(arrival)

    def abandon(self) -> None:
        """Drops everything of a discarded iteration, whose own transfers have ended."""
        for waiting in self.arriving.values():
            for arrival in waiting:
                for transfer in arrival.transfers[1:]:
                    transfer.wait()
        self.arriving.clear()
        self.forget()

    def forget(self) -> None:
        """Drops what has been compared."""
        self.channels.forget()
        for repeat in self._sending:
            repeat.wait()
        self._sending.clear()
