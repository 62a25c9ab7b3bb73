"""Split a model over a mesh: stages, then tensors, then fully sharded rows; and say which ranks do what.

``distribute`` is what ``load_policy`` calls on the meta device, after ``attach_dispatcher``: from then on a
rank allocates, reads, trains and writes its own part only, under the names of the whole model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.parallel.pipeline import cut_stage
from tasks.policy.parallel.place import Place, layout_of, set_layout
from tasks.policy.parallel.tensor_parallel import split_tensors


def distribute(
    model: PreTrainedModel, mesh: ParallelMesh, *, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Keep this rank's part of a model that holds everything but other ranks' experts."""
    cut_stage(model, mesh)
    split_tensors(model, mesh)
    place = Place(
        index=mesh.holder,
        size=mesh.holders,
        stage=mesh.stage,
        is_expert_writer=mesh.fsdp > 1 or mesh.holder < mesh.ep,
        ep_group=mesh.ep_group,
    )
    set_layout(model, replace(layout_of(model), place=place, compute_dtype=compute_dtype))
    if mesh.fsdp > 1 or compute_dtype != torch.float32:  # half-precision compute comes with fully_shard
        shard_parameters(model, mesh, compute_dtype=compute_dtype)
