"""Charts and style of a report: pure functions from numbers to inline SVG and HTML, and one chart as a PNG.

Hand-laid SVG and not matplotlib's: colours are CSS variables, so one chart reads in light and dark; points
carry tooltips without a script; and a report needs no plotting library. Only ``line_chart_png`` imports it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

# Okabe and Ito's colour-blind-safe hues, darkened or lightened until they read on the paper of their scheme.
LIGHT = {"blue": "#0072b2", "orange": "#d55e00", "green": "#00805e", "grey": "#77808b"}
DARK = {"blue": "#56b4e9", "orange": "#f0935a", "green": "#35c9a2", "grey": "#929ca8"}
MAX_POINTS = 300
"""Points drawn of one line; more would weigh more than they show."""
MAX_MARKERS = 64

STAGES = {
    "start_up": ("#d55e00", "#fff"),
    "load_engine": ("#e69f00", "#111"),
    "load": ("#f0e442", "#111"),
    "demonstrations": ("#8c6d46", "#fff"),
    "generate": ("#0072b2", "#fff"),
    "score": ("#56b4e9", "#111"),
    "assemble": ("#9aa0a6", "#111"),
    "train": ("#009e73", "#fff"),
    "upload": ("#cc79a7", "#111"),
    "publish": ("#6b4c9a", "#fff"),
}
"""Stage -> colour of its bar and of text on it. Start-up comes first: what stands left can be compared."""
OTHER_STAGE = ("#6b7280", "#fff")

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
    """An SVG of lines over a grid; ``limit`` is a dashed rule, ``is_labelled`` names the lines at their end.

    Values that are not finite are gaps, for a line cannot go there; whoever calls says so in words.
    """
    shown = [points for line in lines if (points := finite(line.points))]
    if not shown:
        return '<p class="none">no value recorded</p>'
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for points in shown for _, y in points]
    plot = Plot(
        width=width,
        height=height,
        margins=(44, 208 if is_labelled else 12, 10, 44 if x_title else 24),
        x_range=(min(xs), max(max(xs), min(xs) + 1)),
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
        axes.plot(
            xs,
            ys,
            color=color,
            lw=line.width,
            ls=style,
            marker="o" if line.has_markers else "",
            ms=7,
            clip_on=False,
        )
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
            f'<path class="leader" style="stroke:{color}" '
            f'd="M{plot.x(x) + 6:.1f} {plot.y(y):.1f}L{edge + 14} {at:.1f}"/>'
            f'<text x="{edge + 18}" y="{at + 4.5:.1f}" style="fill:{color}">{escape(line.label)} '
            f'<tspan class="value">{number(y)}</tspan></text>'
        )
    return "".join(parts)


def stage_seconds(readings: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums by stage in the order of ``STAGES``, then stages that it does not know.

    Negative readings count as none: start-up is measured between the clocks of two machines.
    """
    found: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    for reading in readings:
        for stage, seconds in reading.items():
            found[stage] = found.get(stage, 0.0) + max(seconds, 0.0)
    return {stage: seconds for stage, seconds in found.items() if seconds > 0}


def shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {stage: value / total for stage, value in seconds.items()}


def stacked_bar(name: str, seconds: dict[str, float], *, scale: float, is_total: bool = False) -> str:
    """One row: name, stages side by side, their sum. ``scale`` seconds fill the width."""
    total = sum(seconds.values())
    parts = []
    for stage, value in seconds.items():
        color, ink = STAGES.get(stage, OTHER_STAGE)
        tip = f"{escape(stage, quote=True)} {value:,.2f} s, {value / total:.1%}"
        text = f"{escape(stage)} {value / total:.0%}" if is_total and value / total > 0.12 else ""
        style = f"width:{100 * value / scale:.2f}%;background:{color};color:{ink}"
        parts.append(f'<i style="{style}" title="{tip}">{text}</i>')
    kind = "bar total" if is_total else "bar"
    return (
        f'<span class="label">{escape(name)}</span><span class="{kind}">{"".join(parts)}</span>'
        f'<span class="sum">{total:,.1f} s</span>'
    )


