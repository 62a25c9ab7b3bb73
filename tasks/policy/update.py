"""One policy update on all ranks: load version v, train on a sealed batch, store the shards of a candidate v
+ 1.

Every rank writes what it owns; nothing is gathered. The candidate becomes a version only when it is
published.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from tasks.artifacts.manifest import Blob, Manifest
from tasks.config import CampaignConfig
from tasks.policy import weights
from tasks.policy.dispatch import make_dispatcher
from tasks.policy.mesh import ParallelMesh, make_mesh
from tasks.policy.model import load_policy
from tasks.policy.trainer import make_optimizer, train_minibatch
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.rl.losses import clipped_policy_loss, supervised_loss
from tasks.rl.packing import micro_batches, num_trained_tokens, rank_share
from tasks.schema import TrainFrame, from_bytes
from tasks.session import run_store, say

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

PER_TOKEN = ("policy_loss", "entropy", "clip_share", "kl_k1", "kl_k3")


def update(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Called on every rank of the elastic task; all ranks return the same candidate."""
    clock = _Clock(batch.sealed_at)
    config, store = run.config, run_store(run)
    with _process_group(config):
        mesh = make_mesh(config.train.world_size, config.train.ep)
        dispatcher = make_dispatcher(config.train.dispatcher, mesh.ep_group)
        clock.lap("start_up")
        parent = store.manifest(policy)
        folder = store.pull(policy)
        model = load_policy(folder, dispatcher=dispatcher, dtype=getattr(torch, config.model.dtype)).train()
        rows = read_batch(store, batch)
        optimizer = _optimizer(model, folder, config, batch, resumes=parent.kind == "iteration")
        clock.lap("load")
        metrics = train(model, optimizer, mesh, rows, config, objective=batch.objective)
        clock.lap("train")
        files, digest = store_shards(store, model, optimizer, mesh, parent.files)
        clock.lap("upload")
        manifest = Manifest(
            campaign=run.campaign,
            version=policy.version + 1,
            parent=policy.version,
            kind="warm_start" if batch.objective == "supervised" else "iteration",
            iteration=batch.iteration + 1,
            files=files,
            tensor_digest=digest,
            config_digest=config.digest(),
            code_revision=run.code_revision,
            batch=batch.key,
            num_samples=int(metrics.pop("samples")),
            metrics={**batch.metrics, **metrics},
            seconds={**batch.seconds, **clock.seconds},
            cursor=(batch.iteration + 1) * config.rollout.prompts_per_iteration,
        )
        if dist.get_rank() == 0:
            _say(batch, metrics, clock, dispatcher.describe())
    return Candidate(manifest_json=manifest.model_dump_json())


def train(
    model: PreTrainedModel, optimizer: AdamW, mesh: ParallelMesh, rows: list[dict[str, Any]],
    config: CampaignConfig, *, objective: str,
) -> dict[str, float]:  # fmt: skip
    """One optimizer step a mini-batch, once over the batch; metrics are means over tokens or steps."""
    totals: dict[str, float] = {}
    minibatches: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        minibatches.setdefault(row["minibatch"], []).append(row)
    for _, members in sorted(minibatches.items()):
        share = rank_share(members, rank=mesh.rank, world_size=mesh.world_size)
        num_global_tokens = num_trained_tokens(members)
        sums = train_minibatch(
            model,
            optimizer,
            mesh,
            micro_batches(share, max_tokens=config.train.micro_batch_tokens),
            make_loss(config, objective, num_global_tokens),
            num_global_tokens=num_global_tokens,
            max_grad_norm=config.train.max_grad_norm,
            temperature=config.rollout.temperature if objective == "clipped_policy" else 1.0,
        )
        for name, value in (sums | {"samples": len(members), "steps": 1}).items():
            totals[name] = totals.get(name, 0.0) + value
    tokens, steps = max(totals.get("tokens", 0.0), 1.0), totals["steps"]
    per_token = {name: totals[name] / tokens for name in PER_TOKEN if name in totals}
    return {
        **per_token,
        "trained_tokens": totals.get("tokens", 0.0),
        "samples": totals["samples"],
        "grad_norm": totals["grad_norm"] / steps,
        "skipped_steps": totals["skipped"],
        "steps": steps,
        "learning_rate": optimizer.param_groups[0]["lr"],
    }


