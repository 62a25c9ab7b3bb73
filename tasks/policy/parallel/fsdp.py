"""Fully sharded data parallelism: a rank keeps its rows of the parameters and fetches others layer by layer.

Dense parameters, or their tp parts, are split over ``fsdp * cp`` ranks and experts, already disjoint over
``ep``, over ``efsdp``; copies of all that are kept ``dp_replicate`` times. Gradients are summed, never
averaged: losses are divided by the global token count beforehand. Master weights, gradients and their sums
are float32 whatever the type that is computed in.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # as torchtitan does: a mesh takes none
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.policy.parallel.experts import experts_modules
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.section import divisors


def shard_parameters(model: PreTrainedModel, mesh: ParallelMesh, *, compute_dtype: torch.dtype) -> None:
    """Split every parameter and compute in ``compute_dtype``; call after ``attach_dispatcher``.

    Works on the meta device, so that a rank never allocates more than its rows. Makes process groups: every
    rank must call it, also for a mesh of one rank.
    """
    if not dist.is_initialized():
        raise ValueError(
            "parameters must be sharded after init_process_group, got none. Call it first, also for one rank."
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    dense = _device_mesh(mesh, device, fsdp=mesh.dense_shards, tp=mesh.tp)
    experts = _device_mesh(mesh, device, efsdp=mesh.efsdp, ep=mesh.ep)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # routing weights may be float32 beside half-precision rows; casting them would change what is computed
    as_they_come = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for name, module in list(experts_modules(model)):
        num_experts = module.expert_shard.num_experts
        if num_experts % mesh.expert_shards:
            raise ValueError(
                f"efsdp * ep must divide the {num_experts} experts of {name}, got {mesh.efsdp} * {mesh.ep}. "
                f"Set fsdp * cp * tp to one of {divisors(num_experts)}."
            )
        fully_shard(module, mesh=experts, mp_policy=as_they_come)
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):  # transformers' base class of repeated layers
            fully_shard(module, mesh=dense, mp_policy=precision)
    fully_shard(model, mesh=dense, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # without it a factor of 1 is still a scaled sum


def reshard_parameters(model: nn.Module) -> None:
    """Let go of whole parameters that a forward pass without a backward one leaves in their shards' place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_fully_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def _device_mesh(mesh: ParallelMesh, device: str, **inner: int) -> DeviceMesh:
    """Of the first of two ``inner`` axes, and of the copies of all it holds if there are any."""
    axes = ("pp", "dp_replicate", *inner)
    ranks = torch.arange(mesh.world_size).view(mesh.pp, -1, *inner.values())
    whole = DeviceMesh(device, ranks, mesh_dim_names=axes)
    if mesh.timeout is not None:
        for axis in axes:
            _set_pg_timeout(mesh.timeout, whole.get_group(axis))
    return whole[axes[1:3]] if ranks.shape[1] > 1 else whole[axes[2]]
