"""Samples that all earn the same reward: a solved campaign goes on; a hopeless one stops and says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from campaigns import SMALL, run

from tasks.buffer import assemble, require_signal
from tasks.checkpoint import initialize
from tasks.config import CampaignConfig
from tasks.prompts import offer_prompts
from tasks.records import CampaignRun, ScoreReport, TrainBatch
from tasks.reward import score
from tasks.rollout import rollout_worker

ENVIRONMENT = """
from tasks.environments.digits import DigitsEnvironment
from tasks.environments.protocol import Outcome


class Same(DigitsEnvironment):
    def verify(self, prompt_id, response, *, is_finished):
        return Outcome(kind="score", reward=self.reward, is_exact=self.reward == 1)


def make(*, held_out, seed, options):
    same = Same(name="same", transform=reversed, num_digits=3, num_held_out=held_out, seed=seed)
    same.reward = options["reward"]
    return same
"""


def config(reward: float) -> dict[str, Any]:
    return SMALL | {
        "environment": {"name": "module", "module": "same", "held_out": 8, "options": {"reward": reward}},
        "warm_start": {"steps": 0},
        "schedule": {"iterations": 2, "segment_iterations": 2, "evaluate_every": 2},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the environment's module."""
    (tmp_path / "same.py").write_text(ENVIRONMENT)
    return tmp_path


def test_a_solved_task_leaves_the_version_as_it_is_and_the_campaign_goes_on(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    finished = run(folder, config(1.0))
    assert finished.output.count("every sample is right, nothing is left to learn") == 2
    iterations = [line for line in finished.metrics() if line["kind"] == "iteration"]
    assert [line["metrics"]["steps"] for line in iterations] == [0, 0]
    assert len(set(finished.digests())) == 1  # version 0's weights, twice again
    assert "total" in finished.output and "zero_variance: 768" in finished.output


@pytest.mark.usefixtures("leave_servers")
def test_a_task_that_nobody_gets_right_stops_with_what_to_do_and_shows_a_sample(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "same", raising=False)
    stored = config(0.0) | {"checkpoint": {"store": str(folder / "store")}}
    campaign = CampaignRun(config=CampaignConfig.model_validate(stored), lineage=1, code_revision="test")
    policy = initialize(run=campaign)
    prompts = offer_prompts(run=campaign, iteration=0, behavior=policy)
    rollouts = [rollout_worker(worker=n, run=campaign, prompts=prompts, behavior=policy) for n in range(2)]
    scores = score(run=campaign, prompts=prompts, behavior=policy, rollouts=rollouts)
    shown = re.search(r"ALERT +such as (.*) -> (.*): reward 0\n", capsys.readouterr().out)
    assert shown and "<user>same " in shown[1] and len(shown[2]) > 2
    with pytest.raises(RuntimeError, match=r"at least one group must have differing rewards.*warm-start"):
        assemble(run=campaign, scores=scores, policy=policy)


def test_a_control_that_has_learned_to_be_wrong_goes_on(capsys):
    batch = TrainBatch.model_construct(iteration=3, num_samples=0, rejected={"zero_variance": 8})
    scores = ScoreReport.model_construct(exact_share=0.0, finished_share=0.5)
    require_signal(batch, scores, control="flipped")
    assert "every sample earned the same flipped reward" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="at least one group must have differing rewards"):
        require_signal(batch, scores, control="none")


def test_samples_that_were_all_cut_off_are_told_by_their_length():
    """The text advised to make the task easier where each response was one token short."""
    batch = TrainBatch.model_construct(iteration=3, num_samples=0, rejected={"zero_variance": 8})
    scores = ScoreReport.model_construct(exact_share=0.0, finished_share=0.0)
    with pytest.raises(RuntimeError, match=r"no response ended: raise rollout\.max_new_tokens"):
        require_signal(batch, scores, control="none")
