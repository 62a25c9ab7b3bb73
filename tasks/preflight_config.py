"""What is checked before a campaign starts; no torch."""

from typing import Literal

from pydantic import Field

from tasks.section import Section

Role = Literal["laptop", "cpu", "rollout", "trainer"]


class PreflightConfig(Section):
    roles: list[Role] = Field(default_factory=list)
    """One task each, on a node of the role's pool, before anything else of the campaign; one that refuses
    ends it. Empty = none."""
    max_time_skew_seconds: float = Field(default=5.0, gt=0)
    """Between a node's clock and the store's: S3 refuses requests from 15 minutes on, leases earlier."""
