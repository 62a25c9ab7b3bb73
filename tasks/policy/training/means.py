"""Opens the dispatcher that the configuration names, and says what a run trains with.

The configuration names every choice; this is where a run that got something else ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tasks.policy import libraries
from tasks.policy.dispatch.dispatcher import Dispatcher, ExchangeShape, make_dispatcher
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.train_config import TrainConfig


def open_dispatcher(
    train: TrainConfig, mesh: ParallelMesh, folder: Path
) -> tuple[Dispatcher, dict[str, str]]:
    """The dispatcher for the model in ``folder``, and what is in use by name, after checking that it is what
    was asked for. Called on every rank."""

    def build(group: Any) -> Dispatcher:
        from tasks.policy.dispatch.deepep import make_deepep
        from tasks.policy.dispatch.nvlink import make_nvlink

        model = AutoConfig.from_pretrained(folder)
        shape = ExchangeShape(
            hidden=model.hidden_size,
            num_topk=model.num_experts_per_tok,
            deterministic=train.deterministic,
            timeout_seconds=train.collective_timeout_seconds,
            dtype=getattr(torch, train.compute_dtype),
        )
        if train.dispatcher == "nvlink":
            return make_nvlink(group, train.nvlink, shape)
        return make_deepep(group, train.deepep, shape)

    dispatcher = make_dispatcher(train.dispatcher, mesh.ep_group, build)
    seen = libraries.require(
        libraries.read_facts(), dispatcher=train.dispatcher, api=train.deepep.api, network=train.network
    )
    return dispatcher, {
        "dispatcher": dispatcher.describe(),
        "kernels": ", ".join(f"{part} {kernel}" for part, kernel in train.kernels.items()),
        "libraries": seen.text(),
    }
