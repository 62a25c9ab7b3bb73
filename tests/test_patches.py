"""What changed between two versions: encoded small, rebuilt bit for bit, named where it is damaged."""

from __future__ import annotations

import fcntl
import random
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import torch
from publishing import manifest
from safetensors.torch import save_file

from tasks.artifacts.chain import put_patched as put_content
from tasks.artifacts.changes import (
    _classes_of,
    _places_of,
    decode,
    encode,
    pack_gaps,
    unpack_gaps,
    unzigzag,
    zigzag,
)
from tasks.artifacts.content import FileContent
from tasks.artifacts.errors import CorruptArtifact
from tasks.artifacts.manifest import Blob, Manifest, PatchedBlob
from tasks.artifacts.patch import apply_patches, changed_tensors
from tasks.artifacts.patch import make_patch as make_patch_of
from tasks.artifacts.store import PolicyStore, open_store


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def make_patch(base: Path, new: Path, patch: Path, **options) -> bool:
    with FileContent(new) as content:
        return make_patch_of(base, content, patch, **options)


def put_patched(store: PolicyStore, path: Path, parent, **options) -> Blob | PatchedBlob:
    with FileContent(path) as content:
        return put_content(store, content, parent, **options)


def rebuilt(base: Path, patch: Path) -> bytes:
    target = base.with_name("rebuilt")
    with base.open("rb") as file:
        apply_patches([patch], file, target, num_threads=2, is_checked=True)
    return target.read_bytes()


def stepped(tensors: dict[str, torch.Tensor], seed: int, *, size: float = 1e-6) -> dict[str, torch.Tensor]:
    """bfloat16 weights after a step of about ``size`` on their float32 masters."""
    generator = torch.Generator().manual_seed(seed)
    masters = {name: tensor.float() for name, tensor in tensors.items()}
    for master in masters.values():
        # where in its rounding interval a master lies is not known from the weight
        master += (torch.rand(master.shape, generator=generator) - 0.5) * 2**-8 * master.abs()
    before = {name: master.bfloat16() for name, master in masters.items()}
    for name, master in masters.items():
        master += size * torch.sign(torch.randn(master.shape, generator=generator))
        tensors[name] = before[name]
    return {name: master.bfloat16() for name, master in masters.items()}


