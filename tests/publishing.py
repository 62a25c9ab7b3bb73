"""Publish small policy versions in tests, and answer S3 requests in the server's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.awsrequest import AWSResponse

from tasks.artifacts.manifest import Blob, Manifest

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore
    from tasks.artifacts.version import PolicyVersion


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


def put_folder(store: PolicyStore, folder: Path) -> dict[str, Blob]:
    """Name -> blob of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): store.put_file(path) for path in paths}


def publish(store: PolicyStore, number: int) -> list[PolicyVersion]:
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
    store.bucket._client.meta.events.register(
        f"before-send.s3.{operation}", lambda request, **_: answer(request)
    )


def failure(status: int, code: str) -> AWSResponse:
    class Raw:
        def stream(self, **_: Any) -> list[bytes]:
            return [f"<Error><Code>{code}</Code><Message>imitated</Message></Error>".encode()]

    return AWSResponse("http://imitated", status, {}, Raw())
