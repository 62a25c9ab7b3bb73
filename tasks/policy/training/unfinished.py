"""An update that was told to stop: all ranks store what it had done, and the next attempt finds it.

It is stored like a version, through the same snapshot and upload, under a record instead of a manifest
(``tasks/artifacts/unfinished.py``). A record exists once everything it names is stored: an attempt that was
killed while it stored leaves none, or the one before. No generator's state is in it, since each mini-batch
seeds its own (``resume.py``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tasks.artifacts.errors import CacheFull, CorruptArtifact, NotFound
from tasks.artifacts.owned import Checkpoint
from tasks.artifacts.unfinished import Trained, UnfinishedUpdate, UpdateIdentity, unfinished_updates
from tasks.config import CampaignConfig
from tasks.policy.checkpoint.upload import STEMS
from tasks.policy.checkpoint.weights import shard_name
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.ranks.stopping import EXIT_CODE, StopAgreed, StopRequest
from tasks.policy.training.epoch import Position, train
from tasks.policy.training.trainee import Trainee
from tasks.records import CampaignRun, PolicyVersion, TrainBatch
from tasks.rl.packing import Row
from tasks.say import say

if TYPE_CHECKING:
    from tasks.artifacts.manifest import StoredFile
    from tasks.artifacts.store import PolicyStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What came before the pass over the batch."""

    sealed_rows: Sequence[Row]
    rows: list[Row]
    """With the columns that were computed for them."""
    critic: str
    critic_metrics: dict[str, float]


