"""The end of a run: ledger asserted, report written, where everything is.

    python -m tasks.report --store ./runs --campaign laptop

writes the report of a run that still works, or was stopped: of what is published so far. ``laptop.0001``
names a lineage beside which a newer one was started.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from flytekit import Deck, task

from tasks import placement
from tasks.records import CampaignRun, CampaignState, CampaignSummary
from tasks.say import say
from tasks.session import (
    campaign_at,
    is_local_store,
    lineage_run,
    newest_run,
    open_store,
    require_existing,
    run_store,
    store_folder,
)


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


def main(arguments: Sequence[str] | None = None) -> None:
    from tasks.artifacts.errors import StoreError
    from tasks.experience.errors import ExperienceError
    from tasks.reporting.collect import collect
    from tasks.reporting.page import html_page

    parser = argparse.ArgumentParser(description="Report of what a campaign has published so far.")
    parser.add_argument("--store", required=True, help="s3://bucket/prefix, or an embedded store's folder")
    parser.add_argument(
        "--campaign", required=True, help="name, of the run started last; laptop.0001: of that lineage"
    )
    parser.add_argument("--endpoint-url", default="", help="of an S3 service other than Amazon's")
    parser.add_argument("--to", type=Path, default=Path("report.html"), help="file; default: report.html")
    options = parser.parse_args(arguments)
    require_existing(options.store)
    try:
        where, end = campaign_at(options.store, options.campaign, endpoint_url=options.endpoint_url)
        run = lineage_run(where, end) if end else newest_run(where)
        if run is None:
            raise ValueError(
                f"campaign must have been started in {options.store}, got none named {options.campaign!r}. "
                "Check the spelling."
            )
        if is_local_store(where) and store_folder(run.config) != store_folder(where):
            raise ValueError(
                f"--store must be where the run looks for its queue, got {store_folder(where)}, it says "
                f"{run.config.checkpoint.store}. Run this in the folder that the campaign was started in."
            )
        store = open_store(where, run.campaign)
        record = collect(store, run)
        options.to.write_text(html_page(record, store), encoding="utf-8")
    except (ValueError, OSError, StoreError, ExperienceError) as error:
        raise SystemExit(str(error)) from None
    done = f"{len(record.iterations)} of {run.config.schedule.iterations} iterations"
    print(f"{options.to}: {run.campaign}, {done}")


if __name__ == "__main__":
    main()
