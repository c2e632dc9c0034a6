"""Profiles and plans as tables for people, and in short as plain values for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparetrain_megatron.report.terminal import Titled, make_table, pairs_table

from .plan import Method, Plan
from .profile import Profile, Run

BUSIEST = 10
"""Windows and segments that are listed."""


def show_plans(plans: Mapping[int, Plan]) -> list[Titled]:
    """Tables of a job's plans, stage by stage."""
    tables: list[Titled] = []
    for stage in sorted(plans):
        tables += _of_plan(plans[stage], f"stage {stage}: " if len(plans) > 1 else "")
    return tables


def _of_plan(plan: Plan, prefix: str) -> list[Titled]:
    totals = plan.totals
    facts = [
        ("mode", plan.mode),
        ("unprotected step", _time(totals.step_seconds)),
        ("predicted overhead", f"{_percent(totals.overhead)} ({_time(totals.critical_seconds)})"),
        ("floor (checks that fit in no window)", _percent(totals.floor)),
        (
            "windows",
            f"{_time(totals.in_windows)} of {_time(totals.window_seconds)} used for replays",
        ),
        (
            "held at most",
            f"{size(totals.peak_held)} of {size(totals.budget)} allowed"
            + (
                f"; cheapest when planned for {size(totals.planned_budget)}"
                if totals.peak_held and totals.planned_budget < totals.budget
                else ""
            ),
        ),
    ]
    facts += [
        (f"critical path: {cause}", f"{_time(value)} ({_share(value, totals.step_seconds)})")
        for cause, value in totals.critical.items()
        if value
    ]
    tables = [pairs_table(f"{prefix}plan", facts)]
    checks = sum(totals.seconds.values())
    rows = [
        (
            method,
            f"{totals.operators[method]:,}",
            _time(totals.seconds[method]),
            _share(totals.seconds[method], checks),
        )
        for method in map(str, Method)
    ]
    tables.append(
        make_table(f"{prefix}checks", ("method", ">operators", ">time", ">share of time"), rows)
    )
    if totals.gains:
        gains = [
            (_PHASES[phase], _time(gain), _share(gain, totals.step_seconds))
            for phase, gain in totals.gains.items()
        ]
        tables.append(
            make_table(
                f"{prefix}gains over naive",
                ("phase", ">off the critical path", ">of the step"),
                gains,
            )
        )
    tables += _regions(plan, prefix)
    return tables


_PHASES = {
    "phase1": "1 piggyback on the recompute",
    "phase2": "2 segments",
    "phase3": "3 operators one by one",
}


def _regions(plan: Plan, prefix: str) -> list[Titled]:
    tables: list[Titled] = []
    used = Counter(use.segment for row in plan.rows for use in {*row.segments})
    rows = []
    for index, number in used.most_common(BUSIEST):
        segment = plan.segments[index]
        phases = {part.phase for part in segment.parts}
        where = ", ".join(f"{p.phase} {p.start}-{p.stop - 1}" for p in segment.parts[:4])
        rows.append(
            (
                where + (", …" if len(segment.parts) > 4 else ""),
                f"{number // len(phases):,}",
                segment.operators,
                _time(segment.replay),
                _time(segment.saved),
                size(segment.boundary),
            )
        )
    if rows:
        columns = ("operators of", ">times", ">operators", ">replay", ">saves", ">boundary")
        tables.append(make_table(f"{prefix}segments", columns, rows))
    busiest = sorted(plan.windows, key=lambda use: (-use.used, use.ordinal))[:BUSIEST]
    if busiest:
        tables.append(
            make_table(
                f"{prefix}busiest windows of {len(plan.windows):,}",
                ("what", "kind", ">number", ">open", ">used", ">share"),
                [
                    (
                        w.what,
                        w.kind,
                        w.nth,
                        _time(w.seconds),
                        _time(w.used),
                        _share(w.used, w.seconds),
                    )
                    for w in busiest
                ],
            )
        )
    return tables


