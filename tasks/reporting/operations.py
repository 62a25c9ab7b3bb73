"""The report's section about generation: who sampled how fast, and what became of it."""

from html import escape

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


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds else ""
