"""Losses and their gradients equal verl's, TRL's and AReaL's in float64, to 1e-8, packed and padded.

Where a reference is wrong the test says so and asserts the right value. Runs with ``pytest -m parity``.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import references
import torch
from references import trl_loss
from token_batches import our_loss, token_batch

pytestmark = pytest.mark.parity
SEEDS = (0, 1, 2)
LAYOUTS = ("padded", "packed")
VERL_MODE = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed": "seq-mean-token-sum-norm",
}


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def check(batch, algorithm, reference, **options):
    """Value and gradient in both layouts against ``reference(logprob)``."""
    logprob_BL = batch.logprob_BL.clone().requires_grad_()
    wanted = reference(logprob_BL)
    (gradient_BL,) = torch.autograd.grad(wanted, logprob_BL)
    for packing in LAYOUTS:
        loss, ours_BL, _ = our_loss(batch, algorithm, packing=packing, **options)
        assert_equal(loss, wanted.detach())
        assert_equal(ours_BL, gradient_BL)


def verl_loss(name, batch, *, mode="token-mean", weight_BL=None, keep_BL=None, **config):
    mask_BL = batch.mask_BL if keep_BL is None else batch.mask_BL & keep_BL
    function = getattr(references.verl(), f"compute_policy_loss_{name}")
    settings = references.verl_config(loss_scale_factor=16, **config)
    settings.global_batch_info["loss_scale_factor"] = 16 if mode.endswith("norm") else None

    def reference(logprob_BL):
        return function(
            batch.proximal_BL, logprob_BL, batch.advantage_BL, mask_BL.double(), mode, settings, weight_BL
        )[0]

    return reference


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", VERL_MODE)
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("has_empty_row", [False, True])
def test_clip_equals_verl(seed, aggregation, dual_clip, has_empty_row):
    batch = token_batch(seed, spread=0.9, has_empty_row=has_empty_row)
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": dual_clip or 1e9}
    check(
        batch,
        {"aggregation": aggregation, "dual_clip": dual_clip},
        verl_loss("vanilla", batch, mode=VERL_MODE[aggregation], **bounds),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", VERL_MODE)
def test_sequence_clip_equals_verls_gspo(seed, aggregation):
    batch = token_batch(seed, spread=0.1)
    check(
        batch,
        {"loss": "sequence_clip", "clip_low": 0.03, "clip_high": 0.04, "aggregation": aggregation},
        verl_loss("gspo", batch, mode=VERL_MODE[aggregation], clip_ratio_low=0.03, clip_ratio_high=0.04),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", VERL_MODE)
def test_clipped_weight_equals_verls_cispo(seed, aggregation):
    batch = token_batch(seed)
    check(
        batch,
        {"loss": "clipped_weight", "clip_low": 0.3, "clip_high": 0.5, "aggregation": aggregation},
        verl_loss("cispo", batch, mode=VERL_MODE[aggregation], clip_ratio_low=0.3, clip_ratio_high=0.5),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_soft_gate_equals_verls_sapo(seed):
    batch = token_batch(seed)
    check(
        batch,
        {"loss": "soft_gate", "aggregation": "sequence_mean"},
        verl_loss("sapo", batch, tau_pos=1.0, tau_neg=1.05),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weight", ["truncate", "mask"])
def test_corrected_clip_equals_verl(seed, level, weight):
    from tasks.rl.corrections import importance_weight, masked_weight, truncated_weight

    batch = token_batch(seed, spread=0.4)
    threshold = "0.5_2.0" if weight == "mask" else 2.0
    theirs_BL, _ = references.verl_corrections().compute_rollout_correction_weights(
        batch.proximal_BL - batch.behavior_BL, batch.mask_BL.double(), level, threshold
    )
    segment_BL = torch.arange(len(batch.mask_BL))[:, None].expand_as(batch.mask_BL)
    raw_BL = importance_weight(batch.proximal_BL, batch.behavior_BL, batch.mask_BL, segment_BL, level=level)
    ours_BL = (
        truncated_weight(raw_BL, high=2.0)
        if weight == "truncate"
        else masked_weight(raw_BL, low=0.5, high=2.0)
    )
    assert_equal(ours_BL[batch.mask_BL], theirs_BL[batch.mask_BL])
    check(
        batch, {}, verl_loss("vanilla", batch, weight_BL=theirs_BL, clip_ratio_high=0.28), weight_BL=ours_BL
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_rejected_sequences_equal_verls(seed):
    from tasks.rl.corrections import keeps_near_sequences

    batch = token_batch(seed, spread=0.4)
    mask_BL, _ = references.verl_corrections().compute_rollout_rejection_mask(
        batch.proximal_BL - batch.behavior_BL, batch.mask_BL.double(), "seq_mean_k3", 0.08
    )
    segment_BL = torch.arange(len(batch.mask_BL))[:, None].expand_as(batch.mask_BL)
    keep_BL = keeps_near_sequences(
        batch.proximal_BL, batch.behavior_BL, batch.mask_BL, segment_BL, max_k3=0.08
    )
    assert torch.equal(keep_BL & batch.mask_BL, mask_BL.bool()) and (~keep_BL).any() and keep_BL.any()
    check(batch, {}, verl_loss("vanilla", batch, keep_BL=keep_BL, clip_ratio_high=0.28), keep_BL=keep_BL)


def test_the_batch_report_equals_verls():
    from tasks.rl.mismatch import mismatch_report

    batch = token_batch(0)
    theirs = references.verl_corrections().compute_offpolicy_metrics(
        batch.proximal_BL, batch.behavior_BL, batch.mask_BL.double()
    )
    ours = mismatch_report(batch.proximal_BL[batch.mask_BL], batch.behavior_BL[batch.mask_BL])
    assert ours["k1"] == pytest.approx(theirs["kl"], rel=1e-8)
    assert ours["k3"] == pytest.approx(theirs["k3_kl"], rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("estimator", "name"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_with_k2_gradient", "k3+")]
)
def test_the_kl_loss_equals_verls(seed, estimator, name):
    batch = token_batch(seed)
    core, policy = references.verl(), verl_loss("vanilla", batch, clip_ratio_high=0.28)

    def reference(logprob_BL):
        kl_BL = core.kl_penalty(logprob_BL, batch.reference_BL, name)
        return policy(logprob_BL) + 0.3 * core.agg_loss(kl_BL, batch.mask_BL.double(), "token-mean")

    check(batch, {"kl": "loss", "kl_coefficient": 0.3, "kl_estimator": estimator}, reference)


def test_k3_of_a_distant_reference_is_not_cut_off_as_verls_is():
    """verl holds k3 at 10 and its gradient there is 0: a policy that far away is never pulled back."""
    from tasks.rl.kl import kl_estimate

    logprob = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    theirs = references.verl().kl_penalty(logprob, torch.zeros(1, dtype=torch.float64), "k3")
    ours = kl_estimate(logprob, estimator="k3")
    assert theirs.item() == 10 and torch.autograd.grad(theirs, logprob)[0].item() == 0
    assert_equal(ours.detach(), torch.tensor([5.0]).double().exp() - 6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_the_value_loss_equals_verls(seed, clip):
    from tasks.rl.objective import value_objective

    batch = token_batch(seed)
    value_BL = batch.logprob_BL.clone().requires_grad_()
    wanted, _ = references.verl().compute_value_loss(
        value_BL, batch.reference_BL, batch.proximal_BL, batch.mask_BL.double(), clip
    )
    micro = {"mask": batch.mask_BL, "value": batch.proximal_BL, "return": batch.reference_BL}
    objective = value_objective(clip=clip if clip < 1 else 0.0, num_global_tokens=int(batch.mask_BL.sum()))
    loss, _ = objective(value_BL, micro)
    assert_equal(loss.detach(), wanted.detach())
    assert_equal(*(torch.autograd.grad(each, value_BL)[0] for each in (loss, wanted)))


TRL_AGGREGATION = {
    "grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "fixed",
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", TRL_AGGREGATION)
@pytest.mark.parametrize("delta", [None, 3.0])
def test_clip_equals_trl(seed, loss_type, delta):
    batch = token_batch(seed, spread=0.9)
    algorithm = {"aggregation": TRL_AGGREGATION[loss_type], "dual_clip": delta or 0.0}
    check(batch, algorithm, lambda logprob: trl_loss(batch, logprob, loss_type=loss_type, delta=delta))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", TRL_AGGREGATION)
def test_sequence_clip_equals_trls_gspo(seed, loss_type):
    batch = token_batch(seed, spread=0.1)
    bounds = {"epsilon_low": 0.03, "epsilon_high": 0.04, "importance_sampling_level": "sequence"}
    algorithm = {"loss": "sequence_clip", "clip_low": 0.03, "clip_high": 0.04}
    check(
        batch,
        {**algorithm, "aggregation": TRL_AGGREGATION[loss_type]},
        lambda logprob: trl_loss(batch, logprob, loss_type=loss_type, **bounds),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_weight_equals_trls_cispo_whose_cap_is_absolute(seed):
    batch = token_batch(seed, spread=1.2)
    check(
        batch,
        {"loss": "clipped_weight", "clip_low": 1.0, "clip_high": 4.0},
        lambda logprob: trl_loss(batch, logprob, loss_type="cispo", epsilon_high=5.0),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_soft_gate_equals_trls_sapo_which_rounds_its_temperatures_to_float32(seed):
    batch = token_batch(seed)
    rounded = torch.tensor(1.05).item()
    check(
        batch,
        {"loss": "soft_gate", "tau_negative": rounded, "aggregation": "sequence_mean"},
        lambda logprob: trl_loss(batch, logprob, loss_type="sapo"),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_unbiased", [False, True])
def test_the_kl_loss_equals_trls(seed, is_unbiased):
    batch = token_batch(seed)
    check(
        batch,
        {"kl": "loss", "kl_coefficient": 0.3, "kl_unbiased": is_unbiased},
        lambda logprob: trl_loss(batch, logprob, beta=0.3, bias_correction=is_unbiased),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_entropy_bonus_equals_trls(seed):
    batch = token_batch(seed)
    check(batch, {"entropy_coefficient": 0.2}, lambda logprob: trl_loss(batch, logprob, entropy_coef=0.2))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_weighted_loss_equals_trls(seed):
    batch = token_batch(seed)
    weight_BL = (batch.proximal_BL - batch.behavior_BL).exp().clamp(max=2.0)
    check(batch, {}, lambda logprob: trl_loss(batch, logprob, weight=weight_BL), weight_BL=weight_BL)


@pytest.mark.parametrize("seed", SEEDS)
def test_useless_sequences_equal_trls_off_policy_mask(seed):
    """TRL compares the current policy, here the proximal one in its place; it drops the loss of a sequence
    but still counts its tokens: the right mean is over those that are left."""
    from tasks.rl.corrections import keeps_useful_sequences

    batch = token_batch(seed, spread=0.6)
    mask_BL, pair = batch.mask_BL, (batch.proximal_BL, batch.behavior_BL)
    segment_BL = torch.arange(len(mask_BL))[:, None].expand_as(mask_BL)
    keep_BL = keeps_useful_sequences(*pair, batch.advantage_BL, mask_BL, segment_BL, max_k1=0.05)
    theirs_B1 = references.trl().GRPOTrainer.get_off_policy_mask(
        batch.advantage_B[:, None], *pair, mask_BL.double(), 0.05
    )
    assert torch.equal(keep_BL[:, :1], theirs_B1.bool()) and (~keep_BL).any()
    share = mask_BL.sum() / (mask_BL & keep_BL).sum()
    batch.logprob_BL = batch.proximal_BL
    check(batch, {}, lambda logprob: trl_loss(batch, logprob, threshold=0.05) * share, keep_BL=keep_BL)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_decoupled_ppo_equals_areals(seed, dual_clip):
    """AReaL's dual clip also acts on positive advantages, where the clip is tighter; weights are float32."""
    batch = token_batch(seed, spread=0.9)
    areal = references.areal("ppo_actor_loss_fn")
    rules = SimpleNamespace(metric="ratio", level="token", action="clamp", agg="mean", lower=None, upper=2.0)

    def reference(logprob_BL):
        return areal["ppo_actor_loss_fn"](
            logprob_BL, batch.proximal_BL, batch.behavior_BL, batch.advantage_BL, 0.2, batch.mask_BL,
            eps_clip_higher=0.28, c_clip=dual_clip or None, rejection_sampling=rules,
        )[0]  # fmt: skip

    weight_BL = (batch.proximal_BL - batch.behavior_BL).exp().clamp(max=2.0)
    logprob_BL = batch.logprob_BL.clone().requires_grad_()
    wanted = reference(logprob_BL)
    (gradient_BL,) = torch.autograd.grad(wanted, logprob_BL)
    loss, ours_BL, _ = our_loss(batch, {"dual_clip": dual_clip}, weight_BL=weight_BL)
    # exp in float32: 2^-23 relative, times weights of at most 2 and ratios of a few
    torch.testing.assert_close(loss, wanted.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours_BL, gradient_BL, rtol=2e-6, atol=2e-6)
    single_BL = (batch.proximal_BL.float() - batch.behavior_BL.float()).exp().clamp(max=2.0)
    check(batch, {"dual_clip": dual_clip}, reference, weight_BL=single_BL)


