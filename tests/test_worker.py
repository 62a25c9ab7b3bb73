"""The worker loop on a real queue."""

import threading

import pytest
from policies import save_tiny_policy

from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.protocol import SamplingParams
from tasks.engine.worker import drain_queue
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import PolicyVersionMismatch
from tasks.experience.records import WorkItem
from tasks.schema import PromptFrame, RolloutFrame, from_bytes, make_frame, to_bytes

GROUP_SIZE = 3
PARAMS = SamplingParams(max_new_tokens=4, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def buffer(valkey_url, campaign):
    return ExperienceBuffer(valkey_url, campaign, lease_seconds=1.0, max_attempts=3, capacity_bytes=2**20)


def prompt(portion, group):
    return {"iteration": 2, "prompt_id": f"{portion}-{group}", "prompt_ids": [2, 5 + group, 3]}


def put(buffer, num_portions, version=5):
    items = [
        WorkItem(
            iteration=2, portion=p, policy_version=version, num_groups=2, num_samples=2 * GROUP_SIZE,
            payload=to_bytes(make_frame([prompt(p, g) for g in (0, 1)], PromptFrame)),
        )
        for p in range(num_portions)
    ]  # fmt: skip
    return buffer.put_work(items)


def work(buffer, folder, worker, *, max_portions=0, version=5, engine=None):
    engine = engine or EmbeddedEngine(batch_size=16)
    if engine.version is None:
        engine.load(folder, version)
    return drain_queue(
        engine, buffer, worker=worker, iteration=2, params=PARAMS, base_seed=0, group_size=GROUP_SIZE,
        max_portions=max_portions,
    )  # fmt: skip


def published(buffer):
    taken = buffer.take_rollouts("reader", iteration=2, max_groups=100)
    return from_bytes(*(group.payload for _, group in taken), schema=RolloutFrame).sort(
        "prompt_id", "sample_index"
    )


def test_workers_share_a_queue_until_it_is_empty(buffer, folder):
    put(buffer, 5)
    first = work(buffer, folder, "a", max_portions=2)
    second = work(buffer, folder, "b")
    assert (first.num_portions, second.num_portions) == (2, 3)
    frame = published(buffer)
    assert len(frame) == 5 * 2 * GROUP_SIZE == first.num_samples + second.num_samples
    assert frame["policy_version"].unique().to_list() == [5]
    assert int(frame["response_ids"].list.len().sum()) == first.num_tokens + second.num_tokens


def test_a_worker_waits_for_a_lost_one_and_takes_its_portion_over(buffer, folder):
    put(buffer, 2)
    assert buffer.lease("vanished", iteration=2, policy_version=5)
    assert work(buffer, folder, "b").num_portions == 2
    assert len(published(buffer)) == 2 * 2 * GROUP_SIZE


class Fails(EmbeddedEngine):
    def generate(self, requests, params):
        raise RuntimeError("engine died")


def test_a_failing_worker_hands_its_lease_back_at_once(buffer, folder):
    put(buffer, 1)
    engine = Fails(batch_size=4)
    with pytest.raises(RuntimeError, match="engine died"):
        work(buffer, folder, "a", engine=engine)
    assert len(buffer.lease("b", iteration=2, policy_version=5)) == 1  # no waiting for the expiry


def test_the_same_portion_sampled_twice_gives_the_same_samples(buffer, valkey_url, campaign, folder):
    put(buffer, 1)
    work(buffer, folder, "a")
    other = ExperienceBuffer(
        valkey_url, campaign + "-b", lease_seconds=1, max_attempts=3, capacity_bytes=2**20
    )
    put(other, 1)
    work(other, folder, "z")
    assert published(buffer).equals(published(other))


def test_a_worker_with_another_policy_gets_no_work(buffer, folder):
    put(buffer, 1, version=6)
    with pytest.raises(PolicyVersionMismatch):
        work(buffer, folder, "a", version=5)


class Slow(EmbeddedEngine):
    def generate(self, requests, params):
        threading.Event().wait(2.5)  # longer than two leases
        return super().generate(requests, params)


def test_a_slow_worker_renews_its_lease(buffer, folder):
    put(buffer, 1)
    thread = threading.Thread(
        target=work, args=(buffer, folder, "slow"), kwargs={"engine": Slow(batch_size=16)}
    )
    thread.start()
    threading.Event().wait(1.8)
    assert buffer.lease("thief", iteration=2, policy_version=5) == []
    thread.join()
    assert len(published(buffer)) == 2 * GROUP_SIZE and buffer.outstanding(2) == 0
