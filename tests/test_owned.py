"""A node fetches the files that hold what its ranks own, once, and trains on to the bits of a whole fetch.

A node is a cache folder here, and its ranks are processes of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import saved, tiny_policy
from publishing import manifest, put_folder
from ranks import run_ranks
from safetensors.torch import load_file
from test_preemption import attempt, made, make_job, told_at
from test_sharding import optimizer_of, step
from test_update import train_batch
from torch import Tensor

from tasks.artifacts.errors import CorruptArtifact
from tasks.artifacts.owned import Checkpoint, checkpoint_of, files_holding
from tasks.artifacts.store import PolicyStore, open_store
from tasks.grid import Grid
from tasks.planning.fetched import fetched_by_nodes
from tasks.policy.checkpoint.upload import store_shards
from tasks.policy.checkpoint.weights import load_optimizer
from tasks.policy.dispatch.dispatcher import make_dispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import expert_shards
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.parallel.shards import local_tensor
from tasks.session import run_store

Address = tuple[str, str]
"""Of a store: its folder, and the campaign."""
BY = {  # the meshes of four ranks that store a version, and the number of ranks that hold one copy
    "replicated": ({"ep": 2}, 2),
    "split": ({"ep": 2, "fsdp": 4}, 4),
    "staged": ({"ep": 2, "pp": 2}, 4),
}


def policy_on(mesh: ParallelMesh, checkpoint: Checkpoint) -> Any:
    dispatcher = make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group)
    split = partial(distribute, mesh=mesh)
    return load_policy(checkpoint.folder, dispatcher=dispatcher, prepare=split, fetch=checkpoint.fetch)


def check_store(rank: int, world_size: int, folder: Path, address: str, sizes: dict[str, int]) -> None:
    mesh = make_mesh(world_size, **sizes)
    model = policy_on(mesh, Checkpoint(folder))
    optimizer = optimizer_of(model)
    step(model, optimizer, mesh, seed=0)
    store = open_store(address, campaign_of(folder), cache=folder / "writers")
    files = {"config.json": store.put_file(folder / "config.json")} if rank == 0 else {}
    files, _ = store_shards(store, model, optimizer, mesh, files, dtype=torch.bfloat16)
    if rank == 0:
        store.commit(manifest(store, 0, files))


def campaign_of(folder: Path) -> str:
    return f"owned-{folder.name}"


@pytest.fixture(scope="module")
def stored(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The campaign of a version that each of the meshes stored, in half precision, so with masters."""
    campaigns = {}
    for name, (sizes, _) in BY.items():
        folder = saved(tiny_policy("qwen3_moe"), tmp_path_factory.mktemp(name))
        run_ranks(check_store, 4, folder, str(store_folder), sizes)
        campaigns[name] = campaign_of(folder)
    return campaigns


def trained(mesh: ParallelMesh, checkpoint: Checkpoint) -> list[Tensor]:
    """What a rank holds when the version is loaded, and after its next step."""
    model = policy_on(mesh, checkpoint)
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, checkpoint.folder, fetch=checkpoint.fetch)

    def held() -> list[Tensor]:
        states = [optimizer.state[param] for param in model.parameters()]
        tensors = [*model.parameters(), *(value for state in states for value in state.values())]
        return [local_tensor(tensor).detach().clone() for tensor in tensors]

    before = held()
    step(model, optimizer, mesh, seed=1)
    assert any(not torch.equal(*pair) for pair in zip(before, held(), strict=True))
    return before + held()


