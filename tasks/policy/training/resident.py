"""What a trainer that stays keeps between updates: groups of ranks, the policy, its optimizer, pinned memory.

A policy in memory is what this process stored last: an update goes on with it only if the version to train
has those very files, and the configuration is the same. Otherwise it lets go and loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tasks.artifacts.manifest import Manifest, StoredFile
from tasks.config import CampaignConfig
from tasks.policy.checkpoint.snapshot import HostArena
from tasks.policy.dispatch.dispatcher import Dispatcher
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.ranks.progress import BLOCKED
from tasks.policy.ranks.stopping import StopRequest
from tasks.policy.training.means import open_dispatcher
from tasks.policy.training.trainee import Trainee


class Resident:
    """Empty at first, and for a process of one update until its end."""

    def __init__(self, stop: StopRequest | None = None) -> None:
        self.stop = stop or StopRequest()
        self.mesh: ParallelMesh | None = None
        self.trainee: Trainee | None = None
        self.arena: HostArena | None = None
        self._dispatcher: Dispatcher | None = None
        self._means: dict[str, str] = {}
        self._files: Mapping[str, StoredFile] = {}
        self._config = ""

    def make_mesh(self, config: CampaignConfig) -> ParallelMesh:
        """The groups of ranks, made once a process: communicators would pile up."""
        timeout = timedelta(seconds=config.train.collective_timeout_seconds)
        self.mesh = self.mesh or make_mesh(**asdict(config.train.grid), timeout=timeout)
        return self.mesh

    def open_dispatcher(self, config: CampaignConfig, folder: Path) -> tuple[Dispatcher, dict[str, str]]:
        """The dispatcher that the policy in memory has, or another one for another configuration."""
        assert self.mesh is not None
        if self._dispatcher is None or self._config != config.digest():
            self.close()
            self._dispatcher, self._means = open_dispatcher(config.train, self.mesh, folder)
            self._config = config.digest()
        return self._dispatcher, self._means

    def holds(self, parent: Manifest, config: CampaignConfig) -> bool:
        """Whether memory has the version to train, on every rank: one that has not makes all of them load,
        which is a collective. A warm start's successor begins with a new optimizer."""
        is_ours = self._files == parent.files and self._config == config.digest()
        is_held = self.trainee is not None and parent.kind == "iteration" and is_ours
        if self.mesh is None or self.mesh.world is None:
            return is_held
        held_by: list[Any] = [None] * self.mesh.world_size
        with BLOCKED:
            dist.all_gather_object(held_by, is_held, group=self.mesh.world)
        return all(held_by)

    def keep(self, trainee: Trainee, arena: HostArena, files: Mapping[str, StoredFile]) -> None:
        self.trainee, self.arena, self._files = trainee, arena, files

    def let_go(self) -> None:
        self.trainee, self.arena, self._files = None, None, {}

    def close(self) -> None:
        """Nothing of it is used any more."""
        self.let_go()
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None
