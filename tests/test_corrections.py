"""Importance weights, rejected sequences, the batch's report and its gates, and what assembly does first."""

import math

import pytest
import torch

from tasks.algorithm_config import AlgorithmConfig
from tasks.config import CampaignConfig
from tasks.rl.assembly import assemble_frame, sample_fates
from tasks.rl.corrections import (
    importance_weight,
    keeps_near_sequences,
    keeps_useful_sequences,
    masked_weight,
    truncated_weight,
)
from tasks.rl.mismatch import MismatchError, age_histogram, mismatch_report, require_agreement
from tasks.rl.preparation import prepare_rows
from tasks.schema import ScoredFrame, make_frame

NAN = float("nan")
MASK = torch.tensor([[True, True, False, True]])
SEGMENT = torch.tensor([[0, 0, 0, 1]])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, wanted):
    torch.testing.assert_close(got, tensor(wanted), rtol=1e-12, atol=1e-12)


def test_weights_lead_from_the_behaviour_to_the_proximal_policy():
    # 4 and 2 in one sequence, 0.5 in the next; of a sequence their product
    proximal, behavior = tensor([[4, 2, 1, 0.5]]).log(), tensor([[0, 0, NAN, 0]])
    close(importance_weight(proximal, behavior, MASK, SEGMENT, level="token"), [[4, 2, 1, 0.5]])
    close(importance_weight(proximal, behavior, MASK, SEGMENT, level="sequence"), [[8, 8, 1, 0.5]])


def test_weights_are_cut_off_or_dropped():
    weight = tensor([0.4, 0.5, 1, 2, 2.1])
    close(truncated_weight(weight, high=2.0), [0.4, 0.5, 1, 2, 2])
    close(masked_weight(weight, low=0.5, high=2.0), [0, 0.5, 1, 2, 0])


def test_a_sequence_far_from_the_proximal_policy_is_dropped():
    # behaviour minus proximal 1 and 0: k3 = e^-1 - 1 + 1, mean 0.18394; the other sequence 0.5
    proximal, behavior = tensor([[-1, 0, 0, -0.5]]), tensor([[0, 0, NAN, 0]])
    first, second = math.exp(-1) / 2, math.exp(-0.5) - 0.5
    for bound, wanted in ((first - 1e-9, [False, True]), (first + 1e-9, [True, True])):
        keep = keeps_near_sequences(proximal, behavior, MASK, SEGMENT, max_k3=bound)
        assert [keep[0, 0].item(), keep[0, 3].item()] == wanted
    assert not keeps_near_sequences(proximal, behavior, MASK, SEGMENT, max_k3=second - 1e-9)[0, 3]
    assert first > second


def test_only_unlikely_mistakes_are_useless():
    # mean k1 (0.4 + 0) / 2 = 0.2 and 0.5
    proximal, behavior = tensor([[-0.4, 0, 0, -0.5]]), tensor([[0, 0, NAN, 0]])
    pair = proximal, behavior

    def kept(first, second, bound):
        advantage = tensor([[first, first, NAN, second]])
        keep = keeps_useful_sequences(*pair, advantage, MASK, SEGMENT, max_k1=bound)
        return [keep[0, 0].item(), keep[0, 3].item()]

    assert kept(-1, -1, 0.3) == [True, False]
    assert kept(-1, -1, 0.1) == [False, False]
    assert kept(-1, 1, 0.1) == [False, True]
    assert kept(0, -1, 0.1) == [True, False]


def test_the_report_by_hand():
    # behaviour minus trainer: 0.1 -0.3 0.2 0: k1 0, k3 mean of e^-d - 1 + d, weights e^-d
    report = mismatch_report(tensor([-0.1, 0.3, -0.2, 0.0]), tensor([0.0, 0.0, 0.0, 0.0]))
    differences = (0.1, -0.3, 0.2, 0.0)
    weights = [math.exp(-d) for d in differences]
    assert report == pytest.approx(
        {
            "k1": 0.0,
            "k3": sum(math.exp(-d) - 1 + d for d in differences) / 4,
            "max": 0.3,
            "p99": 0.3,
            "effective_share": sum(weights) ** 2 / sum(w * w for w in weights) / 4,
        },
        abs=1e-15,
    )


def test_the_99th_percentile_is_what_99_of_100_do_not_exceed():
    report = mismatch_report(torch.arange(1.0, 201.0), torch.zeros(200))
    assert (report["p99"], report["max"], report["k1"]) == (198, 200, -100.5)


