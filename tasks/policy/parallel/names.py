"""Where each tensor of a Hugging Face checkpoint lives in the model: the per-expert names that engines load.

Transformers stacks a layer's experts into one parameter and joins gate and up projections; on disk they stay
apart (``model.layers.0.mlp.experts.3.gate_proj.weight``). Transformers' own conversion tables say which is
which, so every family it converts that way needs no table here. Expert numbers on disk are global.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightTransform,
)

from tasks.policy.parallel.experts import ExpertShard, expert_shards
from tasks.policy.parallel.place import layout_of
from tasks.policy.parallel.shards import Rows, disk_block, local_tensor

_ONE_EXPERTS = re.compile(r"\.experts\.\d+\.")


def is_one_experts(disk_name: str) -> bool:
    """Whether a tensor on disk is of one expert, and so of one rank of each copy; of a stack of all experts,
    as of any other tensor, several ranks may hold parts."""
    return _ONE_EXPERTS.search(disk_name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor on disk, and the part of one model tensor that it fills.

    Expert 3's ``up_proj`` when this rank holds experts 2 and 3:
        disk_name  model.layers.0.mlp.experts.3.up_proj.weight
        model_name model.layers.0.mlp.experts.gate_up_proj
        expert     3    shard ExpertShard(start=2, count=2, num_experts=4)    part 1 of 2
    """

    disk_name: str
    model_name: str
    shard: ExpertShard | None = None
    """None for a tensor that is no stack of experts."""
    expert: int | None = None
    """Global expert number, or None when the disk tensor holds all experts in one stack."""
    part: int = 0
    num_parts: int = 1
    rows: Rows | None = None
    """The rows of the disk tensor that this rank holds, where that need not be all of them."""
    columns: Rows | None = None
    """Likewise along the second axis."""

    @property
    def is_local(self) -> bool:
        """Whether this rank holds any of it."""
        if self.shard is None or self.expert is None:
            return self.rows is None or self.rows.count > 0
        return self.shard.start <= self.expert < self.shard.start + self.shard.count

    def view(self, tensor: Tensor) -> Tensor:
        """The part of this rank's model tensor (or of its gradient or moments) that the disk tensor fills."""
        tensor = local_tensor(tensor)
        if self.shard is None or self.expert is None:
            return tensor
        return tensor[self.expert - self.shard.start].chunk(self.num_parts, dim=0)[self.part]


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each tied one once under its first name, then persistent buffers."""
    yield from model.named_parameters()
    transient = {name for name, _ in model.named_non_persistent_buffers()}
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in transient)


def disk_pieces(model: PreTrainedModel) -> list[Piece]:
    """Every tensor on disk that belongs to this pipeline stage, those of its other ranks included."""
    # As transformers does when it saves a model built from a configuration: prefix changes lose information.
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    transforms = [t for t in transforms if not isinstance(t, PrefixChange)]
    reverse = [t.reverse_transform() for t in reversed(transforms)]
    shards, splits = expert_shards(model), layout_of(model).splits
    pieces = []
    for name, tensor in stored_tensors(model):
        rows, columns = disk_block(tensor, splits.get(name))
        if shard := shards.get(name):  # on disk a stack holds the experts of all ranks
            rows = Rows(start=shard.start, count=shard.count, total=shard.num_experts)
        pieces += _pieces_of(name, shard, rows, columns, reverse)
    return pieces


def _pieces_of(
    name: str,
    shard: ExpertShard | None,
    rows: Rows | None,
    columns: Rows | None,
    reverse: list[WeightTransform],
) -> list[Piece]:
    """Undo at most one conversion, then every renaming."""
    parts: list[str] = []  # disk patterns of gate and up, or of the one projection
    disk_name = name
    for converter in (t for t in reverse if isinstance(t, WeightConverter)):
        disk_name, matched = converter.rename_source_key(name)
        if matched is not None:
            _check_splits_by_expert(name, shard, converter)
            parts = list(converter.target_patterns)
            break
    for renaming in (t for t in reverse if not isinstance(t, WeightConverter)):
        disk_name, _ = renaming.rename_source_key(disk_name)
    if not parts:
        return [Piece(disk_name=disk_name, model_name=name, shard=shard, rows=rows, columns=columns)]
    assert shard is not None
    return [
        Piece(
            disk_name=disk_name.replace(parts[0], pattern).replace("*", str(expert), 1),
            model_name=name,
            shard=shard,
            expert=expert,
            part=part,
            num_parts=len(parts),
        )
        for expert in range(shard.num_experts)
        for part, pattern in enumerate(parts)
    ]


def _check_splits_by_expert(name: str, shard: ExpertShard | None, converter: WeightConverter) -> None:
    """The layout that ``Piece.view`` knows: stacked by expert along axis 0, parts joined along the next."""
    back = [op.reverse_op for op in reversed(converter.operations)]
    merge = back[0] if back else None
    join = back[1] if len(back) == 2 else None
    is_known = (
        shard is not None
        and isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and (len(back) == 1 or (isinstance(join, Concatenate) and join.dim == 1))
        and len(converter.target_patterns) == (2 if len(back) == 2 else 1)
        and all("experts.*." in pattern for pattern in converter.target_patterns)
    )
    if not is_known:
        raise ValueError(
            f"{name} must be stored by expert (merge along 0, join along 1), got {converter} with "
            f"operations {converter.operations}. "
            "This family needs its layout added to tasks/policy/parallel/names.py."
        )
