"""Policies on a real S3 server when something breaks: kills, races, damage, a server that cannot serve.

What these tests cannot see: Amazon S3 itself (its 409 answer is imitated), and a lost disk.
"""

import base64
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3
from botocore.exceptions import ClientError
from publishing import failure, manifest, publish, respond

from tasks.artifacts.content import BytesContent, digests_of
from tasks.artifacts.download import make_parts
from tasks.artifacts.errors import CorruptArtifact, StoreError, VersionConflict
from tasks.artifacts.manifest import Blob
from tasks.artifacts.sending import send
from tasks.artifacts.store import EMBEDDED_BUCKET, PolicyStore, open_store
from tasks.embedded.seaweed import S3Endpoint

ROOT = Path(__file__).resolve().parent.parent


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
    found = store.bucket.get(f"{store.campaign}/latest.json")
    assert found
    return json.loads(found[0])["version"]


def test_head_is_found_when_the_hint_is_lost(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 3)
    policy_store.bucket.delete(f"{policy_store.campaign}/latest.json")
    assert policy_store.head() == published[2]
    assert hint(policy_store) == 2


def test_the_hint_never_goes_back(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 3)
    policy_store._advance(1)
    policy_store.commit(policy_store.manifest(1))  # a late retry of an old publication
    assert hint(policy_store) == 2
    assert policy_store.head() == published[2]


PUBLISHER = """
import os, sys
sys.path.insert(0, os.path.join(os.getcwd(), "tests"))
from tasks.artifacts.store import open_store
from publishing import manifest
store = open_store(sys.argv[1], sys.argv[2])
head = store.head()
print("ready", flush=True)
for version in range(head.version + 1 if head else 0, 10_000):
    files = {f"{name}.bin": store.put_bytes(f"{version} {name} ".encode() * 20_000) for name in "abc"}
    store.commit(manifest(store, version, files))
    print("published", flush=True)
"""


def kill_publishers(store: PolicyStore, folder: Path, num_kills: int) -> None:
    delay = random.Random(7)
    known = -1
    for _ in range(num_kills):
        command = [sys.executable, "-c", PUBLISHER, str(folder), store.campaign]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout and child.stdout.readline() == b"ready\n"
            child.stdout.readline()  # it publishes: a busy machine must not kill it before
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


@pytest.mark.parametrize("size", [6, (17 << 20)])
def test_a_file_that_changes_while_it_is_stored_is_refused_and_leaves_no_wrong_blob(
    policy_store: PolicyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The server itself refuses one request whose body is not what was announced; of parts it sees each."""
    path, before = tmp_path / "weights.bin", os.urandom(size)
    path.write_bytes(before)
    upload = policy_store.bucket.upload
    with monkeypatch.context() as patch:
        patch.setattr(policy_store.bucket, "upload", lambda *a: (path.write_bytes(bytes(size)), upload(*a)))
        with pytest.raises(ValueError, match="must not change while it is stored"):
            policy_store.put_file(path)
    path.write_bytes(before)
    blob = policy_store.put_file(path)
    policy_store.commit(manifest(policy_store, 0, {"weights.bin": blob}))
    assert (policy_store.pull(0) / "weights.bin").read_bytes() == before


def test_a_body_that_is_not_what_its_signed_checksum_says_is_refused(policy_store: PolicyStore) -> None:
    """Bodies are not signed themselves: the checksum's header is, and the server compares."""
    known = digests_of(BytesContent(b"announced"))
    with pytest.raises(ClientError, match="BadDigest"):
        policy_store.bucket.upload(BytesContent(b"something"), "x", known)
    client, where = policy_store.bucket._client, {"Bucket": EMBEDDED_BUCKET, "Key": "y"}
    upload = client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")["UploadId"]
    checksum = base64.b64encode(bytes.fromhex(known.sha256)).decode()
    with pytest.raises(ClientError, match="BadDigest"):
        client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"something", ChecksumSHA256=checksum)
    seen = []
    client.meta.events.register("before-send.s3.PutObject", lambda request, **_: seen.append(request))
    policy_store.bucket.upload(BytesContent(b"announced"), "x", known)
    headers = seen[-1].headers
    assert headers["X-Amz-Content-SHA256"] in (b"UNSIGNED-PAYLOAD", "UNSIGNED-PAYLOAD")
    signed = str(headers["Authorization"]).split("SignedHeaders=")[1].split(",")[0]
    assert "x-amz-checksum-sha256" in signed.split(";")


