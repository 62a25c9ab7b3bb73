"""Advantages equal verl's and TRL's in float64, to 1e-8. Runs with ``pytest -m parity``.

Where a reference is wrong the test says so and asserts the right value.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import references
import torch
from token_batches import token_batch

from tasks.algorithm_config import AlgorithmConfig
from tasks.rl.advantages import combine_rewards, discounted_returns, gae, group_advantages, whiten
from tasks.rl.preparation import prepare_rows
from tasks.rl.rewards import overlong_penalty

pytestmark = pytest.mark.parity
SEEDS = (0, 1, 2)
ALGO = SimpleNamespace(gamma=0.97)


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def rewards(seed, groups=5, size=4):
    return torch.randn(groups, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_verl(name, reward_NG, **options):
    """An outcome estimator of verl: rewards at the last of three tokens, groups by number."""
    groups, size = reward_NG.shape
    token_BL = torch.zeros(groups * size, 3, dtype=torch.float64)
    token_BL[:, 2] = reward_NG.flatten()
    index = np.repeat(np.arange(groups), size)
    function = getattr(references.verl(), f"compute_{name}_outcome_advantage")
    advantage_BL, _ = function(token_BL, torch.ones_like(token_BL), index=index, **options)
    return advantage_BL[:, 0].view(groups, size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [True, False])
def test_group_advantages_equal_verls_grpo(seed, normalize):
    reward_NG = rewards(seed)
    ours = group_advantages(reward_NG, normalize_by_std=normalize)
    assert_equal(ours, of_verl("grpo", reward_NG, norm_adv_by_std_in_grpo=normalize))


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_equals_verls_and_trls_rloo(seed):
    reward_NG = rewards(seed)
    ours = group_advantages(reward_NG, normalize_by_std=False, leave_one_out=True)
    assert_equal(ours, of_verl("rloo", reward_NG))
    assert_equal(ours.flatten(), references.trl_leave_one_out(reward_NG.flatten(), group=4))


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_group_advantages_equal_verls_reinforce_plus_plus_baseline(seed):
    reward_NG = rewards(seed)
    centred_BL = group_advantages(reward_NG, normalize_by_std=False).flatten()[:, None].expand(-1, 3)
    ours = whiten(centred_BL, torch.ones_like(centred_BL, dtype=torch.bool))
    assert_equal(ours[:, 0].view_as(reward_NG), of_verl("reinforce_plus_plus_baseline", reward_NG))


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_returns_equal_verls_reinforce_plus_plus(seed):
    batch = token_batch(seed)
    wanted, returns = references.verl().compute_reinforce_plus_plus_outcome_advantage(
        batch.logprob_BL, batch.mask_BL.double(), config=ALGO
    )
    ours = discounted_returns(batch.logprob_BL, batch.mask_BL, discount=ALGO.gamma)
    assert_equal(ours, returns)
    assert_equal(whiten(ours, batch.mask_BL), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_gae_equals_verls(seed, discount):
    batch = token_batch(seed)
    mask_BL = batch.mask_BL
    wanted, returns = references.verl().compute_gae_advantage_return(
        batch.logprob_BL, batch.reference_BL, mask_BL.double(), discount, 0.95
    )
    ours, our_returns = gae(batch.logprob_BL, batch.reference_BL, mask_BL, discount=discount, gae_lambda=0.95)
    assert_equal(our_returns[mask_BL], returns[mask_BL])
    assert_equal(whiten(ours, mask_BL)[mask_BL], wanted[mask_BL])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prepared_ppo_batch_equals_verls_from_scores_to_advantages(seed):
    """Reward at the end, KL to a reference in each token's reward, GAE, whitening: rows in, rows out."""
    batch = token_batch(seed)
    core, mask_BL = references.verl(), batch.mask_BL.double()
    last_B = 11 - mask_BL.flip(1).argmax(dim=1)
    score_BL = torch.zeros_like(mask_BL)
    score_BL[torch.arange(8), last_B] = batch.advantage_B
    reward_BL = core.compute_rewards(score_BL, batch.behavior_BL, batch.reference_BL, 0.1)
    wanted, returns = core.compute_gae_advantage_return(reward_BL, batch.entropy_BL, mask_BL, 0.99, 0.95)
    columns = {
        "behavior_logprob": batch.behavior_BL, "reference_logprob": batch.reference_BL,
        "value": batch.entropy_BL, "loss_mask": batch.mask_BL,
    }  # fmt: skip
    rows = [
        {
            "iteration": 0, "prompt_id": "p", "reward": float(batch.advantage_B[i]), "advantage": 0.0,
            "response_ids": [0] * 12, **{name: value[i].tolist() for name, value in columns.items()},
        }
        for i in range(8)
    ]  # fmt: skip
    choices = {"advantage": "gae", "discount": 0.99, "gae_lambda": 0.95, "whiten": True}
    algorithm = AlgorithmConfig.model_validate({**choices, "kl": "reward", "kl_coefficient": 0.1})
    prepared, _ = prepare_rows(rows, algorithm)
    for name, reference_BL in (("token_advantage", wanted), ("return", returns)):
        ours = torch.tensor([row[name] for row in prepared], dtype=torch.float64)
        assert_equal(ours[batch.mask_BL], reference_BL[batch.mask_BL])


