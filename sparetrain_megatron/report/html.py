"""One self-contained HTML file of a run: `sparetrain report DIR --html FILE`.

It loads nothing and runs nothing: charts are SVG, what hovers is the browser's own.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from sparetrain_megatron import __version__
from sparetrain_megatron.errors import SparetrainError
from sparetrain_megatron.plan.plan import Plan, load_plans
from sparetrain_megatron.plan.profile import Profile, Run
from sparetrain_megatron.plan.show import lowest_ranks
from sparetrain_megatron.report import charts
from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.overview import Overview
from sparetrain_megatron.report.summary import Statistics
from sparetrain_megatron.report.terminal import mismatch_line, statistics_facts

LISTED = 200
"""Mismatches that are listed one by one."""
STAGES = 16
"""Stages that the timeline draws."""

_PHASES = {
    "forward": "#60a5fa",
    "recompute": "#a78bfa",
    "backward": "#2563eb",
    "accumulate": "#94a3b8",
    "clip": "#0891b2",
    "optimizer": "#0f766e",
    "waits for communication": "#e5e7eb",
    "checks in windows": "#22c55e",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1000px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2.2em; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: #4b5563; }
.grid { stroke: #e5e7eb; } .mark { stroke: #dc2626; stroke-dasharray: 4 3; }
table { border-collapse: collapse; font-size: 13.5px; }
td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }
thead th { border-bottom: 1px solid #9ca3af; } tbody th { font-weight: normal; }
.number { text-align: right; } .none { color: #6b7280; } .bad { color: #b91c1c; }
.legend span { margin-right: 1.4em; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
"""


