"""What protection costs when second executions run while a rank waits for the network.

Trains a Llama-style model with real Megatron on two pipeline stages, each on a "host" of its own:
two network namespaces of this machine, joined by a link whose rate is chosen so that an unprotected
step is idle for the asked share of its time. The modes alternate step by step in the same two
processes.

    python benchmarks/overlap.py --idle 68 --steps 20 --json FILE --picture FILE

With ``--experts`` the two ranks share the experts of every layer instead, and what crosses the link
are their all-to-alls:

    python benchmarks/overlap.py --experts 8 --idle 68 --steps 12 --json FILE

With ``--layout tensor`` or ``sequence`` it is the layers' collectives, and with ``interleaved`` a
stage has several chunks of layers.

Needs root and iproute2 (`ip`, `tc`); without them the link is emulated, and the output says so.

What the figures mean:

ratio                a step's wall time ÷ the unprotected step's of the same round (of the slower
                     rank each); the median
ratio_spread         its lower and upper quartile
critical_path_share  checkers' time outside of windows, by timers, ÷ the unprotected step; the rank
                     with more of it. Waiting for the other rank at a verdict is left out:
                     unprotected, the same wait is in the gradients' norm
predicted_share      what the plan said critical_path_share would be
busy_growth          growth of the processor time outside of windows, ÷ the unprotected step: it
                     has what no timer sees (interception)
by_window_share      the same by what was waited for: all_to_all, all_gather, verdict, …
longest_overrun_s    the most that a window was left late: its last operator, of one rank
in_window_share      seconds of replays inside windows ÷ seconds of replays
naive_share          naive checks and the optimizer's second step ÷ all checkers' time
peak_held_bytes      the most that waiting second executions held on one rank
floor                checks that fit in no window ÷ the unprotected step: naive checks (which can't
                     be deferred, or this mode does not) and, from a recorded step, the work that
                     even the best order could not have put into the windows that came after it
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

from timeline import draw, unhidden
from two_hosts import LinkError, hosts, run_ranks

MODES = ("unprotected", "naive", "piggyback", "coarse", "full")
HERE = Path(__file__).resolve().parent
MEMORY = {
    # Kept once it is there, as a GPU's caching allocator does; else page faults are a third of the
    # time of large operators.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ``idle`` becomes a share, ``modes`` a list with ``unprotected``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle", type=float, default=68, help="%% of an unprotected step")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each mode")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="timeline of one iteration; needs matplotlib")
    parser.add_argument("--profiles", type=Path, help="keep the measured profiles in this folder")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--layout",
        choices=("pipeline", "interleaved", "tensor", "sequence"),
        default="pipeline",
        help="two stages, of one or of several chunks; or tensor parallelism, without or with "
        "sequence parallelism",
    )
    parser.add_argument("--experts", type=int, default=0, help="of each layer; on both ranks")
    parser.add_argument("--topk", type=int, default=2, help="experts of a token")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--strategy",
        choices=("planned", "everything"),
        default="planned",
        help="coarse and full: by a plan made from profiled steps, or defer whatever can be",
    )
    parser.add_argument("--link", choices=("auto", "namespaces", "emulated"), default="auto")
    parser.add_argument("--rate", type=float, default=0, help="bit/s; not chosen by --idle then")
    options = parser.parse_args(arguments)
    if not 0 < options.idle < 100:
        parser.error("--idle: between 0 and 100")
    if options.steps < 1 or options.microbatches < 1:
        parser.error("--steps and --microbatches: at least 1")
    if options.experts % 2 or (options.experts and not 0 < options.topk <= options.experts):
        parser.error("--experts: an even number, at least --topk")
    options.idle /= 100
    modes = options.modes.split(",")
    unknown = [m for m in modes if m not in MODES]
    if unknown:
        parser.error(f"--modes: {', '.join(unknown)}; there are {', '.join(MODES)}")
    options.modes = [m for m in MODES if m in modes or m == "unprotected"]
    return options


def main() -> None:
    options = parse()
    try:
        found = measure(options)
    except LinkError as error:
        sys.exit(f"overlap.py: {error}")
    result = summary(found, options)
    print_table(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.picture:
        shown = [m for m in ("unprotected", options.modes[-1]) if m in options.modes]
        steps = {m: [rank["recorded"][m] for rank in found["ranks"]] for m in dict.fromkeys(shown)}
        draw(steps, headline(result), options.picture)


# --- running -------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs both ranks to their end and returns what the first one wrote.

    Raises:
        LinkError: The link could not be made.
        SystemExit: A rank failed.
    """
    with hosts(options.link) as pair, tempfile.TemporaryDirectory() as folder:
        settings = {k: v for k, v in vars(options).items() if k not in ("json", "picture")}
        settings["link"] = pair.kind
        settings["profiles"] = str(options.profiles.absolute()) if options.profiles else None
        found = run_ranks(pair, HERE / "overlap_rank.py", settings, folder, MEMORY)
        return found | {"link": pair.kind}


