"""What each kernel computes, as plain torch with autograd: for tests, and to read first.

Shape key: T tokens, D features, V vocabulary, K places a row may be copied to, P copies, H expert width,
B groups of a row, F values of a group; O and I outputs and inputs of a weight, o and i blocks of them.
Of ``rotary``: B sequences, H heads, L tokens of a sequence, R features of a head that turn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_GROUP = 128
"""Neighbouring values that share a scale."""
FP8_MAX = 448.0
FP8_SMALLEST = 1e-4
"""A group whose largest value is below it is scaled as if it were this, so that no scale is 0."""


def selective_logprob_entropy(
    hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_TV = (hidden_TD @ weight_VD.T).to(torch.promote_types(hidden_TD.dtype, torch.float32))
    logprob_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    logprob_T = logprob_TV.gather(1, ids_T.clamp(min=0)[:, None])[:, 0]
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(dim=-1)
    return torch.where(ids_T >= 0, logprob_T, 0.0), torch.where(ids_T >= 0, entropy_T, 0.0)


def gather_rows(x_TD: Tensor, slot_TK: Tensor, num_copies: int) -> Tensor:
    """Row t goes to the copies ``slot_TK[t]``; -1 is none. Copies that no slot names hold zeros here."""
    out_PD = x_TD.new_zeros(num_copies, x_TD.shape[1])
    row, place = (slot_TK >= 0).nonzero(as_tuple=True)
    return out_PD.index_copy(0, slot_TK[row, place], x_TD[row])


def sum_rows(y_PD: Tensor, slot_TK: Tensor) -> Tensor:
    """Sum of each row's copies; half-precision copies are added in float32 and rounded once."""
    wide_PD = y_PD.to(torch.promote_types(y_PD.dtype, torch.float32))
    if not len(y_PD):
        wide_PD = F.pad(wide_PD, (0, 0, 0, 1))  # something for a missing copy to point at
    copy_TKD = torch.where((slot_TK >= 0)[..., None], wide_PD[slot_TK.clamp(min=0)], 0.0)
    return copy_TKD.sum(dim=1).to(y_PD.dtype)


def swiglu_weighted(gate_up_PJ: Tensor, weight_P: Tensor) -> Tensor:
    """``weight * silu(gate) * up`` of [P, 2 H], computed in float32 and rounded once."""
    wide_PJ = gate_up_PJ.to(torch.promote_types(gate_up_PJ.dtype, torch.float32))
    gate_PH, up_PH = wide_PJ.chunk(2, dim=-1)
    return (weight_P[:, None].to(wide_PJ.dtype) * F.silu(gate_PH) * up_PH).to(gate_up_PJ.dtype)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalised in float32, rounded to the input's dtype, then times the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight_D * unit.to(x.dtype)


def quant_fp8_1x128(x_TD: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """8-bit rows, and for each group of features a float32 scale that puts its largest value on 448."""
    x_TBF = x_TD.float().unflatten(1, (-1, FP8_GROUP))
    largest_TB = x_TBF.abs().amax(dim=2).clamp(min=FP8_SMALLEST)
    # as DeepEP's formula is computed: torch divides a number by a tensor through the tensor's reciprocal
    scale_TB, factor_TB = largest_TB / FP8_MAX, largest_TB.reciprocal() * FP8_MAX
    if power_of_two:
        bits_TB = scale_TB.view(torch.int32)
        exponent_TB = ((bits_TB >> 23) + ((bits_TB & 0x7FFFFF) != 0).int()).clamp(max=254)
        scale_TB = (exponent_TB << 23).view(torch.float32)
        factor_TB = ((254 - exponent_TB) << 23).view(torch.float32)  # exact, being a power of two too
    return (x_TBF * factor_TB[:, :, None]).to(torch.float8_e4m3fn).flatten(1), scale_TB


def dequant_fp8_1x128(rows_TD: Tensor, scale_TB: Tensor) -> Tensor:
    return (rows_TD.float().unflatten(1, (-1, FP8_GROUP)) * scale_TB[:, :, None]).flatten(1).bfloat16()


def quant_fp8_128x128(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights, and for each block of 128 x 128 a float32 scale that puts its largest on 448."""
    missing = [-size % FP8_GROUP for size in weight_OI.shape]
    wide_OI = F.pad(weight_OI.float(), (0, missing[1], 0, missing[0]))
    wide_oFiF = wide_OI.unflatten(1, (-1, FP8_GROUP)).unflatten(0, (-1, FP8_GROUP))
    largest_o1i1 = wide_oFiF.abs().amax(dim=(1, 3), keepdim=True).clamp(min=FP8_SMALLEST)
    scaled_OI = (wide_oFiF * (largest_o1i1.reciprocal() * FP8_MAX)).flatten(2, 3).flatten(0, 1)
    scale_oi = (largest_o1i1 / FP8_MAX)[:, 0, :, 0]
    num_rows, num_columns = weight_OI.shape
    return scaled_OI[:num_rows, :num_columns].to(torch.float8_e4m3fn), scale_oi


def dequant_fp8_128x128(bytes_OI: Tensor, scale_oi: Tensor) -> Tensor:
    scale_OI = scale_oi.repeat_interleave(FP8_GROUP, 0).repeat_interleave(FP8_GROUP, 1)
    return bytes_OI.float() * scale_OI[: bytes_OI.shape[0], : bytes_OI.shape[1]]


def rotary(x_BHLD: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> Tensor:
    """The halves of the first R features of each head turned against each other by a token's angles."""
    turned, rest = x_BHLD.split([cos_BLR.shape[-1], x_BHLD.shape[-1] - cos_BLR.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos_BLR[:, None] + across * sin_BLR[:, None], rest), dim=-1)


def adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, keep: float, beta1: float,
    beta2: float, step_size: float, root: float, eps: float,
) -> None:  # fmt: skip
    """In place; ``keep`` is what weight decay leaves, ``root`` that of the second moment's correction."""
    wide = torch.promote_types(param.dtype, torch.float32)
    mean = beta1 * exp_avg.to(wide) + (1 - beta1) * grad.to(wide)
    square = beta2 * exp_avg_sq.to(wide) + (1 - beta2) * grad.to(wide).square()
    param.copy_(keep * param.to(wide) - step_size * mean / (square.sqrt() / root + eps))
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
