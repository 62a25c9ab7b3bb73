"""What can be asked about a campaign: its archive, the live view, metrics, the report's table of workers."""

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from publishing import manifest
from test_experience import group, item, make
from test_report import record

from tasks.artifacts.store import PolicyStore, open_store
from tasks.config import CampaignConfig
from tasks.experience import query
from tasks.experience.archive import archive_bytes, archive_key
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.ledger import CampaignLedger
from tasks.experience.records import Group, Unscored
from tasks.experience.watch import Follower, Watcher, serve_metrics, view_metrics, view_text
from tasks.records import CampaignRun, TrainBatch, WorkerThroughput
from tasks.reporting.operations import generation_section
from tasks.rl.assembly import assemble_frame, sample_fates
from tasks.schema import RolloutFrame, ScoredFrame, TrainFrame, make_frame, polars_schema, to_bytes
from tasks.session import CURRENT_RUN


def scored(prompt: str, rewards: list[float | None], **changes: Any) -> list[dict[str, Any]]:
    base = {
        "iteration": 0, "prompt_id": prompt, "policy_version": 1, "prompt_ids": [2, 3],
        "response_ids": [5, 1], "behavior_logprob": [-0.5, -0.1], "finish_reason": "stop", "is_exact": False,
    }  # fmt: skip
    outcomes = [
        {"outcome": "failure", "reason": "crash", "reward": None}
        if reward is None
        else {"outcome": "score", "reason": "", "reward": reward}
        for reward in rewards
    ]
    return [{**base, "sample_index": i, **outcome, **changes} for i, outcome in enumerate(outcomes)]


def config(**rollout: Any) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "rollout": {"prompts_per_iteration": 2, "group_size": 2, **rollout},
            "algorithm": {"num_minibatches": 1},
        }
    )


ROWS = [
    *scored("a", [0.0, 1.0]), *scored("b", [0.5, 0.5]), *scored("c", [0.0, None]),
    *scored("d", [0.0, 1.0], policy_version=0),
]  # fmt: skip


