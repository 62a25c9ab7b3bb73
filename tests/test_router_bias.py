"""Biases of routers move by what real tokens select, equally on every mesh; a skipped step moves none."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from families import tiny_policy
from ranks import run_ranks
from steps import NUM_TOKENS, micro_batch, weighted_loss
from torch import Tensor
from transformers import PreTrainedModel

from tasks.config import CampaignConfig
from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.router_bias import BIAS, RouterBias
from tasks.policy.models.routers import Routers
from tasks.policy.parallel.context import split_context
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import attach_dispatcher, take_expert_load
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.step.trainer import Learner, make_optimizer, train_minibatch
from tasks.policy.training.epoch import _balance_metrics
from tasks.rl.balance import bias_step

BATCHES = [micro_batch(seed) for seed in range(3)]


def test_a_bias_rises_below_the_mean_and_falls_above():
    step = bias_step(torch.tensor([1.0, 2.0, 3.0]), rate=0.5)  # the mean is 2
    assert step.tolist() == [0.5, 0.0, -0.5]


def biases(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)}


def steps(
    model: PreTrainedModel,
    mesh: ParallelMesh,
    batches: Any,
    *,
    loss_fn: Any = weighted_loss,
    min_micro_batches: int = 1,
) -> None:
    """Two steps; a rank may have fewer micro-batches than others."""
    optimizer = make_optimizer(model, lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    bias = RouterBias(model, rate=0.01)
    for _ in range(2):
        train_minibatch(
            Learner(model, optimizer, mesh), batches, loss_fn,
            num_global_tokens=NUM_TOKENS, max_grad_norm=1.0, routers=Routers(bias=bias),
            min_micro_batches=min_micro_batches,
        )  # fmt: skip


def one_rank(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model = tiny_policy(family)
    trained = copy.deepcopy(model)
    attach_dispatcher(trained, LocalDispatcher())
    steps(trained, make_mesh(1, 1), BATCHES)
    return model, trained


def check_mesh(
    rank: int, world_size: int, sizes: dict[str, int], model: PreTrainedModel, expected: Any
) -> None:
    mesh = make_mesh(world_size, **sizes)
    attach_dispatcher(model, make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group))
    distribute(model, mesh)
    split_context(model, mesh.cp_group)
    checkpoint_activations(model, is_context_split=mesh.cp > 1)
    before = biases(model)
    steps(model, mesh, BATCHES[mesh.share :: mesh.num_shares])
    for name, bias in biases(model).items():
        assert torch.equal(bias, expected[name]) and not torch.equal(bias, before[name])


@pytest.mark.parametrize(
    "sizes", [{"ep": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2}, {"ep": 1, "pp": 2}], ids=str
)
def test_two_ranks_of_each_axis_move_the_biases_as_one_does(sizes):
    model, trained = one_rank("deepseek_v3")
    run_ranks(check_mesh, 2, sizes, model, biases(trained))


def test_padding_is_not_counted():
    model, trained = one_rank("glm4_moe")
    attach_dispatcher(model, LocalDispatcher())
    bias = RouterBias(model, rate=0.01)
    batch = BATCHES[0]
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    bias.count(batch["attention_mask"].flatten().bool())
    (load_E,), (rows_E,) = bias._load_E, take_expert_load(model).values()
    assert load_E.sum() == 2 * batch["attention_mask"].sum() == rows_E.sum() - 2 * 3  # 3 places are padding
    assert any((bias != 0).any() for bias in biases(trained).values())


def test_empty_passes_are_not_counted():
    moved = []
    for num_passes in (1, 8):
        model = tiny_policy("deepseek_v3")
        attach_dispatcher(model, LocalDispatcher())
        steps(model, make_mesh(1, 1), BATCHES[:1], min_micro_batches=num_passes)
        moved.append(biases(model))
    assert all(torch.equal(bias, moved[1][name]) for name, bias in moved[0].items())


def test_a_skipped_step_moves_no_bias():
    model = tiny_policy("deepseek_v3")
    attach_dispatcher(model, LocalDispatcher())
    before = biases(model)

    def nan_loss(*arguments: Any) -> Any:
        loss, metrics = weighted_loss(*arguments)
        return loss * torch.nan, metrics

    steps(model, make_mesh(1, 1), BATCHES, loss_fn=nan_loss)
    assert all(torch.equal(bias, before[name]) for name, bias in biases(model).items())


def test_a_router_without_a_bias_is_refused():
    with pytest.raises(ValueError, match=r"needs routers with a e_score_correction_bias, got Qwen3Moe"):
        RouterBias(tiny_policy("qwen3_moe"), rate=0.01)


def test_metrics_list_the_rate_where_it_is_on():
    def metrics(rate: float) -> dict[str, float]:
        config = CampaignConfig.model_validate_json(json.dumps({"train": {"router_bias_rate": rate}}))
        return _balance_metrics({}, 1.0, config)

    assert metrics(0.01) == {"router_bias_rate": 0.01} and metrics(0.0) == {}
