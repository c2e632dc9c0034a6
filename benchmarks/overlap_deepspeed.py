"""What protection costs with DeepSpeed when second executions run while a rank waits.

Trains a small GPT on two "hosts", one rank on each: two network namespaces of this machine, joined
by a link whose rate is chosen so that a rank is idle for the asked share of an unprotected step.
The modes alternate step by step in the same two processes. By default every sum of gradients is
done twice, and so crosses the link twice; in the last mode one in ten is.

    python benchmarks/overlap_deepspeed.py --case zero1 --json benchmarks/results/FILE.json

Cases: ``zero1`` and ``zero3`` (data parallel; gradients and parameters cross the link) and
``pipeline`` (two stages; activations cross it). Needs root and iproute2 (`ip`, `tc`). The JSON
keeps the other cases that are in it already.

What the figures mean:

ratio            a step's wall time ÷ the unprotected step's of the same round (of the slower rank
                 each); the median, with its quartiles
outside_share    checkers' time outside of windows ÷ the unprotected step; the rank with more of it
in_window_share  seconds of replays inside windows ÷ seconds of replays
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from overlap import quartiles
from two_hosts import LinkError, hosts, run_ranks

MODES = ("unprotected", "naive", "piggyback", "full", "full, reductions 0.1")
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=("zero1", "zero3", "pipeline"), default="zero1")
    parser.add_argument("--idle", type=float, default=68, help="%% of an unprotected step")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each mode")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    options = parse()
    try:
        found = measure(options)
    except LinkError as error:
        sys.exit(f"overlap_deepspeed.py: {error}")
    result = summary(found, options)
    print_table(options.case, result)
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {"cases": {}}
        known |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per rank"}
        known["cases"][options.case] = result
        options.json.write_text(json.dumps(known, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs both ranks to their end and returns what the first one wrote."""
    with hosts("namespaces") as pair, tempfile.TemporaryDirectory() as folder:
        settings = {k: v for k, v in vars(options).items() if k != "json"}
        return run_ranks(pair, HERE / "overlap_deepspeed_rank.py", settings, folder, ENVIRONMENT)


def summary(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all modes, from both ranks' steps."""
    ranks = found["ranks"]

    def times(mode: str) -> list[float]:
        return [max(s["seconds"] for s in both) for both in zip(*(r[mode] for r in ranks))]

    base = times("unprotected")
    unprotected = statistics.median(base)
    blocked = [
        1 - statistics.median(s["cpu"] / s["seconds"] for s in r["unprotected"]) for r in ranks
    ]
    result: dict[str, Any] = {
        "settings": {k: v for k, v in vars(options).items() if k not in ("json", "case")},
        "bits_per_second": found["rate"],
        "step_s": unprotected,
        "idle_share_by_rank": blocked,
        "modes": {},
    }
    for mode in MODES:
        ratios = [a / b for a, b in zip(times(mode), base)]
        inside = sum(s["in_windows"] for r in ranks for s in r[mode])
        drained = sum(s["drained"] for r in ranks for s in r[mode])
        outside = max(statistics.median(s["in_checks"] for s in r[mode]) for r in ranks)
        result["modes"][mode] = {
            "ratio": statistics.median(ratios),
            "ratio_spread": quartiles(ratios),
            "outside_share": outside / unprotected,
            "in_window_share": inside / (inside + drained) if inside else 0.0,
            "peak_held_bytes": max(s["held"] for r in ranks for s in r[mode]),
        }
    return result


def print_table(case: str, result: dict[str, Any]) -> None:
    idle = " / ".join(f"{share:.0%}" for share in result["idle_share_by_rank"])
    print(
        f"{case}: unprotected step {result['step_s']:.2f} s, idle {idle}, "
        f"link {result['bits_per_second'] / 1e6:.1f} Mbit/s"
    )
    for mode, row in result["modes"].items():
        low, high = row["ratio_spread"]
        print(
            f"  {mode:20} {row['ratio']:.3f} ({low:.3f}-{high:.3f})  outside "
            f"{row['outside_share']:.1%}  in windows {row['in_window_share']:.0%}  held "
            f"{row['peak_held_bytes'] / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