def dense(seed: int = 0, num: int = 4, size: int = 100_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": (torch.randn(size, generator=generator) * 0.02).bfloat16() for i in range(num)}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("share", [1e-4, 0.1, 0.6, 1.0])
def test_what_is_rebuilt_is_equal_bit_for_bit(dtype, share, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.artifacts.patch.BLOCK_BYTES", 4096)  # many blocks, the last one short
    rng = np.random.default_rng(3)
    width = torch.empty((), dtype=dtype).element_size()
    old = rng.integers(0, 256, 9001 * width, np.uint8)  # every bit pattern: NaN, infinities, -0.0
    new = old.reshape(-1, width).copy()
    rows = rng.random(len(new)) < share
    new[rows] = rng.integers(0, 256, (int(rows.sum()), width), np.uint8)
    files = [
        write(tmp_path / name, {"a": torch.from_numpy(data.reshape(-1)).view(dtype), "same": torch.ones(3)})
        for name, data in (("old", old), ("new", new))
    ]
    assert make_patch(*files, tmp_path / "patch", num_threads=2, max_share=2.0)
    assert rebuilt(files[0], tmp_path / "patch") == files[1].read_bytes()
    assert changed_tensors(tmp_path / "patch") == ["a"]


def test_gaps_of_any_length_and_differences_of_either_sign_come_back():
    positions = np.array([0, 1, 254, 255, 511, 512, 1022, 70_000])
    packed = pack_gaps(positions)
    assert packed[:3].tolist() == [0, 0, 252]  # passed over before 0, 1 and 254
    assert (unpack_gaps(packed) == positions).all()
    assert not len(unpack_gaps(pack_gaps(np.array([], np.int64))))
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        values = np.array([0, 1, -1, 2, -2, np.iinfo(dtype).max // 2, -(np.iinfo(dtype).max // 2) - 1])
        coded = zigzag(values.astype(np.int64).astype(dtype))
        assert coded[:5].tolist() == [0, 2, 1, 4, 3]
        assert (unzigzag(coded) == values.astype(np.int64).astype(dtype)).all()


def test_changes_are_listed_by_class_of_magnitude():
    """By hand, of bytes: the sign, then the magnitude. Below 16 lie the places 0, 3, 4 and 6."""
    old = np.array([3, 100, 90, 15, 0x80 | 9, 0x80 | 70, 8, 64], np.uint8)
    order, streams = _classes_of(np.array([0, 4, 5, 6]), old, [16])
    assert order.tolist() == [5, 0, 4, 6]
    # of 100, 90, 70 and 64 the third; of 3, 15, 9 and 8 the first, third and fourth
    assert [stream.tolist() for stream in streams] == [[2], [0, 1, 0]]
    for splits in ([], [16], [16, 4], [200, 80, 9, 1]):
        order, streams = _classes_of(np.array([0, 4, 5, 6]), old, splits)
        assert len(streams) == len(splits) + 1
        assert _places_of(streams, old, splits).tolist() == order.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.24])
def test_changes_come_back_whatever_the_classes_hold(dtype, share, monkeypatch):
    rng, width = np.random.default_rng(1), np.dtype(dtype).itemsize
    old = (rng.standard_normal(4000) * 2 ** (8 * width - 4)).astype(np.int64).astype(dtype)
    monkeypatch.setattr("tasks.artifacts.changes.LARGEST_INNER", 0.3)
    small = np.argsort(old & dtype((1 << (8 * width - 1)) - 1))[: max(1, int(share * len(old)))]
    for places in (small, rng.permutation(len(old))[: len(small)]):
        new = old.copy()
        new[places] += rng.choice(np.array([1, -1, 2, -3]).astype(dtype), len(places))
        for number in (0, 6):
            monkeypatch.setattr("tasks.artifacts.changes.MOST_SPLITS", number)
            how, raw = encode(old, new)
            assert len(how["splits"]) <= number
            assert how["splits"] or places is not small or share < 0.2 or not number
            got = old.copy()
            decode(how, raw, got)
            assert (got == new).all()


def test_patches_of_earlier_releases_are_applied():
    """Gaps among all elements and zigzag-coded differences, or differences of all elements."""
    old = np.array([5, 70, 0, 65535, 9], np.uint16)
    new = np.array([5, 71, 0, 0, 5], np.uint16)
    coded = zigzag((new - old)[[1, 3, 4]])
    assert coded.tolist() == [2, 2, 7]
    got = old.copy()
    decode({"dense": False}, [np.array([1, 1, 0], np.uint8), *coded.view(np.uint8).reshape(-1, 2).T], got)
    assert (got == new).all()
    got = old.copy()
    decode({"dense": True}, list(zigzag(new - old).view(np.uint8).reshape(-1, 2).T), got)
    assert (got == new).all()


def test_a_change_of_a_step_at_1e6_costs_less_than_its_place_alone_would(tmp_path):
    """Among all elements, 2 % of which change, a place is worth 7 bits; a sign is 1."""
    old = dense(num=1, size=2_000_000)
    new = stepped(old, 1)
    files = write(tmp_path / "old", old), write(tmp_path / "new", new)
    assert make_patch(*files, tmp_path / "patch", num_threads=1)
    changed = int((old["layer.0"].view(torch.int16) != new["layer.0"].view(torch.int16)).sum())
    assert 0.015 < changed / 2_000_000 < 0.03, changed
    bits = 8 * (tmp_path / "patch").stat().st_size / changed
    assert bits < 4.5, bits  # 3.9 measured, 8.5 without classes
    assert rebuilt(files[0], tmp_path / "patch") == files[1].read_bytes()


def test_a_step_at_1e6_of_a_dense_model_ships_under_3_percent_and_untouched_experts_nothing(tmp_path):
    old = dense()
    new = stepped(old, 1)
    files = write(tmp_path / "old", old), write(tmp_path / "new", new)
    assert make_patch(*files, tmp_path / "patch", num_threads=1)
    changed = sum(int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in old)
    share = changed / sum(t.numel() for t in old.values())
    assert 0.01 < share < 0.08, share  # or this is no such step
    assert (tmp_path / "patch").stat().st_size <= 0.03 * files[1].stat().st_size
    whole = (tmp_path / "patch").stat().st_size
    for name in list(old)[1:]:
        new[name] = old[name]
    assert make_patch(files[0], write(tmp_path / "new", new), tmp_path / "patch", num_threads=1)
    assert changed_tensors(tmp_path / "patch") == ["layer.0"]
    assert (tmp_path / "patch").stat().st_size < 0.3 * whole


def test_what_is_not_worth_a_patch_gets_none(tmp_path):
    old = write(tmp_path / "old", {"a": torch.zeros(1000)})
    noise = write(tmp_path / "noise", {"a": torch.randn(1000, generator=torch.Generator().manual_seed(1))})
    renamed = write(tmp_path / "renamed", {"b": torch.zeros(1000)})
    for new in (noise, renamed):
        assert not make_patch(old, new, tmp_path / "patch", num_threads=1)
        assert sorted(path.name for path in tmp_path.iterdir() if "patch" in path.name) == []


def test_a_damaged_patch_names_the_tensor(tmp_path):
    old = dense()
    files = write(tmp_path / "old", old), write(tmp_path / "new", stepped(old, 1))
    write(tmp_path / "old", old)
    make_patch(*files, tmp_path / "patch", num_threads=1)
    write(tmp_path / "other", dense(seed=5))
    with pytest.raises(CorruptArtifact, match=r"tensor layer\.0 must have its published content after patch"):
        rebuilt(tmp_path / "other", tmp_path / "patch")
    data = bytearray((tmp_path / "patch").read_bytes())
    data[-200] ^= 0xFF
    (tmp_path / "patch").write_bytes(data)
    with pytest.raises(CorruptArtifact, match=r"layer\.3 must"):
        rebuilt(tmp_path / "old", tmp_path / "patch")


# Chains in the store


@pytest.fixture
def chain(policy_store: PolicyStore, tmp_path: Path) -> list[bytes]:
    """Six versions of one file: whole, three patches, whole again, a patch; their contents."""
    tensors, parent, contents = dense(), None, []
    for version in range(6):
        path = write(tmp_path / "model.safetensors", tensors)
        stored = put_patched(policy_store, path, parent, full_every=4)
        policy_store.commit(manifest(policy_store, version, {path.name: stored}))
        contents.append(path.read_bytes())
        parent, tensors = stored, flipped(tensors, version)
    return contents


def flipped(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Every fiftieth weight moved by one unit in the last place."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor.view(torch.int16)[seed::50] += 1
    return changed


def file_of(store: PolicyStore, version: int) -> Blob | PatchedBlob:
    return store.manifest(version).files["model.safetensors"]


def patches_of(store: PolicyStore, version: int) -> int:
    file = file_of(store, version)
    return len(file.patches) if isinstance(file, PatchedBlob) else 0


def test_chains_of_patches_are_bounded_and_begin_anew(policy_store, chain):
    assert [patches_of(policy_store, version) for version in range(6)] == [0, 1, 2, 3, 0, 1]


def test_a_reader_that_holds_v_fetches_only_the_difference_to_the_next(
    policy_store, chain, store_folder, tmp_path
):
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "reader")
    for version in range(4):
        before = reader.cache.received.patch_bytes, reader.cache.received.full_files
        assert (reader.pull(version) / "model.safetensors").read_bytes() == chain[version]
        if version:
            file = file_of(reader, version)
            assert isinstance(file, PatchedBlob)
            fetched = reader.cache.received.patch_bytes - before[0]
            assert fetched == file.patches[-1].blob.size < 0.05 * file.size
            assert reader.cache.received.full_files == before[1]


def test_a_late_joiner_rebuilds_from_the_newest_full_version(policy_store, chain, store_folder, tmp_path):
    for version, fulls, patches in ((3, 1, 3), (5, 1, 1)):
        reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / f"reader-{version}")
        assert (reader.pull(version) / "model.safetensors").read_bytes() == chain[version]
        assert (reader.cache.received.full_files, reader.cache.received.patches) == (fulls, patches)


def test_an_unchanged_shard_is_not_sent_again(policy_store, chain, tmp_path, monkeypatch):
    (tmp_path / "same.safetensors").write_bytes(chain[3])
    monkeypatch.setattr(policy_store.bucket, "upload", lambda *_: pytest.fail("sent"))
    parent = file_of(policy_store, 3)
    assert put_patched(policy_store, tmp_path / "same.safetensors", parent, full_every=4) is parent


def test_how_a_file_is_stored_is_no_part_of_what_a_version_is(policy_store, chain, tmp_path):
    (tmp_path / "again.safetensors").write_bytes(chain[1])
    whole = policy_store.put_file(tmp_path / "again.safetensors")
    patched = policy_store.manifest(1)
    again = patched.model_copy(update={"files": {"model.safetensors": whole}})
    assert again.content_digest() == patched.content_digest()
    assert policy_store.commit(again) == policy_store.reference(1)


def test_a_patched_file_survives_json_and_refuses_a_chain_that_ends_elsewhere(policy_store, chain):
    published = policy_store.manifest(2)
    assert Manifest.model_validate_json(published.model_dump_json()) == published
    file = published.files["model.safetensors"]
    with pytest.raises(ValueError, match="must end in the content"):
        PatchedBlob(sha256=file.sha256, size=file.size, full=file.full, patches=file.patches[:1])


def test_a_missing_patch_and_a_damaged_base_are_told_apart(
    policy_store, chain, store_folder, tmp_path, capsys
):
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "reader")
    folder = reader.pull(1)
    (folder / "model.safetensors").chmod(0o644)
    data = bytearray(chain[1])
    data[len(data) // 2 + 1] ^= 1
    (folder / "model.safetensors").write_bytes(data)  # a hard link: the cache has the damage too
    assert (reader.pull(2) / "model.safetensors").read_bytes() == chain[2]  # healed: removed, made anew
    assert "was damaged in" in capsys.readouterr().out

    blob = file_of(reader, 3).patches[-1].blob
    reader.bucket._client.delete_object(Bucket=reader.bucket.name, Key=blob.key, VersionId=blob.version_id)
    with pytest.raises(CorruptArtifact, match=rf"model\.safetensors \(patch\) must exist as {blob.key}"):
        reader.pull(3)


def damaged_base(reader: PolicyStore, content: bytes) -> Path:
    """The cached content of version 1, the base of version 2, with a wrong bit in its middle."""
    path = reader.cache.folder / "sha256" / (digest := file_of(reader, 1).sha256)[:2] / digest
    reader.pull(1)
    data = bytearray(content)
    data[len(data) // 2 + 1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [3, 1], ids=["removed", "healed"])
def test_two_that_find_one_base_damaged_both_go_on(
    policy_store, chain, store_folder, tmp_path, monkeypatch, version
):
    """The second one, whose base was gone or whole by then, took the patch to be at fault."""
    reader, other = (
        open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "shared") for _ in range(2)
    )
    damaged_base(reader, chain[1])
    rebuild, others = reader.cache._rebuild_from, [version]

    def while_another_heals(*arguments) -> None:
        try:
            rebuild(*arguments)
        finally:
            for number in [others.pop()] if others else []:
                assert (other.pull(number) / "model.safetensors").read_bytes() == chain[number]

    monkeypatch.setattr(reader.cache, "_rebuild_from", while_another_heals)
    assert (reader.pull(2) / "model.safetensors").read_bytes() == chain[2]
    assert not others


def test_a_damaged_base_is_removed_under_its_lock(policy_store, chain, store_folder, tmp_path):
    """Its holder may be about to link what it has just made there."""
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "reader")
    path = damaged_base(reader, chain[1])
    with path.with_suffix(".lock").open() as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pulled = pool.submit(reader.pull, 2)
        assert not wait([pulled], timeout=0.5).done and path.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert (pulled.result() / "model.safetensors").read_bytes() == chain[2]


