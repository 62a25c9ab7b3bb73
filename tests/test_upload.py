"""Snapshots and their storing: the bits of one moment, failures that fail the publication."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from families import saved, tiny_policy
from publishing import failure, respond
from ranks import run_ranks
from test_weights import optimizer_of, train

from tasks.artifacts.errors import UploadFailed
from tasks.artifacts.store import PolicyStore, open_store
from tasks.policy.checkpoint import upload as uploading
from tasks.policy.checkpoint.snapshot import HostArena, bit_sum
from tasks.policy.checkpoint.upload import ShardUpload, host_bytes, named_tensors
from tasks.policy.checkpoint.weights import disk_tensors, stating_dtype, tensor_digest
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.mesh import make_mesh

CPU = torch.device("cpu")


def test_a_snapshot_has_the_bits_of_its_moment_and_the_next_reuses_its_memory(monkeypatch):
    monkeypatch.setattr("tasks.policy.checkpoint.snapshot.CHUNK_BYTES", 1000)
    live = {
        "a": torch.randn(33), "b": torch.randn(7, 5).bfloat16(), "step": torch.tensor(3),
        "large": torch.ones(500), "empty": torch.empty(0, 4), "view": torch.arange(12.0).view(3, 4)[1:, :3],
    }  # fmt: skip
    arena = HostArena(CPU)
    arena.reserve(3000)
    expected = {name: tensor.clone() for name, tensor in live.items()}
    snapshot = arena.take(live.items())
    for tensor in live.values():
        tensor += 1
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in expected.items())
    assert snapshot.tensors["view"].is_contiguous()
    assert snapshot.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    held = arena.num_bytes
    again = arena.take(live.items())
    assert arena.num_bytes == held and torch.equal(again.tensors["a"], live["a"])


def test_a_snapshot_of_the_reserved_size_needs_no_more_memory_whatever_its_tensors(monkeypatch):
    monkeypatch.setattr("tasks.policy.checkpoint.snapshot.CHUNK_BYTES", 1024)
    arena = HostArena(CPU)
    sizes = [640, 640, 64, 3000, 640]  # of pieces of 1,024 each would waste some, and none holds the largest
    arena.reserve(sum(-(-size // 64) * 64 for size in sizes))
    arena.wait()
    held = arena.num_bytes
    arena.take((str(n), torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate(sizes))
    assert arena.num_bytes == held


def test_the_sum_of_bits_tells_one_unit_in_the_last_place_and_a_sign_of_zero():
    tensor = torch.randn(1001).bfloat16()
    changed = tensor.clone()
    changed.view(torch.int16)[500] += 1
    assert bit_sum(tensor) != bit_sum(changed) and bit_sum(tensor) == bit_sum(tensor.clone())
    assert bit_sum(torch.tensor([0.0])) != bit_sum(torch.tensor([-0.0]))
    padded = torch.randn(9)  # a view that does not begin at eight bytes
    assert bit_sum(padded[1:]) == bit_sum(padded[1:].clone())


def make_trainee(folder: Path):
    if dist.get_rank() == 0:  # transformers writes nothing on the others
        saved(tiny_policy("qwen3_moe"), folder)
    dist.barrier()
    model = load_policy(folder, dispatcher=LocalDispatcher())
    optimizer = optimizer_of(model)
    train(model, optimizer, make_mesh(1, 1), [1, 2])
    return model, optimizer


def on_one_rank(rank: int, world_size: int, folder: Path, address: str, campaign: str, check) -> None:
    """A process group of one rank, as ``finish`` needs it."""
    model, optimizer = make_trainee(folder / "policy")
    store = open_store(address, campaign, cache=folder / "cache")
    with ShardUpload(store, make_mesh(1, 1), HostArena(CPU), full_every=4) as upload:
        check(model, optimizer, store, upload)


def run_check(store_folder: Path, policy_store: PolicyStore, folder: Path, check) -> None:
    (folder / "policy").mkdir()
    run_ranks(on_one_rank, 1, folder, str(store_folder), policy_store.campaign, check)


def check_background(model, optimizer, store, upload) -> None:
    before = tensor_digest(disk_tensors(model, torch.bfloat16))
    held, uploaded = threading.Event(), uploading.put_patched
    uploading.put_patched = lambda *a, **k: (held.wait(30), uploaded(*a, **k))[1]  # in a rank of its own
    upload.start(model, optimizer, {}, dtype=torch.bfloat16)
    assert not held.is_set()  # nothing is stored yet, and the trainer goes on
    train(model, optimizer, make_mesh(1, 1), [3, 4])
    held.set()
    stored = upload.finish()
    after = tensor_digest(disk_tensors(model, torch.bfloat16))
    assert stored.tensor_digest == before != after
    assert {"model.safetensors.index.json", "optimizer.safetensors.index.json"} <= stored.files.keys()


def test_the_trainer_goes_on_while_the_snapshot_is_stored(store_folder, policy_store, tmp_path):
    """Rows 1 and 3: an asynchronous save wrote weights of another step; a save took hours of the trainer."""
    run_check(store_folder, policy_store, tmp_path, check_background)


def check_second_waits(model, optimizer, store, upload) -> None:
    uploaded, order = uploading.put_patched, []

    def slow(*arguments, **options):
        time.sleep(0.3)
        order.append("stored")
        return uploaded(*arguments, **options)

    uploading.put_patched = slow
    upload.start(model, optimizer, {}, dtype=torch.bfloat16)
    take = upload._arena.take
    upload._arena.take = lambda tensors: (order.append("second"), take(tensors))[1]
    upload.start(model, optimizer, {}, dtype=torch.bfloat16)
    assert order[:3] == ["stored", "stored", "second"]
    upload.finish()


def test_a_second_save_waits_for_the_first(store_folder, policy_store, tmp_path):
    """Row 3: the host's memory holds one snapshot."""
    run_check(store_folder, policy_store, tmp_path, check_second_waits)


