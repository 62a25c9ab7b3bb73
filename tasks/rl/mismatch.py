"""How far the policy that sampled is from the one the trainer holds, over a whole batch. Pure.

Shape key: T trained tokens of the batch, whatever their sequences.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from tasks.rl.kl import kl_estimate


class MismatchError(RuntimeError):
    """Samples too far from the policy that is trained on them."""


def mismatch_report(trainer_logprob_T: Tensor, behavior_logprob_T: Tensor) -> dict[str, float]:
    """KL(behaviour || trainer) by k1 and k3, the largest and 99th-percentile difference of log-probabilities,
    and the effective sample size as a share of the tokens: (sum of weights)^2 / sum of their squares.
    """
    log_ratio_T = behavior_logprob_T.double() - trainer_logprob_T.double()
    weight_T = (-log_ratio_T).exp()
    distance_T = log_ratio_T.abs()
    return {
        "k1": log_ratio_T.mean().item(),
        "k3": kl_estimate(log_ratio_T, estimator="k3").mean().item(),
        "max": distance_T.max().item(),
        # the least that 99 % of the tokens do not exceed; torch.quantile takes at most 2^24 values
        "p99": distance_T.kthvalue(-(-99 * len(distance_T) // 100)).values.item(),
        "effective_share": (weight_T.sum().square() / weight_T.square().sum() / len(weight_T)).item(),
    }


def require_agreement(
    report: Mapping[str, float], *, max_k3: float, max_difference: float, min_effective_share: float
) -> None:
    """Stop where a bound is passed or a figure is not finite; a bound of 0 is none."""
    bounds = (
        ("k3", "most", max_k3, report["k3"] <= max_k3),
        ("max", "most", max_difference, report["max"] <= max_difference),
        ("effective_share", "least", min_effective_share, report["effective_share"] >= min_effective_share),
    )
    passed = [
        f"{name} must be at {word} {bound}, got {report[name]:.6g}"
        for name, word, bound, is_inside in bounds
        if bound and not is_inside
    ]
    if passed:
        raise MismatchError(
            f"samples are too far from the policy that would train on them: {'; '.join(passed)}. Look for "
            "stale weights, another precision or another router in the engine, or lower max_staleness."
        )


def age_histogram(ages: Iterable[int]) -> dict[str, float]:
    """``age/<versions>`` -> samples that many versions older than the policy they train."""
    histogram: dict[str, float] = {}
    for age in sorted(ages):
        histogram[f"age/{age}"] = histogram.get(f"age/{age}", 0.0) + 1.0
    return histogram
