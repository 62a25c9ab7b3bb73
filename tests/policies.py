"""Tiny policies on disk for tests, built once a session folder."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from tasks.policy.checkpoint.serialized import TensorFile
from tasks.policy.checkpoint.weights import Shard, shard_name
from tasks.policy.models.model import build_random
from tasks.policy.models.tokenizer import character_tokenizer

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_width": 32,
}


def save_tiny_policy(
    folder: Path, *, family: str = "qwen3_moe", seed: int = 0, sharpness: float = 1.0, head_dim: int = 16
) -> Path:
    """A random policy with the character tokenizer, as a Hugging Face folder.

    ``sharpness`` multiplies the embedding and so the logits of a policy whose head is tied to it: its most
    likely token then stands clear of what half precision rounds.
    """
    tokenizer = character_tokenizer()
    shape = (
        SHAPE
        | {"head_dim": head_dim}
        | ({"num_kv_heads": SHAPE["num_heads"]} if family == "deepseek_v3" else {})
    )
    model = build_random(
        family,
        vocab_size=len(tokenizer),
        seed=seed,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    model.get_input_embeddings().weight.data.mul_(sharpness)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_shard(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int, *, stem: str = "model"
) -> Shard:
    """A rank's tensors in a file of their own, as a version has them."""
    named = dict(tensors)
    content = TensorFile(named, require_unchanged=lambda: None)
    name = shard_name(rank, num_ranks, stem=stem)
    with (folder / name).open("wb") as file:
        while (at := file.tell()) < content.size:
            file.write(content.read(at, content.size))
    return Shard(file_name=name, num_bytes={name: tensor.nbytes for name, tensor in named.items()})
