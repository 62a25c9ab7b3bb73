"""A training told to stop keeps what it has done; the next attempt ends with the bits of an undisturbed one.

    torchrun --nproc-per-node 2 tests/test_preemption.py JOB.json ANSWER.json

is what the slow test starts; the others fork their ranks from a server that has imported what they need and
has no threads, as a process that has used polars has. The store, the ranks'
exchange and the signals are real. What this cannot see: a node that loses its power.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.multiprocessing as mp
from jobs import Job, train_job, write_job
from test_faults import CONFIG, train_rows, trainee
from test_update import ROOT, TINY, train_batch

from tasks.artifacts.manifest import Manifest
from tasks.artifacts.unfinished import unfinished_updates
from tasks.checkpoint import publish
from tasks.config import CampaignConfig
from tasks.elastic import RANK_SERVER
from tasks.policy.step.trainer import Learner
from tasks.policy.training.epoch import Position, train
from tasks.policy.training.resume import seed_generators
from tasks.records import CampaignRun, Candidate
from tasks.session import run_store

TIMED = "slow_rank/"
NUM_STEPS = 8
"""Two epochs over four mini-batches."""
ALGORITHM = {"num_epochs": 2, "correction": {"proximal": "recomputed", "weight": "truncate", "high": 5.0}}


@pytest.fixture(scope="module")
def job(store_folder: Path) -> Job:
    """An update of a policy of bfloat16 weights, of which float32 masters are trained."""
    return make_job("stop", store_folder, ALGORITHM, minibatches=4)


def make_job(name: str, store_folder: Path, algorithm: dict[str, Any], *, minibatches: int) -> Job:
    from tasks.policy.checkpoint.initial import initial_manifest

    config = CampaignConfig.model_validate({
        "name": f"{name}-{os.getpid()}", "model": {"random": TINY, "dtype": "bfloat16"},
        "algorithm": algorithm, "checkpoint": {"store": str(store_folder)},
    })  # fmt: skip
    run = CampaignRun(config=config, lineage=1, code_revision="r" * 40)
    store = run_store(run)
    policy = store.commit(initial_manifest(store, run))
    return run, train_batch(run, 0, policy.version, minibatches=minibatches), policy


def disturbed(place: int, do: Callable[[int, Any], None], *, of: str = "epoch") -> None:
    """Call ``do(rank, stop)`` before the mini-batch at that place of an attempt: in the policy's pass, or in
    the critic's with "critic"."""
    module: Any = importlib.import_module(f"tasks.policy.training.{of}")
    original, calls = module.train_minibatch, iter(range(1000))

    def train_minibatch(learner: Learner, *args: Any, **kwargs: Any) -> dict[str, float]:
        if next(calls) == place:
            do(int(os.environ["RANK"]), learner.stop)
        return original(learner, *args, **kwargs)

    module.train_minibatch = train_minibatch


def rank_of(job: Job, rank: int, world_size: int, port: int, log: str, hurt: bytes, answer: str) -> None:
    """A rank of its own process."""
    torch.set_num_threads(1)
    sys.stdout = open(log, "a")  # noqa: SIM115  # pytest has put its own in the place of the parent's
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from tasks.policy.training.update import update

    cloudpickle.loads(hurt)()
    candidate = update(*job)
    if rank == 0:
        Path(answer).write_text(candidate.model_dump_json())


def attempt(job: Job, folder: Path, hurt: Callable[[], None] = lambda: None) -> tuple[list[int], str]:
    """Exit codes of the ranks and what they said; the candidate is in ``folder/candidate.json``."""
    world_size = job[0].config.train.world_size
    log, answer = folder / "log", folder / "candidate.json"
    log.unlink(missing_ok=True)
    answer.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    RANK_SERVER.start()
    context, harm = mp.get_context("forkserver"), cloudpickle.dumps(hurt)
    ranks = [
        context.Process(target=rank_of, args=(job, rank, world_size, port, str(log), harm, str(answer)))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0.1))
        if any(other.exitcode not in (None, 0) for other in ranks):
            deadline = min(deadline, time.monotonic() + 20)  # torchrun would end the others
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks], log.read_text()


