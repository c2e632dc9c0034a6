"""What a doctor's runs have found: data, and the same as tables."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ..report.terminal import Titled, count, make_table, pairs_table
from .cures import DETERMINISTIC, cure

SCHEMA = 1
"""Version of `to_dict`'s schema."""


@dataclasses.dataclass(frozen=True)
class Irreproducible:
    """An operator of which two executions differed on this machine.

    Attributes:
        operator: Short name.
        kind: ``operator``: two executions at once differed; ``software nondeterminism``: the
            recompute differed from its forward, though the operator repeats itself when executed
            twice at once; ``communication``: between ranks.
        times: How often.
        ranks: On which ranks.
        phases: In which phases.
        cure: The switch known to cure it, or None.
        cured: Whether the run in deterministic mode was free of it; None if there was none.
    """

    operator: str
    kind: str
    times: int
    ranks: tuple[int, ...]
    phases: tuple[str, ...]
    cure: str | None
    cured: bool | None = None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        refused: Settings that stop a protected run at its start: ``flag``, ``why``, ``instead``
            and ``hides`` (it starts without strict mode).
        irreproducible: Operators that can't be compared as they are.
        unprotected: Operators that compute and are not executed twice: name to count.
        operators_checked: Operators that were executed twice, over all ranks.
        deterministic: Whether the script was given ``--deterministic-mode``.
        seconds_plain, seconds_deterministic: Of an unprotected iteration, the slowest rank's
            median; None where it was not measured.
        failed: Why the second run, the one with or without ``--deterministic-mode``, failed.
    """

    refused: tuple[dict[str, Any], ...] = ()
    irreproducible: tuple[Irreproducible, ...] = ()
    unprotected: dict[str, int] = dataclasses.field(default_factory=dict)
    operators_checked: int = 0
    deterministic: bool = False
    seconds_plain: float | None = None
    seconds_deterministic: float | None = None
    failed: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing stands in the way of protection."""
        return not (self.refused or self.irreproducible or self.unprotected)

    @property
    def deterministic_cost(self) -> float | None:
        """Share by which deterministic mode lengthens an iteration."""
        if self.seconds_plain is None or self.seconds_deterministic is None:
            return None
        return self.seconds_deterministic / self.seconds_plain - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            **dataclasses.asdict(self),
            "deterministic_cost": self.deterministic_cost,
        }

    def tables(self) -> list[Titled]:
        """For people."""
        found = sum(map(bool, (self.refused, self.irreproducible, self.unprotected)))
        title = "doctor: " + ("nothing found" if self.healthy else count(found, "kind") + " found")
        tables = [pairs_table(title, self._facts())]
        if self.refused:
            rows = [
                (r["flag"], r["why"], r["instead"] + (" (strict mode only)" if r["hides"] else ""))
                for r in self.refused
            ]
            tables.append(make_table("refused at start", ("setting", "why", "instead"), rows))
        if self.irreproducible:
            columns = ("operator", "kind", ">times", "ranks", "phases", "cure")
            differing = [
                (i.operator, i.kind, i.times, _ranks(i.ranks), " ".join(i.phases), _cure(i))
                for i in self.irreproducible
            ]
            tables.append(make_table("two executions differ", columns, differing))
        if self.unprotected:
            named = sorted(self.unprotected.items(), key=lambda item: (-item[1], item[0]))
            tables.append(make_table("UNPROTECTED", ("operator", ">times"), named))
        return tables

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("operators executed twice", f"{self.operators_checked:,}")]
        if not self.operators_checked:
            facts.append(("operators", "not examined: first remove what is refused"))
        for name, seconds in (
            ("iteration without deterministic mode", self.seconds_plain),
            ("iteration in deterministic mode", self.seconds_deterministic),
        ):
            if seconds is not None:
                facts.append((name, f"{seconds * 1000:,.1f} ms"))
        if self.deterministic_cost is not None:
            facts.append((f"cost of {DETERMINISTIC}", f"{self.deterministic_cost:+.1%}"))
        if self.failed:
            run = "without" if self.deterministic else "with"
            facts.append((f"the run {run} {DETERMINISTIC} failed", self.failed))
        return [(name, value.replace("%", " %")) for name, value in facts]


def irreproducible(
    mismatches: Sequence[Mapping[str, Any]], in_deterministic: Iterable[Mapping[str, Any]] | None
) -> tuple[Irreproducible, ...]:
    """Groups mismatches of healthy hardware by operator.

    Args:
        mismatches: `mismatch` events of the run as the user gave it.
        in_deterministic: Those of the run in deterministic mode; None if there was none.
    """
    remaining = None if in_deterministic is None else {e["operator"] for e in in_deterministic}
    at_once = {e["operator"] for e in mismatches if e["method"] == "naive"}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in mismatches:
        kind = "communication"
        if event["method"] == "naive":
            kind = "operator"
        elif event["method"] in ("piggyback", "single", "segment"):
            # What differs at once differs in the recompute as well: that needs no second name.
            kind = "operator" if event["operator"] in at_once else "software nondeterminism"
        groups.setdefault((event["operator"], kind), []).append(event)
    result = []
    for (operator, kind), events in groups.items():
        phases = Counter(str(event["phase"]) for event in events)
        result.append(
            Irreproducible(
                operator=operator,
                kind=kind,
                times=sum(1 + (event.get("followed_by") or 0) for event in events),
                ranks=tuple(sorted({int(event["rank"]) for event in events})),
                phases=tuple(phase for phase, _ in phases.most_common()),
                cure=cure(operator),
                cured=None if remaining is None else operator not in remaining,
            )
        )
    return tuple(sorted(result, key=lambda i: (-i.times, i.operator)))


def slowest_median(seconds: Iterable[Sequence[float]]) -> float | None:
    """The slowest rank's median, the first measurement of several left out as a warm-up."""
    medians = [median(s[1:] or s) for s in seconds if s]
    return max(medians) if medians else None


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f", … ({len(ranks)})" if len(ranks) > 8 else "")


def _cure(finding: Irreproducible) -> str:
    if finding.cured:
        return f"{finding.cure or DETERMINISTIC} (tried: it does)"
    if finding.cured is False:
        known = finding.cure and not finding.cure.startswith(DETERMINISTIC)
        return f"{DETERMINISTIC} does not" + (f"; try {finding.cure}" if known else "")
    if finding.kind == "software nondeterminism":
        return finding.cure or "none known: something runs another kernel in the recompute"
    return finding.cure or "none known; a device that fails now and then looks the same"
