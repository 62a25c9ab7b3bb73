"""Advantages by hand, to the last digit that arithmetic gives."""

import math

import pytest
import torch

from tasks.rl.advantages import (
    combine_rewards,
    discounted_returns,
    gae,
    group_advantages,
    teacher_advantages,
    token_rewards,
    whiten,
)
from tasks.rl.rewards import overlong_penalty

NAN = float("nan")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, wanted, *, atol=1e-12):
    torch.testing.assert_close(got, tensor(wanted), rtol=0, atol=atol, equal_nan=True)


def test_the_epsilon_is_added_to_the_standard_deviation_of_ddof_1():
    # mean 1, deviations -1 1, variance (1 + 1) / 1 = 2
    advantage = group_advantages(tensor([[0.0, 2.0]]), normalize_by_std=True, std_eps=0.5)
    close(advantage, [[-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)]])
    default = group_advantages(tensor([[0.0, 2.0]]), normalize_by_std=True)
    close(default, [[-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)]])


def test_leave_one_out_takes_the_mean_of_the_others():
    # 0 - (1 + 5) / 2, 1 - (0 + 5) / 2, 5 - (0 + 1) / 2
    advantage = group_advantages(tensor([[0.0, 1.0, 5.0]]), normalize_by_std=False, leave_one_out=True)
    close(advantage, [[-3.0, -1.5, 4.5]])


def test_groups_do_not_see_each_other():
    close(group_advantages(tensor([[0.0, 2.0], [10.0, 16.0]]), normalize_by_std=False), [[-1, 1], [-3, 3]])


@pytest.mark.parametrize("shape", [(4, 1), (4,), (2, 2, 2), (3, 0)])
def test_only_a_table_of_groups_of_two_or_more_is_taken(shape):
    with pytest.raises(ValueError, match=re_escape(f"got shape {shape}")):
        group_advantages(torch.zeros(shape), normalize_by_std=False)


def re_escape(text):
    return text.replace("(", r"\(").replace(")", r"\)")


def test_parts_are_summed_by_weight_and_an_abstention_adds_nothing():
    part = tensor([[[1.0, 10.0], [2.0, NAN]]])
    close(combine_rewards(part, tensor([2.0, 0.5]), how="sum"), [[2 + 5, 4]])


def test_parts_are_normalised_within_the_group_before_they_are_summed():
    # first part 0 2 4: mean 2, deviations -2 0 2, variance 8 / 2 = 4, std 2
    # second part 1 NaN 3: mean 2, deviations -1 1, variance 2 / 1, std sqrt 2
    part = tensor([[[0.0, 1.0], [2.0, NAN], [4.0, 3.0]]])
    got = combine_rewards(part, tensor([1.0, 10.0]), how="normalize_then_sum", std_eps=0.5)
    first, second = 2 / 2.5, 10 / (math.sqrt(2) + 0.5)
    close(got, [[-first - second, 0.0, first + second]])


def test_a_part_that_one_sample_has_alone_says_nothing():
    # a group of one: deviation 0, so 0 over the epsilon
    part = tensor([[[0.0, 7.0], [2.0, NAN]]])
    root = math.sqrt(2)
    close(
        combine_rewards(part, tensor([1.0, 1.0]), how="normalize_then_sum"),
        [[-1 / (root + 1e-6), 1 / (root + 1e-6)]],
    )
    # and one that nobody has
    part = tensor([[[0.0, NAN], [2.0, NAN]]])
    close(
        combine_rewards(part, tensor([1.0, 1.0]), how="normalize_then_sum"),
        [[-1 / (root + 1e-6), 1 / (root + 1e-6)]],
    )


def test_a_sample_of_which_all_parts_abstained_is_refused():
    with pytest.raises(ValueError, match="got 1 samples without"):
        combine_rewards(tensor([[[0.0, 1.0], [NAN, NAN]]]), tensor([1.0, 1.0]), how="sum")


