"""What a person reads on the terminal.

Every text is put together first and written in one call, so that lines of several ranks on one
terminal don't run into each other.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparetrain_megatron.report.summary import Statistics

PLAIN_WIDTH = 100

Titled = tuple[str, Table]
"""A title and its table; rich's own titles are wrapped to the width of the table."""

_WRONG = {
    "primary": "the primary was wrong",
    "checker": "the checker was wrong, the result was right",
    "sender": "the sender was wrong",
    "receiver": "the receiver was wrong",
    "software": "the same difference came back: a cause in software, or a lasting defect",
    "unknown": "which of the two was wrong is unknown",
}


def say(text: str, stream: TextIO | None = None) -> None:
    """Writes `text` as whole lines, each beginning with `sparetrain: `, in one call.

    Args:
        text: One or more lines.
        stream: Standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    stream.write("".join(f"sparetrain: {line}\n" for line in text.splitlines()))
    stream.flush()


def mismatch_line(event: Mapping[str, Any]) -> str:
    """One line for one mismatch.

    Args:
        event: The fields of a `mismatch` event; missing or None ones are left out.
    """

    def named(*keys: str) -> list[str]:
        return [f"{key} {event[key]}" for key in keys if event.get(key) is not None]

    place = named("rank")
    machine = ", ".join(str(event[key]) for key in ("host", "device") if event.get(key))
    if machine and place:
        place[0] += f" ({machine})"
    place += named("iteration")
    if (event.get("attempt") or 1) > 1:
        place += named("attempt")
    place += named("microbatch", "stage", "layer")
    if event.get("phase"):
        place.append(str(event["phase"]))
    if event.get("operator"):
        place.append(f"operator {event['operator']}")
    line = "MISMATCH " + ", ".join(place)
    difference = _difference(event)
    if difference:
        line += f": {difference}"
    if event.get("wrong"):
        line += "; " + _WRONG.get(event["wrong"], f"{event['wrong']} was wrong")
    if event.get("followed_by"):
        line += f"; {event['followed_by']:,} more follow from it"
    if event.get("method"):
        line += f" [{event['method']}]"
    if event.get("note"):
        line += f" ({event['note']})"
    return " ".join(line.split())


def interval_line(statistics: Statistics, rank: int = 0, world_size: int = 1) -> str:
    """The line in the training log of each interval, over the run so far.

    Args:
        statistics: Of one rank: adding up all of them at every interval would make them wait.
        rank: Whose they are; said where there are several.
        world_size: Number of ranks.
    """
    whose = f"rank {rank} of {world_size} alone: " if world_size > 1 else ""
    return (
        f"{whose}{statistics.operators_checked:,} operators checked, "
        f"{count(statistics.mismatches, 'mismatch', 'mismatches')}, "
        f"{count(statistics.rollbacks, 'rollback')}, "
        f"time in checks {statistics.share_in_checks:.1%} of the iteration".replace("%", " %")
    )


def summary_text(
    statistics: Statistics,
    *,
    world_size: int = 1,
    directory: Path | None = None,
    color: bool = False,
    width: int = PLAIN_WIDTH,
) -> str:
    """The summary at the end of a run, as one string.

    Args:
        statistics: Merged over all ranks.
        world_size: Number of ranks.
        directory: Where the files of the run are.
        color: Whether to use the terminal's colours.
        width: Columns.
    """
    state = (
        count(statistics.mismatches, "mismatch", "mismatches")
        if statistics.mismatches
        else "no mismatch"
    )
    facts = statistics_facts(statistics, world_size=world_size)
    if directory is not None:
        facts.append(("files", str(directory)))
    tables = [pairs_table(f"sparetrain: {state}", facts)]
    tables += statistics_tables(statistics)
    return render(tables, color=color, width=width)


def print_summary(
    statistics: Statistics,
    *,
    world_size: int = 1,
    directory: Path | None = None,
    stream: TextIO | None = None,
) -> None:
    """Writes `summary_text` in one call, coloured only on a terminal."""
    stream = sys.stdout if stream is None else stream
    console = Console(file=stream)
    color = console.is_terminal and not console.no_color
    width = console.width if console.is_terminal else PLAIN_WIDTH
    stream.write(
        summary_text(
            statistics, world_size=world_size, directory=directory, color=color, width=width
        )
    )
    stream.flush()


def statistics_facts(statistics: Statistics, *, world_size: int) -> list[tuple[str, str]]:
    """Names and values of the plain counters."""
    facts = [
        ("ranks", f"{world_size:,}"),
        ("iterations", f"{statistics.iterations:,}"),
        ("operators checked", f"{statistics.operators_checked:,}"),
        ("operators unprotected", f"{sum(statistics.unprotected.values()):,}"),
        ("communications checked", f"{statistics.communications_checked:,}"),
        ("reductions checked", f"{statistics.reductions_checked:,}"),
        ("reductions not doubled", f"{statistics.reductions_not_doubled:,}"),
        ("mismatches", f"{statistics.mismatches:,}"),
        ("rollbacks", f"{statistics.rollbacks:,}"),
    ]
    if statistics.injected:
        facts.append(("faults injected", f"{statistics.injected:,}"))
    if statistics.second_device_checks:
        facts.append(("second device checks", f"{statistics.second_device_checks:,}"))
    facts += [
        (
            "time in checks",
            f"{statistics.seconds_in_checks:,.1f} s outside windows "
            f"({statistics.share_in_checks:.1%} of the iterations), "
            f"{statistics.seconds_in_windows:,.1f} s inside".replace("%", " %"),
        ),
        ("peak held by checks", f"{statistics.peak_bytes_held / 2**20:,.1f} MiB"),
    ]
    return facts


def statistics_tables(statistics: Statistics) -> list[Titled]:
    """Tables of what was checked, what ran once and what was unprotected; empty ones left out."""
    tables = []
    rows = [
        (method, kind, f"{number:,}")
        for method, by_class in sorted(statistics.checks.items())
        for kind, number in _by_number(by_class)
    ]
    if rows:
        tables.append(make_table("checked", ("method", "class", ">operators"), rows))
    for title, what, counts in (
        ("ran once (nothing to check)", "class", statistics.run_once),
        ("UNPROTECTED", "operator", statistics.unprotected),
    ):
        if counts:
            rows_ = [(name, f"{number:,}") for name, number in _by_number(counts)]
            tables.append(make_table(title, (what, ">operators"), rows_))
    return tables


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Titled:
    """A table; a column whose heading begins with `>` is aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        # As Text: in a plain string, rich would read [brackets] as markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    return title, table


def pairs_table(title: str, pairs: Iterable[tuple[str, str]]) -> Titled:
    """A table of names and values without headings."""
    title, table = make_table(title, ("", ""), pairs)
    table.show_header = False
    return title, table


def render(tables: Iterable[Titled], *, color: bool = False, width: int = PLAIN_WIDTH) -> str:
    """The tables as one string, each with an empty line before it and no trailing spaces."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    for title, table in tables:
        console.print()
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(table)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 mismatch`, `2 mismatches`, `1,234 rollbacks`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _difference(event: Mapping[str, Any]) -> str:
    """How many elements and which bits differ, as far as it is known."""
    differ, elements = event.get("elements_differ"), event.get("elements")
    bits = event.get("bits") or []
    text = ""
    if differ is not None:
        amount = f"{differ:,}" if elements is None else f"{differ:,} of {elements:,}"
        noun = "element" if (differ if elements is None else elements) == 1 else "elements"
        text = f"{amount} {noun} {'differs' if differ == 1 else 'differ'}"
    if bits:
        text = text or "values differ"
        text += f" in {'bit' if len(bits) == 1 else 'bits'} " + ", ".join(map(str, bits[:8]))
        text += ", …" if len(bits) > 8 else ""
    return text


def _by_number(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
