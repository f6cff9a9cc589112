"""Small line charts as inline SVG; colours come from the page's CSS variables, so they follow light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from octavo.bench.svg_axis import Axis

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 62
LEGEND_ROW = 16
NUM_COLOURS = 6
NUM_TICKS = 7


@dataclass(frozen=True)
class Series:
    """A line, or points alone, with a name for the legend; points with None as y are left out. `colour` is 0..5."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    is_scatter: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Axes and what is drawn into them. `limit` is a horizontal line, `vertical` a vertical one, each with a name."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log_x: bool = False
    is_log_y: bool = False
    limit: tuple[float, str] | None = None
    vertical: tuple[float, str] | None = None

    def render(self) -> str:
        """The chart as an <svg> element; a short note when there is nothing to draw."""
        drawn = [self._clean(s) for s in self.series]
        points = [p for s in drawn for p in s.points]
        if not points:
            return f'<p class="none">{escape(self.title)}: nothing was measured.</p>'
        xs = [p[0] for p in points] + ([self.vertical[0]] if self.vertical else [])
        ys = [p[1] for p in points if p[1] is not None] + ([self.limit[0]] if self.limit else [])
        x_axis = _axis(xs, self.is_log_x, LEFT, WIDTH - RIGHT)
        y_axis = _axis(ys, self.is_log_y, HEIGHT - BOTTOM, TOP)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {self._height()}" role="img" aria-label="{escape(self.title)}">',
            *self._grid(x_axis, y_axis),
            *self._rules(x_axis, y_axis),
            *(element for s in drawn for element in _draw(s, x_axis, y_axis)),
            *self._draw_legend(),
            "</svg>",
        ]
        return "".join(parts)

    def _clean(self, series: Series) -> Series:
        points = [
            (x, y)
            for x, y in series.points
            if y is not None and (y > 0 or not self.is_log_y) and (x > 0 or not self.is_log_x)
        ]
        return Series(series.name, points, series.colour, series.is_scatter, series.is_dashed)

    def _grid(self, x_axis: Axis, y_axis: Axis) -> list[str]:
        parts: list[str] = []
        for value in y_axis.ticks(NUM_TICKS):
            y = y_axis.place(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
        for value in x_axis.ticks(NUM_TICKS):
            x = x_axis.place(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_short(value)}</text>'
            )
        middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="label" x="{middle_x}" y="{HEIGHT - BOTTOM + 31}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
            f'<text class="label" transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        return parts

    def _rules(self, x_axis: Axis, y_axis: Axis) -> list[str]:
        parts: list[str] = []
        if self.limit:
            y = y_axis.place(self.limit[0])
            parts.append(
                f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="limit-name" x="{LEFT + 4}" y="{y - 4:.1f}">{escape(self.limit[1])}</text>'
            )
        if self.vertical:
            x = x_axis.place(self.vertical[0])
            end = x > (LEFT + WIDTH) * 0.7
            parts.append(
                f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
                f'<text class="limit-name" x="{x + (-4 if end else 4):.1f}" y="{HEIGHT - BOTTOM - 6}" '
                f'text-anchor="{"end" if end else "start"}">{escape(self.vertical[1])}</text>'
            )
        return parts

    def _legend_places(self) -> list[tuple[float, int]]:
        """Where each name of the legend goes, in rows; none for a single series."""
        if len(self.series) < 2:
            return []
        places: list[tuple[float, int]] = []
        x, row = float(LEFT), 0
        for series in self.series:
            width = 32 + 6.4 * len(series.name)
            if x > LEFT and x + width > WIDTH:
                x, row = float(LEFT), row + 1
            places.append((x, row))
            x += width
        return places

    def _height(self) -> int:
        return HEIGHT + LEGEND_ROW * max((row for _, row in self._legend_places()), default=0)

    def _draw_legend(self) -> list[str]:
        parts: list[str] = []
        for series, (x, row) in zip(self.series, self._legend_places(), strict=False):
            y = HEIGHT - 8 + LEGEND_ROW * row
            dash = " dashed" if series.is_dashed else ""
            colour = f"c{series.colour % NUM_COLOURS}"
            parts.append(
                f'<line class="line {colour}{dash}" x1="{x:.0f}" x2="{x + 14:.0f}" y1="{y - 4}" y2="{y - 4}"/>'
                f'<text class="tick" x="{x + 18:.0f}" y="{y}">{escape(series.name)}</text>'
            )
        return parts


def _axis(values: Sequence[float], is_log: bool, start: float, end: float) -> Axis:
    """From zero, or around the values where it is logarithmic."""
    if is_log:
        positive = [value for value in values if value > 0]
        return Axis(min(positive) / 1.15, max(positive) * 1.15, start, end, is_log)
    top = max(values)
    return Axis(0.0, top * 1.05 if top > 0 else 1.0, start, end)


def _draw(series: Series, x_axis: Axis, y_axis: Axis) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y), x, y) for x, y in series.points if y is not None]
    colour = f"c{series.colour % NUM_COLOURS}"
    parts: list[str] = []
    if len(places) > 1 and not series.is_scatter:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
        dash = " dashed" if series.is_dashed else ""
        parts.append(f'<polyline class="line {colour}{dash}" points="{path}"/>')
    if len(places) <= 40 or series.is_scatter:
        for px, py, x, y in places:
            name = f"<title>{escape(series.name)}: {_short(x)}, {_short(y)}</title>"
            parts.append(f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="2.6">{name}</circle>')
    return parts


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
