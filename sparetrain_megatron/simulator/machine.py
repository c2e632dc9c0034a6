"""The machine: what a GPU computes and moves a second, and what its links carry.

Link speeds depend on the size of the message, as measured bus bandwidths do.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from sparetrain_megatron.errors import UsageError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One GPU's way to others.

    Attributes:
        latency: Seconds before the first byte.
        rates: (message in bytes, bytes a second), ascending; between them it is interpolated over
            the logarithm of the size, outside the nearest holds.
    """

    latency: float
    rates: tuple[tuple[float, float], ...]

    def rate(self, size: float) -> float:
        """Bytes a second that a message of `size` bytes gets."""
        sizes = [entry[0] for entry in self.rates]
        place = bisect.bisect_left(sizes, size)
        if place == 0:
            return self.rates[0][1]
        if place == len(sizes):
            return self.rates[-1][1]
        (small, low), (large, high) = self.rates[place - 1 : place + 1]
        part = math.log(size / small) / math.log(large / small)
        return low + part * (high - low)

    def send(self, size: float) -> float:
        """Seconds of a message from one GPU to one other."""
        return self.latency + size / self.rate(size) if size else 0.0

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of an all-reduce of `size` bytes on each of `ranks`."""
        return self._collective(2 * size, size, ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather to `size` bytes, or of a reduce-scatter of so many."""
        return self._collective(size, size, ranks)

    def all_to_all(self, size: float, ranks: int) -> float:
        """Seconds of an all-to-all in which each rank has `size` bytes."""
        return self._collective(size, size, ranks)

    def _collective(self, moved: float, size: float, ranks: int) -> float:
        if ranks < 2 or not size:
            return 0.0
        # The latency of trees and NVLS grows slowly with the ranks.
        latency = self.latency * math.ceil(math.log2(ranks))
        return latency + moved * (ranks - 1) / ranks / self.rate(size)

    def scaled(self, factor: float) -> Link:
        """The same with other rates."""
        return Link(self.latency, tuple((size, rate * factor) for size, rate in self.rates))


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A node's GPUs and links, and what software gets out of them.

    Attributes:
        matmul: FLOP/s of the best matrix products in BF16.
        memory_rate: Bytes a second of device memory.
        memory: Bytes of device memory.
        nvlink: Inside a node: bus bandwidth of collectives.
        network: Between nodes: bus bandwidth of collectives, a GPU.
        wire: Between nodes: one GPU to one other.
        launch: Seconds that the shortest kernel takes.
        half_rate: FLOP of a matrix product that reaches half of `matmul`.
        attention: Share of `matmul` that fused attention reaches.
        grouped: Share of `matmul` that the experts' grouped products reach.
        per_node: GPUs of a node.
    """

    name: str
    matmul: float
    memory_rate: float
    memory: float
    nvlink: Link
    network: Link
    wire: Link
    launch: float = 4e-6
    half_rate: float = 4e9
    attention: float = 0.65
    grouped: float = 0.75
    per_node: int = 8

    def product(self, flops: float, moved: float, share: float = 1.0) -> float:
        """Seconds of a matrix product of `flops` that moves `moved` bytes."""
        computing = (flops + self.half_rate) / (self.matmul * share) if flops else 0.0
        return self.launch + max(computing, moved / self.memory_rate)

    def moving(self, moved: float) -> float:
        """Seconds of an operator that only moves `moved` bytes."""
        return self.launch + moved / self.memory_rate

    def link(self, ranks: int, stride: int = 1) -> Link:
        """What connects `ranks` GPUs that are `stride` apart in rank order."""
        return self.nvlink if self.inside(ranks, stride) else self.network

    def inside(self, ranks: int, stride: int = 1) -> bool:
        """Whether such a group is within a node."""
        return ranks * stride <= self.per_node

    def slowed(
        self, *, matmul: float = 1.0, nvlink: float = 1.0, network: float = 1.0, wire: float = 1.0
    ) -> Machine:
        """The same machine with shares of its rates."""
        return dataclasses.replace(
            self,
            matmul=self.matmul * matmul,
            nvlink=self.nvlink.scaled(nvlink),
            network=self.network.scaled(network),
            wire=self.wire.scaled(wire),
        )

    def deterministic(self) -> Machine:
        """The same machine in Megatron's deterministic mode, which allows NCCL's rings only."""
        return dataclasses.replace(self, nvlink=self.nvlink.scaled(RING))

    def shared_adapter(self, rate: float) -> Machine:
        """The same machine with one network adapter a node, which all its GPUs use at one time.

        Args:
            rate: Bytes a second that the adapter moves, each way.
        """
        each = ((1e6, rate / self.per_node),)
        return dataclasses.replace(
            self, wire=Link(self.wire.latency, each), network=Link(self.network.latency, each)
        )


RING = 365 / 470
"""Bus bandwidth of large all-reduces in a node of eight H100s: by ring, and as NCCL chooses."""


def _nvlink(full: float) -> Link:
    return Link(8e-6, ((1e6, 0.2 * full), (1e7, 0.6 * full), (1e8, 0.92 * full), (1e9, full)))


_NETWORK = Link(2e-5, ((1e6, 22e9), (1e7, 125e9), (1e8, 304e9), (1e9, 435e9)))
"""Bus bandwidth of an all-reduce over two nodes of eight GPUs."""

_WIRE = Link(1e-5, ((1e5, 8e9), (1e6, 25e9), (1e7, 44e9), (1e8, 48e9)))
"""One GPU and its own adapter of 400 Gbit/s."""


def _network_per_gpu(nodes_rate: Link) -> Link:
    """A group of one GPU a node has its own adapter only, an eighth of the node's."""
    return nodes_rate.scaled(1 / 8)


PRESETS = {
    "h100": Machine(
        "h100", 790e12, 3.35e12, 80 * GIB, _nvlink(470e9), _network_per_gpu(_NETWORK), _WIRE
    ),
    "h200": Machine(
        "h200", 790e12, 4.8e12, 141 * GIB, _nvlink(470e9), _network_per_gpu(_NETWORK), _WIRE
    ),
    "b200": Machine(
        "b200", 1750e12, 8e12, 180 * GIB, _nvlink(840e9), _network_per_gpu(_NETWORK), _WIRE
    ),
}


def machine(name: str, memory_gb: float | None = None) -> Machine:
    """A preset, with another memory size (in GiB, as GPUs are named after) where it is given.

    Raises:
        UsageError: No such preset, or a size that is not positive.
    """
    if name not in PRESETS:
        raise UsageError(f"--gpu {name}: should be one of {', '.join(PRESETS)}")
    found = PRESETS[name]
    if memory_gb is None:
        return found
    if memory_gb <= 0:
        raise UsageError(f"--memory-gb {memory_gb}: should be positive")
    return dataclasses.replace(found, memory=memory_gb * GIB)
