"""Where versions are kept; no torch."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

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
    whole_beside: bool = False
    """Store a version's weights whole as well, beside what changed: readers on a fast network are done sooner
    with the whole file, those that start from nothing need no chain. Costs the publisher that upload."""
    fetch: Literal["measured", "patches", "whole"] = "measured"
    """The way to a file that is stored both ways: what was faster here until now, or always the same."""
    cache_folder: str = ""
    """Of the local cache, such as a node's NVMe; empty: in the embedded store, or below the home folder."""
    cache_gb: float = Field(default=0.0, ge=0)
    """Bound of the local cache; 0 = none."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """Free space that the embedded store's folder must have before a run starts."""

    @model_validator(mode="after")
    def _what_is_fetched_is_stored(self) -> Self:
        if self.fetch != "measured" and not (self.whole_beside and self.full_every > 1):
            raise ValueError(
                "checkpoint.fetch must be measured unless versions are stored both ways, got "
                f"fetch={self.fetch}, whole_beside={self.whole_beside}, full_every={self.full_every}. Set "
                "whole_beside, or leave fetch out."
            )
        return self

    @model_validator(mode="after")
    def _the_store_is_an_address(self) -> Self:
        is_bucket = re.match(r"s3://[^/]", self.store)
        is_folder = self.store.strip() and "://" not in self.store and not self.store.startswith("s3:")
        if not is_bucket and not is_folder:
            raise ValueError(f"store must be s3://bucket/prefix or a folder, got {self.store!r}. Set it so.")
        return self
