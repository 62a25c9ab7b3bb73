"""How ranks are laid out: refusals list what would do, and the large campaigns fit the models they name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from ranks import run_ranks

from tasks.config import CampaignConfig
from tasks.grid import Grid
from tasks.policy.dispatch.dispatcher import make_dispatcher
from tasks.policy.models.norms import use_fused_norms
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import attach_dispatcher, expert_shards
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.step import logprobs

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 2, 3, 4, 8)
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_30b_a3b": (
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "intermediate_size": 6144, "vocab_size": 151_936, "tie_word_embeddings": False,
        },
    ),
    "deepseek_v3_moe": (
        "DeepseekV3ForCausalLM",
        {
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "intermediate_size": 18_432, "vocab_size": 129_280,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""The published sizes of what each campaign trains."""


def relation(error: ValueError) -> str:
    """What must hold, without the numbers."""
    return re.sub(r"\d+", "n", str(error).split(", got ")[0])


def test_a_refused_grid_names_sizes_that_the_refused_axis_may_have():
    """Every listed size, put in its place, is not refused for that axis again."""
    refused = 0
    for world_size, ep, fsdp, tp, cp, pp in itertools.product(
        (1, 2, 4, 6, 8), SIZES, SIZES, *[(1, 2, 3)] * 3
    ):
        sizes = {"world_size": world_size, "ep": ep, "fsdp": fsdp, "tp": tp, "cp": cp, "pp": pp}
        try:
            Grid(**sizes).checked()
        except ValueError as error:
            refused += 1
            found = re.search(r"Set (ep|fsdp|tp|cp|pp) to one of \[([\d, ]+)\]", str(error))
            if found is None:  # three axes at once
                assert "Set each to one of" in str(error)
                continue
            name, listed = found[1], [int(size) for size in found[2].split(",")]
            assert listed and sizes[name] not in listed, error
            for size in listed:
                try:
                    Grid(**{**sizes, name: size}).checked()
                except ValueError as again:  # of another relation, which lists its own
                    assert relation(again) != relation(error), (sizes, name, size, str(again))
    assert refused > 100


def check_large(rank: int, world_size: int, name: str) -> None:
    """One of the first ranks' part, by the real shapes, on the meta device and in a world of its size."""
    dist.destroy_process_group()
    config = CampaignConfig.model_validate(
        yaml.safe_load((ROOT / "configs/campaigns" / f"{name}.yaml").read_text())
    )
    train = config.train
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=train.world_size)
    family, shape = LARGE[name]
    model_config = transformers.AutoConfig.for_model(
        {"Qwen3MoeForCausalLM": "qwen3_moe", "DeepseekV3ForCausalLM": "deepseek_v3"}[family], **shape
    )
    with torch.device("meta"):
        model = getattr(transformers, family)._from_config(model_config)
    whole = sum(param.numel() for param in model.parameters())
    num_experts = max(shard.num_experts for shard in expert_shards(model).values())
    assert config.model.num_experts == num_experts
    grid = train.grid
    mesh = make_mesh(grid.world_size, grid.ep, grid.fsdp, tp=grid.tp, cp=grid.cp, pp=grid.pp)
    # who sends the tokens does not matter here
    dispatcher = make_dispatcher("all_to_all" if grid.ep > 1 else "local", mesh.ep_group)
    attach_dispatcher(model, dispatcher, kernel=train.expert_kernel)
    assert train.norm_kernel == train.logprob_kernel == "fused" and use_fused_norms(model)
    assert not [name for name in logprobs.ALTERED_LOGITS if getattr(model.config, name, None)]
    distribute(model, mesh, compute_dtype=getattr(torch, train.compute_dtype))
    mine = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
    # copies of dense parts and of stages' ends make it more than an even share, but never twice
    assert mine <= 2 * whole / grid.copy_size + 2 * shape["vocab_size"] * shape["hidden_size"]
    assert train.world_size == 128 and config.rollout.workers >= 32


@pytest.mark.parametrize("name", LARGE)
def test_a_large_campaigns_mesh_divides_its_model(name):
    run_ranks(check_large, 1, name)


@pytest.mark.parametrize("name", LARGE)
def test_an_expert_size_that_does_not_divide_is_refused_with_those_that_do(name):
    sections = yaml.safe_load((ROOT / "configs/campaigns" / f"{name}.yaml").read_text())
    sections["train"] |= {"ep": 48}
    with pytest.raises(ValueError, match=r"ep must divide .* got ep=48.*Set .*\[1, 2, 4, 8, 16"):
        CampaignConfig.model_validate(sections)