def made(folder: Path) -> Manifest:
    candidate = Candidate.model_validate_json((folder / "candidate.json").read_text())
    return Manifest.model_validate_json(candidate.manifest_json)


def content(manifest: Manifest) -> dict[str, Any]:
    """Everything that must not depend on when an attempt was stopped."""
    return {
        "tensors": manifest.tensor_digest,
        "files": {name: file.sha256 for name, file in manifest.files.items()},
        "metrics": {name: v for name, v in manifest.metrics.items() if not name.startswith(TIMED)},
        "samples": manifest.num_samples,
        "critic": manifest.critic,
    }


def forget(job: Job) -> None:
    from tasks.artifacts.unfinished import drop_unfinished

    drop_unfinished(run_store(job[0]), 1)


@pytest.fixture(scope="module")
def undisturbed(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    codes, said = attempt(job, folder)
    assert codes == [0, 0], said
    found = content(made(folder))
    assert found["metrics"]["steps"] == NUM_STEPS and found["metrics"]["router/entropy"] > 0
    return found


def told_at(
    place: int, ranks: Sequence[int] = (1,), times: int = 1, *, of: str = "epoch"
) -> Callable[[], None]:
    """SIGTERM to some ranks before the mini-batch at that place of the attempt."""

    def tell(rank: int, _stop: Any) -> None:
        for _ in range(times if rank in ranks else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    return lambda: disturbed(place, tell, of=of)


def test_stopped_twice_in_the_middle_an_update_ends_with_the_same_bits(job, undisturbed, tmp_path):
    """One rank hears of the first signal, both of the second, which comes two times."""
    forget(job)
    codes, said = attempt(job, tmp_path, told_at(3))
    assert codes == [143, 143] and "stored the update after 3 mini-batches" in said, said
    codes, said = attempt(job, tmp_path, told_at(2, (0, 1), times=2))
    assert codes == [143, 143] and "goes on behind 3 mini-batches" in said, said
    assert "stored the update after 5 mini-batches" in said and not (tmp_path / "candidate.json").exists()
    codes, said = attempt(job, tmp_path)
    assert codes == [0, 0] and "goes on behind 5 mini-batches" in said, said
    assert content(made(tmp_path)) == undisturbed


@pytest.mark.slow
def test_stopped_while_it_stores_its_result_an_update_need_not_train_again(job, undisturbed, tmp_path):
    from tasks.policy.checkpoint import upload

    def tell() -> None:
        start = upload.ShardUpload.start

        def told(*args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            start(*args, **kwargs)

        upload.ShardUpload.start = told

    forget(job)
    codes, said = attempt(job, tmp_path, tell)
    assert codes == [143, 143] and f"after {NUM_STEPS} mini-batches" in said, said

    def refuse(_rank: int, _stop: Any) -> None:
        raise AssertionError("trained again")

    codes, said = attempt(job, tmp_path, lambda: disturbed(0, refuse))
    assert codes == [0, 0], said
    assert content(made(tmp_path)) == undisturbed


def killed_while_it_stores() -> None:
    """Rank 1 dies when rank 0 may have stored its shards already: there is no record yet."""
    from tasks.policy.checkpoint import upload

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    told_at(3)()
    if os.environ["RANK"] == "1":
        upload.ShardUpload._store_shard = die


def test_killed_while_it_stores_an_update_leaves_nothing_and_begins_anew(job, undisturbed, tmp_path):
    forget(job)
    codes, said = attempt(job, tmp_path, killed_while_it_stores)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, said
    assert not list(unfinished_updates(run_store(job[0]), 1))
    codes, said = attempt(job, tmp_path)
    assert codes == [0, 0] and "goes on behind" not in said, said
    assert content(made(tmp_path)) == undisturbed


def test_what_is_torn_or_of_another_update_is_ignored_with_its_reason(job, undisturbed, tmp_path):
    forget(job)
    run, store = job[0], run_store(job[0])
    codes, said = attempt(job, tmp_path, told_at(3))
    assert codes == [143, 143], said
    ((_key, update, _),) = unfinished_updates(store, 1)
    lost = next(file for name, file in update.files.items() if name.startswith("optimizer-00002"))
    store.bucket.delete(lost.key)
    client = store.bucket._client
    client.delete_object(Bucket=store.bucket.name, Key=lost.key, VersionId=lost.version_id)
    digest = lost.sha256
    (store.cache.folder / "sha256" / digest[:2] / digest).unlink(missing_ok=True)
    other = update.model_copy(update={"identity": update.identity.model_copy(update={"ranks": {"ep": 4}})})
    store.replace_object("unfinished/000000000001/aa.json", other.model_dump_json().encode())
    store.replace_object("unfinished/000000000001/bb.json", b"{")
    codes, said = attempt(job, tmp_path)
    assert codes == [0, 0] and content(made(tmp_path)) == undisturbed, said
    assert re.search(r"an unfinished update is ignored: file optimizer-00002\S+ must exist", said), said
    assert re.search(r"aa.json is ignored: its ranks is \{'ep': 4\}, this update's \{'world_size': 2", said)
    assert re.search(r"bb.json is ignored: it has 1 faults, such as Invalid JSON", said)
    manifest = made(tmp_path)
    version = publish.task_function(run, Candidate(manifest_json=manifest.model_dump_json()), None)
    assert version.version == 1 and not store.list_objects("unfinished/")


@pytest.mark.slow
def test_what_does_not_fit_into_the_grace_period_is_given_up_with_a_line(job, tmp_path):
    def slow() -> None:
        from tasks.policy.checkpoint import upload

        told_at(2, (0, 1))()
        upload.ShardUpload._store_shard = lambda *_: time.sleep(60)

    forget(job)
    config = job[0].config.train.model_copy(update={"grace_seconds": 3.0})
    run = job[0].model_copy(update={"config": job[0].config.model_copy(update={"train": config})})
    start = time.monotonic()
    codes, said = attempt((run, *job[1:]), tmp_path, slow)
    assert codes == [143, 143] and time.monotonic() - start < 60
    assert "must end 3 s after SIGTERM (train.grace_seconds), got no end" in said
    assert not list(unfinished_updates(run_store(run), 1))


class Stopped(Exception):
    """Instead of the ranks' agreement, where there is one process."""


def test_what_a_mini_batch_draws_depends_on_its_place_alone(job):
    """With dropout, a pass that goes on behind its second mini-batch takes an undisturbed one's steps."""
    run, ends = job[0], []
    for stops_at in (None, 2):
        torch.manual_seed(0)
        subject = trainee(None, limit=5)
        for module in subject.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        subject.model.train()
        reseeds: list[int] = []

        def reseed(place: int, stops_at: int | None = stops_at, reseeds: list[int] = reseeds) -> None:
            if place == stops_at and place not in reseeds:
                reseeds.append(place)
                raise Stopped
            seed_generators(run, 3, place)

        subject = replace(subject, reseed=reseed)
        position = Position()
        if stops_at is not None:
            with pytest.raises(Stopped):
                train(subject, train_rows(bad=set()), CONFIG, objective="clipped_policy", position=position)
            torch.rand(7)  # a process that starts again has drawn something else
        metrics = train(subject, train_rows(bad=set()), CONFIG, objective="clipped_policy", position=position)
        ends.append((metrics, [param.detach().clone() for param in subject.model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_told_to_stop_ends_its_ranks_with_their_work_stored(job, undisturbed, tmp_path):
    forget(job)
    paths = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    path, answer = tmp_path / "job.json", tmp_path / "candidate.json"
    write_job(job, path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = []
    for stop_at in ("3", "2", "none"):
        result = subprocess.run(
            [*command, __file__, str(path), str(answer), stop_at],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        said.append(result.stdout + result.stderr)
        assert (result.returncode == 0) == (stop_at == "none"), said[-1]  # torchrun ends with 1
    assert "stored the update after 3 mini-batches" in said[0]
    assert "stored the update after 5 mini-batches" in said[1]
    assert content(made(tmp_path)) == undisturbed


if __name__ == "__main__":

    def tell_torchrun(rank: int, stop: Any) -> None:
        if rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            while not stop.is_asked:
                time.sleep(0.01)

    if sys.argv[3] != "none":
        disturbed(int(sys.argv[3]), tell_torchrun)
    train_job(*sys.argv[1:3])
