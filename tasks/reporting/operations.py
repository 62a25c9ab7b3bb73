"""The report's sections about what a campaign ran on: who sampled how fast, and what trained it."""

from collections.abc import Sequence
from html import escape

from tasks.artifacts.manifest import Manifest
from tasks.reporting import charts
from tasks.reporting.collect import CampaignRecord

MAX_WORKERS = 100


def generation_section(record: CampaignRecord) -> str:
    """Throughput of each worker over all iterations, and what was left unsampled or came late."""
    totals: dict[str, list[float]] = {}
    for batch in record.batches:
        for worker, share in batch.workers.items():
            sums = totals.setdefault(worker, [0, 0, 0, 0.0])
            for place, value in enumerate((1, share.samples, share.tokens, share.seconds)):
                sums[place] += value
    if not totals:
        return ""
    ranked = sorted(totals.items(), key=lambda pair: (-pair[1][2], pair[0]))
    rows = [
        (
            escape(worker),
            f"{iterations:,.0f}",
            f"{samples:,.0f}",
            f"{tokens:,.0f}",
            f"{seconds:,.1f}",
            _rate(tokens, seconds),
        )
        for worker, (iterations, samples, tokens, seconds) in ranked[:MAX_WORKERS]
    ]
    head = ("worker", "iterations", "samples", "tokens", "seconds sampling", "tokens/s")
    unsampled = sum(entry.unsampled for entry in record.ledger.iterations)
    late = sum(batch.late for batch in record.batches)
    more = f" The {MAX_WORKERS} with most tokens of {len(ranked)}." if len(ranked) > MAX_WORKERS else ""
    text = (
        f"What each worker published. {unsampled:,} offered samples were never finished, since the quota "
        "was met "
        f"first; {late:,} came after that and were discarded.{more}"
    )
    table = charts.table(head, rows, text_columns=(0,))
    return f'<section><h2>Generation</h2><p class="note">{text}</p>{table}</section>'


def means_section(manifests: Sequence[Manifest]) -> str:
    """Dispatcher, kernels and libraries, as the ranks said them, with the versions that each made."""
    versions: dict[tuple[str, str], list[int]] = {}
    for manifest in manifests:
        for name, text in manifest.means.items():
            versions.setdefault((name, text), []).append(manifest.version)
    if not versions:
        return ""
    rows = [
        (escape(name), escape(text), f"{min(made)} to {max(made)}" if len(made) > 1 else f"{made[0]}")
        for (name, text), made in sorted(versions.items(), key=lambda pair: (pair[0][0], pair[1]))
    ]
    table = charts.table(("", "what trained", "versions"), rows, text_columns=(0, 1))
    return f"<section><h2>Dispatcher, kernels, libraries</h2>{table}</section>"


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds else ""