def check_failure(model, optimizer, store, upload) -> None:
    import botocore.endpoint

    botocore.endpoint.time = SimpleNamespace(sleep=lambda seconds: None)
    respond(store, "PutObject", lambda request: failure(500, "InternalError"))
    upload.start(model, optimizer, {}, dtype=torch.bfloat16)
    with pytest.raises(UploadFailed, match=r"rank 0: StoreError: .* 500 InternalError"):
        upload.finish()
    assert store.head() is None


def test_an_upload_that_fails_behind_the_trainer_fails_the_publication(store_folder, policy_store, tmp_path):
    run_check(store_folder, policy_store, tmp_path, check_failure)


def check_one_index(rank: int, world_size: int, folder: Path, address: str, campaign: str) -> None:
    """The second rank found no index where the first was about to store it, and is slower."""
    model, optimizer = make_trainee(folder / "policy")
    store = open_store(address, campaign, cache=folder / f"cache-{rank}")
    put_file, find, is_stored = store.put_file, store._stored_blob, folder / "stored"

    def put_late(path: Path, **options):
        if rank == 1 and path.suffix == ".json":
            while not is_stored.exists():
                time.sleep(0.01)
            nothing = iter([None])
            store._stored_blob = lambda *args: next(nothing, find(*args))
        return put_file(path, **options)

    store.put_file = put_late
    with ShardUpload(store, make_mesh(world_size, 1), HostArena(CPU), full_every=4) as upload:
        upload.start(model, optimizer, {}, dtype=torch.bfloat16)
        stored = upload.finish()
    is_stored.touch()
    seen = [None] * world_size
    dist.all_gather_object(seen, stored)
    assert seen[0] == seen[1]


def test_ranks_name_the_same_files_to_the_version_of_each_object(store_folder, policy_store, tmp_path):
    (tmp_path / "policy").mkdir()
    run_ranks(check_one_index, 2, tmp_path, str(store_folder), policy_store.campaign)


def check_index_failure(rank: int, world_size: int, folder: Path, address: str, campaign: str) -> None:
    model, optimizer = make_trainee(folder / "policy")
    store = open_store(address, campaign, cache=folder / f"cache-{rank}")
    put_file = store.put_file

    def put(path: Path, **options):
        if path.suffix == ".json":
            raise OSError("no room")
        return put_file(path, **options)

    store.put_file = put
    with ShardUpload(store, make_mesh(world_size, 1), HostArena(CPU), full_every=4) as upload:
        upload.start(model, optimizer, {}, dtype=torch.bfloat16)
        with pytest.raises(UploadFailed, match=r"got 1 that did not.*\n +rank 0: OSError: no room"):
            upload.finish()


