"""How an update loads, reads, optimises and stores a model: the policy, or one beside it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim import AdamW
from transformers import PreTrainedModel

from tasks.artifacts.manifest import StoredFile
from tasks.artifacts.owned import Checkpoint
from tasks.config import CampaignConfig
from tasks.policy.checkpoint.upload import store_shards
from tasks.policy.dispatch.dispatcher import Dispatcher
from tasks.policy.models.model import Head, load_policy
from tasks.policy.models.routers import RouterWatch
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.fsdp import is_fully_sharded, reshard_parameters
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.ranks.process_group import device_of
from tasks.policy.ranks.progress import Progress
from tasks.policy.step.reading import read_rows
from tasks.policy.step.trainer import Read, make_optimizer
from tasks.records import CampaignRun, TrainBatch
from tasks.rl.packing import Row

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Workbench:
    """One for an update; every model on it has the same ranks, sharding and kernels."""

    run: CampaignRun
    store: PolicyStore
    """Of the policy's versions."""
    batch: TrainBatch
    mesh: ParallelMesh
    dispatcher: Dispatcher
    progress: Progress

    @property
    def config(self) -> CampaignConfig:
        return self.run.config

    @property
    def stored_dtype(self) -> torch.dtype:
        return getattr(torch, self.config.model.dtype)

    def load(self, checkpoint: Checkpoint, *, head: Head = "tokens") -> PreTrainedModel:
        """A checkpoint on this rank's device, in training mode."""
        train = self.config.train
        return load_policy(
            checkpoint.folder,
            dispatcher=self.dispatcher,
            device=device_of(self.config),
            expert_kernel=train.expert_kernel,
            prepare=partial(distribute, mesh=self.mesh, compute_dtype=getattr(torch, train.compute_dtype)),
            head=head,
            fetch=checkpoint.fetch,
        ).train()

    def optimizer(self, model: PreTrainedModel, learning_rate: float) -> AdamW:
        train = self.config.train
        return make_optimizer(
            model,
            lr=learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            # one fused call cannot take parameters that are split over different meshes
            fused=True if train.backend == "nccl" and not is_fully_sharded(model) else None,
            is_one_pass=train.optimizer_kernel == "fused",
        )

    def read(
        self, model: PreTrainedModel, rows: Sequence[Row], read: Read, routing: RouterWatch | None = None
    ) -> list[list[float]]:
        """What the model says of every response token; a list a row."""
        train = self.config.train
        return read_rows(
            model,
            rows,
            self.mesh,
            read,
            max_tokens=train.micro_batch_tokens,
            packing=train.packing,
            routing=routing,
        )

    def save(
        self,
        store: PolicyStore,
        model: PreTrainedModel,
        optimizer: AdamW,
        parent_files: Mapping[str, StoredFile],
    ) -> tuple[dict[str, StoredFile], str]:
        """Store a model whole and wait for it; all ranks' files and the digest of the weights."""
        reshard_parameters(model)  # a batch without a step was read and not trained
        return store_shards(store, model, optimizer, self.mesh, parent_files, dtype=self.stored_dtype)


def release() -> None:
    """Give back the memory of a model that nothing refers to any more; modules and hooks form cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
