"""What travels through the experience buffer. Payloads are opaque bytes (Arrow IPC) here and stay opaque.

The chain of identities: a ``WorkItem`` is leased to a worker, the worker publishes ``Group``s under the
lease, a scorer takes each group once and publishes the scored group under the same ``group_id``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


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
    duplicates: int
    """Groups refused because their id was stored already: work done twice, never trained twice."""
    refused: int = 0
    """Samples, of ``samples``, that no scorer could read; their items were sampled again."""
    late: int = 0
    """Samples, not of ``samples``, that came after the iteration was closed."""
    is_dropped: bool = False
    """Whether the samples are gone: trained and published, or set aside."""


Held = tuple[str, Group]
"""What a scorer took, and gives back scored, behind the handle of its entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unscored:
    """A group that no scorer survived: its samples must enter the ledger as rejected, for this reason."""

    group: Group
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerShare:
    """What one worker published of an iteration."""

    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time in which it sampled them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A snapshot. ``queued + leased + settled + poisoned + left`` is all the work ever put."""

    queued: int
    leased: int
    settled: int
    poisoned: int
    left: int
    """Items that were not settled when the iteration was closed."""
    groups_published: int
    groups_scored: int
    groups_unscored: int
    """Set aside by ``take_rollouts`` after too many attempts."""
    samples_produced: int
    duplicates: int
    refused: int
    late: int
    leases_by_worker: Mapping[str, int]
    workers: Mapping[str, WorkerShare]
    oldest_lease_seconds: float
    """Since it was handed out, renewals included; 0.0 without leases."""
    bytes_waiting: int
    """Payload bytes that wait for a scorer: what backpressure measures."""
    bytes_used: int
    """The server's own estimate over all keys of the iteration."""


COUNTERS = (
    "settled", "poisoned", "left", "groups_published", "groups_scored", "groups_unscored", "duplicates",
    "refused", "late", "bytes_waiting",
)  # fmt: skip


def progress(reply: Sequence[Any], *, returned: str) -> Progress:
    """The snapshot of one shard from its script's reply; what ``returned`` holds is queued."""
    entries, oldest_ms, num_bytes, leases, flat, flat_workers = reply
    counters = {name.decode(): int(n) for name, n in zip(flat[::2], flat[1::2], strict=True) if n.isdigit()}
    held = {consumer.decode(): int(number) for consumer, number in leases if consumer.decode() != returned}
    totals = {name.decode(): int(n) for name, n in zip(flat_workers[::2], flat_workers[1::2], strict=True)}
    names = {name.split(" ", 1)[1] for name in totals}
    return Progress(
        queued=entries - sum(held.values()),
        leased=sum(held.values()),
        samples_produced=counters.get("produced", 0),
        leases_by_worker=held,
        workers={
            name: WorkerShare(
                samples=totals[f"samples {name}"],
                tokens=totals[f"tokens {name}"],
                seconds=totals[f"ms {name}"] / 1000,
            )
            for name in sorted(names)
        },
        oldest_lease_seconds=oldest_ms / 1000,
        bytes_used=int(num_bytes),
        **{name: counters.get(name, 0) for name in COUNTERS},
    )


def combined(shards: Sequence[Progress]) -> Progress:
    """Sums over shards; the oldest lease is the oldest of all."""
    first, *others = shards
    for other in others:
        values: dict[str, Any] = {}
        for field in fields(Progress):
            a, b = getattr(first, field.name), getattr(other, field.name)
            values[field.name] = max(a, b) if field.name == "oldest_lease_seconds" else _sum(a, b)
        first = Progress(**values)
    return first


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, WorkerShare):
        return WorkerShare(
            samples=a.samples + b.samples, tokens=a.tokens + b.tokens, seconds=a.seconds + b.seconds
        )
    if isinstance(a, Mapping):
        return {key: _sum(a[key], b[key]) if key in a and key in b else (a | b)[key] for key in sorted(a | b)}
    return a + b