def test_a_damaged_base_is_found_in_a_tensor_that_no_patch_touches(policy_store, store_folder, tmp_path):
    """Patches verify what they change; only the check of the whole file sees the rest."""
    tensors, parent = dense(num=2), None
    for version in range(2):
        path = write(tmp_path / "model.safetensors", tensors)
        parent = put_patched(policy_store, path, parent, full_every=4)
        policy_store.commit(manifest(policy_store, version, {path.name: parent}))
        tensors = tensors | {"layer.0": flipped(tensors, version)["layer.0"]}
    content = path.read_bytes()
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "reader")
    base = reader.pull(0) / "model.safetensors"
    data = bytearray(base.read_bytes())
    data[-1] ^= 1  # the last byte is layer.1's
    base.chmod(0o644)
    base.write_bytes(data)
    assert (reader.pull(1) / "model.safetensors").read_bytes() == content


def test_random_histories_are_rebuilt_from_any_cache(policy_store, store_folder, tmp_path):
    """Whatever a cache holds of a chain, what it makes is the published content."""
    rng, tensors, parent, contents = random.Random(4), dense(num=2, size=5000), None, []
    for version in range(12):
        path = write(tmp_path / "model.safetensors", tensors)
        parent = put_patched(policy_store, path, parent, full_every=rng.choice([1, 3, 8]))
        policy_store.commit(manifest(policy_store, version, {path.name: parent}))
        contents.append(path.read_bytes())
        tensors = flipped(tensors, rng.randrange(50)) if rng.random() < 0.8 else dense(version, 2, 5000)
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "reader")
    for _ in range(30):
        version = rng.randrange(12)
        assert (reader.pull(version) / "model.safetensors").read_bytes() == contents[version]
        if rng.random() < 0.5:
            cached = [path for path in reader.cache.folder.glob("sha256/??/*") if not path.suffix]
            rng.choice(cached).unlink()
