"""Golden values, invariances and batching of the pure maths in ``tasks/rl``."""

import math
import random

import polars as pl
import pytest
import torch

from tasks.algorithm_config import AlgorithmConfig
from tasks.config import CampaignConfig
from tasks.rl.advantages import group_advantages, has_signal
from tasks.rl.assembly import assemble_frame
from tasks.rl.losses import supervised_loss
from tasks.rl.objective import policy_objective
from tasks.rl.packing import micro_batches, num_trained_tokens, rank_share
from tasks.rl.rewards import control_rewards
from tasks.schema import ScoredFrame, make_frame

NAN = float("nan")


def policy_loss(logprob, behavior, advantage, mask, entropy=None, *, tokens, entropy_coefficient=0.0):
    logprob, behavior, advantage, mask = map(torch.as_tensor, (logprob, behavior, advantage, mask))
    loss = policy_objective(
        AlgorithmConfig(entropy_coefficient=entropy_coefficient),
        num_global_tokens=tokens,
        num_global_sequences=1,
        fixed_length=1,
    )
    micro = {
        "mask": mask,
        "behavior_logprob": behavior,
        "advantage": advantage,
        "segment": torch.zeros_like(mask, dtype=torch.int64),
        "length": mask.sum().expand(mask.shape),
    }
    return loss(logprob, torch.zeros_like(logprob) if entropy is None else torch.as_tensor(entropy), micro)


def test_clipped_loss_by_hand_with_nan_in_a_masked_slot():
    # e^0.5 = 1.6487 -> clipped to 1.28 (A > 0); e^-0.5 = 0.6065 -> 0.8 (A < 0); third masked, NaN must not
    # leak
    loss, metrics = policy_loss(
        [-0.5, -1.5, NAN], [-1.0, -1.0, NAN], [1.0, -1.0, NAN], [True, True, False], tokens=2
    )
    torch.testing.assert_close(loss, torch.tensor((-1.28 + 0.8) / 2))
    assert metrics["tokens"] == 2 and metrics["clip_share"] == 2
    # k1 = -(0.5 - 0.5) = 0; k3 = (e^0.5 - 1 - 0.5) + (e^-0.5 - 1 + 0.5)
    torch.testing.assert_close(metrics["kl_k1"], torch.tensor(0.0))
    torch.testing.assert_close(metrics["kl_k3"], torch.tensor(math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5))


@pytest.mark.parametrize(("log_ratio", "advantage", "bound"), [(1.0, 1.0, 1.28), (-1.0, -1.0, 0.8)])
def test_the_ratio_is_clipped_at_one_plus_high_and_one_minus_low(log_ratio, advantage, bound):
    loss, _ = policy_loss([log_ratio], [0.0], [advantage], [True], tokens=1)
    torch.testing.assert_close(loss, torch.tensor(-bound * advantage))


def test_kl_estimates_by_hand():
    # k1 = -(0.7); k3 = e^0.7 - 1 - 0.7 (Schulman, approximating KL: r - 1 - log r with r = new / behavior)
    _, metrics = policy_loss([-0.3], [-1.0], [1.0], [True], tokens=1)
    torch.testing.assert_close(metrics["kl_k1"], torch.tensor(-0.7))
    torch.testing.assert_close(metrics["kl_k3"], torch.tensor(math.exp(0.7) - 1.7))


def test_the_unclipped_side_of_the_surrogate_keeps_its_gradient():
    # ratio above the upper bound with a negative advantage (and below the lower with a positive one) is not
    # clipped
    for logprob, advantage in ((0.5, -1.0), (-0.5, 1.0)):
        value = torch.tensor([logprob], requires_grad=True)
        loss, _ = policy_loss(value, [0.0], [advantage], [True], tokens=1)
        loss.backward()
        torch.testing.assert_close(value.grad, torch.tensor([-advantage * math.exp(logprob)]))


def test_on_policy_gradient_is_reinforce():
    logprob = torch.tensor([-0.7, -1.1, -0.2], requires_grad=True)
    advantage = torch.tensor([1.5, -0.5, 2.0])
    loss, _ = policy_loss(logprob, logprob.detach().clone(), advantage, [True] * 3, tokens=3)
    loss.backward()
    torch.testing.assert_close(logprob.grad, -advantage / 3)


def test_entropy_bonus_lowers_the_loss_by_its_mean():
    plain, _ = policy_loss([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], [True, True], tokens=2)
    bonus, metrics = policy_loss(
        [-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], [True, True], [2.0, 4.0], tokens=2, entropy_coefficient=0.1
    )
    torch.testing.assert_close(plain - bonus, torch.tensor(0.3))
    assert metrics["entropy"] == 6


def test_supervised_loss_by_hand():
    loss, metrics = supervised_loss(
        torch.tensor([-1.0, -3.0, NAN]), torch.tensor([True, True, False]), num_global_tokens=2
    )
    torch.testing.assert_close(loss, torch.tensor(2.0))
    torch.testing.assert_close(metrics["policy_loss"], torch.tensor(4.0))


