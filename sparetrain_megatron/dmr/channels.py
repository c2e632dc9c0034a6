"""What moved between this rank and its peers since the last verdict, and whether it arrived as it
left.

Each group and peer is a *channel* in either direction: a list of fingerprints. At a verdict two
words for each channel are exchanged, in one go; only if some are wrong are the lists themselves
compared, to say which value it was.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .mismatch import Mismatch

if TYPE_CHECKING:
    from .engine import Engine


@dataclasses.dataclass(slots=True)
class Channel:
    """What moved between this rank and one peer of one group in one direction since the verdict."""

    digests: list[Any] = dataclasses.field(default_factory=list)
    places: list[tuple[str, Any]] = dataclasses.field(default_factory=list)


class Channels:
    """The channels of one rank.

    Attributes:
        sent, received: By (group, peer in the group).
    """

    def __init__(self, engine: Engine) -> None:
        self.sent: dict[tuple[str, int], Channel] = defaultdict(Channel)
        self.received: dict[tuple[str, int], Channel] = defaultdict(Channel)
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self._used: set[str] = set()
        self._point_to_point: set[tuple[str, int]] = set()

    def use(self, group: Any, peer: int | None) -> None:
        """Values move in a group: between all of its ranks, or between this one and a peer."""
        key = group.group_name
        self._groups[key] = group
        if peer is None:
            self._used.add(key)
        else:
            self._point_to_point.add((key, peer))

    def exchange(self) -> list[tuple[str, int]]:
        """Compares fingerprints with the peers; collective over every group that moved values.

        Returns:
            The channels, (group, peer), from which something arrived that was not sent. What moved
            is kept until :meth:`forget`.
        """
        device = self._engine.device
        channels: list[tuple[str, int]] = []
        theirs: list[torch.Tensor] = []
        for key in sorted(self._used):
            size = self._groups[key].size()
            mine = torch.stack([_summary(self.sent, key, peer, device) for peer in range(size)])
            sent_to_me = torch.empty_like(mine)
            dist.all_to_all_single(sent_to_me, mine, group=self._groups[key])
            channels += [(key, peer) for peer in range(size)]
            theirs += list(sent_to_me)
        pairs = sorted(self._point_to_point)
        outgoing = [_summary(self.sent, *pair, device) for pair in pairs]
        theirs += self._swap(pairs, outgoing, [torch.empty_like(t) for t in outgoing])
        channels += pairs
        if not channels:
            return []
        expected = [_summary(self.received, *channel, device) for channel in channels]
        equal = (torch.stack(theirs) == torch.stack(expected)).all(dim=1)
        return [channel for channel, same in zip(channels, equal.tolist()) if not same]

    def locate(self, bad: list[tuple[str, int]]) -> None:
        """Finds which values of the bad channels are wrong, and records them.

        Collective over the same groups as :meth:`exchange`; for when any rank has a bad channel.
        """
        device = self._engine.device
        for key in sorted(self._used):
            group = self._groups[key]
            size = group.size()
            out = [_words(self.sent.get((key, peer)), device) for peer in range(size)]
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
        out = [_words(self.sent.get(pair), device) for pair in pairs]
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
        channel = self.received[key, peer]
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

    def forget(self) -> None:
        """Drops what has been compared."""
        self.sent.clear()
        self.received.clear()
        self._point_to_point.clear()
        self._used.clear()


_K1, _K2 = -7046029254386353131, -4658895280553007687  # odd 64-bit constants of splitmix64


def _summary(
    channels: Mapping[tuple[str, int], Channel], key: str, peer: int, device: torch.device
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


def _words(channel: Channel | None, device: torch.device) -> torch.Tensor:
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
