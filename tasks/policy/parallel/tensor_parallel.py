"""Tensor parallelism for dense parts: attention by heads, feed-forward parts by width, vocabulary by rows.

A *part* is a module with projections in and one projection out, such as attention or a shared expert. Its
input and its output are equal on all ranks of a tp group; inside, every rank computes on its own heads or
columns. So one collective goes each way, whatever the part is made of: gradients of the input are summed in
the backward pass, outputs in the forward pass. Whole parameters inside (norms of heads, the compression of
latent attention, the bias of the projection out) get addends of their gradients, summed once a step.

Transformers' plan for a family names the projections; where it leaves attention out (DeepSeek-V3, gpt_oss),
Megatron's rule is applied to the names that transformers' attention modules share. Experts stay on the ep
axis: before a dispatch each rank takes its part of the tokens, which the group holds all of.

The two collectives are in hooks of the part, outside its ``forward``: recomputation never repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.policy.parallel.collectives import sum_to_equal, to_own
from tasks.policy.parallel.experts import experts_modules
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.parallel.place import TensorSplit, layout_of, set_layout

ATTENTION = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), "colwise"),
    "o_proj": "rowwise",
}
"""Projections of attention by heads. What comes before ``q_b_proj`` and ``kv_b_proj`` has no heads."""
BY_HEAD = ("sinks",)
"""Parameters of an attention module itself with one number a head."""


def split_tensors(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Keep this rank's part of every dense parameter that can be split; after ``attach_dispatcher``.

    Works on the meta device. Embedding and head are split where the vocabulary allows it, else kept whole.
    """
    group = mesh.tp_group
    if group is None:
        return
    config: Any = model.config.get_text_config()
    mesh.check_model(
        f"the {config.model_type} model",
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        num_layers=config.num_hidden_layers,
    )
    split = _Splitter(mesh.tp_rank, mesh.tp, group)
    partial: set[str] = set()
    for name, part, styles in _parts(model):
        for leaf, style in styles.items():
            projection: Any = part.get_submodule(leaf)
            split.parameter(projection, "weight", dim=0 if style == "colwise" else 1)
            if projection.bias is not None and style == "colwise":
                split.parameter(projection, "bias", dim=0)
            elif projection.bias is not None:  # each rank adds its share, so that the sum has it once
                projection.forward = MethodType(_forward_with_share_of_bias(mesh.tp), projection)
        for leaf in BY_HEAD:
            if isinstance(getattr(part, leaf, None), nn.Parameter):
                split.parameter(part, leaf, dim=0)
        part.register_forward_pre_hook(_divide(group), with_kwargs=True)
        part.register_forward_hook(_unite(group))
        partial |= {f"{name}.{leaf}" for leaf, param in part.named_parameters() if param not in split.done}
    names = [name for name, _, _ in _parts(model)]
    for name, layer in model.named_modules():
        is_split = any(part == name or part.startswith(f"{name}.") for part in names)
        if isinstance(layer, GradientCheckpointingLayer) and not is_split:
            raise ValueError(
                f"tp must find a part to split in every layer, got {name} ({type(layer).__name__}) without. "
                "Set train.tp to 1."
            )
    for _, module in experts_modules(model):
        module.token_group = group
    _split_vocabulary(model, split, group)
    splits = {name: split.done[param] for name, param in model.named_parameters() if param in split.done}
    set_layout(model, replace(layout_of(model), splits=splits, partial=frozenset(partial)))


