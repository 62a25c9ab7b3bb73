"""Every loss by hand, and the law: a gradient does not depend on how its mini-batch is split or laid out."""

import math
import random

import pytest
import torch
from token_batches import our_loss, token_batch

from tasks.algorithm_config import AlgorithmConfig
from tasks.rl.kl import kl_estimate
from tasks.rl.losses import (
    clipped_surrogate,
    clipped_value_loss,
    clipped_weight_loss,
    sequence_log_ratio,
    soft_gate_loss,
)
from tasks.rl.objective import policy_objective, value_objective
from tasks.rl.packing import micro_batches, num_trained_sequences, num_trained_tokens, rank_share
from tasks.rl.preparation import prepare_rows
from tasks.rl.sequences import aggregate, masked, sequence_mean, sequence_sum

NAN = float("nan")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, wanted):
    torch.testing.assert_close(got, tensor(wanted), rtol=1e-12, atol=1e-12)


def gradient(function, *values):
    leaf = tensor(values).requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}


def test_the_surrogate_of_each_region_by_hand():
    # ratios 2, 2, 0.5, 0.5, 1.1 with advantages +1 -1 +1 -1 +3: cut above with a gain, below with a loss
    log_ratio, advantage = tensor([2, 2, 0.5, 0.5, 1.1]).log(), tensor([1, -1, 1, -1, 3])
    loss, is_clipped = clipped_surrogate(log_ratio, advantage, **CLIP)
    close(loss, [-1.28, 2, -0.5, 0.8, -3.3])
    assert is_clipped.tolist() == [True, False, False, True, False]


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    # ratio 5: -5 A = 10 becomes 3 * 2 for A = -2; a ratio of 2 stays below; positive advantages are untouched
    log_ratio, advantage = tensor([5, 2, 5, 0.5]).log(), tensor([-2, -2, 2, 2])
    loss, is_clipped = clipped_surrogate(log_ratio, advantage, **{**CLIP, "dual_clip": 3.0})
    close(loss, [6, 4, -2.56, -1])
    assert is_clipped.tolist() == [True, False, True, False]
    grad = gradient(
        lambda x: clipped_surrogate(x, advantage, **{**CLIP, "dual_clip": 3.0})[0], *log_ratio.tolist()
    )
    close(grad, [0, 4, 0, -1])


def test_the_sequence_ratio_has_the_mean_as_value_and_each_tokens_own_gradient():
    # two sequences in one row: means (0.2 + 0.4) / 2 and 0.6; the masked slot in between counts nowhere
    mask = torch.tensor([[True, False, True, True]])
    segment = torch.tensor([[0, 0, 0, 1]])
    value = tensor([[0.2, 9.0, 0.4, 0.6]]).requires_grad_()
    got = sequence_log_ratio(value, mask, segment)
    close(got.detach()[mask], [0.3, 0.3, 0.6])
    (grad,) = torch.autograd.grad((got * tensor([1.0, 0.0, 10.0, 100.0])).sum(), value)
    close(grad, [[1, 0, 10, 100]])


def test_a_clipped_weight_is_a_constant():
    # ratios 2, 1.2, 0.5 to 1.5, 1.2, 0.6; times -A log pi
    log_ratio, advantage = tensor([2, 1.2, 0.5]).log(), tensor([1, -2, 3])
    logprob = tensor([-0.1, -0.2, -0.3])
    bounds = {"clip_low": 0.4, "clip_high": 0.5}
    loss, is_clipped = clipped_weight_loss(logprob, log_ratio, advantage, **bounds)
    close(loss, [0.15, -0.48, 0.54])
    assert is_clipped.tolist() == [True, False, True]

    def of(x):
        return clipped_weight_loss(x, x + log_ratio - logprob, advantage, **bounds)[0]

    close(gradient(of, *logprob.tolist()), [-1.5, 2.4, -1.8])


def test_the_soft_gate_by_hand():
    # sigmoid(tau (r - 1)) 4 / tau: at r = 1 it is 2 / tau with slope 1; A = 0 counts as negative
    log_ratio, advantage = tensor([1, 1, 3]).log(), tensor([1, -1, 2])
    loss = soft_gate_loss(log_ratio, advantage, tau_positive=2.0, tau_negative=4.0)
    close(loss, [-1, 0.5, -2 * 2 / (1 + math.exp(-4))])
    grad = gradient(
        lambda x: soft_gate_loss(x, tensor([1, -1]), tau_positive=2.0, tau_negative=4.0), 0.0, 0.0
    )
    close(grad, [-1, 1])