# --- evaluating ----------------------------------------------------------------------------------


def summary(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all modes, from both ranks' steps."""
    ranks = found["ranks"]
    base = wall_times(ranks, "unprotected")
    unprotected = statistics.median(base)
    idle = [_median(_steps(r, "unprotected"), "waiting") / unprotected for r in ranks]
    blocked = [1 - _median(_steps(r, "unprotected"), "cpu") / unprotected for r in ranks]
    result: dict[str, Any] = {
        "schema": 1,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per rank",
        "load_average": os.getloadavg()[1],
        "link": found["link"],
        "bits_per_second": found["rate"],
        "calibration": found["calibration"],
        "settings": {
            k: v
            for k, v in vars(options).items()
            if k not in ("json", "picture", "profiles", "link", "rate")
        },
        "idle_share": statistics.mean(idle),
        "idle_share_by_rank": idle,
        "blocked_share_by_rank": blocked,
        "step_s": unprotected,
        "peak_process_bytes": [r["peak_process_bytes"] for r in ranks],
        "modes": {},
    }
    for mode in options.modes:
        ratios = [a / b for a, b in zip(wall_times(ranks, mode), base)]
        parts = [rank_figures(r, mode, unprotected) for r in ranks]
        replays = sum(p["replays_s"] for p in parts)
        checkers = sum(p["checkers_s"] for p in parts)
        result["modes"][mode] = {
            "ratio": statistics.median(ratios),
            "ratio_spread": quartiles(ratios),
            "critical_path_share": max(p["critical_path_share"] for p in parts),
            "busy_growth": max(p["busy_growth"] for p in parts),
            "in_window_share": sum(p["in_windows_s"] for p in parts) / replays if replays else 0.0,
            "by_window_share": shares(parts, replays),
            "naive_share": sum(p["naive_s"] for p in parts) / checkers if checkers else 0.0,
            "peak_held_bytes": max(p["peak_held_bytes"] for p in parts),
            "floor": max(p["floor"] for p in parts),
            "ranks": parts,
        }
        planned = [r["predicted"][mode] for r in ranks if mode in r["predicted"]]
        if planned:
            result["modes"][mode]["predicted_share"] = max(p["overhead"] for p in planned)
            result["modes"][mode]["predicted"] = planned
    return result


def shares(parts: list[dict[str, Any]], replays: float) -> dict[str, float]:
    """Of all replays, those in windows, by what was waited for."""
    names = sorted({name for part in parts for name in part["by_window_s"]})
    seconds = {n: sum(part["by_window_s"].get(n, 0.0) for part in parts) for n in names}
    return {n: s / replays for n, s in seconds.items() if replays and s}


def rank_figures(rank: dict[str, Any], mode: str, unprotected: float) -> dict[str, Any]:
    """One rank's figures in one mode: medians over its steps; shares of the unprotected step."""
    steps, recorded = _steps(rank, mode), rank["recorded"][mode]["details"]
    categories = sorted({c for s in steps for c in s["by_category"]})
    by_category = {
        c: statistics.median(s["by_category"].get(c, 0.0) for s in steps) for c in categories
    }
    reasons = sorted({c for s in steps for c in s["outside"]})
    outside = {c: statistics.median(s["outside"].get(c, 0.0) for s in steps) for c in reasons}
    places = sorted({c for s in steps for c in s["operators"]})
    operators = {c: statistics.median(s["operators"].get(c, 0) for s in steps) for c in places}
    naive = by_category.get("naive", 0.0) + by_category.get("optimizer", 0.0)
    in_windows = _median(steps, "in_windows")
    critical = statistics.median(s["in_checks"] - s["waited_in_verdicts"] for s in steps)
    busy = statistics.median(s["cpu"] - s["cpu_in_windows"] for s in steps)
    busy_before = statistics.median(
        s["cpu"] - s["cpu_in_windows"] for s in _steps(rank, "unprotected")
    )
    late = unhidden(recorded["windows"], recorded["work"])
    return {
        "step_s": _median(steps, "seconds"),
        "idle_share": statistics.median(s["waiting"] / s["seconds"] for s in steps),
        "critical_path_share": critical / unprotected,
        "busy_growth": (busy - busy_before) / unprotected,
        "floor": (naive + late) / unprotected,
        "naive_s": naive,
        "unhidden_s": late,
        "in_windows_s": in_windows,
        "replays_s": in_windows + sum(outside.values()),
        "checkers_s": critical + in_windows,
        "overrun_s": _median(steps, "overrun"),
        "longest_overrun_s": max(s["longest_overrun"] for s in steps),
        "windows": _median(steps, "windows"),
        "by_window_s": {
            name: statistics.median(s["by_window"].get(name, 0.0) for s in steps)
            for name in sorted({n for s in steps for n in s["by_window"]})
        },
        "outside_s": outside,
        "by_category_s": by_category,
        "operators": operators,
        "peak_held_bytes": max(s["peak_held_bytes"] for s in steps),
        "peak_check_bytes": max(s["peak_check_bytes"] for s in steps),
        "longest_checks_s": dict(list(recorded["operators"].items())[:20]),
    }


def wall_times(ranks: list[dict[str, Any]], mode: str) -> list[float]:
    """Seconds of each round's step in a mode: the slower rank's."""
    return [max(s["seconds"] for s in both) for both in zip(*(_steps(r, mode) for r in ranks))]


def _steps(rank: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    return [s for s in rank["steps"] if s["mode"] == mode]


def _median(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.median(s[key] for s in steps)


def quartiles(values: list[float]) -> list[float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return [values[0], values[0]]
    cuts = statistics.quantiles(values, n=4, method="inclusive")
    return [cuts[0], cuts[2]]


def headline(result: dict[str, Any]) -> str:
    kind = "" if result["link"] == "namespaces" else " (EMULATED link)"
    by_rank = " / ".join(f"{share:.0%}" for share in result["idle_share_by_rank"])
    return (
        f"unprotected step {result['step_s']:.2f} s, idle {result['idle_share']:.0%} ({by_rank}), "
        f"link {result['bits_per_second'] / 1e6:.2f} Mbit/s{kind}"
    )


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = result["settings"]["steps"]
    table = Table(title=headline(result), caption=f"medians of {steps} steps, modes alternating")
    table.add_column("mode", no_wrap=True)
    columns = "ratio;quartiles;critical path;planned;busy growth;floor;in windows;naive;held"
    for name in columns.split(";"):
        table.add_column(name, justify="right", no_wrap=True)
    for mode, row in result["modes"].items():
        low, high = row["ratio_spread"]
        table.add_row(
            mode,
            f"{row['ratio']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['critical_path_share']:.1%}",
            f"{row['predicted_share']:.1%}" if "predicted_share" in row else "",
            *(f"{row[k]:.1%}" for k in ("busy_growth", "floor")),
            *(f"{row[k]:.0%}" for k in ("in_window_share", "naive_share")),
            f"{row['peak_held_bytes'] / 1e6:.1f} MB",
        )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    for mode, row in result["modes"].items():
        for number, rank in enumerate(row["ranks"]):
            spent = sorted(rank["by_category_s"].items(), key=lambda item: -item[1])
            parts = [f"{name} {seconds * 1e3:.0f}" for name, seconds in spent if seconds > 5e-4]
            if parts:
                share = f"{rank['critical_path_share']:.1%}"
                console.print(f"{mode}, rank {number}: {share}; ms a step: {', '.join(parts)}")


if __name__ == "__main__":
    main()