class Torn(BytesContent):
    """Cannot be read from its second part on."""

    reads = 0

    def read(self, start: int, stop: int) -> memoryview:
        self.reads += 1
        time.sleep(0.02)
        if start:
            raise OSError("torn")
        return super().read(start, stop)


def test_a_part_that_fails_ends_the_others_and_leaves_no_upload(
    policy_store: PolicyStore, tmp_path: Path
) -> None:
    """On both ways, before the parts that nobody has begun."""
    content, client = Torn(bytes(200 << 10)), policy_store.bucket._client
    known = digests_of(BytesContent(bytes(200 << 10)))
    with pytest.raises(OSError, match="torn"):
        send(client, EMBEDDED_BUCKET, "torn", content, known, part_bytes=1 << 10, num_threads=2)
    assert content.reads < 50
    listed = client.list_multipart_uploads(Bucket=EMBEDDED_BUCKET).get("Uploads", [])
    assert "torn" not in [upload["Key"] for upload in listed]
    received = Torn(bytes(200 << 10))

    def receive(start: int, stop: int) -> None:
        received.read(start, stop)

    ranges = [(start, start + 1024) for start in range(0, received.size, 1024)]
    with (tmp_path / "target").open("w+b") as file, pytest.raises(OSError, match="torn"):
        file.truncate(received.size)
        make_parts(file.fileno(), ranges, receive, num_threads=2, found=hashlib.sha256())
    assert received.reads < 50


@pytest.mark.parametrize("content", [b"other of this", b"short"])
@pytest.mark.parametrize("is_new", [False, True], ids=["SHA-256 alone", "BLAKE3 beside it"])
def test_a_damaged_blob_is_named(policy_store: PolicyStore, content: bytes, is_new: bool) -> None:
    wrong, right = policy_store.put_bytes(content), digests_of(BytesContent(b"right content"))
    assert right.sha256 == hashlib.sha256(b"right content").hexdigest()
    fields = {"size": 13, "key": wrong.key, "version_id": wrong.version_id}
    blob = Blob(sha256=right.sha256, blake3=right.blake3 if is_new else "", **fields)
    policy_store.commit(manifest(policy_store, 0, {"weights.bin": blob}))
    with pytest.raises(CorruptArtifact, match=rf"file weights\.bin must have .* from {blob.key}"):
        policy_store.pull(0)


