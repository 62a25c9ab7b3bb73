"""Models beside the policy: PPO's critic, a teacher; no torch."""

from typing import Self

from pydantic import Field, model_validator

from tasks.section import Section


class CriticConfig(Section):
    """A model of the policy's own architecture that says one number a token: the reward it expects. It starts
    from the policy that the first iteration trains, with a head of zeros."""

    learning_rate: float = Field(default=1e-3, gt=0, le=1)
    """Constant; the rest of its optimizer is configured as the policy's."""
    value_clip: float = Field(default=0.0, ge=0)
    """How far a value may move from the one before the update without being held back; 0 = any distance."""


class TeacherConfig(Section):
    """A published version that says how likely it finds each sampled token; it shares the tokenizer."""

    campaign: str = ""
    """Lineage of the teacher in the same store, such as ``laptop.0001``."""
    version: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _version_has_a_campaign(self) -> Self:
        if self.version and not self.campaign:
            raise ValueError(
                f"campaign must be given with version, got version={self.version} and no campaign. Set it to "
                "the teacher's lineage, such as laptop.0001."
            )
        return self