def swatch(stage: str) -> str:
    color, _ = STAGES.get(stage, OTHER_STAGE)
    return f'<i class="swatch" style="background:{color}"></i>{escape(stage)}'


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    text_columns: Sequence[int],
    has_total: bool = False,
) -> str:
    """Cells are HTML. Numbers stand right, the named columns left; a total is the last row."""

    def cells(tag: str, values: Sequence[object]) -> str:
        sides = ["l" if i in text_columns else "r" for i in range(len(values))]
        return "".join(
            f'<{tag} class="{side}">{value}</{tag}>' for side, value in zip(sides, values, strict=True)
        )

    body = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    if has_total:
        body[-1] = body[-1].replace("<tr>", '<tr class="total">', 1)
    return (
        f'<div class="scroll"><table class="grid"><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def css() -> str:
    """The page's style. Scoped to ``.report``; the body is touched only if the report is all it holds."""
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    return _CSS.replace("/*light*/", light).replace("/*dark*/", dark)


_CSS = """
.report{--ink:#1c2128;--soft:#59636e;--rule:#dde1e6;--paper:#fff;--panel:#f6f7f9;--bad:#b3261e;/*light*/
color-scheme:light dark;background:var(--paper);color:var(--ink);box-sizing:border-box;max-width:1120px;
margin:0 auto;padding:40px;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;
font-variant-numeric:tabular-nums;text-align:left}
@media(prefers-color-scheme:dark){.report{
--ink:#e4e8ec;--soft:#98a2ad;--rule:#2c323a;--paper:#13161a;--panel:#1b1f25;--bad:#ff8a80;/*dark*/}body:has(>.report){background:#13161a}}
body:has(>.report){margin:0}
.report *{box-sizing:border-box}
.report h1,.report h2,.report h3,.report p,.report dl,.report dd,.report figure{margin:0}
.report h1{font-size:28px;font-weight:650;letter-spacing:-.01em;line-height:1.2}
.report .version{color:var(--soft);font-weight:400;margin-left:6px}
.report h2{font-size:19px;font-weight:650;letter-spacing:-.005em}
.report h3{font-size:14px;font-weight:600;margin-bottom:8px}
.report section{margin-top:44px;padding-top:20px;border-top:1px solid var(--rule)}
.report .facts,.report .note,.report .none{color:var(--soft);font-size:14px}
.report .facts{margin-top:4px}
.report .note{max-width:820px;margin:2px 0 16px}
.report .note b{color:var(--ink);font-weight:600}
.report code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.report .tiles{display:grid;grid-template-columns:1.7fr 1.7fr repeat(3,1fr);gap:1px;margin-top:24px;
background:var(--rule);border:1px solid var(--rule);border-radius:6px;overflow:hidden}
.report .tile{background:var(--paper);padding:14px 16px}
.report dt{color:var(--soft);font-size:13px}
.report dd{font-size:24px;line-height:1.35;white-space:nowrap}
.report dd b{font-weight:650;color:var(--blue)}
.report .from{color:var(--soft)}
.report .verdict{margin-top:16px;padding:10px 16px;background:var(--panel);border-left:3px solid var(--blue);
font-size:14px;color:var(--soft);border-radius:0 4px 4px 0}
.report .verdict strong{color:var(--ink);font-weight:600;margin-right:4px}
.report .verdict.bad{border-color:var(--bad);color:var(--ink)}
.report .verdict.bad strong{color:var(--bad)}
.report .verdict ul{margin:4px 0 0;padding-left:18px;list-style:disc}
.report svg{display:block;width:100%;height:auto;overflow:visible;font-family:inherit}
.report svg path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.report svg .grid{stroke:var(--rule)}
.report svg .limit{stroke:var(--bad);stroke-dasharray:3 3}
.report svg .leader{stroke-width:1;opacity:.45}
.report svg text{font-size:13px}.report svg .tick{fill:var(--soft);font-size:12px}
.report svg .end{text-anchor:end}.report svg .mid{text-anchor:middle}
.report svg .value{font-weight:650}
.report .panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(280px,1fr));gap:28px 32px}
.report figcaption{display:grid;grid-template-columns:1fr auto;font-size:14px;margin-bottom:6px}
.report figcaption b{font-weight:600}
.report figcaption span{font-weight:600;color:var(--blue)}
.report figcaption small{grid-column:1/-1;color:var(--soft);font-size:13px}
.report .time{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:40px;align-items:start}
.report .bars{display:grid;grid-template-columns:auto 1fr auto;gap:4px 10px;align-items:center;font-size:13px}
.report .label,.report .sum{color:var(--soft);text-align:right;white-space:nowrap}
.report .bar{display:flex;gap:1px;height:13px;-webkit-print-color-adjust:exact;print-color-adjust:exact}
.report .bar.total{height:28px;margin-bottom:8px}
.report .bar i{font-style:normal;font-size:12px;line-height:28px;padding:0;overflow:hidden;white-space:nowrap;
text-align:center;min-width:0}
.report .swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:8px}
.report .scroll{overflow-x:auto}
.report table{border-collapse:collapse;font-size:13px}
.report table.grid{min-width:100%}
.report .time table.grid{min-width:0}
.report table.grid code{font-size:12px}
.report th{color:var(--soft);font-weight:500;border-bottom:1px solid var(--rule)}
.report th,.report td{padding:4px 0 4px 16px;white-space:nowrap;vertical-align:top}
.report th:first-child,.report td:first-child{padding-left:0}
.report .l{text-align:left}.report .r{text-align:right}
.report .total td{border-top:1px solid var(--rule);font-weight:600}
.report .rollouts{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:24px 32px}
.report article{background:var(--panel);border-radius:6px;padding:12px 16px;margin-bottom:12px}
.report article .facts{font-size:13px;margin:0 0 6px}
.report article code{white-space:pre-wrap;overflow-wrap:anywhere}
.report .prompt code{font-weight:600}
.report article td{padding:1px 14px 1px 0;white-space:normal;color:var(--soft)}
.report article td code{color:var(--ink)}
.report td.up,.report td.down{text-align:right;color:var(--blue)}.report td.down{color:var(--orange)}
@media(max-width:760px){.report{padding:20px}.report .tiles{grid-template-columns:1fr 1fr}
.report .tile:last-child{grid-column:1/-1}
.report .time,.report .rollouts{grid-template-columns:minmax(0,1fr)}}
"""
