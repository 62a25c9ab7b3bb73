"""What is asked and how answers are scored; no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.section import Section


class EnvironmentConfig(Section):
    name: Literal["reverse_digits", "sort_digits"] = "reverse_digits"
    num_digits: int = Field(default=4, ge=2, le=8)
    held_out: int = Field(default=256, ge=1)
    """Prompts that are kept out of training; every evaluation uses them."""

    @model_validator(mode="after")
    def _some_prompts_remain(self) -> Self:
        if self.held_out * 2 > 10**self.num_digits:
            raise ValueError(
                f"held_out must be at most half of the {10**self.num_digits} prompts of {self.num_digits} "
                f"digits, got {self.held_out}. Lower held_out or raise num_digits."
            )
        return self


class RewardConfig(Section):
    max_failure_share: float = Field(default=0.05, ge=0, lt=1)
    """A larger share of samples that could not be scored stops the run: a failure is no reward of 0."""
    control: Literal["none", "flipped", "shuffled"] = "none"
    """Control experiments: a flipped (1 - reward) or shuffled reward must not learn the task."""