@pytest.mark.parametrize("seed", SEEDS)
def test_whitening_equals_verls(seed):
    from verl.utils.torch_functional import masked_whiten

    batch = token_batch(seed)
    wanted = masked_whiten(batch.logprob_BL, batch.mask_BL.double())
    assert_equal(whiten(batch.logprob_BL, batch.mask_BL)[batch.mask_BL], wanted[batch.mask_BL])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("scale", "normalize"), [("group", True), ("none", False)])
def test_summed_parts_then_group_advantages_equal_trls(seed, scale, normalize):
    part_NGK, weight_K = parts(seed)
    reward_NG = combine_rewards(part_NGK, weight_K, how="sum")
    ours = group_advantages(reward_NG, normalize_by_std=normalize, std_eps=1e-4)
    theirs = references.trl_advantages(
        part_NGK.flatten(0, 1), group=4, how="sum_then_normalize", scale=scale, weight_K=weight_K
    )
    assert_equal(ours.flatten(), theirs)


def parts(seed):
    """Two parts of which the second abstained here and there."""
    part_NGK = torch.stack([rewards(seed), 3 * rewards(seed + 10)], dim=-1)
    part_NGK[1, 2, 1] = part_NGK[3, :2, 1] = torch.nan
    return part_NGK, torch.tensor([1.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("seed", SEEDS)
def test_normalised_parts_equal_trls(seed):
    """TRL divides by the batch's deviation plus 1e-4, where we take the root of the variance plus 1e-8."""
    part_NGK, weight_K = parts(seed)
    summed_M = combine_rewards(part_NGK, weight_K, how="normalize_then_sum", std_eps=1e-4).flatten()
    theirs = references.trl_advantages(
        part_NGK.flatten(0, 1), group=4, how="normalize_then_sum", scale="group", weight_K=weight_K
    )
    assert_equal((summed_M - summed_M.mean()) / (summed_M.std() + 1e-4), theirs)
    ours = whiten(summed_M, torch.ones_like(summed_M, dtype=torch.bool))
    assert_equal(ours * (summed_M.var() + 1e-8).sqrt() / (summed_M.std() + 1e-4), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_normalised_parts_equal_verls_gdpo(seed):
    part_NGK = torch.stack([rewards(seed), rewards(seed + 10)], dim=-1).float()  # verl reads them as float32
    flat_MK = part_NGK.flatten(0, 1)
    config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]}
    ones = torch.ones(20, 3)
    theirs, _ = references.verl().compute_gdpo_outcome_advantage(
        torch.zeros(20, 3), ones, np.repeat(np.arange(5), 4), config=config,
        non_tensor_batch={"a": flat_MK[:, 0].numpy(), "b": flat_MK[:, 1].numpy()},
        batch={"prompts": torch.zeros(20, 1), "attention_mask": torch.ones(20, 4).long()},
    )  # fmt: skip
    summed = combine_rewards(part_NGK.double(), torch.tensor([1.0, 0.5]).double(), how="normalize_then_sum")
    ours = whiten(summed.flatten()[:, None].expand(-1, 3), ones.bool())
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)  # float32 on their side


@pytest.mark.parametrize("length", [1, 5, 6, 8, 10, 13])
def test_the_penalty_of_length_equals_trls(length):
    theirs = references.peer("trl.rewards").get_soft_overlong_punishment(10, 4)(completion_ids=[[0] * length])
    ours = overlong_penalty(torch.tensor([length]), max_tokens=10, buffer_tokens=4)
    assert ours.tolist() == pytest.approx(theirs, abs=1e-8)


def test_verls_group_of_one_keeps_its_reward_and_ours_is_refused():
    """verl takes 0 for the mean and 1 for the deviation: every such sample is pushed up by its raw reward."""
    theirs = of_verl("grpo", torch.tensor([[3.0]], dtype=torch.float64))
    assert theirs.item() == pytest.approx(3 / (1 + 1e-6))
    with pytest.raises(ValueError, match="group of one is its own reward"):
        group_advantages(torch.tensor([[3.0]]), normalize_by_std=True)


def test_a_masked_nan_reaches_verls_gae_and_not_ours():
    """A value or reward behind the end of an answer, multiplied by a mask of 0."""
    mask_BL = torch.tensor([[True, True, False]])
    reward_BL = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    value_BL = torch.tensor([[0.5, 0.5, torch.nan]], dtype=torch.float64)
    core = references.verl()
    theirs, _ = core.compute_gae_advantage_return(reward_BL, value_BL, mask_BL.double(), 1.0, 1.0)
    ours, _ = gae(reward_BL, value_BL, mask_BL, discount=1.0, gae_lambda=1.0)
    assert theirs[mask_BL].isnan().all()
    assert ours.tolist() == [[0.5, 0.5, 0.0]]
