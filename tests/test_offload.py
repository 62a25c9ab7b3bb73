"""Moments in host memory change no bit of a step; on a GPU they leave the device between steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tasks.policy.step.offload import fetch_moments, offload_moments


def steps(device: str, *, is_offloaded: bool) -> tuple[list[torch.Tensor], AdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 32, generator=generator).to(device)) for _ in range(3)]
    optimizer = AdamW(params, lr=1e-2)
    if is_offloaded:
        offload_moments(optimizer)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(64, 32, generator=generator).to(device)
        optimizer.step()
    return [param.detach().cpu() for param in params], optimizer


def check(device: str) -> AdamW:
    expected, _ = steps(device, is_offloaded=False)
    ours, optimizer = steps(device, is_offloaded=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    return optimizer


def test_offloading_changes_no_bit():
    check("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_moments_leave_the_device_between_steps_and_come_back_to_be_written():
    optimizer = check("cuda")
    state = optimizer.state[next(iter(optimizer.state))]
    assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "cpu"
    fetch_moments(optimizer)
    assert optimizer.state[next(iter(optimizer.state))]["exp_avg"].device.type == "cuda"
