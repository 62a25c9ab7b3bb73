"""Opens the dispatcher that the configuration names, and says what a run trains with.

The configuration names every choice; this is where a run that got something else ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tasks.policy import libraries
from tasks.policy.dispatch import Dispatcher, make_dispatcher
from tasks.policy.mesh import ParallelMesh
from tasks.train_config import TrainConfig


def open_dispatcher(
    train: TrainConfig, mesh: ParallelMesh, folder: Path
) -> tuple[Dispatcher, dict[str, str]]:
    """The dispatcher for the model in ``folder``, and what is in use by name, after checking that it is what
    was asked for. Called on every rank."""

    def deepep(group: Any) -> Dispatcher:
        from tasks.policy.deepep import ExchangeShape, make_deepep

        model = AutoConfig.from_pretrained(folder)
        shape = ExchangeShape(
            hidden=model.hidden_size,
            num_topk=model.num_experts_per_tok,
            deterministic=train.deterministic,
            timeout_seconds=train.collective_timeout_seconds,
        )
        return make_deepep(group, train.deepep, shape)

    dispatcher = make_dispatcher(train.dispatcher, mesh.ep_group, deepep)
    seen = libraries.require(
        libraries.read_facts(), dispatcher=train.dispatcher, api=train.deepep.api, network=train.network
    )
    return dispatcher, {
        "dispatcher": dispatcher.describe(),
        "kernels": ", ".join(f"{part} {kernel}" for part, kernel in train.kernels.items()),
        "libraries": seen.text(),
    }
