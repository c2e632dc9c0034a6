"""The simulator against the benchmark over a slow link: predicted and measured overhead by mode.

    python benchmarks/overlap.py --idle 68 --json overlap-68.json --profiles profiles-68
    python benchmarks/simulator_check.py overlap-68.json profiles-68 [--out FILE]

From the measured profiles it takes what an operator costs, from the link's rate what a message
takes; schedule, waits, idle share and the plans of the four modes it works out itself. Compared is
`critical_path_share`: checkers outside of windows, by timers, on the rank with more of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Profile
from sparetrain_megatron.report.terminal import make_table, render
from sparetrain_megatron.simulator.measured import simulate_measured
from sparetrain_megatron.simulator.simulate import MODES
from sparetrain_megatron.simulator.synthesise import Assumptions

RELATIVE, POINTS = 0.25, 0.015
"""How far a prediction may be off: the larger of a share of what was measured, and a share of the
step."""


def predict(overlap: dict[str, Any], profiles: Sequence[Profile]) -> dict[str, Any]:
    """What the simulator says of a measured run, beside what was measured.

    Args:
        overlap: What `overlap.py --json` wrote.
        profiles: Of both ranks of that run.

    Raises:
        UsageError: The profiles are of another job.
    """
    settings = overlap["settings"]
    model = profiles[0].identity.model
    for ours, theirs in (("hidden", "hidden_size"), ("sequence", "seq_length")):
        if settings[ours] != model.get(theirs):
            raise UsageError(
                f"the profiles have {theirs} {model.get(theirs)}, not {settings[ours]}"
            )
    # BF16 activations [s, 1, h] over a link that each direction has for itself.
    message = 8 * 2 * settings["sequence"] * settings["hidden"] / overlap["bits_per_second"]
    modes = [mode for mode in MODES if mode in overlap["modes"]]
    planned = [p["budget"] for m in overlap["modes"].values() for p in m.get("predicted", ())]
    simulation = simulate_measured(
        profiles, {}, Assumptions(), modes, max(planned, default=1 << 30), message
    )
    rows: dict[str, Any] = {}
    for mode in modes:
        predicted = simulation.critical_share(mode)
        measured = overlap["modes"][mode]["critical_path_share"]
        rows[mode] = {
            "predicted": predicted,
            "measured": measured,
            "within": abs(predicted - measured) <= max(RELATIVE * measured, POINTS),
            "predicted_step_ratio": 1 + simulation.modes[mode].overhead,
            "measured_step_ratio": overlap["modes"][mode]["ratio"],
            "predicted_s": {
                str(stage): plan.totals.critical
                for stage, plan in simulation.modes[mode].plans.items()
            },
        }
    return {
        "idle_share": {"predicted": simulation.step.idle_share, "measured": overlap["idle_share"]},
        "step_s": {"predicted": simulation.step.step_seconds, "measured": overlap["step_s"]},
        "message_s": message,
        "modes": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; 1 when a mode is off by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overlap", type=Path, help="what overlap.py --json wrote")
    parser.add_argument("profiles", type=Path, help="the folder of its --profiles")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    args = parser.parse_args(argv)
    overlap = json.loads(args.overlap.read_text(encoding="utf-8"))
    files = sorted(args.profiles.glob("profile.rank*.json"))
    try:
        if not files:
            raise UsageError(f"{args.profiles}: no profile.rank*.json")
        result = predict(overlap, [Profile.load(path) for path in files])
    except UsageError as error:
        parser.error(str(error))
    facts = [
        (name, f"{result[name]['predicted']:{form}}", f"{result[name]['measured']:{form}}", "")
        for name, form in (("step_s", ".2f"), ("idle_share", ".1%"))
    ]
    facts += [
        (mode, f"{row['predicted']:.1%}", f"{row['measured']:.1%}", "" if row["within"] else "off")
        for mode, row in result["modes"].items()
    ]
    title = f"checks on the critical path, {args.overlap}"
    print(render([make_table(title, ("", ">predicted", ">measured", ""), facts)]), end="")
    if args.out:
        content = {"schema": 1, "kind": "simulator check", "source": args.overlap.name, **result}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["within"] for row in result["modes"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