def tensor_bytes(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def check_read(
    rank: int,
    world_size: int,
    tmp: Path,
    store: Address,
    sizes: dict[str, int],
    nodes: list[set[str]],
) -> None:
    mesh, node = make_mesh(world_size, **sizes), rank * len(nodes) // world_size
    mine = open_store(*store, cache=tmp / f"node-{node}")
    checkpoint = checkpoint_of(mine, 0)
    state = trained(mesh, checkpoint)
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, (node, mine.cache.received.full_bytes))
    files, expected = mine.manifest(0).files, nodes[node]
    assert {path.name for path in checkpoint.folder.iterdir()} == expected
    # once a node, whatever its ranks have in common
    assert sum(size for where, size in counts if where == node) == sum(files[n].size for n in expected)
    everything = Checkpoint(open_store(*store, cache=tmp / "whole").pull(0))
    whole = trained(mesh, everything)
    assert len(state) == len(whole) > 50
    assert all(torch.equal(one, other) for one, other in zip(state, whole, strict=True))
    if rank == 0:  # the folder of a part becomes one of all for whoever needs all of it
        assert {path.name for path in mine.pull(0).iterdir()} == set(files)


def files_of(by: str, own: set[int], dense: set[int]) -> set[str]:
    """Names of a version's files by the ranks, from 1, that stored them."""
    names = {f"{stem}.safetensors.index.json" for stem in ("model", "optimizer")} | {"config.json"}
    for stem in ("model", "optimizer"):
        names |= {f"{stem}-{n:05d}-of-{BY[by][1]:05d}.safetensors" for n in own}
        names |= {f"{stem}-dense-{n:05d}-of-{BY[by][1]:05d}.safetensors" for n in dense}
    return names


# Two ranks have experts 0 to 3 and 4 to 7; four that are split further 0 and 1, 4 and 5, 2 and 3, 6 and 7.
READ = {
    "the same mesh on one node": ("replicated", 4, {"ep": 2}, [({1, 2}, {1})]),
    "the same, a copy on each node": ("replicated", 4, {"ep": 2}, [({1, 2}, {1}), ({1, 2}, {1})]),
    "twice as many expert ranks": ("replicated", 4, {"ep": 4}, [({1}, {1}), ({2}, {1})]),
    "one copy, a node a rank": ("replicated", 2, {"ep": 2}, [({1}, {1}), ({2}, {1})]),
    "tensor parallel as well": ("replicated", 2, {"ep": 2, "tp": 2}, [({1}, {1}), ({2}, {1})]),
    "one rank": ("replicated", 1, {"ep": 1}, [({1, 2}, {1})]),
    "replicas become shards": ("replicated", 4, {"ep": 2, "fsdp": 4}, [({1, 2}, {1}), ({1, 2}, {1})]),
    "the same split": ("split", 4, {"ep": 2, "fsdp": 4}, [({1, 2}, {1, 2, 3, 4}), ({3, 4}, {1, 2, 3, 4})]),
    "split, then by experts": ("split", 4, {"ep": 4}, [({1, 3}, {1, 2, 3, 4}), ({2, 4}, {1, 2, 3, 4})]),
    "split, then on fewer": ("split", 2, {"ep": 2}, [({1, 3}, {1, 2, 3, 4}), ({2, 4}, {1, 2, 3, 4})]),
    "the same stages": ("staged", 4, {"ep": 2, "pp": 2}, [({1, 2}, {1}), ({3, 4}, {1, 3})]),
    "stages, then none": ("staged", 2, {"ep": 2}, [({1, 3}, {1, 3}), ({2, 4}, {1, 3})]),
}


@pytest.mark.parametrize("case", READ)
def test_a_node_fetches_what_its_ranks_own_and_trains_on_to_the_bits_of_a_whole_fetch(
    case, stored, store_folder, tmp_path
):
    """Not seen here: gpt-oss' stacks of experts, which every node fetches."""
    by, world_size, sizes, nodes = READ[case]
    store = (str(store_folder), stored[by])
    names = [files_of(by, *node) for node in nodes]
    run_ranks(check_read, world_size, tmp_path, store, sizes, names)