BOUNDS = {"max_k3": 0.0, "max_difference": 0.0, "min_effective_share": 0.0}
REPORT = {"k1": 0.0, "k3": 0.2, "max": 1.5, "p99": 1.0, "effective_share": 0.6}


def test_a_bound_of_0_is_none_and_one_that_is_met_passes():
    require_agreement(REPORT, **BOUNDS)
    require_agreement(REPORT, max_k3=0.2, max_difference=1.5, min_effective_share=0.6)


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"max_k3": 0.1}, "k3 must be at most 0.1, got 0.2. Look for"),
        ({"max_difference": 1.4}, "max must be at most 1.4, got 1.5. Look for"),
        ({"min_effective_share": 0.7}, "effective_share must be at least 0.7, got 0.6. Look for"),
        ({"max_k3": 0.1, "max_difference": 1.4}, "got 0.2; max must be"),
    ],
)
def test_a_bound_that_is_passed_stops_the_run_and_says_which(bound, words):
    """Complaint 10: trainer and engine disagreed, and nobody was told."""
    with pytest.raises(MismatchError) as stop:
        require_agreement(REPORT, **{**BOUNDS, **bound})
    assert words in str(stop.value)


def test_a_report_that_is_not_a_number_stops_the_run():
    with pytest.raises(MismatchError, match="got nan"):
        require_agreement({**REPORT, "k3": NAN}, **{**BOUNDS, "max_k3": 0.1})


def test_ages_are_counted():
    assert age_histogram([1, 0, 1, 3]) == {"age/0": 1, "age/1": 2, "age/3": 1}
    assert age_histogram([]) == {}


def row(index, *, advantage=1.0, prompt="p", reward=0.0, length=2, **columns):
    return {
        "iteration": 0, "prompt_id": prompt, "reward": reward, "advantage": advantage, "index": index,
        "response_ids": [0] * length, "loss_mask": [True] * length,
        "behavior_logprob": [-1.0] * length, **columns,
    }  # fmt: skip


def algorithm(**choices):
    return AlgorithmConfig.model_validate(choices)


def test_a_batch_that_needs_nothing_is_left_as_it_is():
    rows = [row(0), row(1)]
    assert prepare_rows(rows, algorithm()) == (rows, {})
    assert prepare_rows([], algorithm(advantage="gae")) == ([], {})


def test_a_prepared_batch_by_hand():
    # weights e^0.5, cut to 1.5, and e^-0.5; the second row's k3 is far above the bound, so it trains no token
    rows = [row(0, proximal_logprob=[-0.5, -1.5]), row(1, proximal_logprob=[-4.0, -4.0])]
    rules = {"proximal": "recomputed", "weight": "truncate", "high": 1.5, "reject_k3": 0.5}
    (first, second), report = prepare_rows(rows, algorithm(correction=rules))
    assert first["weight"] == pytest.approx([1.5, math.exp(-0.5)])
    assert (first["loss_mask"], second["loss_mask"]) == ([True, True], [False, False])
    assert (first["index"], first["advantage"]) == (0, 1.0) and "token_advantage" not in first
    assert report["mismatch/max"] == 3 and report["mismatch/rejected_share"] == 0.5
    assert report["mismatch/changed_weight_share"] == 0.25
    assert report["mismatch/k1"] == pytest.approx((-0.5 + 0.5 + 3 + 3) / 4)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ({"weight": "none"}, [1, 1, 1]),
        ({"weight": "truncate", "high": 3.0}, [3, 2, 0.25]),
        ({"weight": "mask", "low": 0.5, "high": 3.0}, [0, 2, 0]),
        ({"weight": "mask", "low": 0.5, "high": 9.0, "level": "sequence"}, [8, 8, 0]),
        ({"weight": "truncate", "high": 9.0, "level": "sequence"}, [8, 8, 0.25]),
    ],
)
def test_each_rule_gives_its_weights_and_drops_nothing(rule, wanted):
    log = math.log
    rows = [
        row(0, proximal_logprob=[log(4) - 1, log(2) - 1]),
        row(1, length=1, proximal_logprob=[log(0.25) - 1]),
    ]
    prepared, report = prepare_rows(rows, algorithm(correction={"proximal": "recomputed", **rule}))
    assert [w for each in prepared for w in each["weight"]] == pytest.approx(wanted)
    assert all(all(each["loss_mask"]) for each in prepared) and report["mismatch/rejected_share"] == 0


def test_useless_mistakes_are_judged_by_the_advantage_that_is_trained():
    rows = [row(i, advantage=a, proximal_logprob=[-2.0, -2.0]) for i, a in enumerate((-1.0, 1.0))]
    rule = {"proximal": "recomputed", "reject_negative_k1": 0.5}
    prepared, _ = prepare_rows(rows, algorithm(correction=rule))
    assert [each["loss_mask"] for each in prepared] == [[False, False], [True, True]]


