"""The score stage on a real queue: beside workers, behind them, and on the data a campaign began with."""

import threading
import time

import pytest
from policies import save_tiny_policy
from test_standing import start_run

from tasks.environment_config import EnvironmentConfig
from tasks.environments.intake import FIRST_GROUPS, MOST_GROUPS, TAKE_SECONDS, Intake
from tasks.environments.make import make_environment
from tasks.environments.scorer import Scorer
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.records import Group, WorkItem
from tasks.policy.models.tokenizer import character_tokenizer, encode
from tasks.prompts import offer_prompts
from tasks.schema import PromptFrame, RolloutFrame, ScoredFrame, from_bytes, make_frame, to_bytes
from tasks.session import run_store

TOKENIZER = character_tokenizer()
ENVIRONMENT = make_environment(EnvironmentConfig(), seed=0)


@pytest.fixture
def buffer(valkey_url, campaign):
    return ExperienceBuffer(valkey_url, campaign, lease_seconds=1.0, max_attempts=3, capacity_bytes=2**20)


def put(buffer, *portions):
    """A prompt a portion: the four digits of its name."""
    items = [
        WorkItem(
            iteration=0, portion=number, policy_version=0, num_groups=1, num_samples=2,
            payload=to_bytes(make_frame(
                [{"iteration": 0, "prompt_id": f"0-{digits}", "prompt_ids": [2, 3]}], PromptFrame
            )),
        )
        for number, digits in enumerate(portions)
    ]  # fmt: skip
    buffer.put_work(items)


def publish(buffer, worker="w"):
    """Lease a portion and answer it once rightly and once wrongly."""
    (lease,) = buffer.lease(worker, iteration=0, policy_version=0)
    (prompt_id,) = from_bytes(lease.item.payload, schema=PromptFrame)["prompt_id"].to_list()
    answers = (prompt_id[:1:-1], "0")
    rows = [
        {
            "iteration": 0, "prompt_id": prompt_id, "sample_index": index, "policy_version": 0,
            "prompt_ids": [2, 3], "response_ids": [*encode(TOKENIZER, text), TOKENIZER.eos_token_id],
            "behavior_logprob": [-1.0] * (len(text) + 1), "finish_reason": "stop",
        }
        for index, text in enumerate(answers)
    ]  # fmt: skip
    payload = to_bytes(make_frame(rows, RolloutFrame))
    buffer.publish(lease, [Group(group_id=prompt_id, num_samples=2, payload=payload)])
    buffer.settle(lease)


def scored(buffer):
    groups = buffer.scored_groups(0)
    return from_bytes(*(group.payload for group in groups), schema=ScoredFrame).sort("prompt_id")


def test_scoring_goes_on_beside_generation_and_ends_with_the_queue(buffer):
    put(buffer, "1234", "5678", "9012")
    intake = Intake(buffer, Scorer(ENVIRONMENT, TOKENIZER), 0)
    thread = threading.Thread(target=intake.follow, kwargs={"timeout_seconds": 60})
    thread.start()
    for count in (1, 2):
        publish(buffer)
        deadline = time.monotonic() + 30
        while len(buffer.scored_groups(0)) < count:  # scored while portions are still out
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
    assert thread.is_alive()
    publish(buffer)
    thread.join(30)
    assert not thread.is_alive()
    assert scored(buffer)["is_exact"].to_list() == [True, False] * 3
    assert (intake.num_groups, intake.num_samples) == (3, 6) and intake.idle_seconds > 0 < intake.busy_seconds


def test_scoring_that_waits_for_workers_that_do_not_come_names_who_holds_what(buffer):
    put(buffer, "1234", "5678")
    buffer.lease("asleep", iteration=0, policy_version=0)
    intake = Intake(buffer, Scorer(ENVIRONMENT, TOKENIZER), 0)
    with pytest.raises(RuntimeError, match=r"_seconds=0\.3, got none; leases: \{'asleep': 1\}"):
        intake.follow(timeout_seconds=0.3)


class Slow(Scorer):
    """Takes three leases' time for what it is given."""

    is_cheap = False

    def outcomes(self, samples):
        time.sleep(3.0)
        return super().outcomes(samples)


def test_groups_that_take_long_to_score_stay_with_their_scorer(buffer):
    put(buffer, "1234")
    publish(buffer)
    intake = Intake(buffer, Slow(ENVIRONMENT, TOKENIZER), 0)
    thread = threading.Thread(target=intake.score_waiting)
    thread.start()
    time.sleep(2.3)  # two leases later
    assert buffer.take_rollouts("another", iteration=0, max_groups=1) == []
    thread.join(30)
    assert len(buffer.scored_groups(0)) == 1


def test_a_take_is_what_is_scored_in_seconds_at_the_measured_rate(buffer):
    buffer.lease_seconds = 60.0
    cheap, slow = (Intake(buffer, kind(ENVIRONMENT, TOKENIZER), 0) for kind in (Scorer, Slow))
    assert (cheap.max_groups, slow.max_groups) == (MOST_GROUPS, FIRST_GROUPS)
    slow.num_groups, slow.busy_seconds = 16, 8.0  # two a second
    assert slow.max_groups == 2 * TAKE_SECONDS
    slow.busy_seconds = 1600.0
    assert slow.max_groups == 1
    slow.busy_seconds = 0.001
    assert slow.max_groups == MOST_GROUPS
    slow.busy_seconds, buffer.lease_seconds = 8.0, 1.0  # not more than a lease's worth
    assert slow.max_groups == 2


def test_a_campaign_goes_on_with_the_data_it_began_with_or_not_at_all(
    store_folder, campaign, tmp_path_factory
):
    policy = save_tiny_policy(tmp_path_factory.mktemp("policy"))
    run = start_run(store_folder, campaign, policy)
    head = run_store(run).head()
    assert head is not None
    offer_prompts(run=run, iteration=1, behavior=head)
    offer_prompts(run=run, iteration=1, behavior=head)  # safe to repeat
    config = run.config.model_copy(update={"environment": EnvironmentConfig(num_digits=3)})
    with pytest.raises(ValueError, match="must go on with the data it began with, got 'reverse_digits/3"):
        offer_prompts(run=run.model_copy(update={"config": config}), iteration=1, behavior=head)