def test_a_masked_nan_reaches_verls_sequence_means_and_not_ours():
    """verl multiplies by the mask in every ``seq-`` mode, and NaN times 0 is NaN."""
    value_BL = torch.tensor([[1.0, torch.nan], [2.0, 4.0]], dtype=torch.float64)
    mask_BL = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    from tasks.rl.sequences import aggregate

    length_BL = mask_BL.sum(dim=1, keepdim=True).expand_as(mask_BL)
    counts = {"num_global_tokens": 3, "num_global_sequences": 2, "fixed_length": 2}
    # sequence means 1 and 3; sums 1 and 6 over two sequences of length 2
    for aggregation, wanted in (("sequence_mean", 2.0), ("fixed", 7 / 4)):
        theirs = references.verl().agg_loss(value_BL, mask_BL, VERL_MODE[aggregation])
        ours = aggregate(value_BL, mask_BL.bool(), length_BL, aggregation=aggregation, **counts)
        assert theirs.isnan() and ours.item() == pytest.approx(wanted, rel=1e-12)


def test_padding_changes_verls_fixed_normaliser_and_not_ours():
    """Unless it is told a length, verl divides by the width of the batch."""
    core, batch = references.verl(), token_batch(0)
    wider_BL = torch.nn.functional.pad(batch.logprob_BL, (0, 4))
    mask_BL = batch.mask_BL.double()
    narrow = core.agg_loss(batch.logprob_BL, mask_BL, VERL_MODE["fixed"])
    wide = core.agg_loss(wider_BL, torch.nn.functional.pad(mask_BL, (0, 4)), VERL_MODE["fixed"])
    assert wide.item() == pytest.approx(narrow.item() * 12 / 16)
    ours = [our_loss(batch, {"aggregation": "fixed"}, packing=packing)[0] for packing in LAYOUTS]
    assert_equal(ours[0], ours[1])


def test_trl_counts_sequences_without_a_trained_token_and_we_do_not():
    batch = token_batch(0, has_empty_row=True)
    share = len(batch.mask_BL) / batch.num_sequences
    check(
        batch,
        {"aggregation": "sequence_mean"},
        lambda logprob: trl_loss(batch, logprob, loss_type="grpo") * share,
    )


def test_the_pinned_versions_are_the_installed_ones():
    from importlib.metadata import version
    from pathlib import Path

    pins = re.findall(r'"(verl|trl|areal)==([\d.]+)"', Path("pyproject.toml").read_text())
    assert len(pins) == 3
    for name, pinned in pins:
        references.verl(), references.trl(), references.areal()
        assert version(name) == pinned
