"""A campaign as one HTML page: the Flyte Deck of its report, and the file beside its store.

Self-contained: inline style, inline SVG, no script, nothing from a network. A Deck puts the page into a
document of its own, so every rule is scoped to ``.report``. All text from a record passes ``html.escape``.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.artifacts.lineage import added_bytes
from tasks.artifacts.manifest import Manifest
from tasks.environments.alerts import ALERTS
from tasks.reporting import charts
from tasks.reporting.agreement import agreement_section
from tasks.reporting.charts import Line, Point
from tasks.reporting.collect import CampaignRecord
from tasks.reporting.difference import difference_section
from tasks.reporting.operations import generation_section, means_section
from tasks.reporting.rewards import idle_section, parts_section, truth_section
from tasks.reporting.rollouts import rollouts_body

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

MAX_CLIP_SHARE = 0.3
KL_RISE, KL_FLOOR = 2.0, 0.02
"""KL is rising if its newest third exceeds both the floor and this multiple of its oldest third."""
MAX_ROWS = 200
"""Rows of a table, newest first to be kept; ``metrics.jsonl`` holds all."""
MAX_BARS = 40

HEALTH = (
    ("kl_k3", "KL to the sampling policy (k3)", "nats per token, while training"),
    ("entropy", "Entropy", "nats per token"),
    ("clip_share", "Clip share", "tokens whose ratio was clipped"),
    ("grad_norm", "Gradient norm", "before clipping, mean of the steps"),
    ("zero_variance", "Zero-variance share", "samples of groups with equal rewards"),
    ("response_tokens", "Response tokens", "mean of a sample"),
    ("staleness", "Staleness", "versions between sampler and trainer"),
)


def html_page(record: CampaignRecord, store: "PolicyStore") -> str:
    """The whole report of a campaign."""
    title = f"{record.run.campaign}: reinforcement learning report"
    sections = [
        headline(record),
        verdict_box(record),
        reward_section(record),
        truth_section(record.iterations),
        parts_section(record.iterations),
        health_section(record.iterations),
        agreement_section(record.iterations),
        time_section(record.manifests),
        idle_section(record.iterations),
        generation_section(record),
        means_section(record.manifests),
        rollouts_section(record, store),
        ledger_section(record),
        lineage_section(record.manifests),
        difference_section(record.differences),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"></head><body>'
        f'<style>{charts.css()}</style><main class="report">{"".join(sections)}</main></body></html>'
    )


def reward_curve_png(record: CampaignRecord, path: Path) -> None:
    """The reward curve as an image of 1200 pixels' width."""
    title = f"{record.run.campaign}: reward and held-out exact match"
    charts.line_chart_png(reward_lines(record), path, title=title, x_title=REWARD_X, y_range=(0.0, 1.0))


# Sections, in the order of the page


def headline(record: CampaignRecord) -> str:
    """What came out of it: held-out score before and after, and what that took."""
    config, scores = record.run.config, record.evaluations
    tiles = []
    for name, values in (
        ("Held-out exact match, sampled", [e.exact_sampled for e in scores]),
        ("Held-out exact match, greedy", [e.exact_greedy for e in scores]),
    ):
        change = f'<span class="from">{values[0]:.3f} &rarr;</span> <b>{values[-1]:.3f}</b>' if values else ""
        tiles.append((name, change or "not evaluated"))
    tiles += [
        ("Iterations", f"{len(record.iterations):,}"),
        ("Samples trained", f"{record.ledger.totals().trained:,}"),
        ("Wall time", f"{wall_seconds(record.manifests):,.0f} s"),
    ]
    cells = "".join(f'<div class="tile"><dt>{name}</dt><dd>{text}</dd></div>' for name, text in tiles)
    version = f"version {record.manifests[-1].version}" if record.manifests else "no version published"
    model = Path(config.model.folder).name if config.model.folder else config.model.random.family
    prompts, size = config.rollout.prompts_per_iteration, config.rollout.group_size
    facts = [
        escape(config.environment.name), escape(model), config.train.mesh,
        f"{prompts:,} prompts &times; {size} samples an iteration",
    ]  # fmt: skip
    if scores:
        versions = f"versions {scores[0].version} and {scores[-1].version}"
        facts.append(f"{scores[-1].num_prompts} held-out prompts, {versions}")
    return (
        f'<header><h1>{escape(record.run.campaign)} <span class="version">{version}</span></h1>'
        f'<p class="facts">{" &middot; ".join(facts)}</p></header><dl class="tiles">{cells}</dl>'
    )


