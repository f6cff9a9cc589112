"""Plots as inline SVG: no script, no file beside the page. Colours are CSS variables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from octavo.bench.svg_axis import Axis

COLORS = ("var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)")


@dataclass(frozen=True)
class Series:
    """A line: name, points (x, y), and whether y holds its value until the next x (counters, gauges)."""

    name: str
    points: Sequence[tuple[float, float]]
    is_step: bool = False
    color: str = COLORS[0]


def stacked_bars(bars: Sequence[tuple[str, dict[str, float]]], unit: str, width: int = 680) -> str:
    """Horizontal bars, each a stack of named parts; parts of the same name have the same colour in every bar."""
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    left, right, height, gap = 90, 90, 30, 14
    most = max(sum(parts.values()) for _, parts in bars)
    scale = (width - left - right) / most
    body, y = [], 6
    for label, parts in bars:
        body.append(_text(left - 8, y + height / 2 + 4, label, "end"))
        x = float(left)
        for name, value in parts.items():
            shape = f'x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{height}" fill="{color[name]}"'
            body.append(f"<rect {shape}><title>{escape(name)}: {value:,.1f} {unit}</title></rect>")
            if value * scale > 44:
                body.append(_text(x + value * scale / 2, y + height / 2 + 4, f"{value:,.1f}", "middle", "inbar"))
            x += value * scale
        body.append(_text(x + 8, y + height / 2 + 4, f"{sum(parts.values()):,.1f} {unit}", "start", "strong"))
        y += height + gap
    legend = _legend([(name, color[name]) for name in names], left, y + 8, width)
    return _svg(width, y + 8 + 22 * legend[1], "".join(body) + legend[0])


def line_plot(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    limit: tuple[str, float] | None = None,
    width: int = 440,
    height: int = 220,
    log_x: bool = False,
) -> str:
    """Lines over shared axes; `limit` draws a named vertical line at an x."""
    xs = [x for s in series for x, _ in s.points] + ([limit[1]] if limit else [])
    ys = [y for s in series for _, y in s.points]
    left, right, top, bottom = 52, 14, 12, 40
    x_low = max(min(xs), 1e-3) if log_x else 0.0
    x_axis = Axis(x_low, max(xs) * (1.1 if limit or log_x else 1), left, width - right, log_x)
    y_axis = Axis(0.0, max(ys) or 1.0, height - bottom, top, False)
    body = [_grid(x_axis, y_axis, left, width - right, height - bottom)]
    for s in series:
        body.append(f'<path d="{_path(s, x_axis, y_axis)}" fill="none" stroke="{s.color}" stroke-width="2"/>')
    if limit:
        x = x_axis.place(limit[1])
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" class="limit"/>')
        anchor = "end" if x > width / 2 else "start"
        body.append(_text(x + (-5 if anchor == "end" else 5), height - bottom - 6, limit[0], anchor, "limit-text"))
    body.append(_text((left + width - right) / 2, height - 6, x_label, "middle", "axis"))
    body.append(f'<g transform="rotate(-90 12 {height / 2})">{_text(12, height / 2, y_label, "middle", "axis")}</g>')
    legend, rows = _legend([(s.name, s.color) for s in series], left, height + 8, width) if len(series) > 1 else ("", 0)
    return _svg(width, height + 22 * rows, "".join(body) + legend)


def interval_plot(rows: Sequence[tuple[str, float, float, float]], x_label: str, width: int = 440) -> str:
    """A point with its interval a row: (label, value, low, high)."""
    left, right, step = 110, 60, 38
    low, high = min(r[2] for r in rows), max(r[3] for r in rows)
    pad = 0.15 * (high - low or 1)
    axis = Axis(low - pad, high + pad, left, width - right, False)
    body = []
    for i, (label, value, start, end) in enumerate(rows):
        y, color = 24 + i * step, COLORS[i % len(COLORS)]
        body.append(_text(left - 8, y + 4, label, "end"))
        ends = f'x1="{axis.place(start):.1f}" x2="{axis.place(end):.1f}" y1="{y}" y2="{y}"'
        body.append(f'<line {ends} stroke="{color}" stroke-width="3"/>')
        body.append(f'<circle cx="{axis.place(value):.1f}" cy="{y}" r="5" fill="{color}"/>')
        body.append(_text(axis.place(end) + 8, y + 4, f"{value:.2f}", "start", "strong"))
    height = 24 + len(rows) * step
    for tick in axis.ticks(5):
        body.append(_text(axis.place(tick), height + 6, _number(tick), "middle", "tick"))
    body.append(_text((left + width - right) / 2, height + 24, x_label, "middle", "axis"))
    return _svg(width, height + 32, "".join(body))


def _path(s: Series, x_axis: Axis, y_axis: Axis) -> str:
    words, previous = [], None
    for x, y in s.points:
        if previous is None:
            words.append(f"M{x_axis.place(x):.1f} {y_axis.place(y):.1f}")
        else:
            if s.is_step:
                words.append(f"L{x_axis.place(x):.1f} {y_axis.place(previous):.1f}")
            words.append(f"L{x_axis.place(x):.1f} {y_axis.place(y):.1f}")
        previous = y
    return "".join(words)


def _grid(x_axis: Axis, y_axis: Axis, left: float, right: float, bottom: float) -> str:
    parts = []
    for tick in y_axis.ticks(4):
        y = y_axis.place(tick)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 6, y + 4, _number(tick), "end", "tick"))
    ticks = x_axis.ticks(6)
    for tick in ticks:
        parts.append(_text(x_axis.place(tick), bottom + 15, _number(tick), "middle", "tick"))
    parts.append(f'<line x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}" class="base"/>')
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]], left: float, y: float, width: float) -> tuple[str, int]:
    """The legend and how many lines it takes."""
    parts, x, rows = [], float(left), 1
    for name, color in entries:
        need = 36 + 7.0 * len(name)
        if x + need > width and x > left:
            x, rows = float(left), rows + 1
        line = y + 22 * (rows - 1)
        parts.append(f'<rect x="{x:.1f}" y="{line:.1f}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(_text(x + 17, line + 10, name, "start", "legend"))
        x += need
    return "".join(parts), rows


def _number(value: float) -> str:
    if value and abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _text(x: float, y: float, text: str, anchor: str, css: str = "label") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _svg(width: float, height: float, body: str) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">{body}</svg>'
