"""AdamW that steps a tensor at a time, in one pass: whole parameters and rows of split ones alike.

Torch's own fused step takes no parameters that are split over different meshes, which experts and dense parts
are; without it AdamW makes a dozen passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from moe_kernels.adamw import adamw_step
from torch.optim import AdamW

from tasks.policy.parallel.shards import local_tensor


class OnePassAdamW(AdamW):
    """The state of torch's, under the same names; its step counts stay on the host."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a step takes the gradients that are there"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] += 1
                adamw_step(
                    *(local_tensor(t) for t in (param, param.grad, state["exp_avg"], state["exp_avg_sq"])),
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    num_steps=int(state["step"].item()),
                )
