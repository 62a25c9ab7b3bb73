"""What each kernel computes, as plain torch with autograd: for tests, and to read first.

Shape key: T tokens, D features, V vocabulary, K places a row may be copied to, P copies, H expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
