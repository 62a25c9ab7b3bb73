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
    full_every: int = Field(default=10, ge=1)
    """A version's weights are stored as what changed since its parent's, and whole each n-th time at the
    latest; 1 = always whole. A reader that starts from nothing fetches up to so many files."""
    cache_folder: str = ""
    """Of the local cache, such as a node's NVMe; empty: in the embedded store, or below the home folder."""
    cache_gb: float = Field(default=0.0, ge=0)
    """Bound of the local cache; 0 = none."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """Free space that the embedded store's folder must have before a run starts."""
