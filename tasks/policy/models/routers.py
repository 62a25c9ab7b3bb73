"""What happens at a policy's routers while it is trained, as far as the configuration asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from tasks.policy.models.router import RouterBalance
from tasks.policy.models.router_bias import RouterBias
from tasks.policy.models.routing import Routing
from tasks.policy.parallel.context import my_block
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.rl.packing import MicroBatch


class RouterWatch(Protocol):
    """What is told of each micro-batch before the model reads it."""

    def use(self, micro_batch: MicroBatch) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Routers:
    """Hooks on one model. A forward pass is ``use``, then ``count``, and ``loss`` of a micro-batch that is
    trained or ``clear`` of an empty one; ``step`` ends a mini-batch."""

    routing: Routing | None = None
    """Replays the engine's choices, and counts."""
    balance: RouterBalance | None = None
    """The auxiliary loss."""
    bias: RouterBias | None = None
    """Moves the biases with which experts are selected."""

    def use(self, micro_batch: MicroBatch) -> None:
        if self.routing is not None:
            self.routing.use(micro_batch)

    def count(self, micro_batch: MicroBatch | None, cp_group: dist.ProcessGroup | None) -> None:
        """What this rank's tokens of the pass selected; nothing of an empty one."""
        if self.bias is None:
            return
        if micro_batch is None:
            self.bias.count(None)
        else:
            self.bias.count(my_block(micro_batch["attention_mask"], cp_group).flatten().bool())

    def loss(
        self, micro_batch: MicroBatch, *, num_global_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """What is added to the loss of the pass, and its metrics."""
        if self.balance is None:
            return None
        return self.balance.loss(micro_batch, num_global_tokens=num_global_tokens)

    def clear(self) -> None:
        if self.balance is not None:
            self.balance.clear()

    def step(self, mesh: ParallelMesh, *, is_finite: bool) -> None:
        if self.bias is not None:
            self.bias.step(mesh, is_finite=is_finite)
