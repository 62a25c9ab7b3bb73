"""Versioned policies on a real S3 server (SeaweedFS): whole or absent, never two, never silently damaged.

What these tests cannot see: Amazon S3 itself (its 409 answer is imitated), a lost disk, and large files.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from tasks.artifacts.errors import CorruptArtifact, NotFound, ObjectConflict, StoreError, VersionConflict
from tasks.artifacts.manifest import Blob, Manifest
from tasks.artifacts.store import EMBEDDED_BUCKET, PolicyStore, open_store
from tasks.embedded.seaweed import S3Endpoint

ROOT = Path(__file__).resolve().parent.parent


def manifest(store: PolicyStore, version: int, files: dict[str, Blob], **changes: Any) -> Manifest:
    first: dict[str, Any] = {"kind": "init", "parent": None}
    later: dict[str, Any] = {
        "kind": "iteration",
        "parent": version - 1,
        "batch": f"batches/{version:06d}.arrow",
    }
    fields = {"tensor_digest": "t" * 64, "config_digest": "c" * 64, "code_revision": "r" * 40}
    fields |= (later if version else first) | changes
    return Manifest(campaign=store.campaign, version=version, iteration=version, files=files, **fields)


def publish(store: PolicyStore, number: int) -> list[Any]:
    """Versions 0 to number - 1, each with a file of its own and one that all share."""
    shared = store.put_bytes(b"tokenizer")
    return [
        store.commit(
            manifest(store, v, {"weights.bin": store.put_bytes(b"weights %d" % v), "a/t.json": shared})
        )
        for v in range(number)
    ]


def respond(store: PolicyStore, operation: str, answer: Callable[[Any], AWSResponse | None]) -> None:
    """Let a function answer an S3 operation instead of the server; None lets the server answer."""
    store._bucket._client.meta.events.register(
        f"before-send.s3.{operation}", lambda request, **_: answer(request)
    )


def failure(status: int, code: str) -> AWSResponse:
    class Raw:
        def stream(self, **_: Any) -> list[bytes]:
            return [f"<Error><Code>{code}</Code><Message>imitated</Message></Error>".encode()]

    return AWSResponse("http://imitated", status, {}, Raw())


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
    "change", ["files", "tensor_digest", "config_digest", "code_revision", "batch", "cursor"]
)
def test_other_content_under_a_published_version_is_refused_naming_both(
    policy_store: PolicyStore, change: str
) -> None:
    publish(policy_store, 1)
    files = policy_store.manifest(0).files
    other = {"files": {"weights.bin": policy_store.put_bytes(b"other")}, "cursor": 7}.get(change, "other")
    changed = manifest(policy_store, 0, files).model_copy(update={change: other})
    with pytest.raises(VersionConflict) as caught:
        policy_store.commit(changed)
    assert policy_store.manifest(0).content_digest()[:12] in str(caught.value)
    assert changed.content_digest()[:12] in str(caught.value)
    assert policy_store.manifest(0).files == files


def test_of_two_publishers_at_once_one_wins_and_the_other_is_refused(
    policy_store: PolicyStore, store_folder: Path
) -> None:
    stores = [policy_store, open_store(str(store_folder), policy_store.campaign)]
    for version in range(4):
        barrier = threading.Barrier(2)

        def race(store: PolicyStore, version: int = version, barrier: threading.Barrier = barrier) -> str:
            files = {"weights.bin": store.put_bytes(b"%d by %d" % (version, id(store)))}
            ready = manifest(store, version, files)
            barrier.wait()
            try:
                store.commit(ready)
            except VersionConflict:
                return "refused"
            return "won"

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(race, stores)) == ["refused", "won"]
    assert [entry.version for entry in policy_store.history()] == [0, 1, 2, 3]


def test_versions_have_no_gaps(policy_store: PolicyStore) -> None:
    publish(policy_store, 1)
    with pytest.raises(ValueError, match=r"needs version 1, got none. Publish head\(\) \+ 1"):
        policy_store.commit(manifest(policy_store, 2, {}))


def test_head_is_found_when_the_publisher_died_before_the_hint(
    policy_store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(policy_store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(policy_store, "_advance", lambda version: None)
        published = policy_store.commit(manifest(policy_store, 1, {}))
    assert hint(policy_store) == 0
    assert policy_store.head() == published
    assert hint(policy_store) == 1  # repaired


def hint(store: PolicyStore) -> int:
    found = store._bucket.get(f"{store.campaign}/latest.json")
    assert found
    return json.loads(found[0])["version"]


def test_head_is_found_when_the_hint_is_lost(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 3)
    policy_store._bucket.delete(f"{policy_store.campaign}/latest.json")
    assert policy_store.head() == published[2]
    assert hint(policy_store) == 2


def test_the_hint_never_goes_back(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 3)
    policy_store._advance(1)
    policy_store.commit(policy_store.manifest(1))  # a late retry of an old publication
    assert hint(policy_store) == 2
    assert policy_store.head() == published[2]


def test_history_is_ascending_and_complete(policy_store: PolicyStore) -> None:
    publish(policy_store, 11)
    assert [entry.version for entry in policy_store.history()] == list(range(11))


def test_a_manifest_must_have_the_bytes_that_its_reference_names(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 1)[0]
    with pytest.raises(CorruptArtifact, match=r"manifest\.json must have sha256"):
        policy_store.manifest(published.model_copy(update={"manifest_sha256": "0" * 64}))
    key = published.manifest_uri.removeprefix(f"s3://{EMBEDDED_BUCKET}/")
    policy_store._bucket.put(key, b"overwritten")
    assert policy_store.manifest(published).version == 0  # read by VersionId


PUBLISHER = """
import os, sys
sys.path.insert(0, os.path.join(os.getcwd(), "tests"))
from tasks.artifacts.store import open_store
from test_artifacts import manifest
store = open_store(sys.argv[1], sys.argv[2])
head = store.head()
print("ready", flush=True)
for version in range(head.version + 1 if head else 0, 10_000):
    files = {f"{name}.bin": store.put_bytes(f"{version} {name} ".encode() * 20_000) for name in "abc"}
    store.commit(manifest(store, version, files))