def write_html(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Writes the report of a run.

    Args:
        directory: The run's files.
        path: The HTML file; its folder is made where it doesn't exist.

    Returns:
        The file's path.

    Raises:
        ValueError: There is nothing of a run in `directory`, or in an unknown schema.
        OSError: A file cannot be read or written.
    """
    target = Path(path)
    text = page(Overview.read(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def page(overview: Overview) -> str:
    """The whole document."""
    found = len(overview.mismatches)
    state = "no mismatch" if not found else f"{found:,} mismatch{'es' if found > 1 else ''}"
    sections = (
        ("summary", "Summary", _summary(overview)),
        ("overhead", "Overhead over time", _overhead(overview)),
        ("checks", "Checks by method", _checks(overview)),
        ("timeline", "Timeline of an iteration", _timeline(overview.directory)),
        ("mismatches", "Mismatches by device and operator", _mismatches(overview)),
        ("rollbacks", "Rollbacks", _rollbacks(overview)),
        ("warnings", "Warnings", _list(overview.warnings, "No warning.")),
    )
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{content}</section>'
        for name, title, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>SpareTrain: {state}</title><style>{_STYLE}</style></head><body>"
        f'<h1>SpareTrain: <span class="{"bad" if found else ""}">{state}</span></h1>'
        f"<p>{escape(str(overview.directory))}</p>{body}"
        f'<p class="none">sparetrain {__version__}</p></body></html>\n'
    )


def _summary(overview: Overview) -> str:
    if overview.summary is None:
        return _none("No summary.json: the run has not ended regularly.")
    statistics = Statistics.from_dict(overview.summary)
    facts = statistics_facts(statistics, world_size=overview.summary["world_size"])
    facts.insert(1, ("mode", str(overview.summary.get("config", {}).get("mode", ""))))
    return _table((), facts)


def progress(directory: str | os.PathLike[str]) -> dict[int, list[tuple[float, float]]]:
    """Share of the time in checks, and seconds an iteration, by iteration: a pair for each rank.

    Counters begin again when a run is resumed.
    """
    result: dict[int, list[tuple[float, float]]] = defaultdict(list)
    before: dict[int, tuple[int, float, float]] = {}
    for event in read_events(directory):
        if event["kind"] != "iteration":
            continue
        iteration, total = int(event["iteration"]), float(event["seconds_total"])
        checks, rank = float(event["seconds_in_checks"]), event["rank"]
        last = before.get(rank, (0, 0.0, 0.0))
        if total < last[1] or iteration <= last[0]:
            last = (iteration - 1, 0.0, 0.0)
        seconds, in_checks, number = total - last[1], checks - last[2], iteration - last[0]
        before[rank] = (iteration, total, checks)
        if seconds > 0:
            result[iteration].append((in_checks / seconds, seconds / number))
    return dict(sorted(result.items()))


def _overhead(overview: Overview) -> str:
    points = progress(overview.directory)
    if not points:
        return _none("No iteration events: they come at each of the training log's intervals.")
    marks = sorted({entry["iteration"] for entry in overview.rollbacks})
    middle = {at: median(share for share, _ in ranks) for at, ranks in points.items()}
    share = {
        "largest of any rank": [(at, max(s for s, _ in ranks)) for at, ranks in points.items()],
        "median of the ranks": list(middle.items()),
    }
    seconds = {"seconds": [(at, max(s for _, s in ranks)) for at, ranks in points.items()]}
    note = "Time in checks outside of windows, as a share of the iteration"
    note += "; rolled back iterations are marked." if marks else "."
    return (
        f"<p>{note}</p>"
        + charts.line_chart(
            share, x_label="iteration", y_label="share in checks", percent=True, marks=marks
        )
        + "<p>Seconds an iteration, slowest rank.</p>"
        + charts.line_chart(
            seconds, x_label="iteration", y_label="seconds", marks=marks, height=190
        )
    )


def _checks(overview: Overview) -> str:
    checks = (overview.summary or {}).get("checks") or {}
    if not checks:
        return _none("Nothing counted: the counters stand in summary.json, at the run's end.")
    assert overview.summary is not None
    order = sorted(checks, key=lambda method: -sum(checks[method].values()))
    rows: dict[str, Mapping[str, float]] = {method: checks[method] for method in order}
    text = "<p>Operators executed twice and compared.</p>" + charts.stacked_bars(rows)
    unprotected = overview.summary.get("unprotected") or {}
    if unprotected:
        ordered = sorted(unprotected.items(), key=lambda item: (-item[1], item[0]))
        named = [(name, f"{number:,}") for name, number in ordered]
        text += '<p class="bad">Unprotected</p>' + _table(("operator", "times"), named)
    return text


# --- timeline ------------------------------------------------------------------------------------


def _timeline(directory: Path) -> str:
    how = (
        "Modes coarse and full profile the first iterations and leave profile.rank*.json, of which "
        "this is drawn: --sparetrain-mode full."
    )
    paths = sorted(directory.glob("profile.rank*.json"))
    if not paths:
        return _none(f"No profile. {how}")
    try:
        profiles = lowest_ranks(Profile.load(path) for path in paths)
        plan = directory / "plan.json"
        plans = load_plans(plan) if plan.exists() else {}
    except SparetrainError as error:
        return _none(f"Not drawn: {error}")
    rows = {
        f"stage {stage}": spans(profile, plans.get(stage))
        for stage, profile in sorted(profiles.items())[:STAGES]
    }
    note = (
        "An unprotected iteration as it was profiled, one rank of each stage, from its own start; "
        "in the windows what is planned for them."
    )
    if len(profiles) > STAGES:
        note += f" The first {STAGES} of {len(profiles)} stages."
    return f"<p>{note}</p>" + charts.gantt(rows, _PHASES, "ms")


def spans(profile: Profile, plan: Plan | None) -> list[charts.Span]:
    """The steps of a profile one after the other, neighbours of one kind put together, in ms."""
    used = {} if plan is None else {window.ordinal: window.used for window in plan.windows}
    found: list[charts.Span] = []
    now, ordinal = 0.0, 0

    def add(seconds: float, kind: str, tip: str) -> None:
        nonlocal now
        end = now + seconds * 1000
        if found and found[-1][2:] == (kind, tip):
            found[-1] = (found[-1][0], end, kind, tip)
        elif seconds > 0:
            found.append((now, end, kind, tip))
        now = end

    for step in profile.steps:
        if isinstance(step, Run):
            template = profile.templates[step.template]
            computing = sum(o.seconds for o in template.operators if not o.collective)
            where: list[str] = [template.phase]
            if step.microbatch is not None:
                where.append(f"microbatch {step.microbatch}")
            add(computing, template.phase, ", ".join(where))
            windows: Sequence[Any] = template.windows
        else:
            windows = (step,)
        for window in windows:
            work = min(used.get(ordinal, 0.0), window.seconds)
            add(work, "checks in windows", f"checks in a window ({window.what})")
            add(window.seconds - work, "waits for communication", f"window ({window.what})")
            ordinal += 1
    return found


# --- what went wrong -----------------------------------------------------------------------------


def _mismatches(overview: Overview) -> str:
    if not overview.mismatches:
        return _none("No mismatch.")
    counts: Counter[tuple[str, str]] = Counter()
    for event in overview.mismatches:
        device = f"rank {event['rank']}: {event.get('host') or ''} {event.get('device') or ''}"
        counts[device.strip(), str(event.get("operator"))] += 1
    devices, operators = Counter[str](), Counter[str]()
    for (device, operator), number in counts.items():
        devices[device] += number
        operators[operator] += number
    text = charts.heat_table(
        [name for name, _ in devices.most_common(40)],
        [name for name, _ in operators.most_common(12)],
        counts,
    )
    hidden = max(0, len(devices) - 40), max(0, len(operators) - 12)
    if any(hidden):
        text += _none(f"Not shown: {hidden[0]} devices, {hidden[1]} operators with fewer.")
    lines = [mismatch_line(event) for event in overview.mismatches[:LISTED]]
    if len(overview.mismatches) > LISTED:
        lines.append(f"… and {len(overview.mismatches) - LISTED:,} more")
    return text + _list(lines, "")


def _rollbacks(overview: Overview) -> str:
    if not overview.rollbacks:
        return _none("No iteration was repeated.")
    columns = ("iteration", "discarded attempt", "times")
    rows = [tuple(f"{value:,}" for value in entry.values()) for entry in overview.rollbacks]
    return _table(columns, rows)


# --- pieces of HTML ------------------------------------------------------------------------------


def _table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _list(lines: Sequence[str], otherwise: str) -> str:
    if not lines:
        return _none(otherwise) if otherwise else ""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _none(text: str) -> str:
    return f'<p class="none">{escape(text)}</p>'
