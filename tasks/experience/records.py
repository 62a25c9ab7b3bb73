"""What travels through the experience buffer. Payloads are opaque bytes (Arrow IPC) here and stay opaque.

The chain of identities: a ``WorkItem`` is leased to a worker, the worker publishes ``Group``s under the
lease, a scorer takes each group once and publishes the scored group under the same ``group_id``.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """A bounded portion of one iteration's generation: a few prompt groups, small enough to lose to a Spot
    notice.

    iteration=3, portion=7  ->  item_id "3/7"
    """

    iteration: int
    portion: int
    policy_version: int  # the version that must sample it; one version for all items of an iteration
    num_groups: int
    num_samples: int
    payload: bytes

    @property
    def item_id(self) -> str:
        return f"{self.iteration}/{self.portion}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to publish for one item. ``attempt`` is the fence: it rises at every takeover."""

    item: WorkItem
    entry_id: str
    worker: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one prompt. ``group_id`` must not depend on the worker or the attempt."""

    group_id: str
    num_samples: int
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Produced:
    """The buffer's side of the sample ledger; survives ``drop``."""

    samples: int
    duplicates: (
        int  # groups refused because their id was stored already: work done twice, never trained twice
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Unscored:
    """A group that no scorer survived: its samples must enter the ledger as rejected, for this reason."""

    group_id: str
    num_samples: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One consistent snapshot. ``queued + leased + settled + poisoned`` is all the work ever put."""

    queued: int
    leased: int
    settled: int
    poisoned: int
    groups_published: int
    groups_scored: int
    groups_unscored: int  # set aside by ``take_rollouts`` after too many attempts
    samples_produced: int
    duplicates: int
    leases_by_worker: Mapping[str, int]
    oldest_lease_seconds: float  # since it was handed out, renewals included; 0.0 without leases
    bytes_waiting: int  # payload bytes that wait for a scorer: what backpressure measures
    bytes_used: int  # the server's own estimate over all keys of the iteration
