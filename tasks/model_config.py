"""Where the policy comes from: a checkpoint folder or random weights; no torch."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tasks.section import Section, divisors


def num_experts(shape: Mapping[str, Any]) -> int:
    """Routed experts a layer, by the name that the family gives them in a config.json; 0 = none."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(shape[name]) for name in names if shape.get(name)), 0)


class RandomPolicy(Section):
    """A randomly initialised mixture-of-experts policy, small enough for a CPU."""

    family: Literal["qwen3_moe", "deepseek_v3"] = "qwen3_moe"
    num_layers: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=64, ge=16)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=8)
    num_experts: int = Field(default=8, ge=2)
    experts_per_token: int = Field(default=2, ge=1)
    expert_width: int = Field(default=64, ge=8)

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}. Set num_kv_heads to one of {divisors(self.num_heads)}."
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts, got {self.experts_per_token} > "
                f"{self.num_experts}. Lower experts_per_token."
            )
        return self


class ModelConfig(Section):
    """Where version 0 comes from."""

    folder: str = ""
    """A Hugging Face checkpoint folder that becomes version 0; empty builds ``random``."""
    num_experts: int = Field(default=0, ge=0)
    """Routed experts a layer of the checkpoint in ``folder``: what a mesh is checked against at launch."""
    random: RandomPolicy = RandomPolicy()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in a checkpoint. The trainer keeps float32 ones and stores them with the optimizer."""

    @property
    def experts(self) -> tuple[str, int]:
        """The field that says how many experts a layer has, and what it says."""
        if self.folder:
            return "model.num_experts", self.num_experts
        return "model.random.num_experts", self.random.num_experts

    @model_validator(mode="after")
    def _folder_comes_with_its_experts(self) -> Self:
        if bool(self.folder) != bool(self.num_experts):
            raise ValueError(
                "num_experts must be given with model.folder and only with it, got "
                f"folder={self.folder!r}, num_experts={self.num_experts}. Set it to the number of routed "
                "experts in the folder's config.json, or set neither."
            )
        return self


class WarmStartConfig(Section):
    """Supervised steps on the environment's demonstrations before the first iteration."""

    steps: int = Field(default=0, ge=0)
    """0 = none."""
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
