"""Publishing and reading through a real proxy that breaks requests, before the real S3 server.

Whatever breaks: a version is whole or absent, what went through needs no repair, what did not is named, and
the same call again completes it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from proxy import Fault, Proxy
from publishing import manifest

from tasks.artifacts.client import MAX_ATTEMPTS
from tasks.artifacts.errors import CorruptArtifact, StoreError
from tasks.artifacts.store import EMBEDDED_BUCKET, PolicyStore, open_store

MIB = 1 << 20


@pytest.fixture
def proxy(s3_endpoint) -> Iterator[Proxy]:
    server = Proxy(s3_endpoint.url)
    yield server
    server.close()


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """What the store would have waited, in seconds; the names are its and botocore's own, so that the proxy
    does wait."""
    waited: list[float] = []
    monkeypatch.setattr("tasks.artifacts.client.time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))
    return waited


@pytest.fixture
def store(proxy, s3_endpoint, policy_store, tmp_path, monkeypatch, waits) -> PolicyStore:
    """A store behind the proxy; ``policy_store`` is the same one beside it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_endpoint.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_endpoint.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return open_store(
        f"s3://{EMBEDDED_BUCKET}", policy_store.campaign, endpoint_url=proxy.url, cache=tmp_path / "behind"
    )


@pytest.fixture
def large(tmp_path) -> Path:
    """Three parts."""
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(33 * MIB))
    return path


def publish_large(store: PolicyStore, path: Path) -> None:
    store.commit(manifest(store, 0, {path.name: store.put_file(path)}))


def require_whole(policy_store: PolicyStore, path: Path) -> None:
    head = policy_store.head()
    assert head and head.version == 0
    assert (policy_store.pull(0) / path.name).read_bytes() == path.read_bytes()


TRANSIENT = {
    "5xx on every second part": Fault(kind="error", method="PUT", path="partNumber", times=2),
    "503 at completion": Fault(kind="error", method="POST", path="uploadId", times=2),
    "throttled everywhere": Fault(kind="error", status=503, code="SlowDown", times=3),
    "reset inside a part": Fault(kind="reset", method="PUT", path="partNumber=2", times=2),
    "reset inside the manifest": Fault(kind="reset", method="PUT", path="manifest.json", times=2),
    "answer to the manifest lost": Fault(kind="lost", method="PUT", path="manifest.json", times=1),
    "answer to the completion lost": Fault(kind="lost", method="POST", path="uploadId", times=1),
    "slow parts": Fault(kind="slow", method="PUT", seconds=0.3),
}


@pytest.mark.parametrize("fault", TRANSIENT.values(), ids=TRANSIENT)
def test_a_publication_goes_through_what_passes(store, policy_store, proxy, large, fault):
    fault.hits = 0
    proxy.faults.append(fault)
    publish_large(store, large)
    assert fault.hits > 0
    require_whole(policy_store, large)


READING = {
    "5xx": Fault(kind="error", method="GET", path="blobs", times=2),
    "cut": Fault(kind="cut", method="GET", path="blobs", times=2),
    "reset": Fault(kind="reset", method="GET", path="blobs", times=2),
    "slow": Fault(kind="slow", method="GET", path="blobs", seconds=0.2),
    "manifest cut": Fault(kind="cut", method="GET", path="manifest.json", times=1),
}


@pytest.mark.parametrize("fault", READING.values(), ids=READING)
def test_a_reader_goes_through_what_passes_and_verifies(store, policy_store, proxy, large, fault):
    fault.hits = 0
    publish_large(policy_store, large)
    proxy.faults.append(fault)
    assert (store.pull(0) / large.name).read_bytes() == large.read_bytes()
    assert fault.hits > 0


def test_a_part_that_is_cut_is_asked_for_again_and_not_the_whole_file(store, policy_store, proxy, large):
    publish_large(policy_store, large)
    proxy.faults.append(Fault(kind="cut", method="GET", path="blobs", times=1, after=1))
    assert (store.pull(0) / large.name).read_bytes() == large.read_bytes()
    assert proxy.count(lambda method, path: method == "GET" and "blobs" in path) == 4  # three, one twice


