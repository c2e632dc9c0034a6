"""Runs Megatron's training in several processes, fast enough for a test of every configuration.

Starting a Python that imports torch and Megatron takes seconds for each rank. Here one process (the
fork server of ``multiprocessing``) imports them once and forks the ranks of every case, each of
which runs the quickstart's entry script as ``__main__`` with the case's flags, the CPU standing in
for a CUDA device::

    ranks = run_case(["--num-layers", "2", ...], world_size=2, before=attach_plugin)
    assert ranks[0].weights == unprotected[0].weights

``before`` and ``after`` reach the ranks by pickle: functions of a module (or ``functools.partial``
of one), no lambdas.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import multiprocessing.forkserver
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .te import release

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "quickstart" / "pretrain_gpt.py"

Hook = Callable[[int], Any]


@dataclass
class RankResult:
    """What one rank left behind."""

    rank: int
    exit_code: int | None = None
    """As a shell sees it from the process; negative: the number of the signal that killed it."""
    timed_out: bool = False
    output: str = ""
    """Everything written to stdout and stderr."""
    losses: list[dict[str, float]] = field(default_factory=list)
    """The exact losses that ``train_step`` returned in each iteration; empty dictionaries on the
    pipeline stages that compute none."""
    weights: str | None = None
    """SHA-256 of the bytes of all model parameters; None if no iteration ran."""
    optimizer: str | None = None
    """SHA-256 of the optimizer's main parameters and states."""
    buffers: str | None = None
    """SHA-256 of the modules' buffers: a router's expert bias and counts of tokens, say."""
    scales: str | None = None
    """SHA-256 of scales and amax histories of FP8 with delayed scaling; of nothing without."""
    value: Any = None
    """What ``after`` returned."""


