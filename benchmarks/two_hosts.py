"""Two hosts on one machine, joined by a link of a chosen rate.

Two network namespaces and a veth pair between them; a token bucket filter at each end limits the
rate. All traffic stays on this machine. Where namespaces are not permitted, an emulated link keeps
a transfer from completing before its bytes would have passed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PORT = 29500
BURST_SECONDS = 0.004
QUEUE_BYTES = 8 << 20
"""Beyond what is ever under way, so that nothing is dropped."""

TCP = {
    # A transfer shall take its bytes' time over the link, always: no probing for the rate (bbr
    # makes single transfers up to twice as long), no start from a small window after a pause, and
    # windows that hold a whole transfer, since its acknowledgements queue behind the data that goes
    # the other way.
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": f"4096 {QUEUE_BYTES} {QUEUE_BYTES}",
    "tcp_wmem": f"4096 {QUEUE_BYTES} {QUEUE_BYTES}",
}


class LinkError(RuntimeError):
    """A link could not be made; says what is missing."""


def command(*words: str) -> None:
    """Runs ``ip`` or ``tc``.

    Raises:
        LinkError: It is absent or failed.
    """
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise LinkError(f"{words[0]} is absent (Debian package iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise LinkError(f"{' '.join(words)}: {error.stderr.strip()}") from None


def shaping(device: str, bits_per_second: float) -> list[str]:
    """The ``tc`` command that limits a device's rate, whatever its rate was before."""
    bytes_per_second = bits_per_second / 8
    burst = max(8192, int(bytes_per_second * BURST_SECONDS))
    rate = f"{int(bits_per_second)}bit"
    text = f"tc qdisc replace dev {device} root tbf rate {rate} burst {burst} limit {QUEUE_BYTES}"
    return text.split()


class Namespaces:
    """Two network namespaces with one end of a veth pair each; a context manager.

    Names carry the process's id, so that several runs do not meet.

    Attributes:
        namespaces, devices, addresses: Of the two hosts.
    """

    kind = "namespaces"

    def __init__(self) -> None:
        pid = os.getpid()
        self.namespaces = [f"sparetrain-{pid}-{i}" for i in range(2)]
        self.devices = [f"st{pid}-{i}" for i in range(2)]
        self.addresses = [f"10.213.{pid % 250}.{i + 1}" for i in range(2)]
        self._made: list[str] = []

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _make(self) -> None:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinkError(f"{tool} is absent (Debian package iproute2)")
        _remove_stale()
        for name in self.namespaces:
            command("ip", "netns", "add", name)
            self._made.append(name)
        (a, b), (left, right) = self.namespaces, self.devices
        command(
            *("ip", "link", "add", left, "netns", a, "type", "veth"),
            *("peer", "name", right, "netns", b),
        )
        for name, device, address in zip(self.namespaces, self.devices, self.addresses):
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            command("ip", "-n", name, "link", "set", device, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            for setting, value in TCP.items():
                write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
                command("ip", "netns", "exec", name, "sh", "-c", write)
        # Whether the kernel has the filter shows here rather than in the middle of the run.
        command("ip", "netns", "exec", a, *shaping(left, 1e9))
        command("ip", "netns", "exec", a, "tc", "qdisc", "del", "dev", left, "root")

    def remove(self) -> None:
        """Removes what was made; the veth pair goes with its namespaces."""
        while self._made:
            with contextlib.suppress(LinkError):
                command("ip", "netns", "del", self._made.pop())

    def launch(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """What to put before a rank's command, and its environment."""
        environment = {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": self.devices[rank],
        }
        return ["ip", "netns", "exec", self.namespaces[rank]], environment


def _remove_stale() -> None:
    """Removes what runs left behind that were killed."""
    for path in Path("/run/netns").glob("sparetrain-*-[01]"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            with contextlib.suppress(LinkError):
                command("ip", "netns", "del", path.name)


class Loopback:
    """No hosts, only processes; goes with :class:`EmulatedLink`."""

    kind = "emulated"

    def __enter__(self) -> Loopback:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def launch(self, rank: int) -> tuple[list[str], dict[str, str]]:
        return [], {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "lo",
        }


@contextlib.contextmanager
def hosts(kind: str) -> Iterator[Namespaces | Loopback]:
    """The two hosts, removed at the end, also after SIGTERM or SIGINT.

    Args:
        kind: ``namespaces``, ``emulated``, or ``auto`` for the first that is possible.

    Raises:
        LinkError: Namespaces were asked for and are not possible.
    """
    handled = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in handled]
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, _terminated)
    try:
        with contextlib.ExitStack() as stack:
            if kind == "emulated":
                yield stack.enter_context(Loopback())
                return
            try:
                made: Namespaces | Loopback = stack.enter_context(Namespaces())
            except LinkError as error:
                if kind == "namespaces":
                    raise
                print(f"no network namespaces ({error}): the link is emulated", flush=True)
                made = stack.enter_context(Loopback())
            yield made
    finally:
        for number, handler in zip(handled, before):
            signal.signal(number, handler)


def _terminated(number: int, frame: Any) -> None:
    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, _ignored)  # one is enough: the rest is cleaning up
    raise SystemExit(128 + number)