def test_the_value_loss_by_hand():
    # errors: 2 - 0 squared; within 0.5 of old 1.9 unchanged; 3 held at 1.5: (3 - 1)^2 > (1.5 - 1)^2;
    # 3 held at 1.5 with return 4: (1.5 - 4)^2 = 6.25 > 1; below: -3 held at 0.5 with return -4: 20.25 > 1
    value, old, returns = tensor([2, 3, 3, -3]), tensor([1.9, 1, 1, 1]), tensor([0, 1, 4, -4])
    close(clipped_value_loss(value, old, returns, clip=0.5), [2, 2, 3.125, 10.125])
    close(clipped_value_loss(value, old, returns, clip=0.0), [2, 2, 0.5, 0.5])


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k3_with_k2_gradient", math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_kl_estimates_and_their_gradients_by_hand(estimator, value, slope):
    close(kl_estimate(tensor([0.5]), estimator=estimator), [value])
    close(gradient(lambda x: kl_estimate(x, estimator=estimator), 0.5), [slope])


MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
SEGMENT = torch.tensor([[0, 0, 0], [1, 1, 1], [2, 2, 2]])


def test_sums_and_means_of_sequences_by_hand():
    value = tensor([[1, 2, NAN], [5, NAN, NAN], [NAN, NAN, NAN]])
    close(sequence_sum(value, MASK, SEGMENT), [[3] * 3, [5] * 3, [0] * 3])
    close(sequence_mean(value, MASK, SEGMENT), [[1.5] * 3, [5] * 3, [0] * 3])
    packed = [part.reshape(1, -1) for part in (value, MASK, SEGMENT)]
    close(sequence_mean(*packed), [[1.5] * 3 + [5] * 3 + [0] * 3])
    close(masked(value, MASK), [[1, 2, 0], [5, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    # tokens 1 2 5 of two sequences: 8 / 3; (1.5 + 5) / 2; 8 / (2 * 4)
    [("token_mean", 8 / 3), ("sequence_mean", 3.25), ("fixed", 1.0)],
)
def test_aggregations_by_hand(aggregation, wanted):
    value = tensor([[1, 2, NAN], [5, NAN, NAN], [NAN, NAN, NAN]])
    length = MASK.sum(dim=1, keepdim=True).expand_as(MASK)
    counts = {"num_global_tokens": 3, "num_global_sequences": 2, "fixed_length": 4}
    got = aggregate(value, MASK, length, aggregation=aggregation, **counts)
    assert got.item() == pytest.approx(wanted, rel=1e-14)


def one_token(algorithm, *, log_ratio=0.0, advantage=1.0, **micro):
    """Loss and metrics of one token: log-probability -1, entropy 2, behaviour policy further off by 0.25."""
    objective = policy_objective(
        AlgorithmConfig.model_validate(algorithm),
        num_global_tokens=1, num_global_sequences=1, fixed_length=5,
    )  # fmt: skip
    one = torch.ones(1, 1, dtype=torch.float64)
    micro = {
        "mask": one.bool(), "segment": torch.zeros(1, 1, dtype=torch.int64), "length": one.long(),
        "behavior_logprob": (-1.25 - log_ratio) * one, "advantage": advantage * one,
        **{name: value * one for name, value in micro.items()},
    }  # fmt: skip
    loss, metrics = objective(-one, 2 * one, micro)
    return loss.item(), {name: value.item() for name, value in metrics.items()}


def test_the_terms_add_up_by_hand():
    # ratio to the proximal policy e^0.1, to the reference e^0.3; weight 0.5
    loss, metrics = one_token(
        {"entropy_coefficient": 0.1, "kl": "loss", "kl_coefficient": 0.2, "kl_estimator": "k2",
         "kl_unbiased": True},
        proximal_logprob=-1.1, reference_logprob=-1.3, weight=0.5,
    )  # fmt: skip
    policy, kl = -0.5 * math.exp(0.1), 0.5 * 0.3**2 * math.exp(0.1)
    assert loss == pytest.approx(policy - 0.1 * 2 + 0.2 * kl, rel=1e-12)
    assert metrics == pytest.approx(
        {
            "tokens": 1, "policy_loss": policy, "entropy": 2, "clip_share": 0, "weight": 0.5,
            "reference_kl": kl, "kl_k1": -0.25, "kl_k3": math.exp(0.25) - 1.25,
        },
        rel=1e-12,
    )  # fmt: skip


def test_terms_that_are_off_read_nothing():
    loss, metrics = one_token({"entropy_coefficient": 0.0})
    # without a proximal policy the ratio is to the behaviour policy: e^0.25, cut at 1.28
    assert loss == pytest.approx(-1.28 if math.exp(0.25) > 1.28 else -math.exp(0.25))
    assert not {"weight", "reference_kl"} & metrics.keys() and metrics["clip_share"] == 1


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ({"loss": "clip"}, -1.28),
        ({"loss": "sequence_clip", "clip_high": 0.1}, -1.1),
        ({"loss": "clipped_weight", "clip_low": 1.0, "clip_high": 0.5}, 1.5),
        ({"loss": "soft_gate", "tau_positive": 2.0}, -2 / (1 + math.exp(-2))),
        ({"loss": "clip", "aggregation": "fixed"}, -1.28 / 5),
        ({"loss": "clip", "dual_clip": 1.5}, -1.28),
    ],
)
def test_each_choice_reaches_its_formula(algorithm, wanted):
    loss, _ = one_token({"entropy_coefficient": 0.0, **algorithm}, proximal_logprob=-1 - math.log(2))
    assert loss == pytest.approx(wanted, rel=1e-12)