class Attempt:
    """One attempt at an update: what an earlier one left, and how this one leaves something. Collective."""

    def __init__(
        self, store: PolicyStore, identity: UpdateIdentity, stop: StopRequest, mesh: ParallelMesh
    ) -> None:
        self._store, self._identity, self.stop = store, identity, stop
        self.left = _find(store, identity, mesh)

    def left_of(self, model: Trained) -> UnfinishedUpdate | None:
        """What is left of a model's pass, if that had begun."""
        is_of_it = self.left is not None and self.left.model == model and self.left.files
        return self.left if is_of_it else None

    def checkpoint(self, model: Trained, otherwise: Checkpoint) -> Checkpoint:
        """Where the weights and the optimizer's state lie to go on from."""
        left = self.left_of(model)
        return Checkpoint(_folder(self._store, left)) if left else otherwise

    def prepared(self, sealed_rows: Sequence[Row]) -> Prepared | None:
        """What need not be computed again of what comes before the policy's pass."""
        if self.left is None:
            return None
        import polars as pl

        columns = pl.read_ipc(io.BytesIO(self._store.cache.read("columns", self.left.columns)))
        computed = columns.rows(named=True) if columns.width else [{}] * len(sealed_rows)
        rows = [{**row, **found} for row, found in zip(sealed_rows, computed, strict=True)]
        return Prepared(
            sealed_rows=sealed_rows,
            rows=rows,
            critic=self.left.critic,
            critic_metrics=self.left.critic_metrics,
        )

    def go_over(
        self, model: Trained, train: Callable[[Position], dict[str, float]]
    ) -> tuple[dict[str, float], Position]:
        """The rest of a pass; its metrics, or nothing if the ranks stopped on the way, and where it is."""
        left = self.left_of(model)
        begin = left.done if left else 0
        position = Position(done=begin, totals=dict(left.totals)) if left else Position()
        try:
            return train(position), position
        except StopAgreed:
            if position.done == begin:
                if dist.get_rank() == 0:
                    say("sigterm", "ends before its first mini-batch: there is nothing to store")
                raise SystemExit(EXIT_CODE) from None
            return {}, position

    def train(
        self, trainee: Trainee, prepared: Prepared, config: CampaignConfig, *, objective: str
    ) -> tuple[dict[str, float], Position]:
        """The rest of the policy's pass, as ``go_over`` returns it."""
        if left := self.left_of("policy"):
            trainee.nonfinite.in_a_row = left.nonfinite_in_a_row
            if left.metrics:
                return dict(left.metrics), Position(done=left.done, totals=dict(left.totals))
            if trainee.routing:
                trainee.routing.go_on_from(left.routing[trainee.mesh.rank], trainee.model.device)
        go = partial(train, trainee, prepared.rows, config, objective=objective)
        return self.go_over("policy", lambda position: go(position=position))

    def keep(
        self,
        files: Mapping[str, StoredFile],
        tensor_digest: str,
        prepared: Prepared,
        position: Position,
        *,
        trainee: Trainee | None = None,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Write the record of shards that every rank has stored: the trainee's, or else the critic's; without
        shards, of a policy that has its critic and no step yet."""
        routing = trainee.routing.gather_sums(trainee.mesh) if trainee and trainee.routing else []
        if dist.get_rank() == 0:
            is_critic = bool(files) and trainee is None
            record = UnfinishedUpdate(
                identity=self._identity,
                model="critic" if is_critic else "policy",
                files=files,
                tensor_digest=tensor_digest,
                columns=self._store.put_bytes(_computed_columns(prepared)),
                done=position.done,
                totals=position.totals,
                nonfinite_in_a_row=trainee.nonfinite.in_a_row if trainee else 0,
                routing=routing,
                critic=prepared.critic,
                critic_metrics=prepared.critic_metrics,
                metrics=metrics or {},
            )
            self._store.replace_object(self._identity.key, record.model_dump_json().encode())
            if files:
                part = "critic" if is_critic else "update"
                say(
                    "sigterm",
                    f"stored the {part} after {record.done} mini-batches; run again, it goes on there",
                )
        dist.barrier()  # one that ends early would make torchrun end the others


def identity_of(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> UpdateIdentity:
    return UpdateIdentity(
        version=policy.version + 1,
        policy=policy.manifest_sha256,
        batch=batch.sha256,
        config_digest=run.config.digest(),
        code_revision=run.code_revision,
        ranks=asdict(run.config.train.grid),
    )


def _find(store: PolicyStore, identity: UpdateIdentity, mesh: ParallelMesh) -> UnfinishedUpdate | None:
    """What an earlier attempt at this update left, if it is whole; the same answer on every rank."""
    found: list[Any] = [_chosen(store, identity) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    record = UnfinishedUpdate.model_validate_json(found[0])
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, _pull(store, record, mesh))
    fault = next((text for text in faults if text), "")
    if dist.get_rank() == 0:
        say("resume", f"an unfinished update is ignored: {fault}" if fault else f"goes on {record.text()}")
    return None if fault else record


def _folder(store: PolicyStore, record: UnfinishedUpdate) -> Path:
    return store.cache.folder / store.campaign / f"unfinished-{record.tensor_digest[:24]}"


def _chosen(store: PolicyStore, identity: UpdateIdentity) -> str | None:
    """The record of this update as JSON; says of others why they are not used."""
    chosen = None
    for key, update, fault in unfinished_updates(store, identity.version):
        fault = fault or (identity.differences(update.identity) if update else "")
        if fault:
            say("resume", f"unfinished update {key} is ignored: {fault}")
        elif update is not None:
            chosen = update.model_dump_json()
    return chosen


def _pull(store: PolicyStore, record: UnfinishedUpdate, mesh: ParallelMesh) -> str:
    """Fetch and verify its files; what is wrong with them, if anything is. The experts of other ranks stay in
    the store: whoever goes on with it owns what it stored."""
    folder, ranks = _folder(store, record), range(mesh.copy_size)
    others = {shard_name(r, len(ranks), stem=stem) for r in ranks if r != mesh.copy_rank for stem in STEMS}
    if record.files:
        store.cache.lease(folder)
    try:
        for name in sorted(record.files.keys() - others):
            store.cache.link(name, record.files[name], folder)
        store.cache.read("columns", record.columns)
    except (CorruptArtifact, NotFound, CacheFull) as error:
        return str(error)
    return ""


def _computed_columns(prepared: Prepared) -> bytes:
    """What the rows have that was not sealed."""
    import polars as pl

    names = {
        name
        for row, sealed in zip(prepared.rows, prepared.sealed_rows, strict=True)
        for name, value in row.items()
        if name not in sealed or sealed[name] is not value
    }
    columns = {name: [row[name] for row in prepared.rows] for name in sorted(names)}
    buffer = io.BytesIO()
    pl.DataFrame(columns, strict=False).write_ipc(buffer)
    return buffer.getvalue()
