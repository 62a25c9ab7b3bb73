"""Weights and optimizer state written on one rank go over any mesh and come back the same bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from families import FAMILIES, VOCAB, saved, tiny_policy
from ranks import run_ranks
from safetensors.torch import load_file
from test_sharding import assert_same_bytes, mesh_policy, optimizer_of, read_all, step, write

from tasks.policy.checkpoint.weights import load_optimizer
from tasks.policy.dispatch.dispatcher import make_dispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.shards import local_tensor


def one_step(folder: Path, family: str, vocab_size: int) -> None:
    """A version after one step on one rank, with moments, in ``folder``/one."""
    saved(tiny_policy(family, vocab_size=vocab_size), folder / "start")
    mesh, model = mesh_policy(folder / "start", 1, 1, 1)
    optimizer = optimizer_of(model)
    step(model, optimizer, mesh, seed=0)
    write(folder / "one", model, optimizer, mesh)


def check_carry(rank: int, world_size: int, folder: Path, sizes: dict[str, int]) -> None:
    mesh = make_mesh(world_size, **sizes)
    dispatcher = make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group)
    model = load_policy(folder / "one", dispatcher=dispatcher, prepare=partial(distribute, mesh=mesh))
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, folder / "one")
    num_whole = sum(tensor.numel() for tensor in read_all(folder / "one", "model").values())
    num_kept = sum(local_tensor(param).numel() for param in model.parameters())
    # several times: norms, routers, the compression of latent attention, and an embedding that is the head's
    assert num_kept * mesh.copy_size < 2 * num_whole or mesh.ep < mesh.tp
    write(folder / "split", model, optimizer, mesh)


def check(folder: Path, family: str, world_size: int, sizes: dict[str, int], vocab_size: int) -> None:
    one_step(folder, family, vocab_size)
    run_ranks(check_carry, world_size, folder, sizes)
    for path in (folder / "split").glob("*.safetensors"):  # no rank of a stage writes all dense tensors
        assert any(".experts." not in name and name != "step" for name in load_file(path)), path
    for stem in ("model", "optimizer"):
        assert_same_bytes(read_all(folder / "split", stem), read_all(folder / "one", stem))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{"tp": 2, "ep": 2}, {"tp": 2, "ep": 1}, {"pp": 2, "ep": 1}], ids=str)
def test_two_ranks_read_and_write_every_family_as_one_rank_does(family, sizes, tmp_path):
    check(tmp_path, family, 2, sizes, VOCAB + 1)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (4, {"tp": 2, "ep": 2, "fsdp": 2}),
        (4, {"pp": 2, "ep": 2, "fsdp": 2}),
        pytest.param(8, {"pp": 2, "tp": 2, "cp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"pp": 2, "tp": 2, "ep": 4, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"tp": 2, "cp": 2, "ep": 4, "fsdp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_products_of_axes_read_and_write_as_one_rank_does(family, world_size, sizes, tmp_path):
    check(tmp_path, family, world_size, sizes, VOCAB)
