"""Files by content on this machine's disk, shared by all versions, campaigns and processes.

One process downloads a blob, under a file lock; the others wait for it. Every use verifies size and digest
again: a cache on local disk outlives the process that checked it. Cached files are read-only, because the
folders given to callers hold hard links to them.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tasks.artifacts.client import Bucket
from tasks.artifacts.errors import CorruptArtifact
from tasks.artifacts.manifest import Blob


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Cache:
    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder = folder.expanduser().resolve()
        self._bucket = bucket

    def link(self, name: str, blob: Blob, folder: Path) -> None:
        """Put ``folder/name`` in place as a hard link to the verified, cached blob."""
        path = self.folder / "sha256" / blob.sha256[:2] / blob.sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_suffix(".lock")):
            if not path.exists():
                self._download(name, blob, path)
            elif wrong := _difference(path, blob):
                path.unlink()  # so that a retry downloads it again
                raise CorruptArtifact(
                    f"file {name} ({blob.key}) must be intact in the local cache, got {wrong} in {path}. "
                    "It was removed from the cache: pull again. If it comes back, the disk is failing."
                )
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # one lock per blob, but two names can share it, and a link to a removed corrupt file must not
            # stay
            temporary = target.with_name(f"{target.name}.{blob.sha256[:12]}.{os.getpid()}.new")
            temporary.unlink(missing_ok=True)
            os.link(path, temporary)
            temporary.replace(target)
            temporary.unlink(missing_ok=True)  # rename does nothing when both names are the same file already

    def _download(self, name: str, blob: Blob, path: Path) -> None:
        partial = path.with_suffix(".partial")  # left by a killed process: overwritten, the lock is ours
        if not self._bucket.download(blob.key, blob.version_id, partial, size=blob.size):
            raise CorruptArtifact(
                f"file {name} must exist as {blob.key}, version {blob.version_id}, got none."
            )
        if wrong := _difference(partial, blob):
            partial.unlink()
            raise CorruptArtifact(
                f"file {name} must have the published content, got {wrong} from {blob.key}, version "
                f"{blob.version_id}. The stored object is damaged: use another version."
            )
        partial.chmod(0o444)
        partial.replace(path)


def _difference(path: Path, blob: Blob) -> str:
    """What is wrong with the file; empty if nothing is."""
    size = path.stat().st_size
    if size != blob.size:
        return f"{size} bytes instead of {blob.size}"
    digest = sha256_of(path)
    return "" if digest == blob.sha256 else f"sha256 {digest} instead of {blob.sha256}"


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