class _Splitter:
    """Replaces parameters by this rank's blocks; a tied one, met twice, by one block."""

    def __init__(self, index: int, size: int, group: dist.ProcessGroup):
        self.index, self.size, self.group = index, size, group
        self.done: dict[Tensor, TensorSplit] = {}
        self._blocks: dict[Tensor, nn.Parameter] = {}

    def parameter(self, module: nn.Module, leaf: str, *, dim: int) -> None:
        param = getattr(module, leaf)
        if param not in self._blocks:
            if param.shape[dim] % self.size:
                choices = [n for n in range(1, self.size) if param.shape[dim] % n == 0]
                raise ValueError(
                    f"train.tp must divide axis {dim} of {type(module).__name__}.{leaf}, got tp={self.size}, "
                    f"shape {tuple(param.shape)}. Set train.tp to one of {choices}."
                )
            local = param.detach().chunk(self.size, dim)[self.index].clone()
            self._blocks[param] = nn.Parameter(local, requires_grad=param.requires_grad)
        block = self._blocks[param]
        setattr(module, leaf, block)
        self.done[block] = TensorSplit(dim=dim, index=self.index, size=self.size, group=self.group)


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """Every part to split, with the style of each of its projections."""
    base: Any = model.base_model
    plan = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style
        for pattern, style in (base.config.base_model_tp_plan or {}).items()
    }
    prefix = f"{model.base_model_prefix}." if base is not model else ""
    for name, part in base.named_modules():
        linear = {leaf for leaf, child in part.named_children() if isinstance(child, nn.Linear)}
        styles = {
            leaf: style
            for leaf in linear
            for pattern, style in plan.items()
            if pattern.fullmatch(f"{name}.{leaf}") and style in ("colwise", "rowwise")
        }
        if not styles and "o_proj" in linear:
            styles = {leaf: style for leaf, style in ATTENTION.items() if leaf in linear}
        if styles:
            yield f"{prefix}{name}", part, _checked(f"{prefix}{name}", styles)


def _checked(name: str, styles: dict[str, str]) -> dict[str, str]:
    ways = sorted(styles.values())
    if ways.count("rowwise") != 1 or "colwise" not in ways:
        raise ValueError(
            f"tp must find projections in and one projection out of {name}, got {styles}. "
            "This family needs its attention added to tasks/policy/parallel/tensor_parallel.py; "
            "set train.tp to 1."
        )
    return styles


def _split_vocabulary(model: PreTrainedModel, split: _Splitter, group: dist.ProcessGroup) -> None:
    ends: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    for module, forward in zip(ends, (_embed, _read_out), strict=True):
        weight = getattr(module, "weight", None)  # none where another pipeline stage has it
        if weight is None or (weight not in split._blocks and weight.shape[0] % split.size):
            continue
        split.parameter(module, "weight", dim=0)
        module.vocabulary_group = group
        module.forward = MethodType(forward, module)


def _embed(self: Any, input_ids: Tensor) -> Tensor:
    """Rows of this rank's block of the vocabulary, zero for other tokens, summed over the ranks."""
    size = self.weight.shape[0]
    local = input_ids - self.vocabulary_group.rank() * size
    is_here = (local >= 0) & (local < size)
    pad = -1 if self.padding_idx is None else self.padding_idx - self.vocabulary_group.rank() * size
    pad_row = pad if 0 <= pad < size else None  # gets no gradient, as in the whole embedding
    rows = F.embedding(torch.where(is_here, local, 0), self.weight, padding_idx=pad_row)
    return sum_to_equal(torch.where(is_here[..., None], rows, 0), self.vocabulary_group)


def _read_out(self: Any, hidden_states: Tensor) -> Tensor:
    """Logits of this rank's block of the vocabulary; ``tasks/policy/parallel/vocabulary.py`` reads them."""
    return F.linear(to_own(hidden_states, self.vocabulary_group), self.weight)


def _divide(group: dist.ProcessGroup) -> Any:
    def hook(_part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (to_own(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": to_own(kwargs["hidden_states"], group)}

    return hook


def _unite(group: dist.ProcessGroup) -> Any:
    def hook(_part: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return sum_to_equal(output[0], group), *output[1:]
        return sum_to_equal(output, group)

    return hook


def _forward_with_share_of_bias(tp: int) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias / tp)

    return forward
