"""Random batches of token values, and this project's loss on them in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.algorithm_config import AlgorithmConfig
from tasks.rl.objective import policy_objective


@dataclass
class TokenBatch:
    """[B, L] float64; slots outside the mask hold finite values, which references may multiply by 0."""

    logprob_BL: Tensor
    proximal_BL: Tensor
    behavior_BL: Tensor
    reference_BL: Tensor
    entropy_BL: Tensor
    advantage_B: Tensor
    mask_BL: Tensor

    @property
    def advantage_BL(self) -> Tensor:
        return self.advantage_B[:, None].expand_as(self.mask_BL)

    @property
    def num_sequences(self) -> int:
        return int(self.mask_BL.any(dim=1).sum())


def token_batch(seed: int, *, rows: int = 8, spread: float = 0.5, has_empty_row: bool = False) -> TokenBatch:
    """Ragged rows with holes, as tools leave them; ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length_B = torch.randint(1, 13, (rows,), generator=generator)
    length_B[0] = 12
    mask_BL = torch.arange(12) < length_B[:, None]
    mask_BL &= (torch.rand(rows, 12, generator=generator) < 0.8) | (torch.arange(12) == 0)
    if has_empty_row:
        mask_BL[1] = False
    logprob_BL = -normal(rows, 12).abs()
    proximal_BL = logprob_BL + spread * normal(rows, 12)
    behavior_BL = proximal_BL + spread * normal(rows, 12)
    reference_BL = logprob_BL + spread * normal(rows, 12)
    return TokenBatch(
        logprob_BL, proximal_BL, behavior_BL, reference_BL, normal(rows, 12).abs(), normal(rows), mask_BL
    )


def our_loss(
    batch: TokenBatch,
    algorithm: dict[str, Any],
    *,
    weight_BL: Tensor | None = None,
    packing: str = "padded",
    fixed_length: int = 16,
    keep_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient by the log-probabilities and metrics; NaN fills every slot that is not trained."""
    rows, _ = batch.mask_BL.shape
    mask_BL = batch.mask_BL if keep_BL is None else batch.mask_BL & keep_BL
    logprob_BL = torch.where(mask_BL, batch.logprob_BL, torch.nan).requires_grad_()
    micro = {
        "behavior_logprob": batch.behavior_BL,
        "proximal_logprob": batch.proximal_BL,
        "reference_logprob": batch.reference_BL,
        "advantage": batch.advantage_BL,
        "entropy": batch.entropy_BL,
    } | ({} if weight_BL is None else {"weight": weight_BL})
    micro = {name: torch.where(mask_BL, value, torch.nan) for name, value in micro.items()}
    micro["mask"], micro["logprob"] = mask_BL, logprob_BL
    micro["segment"] = torch.arange(rows)[:, None].expand_as(mask_BL)
    micro["length"] = mask_BL.sum(dim=1, keepdim=True).expand_as(mask_BL)
    if packing == "packed":
        micro = {name: value.reshape(1, -1) for name, value in micro.items()}
    objective = policy_objective(
        AlgorithmConfig.model_validate({"entropy_coefficient": 0.0, **algorithm}),
        num_global_tokens=int(mask_BL.sum()),
        num_global_sequences=int(mask_BL.any(dim=1).sum()),
        fixed_length=fixed_length,
    )
    loss, metrics = objective(micro.pop("logprob"), micro.pop("entropy"), micro)
    (gradient_BL,) = torch.autograd.grad(loss, logprob_BL)
    assert (gradient_BL[~mask_BL] == 0).all()
    return loss.detach(), gradient_BL, metrics
