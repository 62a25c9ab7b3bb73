"""The stages of an iteration, run in this process on real servers: a lost Valkey, a liar, an early quota.

What these tests cannot see: the loss of the last second of an append-only file with its machine.
"""

import contextlib
import gc
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import SMALL

from tasks.archive import archive
from tasks.artifacts.store import PolicyStore
from tasks.buffer import assemble
from tasks.checkpoint import initialize
from tasks.config import CampaignConfig, with_overrides
from tasks.embedded.files import is_held
from tasks.engine.embedded import EmbeddedEngine
from tasks.environment_config import EnvironmentConfig
from tasks.evaluate import evaluate
from tasks.experience.errors import IterationDropped, WorkerBarred
from tasks.experience.records import Group
from tasks.prompts import offer_prompts
from tasks.records import CampaignRun, PolicyVersion, RolloutReport, TrainBatch
from tasks.reward import score
from tasks.rollout import rollout_worker
from tasks.schema import PromptFrame, SchemaViolation, from_bytes
from tasks.session import find_sealed, run_buffer, run_environment, run_store


@pytest.fixture
def run(tmp_path: Path, leave_servers: None) -> Iterator[CampaignRun]:
    config = with_overrides(
        CampaignConfig.model_validate(SMALL),
        checkpoint__store=str(tmp_path / "store"),
        buffer__capacity_mb=64,
    )
    yield CampaignRun(config=config, lineage=1, code_revision="test")


def generate(run: CampaignRun, version: PolicyVersion, *, iteration: int = 0) -> RolloutReport:
    """Offer the prompts and let one worker do what it may: two of four portions."""
    prompts = offer_prompts(run=run, iteration=iteration, behavior=version)
    return rollout_worker(worker=0, run=run, prompts=prompts, behavior=version)


def seal(run: CampaignRun, version: PolicyVersion, *, iteration: int = 0) -> TrainBatch:
    prompts = offer_prompts(run=run, iteration=iteration, behavior=version)
    scores = score(run=run, prompts=prompts, behavior=version, rollouts=[])
    return assemble(run=run, scores=scores, policy=version)


