"""What one policy version is: its files, where it came from, and what is needed to go on from it."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Blob(BaseModel):
    """An immutable stored file, named by its content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    blake3: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Of the same content, for readers; earlier releases did not record it."""
    size: int = Field(ge=0)
    key: str
    version_id: str


class Patch(BaseModel):
    """A stored difference, and the content that a file has once it is applied."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    blob: Blob


class PatchedBlob(BaseModel):
    """A file stored as a full one and what changed since, oldest first: all of it named here.

    So a reader needs no other manifest, whoever has one of the contents on the way begins there, and no
    version needs another one's manifest to live.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the content, like ``Blob.sha256``: how a file is stored is no part of what it is."""
    blake3: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    size: int = Field(ge=0)
    full: Blob
    patches: tuple[Patch, ...] = Field(min_length=1)
    whole: Blob | None = None
    """The content itself, where it was stored beside: a reader takes the way that is faster for it."""

    @model_validator(mode="after")
    def _the_last_patch_makes_the_content(self) -> Self:
        if self.patches[-1].sha256 != self.sha256 or self.full.size != self.size:
            raise ValueError(
                f"patches must end in the content sha256 {self.sha256} of {self.size} bytes, got "
                f"{self.patches[-1].sha256} from {self.full.size} bytes."
            )
        if self.whole is not None and (self.whole.sha256, self.whole.size) != (self.sha256, self.size):
            raise ValueError(
                f"whole must be the content sha256 {self.sha256} of {self.size} bytes, got "
                f"{self.whole.sha256} of {self.whole.size}."
            )
        return self


StoredFile = Blob | PatchedBlob


def stored_objects(file: StoredFile) -> tuple[Blob, ...]:
    """Everything in the store that the file is made of."""
    if isinstance(file, Blob):
        return (file,)
    beside = () if file.whole is None else (file.whole,)
    return (file.full, *(patch.blob for patch in file.patches), *beside)


class DataCursor(BaseModel):
    """Where in which data the next iteration reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    """Fingerprint of the environment's data: the position means nothing in other data."""
    position: int = Field(ge=0)
    """Prompts offered so far."""
    seed: int
    """Every generator of the campaign is seeded from this and a number that is stored: of the iteration, the
    prompt, the sample, the token. So no generator's state has to be."""


class LedgerPosition(BaseModel):
    """What the version took from the experience buffer: every produced sample is in one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    iteration: int
    behavior_version: int
    produced: int = Field(ge=0)
    trained: int = Field(ge=0)
    rejected: dict[str, int] = {}
    batch_sha256: str
    """Of the sealed batch, whose rows name every sample that was consumed."""


class Manifest(BaseModel):
    """A published policy version. Written once; its existence is the commit."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    campaign: str
    version: int = Field(ge=0)
    parent: int | None
    """The version it was trained from; none for the first version of a campaign."""
    kind: Literal["init", "warm_start", "iteration"]
    iteration: int = Field(ge=0)
    """Completed iterations of reinforcement learning."""
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    files: Mapping[str, StoredFile]
    tensor_digest: str
    """Digest of the weights, whatever the files' layout."""
    config_digest: str
    code_revision: str
    batch: str = ""
    """Key of the train batch it consumed; empty if none."""
    critic: str = ""
    """Key of the manifest of the critic that was trained with it; empty if none."""
    num_samples: int = Field(default=0, ge=0)
    data: DataCursor | None = None
    """Where the next iteration reads."""
    ledger: LedgerPosition | None = None
    metrics: dict[str, float] = {}
    means: dict[str, str] = {}
    """What it was trained with: dispatcher, kernels, libraries."""
    seconds: dict[str, float] = {}
    waiting: dict[str, float] = {}
    """Seconds that stages worked (``busy/<stage>``) and waited (``idle/<stage>``), summed over workers. Apart
    from the metrics, which two runs of one campaign share to the bit."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_releases_wrote_a_cursor(cls, data: Any) -> Any:
        """In place of ``data``; it counted other prompts than were offered, and nobody reads it."""
        return {k: v for k, v in data.items() if k != "cursor"} if isinstance(data, dict) else data

    @field_validator("files")
    @classmethod
    def _names_stay_inside_the_folder(cls, files: Mapping[str, StoredFile]) -> Mapping[str, StoredFile]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
                raise ValueError(
                    f"files must have plain relative names, got {name!r}. Name them like 'a/b.bin'."
                )
        return files

    @model_validator(mode="after")
    def _parent_precedes(self) -> Self:
        is_first = self.version == 0
        if is_first != (self.parent is None) or is_first != (self.kind == "init"):
            raise ValueError(
                "version 0 and only it must be of kind init and have no parent, "
                f"got version={self.version}, kind={self.kind}, parent={self.parent}."
            )
        if self.parent is not None and not 0 <= self.parent < self.version:
            raise ValueError(
                f"parent must be below version, got parent={self.parent}, version={self.version}."
            )
        return self

    def content_digest(self) -> str:
        """Identity of the training result: equal when a retried task publishes the same result again.

        Left out: when it was written, what was measured and used on the way, and in which S3 version of a
        blob the (same) bytes lie.
        """
        content = self.model_dump(
            mode="json", exclude={"created", "seconds", "waiting", "metrics", "means", "files"}
        )
        for name in ("data", "ledger"):  # of versions that were published before these existed
            if content[name] is None:
                del content[name]
        content["files"] = {name: blob.sha256 for name, blob in self.files.items()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def summary(self) -> str:
        """One line for an error that names two candidates for one version."""
        return (
            f"content {self.content_digest()[:12]}, tensors {self.tensor_digest[:12]}, config "
            f"{self.config_digest[:12]}, code {self.code_revision[:12]}, batch {self.batch or 'none'}, "
            f"created {self.created:%Y-%m-%dT%H:%M:%SZ}"
        )