def describe_plans(plans: Mapping[int, Plan]) -> dict[str, Any]:
    """What the tables say, as plain values."""
    return {
        "schema": 1,
        "kind": "plan",
        "stages": [
            {
                "stage": plan.stage,
                "rank": plan.rank,
                "mode": plan.mode,
                "window_use": plan.window_use,
                "identity": plan.identity.model_dump(),
                **plan.totals.model_dump(),
                "regions": dict(
                    Counter(plan.patterns[row.pattern].method for row in plan.rows).most_common()
                ),
                "segments": [segment.model_dump() for segment in plan.segments],
                "windows": [
                    use._asdict()
                    for use in sorted(plan.windows, key=lambda use: (-use.used, use.ordinal))
                ][:BUSIEST],
            }
            for _, plan in sorted(plans.items())
        ],
    }


def show_profile(profile: Profile) -> list[Titled]:
    """Tables of a profile."""
    memory = profile.memory
    facts = [
        ("rank, stage", f"{profile.rank}, {profile.stage}"),
        ("iterations", str(profile.iterations)),
        ("unprotected step", f"{_time(profile.step_seconds)} ± {_time(profile.spread)}"),
        ("operators", f"{profile.operator_count():,}"),
        ("operators' time", _time(profile.compute_seconds)),
        ("windows' time", _time(profile.window_seconds)),
        ("memory", f"{size(memory.peak)} of {size(memory.capacity) if memory.capacity else '?'}"),
    ]
    for part in ("model", "layout", "flags"):
        values = getattr(profile.identity, part)
        if values:
            facts.append((part, ", ".join(f"{key} {value}" for key, value in values.items())))
    tables = [pairs_table("profile", facts)]
    runs = Counter(step.template for step in profile.steps if isinstance(step, Run))
    rows = []
    for number, template in enumerate(profile.templates):
        seconds = sum(operator.seconds for operator in template.operators)
        rows.append(
            (
                template.name or f"template {number}",
                template.phase,
                f"{runs[number]:,}",
                len(template.operators),
                _time(seconds),
                _time(seconds * runs[number]),
            )
        )
    columns = ("region", "phase", ">runs", ">operators", ">each", ">total")
    tables.append(make_table("regions", columns, rows))
    windows = _windows(profile)
    if windows:
        headings = ("what", "kind", ">windows", ">shortest", ">median", ">longest", ">total")
        tables.append(make_table("windows", headings, windows))
    return tables


def _windows(profile: Profile) -> list[Sequence[object]]:
    groups: dict[tuple[str, str], list[float]] = {}
    for window in profile.windows():
        groups.setdefault((window.what, window.kind), []).append(window.seconds)
    rows: list[Sequence[object]] = []
    for (what, kind), seconds in groups.items():
        seconds.sort()
        times = (seconds[0], seconds[len(seconds) // 2], seconds[-1], sum(seconds))
        rows.append((what, kind, f"{len(seconds):,}", *map(_time, times)))
    return rows


def describe_profile(profile: Profile) -> dict[str, Any]:
    """What the tables say, as plain values."""
    groups: dict[str, dict[str, float]] = {}
    for window in profile.windows():
        group = groups.setdefault(f"{window.what} {window.kind}", {"count": 0, "seconds": 0.0})
        group["count"] += 1
        group["seconds"] += window.seconds
    return {
        "schema": 1,
        "kind": "profile",
        "rank": profile.rank,
        "stage": profile.stage,
        "iterations": profile.iterations,
        "identity": profile.identity.model_dump(),
        "step_seconds": profile.step_seconds,
        "compute_seconds": profile.compute_seconds,
        "window_seconds": profile.window_seconds,
        "operators": profile.operator_count(),
        "regions": sum(isinstance(step, Run) for step in profile.steps),
        "windows": groups,
        "memory": {"peak": profile.memory.peak, "capacity": profile.memory.capacity},
    }


def size(number: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.4g} TiB"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(part: float, whole: float) -> str:
    return _percent(part / whole) if whole else "-"


def lowest_ranks(profiles: Iterable[Profile]) -> dict[int, Profile]:
    """One profile a stage: that of its lowest rank."""
    found: dict[int, Profile] = {}
    for profile in profiles:
        known = found.get(profile.stage)
        if known is None or profile.rank < known.rank:
            found[profile.stage] = profile
    return found
