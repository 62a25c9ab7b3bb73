"""Our experts function against transformers' own loop over experts, for every family we claim.

Tolerance 1e-5: the largest logits are 3 to 5 in float32, so one rounding is 2e-7; measured differences are at
most 5e-7.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, NUM_EXPERTS, tiny_policy, token_ids
from ranks import run_ranks
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from tasks.policy.dispatch.dispatcher import AllToAllDispatcher, LocalDispatcher
from tasks.policy.parallel.experts import (
    ExpertShard,
    attach_dispatcher,
    expert_shards,
    experts_modules,
    local_experts,
    take_expert_load,
    weighted_rows,
)


def eager_logits(model: PreTrainedModel, input_ids_BL: Tensor) -> Tensor:
    reference = copy.deepcopy(model)
    reference.set_experts_implementation("eager")
    with torch.no_grad():
        return reference(input_ids=input_ids_BL).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_eager_experts(family):
    model = tiny_policy(family)
    expected = eager_logits(model, token_ids(0))
    attach_dispatcher(model, LocalDispatcher())
    torch.testing.assert_close(model(input_ids=token_ids(0)).logits, expected, rtol=0, atol=1e-5)
    for load_e in take_expert_load(model).values():
        assert load_e.sum() == token_ids(0).numel() * 2  # the logits came through our function
    assert all(load_e.sum() == 0 for load_e in take_expert_load(model).values())


def check_logits(rank: int, world_size: int, models: dict[str, PreTrainedModel]) -> None:
    for family, model in models.items():
        expected = eager_logits(model, token_ids(rank))
        attach_dispatcher(model, AllToAllDispatcher(dist.group.WORLD))
        for name, shard in expert_shards(model).items():
            assert (shard.start, shard.count, shard.num_experts) == (4 * rank, 4, NUM_EXPERTS)
            assert model.get_parameter(name).shape[0] == 4
        logits = model(input_ids=token_ids(rank)).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5, msg=lambda m, f=family: f"{f}: {m}")


def test_logits_on_two_ranks_equal_transformers_eager_experts():
    run_ranks(check_logits, 2, {family: tiny_policy(family) for family in FAMILIES})


def nemotron_experts() -> NemotronHExperts:
    """No gate and another activation: the one layout that the families above lack."""
    config = NemotronHConfig(
        hidden_size=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_latent_size=None,
        mlp_hidden_act="relu2",
    )
    config._experts_implementation = "eager"
    experts = NemotronHExperts(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in experts.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    experts.expert_shard = ExpertShard(start=0, count=4, num_experts=4)
    experts.expert_load_e = torch.zeros(4, dtype=torch.int64)
    experts.compute_rows = partial(weighted_rows, experts)
    return experts


def test_experts_without_a_gate_equal_transformers_eager_experts():
    experts = nemotron_experts()
    x_RD = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    expert_RK, weight_RK = torch.tensor([[0, 3], [3, 1], [0, 1], [1, 0], [3, 0]]), torch.rand(5, 2)
    ours = local_experts(experts, x_RD, expert_RK, weight_RK)
    torch.testing.assert_close(ours, experts(x_RD, expert_RK, weight_RK), rtol=1e-5, atol=1e-5)


def test_rows_without_an_expert_are_zero_and_unselected_weights_do_not_leak():
    experts = nemotron_experts()
    x_RD = torch.ones(3, 8, requires_grad=True)
    weight_RK = torch.tensor([[0.5, torch.nan], [torch.nan, torch.nan], [torch.nan, 2.0]], requires_grad=True)
    y_RD = local_experts(experts, x_RD, torch.tensor([[2, -1], [-1, -1], [-1, 2]]), weight_RK)
    y_RD.square().sum().backward()
    torch.testing.assert_close(y_RD[2], 4 * y_RD[0])
    assert y_RD[1].abs().sum() == 0
    assert x_RD.grad is not None and weight_RK.grad is not None
    assert x_RD.grad[1].abs().sum() == 0 and x_RD.grad.isfinite().all()
    assert weight_RK.grad[[0, 1, 1, 2], [1, 0, 1, 0]].tolist() == [0, 0, 0, 0]
    for param in experts.parameters():
        assert param.grad is not None and param.grad.isfinite().all()
        assert param.grad[[0, 1, 3]].abs().sum() == 0 and param.grad[2].abs().sum() > 0


def test_room_for_missing_selections_leaves_nothing_in_the_gradient_of_a_bias():
    model: Any = tiny_policy("gpt_oss")
    attach_dispatcher(model, LocalDispatcher())
    _, experts = next(experts_modules(model))
    x_RD = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    expert_RK = torch.tensor([[0, 3], [-1, 7], [-1, -1], [7, 0], [3, -1]])
    found = []
    for num_pairs in (None, expert_RK.numel()):
        y_RD = local_experts(experts, x_RD, expert_RK, torch.full((5, 2), 0.5), num_pairs=num_pairs)
        found.append(torch.autograd.grad(y_RD.sin().sum(), list(experts.parameters())))
    assert experts.has_bias
    assert all(torch.equal(exact, room) for exact, room in zip(*found, strict=True))


def test_a_rank_that_receives_no_row_still_has_gradients():
    """Its backward must run too: the dispatcher's backward is a collective call."""
    experts = nemotron_experts()
    x_RD = torch.ones(0, 8, requires_grad=True)
    y_RD = local_experts(experts, x_RD, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    y_RD.sum().backward()
    assert y_RD.shape == (0, 8) and x_RD.grad is not None
    assert all(param.grad is not None and param.grad.abs().sum() == 0 for param in experts.parameters())


def test_half_precision_output_keeps_its_type_and_sums_in_float32():
    experts = nemotron_experts().to(torch.bfloat16)
    x_RD = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expert_RK, weight_RK = torch.tensor([[0, 1]] * 6), torch.full((6, 2), 0.5)
    ours = local_experts(experts, x_RD, expert_RK, weight_RK)
    exact = experts.float()(x_RD.float(), expert_RK, weight_RK)
    assert ours.dtype == torch.bfloat16
    # relative to the largest: two projections and one store, each 2^-9, and relu squared doubles the first
    assert (ours.float() - exact).abs().max() < exact.abs().max() * 4 * 2**-8


def test_an_unknown_local_expert_is_refused():
    with pytest.raises(RuntimeError, match=r"local expert numbers must be below 4\. Check that the router"):
        local_experts(nemotron_experts(), torch.ones(1, 8), torch.tensor([[1, 4]]), torch.ones(1, 2))


def test_what_cannot_be_attached_is_refused():
    class ThreeRanks(LocalDispatcher):
        num_ranks = 3

    model = tiny_policy("qwen3_moe")
    text = "num_experts (8) must be a multiple of the expert-parallel size (3); choose one of [1, 2, 4, 8]."
    with pytest.raises(ValueError, match=re.escape(text)):
        attach_dispatcher(model, ThreeRanks())
    attach_dispatcher(model, LocalDispatcher())
    with pytest.raises(ValueError, match=r"must hold every expert"):
        attach_dispatcher(model, LocalDispatcher())
    dense = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    with pytest.raises(ValueError, match=r"must have experts modules .* got LlamaForCausalLM"):
        attach_dispatcher(dense, LocalDispatcher())
    assert not list(experts_modules(dense))
