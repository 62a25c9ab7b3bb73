"""One step of AdamW on one tensor, in one pass over memory.

Every number of a step is read once and written once: weight, gradient and two moments in, weight and moments
out. Computed in float32 (float64 for float64 tensors) and rounded once each, as torch's own fused step does.
A tensor at a time, so that rows of a split parameter are as good as a whole one.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels import device, reference


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    num_steps: int,
) -> None:
    """Change ``param`` and its moments in place; ``num_steps`` counts this one."""
    if not param.shape == grad.shape == exp_avg.shape == exp_avg_sq.shape:
        raise ValueError(
            "a weight, its gradient and its moments must have one shape, got "
            f"{[list(t.shape) for t in (param, grad, exp_avg, exp_avg_sq)]}."
        )
    factors = {
        "keep": 1 - lr * weight_decay,
        "beta1": beta1,
        "beta2": beta2,
        "step_size": lr / (1 - beta1**num_steps),
        "root": (1 - beta2**num_steps) ** 0.5,
        "eps": eps,
    }
    if not device.takes_triton(param):
        reference.adamw_step(param, grad, exp_avg, exp_avg_sq, **factors)
        return
    if not all(t.is_contiguous() for t in (param, exp_avg, exp_avg_sq)):
        raise ValueError("a weight and its moments must be contiguous to be stepped in place, got strides.")
    from moe_kernels import adamw_triton

    adamw_triton.step(param, grad.contiguous(), exp_avg, exp_avg_sq, **factors)