def kill_valkey(run: CampaignRun, *, loses_data: bool = False) -> None:
    folder = Path(run.config.checkpoint.store) / "valkey"
    run_buffer(run)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_server = (entry / "exe").readlink().name == "valkey-server"
            if is_server and (entry / "cwd").readlink().is_relative_to(folder):
                os.kill(int(entry.name), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_held(folder / "alive.lock"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if loses_data:
        shutil.rmtree(folder / "data")


def without_time(batch: TrainBatch) -> dict:
    return batch.model_dump(exclude={"seconds", "sealed_at", "workers"})


@pytest.fixture(scope="module")
def control(store_folder: Path) -> TrainBatch:
    """The first iteration's batch, undisturbed, in the session's store."""
    config = with_overrides(CampaignConfig.model_validate(SMALL), checkpoint__store=str(store_folder))
    calm = CampaignRun(config=config, lineage=1, code_revision="test")
    version = initialize(run=calm)
    generate(calm, version)
    generate(calm, version)
    return seal(calm, version)


def same_samples(one: TrainBatch, other: TrainBatch) -> bool:
    names = ("num_samples", "produced", "rejected", "sha256")  # keys differ: they carry the store's digest
    return all(getattr(one, name) == getattr(other, name) for name in names)


def test_a_response_that_may_leave_the_policys_context_is_refused_before_it_is_sampled(
    run: CampaignRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions behind it were sampled and trained like any others, and mean nothing."""
    version = initialize(run=run)
    long = with_overrides(run.config, rollout__max_new_tokens=4090)  # of 4,096, and the prompt has a few
    run = run.model_copy(update={"config": long})
    refusal = r"fit into the policy's 4,096 positions, got prompt \S+ of \d+ tokens and .*=4,090.*--fresh"
    with pytest.raises(ValueError, match=refusal):
        offer_prompts(run=run, iteration=0, behavior=version)
    monkeypatch.delattr("tasks.engine.evaluation.make_engine")  # a server would have been started for it
    with pytest.raises(ValueError, match=refusal):
        evaluate(run=run, policy=version)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_prompt_file_with_a_row_too_long_is_refused_before_a_lineage_holds_it(
    run: CampaignRun, tmp_path: Path, is_mixed: bool
) -> None:
    """It ended the campaign at the iteration that came to it, when the environment could not be changed."""
    texts = [*map(str, range(20)), "1" * 4090]  # of 4,096 positions
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{t}", "answer": "1"}}\n' for t in texts))
    files = {"name": "prompt_files", "held_out": 2, "prompt_files": {"path": str(tmp_path / "rows.jsonl")}}
    part = {"environment": files, "weight": 1.0}
    environment = EnvironmentConfig.model_validate({"mix": [part, part]} if is_mixed else files)
    run = run.model_copy(update={"config": run.config.model_copy(update={"environment": environment})})
    with pytest.raises(ValueError, match=r"got prompt \S*any-20 of 4,09\d tokens"):
        initialize(run=run)
    assert run_store(run).head() is None
    short = with_overrides(run.config, rollout__max_new_tokens=1)  # 2 of the template, 4,090, 1
    assert initialize(run=run.model_copy(update={"config": short})).version == 0


def test_two_prompts_of_one_id_are_refused_wherever_they_are_in_an_iteration(
    run: CampaignRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them was left out, and the iteration trained fewer groups than were asked for."""
    version, environment = initialize(run=run), run_environment(run)
    last = run.config.rollout.prompts_offered - 1  # in another portion than the first
    twice = environment.train_prompt
    monkeypatch.setattr(environment, "train_prompt", lambda position: twice(position % last))
    monkeypatch.setattr("tasks.prompts.run_environment", lambda run: environment)
    with pytest.raises(SchemaViolation, match=rf"prompt_id: .*rows \[0, {last}\]"):
        offer_prompts(run=run, iteration=0, behavior=version)


def test_a_server_that_comes_back_with_its_log_costs_nothing(run: CampaignRun, control: TrainBatch) -> None:
    version = initialize(run=run)
    first = generate(run, version)
    kill_valkey(run)
    second = generate(run, version)
    assert (first.num_portions, second.num_portions) == (2, 2) and run_buffer(run).outstanding(0) == 0
    kill_valkey(run)
    batch = seal(run, version)
    assert run_buffer(run).produced(0).duplicates == 0 and same_samples(batch, control)
    assert first.num_tokens + second.num_tokens == batch.metrics["generated_tokens"]


def test_a_lost_server_costs_only_what_was_not_sealed(run: CampaignRun, control: TrainBatch) -> None:
    version = initialize(run=run)
    generate(run, version)
    kill_valkey(run, loses_data=True)  # two portions are gone
    again = [generate(run, version) for _ in range(2)]
    assert [report.num_portions for report in again] == [2, 2]
    batch = seal(run, version)
    assert same_samples(batch, control)
    kill_valkey(run, loses_data=True)  # after sealing
    assert generate(run, version).num_portions == 0
    assert without_time(seal(run, version)) == without_time(batch)
    kept = archive(run=run, batch=batch, policy=version)
    assert kept.num_samples == batch.num_samples and run_store(run).find_object(kept.key)


def test_the_archive_holds_every_produced_sample(run: CampaignRun) -> None:
    version = initialize(run=run)
    generate(run, version)
    generate(run, version)
    batch = seal(run, version)
    kept = archive(run=run, batch=batch, policy=version)
    assert kept.num_samples == batch.produced == batch.num_samples + sum(batch.rejected.values())
    assert archive(run=run, batch=batch, policy=version) == kept


def test_of_two_that_seal_or_evaluate_at_once_the_first_stands(
    run: CampaignRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry beside its predecessor, or the same command twice: they differ in the seconds they took."""
    version = initialize(run=run)
    generate(run, version)
    generate(run, version)
    batch, scored = seal(run, version), evaluate(run=run, policy=version)
    looks: list[object] = []

    def find_nothing_at_first(*arguments: object) -> TrainBatch | None:
        looks.append(arguments)
        return None if len(looks) == 1 else find_sealed(run, 0)

    monkeypatch.setattr("tasks.buffer.find_sealed", find_nothing_at_first)
    assert seal(run, version) == batch and len(looks) == 2
    find = PolicyStore.find_object
    monkeypatch.setattr(
        PolicyStore,
        "find_object",
        lambda store, key: None if key.startswith("evaluations/") else find(store, key),
    )
    monkeypatch.setattr(PolicyStore, "get_object", find)
    assert evaluate(run=run, policy=version) == scored


def test_scoring_samples_with_the_collector_kept_from_old_objects(
    run: CampaignRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, counts, generate = initialize(run=run), [], EmbeddedEngine.generate
    monkeypatch.setattr(
        EmbeddedEngine,
        "generate",
        lambda engine, *request: counts.append(gc.get_freeze_count()) or generate(engine, *request),
    )
    old = len(gc.get_objects())
    evaluate(run=run, policy=version)
    assert len(counts) == 2 and min(counts) > 0.9 * old
    assert gc.get_freeze_count() == 0


def test_a_second_attempt_at_scoring_waits_for_what_the_first_one_holds(
    run: CampaignRun, control: TrainBatch
) -> None:
    """It would seal what is scored so far: the rest, of which nobody knows, would be lost without a word."""
    version = initialize(run=run)
    generate(run, version)
    generate(run, version)
    held = run_buffer(run).take_rollouts("score", iteration=0, max_groups=20)
    assert len(held) == 20  # of 48, by an attempt that was killed with them
    assert same_samples(seal(run, version), control)


def test_samples_that_another_run_set_aside_are_missed_before_anything_is_made_of_them(
    run: CampaignRun,
) -> None:
    version = initialize(run=run)
    generate(run, version)
    prompts = offer_prompts(run=run, iteration=0, behavior=version)
    run_buffer(run).drop(0)
    with pytest.raises(RuntimeError, match="another run of the campaign, with another configuration"):
        score(run=run, prompts=prompts, behavior=version, rollouts=[])
    with pytest.raises(IterationDropped, match="or another run of the campaign set it aside"):
        generate(run, version)


def test_a_worker_that_publishes_garbage_is_named_and_its_work_redone(
    run: CampaignRun, control: TrainBatch
) -> None:
    version = initialize(run=run)
    prompts = offer_prompts(run=run, iteration=0, behavior=version)
    buffer = run_buffer(run)
    (lease,) = buffer.lease("liar", iteration=0)
    names = from_bytes(lease.item.payload, schema=PromptFrame)["prompt_id"].to_list()
    buffer.publish(lease, [Group(group_id=name, num_samples=8, payload=b"garbage") for name in names])
    assert buffer.settle(lease)
    for _ in range(2):
        generate(run, version)
    with pytest.raises(RuntimeError, match="got 1 of 4: workers were lost or barred"):
        score(run=run, prompts=prompts, behavior=version, rollouts=[])
    assert list(buffer.barred()) == ["liar"]
    with pytest.raises(WorkerBarred, match="ComputeError"):
        buffer.lease("liar", iteration=0)
    assert generate(run, version).num_portions == 1
    batch = seal(run, version)
    assert batch.sha256 == control.sha256, "the same samples as without the liar"
    assert batch.rejected["refused"] == 96 and batch.produced == control.produced + 96
    assert batch.produced == batch.num_samples + sum(batch.rejected.values())


def test_over_sampling_ends_an_iteration_at_its_quota_and_counts_the_rest(
    tmp_path: Path, leave_servers: None
) -> None:
    rollout = SMALL["rollout"] | {"oversample": 0.5, "max_portions_per_worker": 0, "batch_size": 80}
    config = CampaignConfig.model_validate(SMALL | {"rollout": rollout})
    run = CampaignRun(
        config=with_overrides(config, checkpoint__store=str(tmp_path / "store")),
        lineage=1,
        code_revision="test",
    )
    version = initialize(run=run)
    prompts = offer_prompts(run=run, iteration=0, behavior=version)
    assert (prompts.num_groups, prompts.num_portions, prompts.num_samples) == (72, 6, 576)
    report = rollout_worker(worker=0, run=run, prompts=prompts, behavior=version)
    # chunks of 10 and 2 groups: 10, 12, 22, 24, 34, 36, 46, 48 of 72, and the quota of 48 is met
    assert report.num_samples == 384 and run_buffer(run).progress(0).left == 3
    scores = score(run=run, prompts=prompts, behavior=version, rollouts=[report])
    batch = assemble(run=run, scores=scores, policy=version)
    assert (batch.offered, batch.produced) == (576, 384)
    assert batch.produced == batch.num_samples + sum(batch.rejected.values())
    assert list(batch.workers) == [report.worker] and batch.workers[report.worker].tokens == report.num_tokens
