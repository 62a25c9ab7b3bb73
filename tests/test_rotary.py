"""Fused rotary embedding: transformers' own, forward and backward."""

from __future__ import annotations

import pytest
import torch
from families import tiny_policy, token_ids
from moe_kernels import device as devices
from moe_kernels import reference
from moe_kernels.rotary import rotary
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

from tasks.policy.models.rotary import use_fused_rotary


def case(shape: tuple[int, ...], turned: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Heads as a projection gives them, angles of one position or of each sequence's, and a slope."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, length, width = shape
    x_BHLD = torch.randn(batch, length, heads, width, generator=generator).transpose(1, 2)
    rows = 1 if batch % 2 else batch
    angle_BLR = 10 * torch.randn(rows, length, turned // 2, generator=generator).repeat(1, 1, 2)
    slope_BHLD = torch.randn(shape, generator=generator)
    return [t.to(device, dtype) for t in (x_BHLD, angle_BLR.cos(), angle_BLR.sin(), slope_BHLD)]


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((1, 1, 1, 2), 2),
        ((2, 3, 5, 16), 16),
        ((3, 32, 7, 128), 128),
        ((2, 5, 9, 24), 8),
        ((4, 1, 33, 64), 64),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_that_of_transformers(dtype, shape, turned, device):
    x_BHLD, cos_BLR, sin_BLR, slope_BHLD = case(shape, turned, dtype, device)
    found = []
    for turn in (rotary, lambda x, cos, sin: apply_rotary_pos_emb(x, x, cos, sin)[0], reference.rotary):
        x = x_BHLD.clone().requires_grad_()
        y = turn(x, cos_BLR, sin_BLR)
        found.append((y, *torch.autograd.grad(y, x, slope_BHLD)))
    # each of two products and their sum is rounded; sums of sizes bound the terms of both passes
    size = x_BHLD.float().abs().amax() + slope_BHLD.float().abs().amax()
    is_exact = not devices.takes_triton(x_BHLD)
    bound = 0.0 if is_exact else 3 * size.item() * (2**-9 if dtype == torch.bfloat16 else 2**-24)
    for ours, theirs, formula in zip(*found, strict=True):
        assert ours.shape == x_BHLD.shape and torch.equal(theirs, formula)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def test_turning_by_the_negative_angle_is_the_gradient():
    # one pair (3, 4) turned by a quarter: (-4, 3); a slope of (1, 0) comes from the second: (0, -1)
    x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2).requires_grad_()
    y = rotary(x, torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    torch.testing.assert_close(y.flatten(), torch.tensor([-4.0, 3.0]))
    y.backward(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2))
    torch.testing.assert_close(x.grad.flatten(), torch.tensor([0.0, -1.0]))


def test_what_does_not_fit_is_refused():
    x_BHLD, cos_BLR, sin_BLR, _ = case((2, 3, 5, 16), 16, torch.float32, "cpu")
    for cos in (cos_BLR[:, :4], torch.ones(3, 5, 16), torch.ones(2, 5, 18), torch.ones(2, 5, 15)):
        with pytest.raises(ValueError, match=r"must be \[B, H, L, D\] and twice \[B or 1, L, R\]"):
            rotary(x_BHLD, cos, cos)
    with pytest.raises(ValueError, match="one dtype"):
        rotary(x_BHLD.bfloat16(), cos_BLR, sin_BLR)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_a_policy_with_fused_rotary_is_the_policy_and_others_keep_their_own(family, monkeypatch):
    model, other = tiny_policy(family), tiny_policy(family)
    expected = model(input_ids=token_ids(0)).logits
    assert use_fused_rotary(model) == model.config.num_hidden_layers
    calls = []
    monkeypatch.setattr(reference, "rotary", lambda *a: calls.append(1) or formula(*a))
    assert torch.equal(model(input_ids=token_ids(0)).logits, expected)
    assert len(calls) == 2 * model.config.num_hidden_layers
    other(input_ids=token_ids(0))
    assert len(calls) == 2 * model.config.num_hidden_layers


formula = reference.rotary