def test_losses_do_not_depend_on_how_a_batch_is_split():
    generator = torch.Generator().manual_seed(0)
    logprob, behavior, advantage, entropy = (
        torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    mask = torch.rand(12, generator=generator) < 0.7

    def gradient(parts):
        leaf = logprob.clone().requires_grad_()
        for part in parts:
            loss, _ = policy_loss(
                leaf[part], behavior[part], advantage[part], mask[part], entropy[part],
                tokens=int(mask.sum()), entropy_coefficient=0.01,
            )  # fmt: skip
            loss.backward()
        return leaf.grad

    whole = gradient([slice(0, 12)])
    for parts in ([slice(0, 5), slice(5, 12)], [[i] for i in reversed(range(12))]):
        torch.testing.assert_close(gradient(parts), whole, rtol=0, atol=1e-15)


def test_group_advantages_by_hand():
    # mean 1, deviations -1 0 1, sample variance (1 + 0 + 1) / 2 = 1
    reward = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        group_advantages(reward, normalize_by_std=True),
        torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64),
        rtol=0,
        atol=2e-6,
    )  # atol: the epsilon of 1e-6 in the denominator
    torch.testing.assert_close(
        group_advantages(3 * reward, normalize_by_std=False),
        torch.tensor([[-3.0, 0.0, 3.0]], dtype=torch.float64),
    )


def test_equal_rewards_have_no_advantage_and_no_signal():
    reward = torch.tensor([[0.3, 0.3, 0.3], [0.0, 0.0, 1e-9]], dtype=torch.float64)
    assert group_advantages(reward, normalize_by_std=True)[0].abs().max() < 1e-6
    assert has_signal(reward).tolist() == [False, True]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="samples >= 2"):
        group_advantages(torch.ones(4, 1), normalize_by_std=True)


def test_controls_flip_and_shuffle_rewards():
    reward = torch.arange(100, dtype=torch.float64).view(10, 10) / 100
    torch.testing.assert_close(control_rewards(reward, control="flipped", seed=0), 1 - reward)
    shuffled = control_rewards(reward, control="shuffled", seed=0)
    assert sorted(shuffled.flatten().tolist()) == reward.flatten().tolist() and (shuffled != reward).any()
    assert control_rewards(reward, control="none", seed=0) is reward


def scored(prompt, index, reward, **changes):
    row = {
        "iteration": 3,
        "prompt_id": prompt,
        "sample_index": index,
        "policy_version": 7,
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "behavior_logprob": [-0.5, -0.25],
        "finish_reason": "stop",
        "outcome": "score",
        "reward": reward,
        "is_exact": reward == 1.0,
        "reason": "",
    }
    return row | changes


def config(**sections):
    return CampaignConfig.model_validate({"algorithm": {"num_minibatches": 2}, **sections})


def test_assembly_accounts_for_every_sample():
    rows = [
        *(scored("a", i, r) for i, r in enumerate((0.0, 1.0))),
        *(scored("b", i, 0.5) for i in range(2)),
        *(scored("c", i, r, policy_version=6) for i, r in enumerate((0.0, 1.0))),
        scored("d", 0, 1.0),
        scored("d", 1, None, outcome="failure", reason="boom"),
        scored("e", 0, 0.1),
        scored("e", 1, 0.2),
        scored("e", 2, None, outcome="abstain"),
    ]
    train, rejected, metrics = assemble_frame(
        make_frame(rows, ScoredFrame), config(), iteration=3, policy_version=7
    )
    assert rejected == {
        "zero_variance": 2,
        "stale": 2,
        "verifier_failure": 1,
        "group_of_one": 1,
        "abstained": 1,
    }
    assert len(train) + sum(rejected.values()) == len(rows)
    assert sorted(train["prompt_id"].unique()) == ["a", "e"]
    assert metrics["staleness"] == 0


def test_assembly_admits_older_samples_up_to_max_staleness():
    rows = [scored("a", i, r, policy_version=6) for i, r in enumerate((0.0, 1.0))]
    frame = make_frame(rows, ScoredFrame)
    train, rejected, metrics = assemble_frame(
        frame, config(schedule={"max_staleness": 1}), iteration=3, policy_version=7
    )
    assert len(train) == 2 and not rejected.get("stale") and metrics["staleness"] == 1


def test_assembly_does_not_depend_on_the_order_of_samples():
    rows = [scored(f"p{p}", i, random.Random(p * 8 + i).random()) for p in range(6) for i in range(4)]
    frames = []
    for seed in (1, 2):
        random.Random(seed).shuffle(rows)
        frames.append(
            assemble_frame(make_frame(rows, ScoredFrame), config(), iteration=3, policy_version=7)[0]
        )
    assert frames[0].equals(frames[1])
    assert frames[0].group_by("minibatch").len().sort("minibatch")["len"].to_list() == [12, 12]


