"""What can go wrong between a task and its store, one class for each way to react."""

from typing import Literal

Reason = Literal["unavailable", "unreachable", "no_bucket", "credentials", "clock"]


class StoreError(RuntimeError):
    """The store cannot serve; ``reason`` says which of the known ways. The data is not in question."""

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class NotFound(LookupError):
    """There is no such version or object. Never a default: a missing checkpoint is not step 0."""


class VersionConflict(ValueError):
    """A version exists with other content: two trainers ran, and this one lost. Retrying cannot help."""


class ObjectConflict(ValueError):
    """An immutable object exists with other content."""


class CorruptArtifact(RuntimeError):
    """Bytes are missing or differ from the digest under which they were published."""


class CacheFull(RuntimeError):
    """The local disk, or the bound set for the cache on it, has no room for what is being read."""


class Retired(NotFound):
    """The version's record is there, its files were removed by a retention that somebody ran."""


class StaleWeights(RuntimeError):
    """What was stored is not what the trainer holds."""


class UploadFailed(RuntimeError):
    """Shards of a candidate could not be stored; it is no version."""
