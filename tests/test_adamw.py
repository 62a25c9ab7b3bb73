"""AdamW in one pass: torch's steps, its state, also of parameters that are split over ranks."""

from __future__ import annotations

import pytest
import torch
from families import tiny_policy
from moe_kernels.adamw import adamw_step
from ranks import run_ranks
from steps import micro_batch, one_step
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.shards import whole_tensor
from tasks.policy.step.adamw import OnePassAdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def stepped(kind: type[AdamW], dtype: torch.dtype, device: str, **options: bool) -> list[Tensor]:
    """Weights and moments after four steps on tensors whose sizes are multiples of nothing."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    shapes = [(3, 5, 7), (4099,), (1,), (64, 129)]
    params = [nn.Parameter(draw(*shape)) for shape in shapes]
    optimizer = kind(params, **SETTINGS, **options)
    for _ in range(4):
        for param in params:
            param.grad = draw(*param.shape)
        optimizer.step()
    moments = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq")]
    assert {int(optimizer.state[p]["step"]) for p in params} == {4}
    return [p.detach() for p in params] + moments


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
def test_steps_are_those_of_torch(dtype, bound, device):
    """In half precision within one rounding of each of the last numbers; on CPU torch's rounds more often."""
    options = {"fused": True}
    for ours, theirs in zip(
        stepped(OnePassAdamW, dtype, device), stepped(AdamW, dtype, device, **options), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound / 4)


def test_one_step_by_hand():
    # moments 0.1 * 2 and 0.05 * 4, corrected to 2 and 4: one rate down, after 1 % decay of 3
    param, grad, mean, square = torch.tensor([3.0]), torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)
    factors = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 0.0, "weight_decay": 0.1}
    adamw_step(param, grad, mean, square, **factors, num_steps=1)
    torch.testing.assert_close(torch.cat([param, mean, square]), torch.tensor([2.97 - 0.1, 0.2, 0.2]))
    with pytest.raises(ValueError, match="must have one shape"):
        adamw_step(param, torch.zeros(2), mean, square, **factors, num_steps=2)


def check_split(rank: int, world_size: int) -> None:
    found = []
    for kind in (AdamW, OnePassAdamW):
        model, mesh = tiny_policy("qwen3_moe").train(), make_mesh(world_size, ep=1, fsdp=2)
        attach_dispatcher(model, LocalDispatcher())
        distribute(model, mesh)
        one_step(model, mesh, [micro_batch(rank)])  # leaves gradients of nothing: the step below has its own
        optimizer: Optimizer = kind(model.parameters(), **SETTINGS)
        for seed in range(2):
            for number, param in enumerate(model.parameters()):
                torch.manual_seed(100 * seed + number)
                param.grad = torch.randn_like(param)
            optimizer.step()
        found.append([whole_tensor(p.detach()) for p in model.parameters()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_rows_of_split_parameters_step_as_whole_ones():
    run_ranks(check_split, 2)
