"""The reference to one published policy. It travels between Flyte tasks: nothing heavy is imported."""

from pydantic import BaseModel, ConfigDict, Field


class PolicyVersion(BaseModel):
    """Names one manifest, for ever: ``version_id`` finds its bytes even if somebody overwrote the key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    campaign: str
    version: int = Field(ge=0)
    manifest_uri: str
    version_id: str
    """S3 VersionId of the manifest."""
    manifest_sha256: str