@pytest.mark.parametrize(
    ("bound", "name"), [("stop_k3", "k3"), ("stop_difference", "max"), ("stop_effective_share", "effective")]
)
def test_each_gate_of_the_configuration_stops_a_mismatched_batch(bound, name):
    rows = [row(0, proximal_logprob=[-1.0, -3.0])]
    rule = {"proximal": "recomputed", bound: 0.9 if bound == "stop_effective_share" else 0.1}
    with pytest.raises(MismatchError, match=name):
        prepare_rows(rows, algorithm(correction=rule))


def test_the_divergence_in_the_reward_changes_the_groups_mean():
    # group p: 1 - 0.5 * (1 + 0) and 0 - 0, q: 4 and 2; rows of a group need not be neighbours
    far, near = [-2.0, -1.0], [-1.0, -1.0]
    rows = [
        row(0, reward=1.0, reference_logprob=far), row(1, prompt="q", reward=4.0, reference_logprob=near),
        row(2, reward=0.0, reference_logprob=near), row(3, prompt="q", reward=2.0, reference_logprob=near),
    ]  # fmt: skip
    choices = {"kl": "reward", "kl_coefficient": 0.5, "normalize_by_std": False}
    prepared, _ = prepare_rows(rows, algorithm(**choices))
    assert [each["token_advantage"] for each in prepared] == [[0.25] * 2, [1.0] * 2, [-0.25] * 2, [-1.0] * 2]
    prepared, _ = prepare_rows(rows, algorithm(**choices, advantage="leave_one_out"))
    assert prepared[1]["token_advantage"] == [2.0] * 2


def test_the_estimators_of_tokens_by_hand():
    rows = [row(0, reward=1.0, value=[0.25, 0.5], teacher_logprob=[-0.5, -2.0])]
    choices = {"discount": 0.5, "gae_lambda": 0.5}
    (got,), _ = prepare_rows(rows, algorithm(advantage="gae", **choices))
    # d1 = 1 - 0.5; d0 = 0.5 * 0.5 - 0.25 = 0, a0 = 0.25 * 0.5
    assert (got["token_advantage"], got["return"]) == ([0.125, 0.5], [0.375, 1.0])
    (got,), _ = prepare_rows(rows, algorithm(advantage="returns", discount=0.5))
    assert got["token_advantage"] == [0.5, 1.0] and "return" not in got
    (got,), _ = prepare_rows(rows, algorithm(advantage="returns", discount=0.5, whiten=True))
    root = math.sqrt(0.125 + 1e-8)
    assert got["token_advantage"] == pytest.approx([-0.25 / root, 0.25 / root])


@pytest.mark.parametrize(
    ("choices", "missing"),
    [
        ({"correction": {"proximal": "recomputed"}}, "proximal_logprob"),
        ({"kl": "loss", "kl_coefficient": 0.1}, "reference_logprob"),
        ({"kl": "reward", "kl_coefficient": 0.1}, "reference_logprob"),
        ({"advantage": "gae"}, "value"),
    ],
)
def test_a_batch_that_nobody_read_is_refused(choices, missing):
    with pytest.raises(ValueError, match=f"rows must hold {missing} for this algorithm, got iteration"):
        prepare_rows([row(0)], algorithm(**choices))


def scored(prompt, index, reward, *, length=2, **changes):
    base = {
        "iteration": 3, "prompt_id": prompt, "sample_index": index, "policy_version": 7, "prompt_ids": [1, 2],
        "response_ids": [3] * length, "behavior_logprob": [-0.5] * length, "finish_reason": "stop",
        "outcome": "score", "reward": reward, "is_exact": False, "reason": "",
    }  # fmt: skip
    return base | changes


def assembled(rows, **choices):
    sections = {"algorithm": {"num_minibatches": 1, **choices}, "rollout": {"max_new_tokens": 8}}
    config = CampaignConfig.model_validate(sections)
    frame = make_frame(rows, ScoredFrame)
    train, rejected, metrics = assemble_frame(frame, config, iteration=3, policy_version=7)
    fates = dict(sample_fates(frame, train, config, policy_version=7).group_by("fate").len().iter_rows())
    assert fates == {name: n for name, n in {**rejected, "trained": len(train)}.items() if n}
    by_sample = train.sort("prompt_id", "sample_index")
    return by_sample["advantage"].to_list(), by_sample["reward"].to_list(), rejected, metrics


