"""``sparetrain campaign``: many faults in a real Megatron GPT, and what became of each.

A fault is *harmful* if afterwards any bit of gradients, parameters, optimizer state, buffers,
random generator or result differs from a step without it, and *reported* if the engine found a
mismatch. Harmful and not reported is *missed*. An operator that raises an error because of a
fault is no silent corruption, and is counted by itself.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.faults.bench import Setup
from sparetrain_megatron.faults.spec import PATTERNS
from sparetrain_megatron.faults.worker import Order
from sparetrain_megatron.report.progress import progress
from sparetrain_megatron.report.terminal import make_table, render

SCHEMA = 1
OUTCOMES = (
    "no effect",
    "harmful caught",
    "harmless reported",
    "harmless silent",
    "crashed",
    "MISSED",
)
GROUPS = {"phase": "phase", "execution": "side", "dtype": "dtype", "bit": "bit_class"}
GROUPS |= {"operator": "operator"}

COVERED = (
    Setup("piggyback", "bf16", "full"),
    Setup("naive", "bf16", "none"),
    Setup("piggyback", "fp32", "full"),
    Setup("piggyback", "bf16", "selective"),
)
"""What a campaign covers when no configuration is asked for."""

DEFERRED = (
    Setup("full", "bf16", "full"),
    Setup("full", "fp32", "full"),
    Setup("full", "bf16", "none"),
    Setup("full", "bf16", "selective"),
    Setup("full", "bf16", "full", method="single"),
    Setup("full", "fp32", "full", method="single"),
)
"""The same for modes that defer."""


def outcome_of(fault: dict[str, Any], rollback: bool = False) -> str:
    """One of :data:`OUTCOMES`.

    Args:
        fault: A worker's result.
        rollback: Whether mismatches were rolled back: then nothing may be left of the fault.
    """
    if not fault["reached"]:
        return "MISSED"  # a fault that isn't injected proves nothing
    if fault["error"]:
        return "crashed"
    if not fault["effect"]:
        return "no effect"
    if fault["harmful"]:
        return "harmful caught" if fault["reported"] and not rollback else "MISSED"
    return "harmless reported" if fault["reported"] else "harmless silent"


class Campaign:
    """Runs the workers and collects their results.

    Args:
        setups: Configurations; they share the faults and clean steps evenly.
        faults: Number of faults.
        clean_steps: Number of steps without a fault.
        seed: The same seed, the same faults.
        patterns: Patterns of the faults.
        directory: For logs and ``faults.jsonl``.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        faults: int,
        clean_steps: int,
        seed: int,
        patterns: Sequence[str],
        directory: Path,
    ) -> None:
        self.setups = list(setups)
        self.faults: list[dict[str, Any]] = []
        self.clean_steps = 0
        self.clean_checks = 0
        self.alarms: list[str] = []
        self.problems: list[str] = []
        self.seconds = 0.0
        self._seed = seed
        self._patterns = tuple(patterns)
        self._directory = directory
        self._shares = [
            (_share(faults, i, len(setups)), _share(clean_steps, i, len(setups)))
            for i in range(len(setups))
        ]
        self._lock = threading.Lock()

    def run(self, jobs: int, on_progress: Callable[[], None]) -> None:
        """Runs everything.

        Args:
            jobs: How many configurations at one time.
            on_progress: Called after each fault.
        """
        start = time.perf_counter()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = (self._directory / "faults.jsonl").open("w", encoding="utf-8")
        with self._file, ThreadPoolExecutor(jobs) as pool:
            work = [
                pool.submit(self._configuration, i, on_progress) for i in range(len(self.setups))
            ]
            for future in work:
                future.result()
        self.seconds = time.perf_counter() - start

    def _configuration(self, index: int, on_progress: Callable[[], None]) -> None:
        setup, (faults, clean_steps) = self.setups[index], self._shares[index]
        first, ended = 0, False
        while not ended:
            order = Order(
                setup,
                faults,
                first,
                clean_steps,
                self._seed,
                self._patterns,
                str(self._directory),
            )
            log = self._directory / f"{setup.name.replace(', ', '-').replace(' ', '-')}.log"
            trying: dict[str, Any] | None = None
            process, lines = _start(order, log)
            for line in lines:
                values = json.loads(line)
                kind = values.pop("kind")
                with self._lock:
                    if kind == "trying":
                        trying = values
                    elif kind == "fault":
                        trying, first = None, values["number"] + 1
                        self._add(setup, values)
                        on_progress()
                    elif kind == "clean":
                        self._add_clean(setup, values)
                    ended |= kind == "end"
            code = process.wait()
            if ended:
                return
            if trying is None:
                tail = log.read_text(errors="replace").strip().splitlines()[-1:]
                self.problems.append(f"{setup.name}: ended with {code}: {''.join(tail)} ({log})")
                return
            # The fault has killed the process; the next one goes on after it.
            first = trying["number"] + 1
            dead: dict[str, Any] = dict.fromkeys(("reached", "effect", "harmful"), True)
            dead |= {"reported": False, "findings": [], "differs": []}
            dead["error"] = f"the process ended with {code}"
            with self._lock:
                self._add(setup, trying | dead)
            on_progress()

    def _add(self, setup: Setup, values: dict[str, Any]) -> None:
        outcome = outcome_of(values, setup.on_mismatch == "rollback")
        fault = {"setup": setup.name, "outcome": outcome, **values}
        self.faults.append(fault)
        self._file.write(json.dumps(fault) + "\n")
        self._file.flush()

    def _add_clean(self, setup: Setup, values: dict[str, Any]) -> None:
        self.clean_steps += 1
        self.clean_checks += values["checks"]
        self.alarms += [f"{setup.name}: {alarm}" for alarm in values["alarms"]]
        if values["error"] or values["differs"]:
            what = values["error"] or f"other bits in {', '.join(values['differs'])}"
            self.problems.append(f"{setup.name}: a step without a fault gave {what}")

    # --- the report ----------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether anything was missed, wrongly reported, or went wrong."""
        lost = {"MISSED"}
        if any(setup.on_mismatch == "rollback" for setup in self.setups):
            lost.add("crashed")
        return bool(self.alarms or self.problems or any(f["outcome"] in lost for f in self.faults))

    def counts(self, key: str | None = None) -> dict[str, dict[str, int]]:
        """Outcomes by phase, execution, dtype, bit or operator; by ``total`` without a key."""
        counted: dict[str, dict[str, int]] = {}
        for fault in self.faults:
            name = "total" if key is None else str(fault[GROUPS[key]])
            row = counted.setdefault(name, dict.fromkeys(("injected", *OUTCOMES), 0))
            row["injected"] += 1
            row[fault["outcome"]] += 1
        return dict(sorted(counted.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        return {
            "schema": SCHEMA,
            "seed": self._seed,
            "patterns": self._patterns,
            "setups": [asdict(setup) for setup in self.setups],
            "seconds": round(self.seconds, 1),
            "total": self.counts().get("total"),
            **{f"by_{key}": self.counts(key) for key in GROUPS},
            "clean_steps": self.clean_steps,
            "clean_checks": self.clean_checks,
            "false_alarms": self.alarms,
            "problems": self.problems,
            "missed": [f for f in self.faults if f["outcome"] == "MISSED"],
            "crashed": [f for f in self.faults if f["outcome"] == "crashed"],
            "failed": self.failed,
        }

    def text(self, *, color: bool, width: int) -> str:
        """Tables for the terminal."""
        tables = [
            make_table(
                f"by {key}",
                (key, ">injected", *(f">{outcome}" for outcome in OUTCOMES)),
                [(name, *row.values()) for name, row in (*self.counts(key).items(), *total)],
            )
            for total in [list(self.counts().items())]
            for key in GROUPS
        ]
        lines = [
            f"{len(self.faults):,} faults in {self.seconds:,.0f} s, seed {self._seed}; "
            f"{len(self.alarms):,} false alarms in {self.clean_checks:,} checks of "
            f"{self.clean_steps:,} steps without a fault"
        ]
        lines += [f"FALSE ALARM {alarm}" for alarm in self.alarms]
        lines += [f"PROBLEM {problem}" for problem in self.problems]
        lines += [
            f"MISSED {f['setup']}: {f['spec']}: {', '.join(f['differs']) or 'not reached'}"
            for f in self.faults
            if f["outcome"] == "MISSED"
        ]
        return render(tables, color=color, width=width) + "\n" + "\n".join(lines) + "\n"


def _share(total: int, index: int, parts: int) -> int:
    return total * (index + 1) // parts - total * index // parts


@functools.cache
def _extensions() -> str:
    folder = tempfile.TemporaryDirectory(prefix="sparetrain-extensions-")
    atexit.register(folder.cleanup)
    return folder.name


def _start(order: Order, log: Path) -> tuple[subprocess.Popen[bytes], Iterable[str]]:
    """Starts a worker; returns it and its results, a line each, until it ends."""
    readable, writable = os.pipe()
    command = [sys.executable, "-m", "sparetrain_megatron.faults.worker"]
    with log.open("a") as output:
        process = subprocess.Popen(
            [*command, str(writable), order.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writable,),
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
                # Megatron compiles a helper for selective recompute. In a folder of our own no
                # lock of a process that was killed while compiling can make it wait for ever.
                "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", _extensions()),
            },
        )
    os.close(writable)
    return process, os.fdopen(readable, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparetrain campaign",
        description="Injects many faults, one a step, into a small but real Megatron GPT with its "
        "optimizer, and reports which did harm and which were found. Exit code 1 if a harmful one "
        "was not, or if a step without a fault raised an alarm.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--faults", type=int, default=300, metavar="N", help="how many faults (300)")
    add("--clean-steps", type=int, default=200, metavar="N", help="steps without a fault (200)")
    add("--seed", type=int, default=1, help="the same seed draws the same faults (1)")
    add(
        "--patterns",
        default="bit",
        metavar="LIST",
        help=f"of {', '.join(PATTERNS)}, with commas; or all (bit)",
    )
    add(
        "--mode",
        choices=("naive", "piggyback", "coarse", "full"),
        help="by default a mixture of configurations; coarse and full defer all that they can",
    )
    add("--dtype", choices=("bf16", "fp32", "both"), help="bf16 has FP32 main parameters")
    add("--recompute", choices=("none", "full", "selective"), help="activation checkpointing")
    add(
        "--on-mismatch",
        choices=("report", "rollback"),
        default="report",
        help="rollback: nothing of a fault may be left after the step (report)",
    )
    add("--jobs", type=int, default=1, metavar="N", help="configurations at one time (1)")
    add("--json", metavar="FILE", help="write the figures there")
    add("--out", metavar="DIR", help="keep logs and faults.jsonl, with every fault, there")
    return parser


