"""How large a policy is, counted on a model without memory that its own ``config.json`` describes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config import CampaignConfig

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "DeepSeek-V3-bf16": {"model_type": "deepseek_v3"},  # the family's defaults are DeepSeek-V3's
}
"""What matters of the ``config.json`` of the shipped campaigns' checkpoints, by folder: those are on the
cluster, and a plan is made anywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    dense: int
    """Parameters that every token meets."""
    experts: int
    """Parameters of routed experts, all layers."""
    are_experts_apart: bool
    """Whether a checkpoint has tensors of one expert each, or stacks of all."""
    active_share: float
    """Of the routed experts, those that a token meets."""
    layers: int
    """With routed experts."""
    experts_per_token: int
    hidden: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def active(self) -> float:
        return self.dense + self.experts * self.active_share


def described(config: CampaignConfig, folder: Path | None) -> Any:
    """The transformers configuration of the campaign's policy; ``folder`` replaces the campaign's."""
    from transformers import AutoConfig

    if folder is None and not config.model.folder:
        raise SystemExit(
            "the policy must have a config.json to be planned with, got model.random, which is built for one "
            "machine and needs no plan. Give --model the folder of the policy that you mean to train."
        )
    where = (folder or Path(config.model.folder)).absolute()
    if (where / "config.json").is_file():
        return AutoConfig.from_pretrained(where)
    if where.name in PUBLISHED:
        return AutoConfig.for_model(**PUBLISHED[where.name])
    raise SystemExit(
        f"the policy's config.json must be readable here, got none in {where}. Give --model a folder with it."
    )


def counted(description: Any) -> Shape:
    """The shape of what ``config.json`` describes."""
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.model_config import num_experts
    from tasks.policy.parallel.names import disk_pieces, is_one_experts

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(description)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    experts = {name: size for name, size in sizes.items() if ".experts." in name}
    values = description.to_dict()
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
    top_k = next((int(values[name]) for name in names if values.get(name)), 1)
    return Shape(
        dense=sum(sizes.values()) - sum(experts.values()),
        experts=sum(experts.values()),
        are_experts_apart=any(is_one_experts(piece.disk_name) for piece in disk_pieces(model)),
        active_share=top_k / max(num_experts(values), 1),
        layers=len({name.partition(".experts.")[0] for name in experts}),
        experts_per_token=top_k,
        hidden=int(values["hidden_size"]),
    )