def problems(record: CampaignRecord) -> list[str]:
    """What speaks against trusting the result, in words; empty for a healthy campaign."""
    iterations, found = record.iterations, []
    for entry in record.ledger.iterations:
        if missing := entry.balance():
            found.append(f"Ledger of iteration {entry.iteration} is off by {missing} samples.")
    clipped = [share for _, share in _metric(iterations, "clip_share") if share > MAX_CLIP_SHARE]
    if clipped:
        found.append(
            f"Clip share above {MAX_CLIP_SHARE:g} in {len(clipped)} of {len(iterations)} iterations, up to "
            f"{max(clipped):.2f}: steps are too large for their batch."
        )
    if is_rising([kl for _, kl in _metric(iterations, "kl_k3")], factor=KL_RISE, floor=KL_FLOOR):
        found.append(f"KL to the sampling policy is rising: newest third above {KL_RISE:g} times the oldest.")
    if skipped := sum(manifest.metrics.get("skipped_steps", 0.0) for manifest in record.manifests):
        found.append(f"{skipped:.0f} optimizer steps skipped: their gradients were not finite.")
    rewards = [reward for _, reward in _metric(iterations, "reward")]
    if len(rewards) > 1 and max(rewards) - min(rewards) < 1e-9:
        found.append(f"The training reward is {rewards[0]:.3f} in every iteration: rewards do not differ.")
    for name, text in ALERTS.items():
        if raised := [x for x, _ in _metric(iterations, name)]:
            found.append(f"Iterations {', '.join(f'{x:.0f}' for x in raised[:5])}: {text}.")
    if failures := sum(failed for _, failed in _metric(iterations, "failures")):
        found.append(f"{failures:.0f} samples could not be scored.")
    broken = {name for m in record.manifests for name, value in m.metrics.items() if not math.isfinite(value)}
    if broken:
        found.append(f"Not finite in some version: {', '.join(sorted(broken))}. Charts show gaps there.")
    scores = record.evaluations
    if len(scores) > 1 and scores[-1].exact_sampled < scores[0].exact_sampled:
        before, after = scores[0].exact_sampled, scores[-1].exact_sampled
        found.append(f"Held-out exact match (sampled) fell from {before:.3f} to {after:.3f}.")
    return found


def is_rising(values: Sequence[float], *, factor: float, floor: float) -> bool:
    """Whether the newest third's mean is above the floor and above ``factor`` times the oldest third's."""
    third = len(values) // 3
    if third < 2:
        return False
    oldest, newest = sum(values[:third]) / third, sum(values[-third:]) / third
    return newest > max(floor, factor * oldest)


def verdict_box(record: CampaignRecord) -> str:
    control = record.run.config.reward.control
    note = ""
    if control != "none":
        note = f"<p>Control experiment: rewards are {escape(control)}, so the task must not be learned.</p>"
    if found := problems(record):
        items = "".join(f"<li>{escape(problem)}</li>" for problem in found)
        return f'<div class="verdict bad"><strong>Look closer first</strong>{note}<ul>{items}</ul></div>'
    if not record.iterations:
        return f'<div class="verdict">{note}No iteration is published yet: nothing to judge.</div>'
    return (
        f'<div class="verdict"><strong>Healthy</strong>{note} Ledger balanced, no skipped step, '
        f"nothing unscored, clip share at most {MAX_CLIP_SHARE:g}, KL not rising, rewards differ.</div>"
    )


REWARD_X = "iteration (held-out: after that many iterations)"


