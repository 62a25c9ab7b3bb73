"""The worker loop on a real queue."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from policies import save_tiny_policy

from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.notices import Departure
from tasks.engine.overlap import drain_together
from tasks.engine.protocol import SamplingParams
from tasks.engine.worker import RolloutWorker, WorkDone
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


def put(buffer, num_portions, version=5, iteration=2):
    rows = {
        portion: [
            {"iteration": iteration, "prompt_id": f"{portion}-{g}", "prompt_ids": [2, 5 + g, 3]}
            for g in (0, 1)
        ]
        for portion in range(num_portions)
    }
    items = [
        WorkItem(
            iteration=iteration, portion=portion, policy_version=version, num_groups=2,
            num_samples=2 * GROUP_SIZE, payload=to_bytes(make_frame(part, PromptFrame)),
        )
        for portion, part in rows.items()
    ]  # fmt: skip
    return buffer.put_work(items)


def member(buffer, name, *, engine, **changes):
    changes = {"chunk_samples": GROUP_SIZE, **changes}
    return RolloutWorker(
        engine=engine, buffer=buffer, name=name, params=PARAMS, base_seed=0, group_size=GROUP_SIZE, **changes
    )


def work(buffer, folder, worker, *, max_portions=0, version=5, engine=None, **changes):
    engine = engine or EmbeddedEngine(batch_size=16)
    if engine.version is None:
        engine.load(folder, version)
    return member(buffer, worker, engine=engine, **changes).drain(2, max_portions=max_portions)


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


@pytest.mark.parametrize(("names", "fails"), [("ab", False), ("ab", True), ("a", False)])
def test_sampling_keeps_the_collector_from_what_was_there_before(buffer, folder, names, fails):
    put(buffer, 2)
    old, counts = gc.get_objects(), []

    class Counts(EmbeddedEngine):
        def generate(self, requests, params):
            counts.append(gc.get_freeze_count())
            return (Fails if fails else EmbeddedEngine).generate(self, requests, params)

    members = [member(buffer, name, engine=Counts(batch_size=16)) for name in names]
    for one in members:
        one.engine.load(folder, 5)
    with pytest.raises(RuntimeError, match="engine died") if fails else nullcontext():
        drain_together(members, 2)
    assert counts and min(counts) > 0.9 * len(old)
    assert gc.get_freeze_count() == 0


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
        target=work,
        args=(buffer, folder, "slow"),
        kwargs={"engine": Slow(batch_size=16), "chunk_samples": 16},
    )
    thread.start()
    threading.Event().wait(1.8)
    assert buffer.lease("thief", iteration=2, policy_version=5) == []
    thread.join()
    assert len(published(buffer)) == 2 * GROUP_SIZE and buffer.outstanding(2) == 0


class Interrupted(EmbeddedEngine):
    """Runs ``then`` before its n-th call; counts calls and tokens."""

    def __init__(self, *, call=0, then=lambda: None):
        super().__init__(batch_size=16)
        self.call, self.then, self.calls, self.tokens = call, then, 0, 0

    def generate(self, requests, params):
        self.calls += 1
        if self.calls == self.call:
            self.then()
        completions = super().generate(requests, params)
        self.tokens += sum(len(c.response_ids) for group in completions for c in group)
        return completions


def test_a_worker_goes_on_behind_the_last_published_chunk_of_a_lost_one(buffer, folder):
    put(buffer, 1)  # two groups, two chunks

    def vanish():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(buffer, folder, "a", engine=Interrupted(call=2, then=vanish))
    engine = Interrupted()
    assert work(buffer, folder, "b", engine=engine).num_samples == GROUP_SIZE and engine.calls == 1
    assert len(published(buffer)) == 2 * GROUP_SIZE and buffer.progress(2).duplicates == 0


def test_a_leaving_worker_finishes_what_fits_and_takes_nothing_new(buffer, folder):
    put(buffer, 3)
    departure = Departure(grace_seconds=60)
    engine = Interrupted(call=1, then=lambda: departure.begin("SIGTERM"))
    done = work(buffer, folder, "a", engine=engine, departure=departure)
    assert (done.num_portions, done.num_returned) == (1, 0)
    assert len(buffer.lease("b", iteration=2, policy_version=5, max_items=9)) == 2


def test_a_leaving_worker_without_time_returns_the_rest_at_once(buffer, folder):
    put(buffer, 1)
    departure = Departure(grace_seconds=0)
    engine = Interrupted(call=2, then=lambda: departure.begin("SIGTERM"))
    done = work(buffer, folder, "a", engine=engine, departure=departure, chunk_samples=1)
    assert done.num_portions + done.num_returned == 1
    rest = Interrupted()
    work(buffer, folder, "b", engine=rest)
    assert len(published(buffer)) == 2 * GROUP_SIZE and buffer.progress(2).duplicates == 0


class Endless(EmbeddedEngine):
    """Decodes until it is aborted, then like its parent."""

    def generate(self, requests, params):
        self._is_aborted.clear()
        assert self._is_aborted.wait(10)
        completions = super().generate(requests, params)
        return [[replace(c, finish_reason="abort") for c in group] for group in completions]


RESUMES = pytest.mark.parametrize("required_version", [None, 5], ids=["", "follows newer versions"])


@RESUMES
def test_the_deadline_aborts_the_engine_and_the_lease_is_free_for_others(buffer, folder, required_version):
    put(buffer, 1)
    departure = Departure(grace_seconds=0.3)
    threading.Timer(0.2, departure.begin, ["SIGTERM"]).start()
    start = time.monotonic()
    done = work(
        buffer, folder, "a", engine=Endless(batch_size=16), departure=departure,
        required_version=required_version,
    )  # fmt: skip
    assert 0.4 < time.monotonic() - start < 3 and (done.num_portions, done.num_returned) == (0, 1)
    (lease,) = buffer.lease("b", iteration=2, policy_version=5)
    assert lease.attempt == 2 and buffer.produced(2).samples == 0


def test_a_renewal_that_fails_is_made_again_and_the_deadline_is_still_kept(buffer, folder, monkeypatch):
    put(buffer, 1)
    renew, renewals = buffer.renew, []

    def renew_but_once(lease):
        renewals.append(lease)
        if len(renewals) == 1:
            raise ConnectionError("the buffer is away")
        return renew(lease)

    monkeypatch.setattr(buffer, "renew", renew_but_once)
    departure = Departure(grace_seconds=1.2)  # the lease is for a second
    departure.begin("SIGTERM")
    lease = buffer.lease("a", iteration=2, policy_version=5)[0]
    worker = member(buffer, "a", engine=_loaded(Endless(batch_size=16), folder), departure=departure)
    done, start = WorkDone(), time.monotonic()
    worker._work(lease, done)
    assert 1.0 < time.monotonic() - start < 5 and len(renewals) >= 2
    assert (done.num_portions, done.num_returned) == (0, 1)


@RESUMES
def test_a_lost_lease_aborts_the_engine(buffer, folder, valkey_url, campaign, required_version):
    put(buffer, 1)
    thief = ExperienceBuffer(valkey_url, campaign, lease_seconds=0.001, max_attempts=3, capacity_bytes=2**20)
    threading.Timer(0.1, thief.lease, ["thief"], {"iteration": 2}).start()
    start = time.monotonic()
    engine = _loaded(Endless(batch_size=16), folder)
    worker = member(buffer, "a", engine=engine, required_version=required_version)
    done = worker.drain(2, waits=False)
    assert time.monotonic() - start < 3 and (done.num_portions, done.num_returned) == (0, 0)


def _loaded(engine, folder):
    engine.load(folder, 5)
    return engine


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_an_interrupted_chunk_is_redone_whole_only_where_bits_must_repeat(buffer, folder, is_deterministic):
    put(buffer, 1)
    (lease,) = buffer.lease("x", iteration=2, policy_version=5)
    worker = member(
        buffer, "x", engine=_loaded(HalfAborted(batch_size=16), folder), is_deterministic=is_deterministic
    )
    prompts = from_bytes(lease.item.payload, schema=PromptFrame).rows(named=True)
    groups, _, is_whole = worker.sample(lease, prompts, WorkDone(), threading.Event())
    assert not is_whole and len(groups) == (0 if is_deterministic else 1)


class HalfAborted(EmbeddedEngine):
    def generate(self, requests, params):
        first, second = super().generate(requests, params)
        return [first, [replace(second[0], finish_reason="abort"), *second[1:]]]


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_worker import member, _loaded
from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.notices import departing
from tasks.experience.buffer import ExperienceBuffer

class Slow(EmbeddedEngine):
    def generate(self, requests, params):
        print("sampling", flush=True)
        time.sleep(0.3)
        return super().generate(requests, params)

buffer = ExperienceBuffer({url!r}, {campaign!r}, lease_seconds=60, max_attempts=3, capacity_bytes=2**20)
with departing(grace_seconds=30) as departure:
    engine = _loaded(Slow(batch_size=16), Path({folder!r}))
    member(buffer, "a", engine=engine, departure=departure).drain(2)
departure.exit()
"""


def test_a_process_that_gets_sigterm_finishes_its_portion_and_exits_143(buffer, folder, valkey_url, campaign):
    put(buffer, 3)
    here = Path(__file__).parent
    script = SCRIPT.format(tests=str(here), url=valkey_url, campaign=campaign, folder=str(folder))
    environment = dict(os.environ, PYTHONPATH=str(here.parent))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout and process.stdout.readline() == "sampling\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    progress = buffer.progress(2)
    assert (progress.settled, progress.queued, progress.leased) == (1, 2, 0)
