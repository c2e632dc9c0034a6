"""Runs cases of ``tests.deepspeed_case``: a process that has imported DeepSpeed forks the ranks.

Importing DeepSpeed takes seconds; ZeRO 3 changes functions of torch for good, so that every case
needs processes of its own. (The fork server of ``tests.harness`` pretends to have a CUDA device.)
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Ranks:
    """What the ranks of a case left behind, rank by rank."""

    exit_codes: list[int]
    outputs: list[str]
    results: list[dict[str, Any] | None]
    inject: tuple[str, ...] = ()
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def told(self) -> str:
        return "\n".join(f"rank {i}:\n{text[-5000:]}" for i, text in enumerate(self.outputs))

    @property
    def bits(self) -> list[tuple]:
        assert self.exit_codes == [0] * len(self.exit_codes), self.told()
        return [(r["losses"], r["weights"], r["optimizer"]) for r in self.results if r is not None]


def run(case: dict[str, Any], world_size: int = 2, timeout: float = 180) -> Ranks:
    """Runs one case to its end."""
    with tempfile.TemporaryDirectory(prefix="deepspeed-case-") as directory:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        job = {"case": case, "world_size": world_size, "port": port, "timeout": timeout}
        codes = _ask({**job, "directory": directory})
        outputs, results = [], []
        for rank in range(world_size):
            outputs.append(Path(directory, f"{rank}.log").read_text(errors="replace"))
            path = Path(directory, f"{rank}.pickle")
            results.append(pickle.loads(path.read_bytes()) if path.exists() else None)
    return Ranks(codes, outputs, results)


@functools.cache
def _server() -> subprocess.Popen[str]:
    variables = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "TORCH_COMPILE_DISABLE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.deepspeed_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    atexit.register(process.kill)
    return process


def _ask(job: dict[str, Any]) -> list[int]:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    for line in server.stdout:
        if line.startswith("codes "):
            return json.loads(line.removeprefix("codes "))
    raise AssertionError("the server of the DeepSpeed cases has ended")


def _serve() -> None:
    import deepspeed

    # Not needed here, and compiling it takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    import sparetrain_megatron.deepspeed.engine
    import sparetrain_megatron.deepspeed.pipeline  # noqa: F401
    from tests import deepspeed_case  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        deadline = time.monotonic() + job["timeout"]
        children = {}
        for rank in range(job["world_size"]):
            pid = os.fork()
            if pid == 0:
                _rank(job, rank)
            children[pid] = rank
        codes = [-1] * len(children)
        while children and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in children:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif not pid:
                time.sleep(0.02)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print("codes", json.dumps(codes), flush=True)


def _rank(job: dict[str, Any], rank: int) -> None:
    from tests import deepspeed_case

    directory = Path(job["directory"])
    log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    deepspeed_case.environment(rank, job["world_size"], job["port"])
    code = 0
    try:
        result = deepspeed_case.train(job["case"], rank)
        (directory / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