"""


def kill_publishers(store: PolicyStore, folder: Path, num_kills: int) -> None:
    delay = random.Random(7)
    known = -1
    for _ in range(num_kills):
        command = [sys.executable, "-c", PUBLISHER, str(folder), store.campaign]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout and child.stdout.readline() == b"ready\n"
            time.sleep(delay.uniform(0.0, 0.2))
            child.send_signal(signal.SIGKILL)
        head = store.head()
        if head is None:
            assert known == -1
            continue
        for version in range(max(known, 0), head.version + 1):
            pulled = store.pull(version)
            for name in "abc":
                expected = f"{version} {name} ".encode() * 20_000
                assert (pulled / f"{name}.bin").read_bytes() == expected
        assert head.version >= known
        known = head.version
    assert known >= num_kills / 2, "the publishers were killed before they published; the test shows nothing"
    assert [entry.version for entry in store.history()] == list(range(known + 1))


def test_a_killed_publisher_leaves_whole_versions_only(policy_store: PolicyStore, store_folder: Path) -> None:
    kill_publishers(policy_store, store_folder, 5)


@pytest.mark.slow
def test_many_killed_publishers_leave_whole_versions_only(
    policy_store: PolicyStore, store_folder: Path
) -> None:
    kill_publishers(policy_store, store_folder, 40)


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


def test_put_folder_names_files_by_their_relative_path(policy_store: PolicyStore, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.bin").write_bytes(b"b")
    (tmp_path / "c.bin").write_bytes(b"c")
    files = policy_store.put_folder(tmp_path)
    assert {name: blob.sha256 for name, blob in files.items()} == {
        name: hashlib.sha256(name[-5:-4].encode()).hexdigest() for name in ("a/b.bin", "c.bin")
    }


def test_a_file_that_changes_while_it_is_stored_is_refused_and_leaves_no_wrong_blob(
    policy_store: PolicyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"before")
    upload = policy_store._bucket.upload
    with monkeypatch.context() as patch:
        patch.setattr(
            policy_store._bucket, "upload", lambda path, key: (path.write_bytes(b"after!"), upload(path, key))
        )
        with pytest.raises(ValueError, match="must not change while it is stored"):
            policy_store.put_file(path)
    path.write_bytes(b"before")
    blob = policy_store.put_file(path)
    policy_store.commit(manifest(policy_store, 0, {"weights.bin": blob}))
    assert (policy_store.pull(0) / "weights.bin").read_bytes() == b"before"


def test_a_blob_that_somebody_overwrites_is_still_read_as_published(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 1)[0]
    blob = policy_store.manifest(published).files["weights.bin"]
    policy_store._bucket.put(blob.key, b"weights X")
    assert (policy_store.pull(published) / "weights.bin").read_bytes() == b"weights 0"
    assert policy_store.put_bytes(b"weights 0").version_id != blob.version_id  # not reused: sent again


@pytest.mark.parametrize("content", [b"other of this", b"short"])
def test_a_damaged_blob_is_named(policy_store: PolicyStore, content: bytes) -> None:
    wrong = policy_store.put_bytes(content)
    digest = hashlib.sha256(b"right content").hexdigest()
    blob = Blob(sha256=digest, size=13, key=wrong.key, version_id=wrong.version_id)
    policy_store.commit(manifest(policy_store, 0, {"weights.bin": blob}))
    with pytest.raises(CorruptArtifact, match=rf"file weights\.bin must have .* from {blob.key}"):
        policy_store.pull(0)


def test_a_missing_blob_is_named(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 1)[0]
    blob = policy_store.manifest(published).files["weights.bin"]
    client = policy_store._bucket._client
    client.delete_object(Bucket=EMBEDDED_BUCKET, Key=blob.key, VersionId=blob.version_id)
    with pytest.raises(CorruptArtifact, match=rf"file weights\.bin must exist as {blob.key}"):
        policy_store.pull(published)


@pytest.mark.parametrize("damage", [b"weights X", b"we"])
def test_a_damaged_cache_is_named_and_heals(policy_store: PolicyStore, damage: bytes) -> None:
    published = publish(policy_store, 1)[0]
    blob = policy_store.manifest(published).files["weights.bin"]
    path = policy_store.pull(published) / "weights.bin"
    path.chmod(0o644)
    path.write_bytes(damage)  # a hard link: the cache has the damage too
    with pytest.raises(
        CorruptArtifact, match=rf"weights\.bin \({blob.key}\) must be intact in the local cache"
    ):
        policy_store.pull(published)
    assert (policy_store.pull(published) / "weights.bin").read_bytes() == b"weights 0"


def test_cached_files_are_read_only_and_shared_by_versions(policy_store: PolicyStore) -> None:
    first, second = publish(policy_store, 2)
    paths = [policy_store.pull(version) / "a" / "t.json" for version in (first, second)]
    assert paths[0] != paths[1]
    assert paths[0].stat().st_ino == paths[1].stat().st_ino
    assert not paths[0].stat().st_mode & 0o222


def test_pull_takes_the_files_that_match_and_no_match_is_an_error(policy_store: PolicyStore) -> None:
    publish(policy_store, 1)
    folder = policy_store.pull(0, pattern="*.json")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["t.json"]
    with pytest.raises(ValueError, match=r"got '\*\.npz'; files: \['a/t\.json', 'weights\.bin'\]"):
        policy_store.pull(0, pattern="*.npz")
    assert (policy_store.pull(0, without="*.json") / "weights.bin").exists()


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


# A store that cannot serve


def open_s3(
    endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch, address: str, **changes: str
) -> PolicyStore:
    """The embedded server as if it were Amazon's: an s3:// address and keys from the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", endpoint.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", changes.pop("secret", endpoint.secret_key))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return open_store(address, "campaign", endpoint_url=changes.pop("url", endpoint.url))


