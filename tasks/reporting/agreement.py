"""The report's section about what engine and trainer agree on, what routers do, and what a critic explains.

Panels appear for what the campaign measured: the distance of the sampling policy where the trainer read the
batch before its first step, drift where routing was replayed, the critic where there is one.
"""

from collections.abc import Sequence
from html import escape

from tasks.artifacts.manifest import Manifest
from tasks.reporting import charts
from tasks.reporting.charts import Line

PANELS = (
    ("router/load_max", "Busiest expert", "tokens, as a multiple of the mean; worst layer"),
    ("router/load_min", "Idlest expert", "tokens, as a multiple of the mean; worst layer"),
    ("router/entropy", "Router entropy", "share of its maximum, mean of all tokens and layers"),
    ("router/drift", "Router drift", "the engine's choices that the trainer would not have made"),
    ("mismatch/k1", "Mismatch, k1", "nats per token, sampling policy to trainer"),
    ("mismatch/k3", "Mismatch, k3", "nats per token, sampling policy to trainer"),
    ("mismatch/p99", "Mismatch, 99th percentile", "difference of a token's log-probabilities"),
    ("mismatch/max", "Mismatch, largest", "difference of a token's log-probabilities"),
    ("mismatch/effective_share", "Effective sample size", "share of the tokens"),
    ("mismatch/changed_weight_share", "Weights changed", "tokens whose weight was cut off or set to 0"),
    ("mismatch/rejected_share", "Rejected", "tokens left out for their distance"),
    ("reference_kl", "KL to the reference policy", "nats per token, while training"),
    ("critic/explained", "Explained by the critic", "share of the returns' variance"),
    ("critic/value_loss", "Value loss", "half the squared error, mean of the tokens"),
)


def agreement_section(iterations: Sequence[Manifest]) -> str:
    figures = []
    for name, title, text in PANELS:
        points = [(float(m.iteration - 1), m.metrics[name]) for m in iterations if name in m.metrics]
        if points:
            chart = charts.line_chart([Line(label=title, points=points)], title=title, width=330, height=150)
            figures.append(
                f"<figure><figcaption><b>{escape(title)}</b><span>{charts.number(points[-1][1])}</span>"
                f"<small>{escape(text)}</small></figcaption>{chart}</figure>"
            )
    ages = _ages(iterations)
    if not figures and not ages:
        return ""
    note = "Samples by the age of the policy that sampled them, in versions: " + ages if ages else ""
    return (
        f'<section><h2>Routers and agreement</h2><p class="note">By iteration; the number is the newest. '
        f'{escape(note)}</p><div class="panels">{"".join(figures)}</div></section>'
    )


def _ages(iterations: Sequence[Manifest]) -> str:
    """Samples by age over all iterations."""
    totals: dict[int, float] = {}
    for manifest in iterations:
        for name, count in manifest.metrics.items():
            if name.startswith("age/"):
                age = int(name.removeprefix("age/"))
                totals[age] = totals.get(age, 0.0) + count
    return ", ".join(f"{count:,.0f} of age {age}" for age, count in sorted(totals.items()))
