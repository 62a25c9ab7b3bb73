"""How much of a policy's context a prompt and its response may take, and who says so."""

import json

import pytest

from tasks.policy.models.tokenizer import context_length, require_room
from tasks.rollout_config import RolloutConfig
from tasks.sglang_config import SglangConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 163840),
        ({"max_position_embeddings": 40960, "rope_parameters": {"full_attention": YARN}}, 163840),
        (
            {
                "max_position_embeddings": 40960,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "yarn", "factor": 4.0},
                },
            },
            163840,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0} | {
            "original_max_position_embeddings": 8192}}, 131072),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"text_config": None, "max_position_embeddings": 4096}, 4096),
        ({}, 0),
    ],
)  # fmt: skip
def test_a_policys_context_is_read_wherever_its_config_says_it(tmp_path, config, positions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == positions


@pytest.mark.parametrize(
    ("served", "room", "words"),
    [
        (None, 64, r"fit into the policy's 64 positions, got prompt p of"),
        (0, 62, r"fit into the policy's 64 positions, of which SGLang leaves 2 unused"),
        (32, 30, r"fit into rollout.sglang.context_length=32 positions, of which SGLang leaves 2 unused"),
        (128, 62, r"fit into the policy's 64 positions, of which SGLang leaves 2 unused"),
    ],
)
def test_a_prompt_fits_exactly_or_the_smaller_bound_is_named(tmp_path, served, room, words):
    """SGLang 0.5.17 cuts a response that would fill the last two positions, without a word."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    rollout = RolloutConfig(max_new_tokens=8)
    if served is not None:
        sglang = SglangConfig(context_length=served)
        rollout = RolloutConfig(engine="sglang", max_new_tokens=8, sglang=sglang)
    require_room(tmp_path, [("p", room - 8), ("short", 1)], rollout)
    with pytest.raises(ValueError, match=words + r".* max_new_tokens.*--fresh"):
        require_room(tmp_path, [("short", 1), ("p", room - 7)], rollout)
