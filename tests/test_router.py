"""Router options: frozen routers stay as they are; the balance loss does not depend on a batch's split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, tiny_policy
from ranks import run_ranks
from test_packing import rows
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.router import RouterBalance, freeze_routers, router_modules
from tasks.policy.models.routers import Routers
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.shards import whole_tensor
from tasks.policy.step.trainer import Learner, make_optimizer, train_minibatch
from tasks.rl.balance import sequence_balance_loss
from tasks.rl.losses import supervised_loss
from tasks.rl.packing import Packing, micro_batches, num_trained_tokens

TOKENS = num_trained_tokens(rows())


def test_balance_by_hand():
    # sequence 0: tokens 0 and 1 choose experts 0 and 0 of two: share (2, 0), mean score (0.7, 0.3) -> 1.4
    # sequence 1: token 2 chooses expert 1: share (0, 2), score (0.25, 0.75) -> 1.5; token 3 is padding
    score_TE = torch.tensor([[0.8, 0.2], [1.2, 0.8], [0.1, 0.3], [9.0, 1.0]])  # rows are normalised first
    loss = sequence_balance_loss(
        score_TE,
        torch.tensor([[0], [0], [1], [0]]),
        torch.tensor([0, 0, 1, 1]),
        is_token_T=torch.tensor([True, True, True, False]),
        is_trained_T=torch.tensor([False, True, True, False]),
        num_sequences=2,
        num_global_tokens=4,  # two trained tokens of four: weights 1/4 and 1/4
    )
    torch.testing.assert_close(loss, torch.tensor((1.4 + 1.5) / 4))


def gradients(
    model: PreTrainedModel,
    packing: Packing,
    max_tokens: int,
    *,
    coefficient: float,
    is_recomputed: bool = False,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    attach_dispatcher(model, LocalDispatcher())
    if is_recomputed:
        checkpoint_activations(model)
    balance = RouterBalance(model, coefficient=coefficient)
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    found: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: found.update(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    )

    def loss(logprob_BL: Tensor, _entropy_BL: Tensor, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return supervised_loss(logprob_BL, micro["mask"], num_global_tokens=TOKENS)

    batches = micro_batches(rows(), max_tokens=max_tokens, packing=packing)
    metrics = train_minibatch(
        Learner(model, optimizer, make_mesh(1, 1)), batches, loss,
        num_global_tokens=TOKENS, max_grad_norm=1e9, routers=Routers(balance=balance),
    )  # fmt: skip
    return metrics, found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_balance_gradient_is_the_same_for_every_split_and_packing(family):
    model = tiny_policy(family)
    metrics, expected = gradients(model, "padded", 1000, coefficient=0.5)
    assert metrics["router_balance"] > 1.01  # random routers are not even
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    splits = [("padded", 9, False), ("packed", 1000, False), ("packed", 12, False), ("packed", 12, True)]
    for packing, max_tokens, is_recomputed in splits:
        ours, found = gradients(model, packing, max_tokens, coefficient=0.5, is_recomputed=is_recomputed)
        assert ours["router_balance"] == pytest.approx(metrics["router_balance"], rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * largest)
    _, without = gradients(model, "padded", 1000, coefficient=0.0)
    changed = [name for name in expected if (without[name] - expected[name]).abs().max() > 1e-4 * largest]
    assert any(name.startswith(router) for router, _ in router_modules(model) for name in changed)


def check_frozen(rank: int, world_size: int, family: str, fsdp: int) -> None:
    mesh = make_mesh(world_size, ep=2, fsdp=fsdp)
    model = tiny_policy(family)
    attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
    if fsdp > 1:
        shard_parameters(model, mesh, compute_dtype=torch.float32)
    freeze_routers(model)
    before = {name: whole_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)

    def loss(logprob_BL: Tensor, _entropy_BL: Tensor, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return supervised_loss(logprob_BL, micro["mask"], num_global_tokens=TOKENS)

    batches = micro_batches(rows()[rank::2], max_tokens=100, packing="packed")
    train_minibatch(
        Learner(model, optimizer, mesh),
        batches,
        loss,
        num_global_tokens=TOKENS,
        max_grad_norm=1.0,
    )
    routers = tuple(name for name, _ in router_modules(model))
    moved = {n for n, p in model.named_parameters() if not torch.equal(whole_tensor(p.detach()), before[n])}
    frozen = {name for name in before if name.startswith(routers)}
    assert frozen and moved == before.keys() - frozen


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_frozen_routers_stay_and_all_else_moves(family, fsdp):
    run_ranks(check_frozen, 2, family, fsdp)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_with_experts_has_one_router(family):
    model = tiny_policy(family)
    names = [name for name, _ in router_modules(model)]
    assert len(names) == len({name.split(".")[2] for name in names}) == (2 if family in TWO_LAYERS else 1)


TWO_LAYERS = {"qwen3_moe", "mixtral", "gpt_oss"}
