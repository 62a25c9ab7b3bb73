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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import AdamW
from transformers import PreTrainedModel

from tasks.artifacts.manifest import Manifest, StoredFile
from tasks.config import CampaignConfig
from tasks.policy import weights
from tasks.policy.beside import Bench, prepare, with_proximal
from tasks.policy.context import split_context
from tasks.policy.dispatch import Dispatcher
from tasks.policy.epoch import Trainee
from tasks.policy.fsdp import is_fully_sharded, reshard_parameters
from tasks.policy.mesh import ParallelMesh
from tasks.policy.model import Head, load_policy
from tasks.policy.nonfinite import NonFiniteSteps
from tasks.policy.norms import use_fused_norms
from tasks.policy.offload import fetch_moments, offload_moments, put_moments_away
from tasks.policy.packed import require_packable
from tasks.policy.parallel import distribute
from tasks.policy.process_group import device_of, process_group
from tasks.policy.progress import Progress, Watchdog
from tasks.policy.recompute import checkpoint_activations
from tasks.policy.resident import Resident
from tasks.policy.resume import data_cursor, ledger_position, seed_generators
from tasks.policy.rotary import use_fused_rotary
from tasks.policy.router import RouterBalance, freeze_routers
from tasks.policy.router_bias import RouterBias
from tasks.policy.routing import Routing
from tasks.policy.snapshot import HostArena
from tasks.policy.stopping import exit_on_sigterm
from tasks.policy.trainer import agree_to_stop, make_optimizer
from tasks.policy.unfinished import Attempt, Prepared, identity_of
from tasks.policy.upload import ShardUpload, StoredShards, reserved_arena, store_shards
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.schema import TrainFrame, from_bytes
from tasks.session import WEIGHTS, run_store, say

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
        attempt = Attempt(store, identity_of(run, batch, policy), stop)
        is_held = resident.holds(parent, config) and attempt.left_of("policy") is None
        if not is_held:
            resident.let_go()
        folder = store.pull(policy, without=WEIGHTS if is_held else "")
        dispatcher, means = resident.open_dispatcher(config, folder)
        bench = _bench(run, store, batch, mesh, dispatcher, progress)
        prepared = prepare(bench, attempt, read_batch(store, batch), parent, folder)
        trainee = _trainee(bench, parent, attempt, dispatcher, progress, folder, resident.trainee)
        arena = resident.arena or reserved_arena(trainee.model, getattr(torch, config.model.dtype))
        clock.lap("load")
        prepared = _with_proximal(bench, attempt, trainee, prepared)
        with stop.deferred():
            metrics, position = attempt.train(trainee, prepared, config, objective=batch.objective)
            clock.lap("train")
            stored = _stored(store, trainee, arena, parent, config, clock)
            if agree_to_stop(stop, mesh, trainee.model.device):
                attempt.keep(
                    stored.files, stored.tensor_digest, prepared, position, trainee=trainee, metrics=metrics
                )
        resident.keep(trainee, arena, stored.files)
        store.release(folder)
        manifest = Manifest(
            campaign=run.campaign,
            version=policy.version + 1,
            parent=policy.version,
            kind="warm_start" if batch.objective == "supervised" else "iteration",
            iteration=batch.iteration + 1,
            files=stored.files,
            tensor_digest=stored.tensor_digest,
            config_digest=config.digest(),
            code_revision=run.code_revision,
            batch=batch.key,
            critic=prepared.critic,
            num_samples=int(metrics.pop("samples")),
            metrics={**batch.metrics, **prepared.critic_metrics, **metrics},
            means=means,
            seconds={**batch.seconds, **clock.seconds},
            waiting=batch.waiting,
            data=data_cursor(run, batch, parent),
            ledger=ledger_position(batch),
        )
        if dist.get_rank() == 0:
            _say(batch, metrics, clock, means)
            if config.train.backend == "nccl":
                say("libraries", means["libraries"])
    return Candidate(manifest_json=manifest.model_dump_json())


def learning_rate(config: CampaignConfig, iteration: int) -> float:
    """Constant for the first half of the campaign's iterations, then linear to the final share."""
    last = max(config.schedule.iterations - 1, 1)
    decayed = min(max(2 * iteration / last - 1, 0.0), 1.0)
    return config.train.learning_rate * (1 - decayed * (1 - config.train.final_learning_rate_share))


