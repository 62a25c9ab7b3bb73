"""Dynamic sampling: groups that taught nothing are replaced by fresh prompts, a bounded number of times."""

import itertools
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from campaigns import SMALL
from pydantic import ValidationError
from test_graph import unrolled, version

from tasks.buffer import assemble
from tasks.checkpoint import initialize
from tasks.config import CampaignConfig, with_overrides
from tasks.prompts import offer_prompts, refill_prompts
from tasks.records import CampaignRun, CampaignState, PolicyVersion, ScoreReport
from tasks.reward import score
from tasks.rl.refill import refill_sizes, telling_prompts
from tasks.rollout import rollout_worker
from tasks.schema import ScoredFrame, from_bytes, to_bytes
from workflows import campaign

T, F = True, False


def test_sizes_by_hand():
    # 1 of 4 groups differs and 4 are wanted: 3 are missing, at this rate 12 prompts; 4 is the most
    assert refill_sizes([T, F, F, F], first=4, wanted=4, rounds=1) == [4, 4]
    # 3 of 4: 1 missing, 4/3 prompts -> 2; they bring the fourth, so a second refill is not made
    assert refill_sizes([T, T, T, F, T, F, F, F], first=4, wanted=4, rounds=3) == [4, 2]
    # what was sampled of a second refill before a kill does not change the decision about the first
    assert refill_sizes([T, T, T, F, F, F, T, T], first=4, wanted=4, rounds=2) == [4, 2, 2]
    assert refill_sizes([F] * 40, first=4, wanted=4, rounds=2) == [4, 4, 4]  # never an endless loop
    assert refill_sizes([T] * 4, first=4, wanted=4, rounds=8) == [4]


def test_a_group_tells_something_where_its_scores_differ():
    frame = pl.DataFrame(
        {
            "prompt_id": ["a", "a", "b", "b", "c", "c"],
            "outcome": ["score", "score", "score", "score", "score", "failure"],
            "reward": [0.5, 0.5, 0.5, 1.0, 0.5, None],
        }
    )
    assert telling_prompts(frame) == {"b"}


@pytest.fixture
def run(tmp_path: Path, leave_servers: None) -> CampaignRun:
    config = with_overrides(
        CampaignConfig.model_validate(SMALL | {"warm_start": {"steps": 0}}),
        checkpoint__store=str(tmp_path / "store"),
        buffer__capacity_mb=64,
        rollout__prompts_per_iteration=12,
        rollout__groups_per_portion=5,
        rollout__max_portions_per_worker=0,
        rollout__refill_rounds=2,
    )
    return CampaignRun(config=config, lineage=1, code_revision="test")


def sampled(run: CampaignRun, policy: PolicyVersion) -> list[ScoreReport]:
    """The scores of an iteration after its first prompts and after each refill."""
    prompts, reports = offer_prompts(run=run, iteration=1, behavior=policy), []
    for refill in range(3):
        if reports:
            prompts = refill_prompts(run=run, behavior=policy, scores=reports[-1], refill=refill)
        done = rollout_worker(worker=0, run=run, prompts=prompts, behavior=policy)
        before = reports[-1] if reports else None
        reports.append(score(run=run, prompts=prompts, behavior=policy, rollouts=[done], before=before))
    return reports


def test_equal_groups_are_refilled_up_to_the_cap_and_every_sample_is_counted(run, monkeypatch):
    """Every other group earns one reward only: of 12 wanted 6 differ, so 12 more are offered, then more."""
    from tasks.environments import intake

    original = intake.score_groups

    def every_other_equal(taken, scorer):
        changed = []
        for handle, group in original(taken, scorer):
            frame = from_bytes(group.payload, schema=ScoredFrame)
            is_equal = int(frame["prompt_id"][0].encode().hex(), 16) % 2 == 0
            rewards = [0.5] * len(frame) if is_equal else [i % 2 / 2 for i in range(len(frame))]
            frame = frame.with_columns(reward=pl.Series(rewards, dtype=pl.Float64))
            payload = to_bytes(frame)
            changed.append((handle, replace(group, payload=payload)))
        return changed

    monkeypatch.setattr(intake, "score_groups", every_other_equal)
    policy = initialize(run=run)
    reports = sampled(run, policy)
    size = run.config.rollout.group_size
    offered = [0, *(report.num_offered for report in reports)]
    sizes = [after - before for before, after in itertools.pairwise(offered)]
    assert sizes[0] == 12 * size and sizes[1] > 0
    batch = assemble(run=run, scores=reports[-1], policy=policy)
    assert batch.produced == batch.offered == sum(sizes) == reports[-1].num_samples
    assert batch.num_samples + batch.rejected["zero_variance"] == batch.produced
    assert batch.num_samples >= 12 * size or sizes[2] > 0
    again = sampled(run, policy)  # a killed run that begins the iteration anew samples nothing more
    assert [r.num_offered for r in again] in ([r.num_offered for r in reports], [batch.offered] * 3)


def test_the_graph_has_the_refills_between_scores_and_assembly():
    config = CampaignConfig(rollout={"refill_rounds": 2}, schedule={"iterations": 1})
    run = CampaignRun(config=config, lineage=1, code_revision="r")
    spec = unrolled(
        campaign.unroll, run=run, state=CampaignState(versions=[version(0)], iterations_done=0), until=1
    )
    waits = {node.id: set(node.upstream_node_ids) for node in spec.nodes}
    assert {"prompts-0-1", "generate-0-1", "score-0-1", "score-0-2"} <= waits.keys()
    assert "score-0" in waits["prompts-0-1"] and "score-0-1" in waits["prompts-0-2"]
    assert "score-0-2" in waits["assemble-0"] and "score-0" not in waits["assemble-0"]


def test_a_quota_and_refills_exclude_each_other():
    with pytest.raises(ValidationError, match="oversample must be 0 with refill_rounds"):
        CampaignConfig(rollout={"refill_rounds": 1, "oversample": 0.1})
