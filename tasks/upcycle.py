"""Make a dense Hugging Face checkpoint a mixture of experts that computes the same function (sparse
upcycling, arXiv 2212.05055; finer experts after arXiv 2410.07524).

    python -m tasks.upcycle ./dense ./sparse --experts 8 --top-k 2
    python -m tasks.adopt --config campaign.yaml --folder ./sparse --write adopted.yaml

Each feed-forward layer becomes ``experts / slices`` copies of itself, each copy cut along its width into
``slices`` experts. A router of small random rows is added, one row a copy: the slices of a copy begin with
the same row, so a token selects whole copies. Routing weights are normalised over the selected experts and
so sum to one; every slice therefore weighs 1 / ``slices`` of its copy, and its down projection is multiplied
by ``slices``. Logits equal the dense model's up to rounding, for any router (``tests/test_upcycle.py``); in
half precision the scale is exact where ``slices`` is a power of two, and with ``slices`` of 1 nothing is
scaled.

Training may part the rows that a copy's slices began with, and then a token can miss a slice;
``train.freeze_router`` rules that out. With whole copies (``slices`` of 1) nothing can be missed.

Families, each to the one that represents it exactly: Llama and Mistral to Mixtral, Qwen3 to Qwen3-MoE. The
source is read and the target written tensor by tensor; memory holds one output file of ``--shard-gb``. A
GGUF file is dequantised first, by transformers (``pip install gguf accelerate``).
"""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CARRIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*",
           "generation_config.json", "added_tokens.json")  # fmt: skip
"""Files that the sparse model takes over as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A family of sparse models: how it names what the dense one has."""

    model_type: str
    architecture: str
    block: str
    """In place of ``mlp``."""
    projections: dict[str, str]
    num_experts: str
    """Field of its config.json for their number, and ..."""
    expert_width: str
    extra: dict[str, Any]


