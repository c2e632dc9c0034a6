"""Trains a small GPT three times and shows what injected faults do, with and without protection.

    make demo            (or: python examples/demo/run_demo.py)

Real Megatron, two pipeline stages on two CPU processes, English text. The same seed each time:

1. unprotected, no fault: what training should give;
2. the same faults as in 3, which nobody undoes: the loss goes on looking plausible;
3. protected: every fault is found and its iteration repeated.

Exit code 0 if run 3 found every fault, raised no false alarm, and ended with the losses and with
the weights and optimizer state of run 1, bit for bit; 1 otherwise.
"""

import argparse
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from runs import ITERATIONS, ROOT, Run, RunFailed, build_data, compare_states, train

from sparetrain_megatron.faults.spec import FaultSpec

FAULTS = [
    FaultSpec.parse(text)
    for text in (
        "iteration=4,rank=0,phase=forward,microbatch=1,operator=mm,nth=3,element=4321,bit=13",
        "iteration=8,rank=1,phase=recompute,microbatch=2,operator=mm,nth=2,pattern=burst,bit=12",
        "iteration=11,rank=1,phase=backward,microbatch=4,operator=mm,nth=5,pattern=shift",
        "iteration=15,rank=0,phase=accumulate,microbatch=3,operator=add_,nth=2,element=99,bit=29",
        "iteration=19,rank=1,phase=clip,operator=linalg_vector_norm,bit=25",
        "iteration=22,rank=0,phase=optimizer,operator=addcdiv_,nth=4,pattern=negate",
        "iteration=26,rank=1,phase=communication,operator=recv,nth=2,element=777,bit=13",
        # Two ranks in one iteration, and then the repeat of that iteration.
        "iteration=30,rank=0,phase=backward,microbatch=1,operator=mm,nth=2,pattern=negate",
        "iteration=30,rank=1,phase=forward,microbatch=3,operator=mm,nth=4,element=50,bit=13",
        "iteration=30,attempt=2,rank=1,phase=optimizer,operator=addcdiv_,nth=1,bit=27",
    )
]
SHOWN = (1, 5, 10, 15, 20, 25, 30, 35, 40)

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "demo-output", help="for data, logs and checkpoints"
    )
    folder = parser.parse_args().output.resolve()
    start = time.monotonic()
    for name in ("plain", "damaged", "protected"):
        shutil.rmtree(folder / name, ignore_errors=True)

    inject = [part for fault in FAULTS for part in ("--sparetrain-inject", str(fault))]
    try:
        data = build_data(folder)
        plain = follow("1. unprotected, no fault", folder / "plain", data, [])
        damaged = follow(
            "2. faults that nobody undoes",
            folder / "damaged",
            data,
            ["--sparetrain", "--sparetrain-on-mismatch", "report", *inject],
        )
        protected = follow(
            "3. the same faults, protected", folder / "protected", data, ["--sparetrain", *inject]
        )
    except RunFailed as error:
        console.print(f"\n{error}", markup=False)
        return 1

    problems = show_faults(protected) + check_injections(damaged, protected)
    problems += show_losses(plain, damaged, protected)
    problems += show_weights(plain, damaged, protected)
    show_cost(plain, protected)

    console.print()
    for problem in problems:
        console.print(f"[bold red]FAILED[/]  {problem}")
    if not problems:
        console.print(
            f"[bold green]PASSED[/]  all {len(FAULTS)} faults found, none reported where there was "
            "none, and training ended bit for bit as if they had not happened."
        )
    console.print(
        f"        {time.monotonic() - start:.0f} s; logs, events and checkpoints: {folder}"
    )
    return 1 if problems else 0