def test_a_sequences_ratio_ignores_padding_and_strangers():
    batch = token_batch(3, spread=0.1)
    loss, _, _ = our_loss(batch, {"loss": "sequence_clip", "aggregation": "sequence_mean"})
    by_row = []
    for row, keep in enumerate(batch.mask_BL):
        mean = (batch.logprob_BL - batch.proximal_BL)[row][keep].mean().exp()
        clipped = mean.clamp(0.8, 1.28)
        advantage = batch.advantage_B[row]
        by_row.append(-torch.minimum(mean * advantage, clipped * advantage))
    torch.testing.assert_close(loss, torch.stack(by_row).mean(), rtol=1e-12, atol=0)


def test_a_critic_learns_from_a_mean_over_tokens():
    micro = {
        "mask": torch.tensor([[True, True, False]]),
        "value": tensor([[1.9, 1, NAN]]), "return": tensor([[0, 4, NAN]]),
    }  # fmt: skip
    loss, metrics = value_objective(clip=0.5, num_global_tokens=4)(tensor([[2, 3, NAN]]), micro)
    assert loss.item() == pytest.approx((2 + 3.125) / 4)
    wanted = {
        "tokens": 2,
        "value_loss": 5.125,
        "value": 5,
        "value_error": 5,
        "return": 4,
        "return_square": 16,
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(wanted)


ALGORITHMS = {
    "grpo": {"aggregation": "sequence_mean", "kl": "loss", "kl_coefficient": 0.1},
    "dr_grpo": {"aggregation": "fixed", "normalize_by_std": False},
    "dapo": {"clip_high": 0.28},
    "gspo": {"loss": "sequence_clip", "aggregation": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04},
    "cispo": {"loss": "clipped_weight", "clip_low": 1.0, "clip_high": 1.0},
    "sapo": {"loss": "soft_gate", "aggregation": "sequence_mean"},
    "reinforce_plus_plus": {"advantage": "returns", "whiten": True, "discount": 0.9},
    "rloo": {"advantage": "leave_one_out", "normalize_by_std": False, "kl": "reward", "kl_coefficient": 0.1},
    "ppo": {"advantage": "gae", "gae_lambda": 0.9, "whiten": True, "kl": "reward", "kl_coefficient": 0.1},
    "distillation": {"advantage": "teacher", "teacher": {"campaign": "large.0001"}},
    "decoupled": {"correction": {"proximal": "recomputed", "weight": "truncate", "high": 1.2}},
    "masked": {
        "loss": "sequence_clip",
        "correction": {
            "proximal": "recomputed", "weight": "mask", "level": "sequence", "low": 0.5, "high": 1.5,
            "reject_k3": 0.1, "reject_negative_k1": 0.05,
        },
    },
}  # fmt: skip
VOCAB = 24


def table_rows(seed=0, count=9):
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        length = draw.randint(2, 9)

        def column(low, high, length=length):
            return [draw.uniform(low, high) for _ in range(length)]

        rows.append(
            {
                "iteration": 0, "prompt_id": f"p{index // 3}", "reward": draw.random(),
                "advantage": draw.gauss(0, 1),
                "prompt_ids": [draw.randrange(VOCAB) for _ in range(draw.randint(1, 4))],
                "response_ids": [draw.randrange(VOCAB) for _ in range(length)],
                "loss_mask": [True] + [draw.random() < 0.8 for _ in range(length - 1)],
                **{
                    f"{name}_logprob": column(-2, -1)
                    for name in ("behavior", "proximal", "reference", "teacher")
                },
                "value": column(-1, 1),
            }
        )  # fmt: skip
    return rows


def table_gradient(rows, algorithm, *, world_size, max_tokens, packing):
    """Of a model that is a table of log-probabilities: summed over ranks and micro-batches."""
    theta_V = torch.linspace(-1.8, -1.2, VOCAB, dtype=torch.float64).requires_grad_()
    rows, _ = prepare_rows(rows, algorithm)
    objective = policy_objective(
        algorithm,
        num_global_tokens=num_trained_tokens(rows),
        num_global_sequences=num_trained_sequences(rows),
        fixed_length=9,
    )
    total, sums = 0.0, {}
    for rank in range(world_size):
        share = rank_share(rows, rank=rank, world_size=world_size)
        for micro in micro_batches(share, max_tokens=max_tokens, packing=packing):
            logprob_BL = theta_V[micro["input_ids"]]
            loss, metrics = objective(logprob_BL, -logprob_BL, micro)
            loss.backward()
            total += loss.item()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value.item()
    return theta_V.grad, total, sums


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_do_not_depend_on_ranks_micro_batches_packing_or_order(name):
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    rows = table_rows()
    whole, loss, sums = table_gradient(rows, algorithm, world_size=1, max_tokens=10**6, packing="padded")
    assert whole.abs().max() > 1e-3
    for world_size in (1, 2, 4):
        for packing in ("padded", "packed"):
            for max_tokens in (1, 12, 26, 10**6):  # one row each to all at once
                random.Random(max_tokens).shuffle(rows)
                got, got_loss, got_sums = table_gradient(
                    rows, algorithm, world_size=world_size, max_tokens=max_tokens, packing=packing
                )
                torch.testing.assert_close(got, whole, rtol=0, atol=1e-10)
                assert got_loss == pytest.approx(loss, abs=1e-10)
                assert got_sums == pytest.approx(sums, abs=1e-4)  # some are sums in float32


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_in_masked_slots_is_never_read(name):
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    options = {"world_size": 2, "max_tokens": 26, "packing": "packed"}
    clean = table_gradient(table_rows(), algorithm, **options)
    poisoned = table_rows()
    for poison in (NAN, 1e6, -1e6, float("inf")):
        for row in poisoned:
            for column in row:
                if column.endswith("_logprob") or column == "value":
                    row[column] = [
                        x if keep else poison for x, keep in zip(row[column], row["loss_mask"], strict=True)
                    ]
        got = table_gradient(poisoned, algorithm, **options)
        assert torch.equal(got[0], clean[0]) and got[1:] == clean[1:]


def test_a_weight_of_zero_rows_changes_nothing():
    """Padding a batch with rows that train no token leaves the loss as it is, whatever the aggregation."""
    rows = table_rows()
    idle = [{**row, "loss_mask": [False] * len(row["loss_mask"])} for row in table_rows(seed=1, count=3)]
    for name in ("grpo", "dr_grpo", "dapo", "gspo"):
        algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
        options = {"world_size": 2, "max_tokens": 26, "packing": "padded"}
        wanted = table_gradient(rows, algorithm, **options)
        got = table_gradient([*idle, *rows], algorithm, **options)
        torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-12)
