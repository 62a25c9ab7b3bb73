"""The end of a run: ledger asserted, report written, where everything is."""

from flytekit import Deck, task

from tasks import placement
from tasks.records import CampaignRun, CampaignState, CampaignSummary
from tasks.say import say
from tasks.session import is_local_store, run_store, store_folder


@task(enable_deck=True, **placement.CPU.task_arguments())
def report(run: CampaignRun, state: CampaignState) -> CampaignSummary:
    """Check the ledger, write metrics and report to the store (and into its folder), say where they are."""
    from tasks.reporting.collect import collect
    from tasks.reporting.page import html_page

    store = run_store(run)
    record = collect(store, run)
    page, metrics = html_page(record, store), record.metrics_jsonl()
    Deck("Campaign", page)
    address = store.replace_object("report.html", page.encode())
    store.replace_object("metrics.jsonl", metrics.encode())
    if is_local_store(run.config):
        folder = store_folder(run.config) / run.campaign
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.html").write_text(page, encoding="utf-8")
        (folder / "metrics.jsonl").write_text(metrics, encoding="utf-8")
        address = str(folder / "report.html")
    print(f"\nledger of {run.campaign}: produced = trained + rejected + pending\n{record.ledger.format()}\n")
    record.ledger.require_balanced()
    totals, head, scores = record.ledger.totals(), record.manifests[-1], record.evaluations
    first, last = scores[0], scores[-1]
    sampled = f"{first.exact_sampled:.3f} -> {last.exact_sampled:.3f} (sampled)"
    greedy = f"{first.exact_greedy:.3f} -> {last.exact_greedy:.3f} (greedy)"
    say("summary", f"held-out exact match {sampled}, {greedy}")
    say("summary", f"version {head.version}, digest {head.tensor_digest}")
    say("summary", f"report {address}")
    return CampaignSummary(
        campaign=run.campaign,
        version=state.versions[-1],
        iterations_done=state.iterations_done,
        tensor_digest=head.tensor_digest,
        exact_sampled=scores[-1].exact_sampled,
        exact_greedy=scores[-1].exact_greedy,
        produced=totals.produced,
        trained=totals.trained,
        rejected=totals.rejected,
        pending=totals.pending,
        report=address,
    )
