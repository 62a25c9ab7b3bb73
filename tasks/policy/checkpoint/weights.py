"""Write a policy and its optimizer as safetensors shards in the names that engines load; read them back.

Each rank of one copy of the model writes a shard with its own experts. What all of them hold is written by
the first; what is split over several is put together tensor by tensor and written by the ranks in turn, in
shards apart, so these generators are collective then: every rank of the copy must exhaust them. A pipeline
stage writes its own layers; nothing crosses stages. Digests name the content and not the shards, so they are
equal however many ranks wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tasks.artifacts.owned import Fetch, already_there
from tasks.policy.models.model import fill, read_pieces, stored_dtype, tensor_index
from tasks.policy.parallel.collectives import all_gather
from tasks.policy.parallel.experts import expert_shards
from tasks.policy.parallel.names import Piece, disk_pieces, is_one_experts, stored_tensors
from tasks.policy.parallel.place import Place, layout_of
from tasks.policy.parallel.shards import is_split, whole_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
STEP = "step"
CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One stored file; small enough to send to the rank that writes the index."""

    file_name: str
    num_bytes: dict[str, int]
    """Size of every tensor in it."""


def disk_tensors(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """What this rank writes, under Hugging Face names: views, or rounded to the type of a checkpoint."""
    for piece, tensor in _written(model, dict(stored_tensors(model))):
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(stored_dtype(model, piece.model_name, dtype))
        yield piece.disk_name, tensor.detach()


def optimizer_tensors(
    model: PreTrainedModel, optimizer: Optimizer, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """AdamW's moments, named ``exp_avg/<weight>`` and ``exp_avg_sq/<weight>``, and the step count.

    Where ``disk_tensors`` rounds to ``dtype``, the weights themselves follow as ``master/<weight>``: a step
    too small for the rounded weight would otherwise be lost each time a run resumes. Before the first step
    there are no moments, and only ``step`` is written, as 0.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    num_steps = _num_steps(model, optimizer)
    if _place(model).index == _place(model).stage == 0:
        yield STEP, torch.tensor(num_steps, dtype=torch.int64)
    if not num_steps:
        return
    kinds = {
        moment: {name: optimizer.state[param][moment] for name, param in params.items()} for moment in MOMENTS
    }
    if dtype is not None and any(param.dtype != dtype for param in params.values()):
        kinds[MASTER] = {name: param.detach() for name, param in params.items()}
    for kind, tensors in kinds.items():
        for piece, tensor in _written(model, tensors):
            yield f"{kind}/{piece.disk_name}", tensor


def load_optimizer(
    model: PreTrainedModel, optimizer: Optimizer, folder: Path, *, fetch: Fetch = already_there
) -> None:
    """Restore what ``optimizer_tensors`` wrote, on any number of ranks; masters replace loaded weights. Files
    come as they do for ``load_policy``."""
    step = torch.zeros((), dtype=torch.int64)
    targets: dict[str, Tensor] = {STEP: step}
    pieces = {STEP: Piece(disk_name=STEP, model_name=STEP)}
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    # what it holds beside the step count, each for every trained weight
    kinds = {name.split("/")[0] for name in tensor_index(folder, "optimizer", fetch) if name != STEP}
    for kind in sorted(kinds):
        for name, param in params.items():
            targets[f"{kind}/{name}"] = param.detach() if kind == MASTER else torch.zeros_like(param)
        for piece in disk_pieces(model):
            if piece.model_name in params:
                disk_name, model_name = f"{kind}/{piece.disk_name}", f"{kind}/{piece.model_name}"
                pieces[disk_name] = replace(piece, disk_name=disk_name, model_name=model_name)
    elsewhere = {f"{kind}/{name}" for kind in kinds for name in layout_of(model).elsewhere}
    for piece, tensor in read_pieces(folder, "optimizer", pieces, elsewhere.__contains__, fetch=fetch):
        fill(targets[piece.model_name], piece, tensor)
    optimizer.state.clear()
    if kinds:
        for name, param in params.items():
            moments = {moment: targets[f"{moment}/{name}"].detach() for moment in MOMENTS}
            device = param.device if optimizer.defaults.get("fused") else step.device  # where AdamW counts
            optimizer.state[param] = {"step": step.to(device, torch.float32), **moments}


def by_file(
    tensors: Mapping[str, Tensor], rank: int, num_ranks: int, *, stem: str
) -> dict[str, dict[str, Tensor]]:
    """What a rank writes, by file: its own experts apart from what several ranks have parts of, so that who
    reads a part of the experts need not fetch the others'. A copy on one rank is one file."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        is_shared = num_ranks > 1 and not is_one_experts(name)
        file_name = shard_name(rank, num_ranks, stem=f"{stem}-dense" if is_shared else stem)
        files.setdefault(file_name, {})[name] = tensor
    return files


def shard_name(rank: int, num_ranks: int, *, stem: str = "model") -> str:
    return f"{stem}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


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


def stating_dtype(config_json: bytes, dtype: str) -> bytes:
    """A model's config.json that states the type of the weights beside it, since readers believe it and not
    the files; the same bytes where it does already. One that states none means float32."""
    config = json.loads(config_json)
    names = "dtype", "torch_dtype"  # the second by transformers before 5
    inner = [value for value in config.values() if isinstance(value, dict) and any(n in value for n in names)]
    is_changed = False
    for section in (config, *inner):
        for name in [name for name in names if name in section] or names[:1]:
            if section.get(name, "float32") != dtype:
                section[name], is_changed = dtype, True
    return (json.dumps(config, indent=2) + "\n").encode() if is_changed else config_json


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


def _place(model: PreTrainedModel) -> Place:
    if (place := layout_of(model).place) is not None:
        return place
    shard = next(iter(expert_shards(model).values()))  # equal blocks, one a rank, in the order of the ranks
    return Place(index=shard.start // shard.count, size=shard.num_experts // shard.count)


def _written(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Piece, Tensor]]:
    """What this rank writes of model tensors, or of moments under their names; whole where split."""
    place, layout, num_split = _place(model), layout_of(model), 0
    for piece in disk_pieces(model):
        tensor = tensors.get(piece.model_name)
        if tensor is None or piece.model_name in layout.copies:
            continue
        split = layout.splits.get(piece.model_name)
        if piece.expert is not None:
            if piece.is_local and place.is_expert_writer:
                yield piece, piece.view(tensor)
            continue
        writer = 0
        if is_split(tensor) or split is not None or piece.shard is not None:
            writer, num_split = num_split % place.size, num_split + 1
        # collective, so on every rank and before asking who writes
        whole = whole_tensor(tensor, split) if piece.shard is None else _whole_stack(piece, tensor, place)
        if writer == place.index:
            yield piece, whole


def _whole_stack(piece: Piece, tensor: Tensor, place: Place) -> Tensor:
    """A layer's experts, of a family that stores them in one tensor."""
    tensor = whole_tensor(tensor)
    if place.ep_group is not None:
        tensor = all_gather(tensor.detach(), place.ep_group, 0)
    assert piece.shard is not None
    if len(tensor) < piece.shard.num_experts:
        raise ValueError(
            f"{piece.disk_name} must be put together from all ranks, because this family stores a layer's "
            f"experts in one tensor; got {len(tensor)} of {piece.shard.num_experts}. "
            "Split the model with tasks/policy/parallel/distribute.py, which knows the ranks."
        )
    return tensor


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