def check_blocks(rank: int, world_size: int, folder: Path, sizes: dict[str, int]) -> None:
    mesh = make_mesh(world_size, **sizes)
    shards = expert_shards(policy_on(mesh, Checkpoint(folder))).values()
    num_blocks = {shard.num_experts // shard.count for shard in shards}
    blocks = {shard.start // shard.count for shard in shards}
    assert num_blocks == {mesh.expert_shards} and blocks == {mesh.expert_block_of(rank)}
    assert (mesh.stage_of(rank), mesh.holder_of(rank)) == (mesh.stage, mesh.holder)


@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 2},
        {"ep": 2, "fsdp": 4},
        {"ep": 2, "fsdp": 2},
        {"ep": 2, "pp": 2},
        {"ep": 1, "tp": 2},
        {"ep": 4, "cp": 2},
    ],
    ids=str,
)
def test_the_grid_says_which_experts_a_rank_keeps(sizes, tmp_path):
    run_ranks(check_blocks, 4, saved(tiny_policy("qwen3_moe"), tmp_path), sizes)


@pytest.mark.parametrize("case", ["the same, a copy on each node", "the same split"])
def test_the_plan_counts_what_is_fetched(case, stored, store_folder, tmp_path):
    """Of tensors; headers, indexes and the configuration come on top."""
    by, world_size, sizes, nodes = READ[case]
    folder = open_store(str(store_folder), stored[by], cache=tmp_path).pull(0)
    sizes_of = {path.name: tensor_bytes(path) for path in folder.glob("*.safetensors")}
    dense = sum(size for name, size in sizes_of.items() if "-dense-" in name)
    everything = sum(sizes_of.values())
    grid = Grid(world_size=world_size, **sizes)
    planned = fetched_by_nodes(grid, world_size // len(nodes), dense=dense, experts=everything - dense)
    assert planned == [sum(sizes_of.get(name, 0) for name in files_of(by, *node)) for node in nodes]
    is_spread = grid.expert_shards > world_size // len(nodes)
    assert all((size < everything) == is_spread for size in planned) and is_spread == (by == "split")


def damage(store: PolicyStore, version: int, name: str, how: str) -> None:
    """The first version again, with the last byte of one file's object changed, or the object gone."""
    first = store.manifest(0)
    right = store.cache.read(name, first.files[name])
    other = store.put_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    if how == "missing":
        client, key = store.bucket._client, {"Bucket": store.bucket.name, "Key": other.key}
        client.delete_object(**key, VersionId=other.version_id)
    place = {"key": other.key, "version_id": other.version_id}
    files = dict(first.files) | {name: first.files[name].model_copy(update=place)}
    store.commit(manifest(store, version, files))


def check_refusal(rank: int, world_size: int, tmp: Path, store: Address, version: int, name: str) -> None:
    mesh = make_mesh(world_size, ep=4)
    mine = open_store(*store, cache=tmp / f"node-{rank // 2}-{version}")
    asked, download = [], mine.bucket.download
    mine.bucket.download = lambda key, *args, **kwargs: asked.append(key) or download(key, *args, **kwargs)
    checkpoint, key = checkpoint_of(mine, version), mine.manifest(version).files[name].key

    def load() -> None:
        model = policy_on(mesh, checkpoint)
        load_optimizer(model, optimizer_of(model), checkpoint.folder, fetch=checkpoint.fetch)

    if rank // 2 == 1:
        with pytest.raises(CorruptArtifact, match=rf"file {name} must (have|exist).* {key}"):
            load()
        assert key in asked
        return
    load()
    assert key not in asked


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_what_is_damaged_is_refused_where_it_is_owned_and_not_read_elsewhere(
    how, stem, stored, store_folder, tmp_path
):
    store = open_store(str(store_folder), stored["replicated"], cache=tmp_path / "publisher")
    name, version = f"{stem}-00002-of-00002.safetensors", store.head().version + 1
    damage(store, version, name, how)
    run_ranks(check_refusal, 4, tmp_path, (str(store_folder), stored["replicated"]), version, name)


def test_a_file_is_chosen_once_for_all_that_it_holds():
    index = {"a": "1", "b": "2", "c": "2", "d": "3"}
    assert files_holding({"c", "b"}, index) == ["2"] and files_holding({"d", "a"}, index) == ["1", "3"]
    with pytest.raises(KeyError):  # never a part for the whole
        files_holding({"a", "e"}, index)


def test_a_checkpoint_of_one_file_without_an_index_is_fetched_when_it_is_read(policy_store, tmp_path):
    """Version 0, as it was adopted."""
    folder = saved(tiny_policy("qwen3_moe"), tmp_path / "hub")
    policy_store.commit(manifest(policy_store, 0, put_folder(policy_store, folder)))
    checkpoint = checkpoint_of(policy_store, 0)
    assert not list(checkpoint.folder.glob("*.safetensors")) and (checkpoint.folder / "config.json").exists()
    loaded = policy_on(make_mesh(1, 1), checkpoint).state_dict()
    kept = policy_on(make_mesh(1, 1), Checkpoint(folder)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())


def a_node_a_rank(folder: str) -> Callable[[], None]:
    """Each rank of an update gets a cache of its own, and says at the end which folders it still leases."""

    def hurt() -> None:
        from tasks.artifacts import store
        from tasks.policy.training.resident import Resident

        close = Resident.close

        def close_and_say(resident: Resident) -> None:
            close(resident)
            opened = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
            own = [path for path in opened if Path(folder) in path.parents]  # a fork has its parent's too
            leases = [f"{path.parent.name}/{path.name}" for path in own if "leases" in path.parts]
            (Path(folder) / f"leases-{os.environ['RANK']}").write_text("\n".join(leases))

        Resident.close = close_and_say
        original = store.open_store
        store.open_store = lambda *args, **options: original(
            *args, **options | {"cache": Path(folder) / os.environ["RANK"]}
        )

    return hurt


def test_an_update_fetches_what_each_node_owns_of_policy_and_critic_and_keeps_no_lease(
    store_folder, tmp_path
):
    """A trainer that stays makes one update after another."""
    algorithm = {"advantage": "gae", "gae_lambda": 0.95, "whiten": True}
    job = make_job("owned", store_folder, algorithm, minibatches=1)
    run = job[0]
    codes, said = attempt(job, tmp_path)
    assert codes == [0, 0], said
    first = run_store(run).commit(made(tmp_path))
    codes, said = attempt(
        (run, train_batch(run, 1, 1, minibatches=1), first), tmp_path, a_node_a_rank(str(tmp_path))
    )
    assert codes == [0, 0] and made(tmp_path).version == 2, said
    for rank in range(2):
        assert (tmp_path / f"leases-{rank}").read_text() == ""
        for campaign in (run.campaign, f"{run.campaign}.critic"):
            (folder,) = (tmp_path / str(rank) / campaign).glob("000000000001-*")
            parts = ("dense-00001", f"{rank + 1:05d}")
            assert {path.name for path in folder.glob("*.safetensors")} == {
                f"{stem}-{part}-of-00002.safetensors" for stem in ("model", "optimizer") for part in parts
            }


def test_an_unfinished_update_is_fetched_by_what_each_node_owns(store_folder, tmp_path):
    job = make_job("left", store_folder, {}, minibatches=2)
    codes, said = attempt(job, tmp_path, told_at(1))
    assert codes == [143, 143], said
    codes, said = attempt(job, tmp_path, a_node_a_rank(str(tmp_path)))
    assert codes == [0, 0] and "goes on behind 1 mini-batches" in said, said
    for rank in range(2):
        (folder,) = (tmp_path / str(rank) / job[0].campaign).glob("unfinished-*")
        assert {path.name for path in folder.glob("*.safetensors")} == {
            f"{stem}-{part}-of-00002.safetensors"
            for stem in ("model", "optimizer")
            for part in ("dense-00001", f"{rank + 1:05d}")
        }
