"""Optimizer moments in host memory while a model runs forward and backward; on the device for the step.

They are two thirds of what float32 training keeps of a parameter and idle but for the step, when activations
are gone. Masters and gradients stay on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from tasks.policy.checkpoint.weights import MOMENTS


def offload_moments(optimizer: Optimizer) -> None:
    """From now on the moments are on the device only during ``optimizer.step``; call after loading them."""
    optimizer.register_step_pre_hook(lambda *_: fetch_moments(optimizer))
    optimizer.register_step_post_hook(lambda *_: put_moments_away(optimizer))
    put_moments_away(optimizer)


def fetch_moments(optimizer: Optimizer) -> None:
    """Bring the moments to their parameters; for who reads them between steps."""
    _move(optimizer, None)


def put_moments_away(optimizer: Optimizer) -> None:
    """Send the moments back to host memory after ``fetch_moments``."""
    _move(optimizer, torch.device("cpu"))


def _move(optimizer: Optimizer, device: torch.device | None) -> None:
    for param, state in optimizer.state.items():
        for name in MOMENTS:
            moment: Tensor = state[name]
            state[name] = moment.to(device or param.device)
