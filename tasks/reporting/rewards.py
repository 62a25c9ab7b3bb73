"""The report's sections about rewards: what they were made of, and which stage waited for which."""

from collections.abc import Sequence
from html import escape

from tasks.artifacts.manifest import Manifest
from tasks.reporting import charts
from tasks.reporting.charts import Line

COLORS = ("blue", "orange", "green", "grey")


def parts_section(iterations: Sequence[Manifest]) -> str:
    """A line a part, on its own scale."""
    names = sorted({key for m in iterations for key in m.metrics if key.startswith("part/")})
    figures = []
    for index, name in enumerate(names):
        points = [(float(m.iteration - 1), m.metrics[name]) for m in iterations if name in m.metrics]
        line = Line(label=name, points=points, color=COLORS[index % len(COLORS)])
        title = name.removeprefix("part/").replace("_", " ")
        chart = charts.line_chart([line], title=title, width=500, height=200)
        lost = sum(m.metrics.get(f"part_failure/{title.replace(' ', '_')}", 0.0) for m in iterations)
        figures.append(
            f"<figure><figcaption><b>{escape(title)}</b><span>{charts.number(points[-1][1])}</span>"
            f"<small>{lost:.0f} failures</small></figcaption>{chart}</figure>"
        )
    if len(figures) < 2:
        return ""
    text = "Mean value of each scorer by iteration, as it came; a part of weight 0 is only measured."
    panels = f'<div class="panels">{"".join(figures)}</div>'
    return f'<section><h2>Reward parts</h2><p class="note">{text}</p>{panels}</section>'


def truth_section(iterations: Sequence[Manifest]) -> str:
    """The reward beside the truth it stands for, and the gap between them; empty if no other part rewards."""
    seen = [m for m in iterations if "truth/gap" in m.metrics]
    if not seen:
        return ""
    lines = [
        Line(label=label, color=color, points=[(float(m.iteration - 1), m.metrics[key]) for m in seen])
        for label, key, color in (
            ("reward", "reward", "orange"),
            ("truth", "truth/value", "blue"),
            ("gap", "truth/gap", "grey"),
        )
    ]
    chart = charts.line_chart(
        lines, title="reward, truth and gap", width=1040, height=240, x_title="iteration", is_labelled=True
    )
    first, last = seen[0].metrics, seen[-1].metrics
    said = [m.metrics["truth/correlation"] for m in seen if "truth/correlation" in m.metrics]
    text = (
        f"The verifier's word went from {charts.number(first['truth/value'])} to "
        f"{charts.number(last['truth/value'])}, the gap (reward less truth) from "
        f"{charts.number(first['truth/gap'])} to {charts.number(last['truth/gap'])}"
    )
    if said:
        ends = f"{charts.number(said[0])} to {charts.number(said[-1])}"
        text += f"; within an iteration's samples the two correlate by {ends}"
    return f'<section><h2>Reward and truth</h2><p class="note">{text}.</p>{chart}</section>'


def idle_section(iterations: Sequence[Manifest]) -> str:
    """Seconds that stages worked and waited, summed over iterations and workers."""
    rows = []
    for stage in ("generate", "score"):
        busy, idle = (
            sum(m.waiting.get(f"{kind}/{stage}", 0.0) for m in iterations) for kind in ("busy", "idle")
        )
        if busy + idle > 0:
            rows.append((stage, f"{busy:,.1f}", f"{idle:,.1f}", f"{idle / (busy + idle):.1%}"))
    if not rows:
        return ""
    newest, busy = iterations[-1], iterations[-1].waiting.get("busy/score", 0.0)
    rate = newest.metrics.get("generated_tokens", 0.0) / busy if busy else 0.0
    text = f" Scoring: {rate:,.0f} tokens/s in the newest iteration." if rate else ""
    table = charts.table(
        ("stage", "seconds at work", "seconds waiting", "share waiting"), rows, text_columns=(0,)
    )
    return f'<section><h2>Who waited</h2><p class="note">Sums over workers.{text}</p>{table}</section>'
