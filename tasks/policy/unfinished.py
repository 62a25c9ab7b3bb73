"""An update that was told to stop: all ranks store what it had done, and the next attempt finds it.

It is stored like a version, through the same snapshot and upload, under a record instead of a manifest
(``tasks/artifacts/unfinished.py``). A record exists once everything it names is stored: an attempt that was
killed while it stored leaves none, or the one before. No generator's state is in it, since each mini-batch
seeds its own (``resume.py``).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tasks.artifacts.errors import CacheFull, CorruptArtifact, NotFound
from tasks.artifacts.unfinished import UnfinishedUpdate, UpdateIdentity, unfinished_updates
from tasks.config import CampaignConfig
from tasks.policy.epoch import Position, Trainee, train
from tasks.policy.stopping import EXIT_CODE, StopAgreed, StopRequest
from tasks.policy.upload import StoredShards
from tasks.records import CampaignRun, PolicyVersion, TrainBatch
from tasks.session import say

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

Row = dict[str, Any]


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

    def __init__(self, store: PolicyStore, identity: UpdateIdentity, stop: StopRequest) -> None:
        self._store, self._identity, self.stop = store, identity, stop
        self.left = _find(store, identity)
        self._begin = self.left.done if self.left else 0
        self._position = Position()
        if self.left:
            self._position = Position(done=self._begin, totals=dict(self.left.totals))

    def folder(self, parent: Path) -> Path:
        """Where the weights and the optimizer's state lie to go on from."""
        return _folder(self._store, self.left) if self.left else parent

    def prepared(self, sealed_rows: Sequence[Row]) -> Prepared | None:
        """What came before the first step, if it need not be computed again."""
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

    def train(
        self, trainee: Trainee, prepared: Prepared, config: CampaignConfig, *, objective: str
    ) -> dict[str, float]:
        """The rest of the pass; its metrics, or nothing if the ranks stopped on the way."""
        if self.left:
            trainee.nonfinite.in_a_row = self.left.nonfinite_in_a_row
            if self.left.metrics:
                return dict(self.left.metrics)
            if trainee.routing:
                trainee.routing.go_on_from(self.left.routing[trainee.mesh.rank], trainee.model.device)
        try:
            return train(trainee, prepared.rows, config, objective=objective, position=self._position)
        except StopAgreed:
            if self._position.done == self._begin:
                if dist.get_rank() == 0:
                    say("sigterm", "ends before its first mini-batch: there is nothing to store")
                raise SystemExit(EXIT_CODE) from None
            return {}

    def keep(
        self, stored: StoredShards, trainee: Trainee, prepared: Prepared, *, metrics: dict[str, float]
    ) -> None:
        """Write the record of shards that every rank has stored."""
        routing = trainee.routing.gather_sums(trainee.mesh) if trainee.routing else []
        if dist.get_rank() == 0:
            record = UnfinishedUpdate(
                identity=self._identity,
                files=stored.files,
                tensor_digest=stored.tensor_digest,
                columns=self._store.put_bytes(_computed_columns(prepared)),
                done=self._position.done,
                totals=self._position.totals,
                nonfinite_in_a_row=trainee.nonfinite.in_a_row,
                routing=routing,
                critic=prepared.critic,
                critic_metrics=prepared.critic_metrics,
                metrics=metrics,
            )
            self._store.replace_object(self._identity.key, record.model_dump_json().encode())
            say("sigterm", f"stored the update after {record.done} mini-batches; run again, it goes on there")
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


def _find(store: PolicyStore, identity: UpdateIdentity) -> UnfinishedUpdate | None:
    """What an earlier attempt at this update left, if it is whole; the same answer on every rank."""
    found: list[Any] = [_chosen(store, identity) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    record = UnfinishedUpdate.model_validate_json(found[0])
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, _pull(store, record))
    fault = next((text for text in faults if text), "")
    if dist.get_rank() == 0:
        good = f"goes on behind {record.done} mini-batches that a stopped attempt had done"
        say("resume", f"an unfinished update is ignored: {fault}" if fault else good)
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


def _pull(store: PolicyStore, record: UnfinishedUpdate) -> str:
    """Fetch and verify its files; what is wrong with them, if anything is."""
    store.cache.lease(folder := _folder(store, record))
    try:
        for name, file in record.files.items():
            store.cache.link(name, file, folder)
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
