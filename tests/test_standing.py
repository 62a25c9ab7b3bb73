"""Standing workers and over-sampling on a real queue, in one process."""

import fcntl
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from policies import save_tiny_policy
from publishing import manifest, put_folder
from test_worker import GROUP_SIZE, member, put

from tasks.artifacts.store import open_store
from tasks.config import CampaignConfig
from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.notices import Departure
from tasks.engine.protocol import Completion
from tasks.engine.standing import StandingWorker
from tasks.engine.standing_pool import await_queue, pool_reports
from tasks.environments.scoring import readable
from tasks.experience.buffer import ExperienceBuffer
from tasks.records import CampaignRun, PromptSet
from tasks.session import CURRENT_RUN, code_revision, run_buffer, run_store


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def start_run(
    store_folder: Path,
    campaign: str,
    policy_folder: Path,
    lineage: int = 1,
    sections: dict[str, Any] | None = None,
    revision: str = "",
    **rollout: Any,
) -> CampaignRun:
    """A run with versions 0 and 1 published, as ``open_campaign`` and ``publish`` leave it."""
    rollout = {"pool": "standing", "group_size": GROUP_SIZE, "max_new_tokens": 5, "batch_size": 6, **rollout}
    config = CampaignConfig.model_validate(
        {"name": campaign, "checkpoint": {"store": str(store_folder)}, "rollout": rollout, **(sections or {})}
    )
    run = CampaignRun(config=config, lineage=lineage, code_revision=revision or code_revision())
    store = run_store(run)
    files = put_folder(store, policy_folder)
    for version in (0, 1):
        store.commit(manifest(store, version, files))
    open_store(str(store_folder), campaign).replace_object(CURRENT_RUN, run.model_dump_json().encode())
    return run


def standing(store_folder: Path, campaign: str, departure: Departure | None = None) -> StandingWorker:
    root = open_store(str(store_folder), campaign)
    return StandingWorker(root, name="s", departure=departure or Departure(grace_seconds=10))


