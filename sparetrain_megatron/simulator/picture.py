"""A timeline of a simulated step as a picture; needs matplotlib (`pip install …[bench]`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Mode

from .schedule import Compute, Exchange
from .simulate import Simulation

_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "wire": "#bab0ac",
    "bubble": "#eeeeee",
    "checks in windows": "#54a24b",
    "update": "#b279a2",
}


def draw(simulation: Simulation, path: str | os.PathLike[str], mode: Mode | None = None) -> Path:
    """Draws each stage's step, unprotected above and protected below.

    Args:
        path: Its ending says the format: `.png`, `.svg`, `.pdf`.
        mode: Which mode is drawn; by default the last that was simulated.

    Raises:
        UsageError: matplotlib is absent, or cannot write such a file.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    step = simulation.step
    mode = mode or (list(simulation.modes)[-1] if simulation.modes else None)
    rows = 1 + (mode is not None)
    stages = len(step.programs)
    figure, axes = pyplot.subplots(
        rows, 1, figsize=(12, 1.2 + rows * (0.6 + 0.35 * stages)), sharex=True, squeeze=False
    )
    _draw_step(axes[0][0], simulation, None)
    axes[0][0].set_title(f"unprotected: {step.step_seconds:.3g} s, idle {step.idle_share:.0%}")
    if mode is not None:
        result = simulation.modes[mode]
        _draw_step(axes[1][0], simulation, mode)
        axes[1][0].set_title(f"{mode}: {result.step_seconds:.3g} s, {result.overhead:+.1%}")
    axes[-1][0].set_xlabel("seconds")
    handles = [Patch(color=color, label=name) for name, color in _COLORS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--picture {path}: {error}") from error
    finally:
        pyplot.close(figure)
    return Path(path)


def _draw_step(axis: Any, simulation: Simulation, mode: Mode | None) -> None:
    step = simulation.step
    result = simulation.modes[mode] if mode is not None else None
    spans = step.spans if result is None else result.spans
    tails = step.tails if result is None else result.tails
    for stage, program in enumerate(step.programs):
        bars: dict[str, list[tuple[float, float]]] = {name: [] for name in _COLORS}
        used = result.window_work[stage] if result is not None else None
        for index, (item, span) in enumerate(zip(program, spans[stage])):
            if isinstance(item, Compute):
                name = "forward" if item.kind == "F" else "backward"
                bars[name].append((span.start, span.seconds))
            elif isinstance(item, Exchange) and span.seconds:
                bars["bubble"].append((span.start, span.seconds - span.wire))
                bars["wire"].append((span.end - span.wire, span.wire))
                if used is not None and used[index]:
                    bars["checks in windows"].append((span.start, used[index]))
        tail = tails[stage]
        bars["wire"].append((tail.pipeline_end, tail.reduced - tail.pipeline_end))
        bars["update"].append((tail.barrier, tail.updated - tail.barrier))
        for name, intervals in bars.items():
            height = 0.3 if name == "checks in windows" else 0.8
            axis.broken_barh(intervals, (stage - height / 2, height), facecolors=_COLORS[name])
    axis.set_yticks(range(len(step.programs)), [f"stage {s}" for s in range(len(step.programs))])
    axis.invert_yaxis()
