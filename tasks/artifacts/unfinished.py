"""What a policy update had done when it was told to stop, so that the next attempt goes on from there.

    {campaign}/unfinished/{version}/{digest}.json   written last, when every file it names is stored

No version: nobody samples from it, and it means something only to the update that left it (same policy,
batch, configuration, code and ranks), which ends with the bits of an undisturbed one. There is one record of
an update: of its critic's pass, then of what came before the policy's, then of that pass, each in the place
of the one before. Publishing the version removes the record; its files go with the next retention.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.artifacts.manifest import Blob, StoredFile, stored_objects

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

PREFIX = "unfinished/"
Trained = Literal["critic", "policy"]
"""Which of an update's two models, in the order of their passes."""


class UpdateIdentity(BaseModel):
    """Which update it is, and who may go on with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(ge=1)
    """That the update was to make."""
    policy: str
    """SHA-256 of the manifest it began with."""
    batch: str
    """SHA-256 of the sealed batch."""
    config_digest: str
    code_revision: str
    ranks: dict[str, int]
    """How the parameters were laid out over them."""

    @property
    def key(self) -> str:
        digest = hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()
        return f"{PREFIX}{self.version:012d}/{digest[:32]}.json"

    def differences(self, other: "UpdateIdentity") -> str:
        """What keeps this update from going on with the other's work; empty if nothing does."""
        mine, theirs = self.model_dump(), other.model_dump()
        return "; ".join(
            f"its {name} is {theirs[name]}, this update's {mine[name]}"
            for name in mine
            if mine[name] != theirs[name]
        )


class UnfinishedUpdate(BaseModel):
    """The state between two mini-batches, or behind the last one."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    identity: UpdateIdentity
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    model: Trained
    """Whose pass this is of: the critic's, or the policy's, which then has its critic."""
    files: Mapping[str, StoredFile]
    """Weights and optimizer state, as a version has them; none before the policy's first mini-batch."""
    tensor_digest: str
    columns: Blob
    """What was computed of the batch's rows before the first step: log-probabilities of other versions,
    values."""
    done: int = Field(ge=0)
    """Mini-batches of that pass, counted over epochs."""
    totals: dict[str, float]
    nonfinite_in_a_row: int
    routing: list[tuple[dict[str, list[int]], dict[str, float], dict[str, float]]]
    """What each rank had summed up of its routers."""
    critic: str
    critic_metrics: dict[str, float]
    metrics: dict[str, float]
    """Of the policy's whole pass; empty unless it was over."""

    def text(self) -> str:
        """What the next attempt need not do again."""
        if self.model == "critic":
            return f"behind {self.done} mini-batches of the critic that a stopped attempt had done"
        if not self.files:
            return "with the critic that an earlier attempt had trained"
        return f"behind {self.done} mini-batches that a stopped attempt had done"


def unfinished_updates(
    store: "PolicyStore", version: int
) -> Iterator[tuple[str, UnfinishedUpdate | None, str]]:
    """Key and content of each record for a version, or None and why it cannot be read."""
    for key in store.list_objects(f"{PREFIX}{version:012d}/"):
        data = store.find_object(key)
        if data is None:  # published a moment ago
            continue
        try:
            yield key, UnfinishedUpdate.model_validate_json(data), ""
        except ValidationError as error:
            yield key, None, f"it has {error.error_count()} faults, such as {error.errors()[0]['msg']}"


def needed_blobs(store: "PolicyStore", version: int) -> set[str]:
    """Objects that the unfinished updates to a version are made of."""
    keys: set[str] = set()
    for _, update, _ in unfinished_updates(store, version):
        if update is not None:
            keys |= {blob.key for file in update.files.values() for blob in stored_objects(file)}
            keys.add(update.columns.key)
    return keys


def drop_unfinished(store: "PolicyStore", version: int) -> None:
    """Forget what was left of updates to a version that is published."""
    for key in store.list_objects(f"{PREFIX}{version:012d}/"):
        store.bucket.delete(store.root + key)