def test_a_standing_worker_loads_what_is_required_and_reloads_when_it_rises(
    store_folder: Path, campaign: str, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 7: a recovered engine served base weights. Here none takes work of a version it has not loaded."""
    worker = standing(store_folder, campaign)
    worker.look()
    assert worker.run is None and worker.work() == 0, "nothing was started yet"
    run = start_run(store_folder, campaign, policy_folder)
    buffer = run_buffer(run)
    worker.look()
    put(buffer, 2, version=0)
    assert worker.work() == 2 and buffer.outstanding(2) == 0
    buffer.close(2)
    assert worker.work() == 0
    put(buffer, 1, version=1, iteration=3)
    assert worker.work() == 1
    said = capsys.readouterr().out
    assert said.count("loaded v0") == said.count("loaded v1") == 1
    taken = buffer.take_rollouts("r", iteration=3, max_groups=9)
    assert len(taken) == 2


def leases(cache: Path, campaign: str) -> list[int]:
    """Versions of the lineage whose folders somebody in this process keeps."""
    held = []
    for lease in sorted((cache / "leases" / campaign).iterdir()):
        with lease.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(int(lease.name.split("-")[0]))
    return held


def test_a_standing_worker_keeps_only_the_folder_it_samples_with(
    store_folder: Path, campaign: str, policy_folder: Path
) -> None:
    """Else a bounded cache is full after as many versions as it holds."""
    worker, run = standing(store_folder, campaign), start_run(store_folder, campaign, policy_folder)
    worker.look()
    put(run_buffer(run), 1, version=0)
    assert worker.work() == 1 and leases(store_folder / "cache", run.campaign) == [0]
    run_buffer(run).close(2)
    put(run_buffer(run), 1, version=1, iteration=3)
    assert worker.work() == 1 and leases(store_folder / "cache", run.campaign) == [1]
    start_run(store_folder, campaign, policy_folder, lineage=2)
    worker.look()
    assert leases(store_folder / "cache", run.campaign) == []


def test_a_new_lineage_is_followed_and_the_engine_starts_anew(
    store_folder: Path, campaign: str, policy_folder: Path
) -> None:
    worker = standing(store_folder, campaign)
    first = start_run(store_folder, campaign, policy_folder)
    put(run_buffer(first), 1, version=1)
    worker.look()
    assert worker.work() == 1
    second = start_run(store_folder, campaign, policy_folder, lineage=2)
    put(run_buffer(second), 1, version=1)
    assert worker.work() == 0
    worker.look()
    assert worker.run == second and worker.work() == 1


def test_a_worker_of_other_code_says_so_and_waits_for_a_campaign_of_its_own(
    store_folder: Path, campaign: str, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever upgrades has a campaign and a pool of different code for a while, in either order."""
    worker = standing(store_folder, campaign)
    other = start_run(store_folder, campaign, policy_folder, revision="9d8ca4c+0123456789ab")
    put(run_buffer(other), 1, version=0)
    for _ in range(3):
        worker.look()
        assert worker.work() == 0 and run_buffer(other).outstanding(2) == 1
    said = capsys.readouterr().out
    assert said.count("must run its code, 9d8ca4c+0123456789ab, got ") == 1 and code_revision() in said
    ours = start_run(store_folder, campaign, policy_folder, lineage=2)
    put(run_buffer(ours), 1, version=0)
    worker.look()
    assert worker.work() == 1
    start_run(store_folder, campaign, policy_folder, lineage=3, revision="other")
    put(run_buffer(ours), 1, version=0, iteration=3)
    worker.look()
    assert worker.work() == 0, "the campaign that it followed was started again by other code"


def test_the_generate_stage_waits_for_the_pool_and_reports_its_workers(
    store_folder: Path, campaign: str, policy_folder: Path
) -> None:
    run = start_run(store_folder, campaign, policy_folder)
    prompts = PromptSet(iteration=2, behavior_version=1, num_portions=2, num_groups=4, num_samples=12)
    put(run_buffer(run), 2, version=1)
    worker = standing(store_folder, campaign)
    worker.look()
    thread = threading.Timer(0.3, worker.work)
    thread.start()
    start = time.monotonic()
    await_queue(run, prompts)
    assert time.monotonic() - start > 0.25
    thread.join()
    (report,) = pool_reports(run, prompts)
    assert (report.worker, report.num_samples) == ("s", 12) and report.num_tokens > 0 and report.seconds > 0


def test_a_pool_that_stands_still_is_one_clear_error(
    store_folder: Path, campaign: str, policy_folder: Path
) -> None:
    run = start_run(store_folder, campaign, policy_folder, standing_timeout_seconds=0.3)
    put(run_buffer(run), 1, version=1)
    prompts = PromptSet(iteration=2, behavior_version=1, num_portions=1, num_groups=2, num_samples=6)
    with pytest.raises(RuntimeError, match=r"got none at 0 of 2 groups.*python -m tasks.engine.standing"):
        await_queue(run, prompts)


def test_a_leaving_standing_worker_takes_no_work(
    store_folder: Path, campaign: str, policy_folder: Path
) -> None:
    departure = Departure(grace_seconds=10)
    worker = standing(store_folder, campaign, departure)
    run = start_run(store_folder, campaign, policy_folder)
    put(run_buffer(run), 1, version=1)
    worker.look()
    departure.begin("SIGTERM")
    assert worker.work() == 0 and run_buffer(run).outstanding(2) == 1


class Straggler(EmbeddedEngine):
    """Never ends unless it is aborted."""

    def generate(self, requests: Any, params: Any) -> list[list[Completion]]:
        self._is_aborted.clear()
        assert self._is_aborted.wait(20)
        return [[replace(c, finish_reason="abort") for c in g] for g in super().generate(requests, params)]


def test_a_met_quota_ends_the_iteration_and_its_stragglers(
    buffer: ExperienceBuffer, policy_folder: Path
) -> None:
    put(buffer, 4)  # 8 groups, of which 5 are needed
    engines = [Straggler(batch_size=16), EmbeddedEngine(batch_size=16)]
    for engine in engines:
        engine.load(policy_folder, 5)
    slow = member(buffer, "slow", engine=engines[0], quota_groups=5)
    thread = threading.Thread(target=slow.drain, args=[2])
    thread.start()
    while not buffer.progress(2).leases_by_worker:
        time.sleep(0.01)
    start = time.monotonic()
    member(buffer, "fast", engine=engines[1], quota_groups=5).drain(2)
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - start < 5
    progress = buffer.progress(2)
    assert progress.groups_published == 5 and progress.left == 2 and buffer.outstanding(2) == 0
    assert "slow" not in progress.workers


@pytest.fixture
def buffer(valkey_url: str, campaign: str) -> ExperienceBuffer:
    return ExperienceBuffer(valkey_url, campaign, lease_seconds=30, max_attempts=3, capacity_bytes=2**20)


@pytest.mark.parametrize("garbage", [b"not arrow", b"", None])
def test_a_group_that_breaks_the_schema_is_found_among_good_ones(
    buffer: ExperienceBuffer, policy_folder: Path, garbage: bytes | None
) -> None:
    put(buffer, 2)
    engine = EmbeddedEngine(batch_size=16)
    engine.load(policy_folder, 5)
    member(buffer, "w", engine=engine).drain(2)
    taken = buffer.take_rollouts("r", iteration=2, max_groups=9)
    handle, bad = taken[1]
    payload = taken[0][1].payload if garbage is None else garbage  # another group's rows under its name
    taken[1] = (handle, replace(bad, payload=payload))
    good, refused = readable(taken)
    assert [h for h, _ in good] == [h for h, _ in taken if h != handle]
    assert [h for h, _ in refused] == [handle] and bad.group_id in refused[0][1]


def test_a_hung_worker_loses_its_lease_and_the_work_is_redone(
    valkey_url: str, campaign: str, policy_folder: Path
) -> None:
    buffer = ExperienceBuffer(valkey_url, campaign, lease_seconds=0.3, max_attempts=3, capacity_bytes=2**20)
    put(buffer, 1)
    (hung,) = buffer.lease("hung", iteration=2)  # and never renews
    assert buffer.progress(2).leases_by_worker == {"hung": 1}
    engine = EmbeddedEngine(batch_size=16)
    engine.load(policy_folder, 5)
    done = member(buffer, "next", engine=engine).drain(2)
    assert done.num_portions == 1 and not buffer.settle(hung)
    assert set(buffer.progress(2).workers) == {"next"}
