"""Versioned policies on a real S3 server (SeaweedFS): whole, immutable, found again.

What these tests cannot see: Amazon S3 itself, and files of many gigabytes.
"""

import hashlib
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from publishing import manifest, publish, respond

from tasks.artifacts.errors import CorruptArtifact, NotFound, ObjectConflict, VersionConflict
from tasks.artifacts.manifest import Blob, Manifest
from tasks.artifacts.store import EMBEDDED_BUCKET, PolicyStore, open_store

ROOT = Path(__file__).resolve().parent.parent


# Versions


def test_a_published_version_comes_back_whole(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 2)[1]
    assert policy_store.head() == published
    assert policy_store.manifest(published) == policy_store.manifest(1)
    folder = policy_store.pull(published)
    assert (folder / "weights.bin").read_bytes() == b"weights 1"
    assert (folder / "a" / "t.json").read_bytes() == b"tokenizer"
    assert json.loads(policy_store.manifest(published).model_dump_json())["parent"] == 0


def test_an_empty_campaign_has_no_head_and_a_version_of_it_is_an_error(policy_store: PolicyStore) -> None:
    assert policy_store.head() is None
    assert policy_store.history() == []
    with pytest.raises(NotFound, match="version 0 of campaign"):
        policy_store.manifest(0)


def test_publishing_the_same_result_again_is_success(policy_store: PolicyStore) -> None:
    files = {"weights.bin": policy_store.put_bytes(b"w")}
    first = policy_store.commit(
        manifest(policy_store, 0, files, metrics={"loss": 1.0}, seconds={"train": 1.0})
    )
    time.sleep(0.01)  # another `created`
    again = policy_store.commit(
        manifest(policy_store, 0, files, metrics={"loss": 1.1}, seconds={"train": 2.0})
    )
    assert again == first
    assert policy_store.manifest(0).metrics == {"loss": 1.0}  # the first one stands


@pytest.mark.parametrize(
    "change", ["files", "tensor_digest", "config_digest", "code_revision", "batch", "num_samples"]
)
def test_other_content_under_a_published_version_is_refused_naming_both(
    policy_store: PolicyStore, change: str
) -> None:
    publish(policy_store, 1)
    files = policy_store.manifest(0).files
    other = {"files": {"weights.bin": policy_store.put_bytes(b"other")}, "num_samples": 7}.get(
        change, "other"
    )
    changed = manifest(policy_store, 0, files).model_copy(update={change: other})
    with pytest.raises(VersionConflict) as caught:
        policy_store.commit(changed)
    assert policy_store.manifest(0).content_digest()[:12] in str(caught.value)
    assert changed.content_digest()[:12] in str(caught.value)
    assert policy_store.manifest(0).files == files


def test_a_manifest_of_an_earlier_release_loads_and_is_the_same_content(policy_store: PolicyStore) -> None:
    publish(policy_store, 1)
    new = policy_store.manifest(0)
    written = json.loads(new.model_dump_json()) | {"cursor": 48}
    old = Manifest.model_validate_json(json.dumps(written))
    assert old == new and old.content_digest() == new.content_digest()
    assert "cursor" not in old.model_dump()


def test_versions_have_no_gaps(policy_store: PolicyStore) -> None:
    publish(policy_store, 1)
    with pytest.raises(ValueError, match=r"needs version 1, got none. Publish head\(\) \+ 1"):
        policy_store.commit(manifest(policy_store, 2, {}))


def test_history_is_ascending_and_complete(policy_store: PolicyStore) -> None:
    publish(policy_store, 11)
    assert [entry.version for entry in policy_store.history()] == list(range(11))


def test_a_manifest_must_have_the_bytes_that_its_reference_names(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 1)[0]
    with pytest.raises(CorruptArtifact, match=r"manifest\.json must have sha256"):
        policy_store.manifest(published.model_copy(update={"manifest_sha256": "0" * 64}))
    key = published.manifest_uri.removeprefix(f"s3://{EMBEDDED_BUCKET}/")
    policy_store.bucket.put(key, b"overwritten")
    assert policy_store.manifest(published).version == 0  # read by VersionId


# Files


def test_a_stored_file_is_not_sent_again(policy_store: PolicyStore, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"w" * 1000)
    sent = []
    respond(policy_store, "PutObject", lambda request: sent.append(request.url))
    first = policy_store.put_file(tmp_path / "weights.bin")
    assert policy_store.put_file(tmp_path / "weights.bin") == first
    assert policy_store.put_bytes(b"w" * 1000) == first
    assert len(sent) == 1
    assert first.sha256 == hashlib.sha256(b"w" * 1000).hexdigest()


def test_a_large_file_goes_in_parts_and_comes_back(policy_store: PolicyStore, tmp_path: Path) -> None:
    content = random.Random(0).randbytes((33 << 20) + 5)  # three parts of at most 16 MiB
    (tmp_path / "weights.bin").write_bytes(content)
    sent = []
    respond(policy_store, "UploadPart", lambda request: sent.append(request.url))
    blob = policy_store.put_file(tmp_path / "weights.bin")
    assert policy_store.put_file(tmp_path / "weights.bin") == blob
    assert len(sent) == 3
    policy_store.commit(manifest(policy_store, 0, {"weights.bin": blob}))
    assert (policy_store.pull(0) / "weights.bin").read_bytes() == content


def test_a_blob_that_somebody_overwrites_is_still_read_as_published(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 1)[0]
    blob = policy_store.manifest(published).files["weights.bin"]
    policy_store.bucket.put(blob.key, b"weights X")
    assert (policy_store.pull(published) / "weights.bin").read_bytes() == b"weights 0"
    again = policy_store.put_bytes(b"weights 0")  # the wrong bytes are not reused: it is sent again
    assert policy_store.bucket.get(blob.key, version_id=again.version_id)[0] == b"weights 0"  # type: ignore[index]