def assembled(
    rows: list[dict[str, Any]], settings: CampaignConfig
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    frame = make_frame(rows, ScoredFrame)
    train, rejected, _ = assemble_frame(frame, settings, iteration=0, policy_version=1)
    return sample_fates(frame, train, settings, policy_version=1), train, rejected


def test_every_sample_has_one_fate_and_the_fates_are_the_ledger() -> None:
    fates, train, rejected = assembled(ROWS, config())
    assert dict(fates.group_by("fate").len().iter_rows()) == {"trained": len(train), **rejected}
    found = {
        f"{prompt}{index}": fate
        for prompt, index, fate in fates.select("prompt_id", "sample_index", "fate").iter_rows()
    }
    assert found == {
        "a0": "trained", "a1": "trained", "b0": "zero_variance", "b1": "zero_variance", "c0": "group_of_one",
        "c1": "verifier_failure", "d0": "stale", "d1": "stale",
    }  # fmt: skip


def test_groups_beyond_the_quota_are_rejected_by_name() -> None:
    rows = [row for prompt in "abc" for row in scored(prompt, [0.0, 1.0])]
    fates, train, rejected = assembled(rows, config(oversample=0.5))
    assert train["prompt_id"].unique().sort().to_list() == ["a", "b"] and rejected == {
        "over_quota": 2,
        "zero_variance": 0,
    }
    assert fates.filter(pl.col("fate") == "over_quota")["prompt_id"].unique().to_list() == ["c"]


def publish_version(store: PolicyStore, rows: list[dict[str, Any]]) -> pl.DataFrame:
    fates, _, _ = assembled(rows, config())
    store.commit(manifest(store, 0, {}))
    batch = "batches/000000-c.arrow"
    store.put_object(archive_key(batch), archive_bytes(fates, []))
    store.commit(manifest(store, 1, {}, batch=batch))
    return fates


def test_a_query_names_samples_prompts_versions_and_rewards_within_a_second(
    policy_store: PolicyStore,
) -> None:
    rows = [row for n in range(2000) for row in scored(f"{n:09d}-1234", [0.0, 1.0, 0.5, 0.25])]
    publish_version(policy_store, rows)
    start = time.monotonic()
    made = query.made_of(policy_store, 1)
    text = query.text_of(made, limit=3)
    assert time.monotonic() - start < 1.0  # 8,000 samples; the bound is the claim
    assert len(made.trained) == 8000 and made.trained["sample"][0] == "0/000000000-1234/0"
    assert "produced 8000 = 8000 trained" in text and "sampled by version 1: 8000" in text
    assert "trained: prompts 2000, reward mean 0.4375, from 0.0000 to 1.0000" in text and "7997 more" in text


def test_every_token_comes_back_from_the_archive_rejected_or_not(policy_store: PolicyStore) -> None:
    publish_version(policy_store, ROWS)
    made = query.made_of(policy_store, 1)
    assert len(made.samples) == len(ROWS) and made.samples["response_ids"].list.len().sum() == 2 * len(ROWS)
    assert made.samples["behavior_logprob"].list.len().sum() == 2 * len(ROWS)


def test_a_version_without_an_iteration_has_no_samples_to_name(policy_store: PolicyStore) -> None:
    publish_version(policy_store, ROWS)
    with pytest.raises(ValueError, match="must come from an iteration to have samples, got kind init"):
        query.made_of(policy_store, 0)


def test_groups_that_no_scorer_survived_are_archived_too() -> None:
    fates, _, _ = assembled(ROWS, config())
    columns = list(polars_schema(RolloutFrame))
    lost = make_frame(
        [{name: row.get(name) for name in columns} for row in scored("z", [0.0, 1.0])], RolloutFrame
    )
    payload = to_bytes(lost)
    archived = pl.read_parquet(
        archive_bytes(
            fates, [Unscored(group=Group(group_id="z", num_samples=2, payload=payload), reason="died")]
        )
    )
    assert len(archived) == len(ROWS) + 2
    assert archived.filter(pl.col("prompt_id") == "z")["fate"].to_list() == ["unscored"] * 2


@pytest.fixture
def watcher(valkey_url: str, campaign: str, policy_store: PolicyStore) -> Watcher:
    run = CampaignRun(config=CampaignConfig(name=campaign), lineage=1, code_revision="r")
    return Watcher(run=run, buffer=make(valkey_url, campaign), store=policy_store)


def some_work(buffer: ExperienceBuffer) -> None:
    buffer.put_work([item(n) for n in range(3)])
    lease, _ = buffer.lease("w1", iteration=1, max_items=2)
    buffer.publish(lease, [group("a"), group("a")], num_tokens=40, seconds=2.0)
    buffer.settle(lease)


def test_the_view_shows_queue_leases_rates_and_rejections(watcher: Watcher) -> None:
    before = watcher.look()
    some_work(watcher.buffer)
    share = WorkerThroughput(samples=6, tokens=60, seconds=3.0)
    batch = TrainBatch(
        iteration=0, objective="clipped_policy", key="k", sha256="s", num_samples=1, behavior_version=0,
        produced=6, rejected={"stale": 5}, metrics={}, seconds={}, sealed_at=0.0, workers={"w0": share},
    )  # fmt: skip
    watcher.store.put_object("batches/000000-x.json", batch.model_dump_json().encode())
    view = watcher.look()
    assert (view.total_samples, view.total_tokens) == (10, 100)
    assert view.rejected == {"duplicate groups": 1, "stale": 5}
    text = view_text(view, before)
    assert "iteration 1 by version 7: 1 queued, 1 leased, 1 settled, 0 poisoned" in text
    assert "20 tokens/s" in text and "rejected: 1 duplicate groups, 5 stale" in text
    rate = float(text.splitlines()[0].split()[-2].replace(",", ""))
    assert rate == pytest.approx(100 / (view.seconds - before.seconds), rel=0.01)


def test_metrics_are_served_in_prometheus_text_format(watcher: Watcher, campaign: str) -> None:
    some_work(watcher.buffer)
    server = serve_metrics(lambda: watcher, 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/other")
    finally:
        server.shutdown()
        server.server_close()
    name = f'campaign="{campaign}.0001"'
    assert f'moe_rl_portions{{{name},iteration="1",state="queued"}} 1' in text
    assert f'moe_rl_leases{{{name},iteration="1",worker="w1"}} 1' in text
    assert f"moe_rl_tokens_total{{{name}}} 40" in text and "# TYPE moe_rl_tokens_total counter" in text
    assert f'moe_rl_rejected_total{{{name},reason="duplicate groups"}} 1' in text
    assert f'moe_rl_worker_tokens_total{{{name},worker="w1"}} 40' in text
    assert f'moe_rl_worker_seconds_total{{{name},worker="w1"}} 2' in text
    assert f"moe_rl_version{{{name}}} -1" in text and f"moe_rl_untrained_batch_seconds{{{name}}} 0" in text
    assert f"moe_rl_buffer_capacity_bytes{{{name}}} {512 * 2**20:g}" in text
    assert re.search(rf'moe_rl_server_used_bytes{{{name},shard="0"}} [1-9]', text)
    assert f'moe_rl_server_max_bytes{{{name},shard="0"}}' in text


def test_before_a_campaign_began_there_are_no_metrics_and_no_failure() -> None:
    server = serve_metrics(lambda: None, 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert (answer.status, answer.read()) == (200, b"")
    finally:
        server.shutdown()
        server.server_close()


def test_a_batch_that_nobody_trains_ages_until_a_version_is_trained_on_it(watcher: Watcher) -> None:
    def seal(iteration: int, *, age: float, digest: str = watcher.run.config.digest()) -> None:
        batch = TrainBatch(
            iteration=iteration, objective="clipped_policy", key="k", sha256="s", num_samples=1,
            behavior_version=0, produced=0, rejected={}, metrics={}, seconds={}, sealed_at=time.time() - age,
        )  # fmt: skip
        key = f"batches/{iteration:06d}-{digest}.json"
        watcher.store.put_object(key, batch.model_dump_json().encode())

    watcher.store.commit(manifest(watcher.store, 0, {}))
    assert (watcher.look().version, watcher.look().untrained_seconds) == (0, 0)
    seal(0, age=500)
    seal(1, age=40)
    seal(2, age=9000, digest="another")  # of a configuration that was changed: nobody will train it
    assert watcher.look().untrained_seconds == pytest.approx(500, abs=30)
    watcher.store.commit(manifest(watcher.store, 1, {}))
    view = watcher.look()
    assert view.version == 1 and view.untrained_seconds == pytest.approx(40, abs=30)
    watcher.store.commit(manifest(watcher.store, 2, {}))
    assert watcher.look().untrained_seconds == 0


def test_who_watches_follows_the_run_that_was_started_last(store_folder: Path, campaign: str) -> None:
    settings = CampaignConfig.model_validate({"name": campaign, "checkpoint": {"store": str(store_folder)}})
    follow, root = Follower(settings), open_store(str(store_folder), campaign)
    assert follow() is None
    for lineage in (1, 2):
        run = CampaignRun(config=settings, lineage=lineage, code_revision="r")
        root.replace_object(CURRENT_RUN, run.model_dump_json().encode())
        watcher = follow()
        assert watcher is not None and watcher.look().campaign == f"{campaign}.000{lineage}"
        assert follow() is watcher


def test_metric_labels_are_escaped(watcher: Watcher) -> None:
    watcher.buffer.put_work([item(0)])
    watcher.buffer.lease('a"b\\', iteration=1)
    assert 'worker="a\\"b\\\\"' in view_metrics(watcher.look())


def test_train_rows_alone_answer_after_the_buffer_was_lost(policy_store: PolicyStore) -> None:
    _, train, _ = assembled(ROWS, config())
    assert set(train.columns) == set(polars_schema(TrainFrame))
    policy_store.commit(manifest(policy_store, 0, {}))
    policy_store.put_object(
        "samples/000000-c.parquet", archive_bytes(train.with_columns(fate=pl.lit("trained")), [])
    )
    policy_store.commit(manifest(policy_store, 1, {}, batch="batches/000000-c.arrow"))
    made = query.made_of(policy_store, 1)
    assert len(made.trained) == 2 and made.trained["reward"].null_count() == 0
    assert "produced 2 = 2 trained" in query.text_of(made, limit=0)


def test_the_report_shows_each_workers_throughput_and_what_was_left() -> None:
    campaign = record(num_iterations=1)
    batch = TrainBatch(
        iteration=0, objective="clipped_policy", key="k", sha256="s", num_samples=1, behavior_version=0,
        produced=6, rejected={}, metrics={}, seconds={}, sealed_at=0.0, late=16,
        workers={
            "fast<b>": WorkerThroughput(samples=60, tokens=600, seconds=3.0),
            "slow": WorkerThroughput(samples=6, tokens=60, seconds=3.0),
        },
    )  # fmt: skip
    entry = campaign.ledger.iterations[0].model_copy(update={"unsampled": 40})
    campaign = replace(campaign, batches=[batch], ledger=CampaignLedger(iterations=(entry,)))
    html = generation_section(campaign)
    assert html.index("fast&lt;b&gt;") < html.index("slow") and ">200<" in html and ">20<" in html
    assert "40 offered samples were never finished" in html and "16 came after that" in html
    assert "not sampled: 40" in entry.reasons() and entry.balance() == 0
    lines = [json.loads(line) for line in campaign.metrics_jsonl().splitlines()]
    assert "workers" not in lines[0] and lines[1]["workers"]["slow"]["tokens"] == 60


def test_a_report_without_throughput_has_no_such_section() -> None:
    assert generation_section(record(num_iterations=1)) == ""
