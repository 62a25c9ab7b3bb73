"""Where versions are kept; no torch."""

from pydantic import Field

from tasks.section import Section


class CheckpointConfig(Section):
    store: str = "./runs"
    """``s3://bucket/prefix``, or a folder: then an embedded S3 server keeps its data there."""
    endpoint_url: str = ""
    """For S3 services other than Amazon's."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded server; 0 picks a free one."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """Free space that the embedded store's folder must have before a run starts."""