def _ignored(number: int, frame: Any) -> None:
    pass


# --- both ranks ----------------------------------------------------------------------------------


def run_ranks(
    pair: Namespaces | Loopback,
    script: Path,
    settings: dict[str, Any],
    folder: str,
    environment: dict[str, str],
) -> dict[str, Any]:
    """Runs one rank a host to its end and returns what the first one wrote.

    Args:
        script: What a rank runs; its only argument is JSON: the settings, and as ``out`` the file
            that the first rank writes.
        folder: The ranks' directory.
        environment: More of a rank's environment.

    Raises:
        SystemExit: A rank failed.
    """
    out = Path(folder) / "steps.json"
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(2):
            prefix, own = pair.launch(rank)
            own |= environment | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",  # each is alone on its host
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
            }
            words = [sys.executable, str(script), json.dumps(settings | {"out": str(out)})]
            quiet = subprocess.DEVNULL  # the framework's own chatter; progress goes to stderr
            ranks.append(
                subprocess.Popen(prefix + words, env=os.environ | own, stdout=quiet, cwd=folder)
            )
        wait(ranks)
    finally:
        stop(ranks)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def wait(ranks: list[subprocess.Popen]) -> None:
    """Waits for all ranks.

    Raises:
        SystemExit: One failed; the others would wait for it.
    """
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        time.sleep(0.2)
    for number, rank in enumerate(ranks):
        if rank.poll():
            sys.exit(f"rank {number} failed with exit code {rank.returncode}")


def stop(ranks: list[subprocess.Popen]) -> None:
    """Ends what still runs."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(10)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


# --- in the rank's process -----------------------------------------------------------------------


class ShapedLink:
    """This host's end of the veth pair; what it sends is limited."""

    def __init__(self, device: str) -> None:
        self._device = device

    def set_rate(self, bits_per_second: float) -> None:
        command(*shaping(self._device, bits_per_second))


class EmulatedLink:
    """Keeps the pipeline's requests from completing before their bytes would have passed.

    A receive completes its bytes' time after it has really arrived, a send its bytes' time after it
    was posted; each direction carries one transfer at a time.
    """

    def __init__(self) -> None:
        self._bytes_per_second: float | None = None
        self._free = {"send": 0.0, "recv": 0.0}

    def set_rate(self, bits_per_second: float) -> None:
        self._bytes_per_second = bits_per_second / 8

    def wrap(self, issue: Any) -> Any:
        """Wraps what posts transfers and returns requests by ``send_next`` and the like."""

        @functools.wraps(issue)
        def p2p_ops(**what: Any) -> Any:
            requests = issue(**what)
            if self._bytes_per_second is None:
                return requests
            return {
                name: _Slow(self, request, name[:4], _size(what[f"tensor_{name}"]))
                for name, request in requests.items()
            }

        return p2p_ops

    def passes(self, direction: str, size: int, start: float) -> float:
        """Books a transfer; returns when it is complete."""
        assert self._bytes_per_second is not None
        start = max(start, self._free[direction])
        self._free[direction] = start + size / self._bytes_per_second
        return self._free[direction]


class _Slow:
    """A request that completes when the emulated link has carried it."""

    def __init__(self, link: EmulatedLink, request: Any, direction: str, size: int) -> None:
        self._link, self._request = link, request
        self._direction, self._size = direction, size
        self._end: float | None = None
        if direction == "send":
            self._end = link.passes(direction, size, time.perf_counter())

    def wait(self, *args: Any) -> Any:
        result = self._request.wait(*args)
        if self._end is None:
            self._end = self._link.passes(self._direction, self._size, time.perf_counter())
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return result


def _size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()