def test_an_s3_address_uses_its_bucket_and_prefix(
    s3_endpoint: S3Endpoint, policy_store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_s3(s3_endpoint, monkeypatch, f"s3://{EMBEDDED_BUCKET}/{policy_store.campaign}/")
    uri = store.put_object("a", b"x")
    assert uri == f"s3://{EMBEDDED_BUCKET}/{policy_store.campaign}/campaign/a"


def test_a_missing_bucket_says_so(s3_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/.* NoSuchBucket .*Create it") as caught:
        open_s3(s3_endpoint, monkeypatch, "s3://no-such-bucket/x")
    assert caught.value.reason == "no_bucket"


def test_a_bucket_without_versioning_is_refused(
    s3_endpoint: S3Endpoint, policy_store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(policy_store._bucket._client.exceptions.BucketAlreadyExists):
        policy_store._bucket._client.create_bucket(Bucket="not-versioned")
    with pytest.raises(ValueError, match=r"must have versioning enabled, got none\. Run: aws s3api put-b"):
        open_s3(s3_endpoint, monkeypatch, "s3://not-versioned/x")


def test_wrong_credentials_say_so(s3_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="Check the AWS credentials") as caught:
        open_s3(s3_endpoint, monkeypatch, f"s3://{EMBEDDED_BUCKET}/x", secret="wrong")
    assert caught.value.reason == "credentials"


def test_an_unreachable_store_says_so(s3_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="Check the address") as caught:
        open_s3(s3_endpoint, monkeypatch, "s3://bucket/x", url="http://127.0.0.1:1")
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_server_without_disk_says_so_after_its_retries(
    policy_store: PolicyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)
    asked = []
    respond(policy_store, "*", lambda request: asked.append(request) or failure(500, "InternalError"))
    (tmp_path / "weights.bin").write_bytes(b"w" * 10)
    with pytest.raises(StoreError, match=r"500 InternalError.* disk is full") as caught:
        if in_parts:
            policy_store._bucket.upload(tmp_path / "weights.bin", "x")
        else:
            policy_store.put_object("x", b"x")
    assert caught.value.reason == "unavailable"
    assert len(asked) == 5


def test_a_conflict_in_flight_is_tried_again_and_not_taken_for_an_existing_version(
    policy_store: PolicyStore,
) -> None:
    answers = [failure(409, "ConditionalRequestConflict"), failure(409, "ConditionalRequestConflict")]
    respond(policy_store, "PutObject", lambda request: answers.pop() if answers else None)
    assert policy_store.commit(manifest(policy_store, 0, {})).version == 0
    assert not answers


def test_a_lost_answer_to_a_commit_is_still_one_success(policy_store: PolicyStore) -> None:
    """The manifest was written and the answer got lost; botocore's second request meets the first one's 412."""
    ready = manifest(policy_store, 0, {})
    key = f"{policy_store.campaign}/versions/000000000000/manifest.json"
    policy_store._bucket.put(key, ready.model_dump_json().encode())
    assert policy_store.commit(ready) == policy_store.head()


def test_a_crashed_embedded_server_comes_back_with_its_data(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), "campaign")
    published = publish(store, 3)
    guard = json.loads((tmp_path / "seaweedfs" / "server.json").read_text())["guard"]
    os.kill(guard, signal.SIGKILL)  # the kernel kills the server with it
    assert store.head() == published[2]
    assert [entry.version for entry in store.history()] == [0, 1, 2]
    assert (store.pull(1) / "weights.bin").read_bytes() == b"weights 1"
    store.commit(manifest(store, 3, {}))


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
