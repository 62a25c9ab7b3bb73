"""One S3 bucket as the store needs it: conditional writes, reads by VersionId, checksums, telling errors.

Every request goes through ``Bucket._call``. S3 answers a lost race for a key in two ways: 412 (the key
exists) and 409 (another conditional write is in flight, nothing is decided). Only 412 means "exists"; 409 is
tried again.
"""

import base64
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from tasks.artifacts.content import Content, Digests, Hash
from tasks.artifacts.download import BROKEN, download
from tasks.artifacts.errors import StoreError
from tasks.artifacts.sending import send, sign_checksums_only
from tasks.say import say

T = TypeVar("T")
MAX_ATTEMPTS = 5
MAX_CONFLICTS = 12
SLOW_DOWN_SECONDS = (5.0, 10.0, 20.0, 30.0, 30.0)
"""Waits, on the average three quarters of these, before a request that S3 refuses for there being too many is
made anew: S3 does so for a minute or two, while it spreads a prefix over more servers."""
PART_BYTES = 16 << 20
MAX_PARTS = 9000
"""S3 allows 10,000."""
_UNAVAILABLE = (
    f"It was asked {MAX_ATTEMPTS} times. An embedded server answers so when its disk is full: see `df` and "
    "server.log in the store's folder. Amazon S3: try again later."
)
_LOADER = botocore.loaders.create_loader()  # one cache of S3's description: 8 ms a client instead of 50 ms
_SLOWED_DOWN = "It asked for fewer requests for two minutes. Try again later."
_ERRORS = (ClientError, BotoCoreError)
_CREDENTIAL_CODES = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "403",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What S3 knows about one stored object version."""

    version_id: str
    etag: str
    size: int
    sha256: str
    """Hex digest verified by the server; empty for objects that were sent in parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """An object as a listing shows it."""

    key: str
    size: int
    modified: datetime


