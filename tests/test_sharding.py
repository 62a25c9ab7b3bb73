"""Split parameters: a version written on one mesh is read on any other; half precision keeps masters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import saved, tiny_policy, token_ids
from policies import write_shard
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

import tasks.policy.models.model
from tasks.grid import Grid
from tasks.policy.checkpoint.weights import (
    disk_tensors,
    load_optimizer,
    optimizer_tensors,
    tensor_digest,
    write_index,
)
from tasks.policy.dispatch.dispatcher import make_dispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.parallel.shards import local_tensor
from tasks.policy.step.trainer import Learner, make_optimizer, train_minibatch

BF16, FP32 = torch.bfloat16, torch.float32


def mesh_policy(
    folder: Path, world_size: int, ep: int, fsdp: int, *, compute_dtype: torch.dtype = FP32
) -> tuple[ParallelMesh, PreTrainedModel]:
    mesh = make_mesh(world_size, ep, fsdp)
    dispatcher = make_dispatcher("all_to_all" if ep > 1 else "local", mesh.ep_group)
    if fsdp == 1 and compute_dtype == FP32:
        return mesh, load_policy(folder, dispatcher=dispatcher)
    prepare = partial(shard_parameters, mesh=mesh, compute_dtype=compute_dtype)
    return mesh, load_policy(folder, dispatcher=dispatcher, prepare=prepare)


def optimizer_of(model: PreTrainedModel, *, lr: float = 1e-3) -> AdamW:
    return make_optimizer(model, lr=lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01)


def step(
    model: PreTrainedModel,
    optimizer: AdamW,
    mesh: ParallelMesh,
    seed: int,
    max_grad_norm: float = math.inf,  # a clip's factor would hide what the gradients were summed in
) -> dict[str, float]:
    ids = token_ids(seed + mesh.rank)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(logprob_BL: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprob_BL.sum() / 100, {}

    return train_minibatch(
        Learner(model, optimizer, mesh), [batch], loss, num_global_tokens=100, max_grad_norm=max_grad_norm
    )


def write(
    folder: Path,
    model: PreTrainedModel,
    optimizer: AdamW,
    mesh: ParallelMesh,
    dtype: torch.dtype | None = None,
) -> None:
    """What a trainer does: one copy of the model writes, one shard a rank, then the index."""
    if mesh.rank == 0:
        folder.mkdir(exist_ok=True)
        model.config.save_pretrained(folder)
    if mesh.world is not None:
        dist.barrier()
    for stem, tensors in (
        ("model", disk_tensors(model, dtype)), ("optimizer", optimizer_tensors(model, optimizer, dtype)),
    ):  # fmt: skip
        shards: list[Any] = [None] * mesh.world_size
        mine = None
        if mesh.replicate_rank == 0:
            mine = write_shard(folder, tensors, mesh.copy_rank, mesh.copy_size, stem=stem)
        if mesh.world is not None:
            dist.all_gather_object(shards, mine)
        else:
            shards = [mine]
        if mesh.rank == 0:
            write_index(folder, [shard for shard in shards if shard is not None], stem=stem)


def read_all(folder: Path, stem: str) -> dict[str, Tensor]:
    return {k: v for path in folder.glob(f"{stem}*.safetensors") for k, v in load_file(path).items()}


def assert_same_bytes(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def check_two_expert_ranks(rank: int, world_size: int, folder: Path) -> None:
    mesh, model = mesh_policy(folder / "start", world_size, ep=2, fsdp=1)
    optimizer = optimizer_of(model)
    step(model, optimizer, mesh, seed=0)
    write(folder / "ep2", model, optimizer, mesh)


def check_carry(rank: int, world_size: int, folder: Path, ep: int, fsdp: int) -> None:
    mesh, model = mesh_policy(folder / "ep2", world_size, ep, fsdp)
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, folder / "ep2")
    write(folder / "split", model, optimizer, mesh)


@pytest.mark.parametrize(
    ("world_size", "ep", "fsdp"), [(4, 2, 4), (4, 2, 2), (4, 1, 2)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_version_goes_from_two_expert_ranks_over_a_split_mesh_to_one_rank(
    family, world_size, ep, fsdp, tmp_path
):
    saved(tiny_policy(family), tmp_path / "start")
    run_ranks(check_two_expert_ranks, 2, tmp_path)
    run_ranks(check_carry, world_size, tmp_path, ep, fsdp)
    for path in (tmp_path / "split").glob("*.safetensors"):  # no rank writes all dense tensors
        assert any(".experts." not in name and name != "step" for name in load_file(path)), path
    _, model = mesh_policy(tmp_path / "split", 1, 1, 1)
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, tmp_path / "split")
    assert_same_bytes(dict(disk_tensors(model)), read_all(tmp_path / "ep2", "model"))
    assert_same_bytes(dict(optimizer_tensors(model, optimizer)), read_all(tmp_path / "ep2", "optimizer"))
    assert not torch.equal(
        read_all(tmp_path / "start", "model")["model.norm.weight"], model.get_parameter("model.norm.weight")
    )


def check_reads(rank: int, world_size: int, folder: Path, num_stored: int) -> None:
    read: list[int] = []
    fill: Callable[..., None] = tasks.policy.models.model.fill

    def counting(target: Tensor, piece: Any, tensor: Tensor) -> None:
        read.append(tensor.numel())
        fill(target, piece, tensor)

    tasks.policy.models.model.fill = counting
    _, model = mesh_policy(folder, world_size, ep=2, fsdp=4)
    mine = sum(local_tensor(param).numel() for param in model.parameters())
    # 2 extra rows of 32 in the vocabulary's 37 on all ranks but the last, and norms of 8 and 32: under 2 %
    assert sum(read) == mine < 1.02 * num_stored / 4


def test_a_rank_reads_only_the_rows_and_experts_that_it_keeps(tmp_path):
    source = saved(tiny_policy("qwen3_moe"), tmp_path)
    run_ranks(check_reads, 4, source, sum(t.numel() for t in read_all(source, "model").values()))


def check_wrong_rows(rank: int, world_size: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"embed_tokens.weight must have 37 rows, got \[38, 32\]"):
        mesh_policy(folder, world_size, ep=1, fsdp=2)


def test_a_block_of_a_tensor_of_another_size_is_refused(tmp_path):
    source = saved(tiny_policy("qwen3_moe"), tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(38, 32)  # whose first 19 rows fit rank 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run_ranks(check_wrong_rows, 2, source)


def check_half_precision(rank: int, world_size: int, folder: Path, ep: int, fsdp: int) -> None:
    mesh, model = mesh_policy(folder, world_size, ep, fsdp, compute_dtype=BF16)
    optimizer = optimizer_of(model, lr=1e-5)
    with torch.no_grad():
        assert model(input_ids=token_ids(rank)).logits.dtype == BF16
    gradients: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(
            local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None
        )
    )
    step(model, optimizer, mesh, seed=0)
    assert (
        {param.dtype for param in model.parameters()} == {gradient.dtype for gradient in gradients} == {FP32}
    )
    # sums of two half-precision gradients that half precision cannot hold: they were added in float32
    assert any((gradient != gradient.to(BF16)).any() for gradient in gradients)
    write(folder / "half", model, optimizer, mesh, BF16)
    step(model, optimizer, mesh, seed=10)

    _, resumed = mesh_policy(folder / "half", world_size, ep, fsdp, compute_dtype=BF16)
    resumed_optimizer = optimizer_of(resumed, lr=1e-5)
    load_optimizer(resumed, resumed_optimizer, folder / "half")
    step(resumed, resumed_optimizer, mesh, seed=10)
    ours, expected = dict(disk_tensors(resumed)), dict(disk_tensors(model))
    assert_same_bytes(ours, expected)


@pytest.mark.parametrize(("ep", "fsdp"), [(2, 2), (2, 1), (1, 2)], ids=lambda size: str(size))
def test_half_precision_compute_keeps_float32_masters_that_survive_a_resume(ep, fsdp, tmp_path):
    source = saved(tiny_policy("deepseek_v3"), tmp_path)
    run_ranks(check_half_precision, 2, source, ep, fsdp)
    half, start = read_all(source / "half", "model"), read_all(source, "model")
    masters = read_all(source / "half", "optimizer")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {name for name, tensor in half.items() if tensor.dtype != BF16} == {bias}
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    # a step of 1e-5 is a hundredth of the spacing of half precision at 0.2: nearly every rounded weight stays
    assert (half[name] == start[name].to(BF16)).float().mean() > 0.95
    assert (masters[f"master/{name}"] != start[name]).float().mean() > 0.95


def check_one_rank_alone(rank: int, world_size: int, folder: Path) -> None:
    mesh, model = mesh_policy(folder, 1, 1, 1, compute_dtype=BF16)
    step(model, optimizer_of(model), mesh, seed=0)
    _, exact = mesh_policy(folder, 1, 1, 1)
    step(exact, optimizer_of(exact), mesh, seed=0)
    assert tensor_digest(disk_tensors(model)) != tensor_digest(disk_tensors(exact))


def test_half_precision_compute_runs_on_one_rank(tmp_path):
    run_ranks(check_one_rank_alone, 1, saved(tiny_policy("qwen3_moe"), tmp_path))


def test_sizes_that_make_no_grid_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"got fsdp=2, ep=4. Set fsdp to one of \[1, 4, 8\]"):
        Grid(world_size=8, ep=4, fsdp=2).checked()
    with pytest.raises(ValueError, match=r"got fsdp=3, ep=1. Set fsdp to one of \[1, 2, 4\]"):
        Grid(world_size=4, ep=1, fsdp=3).checked()
    with pytest.raises(ValueError, match=r"must be sharded after init_process_group, got none"):
        shard_parameters(tiny_policy("qwen3_moe"), make_mesh(1, 1), compute_dtype=FP32)