def test_assembly_with_nothing_to_learn_from_is_empty_not_an_error():
    rows = [scored("a", i, 1.0) for i in range(4)]
    train, rejected, _ = assemble_frame(
        make_frame(rows, ScoredFrame), config(), iteration=3, policy_version=7
    )
    assert train.is_empty() and rejected == {"zero_variance": 4}


def train_row(prompt_length, response_length):
    return {
        "prompt_ids": list(range(10, 10 + prompt_length)),
        "response_ids": list(range(50, 50 + response_length)),
        "behavior_logprob": [-0.5] * response_length,
        "loss_mask": [True] * response_length,
        "advantage": 2.0,
    }


def test_micro_batches_hold_every_row_once_within_the_token_budget():
    rows = [train_row(p, r) for p, r in ((3, 2), (2, 6), (4, 4), (1, 1), (5, 3))]
    batches = micro_batches(rows, max_tokens=16, packing="padded")
    assert sum(len(batch["input_ids"]) for batch in batches) == len(rows)
    assert all(batch["input_ids"].numel() <= 16 for batch in batches)
    assert sum(int(batch["mask"].sum()) for batch in batches) == num_trained_tokens(rows) == 16


def test_a_micro_batch_aligns_every_tensor_with_its_token():
    (batch,) = micro_batches(
        [train_row(2, 3) | {"loss_mask": [True, False, True]}, train_row(1, 1)],
        max_tokens=100,
        packing="padded",
    )
    assert batch["input_ids"].tolist() == [[10, 11, 50, 51, 52], [10, 50, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert batch["mask"].tolist() == [[False, False, True, False, True], [False, True, False, False, False]]
    assert batch["advantage"].tolist() == [[0, 0, 2, 2, 2], [0, 2, 0, 0, 0]]
    assert batch["behavior_logprob"][1].tolist() == [0, -0.5, 0, 0, 0]


def test_ranks_share_rows_without_loss_for_any_number_of_them():
    rows = [train_row(1, length) for length in (5, 1, 4, 2, 3, 3, 1)]
    for world_size in (1, 2, 3, 8):
        shares = [rank_share(rows, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sorted(map(len, (r["response_ids"] for s in shares for r in s))) == sorted(
            len(r["response_ids"]) for r in rows
        )
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_train_frame_marks_every_response_token_as_trained():
    rows = [scored("a", i, r) for i, r in enumerate((0.0, 1.0))]
    train, _, _ = assemble_frame(make_frame(rows, ScoredFrame), config(), iteration=3, policy_version=7)
    assert train.select(pl.col("loss_mask").list.all().all()).item() and train[
        "loss_mask"
    ].list.len().to_list() == [2, 2]


def parts(**values):
    return [{"name": n, "kind": "score", "value": v, "reason": "", "seconds": 0.0} for n, v in values.items()]


def test_parts_normalised_by_their_group_count_by_weight_and_not_by_scale():
    reward = {"parts": {"verifier": 3.0, "reward_model": 1.0}, "normalise": "group",
              "model": {"folder": "somewhere"}}  # fmt: skip
    values = {"a": ((0.0, 30.0), (1.0, 10.0)), "b": ((0.0, 500.0), (0.5, 500.0))}
    rows = [
        scored(name, index, 0.5, parts=parts(verifier=v, reward_model=m))
        for name, group in values.items()
        for index, (v, m) in enumerate(group)
    ]
    train, rejected, _ = assemble_frame(
        make_frame(rows, ScoredFrame), config(reward=reward), iteration=3, policy_version=7
    )
    # normalised parts of a group of two are -+z whatever their scale: a is 3 * (-z, z) + (z, -z), whose
    # second answer is better (unlike 3 * (0, 1) + (30, 10)); b is 3 * (-z, z), since its other part does
    # not differ. Equal rewards of 0.5 do not count. The advantages are then normalised once more.
    got = {(row["prompt_id"], row["sample_index"]): row["advantage"] for row in train.iter_rows(named=True)}
    assert len(got) == 4 and rejected.get("zero_variance", 0) == 0
    assert got["a", 0] < 0 < got["a", 1] and got["b", 0] < 0 < got["b", 1]
    assert got["a", 1] == pytest.approx(-got["a", 0]) == pytest.approx(got["b", 1], rel=1e-3)
    plain, rejected, _ = assemble_frame(
        make_frame(rows, ScoredFrame), config(), iteration=3, policy_version=7
    )
    assert len(plain) == 0 and rejected["zero_variance"] == 4


def test_a_part_that_is_only_watched_does_not_count_in_a_normalised_group():
    reward = {"parts": {"verifier": 0.0, "reward_model": 1.0}, "normalise": "group",
              "model": {"folder": "somewhere"}}  # fmt: skip
    rows = [scored("a", i, 0.5, parts=parts(verifier=float(i), reward_model=5.0 - i)) for i in range(2)]
    train, _, _ = assemble_frame(
        make_frame(rows, ScoredFrame), config(reward=reward), iteration=3, policy_version=7
    )
    got = dict(zip(train["sample_index"], train["advantage"], strict=True))
    assert got[0] > 0 > got[1]
