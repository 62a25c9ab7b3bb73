"""What makes a resumed run repeat the bits of one that was never stopped, beside weights and optimizer state.

No generator's state is stored. Everything that is drawn is drawn from a generator seeded by numbers that a
manifest holds: the campaign's seed, and the iteration, prompt, sample and token in question. So there is no
state that a restarted, moved or resharded process could miss.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from tasks.artifacts.cursor import fixed_dataset, position_after
from tasks.artifacts.manifest import DataCursor, LedgerPosition, Manifest
from tasks.experience.ledger import seed_of
from tasks.records import CampaignRun, TrainBatch

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def seed_generators(run: CampaignRun, iteration: int, place: int = 0, *, part: str = "update") -> None:
    """Seed this process for the ``place``-th mini-batch of an update, alike on every rank: a policy with
    dropout repeats its units, also where an update goes on that was stopped before that mini-batch."""
    seed = seed_of(run.config.seed, iteration, part, place)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def data_cursor(store: PolicyStore, run: CampaignRun, batch: TrainBatch, parent: Manifest) -> DataCursor:
    """Where the next iteration reads, in which data; demonstrations do not count."""
    offered = run.config.rollout.prompts_reserved
    return DataCursor(
        dataset=fixed_dataset(store),
        position=position_after(parent, offered=offered)
        + (0 if batch.objective == "supervised" else offered),
        seed=run.config.seed,
    )


def ledger_position(batch: TrainBatch) -> LedgerPosition:
    """What a sealed batch took from the buffer."""
    return LedgerPosition(
        iteration=batch.iteration,
        behavior_version=batch.behavior_version,
        produced=batch.produced,
        trained=batch.num_samples,
        rejected=batch.rejected,
        batch_sha256=batch.sha256,
    )
