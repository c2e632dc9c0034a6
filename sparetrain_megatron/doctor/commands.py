"""The command `sparetrain doctor`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import parse_command_line
from ..errors import UsageError
from ..report.events import read_events
from ..report.terminal import say
from .cures import DETERMINISTIC
from .diagnosis import Diagnosis, irreproducible, slowest_median

EXIT_FOUND = 1
PROTECTED = 2
"""Iterations with protection: one with every operator twice at once, one with the recompute."""
TIMED = 3
"""Unprotected iterations, of which the first is a warm-up."""

# What Megatron's deterministic mode sets by itself, but after libraries may have read it.
_DETERMINISTIC_ENVIRONMENT = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="try a training job before it is protected: what would be refused or differ",
        description="Runs a Megatron script of yours for a few iterations on this machine, and "
        "tells which operators are not reproducible and what cures them, which are not protected, "
        "what would be refused, and what deterministic mode costs. Nothing is loaded or saved. "
        "Exit code 1 if something was found.",
        epilog="Options of this command come before SCRIPT.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=1,
        metavar="N",
        help="ranks to start on this machine; default: 1",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"no second run with (or without) {DETERMINISTIC}: no costs, no cures tried",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="for each run; default: 1800",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, no tables")
    parser.add_argument("script", metavar="SCRIPT", help="a Megatron entry script")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's arguments"
    )


def run_doctor(args: argparse.Namespace) -> Diagnosis:
    """`sparetrain doctor`.

    Raises:
        UsageError: The script doesn't exist, a flag of ours is wrong, or the script itself fails.
    """
    if not Path(args.script).is_file():
        raise UsageError(f"script {args.script} doesn't exist")
    command = [args.script, *args.arguments]
    if "--sparetrain" not in command:
        command.append("--sparetrain")
    parse_command_line(command)
    with tempfile.TemporaryDirectory(prefix="sparetrain-doctor-") as name:
        return diagnose(command, Path(name), args.nproc_per_node, args.quick, args.timeout)


def diagnose(
    command: Sequence[str], directory: Path, ranks: int, quick: bool, timeout: float
) -> Diagnosis:
    """Makes the runs.

    Args:
        command: The script, its arguments, and ``--sparetrain`` with flags of ours among them.
        directory: For the runs' findings.
        ranks: Number of processes.
        quick: One run only.
        timeout: Seconds for each run.

    Raises:
        UsageError: The run as the user gave it fails.
    """
    given = directory / "as given"
    error = _run(command, given, ranks, PROTECTED, 0 if quick else TIMED, timeout)
    findings = _findings(given)
    if error is not None:
        raise UsageError(f"the script fails by itself, or under the examination: {error}")
    refused: dict[str, dict[str, Any]] = {}
    unprotected: dict[str, int] = {}
    for finding in findings:
        refused |= {refusal["flag"]: refusal for refusal in finding["refused"]}
        for operator, number in finding["unprotected"].items():
            unprotected[operator] = unprotected.get(operator, 0) + number
    deterministic = any(f.get("deterministic_mode") for f in findings)
    mismatches = [e for e in read_events(given) if e["kind"] == "mismatch"]
    examined = any(f["steps"] for f in findings)

    other_seconds, other_mismatches, failed = None, None, None
    if examined and not quick:
        other = directory / f"{'without' if deterministic else 'with'} {DETERMINISTIC}"
        tries_cures = bool(mismatches) and not deterministic
        failed = _run(
            _toggled(command, deterministic),
            other,
            ranks,
            PROTECTED if tries_cures else 0,
            TIMED,
            timeout,
            {} if deterministic else _DETERMINISTIC_ENVIRONMENT,
        )
        if failed is None:
            other_seconds = slowest_median(f["seconds"] for f in _findings(other))
            if tries_cures:
                other_mismatches = [e for e in read_events(other) if e["kind"] == "mismatch"]
    seconds = slowest_median(f["seconds"] for f in findings)
    return Diagnosis(
        refused=tuple(refused.values()),
        irreproducible=irreproducible(mismatches, other_mismatches),
        unprotected=unprotected,
        operators_checked=sum(f["operators_checked"] for f in findings),
        deterministic=deterministic,
        seconds_plain=other_seconds if deterministic else seconds,
        seconds_deterministic=seconds if deterministic else other_seconds,
        failed=failed,
    )


def _toggled(command: Sequence[str], deterministic: bool) -> list[str]:
    if deterministic:
        return [token for token in command if token != DETERMINISTIC]
    return [*command, DETERMINISTIC]


def _run(
    command: Sequence[str],
    directory: Path,
    ranks: int,
    protected: int,
    timed: int,
    timeout: float,
    environment: dict[str, str] | None = None,
) -> str | None:
    """Runs the script; returns why it failed, or None."""
    directory.mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launch = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("-m", "sparetrain_megatron.doctor.worker", str(directory), str(protected), str(timed)),
    ]
    say(f"doctor: {protected + timed} iterations {directory.name}")
    log = directory / "output.log"
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launch, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**(environment or {}), **os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not ended after {timeout:g} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0 and len(_findings(directory)) == ranks:
        return None
    return _last_error(log.read_text(errors="replace")) or f"exit code {code}"


def _last_error(output: str) -> str:
    """The line of a log that says best why a run ended."""
    lines = [line.strip() for line in output.splitlines()]
    own = [line for line in lines if line.startswith("sparetrain: error: ")]
    if own:
        return own[0].removeprefix("sparetrain: error: ")
    errors = [line for line in lines if ": error: " in line or "Error: " in line]
    return next((line for line in errors if "ChildFailed" not in line), "")


def _findings(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("doctor.rank*.json"))]