def follow(title: str, folder: Path, data: Path, flags: list[str]) -> Run:
    """Trains with a progress bar."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=ITERATIONS)
        return train(folder, data, flags, lambda done: bar.update(task, completed=done))


def assign(mismatches: list[dict]) -> tuple[list[dict | None], list[dict]]:
    """Finds for each fault the mismatch that reports it.

    A mismatch belongs to a fault of the same iteration and attempt; if there are several, the
    one of the same rank and phase comes first. A wrong forward may be noticed in the recompute,
    and a wrong transfer on either side.

    Returns:
        A mismatch or None for each of ``FAULTS``, and the mismatches of attempts without a fault.
    """

    def attempt(entry: dict) -> tuple[int, int]:
        return entry["iteration"], entry.get("attempt") or 1

    found: list[dict | None] = []
    taken: list[dict] = []
    for fault in FAULTS:
        candidates = [
            entry
            for entry in mismatches
            if attempt(entry) == (fault.iteration, fault.attempt) and entry not in taken
        ]
        candidates.sort(key=lambda e: (e["rank"] != fault.rank, e["phase"] != fault.phase))
        found.append(candidates[0] if candidates else None)
        taken += candidates[:1]
    faulty = {(fault.iteration, fault.attempt) for fault in FAULTS}
    return found, [entry for entry in mismatches if attempt(entry) not in faulty]


def show_faults(protected: Run) -> list[str]:
    """Shows what was injected and what was found; returns what is wrong with it."""
    found, false_alarms = assign(protected.mismatches)
    table = Table(
        title="\nRun 3: what was injected, and what was found",
        title_justify="left",
        show_lines=True,
    )
    for column in ("iteration", "rank", "injected", "found", "where", "how", "differs", "wrong"):
        table.add_column(column)
    problems = []
    for fault, entry in zip(FAULTS, found, strict=True):
        when = f"{fault.iteration}" + (" (repeat)" if fault.attempt > 1 else "")
        change = f"bit {fault.bit}" if fault.pattern == "bit" else fault.pattern
        row = [when, str(fault.rank), f"{fault.phase}\n{fault.operator}\n{change}"]
        if entry is None:
            table.add_row(*row, "[bold red]missed[/]")
            problems.append(f"missed: {fault}")
            continue
        place = [
            f"{key} {entry[key]}" for key in ("microbatch", "layer") if entry.get(key) is not None
        ]
        elsewhere = f"\non rank {entry['rank']}" if entry["rank"] != fault.rank else ""
        table.add_row(
            *row,
            f"{entry['phase']}\n{entry['operator']}{elsewhere}",
            "\n".join(place),
            entry["method"],
            differs(entry),
            entry["wrong"],
        )
    console.print(table)
    problems += [
        f"false alarm: iteration {entry['iteration']}, rank {entry['rank']}, {entry['phase']}, "
        f"{entry['operator']}"
        for entry in false_alarms
    ]
    return problems


def differs(entry: dict) -> str:
    """What differed, in short; empty where only fingerprints were at hand."""
    if entry.get("elements_differ") is None:
        return ""
    bits = entry.get("bits") or []
    return f"{entry['elements_differ']:,} of {entry['elements']:,}" + (
        f"\nbit{'s' if len(bits) > 1 else ''} {', '.join(map(str, bits))}" if len(bits) < 5 else ""
    )


def check_injections(damaged: Run, protected: Run) -> list[str]:
    """Makes sure that the runs had the faults that the tables speak of."""
    problems = []
    repeats = sum(fault.attempt > 1 for fault in FAULTS)
    # Where nothing is repeated, the fault that waits for the repeat cannot come.
    for name, run, expected in (
        ("2", damaged, len(FAULTS) - repeats),
        ("3", protected, len(FAULTS)),
    ):
        injected = (run.summary or {}).get("injected")
        if injected != expected:
            problems.append(f"run {name} had {injected} faults injected instead of {expected}")
    unprotected = (protected.summary or {}).get("unprotected")
    if unprotected:
        problems.append(f"operators that run 3 could not protect: {unprotected}")
    return problems


def show_losses(plain: Run, damaged: Run, protected: Run) -> list[str]:
    """Shows the loss over the iterations; returns what is wrong with it."""
    table = Table(title="\nLoss on English text", title_justify="left")
    for column in ("iteration", "1. no fault", "2. damaged", "3. protected"):
        table.add_column(column, justify="right")
    for iteration in SHOWN:
        good, bad, kept = (run.losses.get(iteration, "-") for run in (plain, damaged, protected))
        table.add_row(
            str(iteration),
            good,
            f"[red]{bad}[/]" if bad != good else bad,
            f"[bold red]{kept}[/]" if kept != good else f"[green]{kept}[/]",
        )
    console.print(table)
    if damaged.losses.keys() == plain.losses.keys():
        series = [float(loss) for loss in plain.losses.values()]
        gaps = [abs(float(damaged.losses[i]) - float(loss)) for i, loss in plain.losses.items()]
        steps = [abs(b - a) for a, b in pairwise(series[9:])]
        text = f"Run 2 is off by up to {max(gaps):.3f}"
        if max(gaps) < max(steps):
            text += (
                f"; without any fault the loss moves by up to {max(steps):.3f} from one iteration\n"
                "to the next (from iteration 10 on). An alarm on the loss would not have noticed"
            )
        console.print(f"{text}.")
    if len(plain.losses) != ITERATIONS or protected.losses != plain.losses:
        return ["the losses of run 3 are not those of run 1"]
    return []


def show_weights(plain: Run, damaged: Run, protected: Run) -> list[str]:
    """Compares the final checkpoints; returns what is wrong with them."""
    problems = []
    console.print("\nFinal weights and optimizer state (Megatron's checkpoints), against run 1")
    for name, run in (("2. damaged  ", damaged), ("3. protected", protected)):
        difference = compare_states(plain, run)
        if difference.equal:
            verdict = f"[green]bitwise equal[/] ({difference.weights:,} weights)"
        else:
            verdict = (
                f"[red]{difference.weights_differ:,} of {difference.weights:,} weights differ[/], "
                f"by up to {difference.largest:.2g}"
            )
        console.print(f"  {name}  {verdict}")
        if run is protected and not difference.equal:
            problems.append("the final state of run 3 is not that of run 1")
        if run is damaged and difference.equal:
            problems.append("the faults of run 2 did no damage, so they show nothing")
    return problems


def show_cost(plain: Run, protected: Run) -> None:
    """Shows what protection cost here."""
    before, after = plain.typical_milliseconds(), protected.typical_milliseconds()
    summary = protected.summary or {}
    # A wrong optimizer step is found before it is used and repeated alone.
    steps = sum(e["kind"] == "rollback" and e.get("scope") != "iteration" for e in protected.events)
    console.print(
        f"\nRun 3 checked {summary.get('operators_checked', 0):,} operators and repeated "
        f"{summary.get('rollbacks', 0)} iterations and {steps} pieces of optimizer steps.\nIt took "
        f"{after:.0f} ms an iteration instead of {before:.0f}. Operators of a model "
        "this small take\nmicroseconds, so the ratio says little about a real one: see make bench."
    )


if __name__ == "__main__":
    sys.exit(main())
