"""Build a small random policy, or load a Hugging Face checkpoint with each rank's own experts only."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    DeepseekV3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tasks.artifacts.owned import Fetch, already_there, files_holding
from tasks.policy.dispatch.dispatcher import Dispatcher, LocalDispatcher
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.names import Piece, disk_pieces, stored_tensors
from tasks.policy.parallel.place import layout_of
from tasks.policy.parallel.shards import local_tensor

Head = Literal["tokens", "value"]
TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VALUE_ARCHITECTURE, VALUE_HEAD = "ForTokenClassification", "score."
"""How transformers names a model that says numbers for each token, and its head."""


def build_random(
    family: Literal["qwen3_moe", "deepseek_v3"],
    *,
    vocab_size: int,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_experts: int,
    experts_per_token: int,
    expert_width: int,
    seed: int,
    eos_token_id: int,
    pad_token_id: int,
) -> PreTrainedModel:
    """A float32 model with every expert and random weights; the same seed gives the same bits."""
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": expert_width * experts_per_token,
        "moe_intermediate_size": expert_width,
        "num_experts_per_tok": experts_per_token,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    if family == "qwen3_moe":
        common["head_dim"] = head_dim
        config = Qwen3MoeConfig(
            **common,
            num_experts=num_experts,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        )
    elif family == "deepseek_v3":
        config = _deepseek_config(common, head_dim=head_dim, num_experts=num_experts)
    else:
        raise ValueError(f"family must be one of ['qwen3_moe', 'deepseek_v3'], got {family!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _from_config(config, torch.float32)


def _deepseek_config(common: dict[str, Any], *, head_dim: int, num_experts: int) -> DeepseekV3Config:
    num_heads, num_kv_heads = common["num_attention_heads"], common["num_key_value_heads"]
    if num_kv_heads != num_heads:
        raise ValueError(
            "num_kv_heads must equal num_heads for deepseek_v3 (latent attention shares no heads), "
            f"got num_kv_heads={num_kv_heads}, num_heads={num_heads}. Set both to {num_heads}."
        )
    # Group-limited routing where a group is large enough for it: two groups, one of them chosen.
    has_groups = num_experts % 2 == 0 and num_experts // 2 >= max(2, common["num_experts_per_tok"])
    return DeepseekV3Config(
        **common,
        qk_nope_head_dim=head_dim // 2,
        qk_rope_head_dim=head_dim // 2,
        v_head_dim=head_dim,
        q_lora_rank=common["hidden_size"] // 2,
        kv_lora_rank=common["hidden_size"] // 2,
        n_routed_experts=num_experts,
        n_shared_experts=1,
        n_group=2 if has_groups else 1,
        topk_group=1,
        first_k_dense_replace=min(1, common["num_hidden_layers"] - 1),
        num_mtp_layers=0,
    )


def load_policy(
    folder: Path,
    *,
    dispatcher: Dispatcher,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expert_kernel: Literal["torch", "fused"] = "torch",
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
    head: Head = "tokens",
    fetch: Fetch = already_there,
) -> PreTrainedModel:
    """Read a safetensors folder tensor by tensor; what other ranks hold is never read nor allocated, and
    ``fetch`` is asked for no file without something of this rank's.

    Every floating-point tensor becomes ``dtype``, except those that transformers pins to float32 for their
    family (DeepSeek's routing bias, whose rounding would change which experts a token selects). ``prepare``
    sees the model on the meta device with its dispatcher: the moment to split its parameters. With ``head``
    "value" the model says one number a token; in the folder of a policy, which has no such head, it says 0.
    """
    config = AutoConfig.from_pretrained(folder)
    is_policy = not any(name.endswith(VALUE_ARCHITECTURE) for name in config.architectures or [])
    with torch.device("meta"):
        model = _from_config(config, dtype, head)
    attach_dispatcher(model, dispatcher, kernel=expert_kernel)
    prepare(model)
    _materialise(model, dtype=dtype, device=device)
    targets = dict(stored_tensors(model))
    with torch.no_grad():
        pieces = {piece.disk_name: piece for piece in disk_pieces(model)}
        if head == "value" and is_policy:
            for name in [name for name in pieces if name.startswith(VALUE_HEAD)]:
                local_tensor(targets[pieces.pop(name).model_name]).zero_()
        passed = _superfluous_names(model, head)
        for piece, tensor in read_pieces(folder, "model", pieces, passed, fetch=fetch):
            fill(targets[piece.model_name], piece, tensor)
    return model


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint that its model has, one after another as it is stored.

    Refuses what ``load_policy`` would refuse and allocates no model: memory for one tensor is enough.
    """
    with torch.device("meta"):
        model = _from_config(AutoConfig.from_pretrained(folder), torch.float32)
    attach_dispatcher(model, LocalDispatcher())
    places, pieces = dict(stored_tensors(model)), {piece.disk_name: piece for piece in disk_pieces(model)}
    for piece, tensor in read_pieces(folder, "model", pieces, _superfluous_names(model, "tokens")):
        place_for(places[piece.model_name], piece, tensor)
        yield piece.disk_name, tensor


def fill(target: Tensor, piece: Piece, tensor: Tensor) -> None:
    """Copy a tensor from disk to its place; never broadcast."""
    place_for(target, piece, tensor).copy_(tensor)


def place_for(target: Tensor, piece: Piece, tensor: Tensor) -> Tensor:
    """The part of a model tensor that one from disk fills."""
    place = piece.view(target)
    if place.shape != tensor.shape:
        raise ValueError(
            f"{piece.disk_name} must have the model's shape {tuple(place.shape)}, got {tuple(tensor.shape)}. "
            "Check that config.json belongs to these weights."
        )
    if place.is_floating_point() and tensor.dtype not in TRAINED_DTYPES:
        *most, last = (str(dtype).removeprefix("torch.") for dtype in TRAINED_DTYPES)
        raise ValueError(
            f"{piece.disk_name} must be {', '.join(most)} or {last}, got {tensor.dtype}: without its scales "
            "a quantised weight is another number. Convert the checkpoint to bfloat16 first."
        )
    return place


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got: {error}. Copy it again.") from error
    with file:
        yield file


def read_pieces(
    folder: Path,
    stem: str,
    pieces: dict[str, Piece],
    is_superfluous: Callable[[str], bool],
    *,
    fetch: Fetch = already_there,
) -> Iterator[tuple[Piece, Tensor]]:
    """Stream this rank's tensors of a checkpoint, of which ``fetch`` brings the files that hold any; a tensor
    too few or too many is an error naming it."""
    index = tensor_index(folder, stem, fetch)
    _require_exactly(folder, index.keys(), pieces, is_superfluous)
    files = files_holding({piece.disk_name for piece in pieces.values() if piece.is_local}, index)
    fetch(files)
    _require_existing(folder, stem, files)
    listed: dict[str, set[str]] = {file_name: set() for file_name in index.values()}
    for name, file_name in index.items():
        listed[file_name].add(name)
    for file_name in files:
        with _opened(folder / file_name) as file:
            names = list(file.keys())
            _require_listed(folder / file_name, names, listed[file_name], is_superfluous)
            for piece in (pieces[name] for name in names if name in pieces):
                if piece.is_local and (piece.rows or piece.columns) is not None:
                    yield piece, _read_block(file, piece)
                elif piece.is_local:
                    yield piece, file.get_tensor(piece.disk_name)


def _require_exactly(
    folder: Path, found: Set[str], pieces: Mapping[str, Piece], is_superfluous: Callable[[str], bool]
) -> None:
    missing = sorted(pieces.keys() - found)
    unexpected = sorted(name for name in found - pieces.keys() if not is_superfluous(name))
    if missing or unexpected:
        raise ValueError(
            f"{folder} must hold exactly the tensors of the model, got {len(missing)} missing {missing[:8]} "
            f"and {len(unexpected)} unexpected {unexpected[:8]}. Does config.json belong to them?"
        )


def _require_listed(
    path: Path, names: Sequence[str], listed: Set[str], is_superfluous: Callable[[str], bool]
) -> None:
    """The index was believed when the file was chosen."""
    others = listed ^ set(names)
    if wrong := sorted(name for name in others if name in listed or not is_superfluous(name)):
        raise ValueError(
            f"{path} must hold the tensors that its index lists, got {len(wrong)} that one of the two lacks "
            f"{wrong[:8]}. Does the index belong to it?"
        )


def _read_block(file: Any, piece: Piece) -> Tensor:
    handle = file.get_slice(piece.disk_name)
    shape, place = handle.get_shape(), [slice(None), slice(None)]
    for axis, (name, block) in enumerate((("rows", piece.rows), ("columns", piece.columns))):
        if block is None:
            continue
        if len(shape) <= axis or shape[axis] != block.total:  # a block of another tensor could fit by chance
            raise ValueError(
                f"{piece.disk_name} must have {block.total} {name}, got {shape}. "
                "Check that config.json belongs to these weights."
            )
        place[axis] = slice(block.start, block.start + block.count)
    return handle[tuple(place[: len(shape)])]


def tensor_index(folder: Path, stem: str, fetch: Fetch = already_there) -> dict[str, str]:
    """The file of each tensor: as the index says, or the single file of a checkpoint without one."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    fetch([single.name])
    if not single.exists():
        raise ValueError(
            f"{folder} must hold {index.name} or {single.name}, got neither. "
            "Point at a safetensors checkpoint."
        )
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single.name)


def tensor_files(folder: Path, stem: str) -> list[Path]:
    """All files of a checkpoint that is here as a whole."""
    files = sorted(set(tensor_index(folder, stem).values()))
    _require_existing(folder, stem, files)
    return [folder / name for name in files]


def _require_existing(folder: Path, stem: str, names: Sequence[str]) -> None:
    if absent := [name for name in names if not (folder / name).exists()]:
        raise ValueError(
            f"{folder}/{stem}.safetensors.index.json must list files that exist, got {absent} absent. "
            "Fetch the whole folder."
        )


def _superfluous_names(model: PreTrainedModel, head: Head) -> Callable[[str], bool]:
    """Second copies of tied weights, what the family itself passes over (DeepSeek's prediction layer), what
    other pipeline stages hold, and of a policy that becomes a critic its head."""
    passed = layout_of(model).elsewhere | set(model.all_tied_weights_keys)
    ignored = [*(model._keys_to_ignore_on_load_unexpected or []), *(["^lm_head"] if head == "value" else [])]
    patterns = [re.compile(pattern) for pattern in ignored]
    return lambda name: name in passed or any(pattern.search(name) for pattern in patterns)


def _from_config(config: PreTrainedConfig, dtype: torch.dtype, head: Head = "tokens") -> PreTrainedModel:
    # Balancing is the algorithm's business: no auxiliary loss may enter the model's own output.
    for field, off in (("output_router_logits", False), ("router_aux_loss_coef", 0.0)):
        if hasattr(config, field):
            setattr(config, field, off)
    # eval: a dropped unit would make the trained log-probability differ from the sampled token's
    if head == "tokens":
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = AutoModelForTokenClassification.from_config(config, dtype=dtype).eval()
    model.config.architectures = [type(model).__name__]
    return model


def stored_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of a floating-point tensor in a checkpoint of ``dtype``: float32 where the family pins it."""
    pinned = model._keep_in_fp32_modules_strict or []
    return torch.float32 if set(pinned).intersection(name.split(".")) else dtype


def _materialise(model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every tensor of a meta-device model its memory, and the derived buffers their values."""
    made: dict[Tensor, Tensor] = {}  # a tied parameter is one object in several modules and must stay one
    for module_name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, meta in tensors.items():
                if meta is None or not meta.is_meta:
                    continue
                if meta not in made:
                    made[meta] = _empty_like(
                        meta, stored_dtype(model, f"{module_name}.{leaf}", dtype), device
                    )
                tensors[leaf] = made[meta]  # type: ignore[assignment]
        if module._non_persistent_buffers_set:
            model._init_weights(module)  # transformers' own recipe for rotary frequencies and the like
    for name, buffer in model.named_non_persistent_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise ValueError(
                f"{name} must be recomputed by transformers when a model is loaded, got no value. "
                "This family needs its buffer added to tasks/policy/models/model.py."
            )


def _empty_like(meta: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if isinstance(meta, nn.Parameter):
        empty = torch.empty_like(meta, dtype=dtype, device=device)
        return nn.Parameter(empty, requires_grad=meta.requires_grad)
    if not meta.is_floating_point():
        return torch.zeros_like(meta, device=device)
    # Rotary frequencies are float32 in a model of any type. A buffer that nothing fills shows as nan.
    dtype = torch.promote_types(meta.dtype, dtype)
    return torch.full_like(meta, torch.nan, dtype=dtype, device=device)