def run_case(
    argv: Sequence[str],
    world_size: int,
    *,
    script: Path = SCRIPT,
    env: Mapping[str, str] | None = None,
    before: Hook | None = None,
    after: Hook | None = None,
    timeout: float = 120.0,
    te: str | None = None,
) -> list[RankResult]:
    """Runs one training to its end.

    Args:
        argv: The flags of the entry script.
        world_size: Number of ranks; all on this machine.
        script: The entry script.
        env: Additional environment of the ranks.
        before: Called with the rank before the script starts; Megatron is imported already.
        after: Called with the rank when the script has ended, also by ``SystemExit``; its result
            comes back as ``RankResult.value``.
        timeout: Seconds after which all ranks are killed.
        te: A release of Transformer Engine, to run it on CPU kernels; by default there is none.

    Returns:
        A result for each rank. One that ended with an exception has its losses, but no hashes and
        no value; one that was killed has neither. Nothing is raised when a rank fails: see
        ``RankResult.exit_code``, or use ``succeeded``.
    """
    server = _fork_server(te)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="megatron-case-") as name:
        directory = Path(name)
        processes = [
            server.process(
                target=_run_rank,
                args=(
                    rank,
                    str(script),
                    list(argv),
                    environment,
                    before,
                    after,
                    directory,
                    timeout,
                ),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            server.start(process)
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process.is_alive() for process in processes]
        for process in processes:
            _kill_with_children(process)
        return [
            _collect(RankResult(rank, process.exitcode, timed_out), directory)
            for rank, (process, timed_out) in enumerate(zip(processes, late, strict=True))
        ]


def succeeded(results: list[RankResult]) -> list[RankResult]:
    """Returns the results if every rank exited with 0.

    Raises:
        AssertionError: With the output of the ranks that did not.
    """
    failed = [result for result in results if result.exit_code != 0]
    assert not failed, "\n".join(
        f"rank {r.rank} exited with {r.exit_code}{' (timed out)' if r.timed_out else ''}:\n"
        f"{r.output[-6000:]}"
        for r in failed
    )
    return results


class _Server:
    """A process that has imported Megatron, and whose forks are the ranks.

    Args:
        variables: Its environment, beside that of the moment in which it starts.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._server = multiprocessing.forkserver.ForkServer()
        self._server.set_forkserver_preload(["tests.warm"])
        self.process = multiprocessing.get_context("forkserver").Process
        with _environment(variables):
            self._server.ensure_running()
        # It forks when it has imported everything: no case's time-out has to allow for that.
        first = self.process(target=os.getpid)
        self.start(first)
        first.join()
        assert first.exitcode == 0, "the fork server did not start; see above"

    def start(self, process: Any) -> None:
        """Starts a process as a fork of this server; multiprocessing itself knows only one."""
        module: Any = multiprocessing.forkserver
        own = module.connect_to_new_process
        module.connect_to_new_process = self._server.connect_to_new_process
        try:
            process.start()
        finally:
            module.connect_to_new_process = own


@functools.cache
def _fork_server(te: str | None = None) -> _Server:
    # The PYTHONPATH of the tests stays, so that another version of Megatron can come first.
    path = [os.environ.get("PYTHONPATH"), str(ROOT)]
    # Where there is a GPU, it is hidden: the CPU stands in for one.
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if te is not None:
        path.append(str(release(te)))
        variables["SPARETRAIN_TEST_TE"] = te
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return _Server(variables)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kill_with_children(process: Any) -> None:
    """Ends a rank, and the helpers that Megatron starts to write a checkpoint."""
    process.kill()
    process.join()
    if _runs(process.pid):
        return  # on a busy machine, the number is another process's by now; so no helper is left
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether there is a process of that number, and not only what is left of an ended one."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _collect(result: RankResult, directory: Path) -> RankResult:
    log, report = directory / f"{result.rank}.log", directory / f"{result.rank}.pickle"
    if log.exists():
        result.output = log.read_text(errors="replace")
    if report.exists():
        for name, value in pickle.loads(report.read_bytes()).items():
            setattr(result, name, value)
    return result


def _run_rank(
    rank: int,
    script: str,
    argv: list[str],
    environment: dict[str, str],
    before: Hook | None,
    after: Hook | None,
    directory: Path,
    timeout: float,
) -> None:
    """The whole life of a rank, in the forked process."""
    os.setpgrp()
    # Should the parent be killed, nobody else ends a rank that hangs.
    signal.alarm(int(timeout) + 30)
    log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).parent))
    code, report = 1, {}

    def live() -> None:
        nonlocal code, report
        record = TrainingRecord()
        report = {"losses": record.losses}
        if before is not None:
            before(rank)
        record.attach()
        code = _exit_code(functools.partial(runpy.run_path, script, run_name="__main__"))
        report = {**record.digest(), "value": None if after is None else after(rank)}

    try:
        failed = _exit_code(live)
        code = failed or code
    except BaseException:
        traceback.print_exc()
        code = 1
    (directory / f"{rank}.part").write_bytes(pickle.dumps(report))
    (directory / f"{rank}.part").rename(directory / f"{rank}.pickle")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: gloo may wait there for a peer that is gone.
    os._exit(code)


def _exit_code(function: Callable[[], Any]) -> int:
    """Calls it; returns the code with which ``SystemExit`` left it, 0 without."""
    try:
        function()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


class TrainingRecord:
    """Keeps each iteration's losses, and model and optimizer for a digest at the end.

    It wraps ``train_step`` where the training loop looks it up, and only reads what that returns.
    """

    def __init__(self) -> None:
        import megatron.training.training as training

        self.losses: list[dict[str, float]] = []
        self._model: Sequence[Any] | None = None
        self._optimizer: Any = None
        # Megatron's own: who wraps the function later may hide the names of its arguments.
        self._signature = inspect.signature(training.train_step)

    def attach(self) -> None:
        """Wraps ``train_step`` as it is now, outside of everything else that wraps it."""
        import megatron.training.training as training

        train_step = training.train_step

        def recorded_train_step(*args: Any, **kwargs: Any) -> Any:
            arguments = self._signature.bind(*args, **kwargs).arguments
            self._model, self._optimizer = arguments["model"], arguments["optimizer"]
            result = train_step(*args, **kwargs)
            # The log prints means over iterations; these are the iteration's own.
            self.losses.append({name: float(value) for name, value in result[0].items()})
            return result

        training.train_step = recorded_train_step

    def digest(self) -> dict[str, Any]:
        """The fields of ``RankResult`` that describe the training."""
        if self._model is None:
            return {"losses": self.losses}
        return {
            "losses": self.losses,
            "weights": weights_digest(self._model),
            "optimizer": optimizer_digest(self._optimizer),
            "buffers": buffers_digest(self._model),
            "scales": scales_digest(self._model),
        }


def weights_digest(model: Sequence[Any]) -> str:
    """SHA-256 over names, types and bytes of the parameters of all model chunks."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            _add(digest, name, parameter)
    return digest.hexdigest()


def buffers_digest(model: Sequence[Any]) -> str:
    """SHA-256 over names, types and bytes of the buffers of all model chunks."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, module in chunk.named_modules():
            for key, buffer in module._buffers.items():  # data parallelism hides `buffers`
                _add(digest, f"{name} {key}", buffer)
    return digest.hexdigest()


def scales_digest(model: Sequence[Any]) -> str:
    """SHA-256 over what delayed scaling keeps from one microbatch to the next."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, module in chunk.named_modules():
            meta = getattr(module, "fp8_meta", None) or {}
            for key in ("scaling_fwd", "scaling_bwd"):
                if hasattr(meta.get(key), "amax_history"):
                    _add(digest, f"{name} {key} scale", meta[key].scale)
                    _add(digest, f"{name} {key} history", meta[key].amax_history)
    return digest.hexdigest()


def optimizer_digest(optimizer: Any) -> str:
    """SHA-256 over what the inner optimizers update: main parameters, moments, step counts."""
    digest = hashlib.sha256()
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            _add(digest, "step", group.get("step"))
            for parameter in group["params"]:
                _add(digest, "parameter", parameter)
                for name, value in sorted(inner.state[parameter].items()):
                    _add(digest, name, value)
    return digest.hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    else:
        digest.update(f"{name} {value!r}".encode())
