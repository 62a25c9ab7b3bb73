"""The fused policy loss against ``tasks/rl/objective.py``: every algorithm, estimator, aggregation and mask.

Interpreted in float64 the two differ by the order of sums alone; on CUDA in float32 by 1e-6 of the largest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_objective import ALGORITHMS, table_rows
from token_batches import TokenBatch, token_batch
from torch import Tensor

from tasks.algorithm_config import AlgorithmConfig
from tasks.policy.step.fused_loss import fused_policy_objective
from tasks.rl.objective import policy_objective
from tasks.rl.packing import micro_batches, num_trained_sequences, num_trained_tokens
from tasks.rl.preparation import prepare_rows

COUNTS = {"num_global_tokens": 57, "num_global_sequences": 7, "fixed_length": 16}
CASES = {
    **{f"{loss} {aggregation}": {"loss": loss, "aggregation": aggregation}
       for loss in ("clip", "sequence_clip", "clipped_weight", "soft_gate")
       for aggregation in ("token_mean", "sequence_mean", "fixed")},
    **{f"{estimator} {unbiased}": {
        "kl": "loss", "kl_coefficient": 0.3, "kl_estimator": estimator, "kl_unbiased": unbiased}
       for estimator in ("k1", "k2", "k3", "k3_with_k2_gradient") for unbiased in (False, True)},
    "dual": {"dual_clip": 1.5},
    "dual sequence": {"dual_clip": 1.5, "loss": "sequence_clip", "entropy_coefficient": 0.0},
    "wide": {"loss": "clipped_weight", "clip_low": 1.0, "clip_high": 0.1},
}  # fmt: skip


@pytest.fixture
def on(triton_device: str) -> tuple[str, torch.dtype]:
    """Device and dtype that the kernel runs with."""
    return triton_device, torch.float32 if triton_device == "cuda" else torch.float64


def micro_batch(batch: TokenBatch, *, has_weight: bool, has_proximal: bool) -> dict[str, Tensor]:
    """NaN fills every slot that is not trained."""
    rows, _ = batch.mask_BL.shape
    micro = {
        "behavior_logprob": batch.behavior_BL,
        "reference_logprob": batch.reference_BL,
        "advantage": batch.advantage_BL,
    }
    if has_proximal:
        micro["proximal_logprob"] = batch.proximal_BL
    if has_weight:
        micro["weight"] = batch.entropy_BL + 0.1
    micro = {name: torch.where(batch.mask_BL, value, torch.nan) for name, value in micro.items()}
    micro["mask"] = batch.mask_BL
    micro["segment"] = torch.arange(rows)[:, None].expand_as(batch.mask_BL)
    micro["length"] = batch.mask_BL.sum(dim=1, keepdim=True).expand_as(batch.mask_BL)
    return micro


def results(objective: Any, inputs: Any, micro: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    loss, metrics = objective(*leaves, micro)
    by_logprob, by_entropy = torch.autograd.grad(3 * loss, leaves, allow_unused=True)
    zero_BL = torch.zeros_like(by_logprob)
    gradients = {"by logprob": by_logprob, "by entropy": by_entropy if by_entropy is not None else zero_BL}
    return {"loss": loss.detach(), **gradients, **metrics}


def check(algorithm: AlgorithmConfig, inputs: Any, micro: dict[str, Tensor], on: Any) -> None:
    """From the same rounded numbers, the reference in float64."""
    device, dtype = on
    there = {
        name: (value.to(dtype) if value.is_floating_point() else value).to(device)
        for name, value in micro.items()
    }
    moved = [value.to(device, dtype) for value in inputs]
    here = {
        name: value.cpu().double() if value.is_floating_point() else value.cpu()
        for name, value in there.items()
    }
    expected = results(policy_objective(algorithm, **COUNTS), [value.cpu().double() for value in moved], here)
    got = results(fused_policy_objective(algorithm, **COUNTS), moved, there)
    assert got.keys() == expected.keys()
    bound = 1e-6 if dtype == torch.float32 else 1e-12
    num_tokens = expected["tokens"].item()
    for name, value in expected.items():
        # a metric is a sum, which the trainer divides by the tokens
        least = 1.0 if value.ndim or name == "loss" else num_tokens
        size = max(value.double().abs().max().item(), least)
        difference = (got[name].cpu().double() - value.double()).abs().max().item()
        assert difference <= bound * size, (name, difference)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_proximal", [False, True])
def test_every_choice_has_the_references_loss_gradients_and_metrics(case, has_weight, has_proximal, on):
    algorithm = AlgorithmConfig.model_validate({"entropy_coefficient": 0.2, **CASES[case]})
    batch = token_batch(len(case), rows=80, spread=0.4, has_empty_row=True)
    micro = micro_batch(batch, has_weight=has_weight, has_proximal=has_proximal)
    nan_BL = torch.where(batch.mask_BL, batch.logprob_BL, torch.nan)
    check(algorithm, (nan_BL, torch.where(batch.mask_BL, batch.entropy_BL, torch.nan)), micro, on)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_every_algorithm_of_the_table_as_the_trainer_calls_it(name, packing, on):
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    rows, _ = prepare_rows(table_rows(), algorithm)
    assert num_trained_tokens(rows) and num_trained_sequences(rows)
    for micro in micro_batches(rows, max_tokens=26, packing=packing):
        logprob_BL = -1.5 + 0.02 * micro["input_ids"].double()
        micro = {n: value.double() if value.is_floating_point() else value for n, value in micro.items()}
        check(algorithm, (logprob_BL, -logprob_BL), dict(micro), on)


def test_ties_and_bounds_share_their_gradient_as_autograd_does(on):
    """Ratios exactly 1 and at both bounds, advantages of either sign and zero."""
    algorithm = AlgorithmConfig(clip_low=0.5, clip_high=1.0, dual_clip=3.0, entropy_coefficient=0.0)
    ratio = torch.tensor([0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 0.25], dtype=torch.float64)
    if on[1] == torch.float32:  # on which side of a bound a ratio lies is a matter of its last bit
        ratio[[0, 2]] = ratio[[0, 2]] + 0.1
    advantage_BL = torch.tensor([1.0, 0.0, -1.0, -2.0], dtype=torch.float64)[:, None].expand(4, 7)
    mask_BL = torch.ones(4, 7, dtype=torch.bool)
    logprob_BL = ratio.log().expand(4, 7).contiguous()
    micro = {
        "mask": mask_BL, "advantage": advantage_BL, "behavior_logprob": torch.zeros_like(logprob_BL),
        "segment": torch.zeros(4, 7, dtype=torch.int64), "length": torch.full((4, 7), 7),
    }  # fmt: skip
    check(algorithm, (logprob_BL, logprob_BL.abs()), micro, on)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_trained_token_that_is_not_finite_makes_the_loss_not_finite(bad, on):
    device, dtype = on
    batch = token_batch(0)
    micro = micro_batch(batch, has_weight=False, has_proximal=True)
    logprob_BL = torch.where(batch.mask_BL, batch.logprob_BL, torch.nan)
    row, column = batch.mask_BL.nonzero()[3].tolist()
    logprob_BL[row, column] = bad
    micro["advantage"] = -micro["advantage"].abs()
    there = {n: (v.to(dtype) if v.is_floating_point() else v).to(device) for n, v in micro.items()}
    for loss in ("clip", "clipped_weight", "sequence_clip"):
        objective = fused_policy_objective(AlgorithmConfig(loss=loss), **COUNTS)
        value, _ = objective(logprob_BL.to(device, dtype), batch.entropy_BL.to(device, dtype), there)
        assert not value.isfinite()


def test_no_tokens_at_all(on):
    device, dtype = on
    none = torch.zeros(0, 4, dtype=dtype, device=device)
    micro = dict.fromkeys(("behavior_logprob", "advantage"), none)
    micro |= {"mask": none.bool(), "segment": none.long(), "length": none.long()}
    got = results(fused_policy_objective(AlgorithmConfig(), **COUNTS), (none, none), micro)
    assert got["loss"] == 0 and got["tokens"] == 0 and got["by logprob"].shape == (0, 4)


@pytest.mark.parametrize(
    ("kernel", "module"), [("torch", "rl.objective"), ("fused", "policy.step.fused_loss")]
)
def test_the_configuration_chooses_what_computes_the_loss(kernel, module):
    from tasks.config import CampaignConfig  # needs packages that the gpu tests do not
    from tasks.policy.training.epoch import make_loss

    config = CampaignConfig.model_validate({"train": {"backend": "nccl", "loss_kernel": kernel}})
    counts = {"num_global_tokens": 3, "num_global_sequences": 2}
    assert make_loss(config, "clipped_policy", **counts).__module__ == f"tasks.{module}"
    assert make_loss(config, "supervised", **counts).__module__ == "tasks.policy.training.epoch"
    assert config.train.kernels["loss"] == kernel
