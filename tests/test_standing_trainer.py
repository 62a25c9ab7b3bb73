"""A trainer that stays: what it makes, what it keeps in memory, how it fails.

    torchrun --nproc-per-node 1 tests/test_standing_trainer.py RUN.json

makes the same versions with a trainer of one update each, one after the other in one process; with the
numbers of updates whose batch is empty, with one trainer that stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from ranks import run_ranks
from test_update import ROOT, TINY, train_batch

from tasks.artifacts.manifest import Blob, Manifest
from tasks.config import CampaignConfig
from tasks.policy.ranks.progress import Progress
from tasks.policy.ranks.pulse import PULSE
from tasks.policy.training.request import REQUEST, UpdateRequest, await_candidate, await_request
from tasks.records import CampaignRun, TrainBatch
from tasks.session import code_revision, open_store, run_store

SINGLE = {"topology": "single_1x1", "ep": 1, "dispatcher": "local"}
NUM_UPDATES = 3


def make_run(folder: Path, train: dict[str, Any], **config: Any) -> CampaignRun:
    """A run with version 0 published."""
    from tasks.policy.checkpoint.initial import initial_manifest

    # the last of three updates has another learning rate
    named = {
        "name": "stays",
        "schedule": {"iterations": NUM_UPDATES},
        "model": {"random": TINY},
        "checkpoint": {"store": str(folder)},
    }
    settings = {"pool": "standing", "standing_timeout_seconds": 400, **train}
    run = CampaignRun(
        config=CampaignConfig.model_validate({**named, "train": settings, **config}),
        lineage=1,
        code_revision=code_revision(),
    )
    store = run_store(run)
    store.commit(initial_manifest(store, run))
    return run


def torchrun(run: CampaignRun, *arguments: str) -> subprocess.Popen[str]:
    ranks = str(run.config.train.world_size)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    paths = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def start_trainer(run: CampaignRun, folder: Path) -> subprocess.Popen[str]:
    file = folder / "campaign.json"  # JSON is YAML
    file.write_text(run.config.model_dump_json())
    return torchrun(run, "-m", "tasks.policy.standing", "--config", str(file))


def in_one_process(run: CampaignRun, folder: Path, *empty: str) -> list[str]:
    """Tensor digests of the versions that the program below makes."""
    job = folder / "run.json"
    job.write_text(run.model_dump_json())
    process = torchrun(run, __file__, str(job), *empty)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-6000:]
    return [run_store(run).manifest(number).tensor_digest for number in range(NUM_UPDATES + 1)]


@pytest.mark.usefixtures("leave_servers")
@pytest.mark.parametrize(
    "train", [SINGLE, pytest.param({}, marks=pytest.mark.slow)], ids=["1 rank", "2 ranks"]
)
def test_a_standing_trainer_makes_the_same_versions_and_reads_no_weights_back(train, tmp_path):
    run = make_run(tmp_path / "standing", train)
    store, trainer, digests = run_store(run), start_trainer(run, tmp_path), []
    try:
        for iteration in range(NUM_UPDATES):
            policy = store.reference(iteration)
            candidate = await_candidate(run, train_batch(run, iteration, policy.version), policy)
            store.commit(Manifest.model_validate_json(candidate.manifest_json))
            digests.append(store.manifest(iteration + 1).tensor_digest)
    finally:
        trainer.terminate()
        output, _ = trainer.communicate(timeout=60)
    print(output)
    assert len(set(digests)) == NUM_UPDATES
    (tmp_path / "again").mkdir()
    other = make_run(tmp_path / "again/store", train)
    assert in_one_process(other, tmp_path / "again")[1:] == digests
    pulled = {path.name[:12]: path for path in (tmp_path / "standing/cache" / run.campaign).iterdir()}
    with_weights = [int(number) for number, path in pulled.items() if list(path.glob("*.safetensors"))]
    assert with_weights == [0] and len(pulled) == NUM_UPDATES, "version 0 is loaded, the others are in memory"


def empty_batch(run: CampaignRun, iteration: int) -> TrainBatch:
    from tasks.schema import TrainFrame, make_frame, to_bytes

    payload = to_bytes(make_frame([], TrainFrame))
    run_store(run).put_object("batches/empty.arrow", payload)
    changes = {"key": "batches/empty.arrow", "sha256": hashlib.sha256(payload).hexdigest(), "num_samples": 0}
    return train_batch(run, iteration, iteration).model_copy(update=changes)


@pytest.mark.slow
@pytest.mark.usefixtures("leave_servers")
def test_an_empty_batch_leaves_a_fully_sharded_policy_as_it_is(tmp_path):
    """A pass that only reads leaves FSDP's gathered parameters in place, to which no moments belong."""
    correction = {"proximal": "recomputed", "weight": "truncate", "high": 2.0}
    train = {**SINGLE, "compute_dtype": "bfloat16", "freeze_router": True}
    run = make_run(tmp_path / "store", train, algorithm={"correction": correction})
    _, first, second, third = in_one_process(run, tmp_path, "1")
    assert first == second != third


@pytest.mark.usefixtures("leave_servers")
def test_a_failed_update_is_the_answer_and_ends_the_trainer(tmp_path):
    run = make_run(tmp_path / "store", SINGLE)
    batch = train_batch(run, 0, 0).model_copy(update={"sha256": "0" * 64})
    trainer = start_trainer(run, tmp_path)
    try:
        with pytest.raises(RuntimeError, match=r"rank 0: batch .* must have sha256 0{64}.*It was changed"):
            await_candidate(run, batch, run_store(run).reference(0))
        assert trainer.wait(timeout=60) != 0
    finally:
        trainer.kill()
    head = run_store(run).head()
    assert head is not None and head.version == 0, "nothing is published"