def make_client(*, endpoint_url: str, access_key: str, secret_key: str, num_threads: int) -> Any:
    """S3 client; without keys, the ordinary AWS credential chain."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        connect_timeout=5,
        read_timeout=120,
        max_pool_connections=max(10, 4 * num_threads),
        s3={"addressing_style": "path" if endpoint_url else "auto"},
    )
    keys: dict[str, Any] = {}
    if access_key:
        keys = {
            "aws_access_key_id": access_key,
            "aws_secret_access_key": secret_key,
            "region_name": "us-east-1",
        }
    # A session of its own: boto3's default one is not thread-safe and keeps the first credentials it saw.
    session = botocore.session.Session()
    session.register_component("data_loader", _LOADER)
    client = boto3.Session(botocore_session=session).client(
        "s3", endpoint_url=endpoint_url or None, config=config, **keys
    )
    sign_checksums_only(client)
    return client


class Bucket:
    """A versioned bucket. ``connect`` makes the client; it is called again when the connection is lost.

    For the embedded server connecting starts it, so one that crashed comes back.
    """

    def __init__(self, connect: Callable[[], Any], name: str, *, num_threads: int) -> None:
        self.name = name
        self._connect = connect
        self._client = connect()
        self._num_threads = num_threads

    @property
    def address(self) -> str:
        """Host and bucket; an embedded server's port is another one each time."""
        return f"{urlsplit(self._client.meta.endpoint_url).hostname}/{self.name}"

    def require_versioning(self) -> None:
        answer = self._call(
            "read the versioning of", "", lambda: self._client.get_bucket_versioning(Bucket=self.name)
        )
        if answer.get("Status") != "Enabled":
            raise ValueError(
                f"bucket {self.name} must have versioning enabled, got {answer.get('Status', 'none')}. Run: "
                f"aws s3api put-bucket-versioning --bucket {self.name} "
                "--versioning-configuration Status=Enabled"
            )

    def create_versioned(self) -> None:
        """Create the bucket; nothing happens if it exists. Only for the embedded server."""
        try:
            self.require_versioning()
            return
        except StoreError as error:
            if error.reason != "no_bucket":
                raise
        except ValueError:
            pass  # created a moment ago by another process, which has not enabled versioning yet
        try:
            self._client.create_bucket(Bucket=self.name)
        except ClientError as error:
            if _code(error) not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
                raise
        status = {"Status": "Enabled"}
        self._client.put_bucket_versioning(Bucket=self.name, VersioningConfiguration=status)
        self.require_versioning()

    def head(self, key: str) -> Stored | None:
        try:
            answer = self._call(
                "look for",
                key,
                lambda: self._client.head_object(Bucket=self.name, Key=key, ChecksumMode="ENABLED"),
            )
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise
        checksum = answer.get("ChecksumSHA256", "")
        sha256 = "" if not checksum or "-" in checksum else base64.b64decode(checksum).hex()
        return Stored(
            version_id=answer["VersionId"], etag=answer["ETag"], size=answer["ContentLength"], sha256=sha256
        )

    def get(self, key: str, *, version_id: str = "") -> tuple[bytes, Stored] | None:
        """Content and identity, read together; None if the key (or that version of it) does not exist."""
        which = {"VersionId": version_id} if version_id else {}

        def read() -> tuple[bytes, dict]:
            answer = self._client.get_object(Bucket=self.name, Key=key, **which)
            return answer["Body"].read(), answer

        try:
            data, answer = self._call("read", key, read)
        except ClientError as error:
            if _code(error) in ("NoSuchKey", "NoSuchVersion"):
                return None
            raise
        return data, Stored(version_id=answer["VersionId"], etag=answer["ETag"], size=len(data), sha256="")

    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str = "") -> str | None:
        """VersionId of the new object; None if the condition (key absent, or its ETag) did not hold."""
        condition: dict[str, str] = {"IfNoneMatch": "*"} if absent else {"IfMatch": etag} if etag else {}

        def write() -> dict:
            return self._client.put_object(
                Bucket=self.name, Key=key, Body=data, ChecksumAlgorithm="SHA256", **condition
            )

        for attempt in range(MAX_CONFLICTS):
            try:
                return self._call("write", key, write)["VersionId"]
            except ClientError as error:
                # If-Match on a key that has gone: 404 from Amazon, 412 from others
                if _status(error) == 412 or (etag and _status(error) == 404):
                    return None
                if _status(error) != 409:
                    raise
            back_off(attempt)
        raise StoreError(
            f"a conditional write of {key} must be decided within {MAX_CONFLICTS} attempts, got 409 every "
            "time. Several writers share this key: let one campaign run at a time.",
            reason="unavailable",
        )

    def delete(self, key: str) -> str:
        """Add a delete marker, and return its VersionId: reads by an object's VersionId go on."""
        answer = self._call("delete", key, lambda: self._client.delete_object(Bucket=self.name, Key=key))
        return answer.get("VersionId", "")

    def undelete(self, key: str, marker: str) -> None:
        """Remove a delete marker: the object is there again as it was."""
        self._call(
            "restore",
            key,
            lambda: self._client.delete_object(Bucket=self.name, Key=key, VersionId=marker),
        )

    def upload(self, content: Content, key: str, known: Digests) -> None:
        """Store a content in parallel parts, unconditionally."""
        self._call(
            "write",
            key,
            lambda: send(
                self._client,
                self.name,
                key,
                content,
                known,
                part_bytes=part_bytes(content.size),
                num_threads=self._num_threads,
            ),
        )

    def download(
        self, key: str, version_id: str, path: Path, *, size: int, new_hash: Callable[[], Hash]
    ) -> Hash | None:
        """Hash of what was written to the file; None if that version of the object (without one: the object)
        does not exist, and ``WrongSize`` if it has another size."""
        which = {"VersionId": version_id} if version_id else {}

        def read() -> Hash:
            found = new_hash()
            download(
                partial(self._client.get_object, Bucket=self.name, Key=key, **which),
                path,
                size=size,
                found=found,
                part_bytes=part_bytes(size),
                num_threads=self._num_threads,
                wait=back_off,
            )
            return found

        try:
            return self._call("read", key, read)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, ClientError) and _status(error) == 404:
                return None
            raise

    def keys(self, prefix: str) -> Iterator[str]:
        """Keys below a prefix in ascending order."""
        yield from (listed.key for listed in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[Listed]:
        """Objects below a prefix by ascending key, read a page of 1,000 at a time.

        Each page is a request of its own, after the last key: a paginator whose connection broke is
        exhausted, and asking it again would end the listing early without a word.
        """
        after: dict[str, str] = {}
        while True:
            page = self._call(
                "list",
                prefix,
                lambda after=after: self._client.list_objects_v2(Bucket=self.name, Prefix=prefix, **after),
            )
            for item in page.get("Contents", []):
                yield Listed(key=item["Key"], size=item["Size"], modified=item["LastModified"])
                after = {"StartAfter": item["Key"]}
            if not page.get("IsTruncated"):
                return

    def _call(self, verb: str, key: str, request: Callable[[], T]) -> T:
        """Make a request; again after a while where S3 asks for fewer."""
        for seconds in (*SLOW_DOWN_SECONDS, 0.0):
            try:
                return self._connected(request)
            except _ERRORS as error:
                if not seconds or not _is_busy(error):
                    raise self._explained(verb, key, error) from error
                say("store", f"{error}; waits for up to {seconds:.0f} s to {verb} {key}")
            time.sleep(_jittered(seconds))
        raise AssertionError("the last try returns or raises")

    def _connected(self, request: Callable[[], T]) -> T:
        """Once more, over a new connection, if the first one broke."""
        try:
            return request()
        except BROKEN:
            self._client = self._connect()
        return request()

    def _explained(self, verb: str, key: str, error: Exception) -> Exception:
        """The error of a store that cannot serve; any other error unchanged."""
        if isinstance(error, ClientError):
            status, code = _status(error), _code(error)
            got = f"{status} {code} {error.response.get('Error', {}).get('Message', '')}".rstrip(" .")
            if code == "NoSuchBucket":
                reason, advice = "no_bucket", "Create it with versioning, or correct checkpoint.store."
            elif code in ("RequestTimeTooSkewed", "RequestExpired"):
                reason, advice = "clock", "Set this machine's clock: S3 allows 15 minutes."
            elif status in (401, 403) or code in _CREDENTIAL_CODES:
                reason, advice = "credentials", "Check the AWS credentials and their rights on the bucket."
            elif status >= 500 or status == 429:
                reason, advice = "unavailable", _SLOWED_DOWN if _code(error) == "SlowDown" else _UNAVAILABLE
            else:
                return error
        elif isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            got, reason, advice = str(error), "credentials", "Give this process an AWS role or keys."
        elif isinstance(error, BROKEN):
            got, reason, advice = str(error), "unreachable", "Check the address and the network."
        else:
            return error
        text = f"the store must {verb} s3://{self.name}/{key}, got {got}. {advice}"
        return StoreError(text, reason=reason)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _is_busy(error: Exception) -> bool:
    """Whether the answer is one that S3 gives for a minute or two."""
    return isinstance(error, ClientError) and (_status(error) in (429, 503) or _code(error) == "SlowDown")


def part_bytes(size: int) -> int:
    """Of a transfer in parts."""
    return max(PART_BYTES, math.ceil(size / MAX_PARTS))


def back_off(attempt: int) -> None:
    """Wait 10 to 640 ms."""
    time.sleep(_jittered(0.02 * 2 ** min(attempt, 5)))


def _jittered(seconds: float) -> float:
    """SystemRandom: two seeded trainers would otherwise wait equally long."""
    return random.SystemRandom().uniform(0.5, 1.0) * seconds
