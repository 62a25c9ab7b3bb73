"""The algorithm: advantages, loss, corrections, mini-batches; no torch.

A published method is a set of choices here; ``tasks/rl/README.md`` has a table of them.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.critic_config import CriticConfig, TeacherConfig
from tasks.section import Section


class CorrectionConfig(Section):
    """What is done about samples of another policy than the trainer's: older, or of another engine.

    Three policies: *behaviour* sampled, *proximal* is the trainer's when an update begins, *current* is
    trained.
    """

    proximal: Literal["behavior", "recomputed"] = "behavior"
    """``recomputed`` reads the batch once with the trainer before the first step (decoupled PPO, arXiv
    2505.24298): the loss stays near that policy, and weights lead to it from the behaviour policy."""
    weight: Literal["none", "truncate", "mask"] = "none"
    """Importance weight of a token: cut off at ``high`` (TIS), or 0 outside ``low`` to ``high`` (IcePop)."""
    level: Literal["token", "sequence"] = "token"
    """Weights of single tokens, or one for all tokens of a sequence: the product of theirs."""
    low: float = Field(default=0.5, gt=0, le=1)
    high: float = Field(default=2.0, ge=1)
    reject_k3: float = Field(default=0.0, ge=0)
    """Drop sequences whose mean KL (k3) from behaviour to proximal exceeds this; 0 = none."""
    reject_negative_k1: float = Field(default=0.0, ge=0)
    """Drop sequences of negative advantage whose mean KL (k1) exceeds this (DeepSeek-V3.2); 0 = none."""
    stop_k3: float = Field(default=0.0, ge=0)
    """End the run where the batch's mean KL (k3) exceeds this; 0 = never, as in the next two."""
    stop_difference: float = Field(default=0.0, ge=0)
    """The same for the largest difference of a token's log-probabilities."""
    stop_effective_share: float = Field(default=0.0, ge=0, lt=1)
    """End the run where the effective sample size falls below this share of the tokens."""

    @model_validator(mode="after")
    def _corrections_need_the_proximal_policy(self) -> Self:
        names = ("reject_k3", "reject_negative_k1", "stop_k3", "stop_difference", "stop_effective_share")
        wanted = [name for name in names if getattr(self, name)] + ["weight"] * (self.weight != "none")
        if wanted and self.proximal == "behavior":
            raise ValueError(
                f"{' and '.join(wanted)} must go with proximal 'recomputed', which they compare with the "
                f"behaviour policy, got proximal={self.proximal!r}. Set it to 'recomputed'."
            )
        return self