def test_cached_files_are_read_only_and_shared_by_versions(policy_store: PolicyStore) -> None:
    first, second = publish(policy_store, 2)
    paths = [policy_store.pull(version) / "a" / "t.json" for version in (first, second)]
    assert paths[0] != paths[1]
    assert paths[0].stat().st_ino == paths[1].stat().st_ino
    assert not paths[0].stat().st_mode & 0o222


def test_pull_takes_the_files_that_are_named_and_another_name_is_an_error(policy_store: PolicyStore) -> None:
    publish(policy_store, 1)
    folder = policy_store.pull(0, names=["a/t.json"])
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["t.json"]
    with pytest.raises(ValueError, match=r"got \['b\.bin'\]; files: \['a/t\.json', 'weights\.bin'\]"):
        policy_store.pull(0, names=["a/t.json", "b.bin"])
    assert policy_store.pull(0, without="*.bin") == folder and not (folder / "weights.bin").exists()
    assert (policy_store.pull(0) / "weights.bin").exists()  # a folder with a part is no version


def test_readers_at_once_share_one_cache_and_download_each_file_once(
    policy_store: PolicyStore, store_folder: Path, tmp_path: Path
) -> None:
    content = random.Random(1).randbytes(1 << 20)
    policy_store.commit(manifest(policy_store, 0, {"weights.bin": policy_store.put_bytes(content)}))
    name = policy_store.campaign
    stores = [open_store(str(store_folder), name, cache=tmp_path / "cache") for _ in range(6)]
    downloads = []

    def count(request: Any) -> None:
        if "blobs/sha256" in request.url:
            downloads.append(request.url)

    for store in stores:
        respond(store, "GetObject", count)
    with ThreadPoolExecutor(6) as pool:
        folders = list(pool.map(lambda store: store.pull(0), stores))
    assert len(set(folders)) == 1
    assert (folders[0] / "weights.bin").read_bytes() == content
    assert [path.name for path in folders[0].iterdir()] == ["weights.bin"]
    assert len(downloads) == 1


# Other objects


def test_an_object_is_written_once(policy_store: PolicyStore) -> None:
    uri = policy_store.put_object("batches/000001.arrow", b"one")
    assert uri == f"s3://{EMBEDDED_BUCKET}/{policy_store.campaign}/batches/000001.arrow"
    assert policy_store.put_object("batches/000001.arrow", b"one") == uri
    with pytest.raises(ObjectConflict, match=r"batches/000001\.arrow .* stored 3 bytes.* refused 3 bytes"):
        policy_store.put_object("batches/000001.arrow", b"two")
    assert policy_store.get_object("batches/000001.arrow") == b"one"


def test_a_report_may_be_replaced(policy_store: PolicyStore) -> None:
    for text in (b"first", b"second"):
        policy_store.replace_object("report.html", text)
    assert policy_store.get_object("report.html") == b"second"


def test_objects_are_listed_without_versions_and_blobs(policy_store: PolicyStore, store_folder: Path) -> None:
    publish(policy_store, 1)
    for key in ("batches/2", "batches/1", "report.html"):
        policy_store.put_object(key, b"x")
    open_store(str(store_folder), policy_store.campaign + "-other").put_object("batches/3", b"x")
    assert policy_store.list_objects() == ["batches/1", "batches/2", "report.html"]
    assert policy_store.list_objects("batches/") == ["batches/1", "batches/2"]


def test_a_missing_object_is_an_error_and_finding_none_is_not(policy_store: PolicyStore) -> None:
    assert policy_store.find_object("batches/9") is None
    with pytest.raises(NotFound, match="object batches/9 of campaign"):
        policy_store.get_object("batches/9")


@pytest.mark.parametrize(
    "key", ["", "/a", "a/../b", "versions/000000000000/manifest.json", "latest.json", "blobs/x"]
)
def test_keys_that_would_leave_the_campaign_or_forge_a_version_are_refused(
    policy_store: PolicyStore, key: str
) -> None:
    with pytest.raises(ValueError, match="key must be a relative path outside"):
        policy_store.replace_object(key, b"x")


# Records


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a//b", ".", ""])
def test_file_names_that_leave_the_folder_are_refused(policy_store: PolicyStore, name: str) -> None:
    blob = Blob(sha256="0" * 64, size=0, key="k", version_id="v")
    with pytest.raises(ValueError, match="plain relative names"):
        manifest(policy_store, 0, {name: blob})


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (0, {"parent": 0}),
        (0, {"kind": "iteration"}),
        (1, {"parent": None}),
        (1, {"parent": 1}),
        (1, {"kind": "init"}),
    ],
)
def test_lineage_that_cannot_be_is_refused(
    policy_store: PolicyStore, version: int, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="must be"):
        manifest(policy_store, version, {}, **changes)


def test_metrics_that_are_not_finite_survive_publication(policy_store: PolicyStore) -> None:
    metrics = {"a": float("nan"), "b": float("inf"), "c": 0.1}
    policy_store.commit(manifest(policy_store, 0, {}, metrics=metrics))
    assert str(policy_store.manifest(0).metrics) == str(metrics)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "x" * 101])
def test_campaign_names_that_are_no_key_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="campaign must be 1 to 100"):
        open_store(str(tmp_path), name)


@pytest.mark.parametrize("address", ["", "gs://bucket/x", "s3://", "s3:///x"])
def test_addresses_that_are_neither_s3_nor_a_folder_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.store must be s3://bucket/prefix or a folder"):
        open_store(address, "campaign")


def test_the_reference_module_imports_no_cloud_client() -> None:
    code = "import sys, tasks.artifacts.version; sys.exit('boto3' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
