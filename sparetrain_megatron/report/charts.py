"""Charts as SVG in plain text: nothing to load, nothing to run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 40
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#6b7280")

Points = Sequence[tuple[float, float]]


def line_chart(
    series: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    percent: bool = False,
    marks: Sequence[float] = (),
    height: int = 260,
) -> str:
    """Lines over a common axis.

    Args:
        series: Name to points, in order of x.
        x_label, y_label: What the axes show.
        percent: Whether y is a share, 0 to 1.
        marks: Values of x at which a vertical line stands.
        height: In pixels.
    """
    xs = [x for points in series.values() for x, _ in points] + list(marks)
    ys = [y for points in series.values() for _, y in points]
    low_x, high_x = min(xs), max(xs)
    high_y = _round_up(max(ys))
    plot_width, plot_height = WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return _LEFT + across * plot_width, _TOP + (1 - y / high_y) * plot_height

    parts = []
    for i in range(5):
        value = high_y * i / 4
        _, y = place(low_x, value)
        label = f"{value:.1%}".replace("%", " %") if percent else f"{value:.3g}"
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" {_at(y, "y1", "y2")}/>'
        )
        parts.append(_text(_LEFT - 8, y + 4, label, "end"))
    for value in dict.fromkeys((low_x, (low_x + high_x) // 2, high_x)):
        x, _ = place(value, 0)
        parts.append(_text(x, height - _BOTTOM + 18, f"{value:,.0f}", "middle"))
    parts.append(_text(_LEFT + plot_width / 2, height - 6, x_label, "middle"))
    middle = _TOP + plot_height / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.0f})">{escape(y_label)}</text>'
    )
    for mark in marks:
        x, _ = place(mark, 0)
        parts.append(
            f'<line class="mark" {_at(x, "x1", "x2")} y1="{_TOP}" y2="{height - _BOTTOM}">'
            f"<title>iteration {mark:,.0f}</title></line>"
        )
    for color, (name, points) in zip(COLORS, series.items()):
        drawn = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        if len(drawn) <= 200:
            for (x, y), (at, value) in zip(drawn, points):
                shown = f"{value:.2%}".replace("%", " %") if percent else f"{value:.4g}"
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
                    f"<title>{escape(name)}, {at:,.0f}: {shown}</title></circle>"
                )
    return _svg(height, parts) + legend(dict(zip(series, COLORS)))


def stacked_bars(rows: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each row, divided by class; a class has the same colour in all of them."""
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    longest = max(totals.values())
    names = sorted({name for parts in rows.values() for name in parts})
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    left, line = 150, 34
    parts = []
    for row, (name, classes) in enumerate(rows.items()):
        y, x = row * line + 6, float(left)
        parts.append(_text(left - 10, y + 16, name, "end"))
        for kind, number in sorted(classes.items(), key=lambda item: -item[1]):
            width = number / longest * (WIDTH - left - 130) if longest else 0.0
            parts.append(_box(x, y, width, 22, colors[kind], f"{name}, {kind}: {number:,.0f}"))
            x += width
        parts.append(_text(x + 8, y + 16, f"{totals[name]:,.0f}", "start"))
    return _svg(len(rows) * line + 10, parts) + legend(colors)


Span = tuple[float, float, str, str]
"""Start, end, kind and what a tooltip says."""


def gantt(rows: Mapping[str, Sequence[Span]], colors: Mapping[str, str], unit: str) -> str:
    """A row of spans for each name, over a common time."""
    end = max((span[1] for spans in rows.values() for span in spans), default=0.0) or 1.0
    left, line = 110, 40
    scale = (WIDTH - left - _RIGHT) / end
    height = len(rows) * line + 34
    parts = []
    for row, (name, spans) in enumerate(rows.items()):
        y = row * line + 6
        parts.append(_text(left - 10, y + 19, name, "end"))
        for start, stop, kind, tip in spans:
            parts.append(
                _box(left + start * scale, y, (stop - start) * scale, 28, colors[kind], tip)
            )
    for i in range(6):
        value = end * i / 5
        anchor = "end" if i == 5 else "middle"
        parts.append(_text(left + value * scale, height - 10, f"{value:.4g} {unit}", anchor))
    return _svg(height, parts) + legend({kind: colors[kind] for kind in _kinds(rows, colors)})


def heat_table(
    rows: Sequence[str], columns: Sequence[str], counts: Mapping[tuple[str, str], int]
) -> str:
    """A table of counts, darker where there are more."""
    most = max(counts.values(), default=1)
    lines = ["<table><thead><tr><th></th>"]
    lines += [f"<th>{escape(column)}</th>" for column in columns]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        lines.append(f"<tr><th>{escape(row)}</th>")
        for column in columns:
            number = counts.get((row, column), 0)
            strength = 0.15 + 0.6 * number / most if number else 0.0
            style = f' style="background: rgba(220,38,38,{strength:.2f})"'
            lines.append(f'<td class="number"{style}>{number or ""}</td>')
        lines.append("</tr>")
    lines.append("</tbody></table>")
    return "".join(lines)


def legend(colors: Mapping[str, str]) -> str:
    """Names beside their colours."""
    items = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for name, color in colors.items()
    )
    return f'<p class="legend">{items}</p>'


def _kinds(rows: Mapping[str, Sequence[Span]], colors: Mapping[str, str]) -> list[str]:
    found = {span[2] for spans in rows.values() for span in spans}
    return [kind for kind in colors if kind in found]


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, color: str, tip: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.2):.2f}" height="{height:.0f}" '
        f'fill="{color}"><title>{escape(tip)}</title></rect>'
    )


def _at(value: float, *names: str) -> str:
    return " ".join(f'{name}="{value:.1f}"' for name in names)


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * 0.9999)
