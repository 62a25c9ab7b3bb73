"""Dense checkpoints made mixtures of experts: the same function, in a form that others load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tasks.engine.sglang_model import served_folder
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import load_policy
from tasks.upcycle import Plan, main, sparse_config, upcycle

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
DENSE = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, tie_word_embeddings=False, sliding_window=5),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False, rms_norm_eps=1e-5),
}
PLANS = {
    "copies": Plan(experts=4, top_k=2),
    "one copy a token": Plan(experts=3, top_k=1),
    "slices": Plan(experts=8, top_k=4, slices=4),
    "slices of two copies": Plan(experts=6, top_k=4, slices=2, router_std=0.5),
}
IDS = torch.randint(2, 61, (3, 11), generator=torch.Generator().manual_seed(1))


def dense_model(family: str) -> PreTrainedModel:
    """Loud weights: at the usual 0.02 a wrong expert hardly shows."""
    model = AutoModelForCausalLM.from_config(DENSE[family], dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module", params=DENSE)
def dense(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    folder, model = tmp_path_factory.mktemp("dense") / "model", dense_model(request.param)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder, logits(model)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_mixture_has_the_logits_of_the_dense_model(dense, plan, tmp_path):
    folder, wanted = dense
    upcycle(folder, tmp_path / "moe", plan, shard_bytes=1 << 30)
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval())
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max(), "relative: logits are about 30 here"
    ours = load_policy(tmp_path / "moe", dispatcher=LocalDispatcher())
    assert (logits(ours) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_what_the_dense_config_leaves_out_means_what_it_means_there(tmp_path):
    """Llama's defaults are not Mixtral's: rotary base 1e4 not 1e6, epsilon 1e-6 not 1e-5."""
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense/config.json"
    kept = {"architectures", "model_type", *shape}
    said = {name: value for name, value in json.loads(file.read_text()).items() if name in kept}
    file.write_text(json.dumps(said))
    upcycle(tmp_path / "dense", tmp_path / "moe", PLANS["copies"], shard_bytes=1 << 30)
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval())
    torch.testing.assert_close(got, logits(model), atol=1e-5, rtol=0)


def test_tokens_are_spread_over_the_copies_and_take_whole_ones(tmp_path):
    """Else the mixture would be the dense model with idle weights."""
    dense_model("llama").save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", PLANS["slices"], shard_bytes=1 << 30)
    model, chosen = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval(), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: chosen.append(output[2]))
    logits(model)
    for expert_TK in chosen:
        copies = expert_TK // 4
        assert (copies == copies[:, :1]).all() and set(copies.flatten().tolist()) == {0, 1}
        assert all(len(set(row)) == 4 for row in expert_TK.tolist())


def test_experts_are_apart_once_one_of_them_is_trained(dense, tmp_path):
    """Two copies get other tokens, so their gradients differ: the symmetry does not hold them together."""
    upcycle(dense[0], tmp_path / "moe", PLANS["copies"], shard_bytes=1 << 30)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    model(IDS, labels=IDS).loss.backward()
    (gradient,) = [
        p.grad for n, p in model.named_parameters() if n.endswith("layers.0.mlp.experts.down_proj")
    ]
    assert gradient is not None
    assert (gradient[0] - gradient[1]).abs().max() > 1e-3 * gradient.abs().max()


def test_files_are_bounded_the_index_covers_them_and_no_tensor_is_twice(dense, tmp_path):
    upcycle(dense[0], tmp_path / "one", PLANS["slices"], shard_bytes=1 << 30)
    upcycle(dense[0], tmp_path / "many", PLANS["slices"], shard_bytes=8000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 5 and max(file.stat().st_size for file in files) < 8000 + 4000
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())["weight_map"]
    names = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            names += [(name, path.name) for name in file.keys()]  # noqa: SIM118
    assert sorted(names) == sorted(index.items()) and len(names) == len(index)
    pair = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many")]
    assert torch.equal(*(logits(model) for model in pair))


def test_sglang_is_given_the_names_and_the_head_it_loads(tmp_path):
    dense_model("llama").save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", PLANS["copies"], shard_bytes=1 << 30)
    served = served_folder(tmp_path / "moe", tmp_path)
    index = json.loads((served / "model.safetensors.index.json").read_text())["weight_map"]
    assert {"lm_head.weight", "model.layers.1.block_sparse_moe.experts.3.w2.weight"} <= index.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts", "8", "--top-k", "4", "--slices", "5"], r"divide .*intermediate_size, got 5 and 48"),
        (["--experts", "6", "--top-k", "4", "--slices", "4"], r"--experts must be a multiple .* got 6 and 4"),
        (["--experts", "8", "--top-k", "2", "--slices", "4"], r"--top-k must be a multiple .* got 2 and 4"),
        (["--experts", "2", "--top-k", "4"], r"at most --experts, got 4 > 2"),
    ],
)
def test_what_would_not_keep_the_function_is_refused_before_anything_is_written(
    dense, options, message, tmp_path
):
    with pytest.raises(SystemExit, match=message):
        main([str(dense[0]), str(tmp_path / "moe"), *options])
    assert not (tmp_path / "moe").exists()


def test_a_family_without_an_exact_mixture_is_refused(tmp_path):
    biased = LlamaConfig(**SHAPE, mlp_bias=True).to_dict() | {"model_type": "llama"}
    with pytest.raises(ValueError, match=r"without biases and use SiLU, got \{'mlp_bias': True\}"):
        sparse_config(biased, PLANS["copies"])
    with pytest.raises(ValueError, match=r"one of \['llama', 'mistral', 'qwen3'\], got 'qwen2'"):
        sparse_config(Qwen2Config(**SHAPE).to_dict() | {"model_type": "qwen2"}, PLANS["copies"])


def test_the_command_takes_over_the_tokenizer_and_never_writes_twice(dense, tmp_path, capsys):
    (dense[0] / "tokenizer_config.json").write_text("{}")
    arguments = [str(dense[0]), str(tmp_path / "moe"), "--experts", "4", "--top-k", "2"]
    main(arguments)
    assert "4 experts, 2 a token" in capsys.readouterr().out
    assert (tmp_path / "moe/tokenizer_config.json").read_text() == "{}"
    assert (tmp_path / "moe/generation_config.json").exists()
    with pytest.raises(SystemExit, match="must not exist"):
        main(arguments)
