"""Files by content on this machine's disk, shared by all versions, campaigns and processes.

    {cache}/sha256/ab/abcd...               one file a content, read-only, verified on every use and made
                                            again where it is damaged
    {cache}/{campaign}/{version}-{digest}   folders of hard links, as ``PolicyStore.pull`` returns them
    {cache}/leases/...                      locks that say which folders are read at the moment

One process makes a file, under its lock; the others wait for it. A file that is stored as patches is made
from the newest content of its chain that is here: a reader of version v fetches only what changed in v + 1,
one that has nothing fetches the full file and every patch; where the file is stored whole as well, the cache
takes the way that is faster by its own measurements (``rates.py``). What is made is verified whole, whatever
it was made from. ``limit_bytes`` bounds the contents: the folder that was not used for the longest time goes
first, and none that is leased; leases are locks, so a killed reader holds none. A disk that is full is
handled the same way, then named.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from tasks.artifacts.client import Bucket
from tasks.artifacts.content import Hash, difference, digests_of, hashed, new_hash
from tasks.artifacts.download import WrongSize
from tasks.artifacts.errors import CacheFull, CorruptArtifact
from tasks.artifacts.manifest import Blob, PatchedBlob, StoredFile
from tasks.artifacts.patch import apply_patches
from tasks.artifacts.rates import Choice, Fetch, Rates
from tasks.say import say


@dataclass(kw_only=True, slots=True)
class Received:
    """What a cache fetched from the store."""

    full_bytes: int = 0
    patch_bytes: int = 0
    full_files: int = 0
    patches: int = 0


class Cache:
    def __init__(
        self,
        folder: Path,
        bucket: Bucket,
        *,
        limit_bytes: int = 0,
        fetch: Fetch = "measured",
        num_threads: int = 4,
    ) -> None:
        self.folder = folder.expanduser().resolve()
        self.received = Received()
        of_store = hashlib.sha256(bucket.address.encode()).hexdigest()[:16]
        self.rates = Rates(self.folder / "rates" / f"{of_store}.json")
        self._bucket = bucket
        self._fetch_by: Fetch = fetch
        self._limit_bytes = limit_bytes
        self._num_threads = num_threads
        self._counting = threading.Lock()
        self._leases: dict[Path, int] = {}

    def link(self, name: str, file: StoredFile, folder: Path) -> None:
        """Put ``folder/name`` in place as a hard link to the verified, cached content."""
        with self._verified(name, file) as path:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # one lock per content, but two names can share it, and a link to a removed corrupt file must not
            # stay
            temporary = target.with_name(f"{target.name}.{file.sha256[:12]}.{os.getpid()}.new")
            temporary.unlink(missing_ok=True)
            os.link(path, temporary)
            temporary.replace(target)
            temporary.unlink(missing_ok=True)  # rename does nothing when both names are the same file already

    def read(self, name: str, file: StoredFile) -> bytes:
        """A small file's verified content."""
        with self._verified(name, file) as path:
            return path.read_bytes()

    def lease(self, folder: Path) -> None:
        """Keep a version's folder from eviction until ``release``, or this process's end."""
        with self._counting:
            if folder not in self._leases:
                self._leases[folder] = _locked(self._lease_path(folder), fcntl.LOCK_SH)
        os.utime(self._lease_path(folder))  # used now

    def release(self, folder: Path) -> None:
        with self._counting:
            fd = self._leases.pop(folder, None)
        if fd is not None:
            os.close(fd)

    def used_bytes(self) -> int:
        """Disk space of the contents."""
        return sum(status.st_blocks * 512 for _, status in self._contents())

    # Below: making a content, and making room for it

    @contextlib.contextmanager
    def _verified(self, name: str, file: StoredFile) -> Iterator[Path]:
        """The content's path, right and locked."""
        path = self._path(file.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = _locked(path.with_suffix(".lock"), fcntl.LOCK_EX)
        try:
            if path.exists() and (wrong := _difference(path, file)):
                _give_up(name, path, wrong)
            if not path.exists():
                self._make(name, file, path)
            yield path
        finally:
            os.close(fd)

    def _path(self, digest: str) -> Path:
        return self.folder / "sha256" / digest[:2] / digest

    def _make(self, name: str, file: StoredFile, path: Path) -> None:
        self._make_room(file.size)
        partial = path.with_suffix(".partial")  # left by a killed process: overwritten, the lock is ours
        try:
            self._fill(name, file, partial)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            partial.unlink(missing_ok=True)
            self._make_room(0, everything=True)
            try:
                self._fill(name, file, partial)
            except OSError as again:
                partial.unlink(missing_ok=True)
                raise CacheFull(
                    f"the cache in {self.folder} must have room for file {name} of {file.size:,} bytes, got "
                    f"{again.strerror} after everything unused was removed. Free the disk, or point "
                    "checkpoint.cache_folder at another one."
                ) from again
        partial.chmod(0o444)
        partial.replace(path)

    def _fill(self, name: str, file: StoredFile, partial: Path) -> None:
        whole = file if isinstance(file, Blob) else self._chosen(name, file)
        if whole is None:
            assert isinstance(file, PatchedBlob)
            return self._rebuild(name, file, partial)
        self._fetch(name, whole, partial)
        with self._counting:
            self.received.full_bytes += file.size
            self.received.full_files += 1

    def _chosen(self, name: str, file: PatchedBlob) -> Blob | None:
        """The file's whole object, if that is there and the way to take; said, since there was a choice."""
        if file.full.sha256 == file.sha256:  # weights that came back: it would wait for its own lock
            return file.full
        if file.whole is None:
            return None
        contents = [file.full.sha256, *(patch.sha256 for patch in file.patches[:-1])]
        held = next((i for i in reversed(range(len(contents))) if self._path(contents[i]).exists()), None)
        if held is None and self._fetch_by != "patches":
            choice = Choice(is_whole=True, reason="none of its parents is here")
        else:
            patches = file.patches[held or 0 :]
            choice = self.rates.choose(
                self._fetch_by,
                size=file.size,
                patch_bytes=sum(patch.blob.size for patch in patches),
                num_patches=len(patches),
            )
        how = "whole" if choice.is_whole else "as patches"
        say("fetch", f"{name}, {file.size / 1e6:,.1f} MB, {how}: {choice.reason}")
        return file.whole if choice.is_whole else None

    def _fetch(self, name: str, blob: Blob, partial: Path) -> None:
        """Fetch an object and verify it. If its version is gone, another of the key will do: the content
        names the key, and two that stored it at once left an old one, which the bucket's lifecycle rule
        removes."""
        start = time.monotonic()
        try:
            tries = (
                self._bucket.download(blob.key, v, partial, size=blob.size, new_hash=lambda: new_hash(blob))
                for v in (blob.version_id, "")
            )
            found = next((found for found in tries if found is not None), None)
        except WrongSize as error:
            wrong = f"{error} instead of {blob.size}"
        else:
            if found is None:
                raise CorruptArtifact(
                    f"file {name} must exist as {blob.key}, version {blob.version_id}, got none."
                )
            wrong = difference(found, blob)
            self.rates.transferred(blob.size, time.monotonic() - start)
        if wrong:
            partial.unlink(missing_ok=True)
            raise CorruptArtifact(
                f"file {name} must have the published content, got {wrong} from {blob.key}, version "
                f"{blob.version_id}. The stored object is damaged: use another version."
            )

    def _rebuild(self, name: str, file: PatchedBlob, partial: Path) -> None:
        """From the newest content of the chain that is here. One that proves damaged is given up, and the
        next older one taken; the whole file, which is verified when it comes, at the latest."""
        contents = [file.full.sha256, *(patch.sha256 for patch in file.patches)]
        for tries_left in reversed(range(len(contents))):
            first, base = self._base(name, file, contents)
            with base:
                try:
                    return self._rebuild_from(first, base, name, file, partial)
                except CorruptArtifact as error:
                    base.seek(0)  # what was read, whatever lies at its path by now
                    is_intact = hashlib.file_digest(base, "sha256").hexdigest() == contents[first]
                    if is_intact or not tries_left:
                        text = f"file {name} must be rebuilt to its published content, got: {error}"
                        raise CorruptArtifact(text) from error
            self._give_up_base(name, contents[first])

    def _give_up_base(self, name: str, digest: str) -> None:
        """Unless another process did, or has made it again. Contents are locked from newer to older ones."""
        path = self._path(digest)
        fd = _locked(path.with_suffix(".lock"), fcntl.LOCK_EX)
        try:
            if path.exists() and digests_of(path).sha256 != digest:
                _give_up(name, path, "other content than its name's")
        finally:
            os.close(fd)

    def _rebuild_from(self, first: int, base: BinaryIO, name: str, file: PatchedBlob, partial: Path) -> None:
        fetched: list[Path] = []
        try:
            for number, patch in enumerate(file.patches[first:]):
                fetched.append(partial.with_suffix(f".{number}.patch"))
                self._fetch(f"{name} (patch)", patch.blob, fetched[-1])
                with self._counting:
                    self.received.patch_bytes += patch.blob.size
                    self.received.patches += 1
            found, start = new_hash(file), time.monotonic()
            self._apply(fetched, base, partial, found)
            self.rates.applied(len(fetched) * file.size, time.monotonic() - start)
            if wrong := difference(found, file):
                self._apply(fetched, base, partial, None)  # names the tensor, if a patch is at fault
                raise CorruptArtifact(f"it has {wrong}")
        finally:
            for path in fetched:
                path.unlink(missing_ok=True)

    def _apply(self, patches: list[Path], base: BinaryIO, partial: Path, found: Hash | None) -> None:
        apply_patches(
            patches, base, partial, num_threads=self._num_threads, found=found, is_checked=found is None
        )

    def _base(self, name: str, file: PatchedBlob, contents: list[str]) -> tuple[int, BufferedReader]:
        """Which content of the chain a file is made from, and that content, open: it may be evicted now."""
        for number in reversed(range(len(contents) - 1)):
            with contextlib.suppress(FileNotFoundError):
                path = self._path(contents[number])
                base = path.open("rb")
                os.utime(path)
                return number, base
        with self._verified(name, file.full) as full:
            return 0, full.open("rb")

    def _contents(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.glob("sha256/??/*"):
            if not path.suffix:
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat()

    def _lease_path(self, folder: Path) -> Path:
        return self.folder / "leases" / folder.relative_to(self.folder)

    def _make_room(self, size: int, *, everything: bool = False) -> None:
        """Remove contents of no folder, then unused folders, the longest unused first, until it fits."""
        if not self._limit_bytes and not everything:
            return
        fd = _locked(self.folder / "eviction.lock", fcntl.LOCK_EX)
        try:

            def fits() -> bool:
                return not everything and self.used_bytes() + size <= self._limit_bytes

            def remove_orphans() -> None:
                """A content in a folder has two names; one that is being linked has its lock taken."""
                unused = [
                    (status.st_mtime, path) for path, status in self._contents() if status.st_nlink == 1
                ]
                for _, path in sorted(unused):
                    if fits():
                        return
                    _remove_if_free(path)

            remove_orphans()
            leases = [path for path in self.folder.glob("leases/*/*") if path.is_file()]
            for lease in sorted(leases, key=lambda path: path.stat().st_mtime):
                if fits():
                    return
                _remove_unless_leased(lease, self.folder / lease.relative_to(self.folder / "leases"))
                remove_orphans()
        finally:
            os.close(fd)
        if not everything and self.used_bytes() + size > self._limit_bytes:
            raise CacheFull(
                f"the cache in {self.folder} must hold {size:,} more bytes within its limit of "
                f"{self._limit_bytes:,}, got {self.used_bytes():,} in use. Raise checkpoint.cache_gb."
            )


def _give_up(name: str, path: Path, wrong: str) -> None:
    """A power cut leaves empty files, a failing disk wrong ones; what is published is still in the store."""
    path.unlink(missing_ok=True)
    say("cache", f"{name} was damaged in {path}, {wrong}: fetched again. If it comes back, replace the disk.")


def _difference(path: Path, file: StoredFile) -> str:
    """What is wrong with what lies at the path; empty if nothing is."""
    size = path.stat().st_size
    if size != file.size:
        return f"{size} bytes instead of {file.size}"
    return difference(hashed(path, file), file)


def _locked(path: Path, how: int) -> int:
    """An open file that holds the lock until it is closed, or its process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_unless_leased(lease: Path, folder: Path) -> None:
    try:
        fd = _locked(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)  # its lock stays: somebody may be waiting for it
    finally:
        os.close(fd)


def _remove_if_free(path: Path) -> None:
    try:
        fd = _locked(path.with_suffix(".lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    try:
        if path.stat().st_nlink == 1:
            path.unlink()
    except FileNotFoundError:
        pass
    finally:
        os.close(fd)