def make_loss(
    config: CampaignConfig, objective: str, num_global_tokens: int
) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, dict[str, Tensor]]]:
    """The loss of an objective for a mini-batch. A new one is a function in ``tasks/rl`` and a case here."""
    algorithm = config.algorithm

    def policy(logprob_BL: Tensor, entropy_BL: Tensor, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return clipped_policy_loss(
            logprob_BL, micro["behavior_logprob"], micro["advantage"], entropy_BL, micro["mask"],
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high,
            entropy_coefficient=algorithm.entropy_coefficient, num_global_tokens=num_global_tokens,
        )  # fmt: skip

    def supervised(logprob_BL: Tensor, entropy_BL: Tensor, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return supervised_loss(logprob_BL, micro["mask"], num_global_tokens=num_global_tokens)

    return {"clipped_policy": policy, "supervised": supervised}[objective]


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


def store_shards(
    store: "PolicyStore",
    model: PreTrainedModel,
    optimizer: AdamW,
    mesh: ParallelMesh,
    parent_files: dict[str, Blob],
) -> tuple[dict[str, Blob], str]:
    """Upload this rank's weights and optimizer state; returns all ranks' files and the weights' digest."""
    with tempfile.TemporaryDirectory() as name:
        folder, blobs = Path(name), {}
        shards: dict[str, weights.Shard] = {}
        digests: dict[str, str] = {}
        if mesh.replicate_rank == 0:
            digests = weights.digest_tensors(weights.disk_tensors(model))
            tensors_of = {
                "model": weights.disk_tensors(model),
                "optimizer": weights.optimizer_tensors(model, optimizer),
            }
            for stem, tensors in tensors_of.items():
                shards[stem] = weights.write_shard(folder, tensors, mesh.ep_rank, mesh.ep, stem=stem)
                blobs[shards[stem].file_name] = store.put_file(folder / shards[stem].file_name)
        everyone: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(everyone, (blobs, shards, digests))
        for stem in ("model", "optimizer"):
            index = weights.write_index(folder, [s[stem] for _, s, _ in everyone if stem in s], stem=stem)
            blobs[index] = store.put_file(folder / index)
        for other, _, _ in everyone:
            blobs |= other
        carried = {n: b for n, b in parent_files.items() if not n.startswith(("model", "optimizer"))}
        return carried | blobs, weights.merge_digests(d for _, _, d in everyone)


def _optimizer(
    model: PreTrainedModel, folder: Path, config: CampaignConfig, batch: TrainBatch, *, resumes: bool
) -> AdamW:
    """The parent's optimizer state if an iteration made it; a warm start and its successor begin anew."""
    is_supervised = batch.objective == "supervised"
    lr = config.warm_start.learning_rate if is_supervised else learning_rate(config, batch.iteration)
    train = config.train
    optimizer = make_optimizer(
        model, lr=lr, betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay
    )
    if resumes:
        weights.load_optimizer(model, optimizer, folder)
    return optimizer


@contextlib.contextmanager
def _process_group(config: CampaignConfig) -> Iterator[None]:
    """Join the other ranks; a collective that waits longer than the configured time fails."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != config.train.world_size:
        raise RuntimeError(
            f"topology {config.train.topology} must run {config.train.world_size} ranks, got "
            f"WORLD_SIZE={world_size}."
        )
    dist.init_process_group(
        config.train.backend, timeout=timedelta(seconds=config.train.collective_timeout_seconds)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Clock:
    """Seconds between laps; the first lap counts from when the batch was sealed."""

    def __init__(self, started_at: float):
        self.last = started_at
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self.last
        self.last = now


def _say(batch: TrainBatch, metrics: dict[str, float], clock: _Clock, dispatcher: str) -> None:
    text = f"{metrics['steps']:.0f} steps, loss {metrics['policy_loss']:.4f}, "
    if batch.objective == "clipped_policy":
        text += f"KL {metrics['kl_k3']:.4f}, entropy {metrics['entropy']:.3f}, "
        text += f"clipped {metrics['clip_share']:.1%}, "
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in clock.seconds.items())
    iteration = batch.iteration if batch.iteration >= 0 else None
    say("train", f"{text}seconds: {seconds}; {dispatcher}", iteration=iteration)
