"""Estimates of a KL divergence from sampled tokens (Schulman, "Approximating KL divergence", 2020).

Shape key: B rows, L positions. Pure. Tokens are sampled from the policy; ``log_ratio_BL`` is policy minus
reference, so every estimate is of KL(policy || reference).
"""

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "k3_with_k2_gradient"]


def kl_estimate(log_ratio_BL: Tensor, *, estimator: Estimator) -> Tensor:
    """Unbiased in value: k1 (high variance, may be negative) and k3 (never negative); k2 is biased.

    As a loss the *gradient* counts, and there only that of k2 is the gradient of the divergence (arXiv
    2506.09477 section 4): k1's is zero on average, k3's is that of the reversed divergence.
    ``k3_with_k2_gradient`` has k3's value and k2's gradient.
    """
    if estimator == "k1":
        return log_ratio_BL
    if estimator == "k2":
        return 0.5 * log_ratio_BL.square()
    k3_BL = (-log_ratio_BL).exp() - 1 + log_ratio_BL
    if estimator == "k3":
        return k3_BL
    k2_BL = 0.5 * log_ratio_BL.square()
    return k2_BL + (k3_BL - k2_BL).detach()