def reward_lines(record: CampaignRecord) -> list[Line]:
    """Training by iteration, held-out by completed iterations: on policy, points at one x share a version."""
    iterations, scores = record.iterations, record.evaluations
    return [
        Line(label="training reward", points=_metric(iterations, "reward"), color="grey"),
        Line(label="training exact match", points=_metric(iterations, "exact_match"), color="green"),
        Line(
            label="held-out, sampled", points=[(e.iteration, e.exact_sampled) for e in scores], color="blue",
            width=3.0, has_markers=True,
        ),
        Line(
            label="held-out, greedy", points=[(e.iteration, e.exact_greedy) for e in scores], color="orange",
            dashes="6 4", has_markers=True,
        ),
    ]  # fmt: skip


def reward_section(record: CampaignRecord) -> str:
    chart = charts.line_chart(
        reward_lines(record), title="Reward and exact match by iteration", width=1040, height=360,
        y_range=(0.0, 1.0), x_title=REWARD_X, is_labelled=True,
    )  # fmt: skip
    text = "Training samples are drawn at the training temperature; held-out prompts are never trained."
    return _section("Reward", text, chart)


def health_section(iterations: list[Manifest]) -> str:
    if not iterations:
        return ""
    panels = [(title, text, _metric(iterations, key)) for key, title, text in HEALTH]
    for title, tokens, stage, text in (
        ("Generation tokens/s", "generated_tokens", "generate", "per worker, engine loaded"),
        ("Training tokens/s", "trained_tokens", "train", "trained tokens, all ranks"),
    ):
        panels.append((title, text, _rate(iterations, tokens, stage)))
    figures = []
    for title, text, points in panels:
        limit = MAX_CLIP_SHARE if title == "Clip share" else None
        line = Line(label=title, points=points)
        chart = charts.line_chart([line], title=title, width=330, height=150, limit=limit)
        newest = charts.number(points[-1][1]) if points else ""
        figures.append(
            f"<figure><figcaption><b>{escape(title)}</b><span>{newest}</span><small>{escape(text)}</small></figcaption>{chart}</figure>"
        )
    body = f'<div class="panels">{"".join(figures)}</div>'
    return _section("Health", "By iteration; the number is the newest.", body)


def wall_seconds(manifests: Sequence[Manifest]) -> float:
    """From the first version's publication to the newest's."""
    return (manifests[-1].created - manifests[0].created).total_seconds() if manifests else 0.0


def time_section(manifests: list[Manifest]) -> str:
    timed = [manifest for manifest in manifests if manifest.seconds]
    seconds = charts.stage_seconds(m.seconds for m in timed)
    shares = charts.shares(seconds)
    if not shares:
        return ""
    by_version = [charts.stage_seconds([m.seconds]) for m in timed]
    longest = max(sum(stages.values()) for stages in by_version)
    bars = [charts.stacked_bar("all", seconds, scale=sum(seconds.values()), is_total=True)]
    for manifest, stages in list(zip(timed, by_version, strict=True))[-MAX_BARS:]:
        bars.append(charts.stacked_bar(_name(manifest), stages, scale=longest))
    rows = [
        (charts.swatch(stage), f"{value:,.1f}", f"{shares[stage]:.1%}", f"{value / len(timed):,.2f}")
        for stage, value in seconds.items()
    ]
    left_out = f" Bars of the newest {MAX_BARS} versions." if len(timed) > MAX_BARS else ""
    text = (
        f"<b>{shares.get('start_up', 0.0):.1%} of the measured time is lost to start-up</b> (from a sealed "
        f"batch to a trainer that computes). Stages add up to {sum(seconds.values()):,.0f} s; "
        f"{wall_seconds(manifests):,.0f} s passed from the first version to the newest, with evaluations and "
        f"pauses. load_engine and generate are sums over workers.{left_out}"
    )
    stages = charts.table(("stage", "seconds", "share", "seconds a version"), rows, text_columns=(0,))
    body = f'<div class="time"><div class="bars">{"".join(bars)}</div>{stages}</div>'
    return _section("Where the time went", text, body)