def read_batch(store: "PolicyStore", batch: TrainBatch) -> list[dict[str, Any]]:
    """The sealed rows, after checking that they are the bytes that were sealed."""
    payload = store.get_object(batch.key)
    if (got := hashlib.sha256(payload).hexdigest()) != batch.sha256:
        raise RuntimeError(
            f"batch {batch.key} must have sha256 {batch.sha256}, got {got}. It was changed; restore it."
        )
    return from_bytes(payload, schema=TrainFrame).rows(named=True)


def _with_proximal(bench: Bench, attempt: Attempt, trainee: Trainee, prepared: Prepared) -> Prepared:
    """What the policy itself says of the batch before its first step."""
    if attempt.left_of("policy"):
        return prepared
    return replace(prepared, rows=with_proximal(bench, trainee.model, prepared.rows, trainee.routing))


def _trainee(
    bench: Bench,
    parent: Manifest,
    attempt: Attempt,
    dispatcher: Dispatcher,
    progress: Progress,
    folder: Path,
    held: Trainee | None,
) -> Trainee:
    """The policy of ``folder`` or as a stopped attempt left it, its optimizer and what watches over both, as
    the configuration asks; ``held`` is what memory has of the first two."""
    config, mesh, batch = bench.run.config, bench.mesh, bench.batch
    progress.at("load")
    nonfinite = NonFiniteSteps(
        bench.store,
        iteration=batch.iteration + 1,
        rank=mesh.rank,
        limit=config.train.max_nonfinite_steps,
        in_a_row=int(parent.metrics.get("nonfinite_in_a_row", 0)),
    )
    reseed = partial(seed_generators, bench.run, batch.iteration)
    if held is not None:
        for group in held.optimizer.param_groups:
            group["lr"] = learning_rate(config, batch.iteration)
        if config.train.offload_optimizer:
            put_moments_away(held.optimizer)
        return replace(held, progress=progress, nonfinite=nonfinite, stop=attempt.stop, reseed=reseed)
    folder = attempt.folder("policy", folder)
    model = _load(folder, dispatcher, config, mesh)
    routing = Routing(model, replay=config.train.replay_routing, cp_group=mesh.cp_group)
    balance = _adjust(model, config, mesh)
    rate = config.train.router_bias_rate
    resumes = parent.kind == "iteration" or attempt.left_of("policy") is not None
    return Trainee(
        model,
        _optimizer(model, folder, config, batch, resumes=resumes),
        mesh,
        progress=progress,
        nonfinite=nonfinite,
        balance=balance,
        bias=RouterBias(model, rate=rate) if rate else None,
        routing=routing,
        stop=attempt.stop,
        reseed=reseed,
    )


def _stored(
    store: "PolicyStore",
    trainee: Trainee,
    arena: HostArena,
    parent: Manifest,
    config: CampaignConfig,
    clock: "_Clock",
) -> StoredShards:
    """Weights and optimizer state, stored on all ranks."""
    reshard_parameters(trainee.model)  # a batch without a step was read and not trained
    trainee.progress.at("upload")
    fetch_moments(trainee.optimizer)
    kept = config.checkpoint
    how = {"full_every": kept.full_every, "whole_beside": kept.whole_beside}
    with ShardUpload(store, trainee.mesh, arena, **how) as upload:
        dtype = getattr(torch, config.model.dtype)
        upload.start(trainee.model, trainee.optimizer, parent.files, dtype=dtype)
        clock.lap("snapshot")
        stored = upload.finish()
    clock.lap("upload")
    return stored


def _load(
    folder: Path, dispatcher: Dispatcher, config: CampaignConfig, mesh: ParallelMesh, *, head: Head = "tokens"
) -> PreTrainedModel:
    """The policy to train, or a model beside it, on this rank's device."""
    return load_policy(
        folder,
        dispatcher=dispatcher,
        device=device_of(config),
        expert_kernel=config.train.expert_kernel,
        prepare=partial(distribute, mesh=mesh, compute_dtype=getattr(torch, config.train.compute_dtype)),
        head=head,
    ).train()


