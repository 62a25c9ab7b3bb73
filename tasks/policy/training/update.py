"""One policy update on all ranks: load version v, train on a sealed batch, store the shards of a candidate v
+ 1.

Every rank writes what it owns; nothing is gathered. The candidate becomes a version only when it is
published.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tasks.artifacts.manifest import DataCursor, Manifest
from tasks.artifacts.owned import checkpoint_of
from tasks.config import CampaignConfig
from tasks.policy.checkpoint.snapshot import HostArena
from tasks.policy.checkpoint.upload import ShardUpload, StoredShards, reserved_arena
from tasks.policy.parallel.fsdp import reshard_parameters
from tasks.policy.ranks.process_group import process_group
from tasks.policy.ranks.progress import Progress, Watchdog
from tasks.policy.ranks.stopping import exit_on_sigterm
from tasks.policy.step.offload import fetch_moments
from tasks.policy.step.trainer import agree_to_stop
from tasks.policy.training.beside import prepare, with_proximal
from tasks.policy.training.nonfinite import steps_taken
from tasks.policy.training.resident import Resident
from tasks.policy.training.resume import data_cursor, ledger_position, seed_generators
from tasks.policy.training.trainee import Trainee, make_trainee
from tasks.policy.training.unfinished import Attempt, Prepared, identity_of
from tasks.policy.training.workbench import Workbench
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.say import say
from tasks.schema import TrainFrame, from_bytes
from tasks.session import run_store

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def update(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Called on every rank of the elastic task; all ranks return the same candidate."""
    grace = run.config.train.grace_seconds
    with exit_on_sigterm(grace_seconds=grace) as stop, process_group(run.config):
        resident = Resident(stop)
        candidate = update_on_ranks(run, batch, policy, resident)
        resident.close()
        return candidate


def update_on_ranks(
    run: CampaignRun, batch: TrainBatch, policy: PolicyVersion, resident: Resident
) -> Candidate:
    """One update inside a process group; a trainer that stays finds in ``resident`` what it made before."""
    clock = _Clock(batch.sealed_at)
    config, store = run.config, run_store(run)
    progress, stop = Progress(), resident.stop
    with _watchdog(config, progress):
        seed_generators(run, batch.iteration)
        mesh = resident.make_mesh(config)
        clock.lap("start_up")
        progress.at("load")
        parent = store.manifest(policy)
        data = data_cursor(store, run, batch, parent)
        attempt = Attempt(store, identity_of(run, batch, policy), stop, mesh)
        is_held = resident.holds(parent, config) and attempt.left_of("policy") is None
        if not is_held:
            resident.let_go()
        checkpoint = checkpoint_of(store, policy)
        dispatcher, means = resident.open_dispatcher(config, checkpoint.folder)
        bench = Workbench(
            run=run, store=store, batch=batch, mesh=mesh, dispatcher=dispatcher, progress=progress
        )
        prepared = prepare(bench, attempt, read_batch(store, batch), parent, checkpoint)
        start = attempt.checkpoint("policy", checkpoint)
        resumes = parent.kind == "iteration" or attempt.left_of("policy") is not None
        trainee = make_trainee(bench, parent, start, resumes=resumes, stop=stop, held=resident.trainee)
        arena = resident.arena or reserved_arena(trainee.model, bench.stored_dtype)
        clock.lap("load")
        prepared = _with_proximal(bench, attempt, trainee, prepared)
        with stop.deferred():
            metrics, position = attempt.train(trainee, prepared, config, objective=batch.objective)
            clock.lap("train")
            stored = _stored(bench, trainee, arena, parent, clock)
            if agree_to_stop(stop, mesh, trainee.model.device):
                attempt.keep(
                    stored.files, stored.tensor_digest, prepared, position, trainee=trainee, metrics=metrics
                )
        resident.keep(trainee, arena, stored.files)
        checkpoint.release()
        manifest = _manifest(
            bench, parent, data, prepared, stored, metrics, means=means, seconds=clock.seconds
        )
        if dist.get_rank() == 0:
            _say(batch, metrics, clock, means, mesh=run.config.train.mesh)
            if config.train.backend == "nccl":
                say("libraries", means["libraries"])
    return Candidate(manifest_json=manifest.model_dump_json())


