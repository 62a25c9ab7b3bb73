"""The standing worker takes versions as they are published: while it samples, joining late, torn ones."""

import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from policies import save_tiny_policy
from publishing import manifest, put_folder
from recorded_sglang import recorded
from test_in_flight import EXACT, check_logprobs, spans
from test_standing import leases, standing, start_run
from test_worker import put

from tasks.artifacts.manifest import Blob
from tasks.artifacts.store import PolicyStore
from tasks.artifacts.version import PolicyVersion
from tasks.engine import in_flight
from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.in_flight import newest_after, taking_newer
from tasks.engine.notices import Departure
from tasks.engine.standing import StandingWorker
from tasks.records import CampaignRun
from tasks.schema import RolloutFrame, from_bytes
from tasks.session import run_buffer, run_store


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Of several policies."""
    root = tmp_path_factory.mktemp("policies")
    return {number: save_tiny_policy(root / str(number), seed=number) for number in (5, 6, 7)}


class Publishes(EmbeddedEngine):
    """What ``events`` names happens in that decoding step of the first call, and is waited for: a version is
    published, and the worker finds it and has it loaded; unless the event says False, that it must not."""

    events: dict[int, Any]

    def generate(self, requests: Any, params: Any) -> Any:
        engine, looks = self, 0

        class Watched:
            record_routing, max_new_tokens = params.record_routing, params.max_new_tokens
            top_p, stop_ids = params.top_p, params.stop_ids

            @property
            def temperature(self) -> float:
                nonlocal looks
                looks += 1
                if event := engine.events.pop(looks, None):
                    is_taken = event() is not False
                    assert engine._is_aborted.wait(20 if is_taken else 0.5) == is_taken
                return params.temperature

        return super().generate(requests, Watched())  # type: ignore[arg-type]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Publishes:
    """The engine of the standing worker that a test makes."""
    made = Publishes(batch_size=16)
    made.events = {}
    monkeypatch.setattr("tasks.engine.standing.make_engine", lambda *_, **__: made)
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.02)
    return made


@pytest.fixture
def run(store_folder: Path, campaign: str, folders: dict[int, Path]) -> CampaignRun:
    """Its versions 0 and 1 are there."""
    sections = {"schedule": {"max_staleness": 1}, "train": {"deterministic": False}}
    return start_run(
        store_folder, campaign, folders[5], sections=sections, follow="newest", max_new_tokens=12
    )


@pytest.fixture
def worker(run: CampaignRun, store_folder: Path, campaign: str, engine: Publishes) -> StandingWorker:
    """It has found the run."""
    found = standing(store_folder, campaign)
    found.look()
    return found


def publish(run: CampaignRun, version: int, folder: Path, **files: Blob) -> None:
    store = run_store(run)
    store.commit(manifest(store, version, put_folder(store, folder) | files))


def samples(run: CampaignRun, iteration: int = 2) -> pl.DataFrame:
    taken = run_buffer(run).take_rollouts("reader", iteration=iteration, max_groups=100)
    frame = from_bytes(*(group.payload for _, group in taken), schema=RolloutFrame)
    return frame.sort("prompt_id", "sample_index")


def test_a_standing_worker_takes_a_version_that_is_published_while_it_samples(
    run: CampaignRun, worker: StandingWorker, engine: Publishes, folders: dict[int, Path],
    store_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    put(run_buffer(run), 2, version=1)

    publishing = threading.Lock()

    def two_at_once() -> None:
        with publishing:
            publish(run, 2, folders[6])
            publish(run, 3, folders[7])

    def both_or_none(store: PolicyStore, version: int) -> PolicyVersion | None:
        with publishing:
            return newest_after(store, version)

    monkeypatch.setattr("tasks.engine.standing.newest_after", both_or_none)

    engine.events = {3: two_at_once}
    assert worker.work() == 2
    frame = samples(run)
    mixed = [parts for parts in spans(frame) if len(parts) > 1]
    assert mixed and all(parts == [(1, 3), (3, parts[1][1])] for parts in mixed)
    assert spans(frame)[-1][0][0] == engine.version == 3, "the next portion is sampled by the newest alone"
    check_logprobs(frame, {1: folders[5], 2: folders[6], 3: folders[7]}, atol=EXACT)
    assert leases(store_folder / "cache", run.campaign) == [3]
    assert "loaded v1" in (said := capsys.readouterr().out) and "loaded v3" in said


def test_a_worker_that_joins_late_begins_with_the_newest_version_and_stays_with_it(
    run: CampaignRun, worker: StandingWorker, engine: Publishes, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run_buffer(run), 1, version=0)
    assert worker.work() == 1 and engine.version == 1
    frame = samples(run)
    assert set(frame["policy_version"]) == {1} and frame["version_spans"].null_count() == len(frame)
    put(run_buffer(run), 1, version=0, iteration=3)  # no load for an iteration that it may sample
    assert worker.work() == 1
    said = capsys.readouterr().out
    assert said.count(" loaded v") == said.count(" loaded v1 ") == 1


def test_a_worker_that_has_to_leave_finishes_what_it_holds_with_the_version_it_has(
    run: CampaignRun, engine: Publishes, folders: dict[int, Path], store_folder: Path, campaign: str
) -> None:
    departure = Departure(grace_seconds=60)
    worker = standing(store_folder, campaign, departure)
    worker.look()
    put(run_buffer(run), 2, version=1)

    def leave() -> bool:
        departure.begin("SIGTERM")
        publish(run, 2, folders[6])
        return False

    engine.events = {3: leave}
    assert worker.work() == 1 and engine.version == 1
    assert set(samples(run)["policy_version"]) == {1}


def test_a_version_that_cannot_be_loaded_ends_the_worker_with_its_error_and_the_next_one_mends_it(
    run: CampaignRun, worker: StandingWorker, engine: Publishes, folders: dict[int, Path]
) -> None:
    put(run_buffer(run), 1, version=1)
    torn = run_store(run).put_bytes(b"{ torn")
    engine.events = {3: lambda: publish(run, 2, folders[6], **{"config.json": torn})}
    with pytest.raises(Exception, match=r"config\.json"):
        worker.work()
    assert engine.version is None and run_buffer(run).produced(2).samples == 0
    publish(run, 3, folders[7])
    assert worker.work() == 1 and set(samples(run)["policy_version"]) == {3}


@pytest.mark.parametrize("leaves", [False, True])
def test_a_load_under_way_is_waited_for_unless_the_worker_has_no_time_left(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.02)
    departure, begun, ends = Departure(grace_seconds=0.1), threading.Event(), threading.Event()
    timer = threading.Timer(1.0, ends.set)

    def load() -> None:
        begun.set()
        ends.wait()

    with taking_newer(load, departure=departure):
        assert begun.wait(20)
        timer.start()
        if leaves:
            departure.begin("SIGTERM")
    assert ends.is_set() != leaves
    timer.join()


def test_the_newest_version_is_found_from_any_before(run: CampaignRun, folders: dict[int, Path]) -> None:
    store = run_store(run)
    for version in (2, 3):
        publish(run, version, folders[6])
    for held in (0, 2):
        found = newest_after(store, held)
        assert found is not None and found.version == 3
    assert newest_after(store, 3) is None


def test_another_lineage_is_never_sampled_with_the_weights_of_the_one_before(
    store_folder: Path, campaign: str, folders: dict[int, Path]
) -> None:
    """Versions of two lineages have the same numbers, and both are served by the same servers."""
    with recorded() as server:
        sglang = {
            "urls": [f"http://127.0.0.1:{server.server_address[1]}"], "device": "cpu", "cuda_graphs": False,
            "attention": "torch_native",
        }  # fmt: skip
        worker = standing(store_folder, campaign)
        for lineage, version in ((1, 5), (2, 6)):
            run = start_run(
                store_folder, campaign, folders[version], lineage=lineage, engine="sglang", sglang=sglang
            )
            put(run_buffer(run), 1, version=1)
            worker.look()
            assert worker.work() == 1
            assert len(server.state["updates"]) == lineage
