"""A layer's local experts, fused against plain, over every kind of routing that a router can come up with.

Shape key: R rows, K selections, D features, E experts, all local.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.parallel.experts import attach_dispatcher, fused_weighted_rows, local_experts, weighted_rows

E, K = 6, 3
NAMES = ("y", "d x", "d weight", "d gate_up", "d down")
ROUTINGS = {
    "random": "any K of E",
    "empty experts": "two experts get every row, four none",
    "one takes all": "one selection, always the last expert",
    "maximal skew": "the first expert gets every row but one",
    "holes": "a third of the selections is missing",
    "one selection": "a single row selects a single expert",
    "none": "no row selects any",
}


def experts_module(width: int, hidden: int) -> Any:
    shape: dict[str, Any] = {
        "hidden_size": hidden, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "num_hidden_layers": 1, "num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": width,
        "vocab_size": 16, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    attach_dispatcher(model, LocalDispatcher())
    return model.model.layers[0].mlp.experts


def select(routing: str, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    chosen_RK = torch.rand(num_rows, E, generator=generator).topk(K, dim=1).indices
    if routing == "empty experts":
        chosen_RK = torch.tensor([4, 1, -1]).repeat(num_rows, 1)
    elif routing == "one takes all":
        chosen_RK = torch.tensor([-1, E - 1, -1]).repeat(num_rows, 1)
    elif routing == "maximal skew":
        chosen_RK = torch.tensor([0, -1, -1]).repeat(num_rows, 1)
        chosen_RK[-1] = torch.tensor([-1, -1, E - 1])
    elif routing == "holes":
        chosen_RK = torch.where(torch.rand(num_rows, K, generator=generator) < 0.33, -1, chosen_RK)
    elif routing in ("one selection", "none"):
        chosen_RK = torch.full_like(chosen_RK, -1)
        if routing == "one selection":
            chosen_RK[num_rows // 2, 1] = 2
    return chosen_RK


def step(
    experts: Any, kernel: Any, inputs: list[Tensor], slope_RD: Tensor, *, num_pairs: int | None = None
) -> list[Tensor]:
    x_RD, expert_RK, weight_RK = inputs
    leaves = [x_RD.clone().requires_grad_(), weight_RK.clone().requires_grad_(), *experts.parameters()]
    experts.compute_rows = partial(kernel, experts)
    y_RD = local_experts(experts, leaves[0], expert_RK, leaves[1], num_pairs=num_pairs)
    return [y_RD.detach(), *torch.autograd.grad(y_RD, leaves, slope_RD)]


def draw(routing: str, num_rows: int, hidden: int, device: str) -> tuple[list[Tensor], Tensor]:
    """Rows, selections and weights, and the slope of what comes out."""
    generator = torch.Generator().manual_seed(1)
    expert_RK = select(routing, num_rows)
    # the weight of a selection that is missing may be anything
    weight_RK = torch.rand(num_rows, K, generator=generator).where(expert_RK >= 0, torch.nan)
    x_RD = torch.randn(num_rows, hidden, generator=generator)
    slope_RD = torch.randn(num_rows, hidden, generator=generator).to(device)
    return [x_RD.to(device), expert_RK.to(device), weight_RK.to(device)], slope_RD


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kernel", [weighted_rows, fused_weighted_rows])
def test_room_for_missing_selections_changes_no_bit(kernel, routing, device, request):
    """Which spares the host from waiting for their number. What nobody wrote is NaN, where torch can see to
    it."""
    request.addfinalizer(partial(torch.use_deterministic_algorithms, False))
    torch.use_deterministic_algorithms(True, warn_only=True)  # for its fill; cuBLAS asks for more
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    experts = experts_module(width=40, hidden=24).to(device)
    inputs, slope_RD = draw(routing, 7, 24, device)
    exact = step(experts, kernel, inputs, slope_RD)
    for num_pairs in (7 * K, 7 * K - 1) if routing != "random" else (7 * K,):
        room = step(experts, kernel, inputs, slope_RD, num_pairs=num_pairs)
        for name, got, expected in zip(NAMES, room, exact, strict=True):
            assert torch.equal(got, expected), (name, num_pairs)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("num_rows", "hidden", "width"), [(1, 16, 8), (7, 24, 40), (33, 128, 96)])
def test_fused_experts_are_the_plain_ones_for_every_routing(routing, num_rows, hidden, width, device):
    experts = experts_module(width, hidden).to(device)
    inputs, slope_RD = draw(routing, num_rows, hidden, device)
    plain = step(experts, weighted_rows, inputs, slope_RD)
    fused = step(experts, fused_weighted_rows, inputs, slope_RD)
    for name, got, expected in zip(NAMES, fused, plain, strict=True):
        assert got.isfinite().all(), name
        size = expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}")
