"""The loss of a micro-batch, put together from the configuration's choices; the README here has a table.

Shape key: B rows, L positions. Terms of a token are in ``losses.py`` and ``kl.py``; here they are chosen,
masked and added, and ``aggregate`` divides by counts of the whole mini-batch. Metrics are sums over masked
tokens; the caller adds them over micro-batches and ranks and divides once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tasks.algorithm_config import AlgorithmConfig
from tasks.rl.kl import kl_estimate
from tasks.rl.losses import (
    clipped_surrogate,
    clipped_value_loss,
    clipped_weight_loss,
    sequence_log_ratio,
    soft_gate_loss,
)
from tasks.rl.packing import MicroBatch
from tasks.rl.sequences import aggregate, masked

LossOfTokens = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
PER_TOKEN = ("policy_loss", "entropy", "clip_share", "kl_k1", "kl_k3", "reference_kl", "weight")
"""Metrics that are means over tokens once the caller has divided their sums."""


def policy_objective(
    algorithm: AlgorithmConfig, *, num_global_tokens: int, num_global_sequences: int, fixed_length: int
) -> LossOfTokens:
    """The loss function of a mini-batch: log-probabilities, entropies and micro-batch in, loss and sums out.

    A micro-batch holds, [B, L] each: ``mask`` (True where the policy chose the token; the other positions of
    all the rest may hold anything, NaN included), ``behavior_logprob``, ``advantage``, ``segment``,
    ``length``, and as far as they are used ``proximal_logprob`` (else the behaviour policy is the proximal
    one), ``weight`` and ``reference_logprob``.
    """

    def objective(
        logprob_BL: Tensor, entropy_BL: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BL, advantage_BL = micro["mask"], masked(micro["advantage"], micro["mask"])
        behavior_log_ratio_BL = log_ratio_BL = masked(logprob_BL - micro["behavior_logprob"], mask_BL)
        if "proximal_logprob" in micro:
            log_ratio_BL = masked(logprob_BL - micro["proximal_logprob"], mask_BL)
        loss_BL, is_clipped_BL = token_loss(
            algorithm, masked(logprob_BL, mask_BL), log_ratio_BL, advantage_BL, mask_BL, micro["segment"]
        )
        entropy_BL = masked(entropy_BL, mask_BL)
        metrics = {
            "tokens": mask_BL,
            "entropy": entropy_BL,
            "clip_share": is_clipped_BL,
            "kl_k1": kl_estimate(-behavior_log_ratio_BL, estimator="k1"),
            "kl_k3": kl_estimate(-behavior_log_ratio_BL, estimator="k3"),
        }
        if "weight" in micro:
            metrics["weight"] = masked(micro["weight"], mask_BL)
            loss_BL = loss_BL * metrics["weight"]
        metrics["policy_loss"] = loss_BL
        total_BL = loss_BL - algorithm.entropy_coefficient * entropy_BL
        if algorithm.kl == "loss":
            reference_log_ratio_BL = masked(logprob_BL - micro["reference_logprob"], mask_BL)
            kl_BL = kl_estimate(reference_log_ratio_BL, estimator=algorithm.kl_estimator)
            if algorithm.kl_unbiased:
                kl_BL = kl_BL * log_ratio_BL.exp()
            metrics["reference_kl"] = kl_BL
            total_BL = total_BL + algorithm.kl_coefficient * kl_BL
        loss = aggregate(
            total_BL, mask_BL, micro["length"],
            aggregation=algorithm.aggregation, num_global_tokens=num_global_tokens,
            num_global_sequences=num_global_sequences, fixed_length=fixed_length,
        )  # fmt: skip
        return loss, {name: value.detach().sum() for name, value in metrics.items()}

    return objective


def token_loss(
    algorithm: AlgorithmConfig,
    logprob_BL: Tensor,
    log_ratio_BL: Tensor,
    advantage_BL: Tensor,
    mask_BL: Tensor,
    segment_BL: Tensor,
) -> tuple[Tensor, Tensor]:
    """The policy term of each token, and True where clipping changed it."""
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    if algorithm.loss == "clipped_weight":
        return clipped_weight_loss(logprob_BL, log_ratio_BL, advantage_BL, **bounds)
    if algorithm.loss == "soft_gate":
        taus = {"tau_positive": algorithm.tau_positive, "tau_negative": algorithm.tau_negative}
        return soft_gate_loss(log_ratio_BL, advantage_BL, **taus), torch.zeros_like(mask_BL)
    if algorithm.loss == "sequence_clip":
        log_ratio_BL = masked(sequence_log_ratio(log_ratio_BL, mask_BL, segment_BL), mask_BL)
    return clipped_surrogate(log_ratio_BL, advantage_BL, dual_clip=algorithm.dual_clip, **bounds)


def value_objective(
    *, clip: float, num_global_tokens: int
) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The loss function of a critic: values and micro-batch in; a token mean like the default policy's.

    The micro-batch holds ``mask``, ``value`` (what the critic said when the update began) and ``return``.
    """

    def objective(value_BL: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BL = micro["mask"]
        value_BL, return_BL = masked(value_BL, mask_BL), masked(micro["return"], mask_BL)
        loss_BL = clipped_value_loss(value_BL, masked(micro["value"], mask_BL), return_BL, clip=clip)
        with torch.no_grad():
            metrics = {
                "tokens": mask_BL.sum(),
                "value_loss": loss_BL.sum(),
                "value": value_BL.sum(),
                "value_error": (value_BL - return_BL).square().sum(),
                "return": return_BL.sum(),
                "return_square": return_BL.square().sum(),
            }
        return loss_BL.sum() / num_global_tokens, metrics

    return objective