def _setups(args: argparse.Namespace) -> list[Setup]:
    if args.mode is args.dtype is args.recompute is None:
        chosen = list(COVERED)
    elif args.mode in ("coarse", "full") and args.dtype is args.recompute is None:
        chosen = [replace(setup, mode=args.mode) for setup in DEFERRED]
        if args.mode == "coarse":
            chosen = [setup for setup in chosen if setup.recompute != "none"]
    else:
        mode = args.mode or "piggyback"
        recompute = args.recompute or ("none" if mode == "naive" else "full")
        dtypes = ("bf16", "fp32") if args.dtype in (None, "both") else (args.dtype,)
        chosen = [Setup(mode, dtype, recompute) for dtype in dtypes]
    return [replace(setup, on_mismatch=args.on_mismatch) for setup in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a campaign as the command line says.

    Returns:
        1 if a harmful fault was missed, a clean step raised an alarm, or a worker failed; else 0.

    Raises:
        UsageError: A value makes no sense.
    """
    args = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    patterns = PATTERNS if args.patterns == "all" else tuple(args.patterns.split(","))
    for pattern in patterns:
        if pattern not in PATTERNS:
            raise UsageError(f"--patterns: {pattern} is none of {', '.join(PATTERNS)}")
    for flag in ("faults", "clean_steps"):
        if getattr(args, flag) < 0:
            raise UsageError(f"--{flag.replace('_', '-')}: should be 0 or more")
    if args.jobs < 1:
        raise UsageError("--jobs: should be 1 or more")
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        campaign = Campaign(
            _setups(args),
            args.faults,
            args.clean_steps,
            args.seed,
            patterns,
            Path(args.out or temporary),
        )
        with progress("faults", args.faults) as shown:
            campaign.run(args.jobs, shown.advance)
    console = Console()
    tty = console.is_terminal
    print(
        campaign.text(color=tty and not console.no_color, width=console.width if tty else 110),
        end="",
    )
    if args.json:
        Path(args.json).write_text(json.dumps(campaign.to_dict(), indent=2) + "\n")
    return int(campaign.failed)