def test_versions_of_earlier_releases_are_read_and_verified(
    policy_store: PolicyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their manifests have no BLAKE3; the same content is the same file and the same version."""
    blob = policy_store.put_bytes(b"weights 0")
    assert blob.blake3 == blake3(b"weights 0").hexdigest()
    old = Blob.model_validate(blob.model_dump(exclude={"blake3"}))
    before, now = (manifest(policy_store, 0, {"weights.bin": file}) for file in (old, blob))
    assert policy_store.commit(before) == policy_store.commit(now)
    path = policy_store.pull(0) / "weights.bin"
    assert path.read_bytes() == b"weights 0"
    path.chmod(0o644)
    path.write_bytes(b"weights X")
    assert (policy_store.pull(0) / "weights.bin").read_bytes() == b"weights 0"
    assert re.search(f"damaged in .* sha256 [0-9a-f]+ instead of {blob.sha256}", capsys.readouterr().out)


def test_a_large_files_digests_are_those_of_its_bytes(tmp_path: Path) -> None:
    path, content = tmp_path / "file", os.urandom((3 << 20) + 5)
    path.write_bytes(content)
    assert digests_of(path) == digests_of(BytesContent(content))
    assert digests_of(path).blake3 == blake3(content).hexdigest()
    assert digests_of(BytesContent(b"")).blake3.startswith(
        "af1349b9f5f9a1a6"
    )  # the paper's value for no input


def test_a_missing_blob_is_named(policy_store: PolicyStore) -> None:
    published = publish(policy_store, 1)[0]
    blob = policy_store.manifest(published).files["weights.bin"]
    client = policy_store.bucket._client
    client.delete_object(Bucket=EMBEDDED_BUCKET, Key=blob.key, VersionId=blob.version_id)
    with pytest.raises(CorruptArtifact, match=rf"file weights\.bin must exist as {blob.key}"):
        policy_store.pull(published)


@pytest.mark.parametrize("damage", [b"weights X", b"we", b""])
def test_a_damaged_cache_heals_and_says_so(
    policy_store: PolicyStore, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a power cut, which empties many files: each ended one run more."""
    published = publish(policy_store, 1)[0]
    path = policy_store.pull(published) / "weights.bin"
    path.chmod(0o644)
    path.write_bytes(damage)  # a hard link: the cache has the damage too
    assert (policy_store.pull(published) / "weights.bin").read_bytes() == b"weights 0"
    assert re.search(r"weights\.bin was damaged in .*: fetched again", capsys.readouterr().out)


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
    with contextlib.suppress(policy_store.bucket._client.exceptions.BucketAlreadyExists):
        policy_store.bucket._client.create_bucket(Bucket="not-versioned")
    with pytest.raises(ValueError, match=r"must have versioning enabled, got none\. Run: aws s3api put-b"):
        open_s3(s3_endpoint, monkeypatch, "s3://not-versioned/x")


def test_wrong_credentials_say_so(s3_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="Check the AWS credentials") as caught:
        open_s3(s3_endpoint, monkeypatch, f"s3://{EMBEDDED_BUCKET}/x", secret="wrong")
    assert caught.value.reason == "credentials"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those between S3's retries, which are not made; every other module sleeps as it does."""
    made: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=made.append))
    return made


@pytest.mark.usefixtures("pauses")
def test_an_unreachable_store_says_so(s3_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="Check the address") as caught:
        open_s3(s3_endpoint, monkeypatch, "s3://bucket/x", url="http://127.0.0.1:1")
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_server_without_disk_says_so_after_its_retries(
    policy_store: PolicyStore, pauses: list[float], in_parts: bool
) -> None:
    asked = []
    respond(policy_store, "*", lambda request: asked.append(request) or failure(500, "InternalError"))
    with pytest.raises(StoreError, match=r"500 InternalError.* disk is full") as caught:
        if in_parts:
            content = BytesContent(b"w" * 10)
            policy_store.bucket.upload(content, "x", digests_of(content))
        else:
            policy_store.put_object("x", b"x")
    assert caught.value.reason == "unavailable"
    assert len(asked) == 5 and len(pauses) == 4
    start = time.monotonic()
    time.sleep(0.01)
    assert time.monotonic() > start + 0.005 and len(pauses) == 4


def test_a_conflict_in_flight_is_tried_again_and_not_taken_for_an_existing_version(
    policy_store: PolicyStore,
) -> None:
    answers = [failure(409, "ConditionalRequestConflict"), failure(409, "ConditionalRequestConflict")]
    respond(policy_store, "PutObject", lambda request: answers.pop() if answers else None)
    assert policy_store.commit(manifest(policy_store, 0, {})).version == 0
    assert not answers


def test_a_lost_answer_to_a_commit_is_still_one_success(policy_store: PolicyStore) -> None:
    """The manifest was written, the answer got lost; botocore's second request meets the first one's 412."""
    ready = manifest(policy_store, 0, {})
    key = f"{policy_store.campaign}/versions/000000000000/manifest.json"
    policy_store.bucket.put(key, ready.model_dump_json().encode())
    assert policy_store.commit(ready) == policy_store.head()


@pytest.mark.usefixtures("leave_servers", "pauses")
def test_a_crashed_embedded_server_comes_back_with_its_data(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), "campaign")
    published = publish(store, 3)
    guard = json.loads((tmp_path / "seaweedfs" / "server.json").read_text())["guard"]
    os.kill(guard, signal.SIGKILL)  # the kernel kills the server with it
    assert store.head() == published[2]
    assert [entry.version for entry in store.history()] == [0, 1, 2]
    assert (store.pull(1) / "weights.bin").read_bytes() == b"weights 1"
    store.commit(manifest(store, 3, {}))
