"""Models beside the policy of an update: a reference, a teacher, the critic. Each is loaded, does its part
and is let go of before the next one, and all before the policy, so that memory never holds two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import AdamW
from transformers import PreTrainedModel

from tasks.artifacts.critics import critic_store, find_critic, keep_candidate
from tasks.artifacts.manifest import Manifest
from tasks.artifacts.owned import Checkpoint, checkpoint_of
from tasks.policy.checkpoint import weights
from tasks.policy.models.routers import RouterWatch
from tasks.policy.step.reading import reader_of
from tasks.policy.step.trainer import Learner, agree_to_stop
from tasks.policy.training.critic import read_values, train_critic
from tasks.policy.training.epoch import Position
from tasks.policy.training.resume import seed_generators
from tasks.policy.training.unfinished import Attempt, Prepared
from tasks.policy.training.workbench import Workbench, release
from tasks.rl.packing import Row
from tasks.session import open_store

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def with_other_versions(bench: Workbench, rows: list[Row]) -> list[Row]:
    """Rows with the log-probabilities of the reference and of the teacher, as far as the algorithm has any.

    They route by themselves: what is replayed is the sampling policy's.
    """
    algorithm, run = bench.config.algorithm, bench.run
    if bench.batch.objective == "supervised":
        return rows
    reader = reader_of(run.config, bench.batch.objective)
    others: dict[str, Checkpoint] = {}
    if algorithm.kl != "none":
        # a store with leases of its own: the reference may be the very version that is to be trained
        policies = open_store(run.config, bench.store.campaign)
        others["reference_logprob"] = checkpoint_of(policies, algorithm.reference_version)
    if algorithm.advantage == "teacher":
        teachers = open_store(run.config, algorithm.teacher.campaign)
        others["teacher_logprob"] = checkpoint_of(teachers, algorithm.teacher.version)
    for column, checkpoint in others.items():
        model = bench.load(checkpoint)
        rows = with_column(rows, column, bench.read(model, rows, reader))
        checkpoint.release()
        del model
        release()
    return rows


def with_proximal(
    bench: Workbench, model: PreTrainedModel, rows: list[Row], routing: RouterWatch | None
) -> list[Row]:
    """Rows with the log-probabilities of the policy before its first step, where the algorithm asks for them;
    with the routing of the training itself, replayed or not."""
    is_recomputed = bench.config.algorithm.correction.proximal == "recomputed"
    if bench.batch.objective == "supervised" or not is_recomputed:
        return rows
    read = reader_of(bench.config, bench.batch.objective)
    return with_column(rows, "proximal_logprob", bench.read(model, rows, read, routing))


def prepare(
    bench: Workbench, attempt: Attempt, sealed_rows: list[Row], policy: Manifest, checkpoint: Checkpoint
) -> Prepared:
    """What other models say of the batch, and the critic's update, as far as no earlier attempt did it."""
    prepared = attempt.prepared(sealed_rows)
    if prepared is None:
        rows = with_other_versions(bench, sealed_rows)
        prepared = Prepared(sealed_rows=sealed_rows, rows=rows, critic="", critic_metrics={})
    if attempt.left is None or attempt.left.model == "critic":
        prepared = update_critic(bench, attempt, prepared, policy, checkpoint)
    return prepared


def update_critic(
    bench: Workbench, attempt: Attempt, prepared: Prepared, policy: Manifest, checkpoint: Checkpoint
) -> Prepared:
    """Also with values, and with the key of the trained critic's manifest, where there is a critic.

    ``checkpoint`` is ``policy``'s, which becomes critic version 0 when there is none.
    """
    config = bench.config
    if config.algorithm.advantage != "gae" or bench.batch.objective == "supervised":
        return prepared
    found, critics = find_critic(bench.run, bench.store, policy), critic_store(bench.run)
    start = attempt.checkpoint("critic", found[0] if found else checkpoint)
    model = bench.load(start, head="value")
    optimizer = bench.optimizer(model, config.algorithm.critic.learning_rate)
    is_begun = attempt.left_of("critic") is not None
    if found or is_begun:
        weights.load_optimizer(model, optimizer, start.folder, fetch=start.fetch)
        parent = found[1] if found else critics.manifest(0)  # which is published before its first step
    else:
        parent = _manifest(bench, critics, model, optimizer, policy=policy, parent=None)
        if dist.get_rank() == 0:
            critics.commit(parent)
    reseed = partial(seed_generators, bench.run, bench.batch.iteration, part="critic")
    critic = Learner(model, optimizer, bench.mesh, bench.progress, attempt.stop, reseed)
    if not is_begun:
        prepared = replace(prepared, rows=read_values(critic, prepared.rows, config.train))
    prepared = _trained(bench, attempt, critic, critics, prepared, policy, parent)
    if found:
        found[0].release()
    del critic, model, optimizer
    release()
    return prepared


def _trained(
    bench: Workbench,
    attempt: Attempt,
    critic: Learner,
    critics: PolicyStore,
    prepared: Prepared,
    policy: Manifest,
    parent: Manifest,
) -> Prepared:
    """With the trained critic's manifest, which is kept whatever becomes of this attempt; told to stop, keeps
    what it has done and ends."""
    config, (model, optimizer) = bench.config, (critic.model, critic.optimizer)
    train = partial(train_critic, critic, prepared.rows, config.algorithm, config.train)
    with attempt.stop.deferred():
        metrics, position = attempt.go_over("critic", lambda position: train(position=position))
        if metrics:
            manifest = _manifest(bench, critics, model, optimizer, policy=policy, parent=parent)
            key = keep_candidate(bench.store, manifest, is_writer=dist.get_rank() == 0)
            prepared = replace(prepared, critic=key, critic_metrics=metrics)
            attempt.keep({}, "", prepared, Position())
            agree_to_stop(attempt.stop, bench.mesh, model.device)
        else:
            files, digest = bench.save(bench.store, model, optimizer, parent.files)
            attempt.keep(files, digest, prepared, position)
    return prepared


def _manifest(
    bench: Workbench,
    critics: PolicyStore,
    model: PreTrainedModel,
    optimizer: AdamW,
    *,
    policy: Manifest,
    parent: Manifest | None,
) -> Manifest:
    """Store the critic's shards and describe them; without a parent as version 0. Collective."""
    files, digest = bench.save(critics, model, optimizer, parent.files if parent else {})
    if parent is None:
        config = model.config.to_json_string().encode()
        stated = weights.stating_dtype(config, bench.config.model.dtype)
        files |= {weights.CONFIG: critics.put_bytes(stated)}
    return Manifest(
        campaign=critics.campaign,
        version=parent.version + 1 if parent else 0,
        parent=parent.version if parent else None,
        kind="iteration" if parent else "init",
        iteration=policy.iteration + 1 if parent else 0,
        files=files,
        tensor_digest=digest,
        config_digest=bench.config.digest(),
        code_revision=bench.run.code_revision,
        batch=bench.batch.key if parent else "",
        num_samples=bench.batch.num_samples if parent else 0,
    )


def with_column(rows: list[Row], column: str, values: Sequence[Any]) -> list[Row]:
    return [{**row, column: value} for row, value in zip(rows, values, strict=True)]