def test_an_index_that_cannot_be_stored_fails_all_ranks(store_folder, policy_store, tmp_path):
    (tmp_path / "policy").mkdir()
    run_ranks(check_index_failure, 2, tmp_path, str(store_folder), policy_store.campaign)


def check_overwritten(model, optimizer, store, upload) -> None:
    arena = upload._arena
    take = arena.take

    def torn(tensors):
        snapshot = take(tensors)
        snapshot.tensors["model:model.norm.weight"].add_(1)  # as a buffer's next user would
        return snapshot

    arena.take = torn
    upload.start(model, optimizer, {}, dtype=torch.float32)
    with pytest.raises(UploadFailed, match=r"StaleWeights: model\.norm\.weight in model-00001-of-00001"):
        upload.finish()


def test_a_file_that_differs_from_the_live_weights_is_never_published(store_folder, policy_store, tmp_path):
    """Row 1: the stored weights equal the live tensors' bits at the step, or nothing is published."""
    run_check(store_folder, policy_store, tmp_path, check_overwritten)


def check_chain(model, optimizer, store, upload) -> None:
    from publishing import manifest
    from safetensors.torch import load_file

    files, seen = {}, []
    for version in range(3):
        upload.start(model, optimizer, files, dtype=torch.bfloat16)
        stored = upload.finish()
        files = dict(stored.files)
        store.commit(manifest(store, version, files, tensor_digest=stored.tensor_digest))
        pulled = store.pull(version)
        weights = load_file(pulled / "model-00001-of-00001.safetensors")
        assert tensor_digest(weights.items()) == stored.tensor_digest
        seen.append(tensor_digest(disk_tensors(model, torch.bfloat16)))
        assert seen[-1] == stored.tensor_digest
        for group in optimizer.param_groups:
            group["lr"] = 1e-6
        train(model, optimizer, make_mesh(1, 1), [3 + version, 4])
    assert len(set(seen)) == 3
    assert len(files["model-00001-of-00001.safetensors"].patches) == 2


def test_versions_stored_as_patches_have_the_live_weights_digest(store_folder, policy_store, tmp_path):
    run_check(store_folder, policy_store, tmp_path, check_chain)


def check_dtype(model, optimizer, store, upload) -> None:
    from publishing import manifest
    from transformers import AutoModelForCausalLM

    from tasks.artifacts.lineage import export

    folder = saved(tiny_policy("qwen3_moe"), store.cache.folder / "float32")
    files = {"config.json": store.put_file(folder / "config.json")}
    for version, dtype in enumerate((torch.float32, torch.bfloat16, torch.bfloat16)):
        upload.start(model, optimizer, files, dtype=dtype)
        stored = upload.finish()
        is_same = stored.files["config.json"] == files["config.json"]
        assert is_same == (version != 1)  # not a byte where it says so already
        store.commit(manifest(store, version, stored.files))
        exported = store.cache.folder / f"exported-{version}"
        export(store, version, exported)
        loaded = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
        assert loaded.dtype == loaded.config.dtype == dtype
        assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.to(dtype))
        files = dict(stored.files)


def test_a_version_says_the_type_of_its_weights_whatever_version_0_was_stored_in(
    store_folder, policy_store, tmp_path
):
    run_check(store_folder, policy_store, tmp_path, check_dtype)


def test_every_place_of_a_configuration_that_states_a_type_is_set():
    nested = {"torch_dtype": "float32", "text_config": {"dtype": "float16"}, "rope": {"theta": 1.0}}
    stated = json.loads(stating_dtype(json.dumps(nested).encode(), "bfloat16"))
    assert stated == nested | {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}
    assert json.loads(stating_dtype(b"{}", "bfloat16")) == {"dtype": "bfloat16"}
    assert stating_dtype(b"{}", "float32") == b"{}"


def check_reserve(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = make_trainee(folder)
    num_bytes = sum(tensor.nbytes for _, tensor in named_tensors(model, optimizer, torch.bfloat16))
    assert num_bytes <= host_bytes(model, torch.bfloat16)


def test_the_arena_is_reserved_for_all_that_a_rank_writes(tmp_path):
    run_ranks(check_reserve, 1, tmp_path)
