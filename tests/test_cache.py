"""The checkpoint cache: bounded, shared by processes, safe while others read, on a disk that fills up."""

from __future__ import annotations

import multiprocessing
import subprocess
from pathlib import Path

import pytest
from publishing import manifest

from tasks.artifacts.errors import CacheFull
from tasks.artifacts.store import PolicyStore, open_store

KIB = 1024


def publish_random(store: PolicyStore, number: int, *, size: int = 64 * KIB) -> list[bytes]:
    """Versions of one file each, none like another."""
    contents = [bytes([version]) * size for version in range(number)]
    for version, content in enumerate(contents):
        store.commit(manifest(store, version, {"weights.bin": store.put_bytes(content)}))
    return contents


def reader_of(store: PolicyStore, folder: Path, cache: Path, *, limit: int = 0) -> PolicyStore:
    return open_store(str(folder), store.campaign, cache=cache, cache_bytes=limit)


def test_a_bounded_cache_removes_what_was_unused_for_longest_and_nothing_that_is_read(
    policy_store, store_folder, tmp_path
):
    contents = publish_random(policy_store, 5)
    reader = reader_of(policy_store, store_folder, tmp_path / "bounded", limit=200 * KIB)
    held = reader.pull(0)
    for version in range(1, 5):
        folder = reader.pull(version)
        assert (folder / "weights.bin").read_bytes() == contents[version]
        reader.release(folder)
        assert reader.cache.used_bytes() <= 200 * KIB
    assert (held / "weights.bin").read_bytes() == contents[0]
    left = sorted(path.parent.name[:12] for path in (reader.cache.folder / reader.campaign).glob("*/*.bin"))
    assert left == ["000000000000", "000000000003", "000000000004"]


def test_a_cache_whose_readers_hold_everything_says_so(policy_store, store_folder, tmp_path):
    publish_random(policy_store, 4)
    reader = reader_of(policy_store, store_folder, tmp_path / "bounded", limit=200 * KIB)
    for version in range(3):
        reader.pull(version)
    with pytest.raises(CacheFull, match=r"limit of 204,800, got 196,608 in use\. Raise checkpoint\.cache_gb"):
        reader.pull(3)


def test_a_full_disk_makes_room_first_and_then_is_named(policy_store, store_folder, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        contents = publish_random(policy_store, 6)
        reader = reader_of(policy_store, store_folder, disk / "cache")
        for version in range(5):  # five do not fit at once
            folder = reader.pull(version)
            assert (folder / "weights.bin").read_bytes() == contents[version]
            reader.release(folder)
        (disk / "filler").write_bytes(bytes(100 * KIB))
        with pytest.raises(CacheFull, match=r"must have room for file weights\.bin of 65,536 bytes, got No"):
            for version in range(6):
                reader.pull(version)  # held
        (disk / "filler").unlink()
        for version in (1, 5):
            reader_of(policy_store, store_folder, disk / "cache").pull(version)
        assert not list(disk.rglob("*.partial"))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def read_at_random(address: str, campaign: str, cache: str, seed: int, failures: list) -> None:
    import random

    rng = random.Random(seed)
    try:
        reader = open_store(address, campaign, cache=Path(cache), cache_bytes=200 * KIB)
        for _ in range(25):
            version = rng.randrange(6)
            folder = reader.pull(version)
            assert (folder / "weights.bin").read_bytes() == bytes([version]) * 32 * KIB
            reader.release(folder)
    except BaseException as error:
        failures.append(repr(error))


def test_processes_that_read_and_evict_at_once_never_see_a_wrong_file(policy_store, store_folder, tmp_path):
    publish_random(policy_store, 6, size=32 * KIB)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        failures = manager.list()
        readers = [
            context.Process(
                target=read_at_random,
                args=(str(store_folder), policy_store.campaign, str(tmp_path / "shared"), seed, failures),
            )
            for seed in range(3)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert list(failures) == []
