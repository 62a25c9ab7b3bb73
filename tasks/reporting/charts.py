"""Charts of a report: pure functions from numbers to inline SVG, and one chart as a PNG.

Hand-laid SVG and not matplotlib's: colours are CSS variables, so one chart reads in light and dark; points carry
tooltips without a script; and a report needs no plotting library. Only ``line_chart_png`` imports matplotlib.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

# Okabe and Ito's colour-blind-safe hues, darkened or lightened until they read on the paper of their scheme.
LIGHT = {"blue": "#0072b2", "orange": "#d55e00", "green": "#00805e", "grey": "#77808b"}
DARK = {"blue": "#56b4e9", "orange": "#f0935a", "green": "#35c9a2", "grey": "#929ca8"}
MAX_POINTS = 300
"""Points drawn of one line; more would weigh more than they show."""
MAX_MARKERS = 64

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    label: str
    points: list[Point]
    color: str = "blue"
    """A key of ``LIGHT`` and ``DARK``."""
    width: float = 2.0
    dashes: str = ""
    has_markers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A rectangle in SVG units and the data range it shows. Margins: left, right, top, bottom."""

    width: int
    height: int
    margins: tuple[int, int, int, int]
    x_range: Point
    y_range: Point

    def x(self, value: float) -> float:
        left, right, _, _ = self.margins
        low, high = self.x_range
        return left + (value - low) / (high - low) * (self.width - left - right)

    def y(self, value: float) -> float:
        _, _, top, bottom = self.margins
        low, high = self.y_range
        return self.height - bottom - (value - low) / (high - low) * (self.height - top - bottom)