def _bench(
    run: CampaignRun,
    store: "PolicyStore",
    batch: TrainBatch,
    mesh: ParallelMesh,
    dispatcher: Dispatcher,
    progress: Progress,
) -> Bench:
    """For the models beside the policy: loaded, optimised and stored as it is."""
    config = run.config

    def load(folder: Path, *, head: Head = "tokens") -> PreTrainedModel:
        return _load(folder, dispatcher, config, mesh, head=head)

    def save(
        critics: "PolicyStore", model: PreTrainedModel, optimizer: AdamW, files: Mapping[str, StoredFile]
    ) -> tuple[dict[str, StoredFile], str]:
        reshard_parameters(model)  # as for the policy
        return store_shards(critics, model, optimizer, mesh, files, dtype=getattr(torch, config.model.dtype))

    return Bench(
        run=run,
        store=store,
        batch=batch,
        mesh=mesh,
        progress=progress,
        load=load,
        optimizer=partial(_adamw, config),
        save=save,
    )


def _adjust(model: PreTrainedModel, config: CampaignConfig, mesh: ParallelMesh) -> RouterBalance | None:
    """What the configuration asks of the model beside its weights; the auxiliary loss if it is on."""
    train = config.train
    if train.freeze_router:
        freeze_routers(model)
    if train.norm_kernel == "fused":
        use_fused_norms(model)  # before recomputation, which wraps the forward it finds
    if train.rotary_kernel == "fused":
        use_fused_rotary(model)  # likewise
    if train.activation_checkpointing:
        checkpoint_activations(model, is_context_split=mesh.cp > 1)
    if train.packing == "packed":
        require_packable(model)
    split_context(model, mesh.cp_group)  # after the test of packing, which takes whole rows
    if not train.router_aux_loss_coefficient:
        return None
    return RouterBalance(model, coefficient=train.router_aux_loss_coefficient)


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


def _optimizer(
    model: PreTrainedModel, folder: Path, config: CampaignConfig, batch: TrainBatch, *, resumes: bool
) -> AdamW:
    """The parent's optimizer state if an iteration made it; a warm start and its successor begin anew."""
    is_supervised = batch.objective == "supervised"
    lr = config.warm_start.learning_rate if is_supervised else learning_rate(config, batch.iteration)
    optimizer = _adamw(config, model, lr)
    if resumes:
        weights.load_optimizer(model, optimizer, folder)
    if config.train.offload_optimizer:
        offload_moments(optimizer)
    return optimizer


def _adamw(config: CampaignConfig, model: PreTrainedModel, lr: float) -> AdamW:
    train = config.train
    return make_optimizer(
        model,
        lr=lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        # one fused call cannot take parameters that are split over different meshes
        fused=True if train.backend == "nccl" and not is_fully_sharded(model) else None,
        is_one_pass=train.optimizer_kernel == "fused",
    )


class _Clock:
    """Seconds between laps; the first lap counts from when the batch was sealed."""

    def __init__(self, started_at: float):
        self.last = started_at
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self.last
        self.last = now


def _say(batch: TrainBatch, metrics: dict[str, float], clock: _Clock, means: dict[str, str]) -> None:
    text = f"{metrics['steps']:.0f} steps, loss {metrics.get('policy_loss', math.nan):.4f}, "
    if batch.objective == "clipped_policy" and "kl_k3" in metrics:
        text += f"KL {metrics['kl_k3']:.4f}, entropy {metrics['entropy']:.3f}, "
        text += f"clipped {metrics['clip_share']:.1%}, "
    if "mismatch/k3" in metrics:
        text += f"engine k3 {metrics['mismatch/k3']:.4f}, largest {metrics['mismatch/max']:.3f}, "
    for name, times in metrics.items():
        if name.startswith("slow_rank/"):
            text += f"rank {name.removeprefix('slow_rank/')} worked {times:.1f} times the median, "
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in clock.seconds.items())
    iteration = batch.iteration if batch.iteration >= 0 else None
    used = f"{means['dispatcher']}; kernels: {means['kernels']}"
    say("train", f"{text}seconds: {seconds}; {used}", iteration=iteration)