def test_a_sample_that_was_cut_off_counts_in_the_mean_and_is_not_trained():
    rows = [scored("a", 0, 1.0), scored("a", 1, 0.5), scored("a", 2, 0.0, finish_reason="length")]
    advantages, _, rejected, metrics = assembled(rows, overlong="filter", normalize_by_std=False)
    assert advantages == [0.5, 0.0] and rejected == {"zero_variance": 0, "overlong": 1}
    assert metrics["age/0"] == 2
    advantages, _, _, _ = assembled(rows, normalize_by_std=False)
    assert advantages == [0.5, 0.0, -0.5]


def test_length_has_its_price_before_rewards_are_compared():
    # 8 tokens at most, free up to 4: 6 tokens cost 0.5, 8 cost 1
    rows = [scored("a", i, 1.0, length=n) for i, n in enumerate((4, 6, 8))]
    advantages, rewards, _, _ = assembled(rows, overlong="shape", overlong_buffer=4, normalize_by_std=False)
    assert rewards == [1.0, 0.5, 0.0] and advantages == [0.5, 0.0, -0.5]


def test_whitened_advantages_count_a_sample_once_a_token():
    # centred -0.5 and 0.5 with 1 and 3 tokens: mean 0.25, deviations -0.75 and 0.25, variance 0.75 / 3
    rows = [scored("a", 0, 0.0, length=1), scored("a", 1, 1.0, length=3)]
    advantages, _, _, _ = assembled(rows, whiten=True, normalize_by_std=False)
    root = math.sqrt(0.25 + 1e-8)
    assert advantages == pytest.approx([-0.75 / root, 0.25 / root])
    rows[1]["chosen"] = [True, False, False]  # a tool wrote the rest: as many trained tokens as the other
    advantages, _, _, _ = assembled(rows, whiten=True, normalize_by_std=False)
    assert advantages == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_estimators_of_tokens_keep_groups_without_a_difference():
    rows = [scored("a", 0, 1.0), scored("a", 1, 1.0), scored("b", 0, 0.0)]
    for choices in ({"advantage": "returns"}, {"advantage": "gae"}):
        advantages, rewards, rejected, _ = assembled(rows, **choices)
        assert (advantages, rewards, rejected) == ([0.0] * 3, [1.0, 1.0, 0.0], {})
    assert assembled(rows)[2] == {"zero_variance": 2, "group_of_one": 1}


def test_groups_of_every_size_without_a_difference_are_counted_together():
    rows = [scored("a", i, 1.0) for i in range(3)] + [scored("b", i, 0.5) for i in range(3)]
    rows += [scored("c", i, 0.0) for i in range(2)] + [scored("d", i, float(i)) for i in range(2)]
    _, rewards, rejected, metrics = assembled(rows)
    assert (rewards, rejected) == ([0.0, 1.0], {"zero_variance": 8})
    assert metrics["zero_variance"] == 0.8
    assert assembled([])[3]["zero_variance"] == 0


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"advantage": "leave_one_out"}, "normalize_by_std must be false with advantage 'leave_one_out'"),
        ({"discount": 0.9}, "discount must be 1 unless advantage is 'returns' or 'gae'"),
        ({"kl": "loss"}, "kl_coefficient must be above 0 with kl 'loss'"),
        ({"kl_coefficient": 0.1}, "got kl='none', kl_coefficient=0.1"),
        ({"dual_clip": 1.28}, "dual_clip must exceed 1 + clip_high"),
        ({"dual_clip": 3.0, "loss": "soft_gate"}, "dual_clip must be 0 unless loss is 'clip'"),
        ({"clip_low": 1.0}, "clip_low must be below 1 unless loss is 'clipped_weight'"),
        ({"overlong": "shape"}, "overlong_buffer must be above 0 with overlong 'shape'"),
        ({"overlong_buffer": 3}, "overlong_buffer must be above 0 with overlong 'shape'"),
        ({"correction": {"weight": "mask"}}, "weight must go with proximal 'recomputed'"),
        ({"correction": {"stop_k3": 0.1, "reject_k3": 1.0}}, "reject_k3 and stop_k3 must go with proximal"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(choices, words):
    with pytest.raises(ValueError) as refusal:
        algorithm(**choices)
    assert words in str(refusal.value)


def test_the_buffer_of_length_must_fit_into_an_answer():
    with pytest.raises(ValueError, match=r"overlong_buffer must be below .*, got 8 >= 8"):
        CampaignConfig.model_validate(
            {"algorithm": {"overlong": "shape", "overlong_buffer": 8}, "rollout": {"max_new_tokens": 8}}
        )
