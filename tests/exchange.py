"""The contract of every dispatcher, checked against a dense loop over experts: on gloo ranks and on GPUs.

Shape key: T tokens of this rank, K selections, D features, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_kernels.reference import FP8_GROUP, FP8_MAX
from torch import Tensor

from tasks.policy.dispatch.dispatcher import Dispatcher

CASES = {  # tokens on each rank, and what they select
    "random": ([5, 3, 4], "random"),
    "a rank without tokens": ([0, 7, 2], "random"),
    "no tokens anywhere": ([0, 0, 0], "random"),
    "one token": ([1, 0, 0], "random"),
    "first expert takes all": ([5, 3, 4], "first"),
    "last expert takes all": ([5, 3, 4], "last"),
    "some selections missing": ([9, 8, 7], "some missing"),
    "every selection missing": ([5, 3, 4], "none"),
    "odd counts": ([17, 31, 13], "random"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    num_experts: int = 6
    num_selected: int = 2
    hidden: int = 3
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    scale: int = 1
    """Each rank has this many times the tokens of the case."""
    is_8_bit: bool = False
    """Draw features that 8-bit floats with a scale a block represent exactly."""
    num_roundings: int = 2
    """To bfloat16, from a term to the result: of a rank's sum for its token, and of the ranks' total. Where
    an expert's row travels by itself, it is rounded too."""

    @property
    def tolerance(self) -> float:
        """Largest error of a result, as a share of the sum of its terms' sizes; derived, not measured."""
        if self.dtype == torch.bfloat16:  # half of 2^-7 a rounding; a hundredth for float32 sums in between
            return 1.01 * self.num_roundings * 2**-8
        # at most 8 terms: 7 additions and a product
        return 8 * (2**-24 if self.dtype == torch.float32 else 2**-53)


def selections(kind: str, num_tokens: int, setting: Setting, generator: torch.Generator) -> Tensor:
    score_TE = torch.rand(num_tokens, setting.num_experts, generator=generator)
    chosen_TK = score_TE.topk(setting.num_selected, dim=1).indices
    if kind == "some missing":
        return torch.where(torch.rand(chosen_TK.shape, generator=generator) < 0.5, chosen_TK, -1)
    if kind in ("first", "last"):  # one selection: an expert twice for one token is no routing
        chosen_TK[:, 1:] = -1
        chosen_TK[:, 0] = 0 if kind == "first" else setting.num_experts - 1
        return chosen_TK
    return torch.full_like(chosen_TK, -1) if kind == "none" else chosen_TK


def features(num_tokens: int, setting: Setting, generator: torch.Generator) -> Tensor:
    x_TD = torch.randn(num_tokens, setting.hidden, dtype=torch.float64, generator=generator)
    if setting.is_8_bit and num_tokens:
        x_TBF = x_TD.unflatten(1, (-1, FP8_GROUP))
        x_TBF[:, :, 0] = FP8_MAX / 2**6  # so that a block's scale is a power of two
        x_TD = (x_TBF * 2**6).float().to(torch.float8_e4m3fn).double().flatten(1) / 2**6
    return x_TD.to(setting.dtype)


def expert(x_TD: Tensor, number_T: Tensor) -> Tensor:
    """Not linear, so that a row summed too early shows; another function for every global number."""
    return (x_TD * (number_T + 1)[:, None]).sin()


def weighted_sum(x_TD: Tensor, number_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """In float64 whatever comes in."""
    x_TD = x_TD.double()
    y_TD = torch.zeros_like(x_TD)
    for number_T, weight_T in zip(number_TK.unbind(1), weight_TK.unbind(1), strict=True):
        weight_T = torch.where(number_T >= 0, weight_T, 0).double()
        y_TD = y_TD + expert(x_TD, number_T) * weight_T[:, None]
    return y_TD


def sizes_of_terms(x_TD: Tensor, number_TK: Tensor, weight_TK: Tensor, grad_TD: Tensor) -> tuple[Tensor, ...]:
    """Sums of absolute terms behind an output, a gradient of x and a gradient of a weight."""
    x_TD, grad_TD = x_TD.double(), grad_TD.double()
    y_TD, grad_x_TD, grad_weights = torch.zeros_like(x_TD), torch.zeros_like(x_TD), []
    for number_T, weight_T in zip(number_TK.unbind(1), weight_TK.unbind(1), strict=True):
        weight_T1 = torch.where(number_T >= 0, weight_T, 0).double()[:, None]
        factor_T1 = (number_T + 1)[:, None]
        value_TD = expert(x_TD, number_T).abs()
        y_TD += value_TD * weight_T1
        grad_x_TD += ((x_TD * factor_T1).cos() * factor_T1 * grad_TD).abs() * weight_T1
        grad_weights.append((value_TD * grad_TD.abs()).sum(dim=1))
    return y_TD, grad_x_TD, torch.stack(grad_weights, dim=1)


def run_case(dispatcher: Dispatcher, case: str, setting: Setting = Setting()) -> tuple[Tensor, ...]:
    """Output and gradients through the dispatcher, checked against the dense loop."""
    tokens, kind = CASES[case]
    generator = torch.Generator().manual_seed(dispatcher.rank)
    number_TK = selections(kind, setting.scale * tokens[dispatcher.rank], setting, generator)
    x_TD = features(number_TK.shape[0], setting, generator).to(setting.device)
    weights = torch.float64 if setting.dtype == torch.float64 else torch.float32
    weight_TK = torch.rand(number_TK.shape, dtype=weights, generator=generator)
    weight_TK[number_TK < 0] = torch.nan  # a missing selection's weight must not leak
    grad_TD = torch.randn(x_TD.shape, dtype=torch.float64, generator=generator).to(setting.dtype)
    number_TK, weight_TK, grad_TD = (t.to(setting.device) for t in (number_TK, weight_TK, grad_TD))

    results = []
    for through_dispatcher in (True, False):
        x, weight = x_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
        if through_dispatcher:
            sent = dispatcher.dispatch(x, number_TK, weight, setting.num_experts)
            start = dispatcher.rank * setting.num_experts // dispatcher.num_ranks
            number_RK = torch.where(sent.expert_RK >= 0, sent.expert_RK + start, -1)
            y_RD = weighted_sum(sent.x_RD, number_RK, sent.weight_RK).to(setting.dtype)
            y = dispatcher.combine(y_RD, sent.handle)
            assert y.dtype == setting.dtype and sent.weight_RK.dtype == weights
            y.backward(grad_TD)
        else:
            # double before the sum, so that gradients of the dense loop are not rounded
            x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
            y = weighted_sum(x, number_TK, weight)
            y.backward(grad_TD.double())
        assert x.grad is not None and weight.grad is not None
        results.append((y.detach(), x.grad, weight.grad))
    sizes = sizes_of_terms(x_TD, number_TK, weight_TK, grad_TD)
    # a weight's gradient travels in its own type: sums over features, rounded where it arrives
    of_weights = 2**-23 if weights == torch.float32 else setting.hidden * 2**-52
    shares = setting.tolerance, setting.tolerance, of_weights
    names = "output", "gradient of x", "gradient of weights"
    for name, ours, dense, size, share in zip(names, *results, sizes, shares, strict=True):
        error = (ours.double() - dense).abs()
        worst = (error - share * size).max().item() if error.numel() else 0.0
        assert ours.isfinite().all() and worst <= 1e-30, f"{case}: {name} exceeds its bound by {worst}"
    return results[0]