def read_batch(store: "PolicyStore", batch: TrainBatch) -> list[dict[str, Any]]:
    """The sealed rows, after checking that they are the bytes that were sealed."""
    payload = store.get_object(batch.key)
    if (got := hashlib.sha256(payload).hexdigest()) != batch.sha256:
        raise RuntimeError(
            f"batch {batch.key} must have sha256 {batch.sha256}, got {got}. It was changed; restore it."
        )
    return from_bytes(payload, schema=TrainFrame).rows(named=True)


def _with_proximal(bench: Workbench, attempt: Attempt, trainee: Trainee, prepared: Prepared) -> Prepared:
    """What the policy itself says of the batch before its first step."""
    if attempt.left_of("policy"):
        return prepared
    return replace(prepared, rows=with_proximal(bench, trainee.model, prepared.rows, trainee.routing))


def _stored(
    bench: Workbench, trainee: Trainee, arena: HostArena, parent: Manifest, clock: "_Clock"
) -> StoredShards:
    """Weights and optimizer state, stored on all ranks."""
    reshard_parameters(trainee.model)  # a batch without a step was read and not trained
    trainee.progress.at("upload")
    fetch_moments(trainee.optimizer)
    kept = bench.config.checkpoint
    how = {"full_every": kept.full_every, "whole_beside": kept.whole_beside}
    with ShardUpload(bench.store, bench.mesh, arena, **how) as upload:
        upload.start(trainee.model, trainee.optimizer, parent.files, dtype=bench.stored_dtype)
        clock.lap("snapshot")
        stored = upload.finish()
    clock.lap("upload")
    return stored


def _manifest(
    bench: Workbench,
    parent: Manifest,
    data: DataCursor,
    prepared: Prepared,
    stored: StoredShards,
    metrics: Mapping[str, float],
    *,
    means: dict[str, str],
    seconds: Mapping[str, float],
) -> Manifest:
    """The candidate, and all that it was made of."""
    run, batch = bench.run, bench.batch
    trained = {name: value for name, value in metrics.items() if name != "samples"}
    return Manifest(
        campaign=run.campaign,
        version=parent.version + 1,
        parent=parent.version,
        kind="warm_start" if batch.objective == "supervised" else "iteration",
        iteration=batch.iteration + 1,
        files=stored.files,
        tensor_digest=stored.tensor_digest,
        config_digest=run.config.digest(),
        code_revision=run.code_revision,
        batch=batch.key,
        critic=prepared.critic,
        num_samples=int(metrics["samples"]),
        metrics={**batch.metrics, **prepared.critic_metrics, **trained},
        means=means,
        seconds={**batch.seconds, **seconds},
        waiting=batch.waiting,
        data=data,
        ledger=ledger_position(batch),
    )


@contextlib.contextmanager
def _watchdog(config: CampaignConfig, progress: Progress) -> Iterator[None]:
    """Rank 0 says which rank stands still, before the collective's deadline ends the run."""
    watchdog = Watchdog(
        dist.distributed_c10d._get_default_store(),
        progress,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        deadline=config.train.stuck_after_seconds,
        report=partial(say, "watchdog"),
    )
    with watchdog:
        yield


class _Clock:
    """Seconds between laps; the first lap counts from when the batch was sealed."""

    def __init__(self, started_at: float):
        self.last = started_at
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self.last
        self.last = now


def _say(
    batch: TrainBatch, metrics: dict[str, float], clock: _Clock, means: dict[str, str], *, mesh: str
) -> None:
    text = f"{steps_taken(metrics)}, loss {metrics.get('policy_loss', math.nan):.4f}, "
    if batch.objective == "clipped_policy" and "kl_k3" in metrics:
        text += f"KL {metrics['kl_k3']:.4f}, entropy {metrics['entropy']:.3f}, "
        text += f"clipped {metrics['clip_share']:.1%}, "
    if "mismatch/k3" in metrics:
        text += f"engine k3 {metrics['mismatch/k3']:.4f}, largest {metrics['mismatch/max']:.3f}, "
    for name, times in metrics.items():
        if name.startswith("slow_rank/"):
            text += f"rank {name.removeprefix('slow_rank/')} worked {times:.1f} times the median, "
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in clock.seconds.items())
    fast = [kernel for kernel in means["kernels"].split(", ") if not kernel.endswith(" torch")]
    used = f"{mesh}; {means['dispatcher']}; kernels: {', '.join(fast) or 'torch'}"  # the version names all
    say("train", f"{text}seconds: {seconds}; {used}", iteration=batch.iteration)