MIXTRAL = Target(
    model_type="mixtral", architecture="MixtralForCausalLM", block="block_sparse_moe",
    projections={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    num_experts="num_local_experts", expert_width="intermediate_size",
    extra={"router_jitter_noise": 0.0},
)  # fmt: skip
QWEN3_MOE = Target(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", block="mlp",
    projections={name: name for name in ("gate_proj", "up_proj", "down_proj")},
    num_experts="num_experts", expert_width="moe_intermediate_size",
    extra={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)  # fmt: skip
TARGETS = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN3_MOE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many experts, how finely cut, and how the router begins."""

    experts: int
    top_k: int
    slices: int = 1
    router_std: float = 0.02
    seed: int = 0

    def check(self, width: int) -> None:
        if self.slices < 1 or width % self.slices:
            raise ValueError(
                f"--slices must divide the dense model's intermediate_size, got {self.slices} and {width}."
            )
        for option, value in (("--experts", self.experts), ("--top-k", self.top_k)):
            if value < 1 or value % self.slices:
                raise ValueError(
                    f"{option} must be a multiple of --slices, so that whole copies are selected, got "
                    f"{value} and {self.slices}."
                )
        if self.top_k > self.experts:
            raise ValueError(
                f"--top-k must be at most --experts, got {self.top_k} > {self.experts}. Lower it."
            )


def sparse_config(dense: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The config.json of the mixture; refuses what its family cannot represent."""
    target = TARGETS.get(str(dense.get("model_type")))
    if target is None:
        raise ValueError(
            f"the dense model must be one of {sorted(TARGETS)}, got {dense.get('model_type')!r}: no sparse "
            "family that transformers and SGLang serve represents another one exactly."
        )
    wrong = {name: dense[name] for name in ("attention_bias", "mlp_bias") if dense.get(name)}
    if target is MIXTRAL and dense.get("hidden_act", "silu") != "silu":
        wrong["hidden_act"] = dense["hidden_act"]
    if wrong:
        raise ValueError(f"the dense model must be without biases and use SiLU, got {wrong}.")
    width = int(dense["intermediate_size"])
    plan.check(width)
    dropped = ("mlp_bias", "pretraining_tp", "_name_or_path", "_model_name_or_path", "layer_types")
    kept = {name: value for name, value in dense.items() if name not in dropped}
    kept.setdefault("head_dim", int(dense["hidden_size"]) // int(dense["num_attention_heads"]))
    return kept | target.extra | {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        target.num_experts: plan.experts,
        target.expert_width: width // plan.slices,
        "num_experts_per_tok": plan.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }  # fmt: skip


def upcycle(source: Path, folder: Path, plan: Plan, *, shard_bytes: int) -> dict[str, Any]:
    """Write the mixture to ``folder``, which must not exist; its config. The index is written last."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoConfig

    if not (source / "config.json").is_file():
        raise ValueError(f"the source must be a Hugging Face folder or a GGUF file, got {source}.")
    # with its defaults written out: those of the sparse family are others
    dense = AutoConfig.from_pretrained(source).to_dict()
    config, target = sparse_config(dense, plan), TARGETS[dense["model_type"]]
    paths = _tensor_files(source)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if pending:
            name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(pending, folder / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(pending, name))
            pending.clear()
            size = 0

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                for new, tensor in expert_tensors(name, file.get_tensor(name), plan, target):
                    if size and size + tensor.nbytes > shard_bytes:
                        flush()
                    pending[new] = tensor
                    size, total = size + tensor.nbytes, total + tensor.nbytes
    for new, tensor in routers(config, plan, target, dtype=next(iter(pending.values())).dtype):
        pending[new] = tensor
        total += tensor.nbytes
    flush()
    for pattern in CARRIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return config


def expert_tensors(name: str, tensor: "Tensor", plan: Plan, target: Target) -> Iterator[tuple[str, "Tensor"]]:
    """A dense tensor as the mixture has it: itself, or a projection's slices, once a copy."""
    before, found, rest = name.partition(".mlp.")
    projection = rest.removesuffix(".weight")
    if not found:
        yield name, tensor
        return
    if projection not in target.projections:
        raise ValueError(f"a feed-forward layer must have three projections, got {name} beside them.")
    if projection == "down_proj":  # its columns are the width; the others' rows
        slices = [part * plan.slices for part in tensor.chunk(plan.slices, dim=1)]
    else:
        slices = list(tensor.chunk(plan.slices, dim=0))
    for expert in range(plan.experts):
        label = f"{before}.{target.block}.experts.{expert}.{target.projections[projection]}.weight"
        yield label, slices[expert % plan.slices].clone()  # safetensors stores no tensor twice


def routers(
    config: dict[str, Any], plan: Plan, target: Target, *, dtype: Any
) -> Iterator[tuple[str, "Tensor"]]:
    """Every layer's router: random rows, each once a slice of its copy."""
    import torch

    generator = torch.Generator().manual_seed(plan.seed)
    copies, hidden = plan.experts // plan.slices, int(config["hidden_size"])
    for layer in range(int(config["num_hidden_layers"])):
        rows = plan.router_std * torch.randn(copies, hidden, generator=generator)
        name = f"model.layers.{layer}.{target.block}.gate.weight"
        yield name, rows.repeat_interleave(plan.slices, dim=0).to(dtype)


def _tensor_files(source: Path) -> list[Path]:
    from tasks.policy.models.model import tensor_files

    return tensor_files(source, "model")


def dequantise(file: Path, folder: Path) -> Path:
    """A GGUF file as a bfloat16 checkpoint, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
    delattr(model.config, "quantization_config")  # its weights are plain now; a new model knows that
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a dense checkpoint a mixture of experts.")
    parser.add_argument("source", type=Path, help="Hugging Face folder with safetensors, or a GGUF file")
    parser.add_argument("folder", type=Path, help="to make; must not exist")
    parser.add_argument("--experts", type=int, required=True, help="routed experts a layer")
    parser.add_argument("--top-k", type=int, required=True, help="experts a token")
    parser.add_argument("--slices", type=int, default=1, help="experts that one copy is cut into")
    parser.add_argument("--router-std", type=float, default=0.02, help="of the routers' first weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest output file")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        raise SystemExit(
            f"the folder to make must not exist, got {options.folder}. Remove it or name another."
        )
    plan = Plan(
        experts=options.experts, top_k=options.top_k, slices=options.slices,
        router_std=options.router_std, seed=options.seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        source = options.source
        try:
            if source.suffix == ".gguf":
                source = dequantise(source, Path(scratch) / "dense")
            config = upcycle(source, options.folder, plan, shard_bytes=math.ceil(options.shard_gb * 1e9))
        except (ValueError, FileNotFoundError) as error:
            raise SystemExit(str(error)) from None
    size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors")) / 1e9
    print(
        f"{options.folder}: {config['architectures'][0]}, {plan.experts} experts, {plan.top_k} a token, "
        f"{size:.2f} GB\nGo on: set folder: {options.folder} and num_experts: {plan.experts} under model."
    )


if __name__ == "__main__":
    main()
