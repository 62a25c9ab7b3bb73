"""``tasks/rl/objective.py`` by one kernel: the same loss, gradients and metrics of a micro-batch.

Shape key: B rows, L positions, N = B L.
"""

from __future__ import annotations

from moe_kernels.policy_loss import SUMS, LossTerms, TokenValues, policy_loss
from torch import Tensor

from tasks.algorithm_config import AlgorithmConfig
from tasks.rl.objective import LossOfTokens
from tasks.rl.packing import MicroBatch
from tasks.rl.sequences import loss_divisor, masked, sequence_mean


def fused_policy_objective(
    algorithm: AlgorithmConfig, *, num_global_tokens: int, num_global_sequences: int, fixed_length: int
) -> LossOfTokens:
    """What ``policy_objective`` returns, for the same arguments; CUDA only."""
    terms = _terms(algorithm)
    divisor = loss_divisor(
        algorithm.aggregation,
        num_global_tokens=num_global_tokens,
        num_global_sequences=num_global_sequences,
        fixed_length=fixed_length,
    )

    def objective(
        logprob_BL: Tensor, entropy_BL: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total, sums_S = policy_loss(
            logprob_BL.reshape(-1).contiguous(),
            entropy_BL.reshape(-1).contiguous(),
            _values(algorithm, logprob_BL, micro),
            terms,
        )
        metrics = dict(zip(SUMS, sums_S, strict=True))
        absent = {"weight": "weight" not in micro, "reference_kl": algorithm.kl != "loss"}
        return total / divisor, {n: value for n, value in metrics.items() if not absent.get(n)}

    return objective


def _terms(algorithm: AlgorithmConfig) -> LossTerms:
    has_kl = algorithm.kl == "loss"
    return LossTerms(
        loss=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
        entropy_coefficient=algorithm.entropy_coefficient,
        kl_coefficient=algorithm.kl_coefficient if has_kl else 0.0,
        kl_estimator=algorithm.kl_estimator if has_kl else "none",
        kl_unbiased=algorithm.kl_unbiased,
        is_per_length=algorithm.aggregation == "sequence_mean",
    )


def _values(algorithm: AlgorithmConfig, logprob_BL: Tensor, micro: MicroBatch) -> TokenValues:
    proximal_BL, mask_BL = micro.get("proximal_logprob"), micro["mask"]
    mean_BL = None
    if algorithm.loss == "sequence_clip":
        near_BL = micro["behavior_logprob"] if proximal_BL is None else proximal_BL
        log_ratio_BL = masked(logprob_BL.detach() - near_BL, mask_BL)
        mean_BL = sequence_mean(log_ratio_BL, mask_BL, micro["segment"])
    return TokenValues(
        mask_N=_flat(mask_BL),
        behavior_N=_flat(micro["behavior_logprob"]),
        advantage_N=_flat(micro["advantage"]),
        length_N=_flat(micro["length"]),
        proximal_N=None if proximal_BL is None else _flat(proximal_BL),
        mean_log_ratio_N=None if mean_BL is None else _flat(mean_BL),
        weight_N=_flat(micro["weight"]) if "weight" in micro else None,
        reference_N=_flat(micro["reference_logprob"]) if algorithm.kl == "loss" else None,
    )


def _flat(value_BL: Tensor) -> Tensor:
    return value_BL.reshape(-1).contiguous()