@pytest.mark.parametrize("size", [0, 5 * MIB, 33 * MIB - 1, 33 * MIB + 1])
def test_an_object_of_another_size_is_named(policy_store, large, tmp_path, size):
    """Three parts are asked for, wherever the object ends."""
    other = tmp_path / "other"
    other.write_bytes(os.urandom(size))
    right, wrong = policy_store.put_file(large), policy_store.put_file(other)
    swapped = right.model_copy(update={"key": wrong.key, "version_id": wrong.version_id})
    policy_store.commit(manifest(policy_store, 0, {large.name: swapped}))
    with pytest.raises(CorruptArtifact, match=rf"got {size} bytes instead of {33 * MIB} from {wrong.key}"):
        policy_store.pull(0)


@pytest.mark.parametrize("path", ["manifest.json", "partNumber=2", "blobs"])
def test_a_minute_in_which_s3_asks_for_fewer_requests_ends_no_run(
    store, policy_store, proxy, large, path, waits
):
    """Five tries within eight seconds gave up; S3 asks so while it spreads a prefix over more servers."""
    writing = Fault(kind="error", path=path, times=5 * MAX_ATTEMPTS)
    reading = Fault(kind="error", method="GET", path="blobs", times=2 * MAX_ATTEMPTS)
    proxy.faults.append(writing)
    publish_large(store, large)
    assert writing.hits > writing.times and sum(waits) > 45, waits
    require_whole(policy_store, large)
    proxy.faults.append(reading)
    assert (store.pull(0) / large.name).read_bytes() == large.read_bytes()
    assert reading.hits > reading.times


LASTING = {
    "credentials expire mid-upload": (
        Fault(kind="error", method="PUT", path="partNumber", status=400, code="ExpiredToken", after=1),
        "credentials",
    ),
    "rights are taken mid-upload": (
        Fault(kind="error", method="POST", path="uploadId", status=403, code="AccessDenied"),
        "credentials",
    ),
    "the service is down": (Fault(kind="error", status=500, code="InternalError"), "unavailable"),
    "every part is reset": (Fault(kind="reset", method="PUT", path="partNumber"), "unreachable"),
    "the manifest is refused": (
        Fault(kind="error", method="PUT", path="manifest.json", status=503, code="SlowDown"),
        "unavailable",
    ),
}


@pytest.mark.parametrize(("fault", "reason"), LASTING.values(), ids=LASTING)
def test_what_lasts_is_named_publishes_nothing_and_the_same_call_completes_it(
    store, policy_store, proxy, large, fault, reason
):
    fault.hits = 0
    proxy.faults.append(fault)
    with pytest.raises(StoreError) as caught:
        publish_large(store, large)
    assert caught.value.reason == reason, caught.value
    assert policy_store.head() is None
    proxy.clear()
    publish_large(store, large)
    require_whole(policy_store, large)


def test_a_clock_that_is_off_is_named(store, policy_store, monkeypatch):
    """The server itself refuses what was signed an hour ago."""
    past = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - datetime.timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: past)
        with pytest.raises(StoreError, match="Set this machine's clock") as caught:
            store.put_object("a", b"x")
    assert caught.value.reason == "clock"
    assert policy_store.find_object("a") is None


def test_a_listing_that_breaks_in_the_middle_is_no_shorter_list(store, policy_store, proxy):
    """An exhausted page iterator once made a campaign with versions look empty."""
    for version in range(3):
        policy_store.commit(manifest(policy_store, version, {}))
    proxy.faults.append(Fault(kind="cut", method="GET", path="list-type", times=1))
    assert [m.version for m in store.history()] == [0, 1, 2]
    proxy.faults[:] = [Fault(kind="error", method="GET", path="list-type")]
    with pytest.raises(StoreError):
        store.history()


def test_a_part_is_sent_again_and_not_the_whole_file(store, policy_store, proxy, large):
    proxy.faults.append(Fault(kind="reset", method="PUT", path="partNumber=2", times=1))
    publish_large(store, large)
    parts = proxy.count(lambda method, path: method == "PUT" and "partNumber" in path)
    assert parts == 4  # three, one of them twice
    require_whole(policy_store, large)