class AlgorithmConfig(Section):
    """GRPO (arXiv 2402.03300) with the clip-higher and token-level loss of DAPO (arXiv 2503.14476)."""

    advantage: Literal["group", "leave_one_out", "returns", "gae", "teacher"] = "group"
    """``group`` takes the mean of a prompt's rewards from each, ``leave_one_out`` that of the others (RLOO);
    ``returns`` are discounted rewards to come (REINFORCE++), ``gae`` those beyond a critic's values (PPO);
    ``teacher`` prefers what a teacher's policy would say (on-policy distillation) and reads no reward."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation (GRPO); off = Dr. GRPO (arXiv 2503.20783)."""
    std_eps: float = Field(default=1e-6, gt=0)
    """Added to that standard deviation; TRL has 1e-4."""
    whiten: bool = False
    """Bring advantages to mean 0 and variance 1 over all trained tokens of the iteration."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of rewards to come, a token; for ``returns`` and ``gae``."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)

    loss: Literal["clip", "sequence_clip", "clipped_weight", "soft_gate"] = "clip"
    """PPO's clip; the same of a sequence's mean ratio (GSPO); a clipped constant weight (CISPO); a sigmoid
    (SAPO)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float = Field(default=0.0, ge=0)
    """Bound the loss of tokens with a negative advantage by so many times it; 0 = off, verl has 3."""
    tau_positive: float = Field(default=1.0, gt=0)
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of ``soft_gate`` by the sign of the advantage."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    """Mean over the tokens of a mini-batch (DAPO); over sequences of their means (GRPO); over sequences of
    their sums divided by ``rollout.max_new_tokens`` (Dr. GRPO)."""
    entropy_coefficient: float = Field(default=0.01, ge=0)

    kl: Literal["none", "loss", "reward"] = "none"
    """Where a divergence from the reference policy counts: in the loss, or in each token's reward."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "k3_with_k2_gradient"] = "k3"
    """Of the loss; a reward takes k1."""
    kl_unbiased: bool = False
    """Multiply the loss's estimate by the ratio of current to proximal policy (DeepSeek-V3.2)."""
    reference_version: int = Field(default=1, ge=0)
    """The campaign's own version that is the reference: 1 is what a warm start made of version 0."""

    overlong: Literal["keep", "filter", "shape"] = "keep"
    """Samples that were cut off: kept as they are; not trained, though the group's mean counts them; or the
    reward falls by up to 1 over the last ``overlong_buffer`` tokens (DAPO)."""
    overlong_buffer: int = Field(default=0, ge=0)

    num_minibatches: int = Field(default=32, ge=1)
    """Optimizer steps of one pass over an iteration's samples; each sees its share of them once."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over an iteration's samples."""
    correction: CorrectionConfig = CorrectionConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()

    @property
    def is_estimated_by_trainer(self) -> bool:
        """True where advantages need what only the trainer can compute: values, other policies' opinions."""
        return self.advantage in ("returns", "gae", "teacher") or self.kl == "reward"

    def check_length(self, max_new_tokens: int) -> None:
        if self.overlong_buffer >= max_new_tokens:
            raise ValueError(
                "algorithm.overlong_buffer must be below rollout.max_new_tokens, got "
                f"{self.overlong_buffer} >= {max_new_tokens}. Set it to {max_new_tokens // 4}."
            )

    @model_validator(mode="after")
    def _advantages_are_of_one_kind(self) -> Self:
        if self.normalize_by_std and self.advantage == "leave_one_out":
            raise ValueError(
                "normalize_by_std must be false with advantage 'leave_one_out', which keeps the rewards' "
                "scale, got true. Set it to false."
            )
        if self.advantage != "returns" and self.advantage != "gae" and self.discount != 1:
            raise ValueError(
                "discount must be 1 unless advantage is 'returns' or 'gae', whose rewards have a time, got "
                f"discount={self.discount}, advantage={self.advantage!r}. Set it to 1."
            )
        if self.advantage == "teacher" and self.kl == "reward":
            raise ValueError(
                "kl must be 'none' or 'loss' with advantage 'teacher', which reads no reward, got 'reward'. "
                "Set kl to 'loss'."
            )
        return self

    @model_validator(mode="after")
    def _a_teacher_is_named(self) -> Self:
        if (self.advantage == "teacher") != bool(self.teacher.campaign):
            raise ValueError(
                "teacher.campaign must be given with advantage 'teacher' and only with it, got "
                f"advantage={self.advantage!r}, teacher.campaign={self.teacher.campaign!r}. Set it to the "
                "teacher's lineage, such as laptop.0001, or change advantage."
            )
        return self

    @model_validator(mode="after")
    def _terms_are_complete(self) -> Self:
        if (self.kl == "none") != (self.kl_coefficient == 0):
            raise ValueError(
                "kl_coefficient must be above 0 with kl 'loss' or 'reward' and 0 with 'none', got "
                f"kl={self.kl!r}, kl_coefficient={self.kl_coefficient}. Change one of them."
            )
        if 0 < self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                "dual_clip must exceed 1 + clip_high, or be 0 for none, got "
                f"{self.dual_clip} <= {1 + self.clip_high}. Set it to 3."
            )
        if self.dual_clip and self.loss not in ("clip", "sequence_clip"):
            raise ValueError(
                "dual_clip must be 0 unless loss is 'clip' or 'sequence_clip', got "
                f"{self.dual_clip} with {self.loss!r}. Set it to 0."
            )
        if self.clip_low == 1 and self.loss != "clipped_weight":
            raise ValueError(
                "clip_low must be below 1 unless loss is 'clipped_weight', where 1 is no lower bound, got 1 "
                f"with {self.loss!r}. Set it to 0.2."
            )
        if (self.overlong == "shape") != (self.overlong_buffer > 0):
            raise ValueError(
                "overlong_buffer must be above 0 with overlong 'shape' and only with it, got "
                f"overlong={self.overlong!r}, overlong_buffer={self.overlong_buffer}. Change one of them."
            )
        return self
