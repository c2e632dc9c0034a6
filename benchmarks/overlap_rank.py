"""One rank of ``overlap.py``: real Megatron, whose steps take the modes in turn.

Started by ``overlap.py``, once per host, with its options as JSON in the only argument.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_process
from two_hosts import EmulatedLink, ShapedLink

CALIBRATIONS = 5
PROFILED = 5
TOLERANCE = 0.01
"""How far the idle share may be from what was asked for."""

Step = dict[str, Any]


class Finished(Exception):
    """All steps have been measured."""


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    on_a_core()
    one_process.prepare()
    from megatron.training import training

    from sparetrain_megatron import megatron
    from sparetrain_megatron.config import SparetrainConfig

    with tempfile.TemporaryDirectory() as folder:
        config = SparetrainConfig(enabled=True, mode="full", profile_iters=PROFILED, dir=folder)
        protection = megatron.attach(config)
        run = Run(options, protection, emulated=options.link == "emulated")
        training.train_step = run.stepping(training.train_step)
        try:
            one_process.train(arguments(options))
        except Finished:
            run.report(Path(options.out))


def on_a_core() -> int:
    """Ties this process to a core of its own, and to its parent's life; returns its rank."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return rank


def die_with_parent() -> None:
    """Has the kernel end this process when the one that removes the link is gone (Linux)."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def prefer_transport() -> None:
    """Lets the threads that move bytes interrupt the one that computes.

    On a GPU's host they have cores of their own; here they share the only one, and a message would
    arrive some milliseconds late whenever it is busy. In every mode alike; needs root.
    """
    main = threading.get_native_id()
    for task in os.listdir("/proc/self/task"):
        if int(task) != main:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task), -15)


class Run:
    """Measures steps in the order that :meth:`script` says."""

    def __init__(self, options: Any, protection: Any, emulated: bool) -> None:
        from timeline import Recorder

        self.options = options
        self.protection = protection
        self.link: Any = EmulatedLink() if emulated else None
        if not emulated:
            self.link = ShapedLink(os.environ["GLOO_SOCKET_IFNAME"])
        same_path(protection._pipeline, self.link if emulated else None)
        self.recorder = Recorder(protection)
        self.steps: list[Step] = []
        self.recorded: dict[str, Step] = {}
        self.calibration: list[dict[str, float]] = []
        self.rate = 0.0
        self.strategies: dict[str, Any] = {}
        self.predicted: dict[str, Any] = {}
        self.batches = Batches()

    def script(self) -> Generator[tuple[str, bool], Step, None]:
        """Yields the mode of each step and whether to record it; is sent what was measured."""
        options = self.options
        for _ in range(2):
            yield "unprotected", False
        yield from self._calibrate()
        modes = options.modes
        if options.strategy == "planned" and {"coarse", "full"} & {*modes}:
            yield from self._plan()
        for mode in modes:  # once in each mode before counting
            yield mode, False
        for index in range(options.steps):
            turn = index % len(modes)
            self.batches.new()
            for mode in modes[turn:] + modes[:turn]:
                self.steps.append((yield mode, False) | {"mode": mode, "round": index})
        for mode in modes:
            self.recorded[mode] = yield mode, True

    def _calibrate(self) -> Generator[tuple[str, bool], Step, None]:
        """Finds the rate of the link at which an unprotected step is idle for the asked share."""
        options = self.options
        size, count = crossings(options)
        fast = yield from self._idle()
        transfer = first_transfer(fast["busy"], fast["step"], options.idle, count)
        tried: list[tuple[float, float]] = []
        for _ in range(CALIBRATIONS):
            self.set_rate(options.rate or 8 * size / transfer)
            yield "unprotected", False  # what was under way at the old rate
            found = yield from self._idle()
            self.calibration.append({"bits_per_second": self.rate, **found})
            self.say(f"{self.rate / 1e6:.2f} Mbit/s: idle {found['idle']:.1%}")
            tried.append((abs(found["idle"] - options.idle), self.rate))
            if options.rate or tried[-1][0] <= TOLERANCE:
                break
            wanted = found["busy"] / (1 - options.idle)
            transfer = next_transfer(transfer, found["step"], fast["step"], wanted)
        self.set_rate(min(tried)[1])

    def set_rate(self, bits_per_second: float) -> None:
        if bits_per_second != self.rate:
            self.rate = bits_per_second
            self.link.set_rate(bits_per_second)

    def say(self, text: str) -> None:
        if self.protection.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def _plan(self) -> Generator[tuple[str, bool], Step, None]:
        """Profiles as every protected run does, and plans for each mode from the same profile."""
        from sparetrain_megatron.plan import Profile, plan
        from sparetrain_megatron.planning import Planned

        protection = self.protection
        yield "profile", False
        planning = protection.planning
        while planning.plan is None:
            yield "profile", False
        directory = protection.config.directory(None)
        profile = Profile.load(directory / f"profile.rank{protection.rank}.json")
        if self.options.profiles:
            profile.save(Path(self.options.profiles) / f"profile.rank{protection.rank}.json")
        for mode in {"coarse", "full"} & {*self.options.modes}:
            made = plan(profile, protection.engine.deferred.budget, mode)
            layers, varying = protection._recompute.layers, planning.varying
            self.strategies[mode] = Planned(made, layers, varying)
            self.predicted[mode] = made.totals.model_dump(mode="json")
        protection.planning = None  # windows of other modes would seem to have drifted

    def _idle(self) -> Generator[tuple[str, bool], Step, dict[str, float]]:
        """Busy seconds, idle share and step of unprotected steps, means over the ranks."""
        import torch.distributed as dist

        steps = []
        for _ in range(2):
            steps.append((yield "unprotected", False))
        mine = {
            "step": min(s["seconds"] for s in steps),
            "busy": min(s["seconds"] - s["waiting"] for s in steps),
            "idle": statistics.mean(s["waiting"] / s["seconds"] for s in steps),
        }
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return {key: statistics.mean(p[key] for p in parts) for key in mine}

    def stepping(self, protected: Any) -> Any:
        """Wraps ``train_step``: each call is the next step of the script."""
        script = self.script()
        state: dict[str, Any] = {"next": None}

        @functools.wraps(protected)
        def train_step(forward: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            if state["next"] is None:
                state["next"] = next(script)
            self.batches.rewind(data)
            mode, detailed = state["next"]
            with in_mode(self.protection, mode, self.strategies.get(mode)):
                result, step = self._measure(
                    detailed, lambda: protected(forward, data, *args, **kwargs)
                )
            self.say(f"{mode:12} {step['seconds']:7.2f} s")
            try:
                state["next"] = script.send(step)
            except StopIteration:
                raise Finished from None
            return result

        return train_step

    def _measure(self, detailed: bool, call: Any) -> tuple[Any, Step]:
        import torch.distributed as dist

        engine, recorder = self.protection.engine, self.recorder
        prefer_transport()
        figures, deferred = engine.statistics, engine.deferred
        dist.barrier()
        recorder.reset()
        recorder.detailed, recorder.protected = detailed, self.protection.enabled
        outside, operators = dict(deferred.outside), dict(deferred.operators)
        checks, figures.peak_bytes_held = figures.seconds_in_checks, 0
        start, cpu = time.perf_counter(), time.thread_time()
        result = call()
        seconds = time.perf_counter() - start
        cpu = time.thread_time() - cpu
        recorder.detailed = False
        recorder.flush()
        waiting = sum(w[2] - w[0] for w in recorder.windows) - recorder.in_windows
        if self.options.experts or self.options.layout != "pipeline":
            # There are waits that are no window: for sums of gradients, or for a transfer that was
            # begun earlier.
            waiting = seconds - cpu
        step: Step = {
            "seconds": seconds,
            "cpu": cpu,
            "waiting": waiting,
            "longest_overrun": recorder.longest_overrun,
            "windows": len(recorder.windows),
            "by_window": dict(recorder.by_window),
            "overrun": sum(w[2] - max(w[0], w[1]) for w in recorder.windows),
            "in_checks": figures.seconds_in_checks - checks,
            "waited_in_verdicts": recorder.waited_in_verdicts,
            "in_windows": recorder.in_windows,
            "cpu_in_windows": recorder.cpu_in_windows,
            "by_category": dict(recorder.seconds),
            "outside": _since(deferred.outside, outside),
            "operators": _since(deferred.operators, operators),
            "peak_held_bytes": recorder.peak_held,
            "peak_check_bytes": figures.peak_bytes_held,
        }
        if detailed:
            step["details"] = recorder.details(start)
        return result, step

    def report(self, path: Path) -> None:
        """Gathers all ranks' steps; the first rank writes them."""
        import resource

        import torch.distributed as dist

        mine = {
            "steps": self.steps,
            "recorded": self.recorded,
            "predicted": self.predicted,
            "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        if dist.get_rank() == 0:
            found = {"rate": self.rate, "calibration": self.calibration, "ranks": parts}
            path.write_text(json.dumps(found))
        dist.barrier()


class Batches:
    """Gives the same microbatches to all steps of a round: what is random decides where tokens go
    to, and with that how long the all-to-alls of a step are."""

    def __init__(self) -> None:
        self._sources: dict[int, Any] = {}  # by chunk: Megatron's own
        self._fresh = True

    def new(self) -> None:
        """The next step takes new ones."""
        self._fresh = True

    def rewind(self, data: Any) -> None:
        """A step begins.

        Args:
            data: Megatron's iterator, or a list with one for each chunk.
        """
        from sparetrain_megatron.replay import Replayed

        for i, iterator in enumerate(data if isinstance(data, list) else [data]):
            if iterator is None:
                continue
            source = self._sources.setdefault(i, iterator.iterable)
            if self._fresh:
                iterator.iterable = Replayed(source)
            else:
                iterator.iterable.rewind()
        self._fresh = False


def _since(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {k: v - before.get(k, 0) for k, v in now.items() if v != before.get(k, 0)}


def crossings(options: Any) -> tuple[int, int]:
    """Bytes of one transfer over the link, and how many of them a step waits for in turn.

    BF16 activations: of a stage, [s, 1, h], forward and backward; or the half of the tokens that
    goes to the other rank's experts, dispatched and combined in forward, recompute and backward;
    or all of them, summed twice a layer in each of these.
    """
    size = options.sequence * options.hidden * 2
    if options.experts:
        return size * options.topk // 2, 6 * options.layers * options.microbatches // 2
    if options.layout in ("tensor", "sequence"):
        return size, 6 * options.layers * options.microbatches
    return size, (4 if options.layout == "interleaved" else 2) * options.microbatches


def first_transfer(busy: float, step: float, idle: float, count: int) -> float:
    """A first guess of the seconds one transfer has to take.

    Args:
        busy, step: Seconds of an unprotected step over a fast link.
        idle: Share of time to be idle.
        count: Transfers of a step.
    """
    return max(1e-4, (busy / (1 - idle) - step) / count)


def next_transfer(transfer: float, step: float, fast: float, wanted: float) -> float:
    """A better guess, on the line through the step over a fast link.

    At most twice or half of the last one: on a busy machine a measurement may be far off.

    Args:
        transfer, step: Seconds of a transfer, and of the step that it led to.
        fast: Seconds of a step over a fast link.
        wanted: Seconds that the step should take.
    """
    factor = (wanted - fast) / (step - fast) if step > fast else 2.0
    return transfer * min(2.0, max(0.5, factor))


def same_path(pipeline: Any, link: EmulatedLink | None) -> None:
    """Unprotected steps post and wait for transfers exactly as protected ones do.

    Receives first, separate requests, the same wait; so nothing that this gains counts as ours.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    if link is not None:
        p2p_communication._p2p_ops = link.wrap(p2p_communication._p2p_ops)
    owner = p2p_communication.P2PCommunicator
    protected = owner._communicate
    plain = protected.__wrapped__

    @functools.wraps(plain)
    def communicate(communicator: Any, *, wait_on_reqs: bool = True, **what: Any) -> Any:
        if pipeline._engine.is_active:
            return protected(communicator, wait_on_reqs=wait_on_reqs, **what)
        config = communicator.config
        communicator.config = copy.copy(config)
        communicator.config.batch_p2p_comm = False
        try:
            previous, following, requests = plain(communicator, wait_on_reqs=False, **what)
        finally:
            communicator.config = config
        if not wait_on_reqs:
            return previous, following, requests
        pipeline._wait(communicator.pp_group, "+".join(requests), list(requests.values()))
        return previous, following, None

    owner._communicate = communicate


@contextmanager
def in_mode(protection: Any, mode: str, planned: Any = None) -> Generator[None]:
    """Sets everything up for one step in a mode.

    Args:
        planned: The mode's strategy; else whatever it may defer is deferred.
    """
    from sparetrain_megatron.dmr.strategy import Everything, Immediate

    engine = protection.engine
    if mode == "profile":  # the protection does it by itself
        yield
        return
    before = protection.enabled, engine.piggyback, engine.strategy
    protection.enabled = mode != "unprotected"
    engine.piggyback = mode != "naive"
    if planned is not None:
        engine.strategy = planned
    elif mode in ("coarse", "full"):
        engine.strategy = Everything(rest=mode == "full")
    else:
        engine.strategy = Immediate(piggyback=mode != "naive")
    try:
        yield
    finally:
        protection.enabled, engine.piggyback, engine.strategy = before


def arguments(options: Any) -> list[str]:
    """Megatron's flags beside those of ``one_process``: the layout asked for, or experts on both
    ranks."""
    hidden = options.hidden
    rounds = options.steps + 2
    steps = 4 + 3 * CALIBRATIONS + PROFILED + rounds * len(options.modes)
    layout = {
        "pipeline": "--pipeline-model-parallel-size 2",
        "interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "tensor": "--tensor-model-parallel-size 2",
        "sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    }[options.layout]
    if options.experts:
        layout = f"""
            --expert-model-parallel-size 2 --num-experts {options.experts}
            --moe-router-topk {options.topk} --moe-token-dispatcher-type alltoall
            --moe-aux-loss-coeff 0.01 --moe-ffn-hidden-size {hidden}
        """
        layout += "--moe-router-pre-softmax" if options.topk == 1 else ""
    text = f"""
        {layout}
        --num-layers {options.layers} --hidden-size {hidden}
        --ffn-hidden-size {hidden * 8 // 3 // 64 * 64}
        --num-attention-heads {hidden // 64} --group-query-attention
        --num-query-groups {max(1, hidden // 256)}
        --seq-length {options.sequence} --max-position-embeddings {options.sequence}
        --attention-dropout 0 --hidden-dropout 0
        --global-batch-size {options.microbatches} --train-iters {steps}
        --vocab-size {options.vocabulary - 1} --log-interval 100000
        --distributed-timeout-minutes 10 --num-workers 0
    """
    return text.split()


if __name__ == "__main__":
    main()