def rollouts_section(record: CampaignRecord, store: "PolicyStore") -> str:
    if not record.iterations:
        return ""
    return _section("Sample rollouts", *rollouts_body(record.iterations[-1], store))


def ledger_section(record: CampaignRecord) -> str:
    ledger, totals = record.ledger, record.ledger.totals()
    rows = []
    for entry in ledger.iterations[-MAX_ROWS:]:
        versions = f"{entry.oldest_policy_version}-{entry.newest_policy_version}"
        counts = (entry.produced, entry.trained, entry.num_rejected, entry.pending, entry.balance())
        rows.append((entry.iteration, versions, *(f"{n:,}" for n in counts), escape(entry.reasons())))
    num_rejected = sum(totals.rejected.values())
    counts = (totals.produced, totals.trained, num_rejected, totals.pending)
    off = totals.produced - totals.trained - num_rejected - totals.pending
    rows.append(("total", "", *(f"{n:,}" for n in (*counts, off)), _reasons(totals.rejected)))
    head = ("iteration", "versions", "produced", "trained", "rejected", "pending", "unaccounted", "reasons")
    text = f"produced = trained + rejected + pending, for every sample.{_left_out(ledger.iterations)}"
    return _section("Sample ledger", text, charts.table(head, rows, text_columns=(1, 7), has_total=True))


def lineage_section(manifests: list[Manifest]) -> str:
    rows, by_version = [], {manifest.version: manifest for manifest in manifests}
    for m in manifests[-MAX_ROWS:]:
        size, parent = sum(file.size for file in m.files.values()), by_version.get(m.parent or 0)
        added = added_bytes(m, None if m.parent is None else parent)
        numbers = (
            m.version, "" if m.parent is None else m.parent, m.iteration, len(m.files), f"{size:,}",
            f"{added:,}",
        )  # fmt: skip
        batch = _code(m.batch, shown=Path(m.batch).stem[:13])
        rows.append((
            *numbers, m.kind.replace("_", " "), _code(m.tensor_digest), _code(m.config_digest),
            _code(m.code_revision, shown=m.code_revision[:20]), batch, f"{m.created:%Y-%m-%d %H:%M:%S}",
        ))  # fmt: skip
    head = "version, parent, iterations, files, bytes, added, kind, tensors, config, code, batch, UTC"
    text = "Each version names what it was made from; digests are cut, whole on hover." + _left_out(manifests)
    return _section("Lineage", text, charts.table(head.split(", "), rows, text_columns=range(6, 12)))


# Below: pieces of the sections


def _name(manifest: Manifest) -> str:
    return str(manifest.iteration - 1) if manifest.kind == "iteration" else manifest.kind.replace("_", " ")


def _metric(iterations: Iterable[Manifest], name: str) -> list[Point]:
    return [(float(m.iteration - 1), m.metrics[name]) for m in iterations if name in m.metrics]


def _rate(iterations: Iterable[Manifest], tokens: str, stage: str) -> list[Point]:
    return [
        (float(m.iteration - 1), m.metrics[tokens] / m.seconds[stage])
        for m in iterations
        if tokens in m.metrics and m.seconds.get(stage, 0.0) > 0
    ]


def _code(text: str, *, shown: str = "") -> str:
    return f'<code title="{escape(text, quote=True)}">{escape(shown or text[:12])}</code>'


def _reasons(rejected: dict[str, int]) -> str:
    return escape(", ".join(f"{reason}: {count:,}" for reason, count in rejected.items() if count))


def _left_out(rows: Sequence[object]) -> str:
    return f" Newest {MAX_ROWS} of {len(rows)}." if len(rows) > MAX_ROWS else ""


def _section(title: str, text: str, body: str) -> str:
    """``text`` and ``body`` are HTML: what is in them is escaped where it is put in."""
    return f'<section><h2>{title}</h2><p class="note">{text}</p>{body}</section>'