def line_chart(
    lines: Sequence[Line], *, title: str, width: int, height: int, y_range: Point | None = None,
    limit: float | None = None, x_title: str = "", is_labelled: bool = False,
) -> str:  # fmt: skip
    """An SVG of lines over a grid; ``limit`` is drawn as a dashed rule, ``is_labelled`` names lines at their end.

    Values that are not finite are gaps, for a line cannot go there; whoever calls says so in words.
    """
    shown = [points for line in lines if (points := finite(line.points))]
    if not shown:
        return '<p class="none">no value recorded</p>'
    xs = [x for points in shown for x, _ in points]
    ys = [y for points in shown for _, y in points]
    plot = Plot(
        width=width,
        height=height,
        margins=(44, 196 if is_labelled else 12, 10, 44 if x_title else 24),
        x_range=(min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1),
        y_range=y_range or _y_range(ys, limit),
    )
    parts = [_grid(plot, x_title)]
    if limit is not None and limit <= plot.y_range[1]:
        y, (left, right, _, _) = plot.y(limit), plot.margins
        parts.append(f'<line class="limit" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts += [_line(plot, line) for line in lines]
    if is_labelled:
        parts.append(_end_labels(plot, lines))
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def line_chart_png(lines: Sequence[Line], path: Path, *, title: str, x_title: str, y_range: Point) -> None:
    """The labelled chart as a PNG of 1200 pixels' width, in the light scheme."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [line for line in lines if finite(line.points)]
    gap = (y_range[1] - y_range[0]) * 0.065
    label_y = spread([finite(line.points)[-1][1] for line in shown], gap=gap, highest=y_range[1])
    for line, y in zip(shown, label_y, strict=True):
        xs, ys = zip(*finite(line.points), strict=True)
        color = LIGHT[line.color]
        style = (0, tuple(float(dash) for dash in line.dashes.split())) if line.dashes else "-"
        axes.plot(xs, ys, color=color, lw=line.width, ls=style, marker="o" if line.has_markers else "", ms=7)
        text = f"{line.label} {number(ys[-1])}"
        axes.annotate(
            text, (1.015, y), xycoords=("axes fraction", "data"), color=color, va="center", fontsize=13
        )
    axes.set_ylim(*y_range)
    axes.set_title(title, loc="left", fontsize=15, pad=12)
    axes.set_xlabel(x_title, fontsize=12, color="#59636e")
    axes.tick_params(length=0, labelsize=12, labelcolor="#59636e")
    axes.grid(axis="y", color="#dde1e6")
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path, metadata={"Software": None})  # else a new matplotlib would change the file


def finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def thin(points: list[Point], *, most: int = MAX_POINTS) -> list[Point]:
    """Evenly chosen points, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[i * (len(points) - 1) // (most - 1)] for i in range(most)]


def ticks(low: float, high: float, *, count: int) -> list[float]:
    """About ``count`` round values (1, 2 or 5 times a power of ten apart) between low and high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def spread(positions: list[float], *, gap: float, highest: float) -> list[float]:
    """The positions moved apart until they keep the gap, in the same order, none above ``highest``."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = sorted(positions)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    ceiling = highest
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - gap
    result = [0.0] * len(positions)
    for place, i in enumerate(order):
        result[i] = moved[place]
    return result


def number(value: float) -> str:
    """Three significant digits; thousands keep all of theirs."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == 0 else f"{value:.3g}"


def _y_range(ys: list[float], limit: float | None) -> Point:
    """From zero, so that a panel does not dramatise noise; up to the limit if values come near it."""
    low, high = min(0.0, *ys), max(ys)
    if limit is not None and high > limit / 2:
        high = max(high, limit)
    return (low, high + (high - low) * 0.08) if high > low else (low, low + 1.0)


def _grid(plot: Plot, x_title: str) -> str:
    left, right, _, bottom = plot.margins
    base = plot.height - bottom
    parts = []
    for value in ticks(*plot.y_range, count=5 if plot.height > 200 else 3):
        y = plot.y(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{plot.width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{left - 8}" y="{y + 4:.1f}">{_tick(value)}</text>')
    for value in ticks(*plot.x_range, count=8 if plot.width > 500 else 4):
        if value == int(value):
            parts.append(f'<text class="tick mid" x="{plot.x(value):.1f}" y="{base + 18}">{value:.0f}</text>')
    if x_title:
        parts.append(f'<text class="tick" x="{left}" y="{plot.height - 6}">{escape(x_title)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    """A label that fits the margin."""
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _line(plot: Plot, line: Line) -> str:
    """The path of each run without gaps, and markers with tooltips, or one at the end."""
    color = f"var(--{line.color})"
    points = thin(line.points)
    path, is_open = [], False
    for x, y in points:
        if math.isfinite(y):
            path.append(f"{'L' if is_open else 'M'}{plot.x(x):.1f} {plot.y(y):.1f}")
        is_open = math.isfinite(y)
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    parts = [f'<path d="{"".join(path)}" style="stroke:{color}" stroke-width="{line.width}"{dashes}/>']
    drawn = finite(points)
    for x, y in drawn if len(drawn) <= MAX_MARKERS else drawn[-1:]:
        is_seen = line.has_markers or (x, y) == drawn[-1]
        style = f"fill:{color}" if is_seen else "fill:transparent"
        tip = f"{escape(line.label)}, {x:g}: {number(y)}"
        radius = 4 if line.has_markers else 3
        parts.append(
            f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="{radius}" style="{style}">'
            f"<title>{tip}</title></circle>"
        )
    return "".join(parts)


def _end_labels(plot: Plot, lines: Sequence[Line]) -> str:
    """Each line's name and newest value to the right of it, and a leader where the label had to move."""
    named = [(line, points[-1]) for line in lines if (points := finite(line.points))]
    lowest = plot.height - plot.margins[3] + 4.0
    label_y = spread([plot.y(y) for _, (_, y) in named], gap=20.0, highest=lowest)
    edge = plot.width - plot.margins[1]
    parts = []
    for (line, (x, y)), at in zip(named, label_y, strict=True):
        color = f"var(--{line.color})"
        parts.append(
            f'<path class="leader" d="M{plot.x(x) + 6:.1f} {plot.y(y):.1f}L{edge + 14} {at:.1f}" style="stroke:{color}"/>'
            f'<text class="name" x="{edge + 18}" y="{at + 4.5:.1f}" style="fill:{color}">{escape(line.label)} '
            f'<tspan class="value">{number(y)}</tspan></text>'
        )
    return "".join(parts)


def is_rising(values: Sequence[float], *, factor: float, floor: float) -> bool:
    """Whether the newest third's mean is above the floor and above ``factor`` times the oldest third's."""
    third = len(values) // 3
    if third < 2:
        return False
    oldest, newest = sum(values[:third]) / third, sum(values[-third:]) / third
    return newest > max(floor, factor * oldest)


def largest_step(values: Sequence[float]) -> float:
    return max((abs(right - left) for left, right in pairwise(values)), default=0.0)
