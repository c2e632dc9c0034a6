"""The command `sparetrain simulate`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from sparetrain_megatron.config import parse_size
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Profile
from sparetrain_megatron.report.terminal import Titled, make_table, pairs_table

from .layout import Layout
from .machine import GIB, PRESETS, machine
from .measured import simulate_measured
from .model import SHAPES, Shape, from_megatron, shape
from .reliability import ROLLBACK_STEPS, Run, compare
from .search import Found, search
from .simulate import MODES, Simulation, simulate
from .synthesise import Assumptions

Output = tuple[list[Titled], dict[str, Any]]

_DEGREES = {
    "tp": ("tensor", "tensor-parallel degree"),
    "pp": ("pipeline", "pipeline stages"),
    "vpp": ("virtual", "chunks of layers a stage (interleaved schedule)"),
    "dp": ("data", "data-parallel degree"),
    "ep": ("expert", "expert-parallel degree"),
    "cp": ("context", "context-parallel degree"),
    "global-batch-size": ("global_batch", "sequences a step"),
    "micro-batch-size": ("micro_batch", "sequences a microbatch"),
}


def add_parser(commands: Any) -> None:
    """Adds the command's flags to argparse's subparsers."""
    parser = commands.add_parser(
        "simulate",
        help="what protection would cost on a cluster, without one",
        description="Simulates a training step on a cluster, unprotected and under each mode. "
        "Everything that it assumes is in its output.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is trained (one of)")
    what.add_argument("--preset", metavar="MODEL", help=", ".join(SHAPES))
    what.add_argument(
        "--megatron-args",
        metavar="FLAGS",
        help="Megatron's flags in one string, or @FILE with them; other flags here come first",
    )
    what.add_argument(
        "--profile",
        metavar="FILE",
        nargs="+",
        help="measured profiles, one a pipeline stage, scaled to the layout given here",
    )
    layout = parser.add_argument_group("layout")
    for flag, (name, text) in _DEGREES.items():
        layout.add_argument(f"--{flag}", dest=name, type=int, metavar="N", help=text)
    layout.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sequence")
    layout.add_argument(
        "--no-recompute", action="store_true", help="layers are not checkpointed and recomputed"
    )
    layout.add_argument(
        "--no-sequence-parallel", action="store_true", help="all-reduces instead of pairs"
    )
    place = parser.add_argument_group("machine")
    place.add_argument("--gpu", default="h200", help=f"{', '.join(PRESETS)}; default: h200")
    place.add_argument(
        "--deterministic",
        action="store_true",
        help="collectives inside a node by ring, as Megatron's --deterministic-mode has them",
    )
    place.add_argument(
        "--node-adapter",
        type=float,
        metavar="GB/S",
        help="one network adapter a node, which its GPUs share; default: one a GPU",
    )
    place.add_argument(
        "--memory-gb", type=float, metavar="GIB", help="of a GPU; default: what it has"
    )
    assuming = parser.add_argument_group("assumptions")
    assuming.add_argument(
        "--overlap",
        choices=("none", "backward", "async"),
        default="none",
        help="what hides tensor-parallel collectives; async: collective matrix products",
    )
    assuming.add_argument("--no-bubbles", action="store_true", help="late stages are not used")
    assuming.add_argument("--window-use", type=float, default=0.9, metavar="SHARE")
    assuming.add_argument("--memory-budget", metavar="SIZE", help="what deferral may hold")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--search",
        metavar="GPUS",
        type=int,
        nargs="?",
        const=0,
        help="find the layout with the shortest protected step on so many GPUs",
    )
    parser.add_argument(
        "--sdc-rate",
        type=float,
        metavar="RATE",
        help="silent corruptions a GPU-hour: compare strategies over --hours",
    )
    parser.add_argument("--hours", type=float, default=720.0, help="of training; default: 720")
    parser.add_argument(
        "--rollback-seconds",
        type=float,
        metavar="S",
        help=f"of one rollback; default: {ROLLBACK_STEPS} protected steps, as measured",
    )
    parser.add_argument("--picture", metavar="FILE", help="a timeline of each stage")
    parser.add_argument("--json", action="store_true", help="one JSON object, no tables")


def run(args: argparse.Namespace) -> Output:
    """`sparetrain simulate`.

    Raises:
        UsageError: Flags that don't go together, or a layout that doesn't fit.
    """
    sources = [name for name in ("preset", "megatron_args", "profile") if getattr(args, name)]
    if len(sources) != 1:
        raise UsageError("give one of --preset, --megatron-args and --profile")
    if not 0 < args.window_use <= 1:
        raise UsageError(f"--window-use {args.window_use}: should be above 0, at most 1")
    gpu = machine(args.gpu, args.memory_gb)
    if args.deterministic:
        gpu = gpu.deterministic()
    if args.node_adapter is not None:
        if args.node_adapter <= 0:
            raise UsageError(f"--node-adapter {args.node_adapter:g}: should be positive")
        gpu = gpu.shared_adapter(args.node_adapter * 1e9)
    assumptions = Assumptions(
        overlap=args.overlap, bubbles=not args.no_bubbles, window_use=args.window_use
    )
    given = {name: getattr(args, name) for name, _ in _DEGREES.values() if getattr(args, name)}
    budget = None
    if args.memory_budget is not None:
        try:
            zero = args.memory_budget.strip() == "0"
            budget = 0 if zero else parse_size(args.memory_budget, total=int(gpu.memory))
        except ValueError as error:
            raise UsageError(f"--memory-budget: {error}, got {args.memory_budget!r}") from error
    tables: list[Titled] = []
    values: dict[str, Any] = {}
    if args.profile:
        if args.search is not None:
            raise UsageError("--search needs a shape: --preset or --megatron-args")
        profiles = [Profile.load(path) for path in args.profile]
        simulation = simulate_measured(profiles, given, assumptions, args.modes, budget)
    else:
        model, base = _model_and_layout(args, given)
        if args.search is not None:
            gpus = args.search or base.gpus
            found = search(model, base, gpu, gpus, assumptions)
            tables.append(_search_table(found))
            values["search"] = [
                {
                    "layout": one.layout.describe(),
                    "step_s": one.unprotected,
                    "protected_step_s": one.protected("full") if one.simulation else None,
                }
                for one in found
            ]
            base = found[0].layout
        simulation = simulate(model, base, gpu, assumptions, args.modes, budget)
    tables = [*tables, *_tables(simulation)]
    values = {**simulation.to_dict(), **values}
    if args.sdc_rate is not None:
        _add_reliability(args, simulation, tables, values)
    if args.picture:
        from .picture import draw

        values["picture"] = str(draw(simulation, args.picture))
    return tables, values


def _model_and_layout(args: argparse.Namespace, given: dict[str, Any]) -> tuple[Shape, Layout]:
    from_flags: dict[str, Any] = {}
    if args.preset:
        model = shape(args.preset)
    else:
        text = args.megatron_args
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text(encoding="utf-8")
            except OSError as error:
                raise UsageError(f"--megatron-args {text}: {error.strerror}") from error
        model, from_flags = from_megatron(shlex.split(text, comments=True))
    if args.seq_length:
        model = dataclasses.replace(model, sequence=args.seq_length)
    if args.preset:
        from_flags = {"expert": min(8, model.experts) or 1}
    values = {**from_flags, **given}
    if args.no_recompute:
        values["recompute"] = False
    if args.no_sequence_parallel or values.get("tensor", 8) == 1:
        values["sequence_parallel"] = False
    layout = Layout(**values)
    if "pipeline" in values or not args.preset:
        return model, layout
    # The fewest stages of whole nodes that the memory allows.
    from .search import fits

    gpu = machine(args.gpu, args.memory_gb)
    for stages in range(1, min(model.layers, 64) + 1):
        if stages > 1 and layout.virtual > 1 and model.layers % (stages * layout.virtual):
            continue
        trial = dataclasses.replace(layout, pipeline=stages)
        if fits(model, trial, gpu):
            return model, trial
    return model, layout


def _add_reliability(
    args: argparse.Namespace,
    simulation: Simulation,
    tables: list[Titled],
    values: dict[str, Any],
) -> None:
    run = Run(
        gpus=simulation.step.layout.gpus,
        hours=args.hours,
        rate=args.sdc_rate,
        step=simulation.step.step_seconds,
        rollback=args.rollback_seconds,
    )
    mode = list(simulation.modes)[-1]
    outcomes = compare(run, simulation.modes[mode].overhead)
    values["reliability"] = {
        "run": dataclasses.asdict(run),
        "expected_corruptions": run.corruptions,
        "strategies": [outcome.to_dict(run) for outcome in outcomes],
    }
    tables.append(
        make_table(
            f"{run.corruptions:.3g} corruptions expected in {run.hours:g} hours "
            f"on {run.gpus:,} GPUs",
            ("strategy", ">wasted hours", ">share", ">undetected", ">clean run", ">noticed after"),
            [
                (
                    o.strategy,
                    f"{o.wasted:,.1f}",
                    f"{o.share(run):.2%}",
                    f"{o.undetected:.3g}",
                    f"{o.clean():.1%}",
                    f"{o.latency * 3600:,.0f} s" if o.latency else "-",
                )
                for o in outcomes
            ],
        )
    )


def _search_table(found: list[Found]) -> Titled:
    rows = []
    for one in found[:10]:
        layout = one.layout
        protected = f"{one.protected('full'):.3f} s" if one.simulation else "slower unprotected"
        degrees = (layout.tensor, layout.pipeline, layout.virtual, layout.data, layout.expert)
        rows.append((*degrees, f"{one.unprotected:.3f} s", protected))
    columns = (">TP", ">PP", ">VPP", ">DP", ">EP", ">unprotected", ">protected")
    return make_table(f"layouts, best of {len(found)} that fit", columns, rows)


def _tables(simulation: Simulation) -> list[Titled]:
    step = simulation.step
    layout = step.layout
    facts = [
        ("model", str(step.pieces.model.get("name", "measured"))),
        (
            "layout",
            f"TP {layout.tensor}, PP {layout.pipeline}, VPP {layout.virtual}, DP {layout.data}, "
            f"EP {layout.expert}, CP {layout.context}: {layout.gpus:,} GPUs",
        ),
        ("microbatches", f"{layout.microbatches} of {layout.micro_batch}"),
        ("unprotected step", f"{step.step_seconds:.3f} s"),
        ("idle share", f"{step.idle_share:.1%}"),
        (
            "memory",
            ", ".join(f"{peak / GIB:.1f}" for peak in simulation.peak_bytes[:8])
            + (" …" if len(simulation.peak_bytes) > 8 else "")
            + f" of {step.capacity / GIB:.0f} GiB",
        ),
    ]
    facts += [
        (f"waiting: {what}", f"{seconds:.3f} s ({seconds / step.step_seconds:.1%})")
        for what, seconds in step.window_seconds().items()
        if seconds > 0
    ]
    rows = [
        (
            mode,
            f"{result.step_seconds:.3f} s",
            f"{result.overhead:.1%}",
            f"{result.gain_vs_naive:+.1%}",
            f"{result.floor:.1%}",
            f"{result.held / GIB:.1f} GiB",
            *(f"{share:.0%}" for share in result.shares.values()),
        )
        for mode, result in simulation.modes.items()
    ]
    methods = next((tuple(r.shares) for r in simulation.modes.values()), ())
    columns = ("mode", ">step", ">overhead", ">vs naive", ">floor", ">held")
    return [
        pairs_table("simulated step", facts),
        make_table("protected", (*columns, *(f">{m}" for m in methods)), rows),
        make_table("assumptions", ("",), [(sentence,) for sentence in simulation.said]),
    ]
