"""Write a policy and its optimizer as safetensors shards in the names that engines load; read them back.

Each expert-parallel rank writes one shard with its own experts; rank 0 adds what all ranks share. Digests
name the content and not the shards, so they are equal however many ranks wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tasks.policy.experts import expert_shards
from tasks.policy.model import fill, read_pieces, tensor_files
from tasks.policy.names import Piece, disk_pieces, stored_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One written file; small enough to send to the rank that writes the index."""

    file_name: str
    num_bytes: dict[str, int]
    """Size of every tensor in it."""


def disk_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors under their Hugging Face names, as views; shared ones come from rank 0 only."""
    tensors = dict(stored_tensors(model))
    for piece in _written_pieces(model):
        yield piece.disk_name, piece.view(tensors[piece.model_name]).detach()


def optimizer_tensors(model: PreTrainedModel, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """AdamW's moments, named ``exp_avg/<weight>`` and ``exp_avg_sq/<weight>``, and the step count.

    Before the first step there are no moments, and only ``step`` is written, as 0.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    num_steps = _num_steps(model, optimizer)
    if _writes_shared(model):
        yield STEP, torch.tensor(num_steps, dtype=torch.int64)
    for piece in _written_pieces(model):
        if num_steps and piece.model_name in params:
            for moment in MOMENTS:
                moments = optimizer.state[params[piece.model_name]][moment]
                yield f"{moment}/{piece.disk_name}", piece.view(moments)


def load_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    """Restore what ``optimizer_tensors`` wrote, on any number of ranks."""
    step = torch.zeros((), dtype=torch.int64)
    targets: dict[str, Tensor] = {STEP: step}
    pieces = {STEP: Piece(disk_name=STEP, model_name=STEP)}
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if _has_moments(folder):
        for moment in MOMENTS:
            targets |= {f"{moment}/{name}": torch.zeros_like(param) for name, param in params.items()}
            for piece in disk_pieces(model):
                if piece.model_name in params:
                    disk_name, model_name = f"{moment}/{piece.disk_name}", f"{moment}/{piece.model_name}"
                    pieces[disk_name] = replace(piece, disk_name=disk_name, model_name=model_name)
    for piece, tensor in read_pieces(folder, "optimizer", pieces, lambda _: False):
        fill(targets[piece.model_name], piece, tensor)
    optimizer.state.clear()
    if len(targets) > 1:
        for name, param in params.items():
            moments = {moment: targets[f"{moment}/{name}"] for moment in MOMENTS}
            optimizer.state[param] = {"step": step.to(torch.float32), **moments}


def write_shard(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int, *, stem: str = "model"
) -> Shard:
    """Write this rank's tensors to ``<stem>-0000i-of-0000n.safetensors``; the name appears when whole."""
    named = {name: tensor.contiguous() for name, tensor in tensors}
    file_name = f"{stem}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
    partial = folder / f".{file_name}.partial"
    save_file(
        {name: tensor.contiguous() for name, tensor in named.items()}, partial, metadata={"format": "pt"}
    )
    os.replace(partial, folder / file_name)
    return Shard(file_name=file_name, num_bytes={name: t.nbytes for name, t in named.items()})


def write_index(folder: Path, shards: Iterable[Shard], *, stem: str = "model") -> str:
    """Write ``<stem>.safetensors.index.json`` over all ranks' shards, last: readers start from it."""
    weight_map: dict[str, str] = {}
    total_size = 0
    for shard in shards:
        if twice := sorted(weight_map.keys() & shard.num_bytes.keys()):
            raise ValueError(
                f"every tensor must be in one shard, got {len(twice)} again in {shard.file_name}: "
                f"{twice[:8]}. Write from one replica of each expert-parallel rank only."
            )
        weight_map |= dict.fromkeys(shard.num_bytes, shard.file_name)
        total_size += sum(shard.num_bytes.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    file_name = f"{stem}.safetensors.index.json"
    partial = folder / f".{file_name}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, folder / file_name)
    return file_name


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """SHA-256 of each tensor's type, shape and bytes."""
    digests = {}
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        digests[name] = digest.hexdigest()
    return digests


def merge_digests(digests_by_rank: Iterable[dict[str, str]]) -> str:
    """One SHA-256 over all ranks' tensors by sorted name, so that it does not depend on the sharding."""
    merged: dict[str, str] = {}
    for digests in digests_by_rank:
        if twice := sorted(merged.keys() & digests.keys()):
            raise ValueError(
                f"every tensor must come from one rank, got {len(twice)} from two: {twice[:8]}. "
                "Merge the digests of one replica of each expert-parallel rank only."
            )
        merged |= digests
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(merged.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def tensor_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of tensors that are all here, as ``merge_digests`` would give it over any number of ranks."""
    return merge_digests([digest_tensors(tensors)])


def _written_pieces(model: PreTrainedModel) -> Iterator[Piece]:
    writes_shared = _writes_shared(model)
    for piece in disk_pieces(model):
        if piece.shard is None:
            if writes_shared:
                yield piece
        elif piece.expert is not None:
            if piece.is_local:
                yield piece
        elif piece.shard.count < piece.shard.num_experts:
            raise ValueError(
                f"{piece.disk_name} must be written from one rank, because this family stores a layer's "
                f"experts in one tensor; got {piece.shard.count} of {piece.shard.num_experts}. Set ep to 1."
            )
        else:
            yield piece


def _writes_shared(model: PreTrainedModel) -> bool:
    return all(shard.start == 0 for shard in expert_shards(model).values())


def _num_steps(model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Steps taken, the same for every trained parameter."""
    params = [param for param in model.parameters() if param.requires_grad]
    steps = {int(optimizer.state[param]["step"]) if optimizer.state.get(param) else 0 for param in params}
    if len(steps) != 1:
        raise ValueError(
            f"every parameter must have taken the same number of steps, got {sorted(steps)}. "
            "Reduce gradients before each step: it gives every parameter a gradient."
        )
    return steps.pop()


def _has_moments(folder: Path) -> bool:
    for path in tensor_files(folder, "optimizer"):
        with safe_open(path, framework="pt") as file:
            if any(name != STEP for name in file.keys()):  # noqa: SIM118 - a handle is no mapping
                return True
    return False
