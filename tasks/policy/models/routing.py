"""Routers while a policy is trained: what they replay, how they spread tokens, how sure they are.

Shape key: T tokens of this rank's block of a micro-batch, N layers with experts, E experts, K selections a
token.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.models.replay import Replay, RoutingReplay
from tasks.policy.models.router import router_modules, router_scores
from tasks.policy.parallel.context import my_block
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.ranks.progress import BLOCKED
from tasks.rl.packing import MicroBatch

Sums = tuple[dict[str, list[int]], dict[str, float], dict[str, float]]
"""Of one rank: loads and entropies by router, and replayed selections; plain numbers, exact."""


class Routing:
    """Sums over the forward passes of an update, padding left out; call before ``checkpoint_activations``."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        replay: Replay = "none",
        cp_group: dist.ProcessGroup | None = None,
    ):
        has_weights = replay == "experts_and_weights"
        self._replay = None if replay == "none" else RoutingReplay(model, has_weights=has_weights)
        self._cp_group = cp_group
        self._is_token_T: Tensor | None = None
        self._load_E: dict[str, Tensor] = {}
        self._entropy: dict[str, Tensor] = {}
        for name, router in router_modules(model):
            router.register_forward_hook(partial(self._count, name))

    def use(self, micro_batch: MicroBatch) -> None:
        """This micro-batch is next; an empty one, which has no ``mask``, is not counted."""
        self._is_token_T = None
        if "mask" in micro_batch:
            self._is_token_T = my_block(micro_batch["attention_mask"], self._cp_group).flatten().bool()
        if self._replay is not None:
            self._replay.use(micro_batch)

    def metrics(self, mesh: ParallelMesh) -> dict[str, float]:
        """Over all ranks, since the last call: largest and smallest load of an expert in any layer as
        multiples of the mean; mean entropy of the routers as a share of its maximum; ``router/drift``, the
        share of the engine's choices that the trainer's own routers would not have made. Collective."""
        by_rank = self.gather_sums(mesh)
        load_E: dict[str, Tensor] = {}  # by router: pipeline stages hold different ones
        entropy, replayed, alike = 0.0, 0.0, 0.0
        for loads, entropies, replays in by_rank:
            for name, counts in loads.items():
                counts_E = torch.tensor(counts)
                load_E[name] = load_E[name] + counts_E if name in load_E else counts_E
            entropy += sum(entropies.values())
            replayed, alike = replayed + replays.get("replayed", 0.0), alike + replays.get("alike", 0.0)
        if not load_E:
            return {}
        load_NE = torch.stack([load_E[name] for name in sorted(load_E)]).double()
        relative_NE = load_NE / load_NE.mean(dim=1, keepdim=True)
        found = {
            "router/load_max": relative_NE.max().item(),
            "router/load_min": relative_NE.min().item(),
            "router/entropy": entropy / load_NE.sum().item() / math.log(load_NE.shape[1]),
        }
        return found | ({"router/drift": 1 - alike / replayed} if replayed else {})

    def gather_sums(self, mesh: ParallelMesh) -> list[Sums]:
        """What each rank has summed up since the last call, which begins anew. Collective."""
        by_rank: list[Any] = [self._take_sums()]
        if mesh.world is not None:
            mine, by_rank = by_rank[0], [None] * mesh.world_size
            with BLOCKED:
                dist.all_gather_object(by_rank, mine, group=mesh.world)
        return by_rank

    def go_on_from(self, sums: Sums, device: torch.device) -> None:
        """Begin with what this rank had summed up, to the bit, when an update was stopped."""
        loads, entropies, replays = sums
        self._load_E = {name: torch.tensor(counts, device=device) for name, counts in loads.items()}
        self._entropy = {name: torch.tensor(value, device=device) for name, value in entropies.items()}
        if self._replay is not None:
            self._replay.go_on_from({n: torch.tensor(int(v), device=device) for n, v in replays.items()})

    def _take_sums(self) -> Sums:
        replayed = self._replay.take_sums() if self._replay is not None else {}
        loads = {name: load_E.tolist() for name, load_E in self._load_E.items()}
        entropies = {name: value.item() for name, value in self._entropy.items()}
        self._load_E, self._entropy = {}, {}
        return loads, entropies, {name: float(count.item()) for name, count in replayed.items()}

    @torch.no_grad()
    def _count(self, name: str, router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits_TE, _, expert_TK = output
        if self._is_token_T is None:
            return
        # masked and not left out: the host would wait for the number of tokens, once a layer
        is_token_T1, num_experts = self._is_token_T[:, None], logits_TE.shape[1]
        # sorted, because bincount may not repeat
        chosen = torch.where(is_token_T1, expert_TK, num_experts).flatten().sort().values
        end_E = torch.searchsorted(chosen, torch.arange(num_experts, device=chosen.device), right=True)
        load_E = torch.diff(end_E, prepend=end_E.new_zeros(1))
        score_TE = router_scores(router, logits_TE)
        share_TE = score_TE / score_TE.sum(dim=-1, keepdim=True)
        entropy_TE = torch.where(is_token_T1, torch.special.entr(share_TE), 0)
        entropy = entropy_TE.sum() * expert_TK.shape[1]  # once a selection, like the loads
        is_first = name not in self._load_E
        self._load_E[name] = load_E if is_first else self._load_E[name] + load_E
        self._entropy[name] = entropy if is_first else self._entropy[name] + entropy
