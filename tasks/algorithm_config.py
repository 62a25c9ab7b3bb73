"""The algorithm: advantages, loss, mini-batches; no torch."""

from pydantic import Field

from tasks.section import Section


class AlgorithmConfig(Section):
    """GRPO (arXiv 2402.03300) with the clip-higher and token-level loss of DAPO (arXiv 2503.14476)."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    entropy_coefficient: float = Field(default=0.01, ge=0)
    normalize_by_std: bool = True
    """Divide centred rewards by the group's standard deviation (GRPO); off = Dr. GRPO (arXiv 2503.20783)."""
    num_minibatches: int = Field(default=32, ge=1)
    """Optimizer steps an iteration; each sees its share of the samples once."""
