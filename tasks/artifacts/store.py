"""Policy versions of one campaign in S3: immutable, numbered without gaps, whole or absent.

    {prefix}/{campaign}/blobs/sha256/ab/abcd...              files, named by content, shared by versions
    {prefix}/{campaign}/versions/000000000042/manifest.json  written last and only if absent: the commit
    {prefix}/{campaign}/latest.json                          a hint for ``head``, moved by compare-and-swap
    {prefix}/{campaign}/<key>                                other objects of the campaign (batches, reports)

The surprise: ``latest.json`` decides nothing. A publisher killed between manifest and hint has published;
``head`` rolls forward over it. Nothing is deleted here: ``tasks.artifacts.retention`` does that, and a
lifecycle rule on the bucket frees the space (``configs/cluster/s3-lifecycle.json``).
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tasks.artifacts.cache import Cache
from tasks.artifacts.client import Bucket, back_off, make_client
from tasks.artifacts.content import BytesContent, Content, Digests, FileContent, digests_of
from tasks.artifacts.errors import (
    CorruptArtifact,
    NotFound,
    ObjectConflict,
    Retired,
    StoreError,
    VersionConflict,
)
from tasks.artifacts.manifest import Blob, Manifest
from tasks.artifacts.rates import Fetch
from tasks.artifacts.version import PolicyVersion

EMBEDDED_BUCKET = "moe-rl"
_RESERVED = ("blobs/", "versions/", "latest.json")
_CAMPAIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def open_store(
    address: str,
    campaign: str,
    *,
    endpoint_url: str = "",
    port: int = 0,
    cache: Path | None = None,
    cache_bytes: int = 0,
    fetch: Fetch = "measured",
    num_threads: int = 4,
) -> "PolicyStore":
    """The store at ``s3://bucket/prefix``, or in a folder: then an S3 server is found or started there.

    ``cache_bytes`` bounds the local cache; 0 does not. The embedded server runs for as long as this process
    (or another user of the same folder) lives.
    """
    if not _CAMPAIGN.fullmatch(campaign):
        raise ValueError(
            f"campaign must be 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit, "
            f"got {campaign!r}."
        )
    if not address.startswith("s3://"):
        folder = Path(address).expanduser().resolve()
        bucket = _embedded_bucket(address, folder, port=port, num_threads=num_threads)
        folder = cache or folder / "cache"
        local = Cache(folder, bucket, limit_bytes=cache_bytes, fetch=fetch, num_threads=num_threads)
        return PolicyStore(bucket, "", campaign, cache=local, num_threads=num_threads)
    name, _, prefix = address.removeprefix("s3://").partition("/")
    if not name:
        raise ValueError(f"checkpoint.store must be s3://bucket/prefix or a folder, got {address!r}.")

    def connect() -> Any:
        return make_client(endpoint_url=endpoint_url, access_key="", secret_key="", num_threads=num_threads)

    bucket = Bucket(connect, name, num_threads=num_threads)
    bucket.require_versioning()
    folder = cache or Path.home() / ".cache" / "moe-rl"
    local = Cache(folder, bucket, limit_bytes=cache_bytes, fetch=fetch, num_threads=num_threads)
    return PolicyStore(bucket, prefix.strip("/"), campaign, cache=local, num_threads=num_threads)


def _embedded_bucket(address: str, folder: Path, *, port: int, num_threads: int) -> Bucket:
    from tasks.embedded.seaweed import ensure_s3

    if not address or "://" in address:
        raise ValueError(f"checkpoint.store must be s3://bucket/prefix or a folder, got {address!r}.")

    def connect() -> Any:
        endpoint = ensure_s3(folder, port=port)
        return make_client(
            endpoint_url=endpoint.url,
            access_key=endpoint.access_key,
            secret_key=endpoint.secret_key,
            num_threads=num_threads,
        )

    bucket = Bucket(connect, EMBEDDED_BUCKET, num_threads=num_threads)
    bucket.create_versioned()
    return bucket


class PolicyStore:
    """One campaign's versions and objects. Threads may share it; open it anew after a fork."""

    def __init__(self, bucket: Bucket, prefix: str, campaign: str, *, cache: Cache, num_threads: int) -> None:
        self.campaign, self.cache = campaign, cache
        self.bucket = bucket
        self.root = f"{prefix}/{campaign}/" if prefix else f"{campaign}/"
        self.num_threads = num_threads

    # Files and versions

    def put_file(self, path: Path) -> Blob:
        """Store a file under its content's name; not sent again if it is there."""
        with FileContent(path) as content:
            return self.put(content)

    def put_bytes(self, data: bytes) -> Blob:
        """Store bytes under their content's name; not sent again if they are there."""
        return self.put(BytesContent(data))

    def put(self, content: Content, *, known: Digests | None = None) -> Blob:
        """Store a content under its name (that of ``known`` if it is); not sent again if it is there."""
        known = known or digests_of(content)
        blob, key = self._stored_blob(known, content.size), self._blob_key(known.sha256)
        if blob is None:
            try:
                self.bucket.upload(content, key, known)
            except Exception:
                content.require_unchanged()  # the server refuses one part of what changed
                raise
            try:
                content.require_unchanged()
            except Exception:
                self.bucket.delete(key)  # else the next publisher would reuse wrong bytes
                raise
            blob = self._stored_blob(known, content.size)
        else:
            content.require_unchanged()
        return self._present(blob, known)

    def commit(self, manifest: Manifest) -> PolicyVersion:
        """Publish: the manifest is written if its version is free; the same content again is success."""
        if manifest.campaign != self.campaign:
            raise ValueError(f"manifest.campaign must be {self.campaign!r}, got {manifest.campaign!r}.")
        if manifest.version and self.bucket.head(self._manifest_key(manifest.version - 1)) is None:
            raise ValueError(
                f"versions must have no gaps: version {manifest.version} of campaign {self.campaign} needs "
                f"version {manifest.version - 1}, got none. Publish head() + 1."
            )
        key = self._manifest_key(manifest.version)
        data = manifest.model_dump_json().encode()
        version_id = self.bucket.put(key, data, absent=True)
        if version_id is None:
            published, existing = self._read_manifest(manifest.version)
            if existing.content_digest() != manifest.content_digest():
                raise VersionConflict(
                    f"version {manifest.version} of campaign {self.campaign} must be published once, "
                    "got two results.\n"
                    f"  published: {existing.summary()}\n  refused:   {manifest.summary()}\n"
                    "Another trainer of this campaign was first: go on from head(), or use another name."
                )
        else:
            published = self._reference(manifest.version, version_id, data)
        self._advance(manifest.version)
        return published

    def head(self) -> PolicyVersion | None:
        """The newest published version; None only if there is none at all."""
        hint = self.bucket.get(self.root + "latest.json")
        hinted = json.loads(hint[0])["version"] if hint else None
        newest = hinted
        if newest is None:  # proves nothing: a publisher was killed before it wrote the hint, or it was lost
            newest = max(self._versions(), default=None)
            if newest is None:
                return None
        while self.bucket.head(self._manifest_key(newest + 1)) is not None:
            newest += 1
        if newest != hinted:
            self._advance(newest)
        return self._read_manifest(newest)[0]

    def manifest(self, version: int | PolicyVersion) -> Manifest:
        """The manifest of a version; for a PolicyVersion its very bytes, checked against its digest."""
        return self._read_manifest(version)[1]

    def reference(self, version: int) -> PolicyVersion:
        """The reference to a published version by its number."""
        return self._read_manifest(version)[0]

    def history(self) -> list[Manifest]:
        """All published manifests in ascending order."""
        with ThreadPoolExecutor(self.num_threads) as pool:
            return list(pool.map(self.manifest, self._versions()))

    def pull(
        self, version: int | PolicyVersion, *, names: Collection[str] | None = None, without: str = ""
    ) -> Path:
        """A local folder with the version's files, or with those of ``names``, each verified; what matches
        ``without`` is left out, unless it is there from before.

        Do not write into it. It stays until this process ends or releases it (``release``).
        """
        published, manifest = self._read_manifest(version)
        wanted = manifest.files if names is None else names
        if unknown := sorted(set(wanted) - manifest.files.keys()):
            raise ValueError(
                f"names must be of files of version {manifest.version} of campaign {self.campaign}, "
                f"got {unknown[:8]}; files: {sorted(manifest.files)[:64]}."
            )
        files = {name: manifest.files[name] for name in wanted if not fnmatch(name, without)}
        folder = (
            self.cache.folder / self.campaign / f"{manifest.version:012d}-{published.manifest_sha256[:12]}"
        )
        self.cache.lease(folder)
        try:
            with ThreadPoolExecutor(self.num_threads) as pool:
                list(pool.map(lambda item: self.cache.link(item[0], item[1], folder), files.items()))
        except CorruptArtifact as error:
            if not self.is_retired(manifest.version):
                raise
            raise Retired(
                f"version {manifest.version} of campaign {self.campaign} must have its files, got a record "
                "of their removal by a retention. Use another: python -m tasks.artifacts.versions list."
            ) from error
        return folder

    @contextlib.contextmanager
    def reading(self, version: int | PolicyVersion, *, without: str = "") -> Iterator[Path]:
        """``pull`` for as long as the block runs."""
        folder = self.pull(version, without=without)
        try:
            yield folder
        finally:
            self.release(folder)

    def release(self, folder: Path) -> None:
        """Let the cache evict a folder that ``pull`` returned, when it needs the space."""
        self.cache.release(folder)

    def is_retired(self, version: int) -> bool:
        """Whether a retention removed the version's files; its manifest stays."""
        return self.bucket.head(self.retired_key(version)) is not None

    # Other objects of the campaign

    def put_object(self, key: str, data: bytes) -> str:
        """Write an object once; its URI. The same content again is success, other an ObjectConflict."""
        full = self._object_key(key)
        if self.bucket.put(full, data, absent=True) is None:
            existing = self.bucket.get(full)
            stored = b"" if existing is None else existing[0]
            if stored != data:
                raise ObjectConflict(
                    f"object {key} of campaign {self.campaign} must be written once, got two contents: "
                    f"stored {len(stored)} bytes, sha256 {_sha256(stored)[:12]}; "
                    f"refused {len(data)} bytes, sha256 {_sha256(data)[:12]}. Use another key."
                )
        return self._uri(full)

    def replace_object(self, key: str, data: bytes) -> str:
        """Write an object that may be rewritten, such as a report; its URI."""
        full = self._object_key(key)
        self.bucket.put(full, data)
        return self._uri(full)

    def get_object(self, key: str) -> bytes:
        data = self.find_object(key)
        if data is None:
            uri = self._uri(self._object_key(key))
            raise NotFound(f"object {key} of campaign {self.campaign} must exist, got none at {uri}.")
        return data

    def find_object(self, key: str) -> bytes | None:
        """The object's content; None if there is none."""
        found = self.bucket.get(self._object_key(key))
        return found[0] if found else None

    def list_objects(self, prefix: str = "") -> list[str]:
        """Keys that start with the prefix, ascending, as ``get_object`` takes them."""
        keys = (key.removeprefix(self.root) for key in self.bucket.keys(self.root + prefix))
        return [key for key in keys if not key.startswith(_RESERVED)]

    # Below: keys, and the steps of the above

    def _blob_key(self, digest: str) -> str:
        return f"{self.root}blobs/sha256/{digest[:2]}/{digest}"

    def _manifest_key(self, version: int) -> str:
        return f"{self.root}versions/{version:012d}/manifest.json"

    def retired_key(self, version: int) -> str:
        return f"{self.root}versions/{version:012d}/retired.json"

    def _object_key(self, key: str) -> str:
        if not key or key.startswith(("/", *_RESERVED)) or ".." in key.split("/"):
            raise ValueError(f"key must be a relative path outside {', '.join(_RESERVED)}, got {key!r}.")
        return self.root + key

    def _uri(self, key: str) -> str:
        return f"s3://{self.bucket.name}/{key}"

    def _reference(self, version: int, version_id: str, data: bytes) -> PolicyVersion:
        return PolicyVersion(
            campaign=self.campaign,
            version=version,
            manifest_uri=self._uri(self._manifest_key(version)),
            version_id=version_id,
            manifest_sha256=_sha256(data),
        )

    def _stored_blob(self, known: Digests, size: int) -> Blob | None:
        """The blob if it is stored with this size and, where S3 knows it, this digest."""
        key = self._blob_key(known.sha256)
        stored = self.bucket.head(key)
        if stored is None or stored.size != size or stored.sha256 not in ("", known.sha256):
            return None
        return Blob(
            sha256=known.sha256, blake3=known.blake3, size=size, key=key, version_id=stored.version_id
        )

    def _present(self, blob: Blob | None, known: Digests) -> Blob:
        if blob is None:
            uri = self._uri(self._blob_key(known.sha256))
            raise CorruptArtifact(
                f"{uri} must exist with its content after it was written, got none or other content. "
                "Something else writes below this prefix."
            )
        return blob

    def _versions(self) -> list[int]:
        pattern = re.compile(re.escape(self.root) + r"versions/(\d{12})/manifest\.json")
        found = (pattern.fullmatch(key) for key in self.bucket.keys(self.root + "versions/"))
        return [int(match.group(1)) for match in found if match]

    def _read_manifest(self, version: int | PolicyVersion) -> tuple[PolicyVersion, Manifest]:
        wanted = version if isinstance(version, PolicyVersion) else None
        number = version if isinstance(version, int) else version.version
        if wanted and wanted.campaign != self.campaign:
            raise ValueError(f"version must be of campaign {self.campaign!r}, got {wanted.campaign!r}.")
        found = self.bucket.get(self._manifest_key(number), version_id=wanted.version_id if wanted else "")
        uri = self._uri(self._manifest_key(number))
        if found is None:
            raise NotFound(f"version {number} of campaign {self.campaign} must exist, got none at {uri}.")
        data, stored = found
        if wanted and _sha256(data) != wanted.manifest_sha256:
            raise CorruptArtifact(f"{uri} must have sha256 {wanted.manifest_sha256}, got {_sha256(data)}.")
        return self._reference(number, stored.version_id, data), Manifest.model_validate_json(data)

    def _advance(self, version: int) -> None:
        """Move the hint forward, never back. After a lost race it looks again."""
        key = self.root + "latest.json"
        data = json.dumps({"version": version}).encode()
        for attempt in range(20):
            found = self.bucket.get(key)
            if found and json.loads(found[0])["version"] >= version:
                return
            done = self.bucket.put(key, data, absent=found is None, etag=found[1].etag if found else "")
            if done is not None:
                return
            back_off(attempt)
        text = (
            f"{self._uri(key)} must be moved to version {version} within 20 attempts, got a lost race each "
            "time. The version is published; let one campaign of this name run at a time."
        )
        raise StoreError(text, reason="unavailable")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