def test_whitening_is_over_masked_tokens_only():
    # tokens 1 2 6: mean 3, deviations -2 -1 3, variance 14 / 2 = 7
    value = tensor([[1.0, NAN], [2.0, 6.0]])
    mask = torch.tensor([[True, False], [True, True]])
    root = math.sqrt(7 + 1e-8)
    close(whiten(value, mask), [[-2 / root, 0], [-1 / root, 3 / root]])


def test_whitening_equal_values_gives_zero_and_two_tokens_are_enough():
    mask = torch.tensor([[True, True, False]])
    close(whiten(tensor([[5.0, 5.0, 1.0]]), mask), [[0, 0, 0]])
    # deviation 1, variance 2 / 1
    root = math.sqrt(2 + 1e-8)
    close(whiten(tensor([[0.0, 2.0, 9.0]]), mask), [[-1 / root, 1 / root, 0]])
    with pytest.raises(ValueError, match="at least two trained tokens, got 1"):
        whiten(tensor([[5.0, 5.0]]), torch.tensor([[True, False]]))


def test_a_reward_comes_with_the_last_trained_token_and_every_one_pays_for_its_divergence():
    mask = torch.tensor([[True, False, True, False], [False, True, True, True], [False] * 4])
    kl = tensor([[0.1, NAN, 0.3, NAN], [NAN, 1.0, 2.0, 3.0], [NAN] * 4])
    got = token_rewards(tensor([5.0, 7.0, 9.0]), mask, kl, kl_coefficient=0.5)
    close(got, [[-0.05, 0, 5 - 0.15, 0], [0, -0.5, -1.0, 7 - 1.5], [0, 0, 0, 0]])


def test_gae_by_hand():
    # discount 0.5, lambda 0.5; rewards 1 2 4, values 3 1 2, from the end:
    # d2 = 4 - 2 = 2; d1 = 2 + 0.5 * 2 - 1 = 2, a1 = 2 + 0.25 * 2 = 2.5;
    # d0 = 1 + 0.5 * 1 - 3 = -1.5, a0 = -1.5 + 0.25 * 2.5 = -0.875
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantage, returns = gae(
        tensor([[1.0, 2.0, 4.0]]), tensor([[3.0, 1.0, 2.0]]), mask, discount=0.5, gae_lambda=0.5
    )
    close(advantage, [[-0.875, 2.5, 2.0]])
    close(returns, [[2.125, 3.5, 4.0]])


def test_gae_steps_over_what_the_policy_did_not_write():
    # as above, with a tool's answer in between, padding behind and another row beside
    mask = torch.tensor([[True, True, False, True, False], [False, True, False, False, False]])
    reward = tensor([[1.0, 2.0, NAN, 4.0, NAN], [NAN, 6.0, NAN, NAN, NAN]])
    value = tensor([[3.0, 1.0, NAN, 2.0, 1e9], [NAN, 2.0, 1e9, NAN, NAN]])
    advantage, returns = gae(reward, value, mask, discount=0.5, gae_lambda=0.5)
    close(advantage, [[-0.875, 2.5, 0, 2.0, 0], [0, 4, 0, 0, 0]])
    close(returns, [[2.125, 3.5, 0, 4.0, 0], [0, 6, 0, 0, 0]])


def test_discounted_returns_by_hand():
    # 4; 2 + 0.5 * 4; 1 + 0.5 * 4
    mask = torch.tensor([[True, True, False, True]])
    close(discounted_returns(tensor([[1.0, 2.0, 8.0, 4.0]]), mask, discount=0.5), [[3.0, 4.0, 0.0, 4.0]])


def test_a_teacher_pulls_towards_what_it_finds_likelier():
    mask = torch.tensor([[True, True, False]])
    got = teacher_advantages(tensor([[-1.0, -1.0, NAN]]), tensor([[-0.5, -3.0, NAN]]), mask)
    close(got, [[0.5, -2.0, 0]])


def test_the_penalty_of_length_is_linear_over_the_buffer():
    length = torch.tensor([1, 6, 7, 8, 10, 11])
    got = overlong_penalty(length, max_tokens=10, buffer_tokens=4)
    torch.testing.assert_close(got, torch.tensor([0, 0, -0.25, -0.5, -1, -1]))