@pytest.mark.usefixtures("leave_servers")
def test_without_a_trainer_the_update_stage_says_that_it_waits_and_how_to_start_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tasks.policy.training.request.SAY_SECONDS", 0.1)
    run = make_run(tmp_path / "store", {**SINGLE, "standing_timeout_seconds": 0.3})
    batch, policy = train_batch(run, 0, 0), run_store(run).reference(0)
    with pytest.raises(
        RuntimeError, match=r"within train.standing_timeout_seconds=0.3, .*version 0.*torchrun"
    ):
        await_candidate(run, batch, policy)
    assert "waits for a standing trainer since" in capsys.readouterr().out
    root = open_store(run.config, "stays")
    first = UpdateRequest.model_validate_json(root.get_object(REQUEST))
    assert (first.run, first.batch, first.policy) == (run, batch, policy)
    with pytest.raises(RuntimeError):
        await_candidate(run, batch, policy)
    again = UpdateRequest.model_validate_json(root.get_object(REQUEST))
    assert again.token != first.token and REQUEST == "update.json"


@pytest.mark.usefixtures("leave_servers")
def test_a_trainer_of_other_code_answers_so_at_once_and_serves_the_next_campaign(tmp_path):
    run = make_run(tmp_path / "store", SINGLE)
    root, pulse = open_store(run.config, "stays"), tmp_path / "pulse"
    found: list[UpdateRequest] = []
    PULSE.path = pulse
    trainer = Thread(target=lambda: found.append(await_request(run.config, root, after="", is_speaker=True)))
    trainer.start()
    try:
        other = run.model_copy(update={"code_revision": "9d8ca4c+0123456789ab"})
        with pytest.raises(RuntimeError, match=r"must run its code, 9d8ca4c\+0123456789ab, got .*\+"):
            await_candidate(other, train_batch(run, 0, 0), run_store(run).reference(0))
        assert trainer.is_alive() and pulse.exists(), "it waits on, and a probe sees that it does"
        asked = UpdateRequest(
            run=run, batch=train_batch(run, 0, 0), policy=run_store(run).reference(0), token="t"
        )
        root.replace_object(REQUEST, asked.model_dump_json().encode())
        trainer.join(timeout=30)
    finally:
        PULSE.path = None
    assert found == [asked]


def test_progress_beats_the_pulse(tmp_path, monkeypatch):
    monkeypatch.setattr(PULSE, "path", tmp_path / "pulse")
    progress = Progress()
    assert not (tmp_path / "pulse").exists()
    progress.at("load")
    os.utime(tmp_path / "pulse", (0, 0))
    progress.at("train", 1)
    assert (tmp_path / "pulse").stat().st_mtime > 1e9


@dataclass
class Held:
    """Of a trainee, that it is there."""


def test_memory_counts_only_as_the_version_that_was_stored_from_it():
    from tasks.policy.training.resident import Resident

    def manifest(files: dict[str, Blob], kind: str = "iteration") -> Manifest:
        return Manifest.model_construct(files=files, kind=kind)

    config, other = CampaignConfig(), CampaignConfig(seed=1)
    ours, theirs = ({"m": Blob(sha256=c * 64, size=1, key="k", version_id="v")} for c in "ab")
    resident = Resident()
    resident._config = config.digest()
    assert not resident.holds(manifest({}), config), "nothing is in memory"
    resident.keep(Held(), Held(), ours)  # type: ignore[arg-type]
    assert resident.holds(manifest(ours), config)
    assert not resident.holds(manifest(theirs), config), "another trainer published this version"
    assert not resident.holds(manifest(ours, "warm_start"), config), "its successor has a new optimizer"
    assert not resident.holds(manifest(ours), other)
    resident.let_go()
    assert not resident.holds(manifest({}), config)


def check_agreement(rank: int, world_size: int) -> None:
    from tasks.policy.training.resident import Resident

    config = CampaignConfig.model_validate({"train": {"topology": "laptop_1x2"}})
    known = [{"m": Blob(sha256="a" * 64, size=1, key="k", version_id=v)} for v in "vw"]
    parent = Manifest.model_construct(files=known[0], kind="iteration")
    for mine, expected in (known[0], True), (known[rank], False), (known[1], False):
        resident = Resident()
        resident.make_mesh(config)
        resident._config = config.digest()
        resident.keep(Held(), Held(), mine)  # type: ignore[arg-type]
        assert resident.holds(parent, config) == expected, (rank, mine)


def test_all_ranks_load_when_one_does_not_hold_the_version():
    """The bytes are the same; one rank knows them as another version of the object."""
    run_ranks(check_agreement, 2)


if __name__ == "__main__":
    from tasks.policy.ranks.process_group import process_group
    from tasks.policy.training.resident import Resident
    from tasks.policy.training.update import update_on_ranks

    job = CampaignRun.model_validate_json(Path(sys.argv[1]).read_text())
    where, empty = run_store(job), {int(number) for number in sys.argv[2:]}
    stays = Resident()
    with process_group(job.config):
        for number in range(NUM_UPDATES):
            sealed = empty_batch(job, number) if number in empty else train_batch(job, number, number)
            keeps = stays if empty else Resident()
            made = update_on_ranks(job, sealed, where.reference(number), keeps)
            where.commit(Manifest.model_validate(json.loads(made.manifest_json)))
