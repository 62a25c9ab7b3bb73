"""Tiny random policies of several families, with experts loud enough that a wrong one shows in the logits."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, MixtralConfig, PreTrainedModel

from tasks.policy.models.model import build_random
from tasks.policy.parallel.experts import experts_modules

FAMILIES = ["qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe", "gpt_oss"]
VOCAB = 37
NUM_EXPERTS = 8

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_policy(family: str, seed: int = 0, vocab_size: int = VOCAB) -> PreTrainedModel:
    """All experts, float32. Weights have standard deviation 0.2, not 0.02: at 0.02 experts do not show."""
    if family in ("qwen3_moe", "deepseek_v3"):
        model = build_random(
            family,  # type: ignore[arg-type]
            vocab_size=vocab_size,
            num_layers=2,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=2 if family == "qwen3_moe" else 4,
            head_dim=8,
            num_experts=NUM_EXPERTS,
            experts_per_token=2,
            expert_width=16,
            seed=seed,
            eos_token_id=1,
            pad_token_id=0,
        )
    else:
        config = _config(family)
        config.vocab_size = vocab_size
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name and "norm" not in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    assert any(experts_modules(model))
    return model


def _config(family: str) -> MixtralConfig | Glm4MoeConfig | GptOssConfig:
    if family == "mixtral":
        return MixtralConfig(**_COMMON, intermediate_size=16, num_local_experts=NUM_EXPERTS)
    if family == "glm4_moe":
        return Glm4MoeConfig(
            **_COMMON,
            intermediate_size=32,
            moe_intermediate_size=16,
            n_routed_experts=NUM_EXPERTS,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        )
    return GptOssConfig(**_COMMON, intermediate_size=16, num_local_experts=NUM_EXPERTS, sliding_window=4)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def token_ids(rank: int, num_sequences: int = 3, length: int = 7) -> torch.Tensor:
    """[B, L], another batch for every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(2, VOCAB, (num_sequences, length), generator=generator)
