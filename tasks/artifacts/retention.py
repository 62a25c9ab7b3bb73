"""Which versions keep their files, and the removal of the others': planned, shown, and only then carried out.

Kept are the newest ``last``, every ``every``-th, the ``best`` by an evaluation, whatever somebody holds, and
what the campaign itself may yet read: versions that open iterations sample from, versions whose evaluation is
due, the reference of the loss. So its own workers and evaluations need no hold; another campaign's reader (a
student of a teacher here) does. The newest is always kept. A manifest is never removed: a retired version
stays in the lineage, with a record that says when and why its files went, and numbers have no gaps. A file
goes when no kept manifest names it; since a manifest names the full file and every patch that its files are
made of, a kept version needs nothing of a retired one. What a stopped update to the next version had done
stays as well (``unfinished.py``).

Deleting adds a marker in a versioned bucket: readers that know a VersionId go on until the bucket's lifecycle
rule frees the bytes (``configs/cluster/s3-lifecycle.json``). Files younger than ``min_age_hours`` stay, since
a candidate that is not published yet may need them; a version published while files are removed gets its own
back.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tasks.artifacts.catalogue import configs, evaluated_versions, evaluations
from tasks.artifacts.manifest import Manifest, stored_objects
from tasks.artifacts.unfinished import PREFIX, needed_blobs
from tasks.session import is_evaluated

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

HOLDS = "holds/"
MOST_HOURS = 1_000_000
"""A century; a date cannot be so far away that it has no year."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What an operator asks to keep beside the newest version."""

    last: int = 3
    every: int = 0
    """0 = none by number."""
    best: int = 1
    metric: str = "exact_sampled"
    """Of an evaluation; the highest is the best."""
    min_age_hours: float = 24.0

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0 or self.best < 0 or not 0 <= self.min_age_hours <= MOST_HOURS:
            raise ValueError(
                f"last must be at least 1, every and best at least 0, min_age_hours from 0 to {MOST_HOURS}, "
                f"got last={self.last}, every={self.every}, best={self.best}, "
                f"min_age_hours={self.min_age_hours}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPlan:
    """What would happen."""

    kept: dict[int, list[str]]
    """Version -> why."""
    retired: list[int]
    """Versions that lose their files now."""
    keys: list[str]
    """Objects to remove."""
    num_bytes: int
    newest: int
    young: int = 0
    """Objects that nothing needs but that are too young to remove."""
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [
            f"v{version:<6} kept: {', '.join(reasons)}" for version, reasons in sorted(self.kept.items())
        ]
        lines += [f"v{version:<6} retired" for version in self.retired]
        lines.append(
            f"{len(self.keys)} objects of {self.num_bytes:,} bytes to remove, {self.young} too young to"
        )
        return "\n".join(lines + self.notes)


def reasons_to_keep(
    versions: Sequence[int],
    keep: Keep,
    *,
    scores: Mapping[int, float],
    held: Mapping[int, Sequence[str]],
    needed_by: Mapping[int, Sequence[str]],
) -> dict[int, list[str]]:
    """Version -> reasons, for those that stay."""
    kept: dict[int, list[str]] = {}
    newest_first = sorted(versions, reverse=True)
    best = sorted((v for v in versions if v in scores), key=lambda v: (-scores[v], -v))[: keep.best]
    for rank, version in enumerate(newest_first):
        reasons = ["newest"] if rank == 0 else [f"last {keep.last}"] if rank < keep.last else []
        reasons += [f"every {keep.every}"] if keep.every and version % keep.every == 0 else []
        reasons += [f"best {keep.best} by {keep.metric} ({scores[version]:.4g})"] if version in best else []
        reasons += [f"held by {holder}" for holder in held.get(version, ())]
        reasons += [f"needed by {reader}" for reader in needed_by.get(version, ())]
        if reasons:
            kept[version] = reasons
    return kept


def plan_retention(store: "PolicyStore", keep: Keep, *, now: datetime | None = None) -> RetentionPlan:
    """Read the lineage and say what would be kept and removed; changes nothing."""
    now = now or datetime.now(UTC)
    manifests = store.history()
    if not manifests:
        raise ValueError(f"campaign {store.campaign} must have versions to retire some, got none.")
    alive = [m for m in manifests if not store.is_retired(m.version)]
    held = holders(store, now=now)
    scores = evaluation_scores(store, keep.metric)
    needed_by = needed_by_runs(store, alive)
    kept = reasons_to_keep([m.version for m in alive], keep, scores=scores, held=held, needed_by=needed_by)
    newest = max(m.version for m in manifests)
    needed = needed_keys(m for m in alive if m.version in kept) | needed_blobs(store, newest + 1)
    listed = [entry for entry in store.bucket.entries(store.root + "blobs/") if entry.key not in needed]
    current = f"{store.root}{PREFIX}{newest + 1:012d}/"  # of the update that runs or goes on
    records = store.bucket.entries(store.root + PREFIX)
    listed += [entry for entry in records if not entry.key.startswith(current)]
    old = [entry for entry in listed if now - entry.modified >= timedelta(hours=keep.min_age_hours)]
    notes = []
    if keep.best and not scores:
        notes.append(f"no evaluation has {keep.metric}: none is kept as the best")
    return RetentionPlan(
        kept=kept,
        retired=[m.version for m in alive if m.version not in kept],
        keys=[entry.key for entry in old],
        num_bytes=sum(entry.size for entry in old),
        newest=newest,
        young=len(listed) - len(old),
        notes=notes,
    )


def carry_out(store: "PolicyStore", plan: RetentionPlan, *, now: datetime | None = None) -> int:
    """Retire the plan's versions and remove its objects; returns how many were removed. Safe to repeat.

    Holds are read again: one taken since the plan was made is respected, by refusing the plan.
    """
    now = now or datetime.now(UTC)
    if taken := {v: who for v, who in holders(store, now=now).items() if v in plan.retired}:
        raise ValueError(f"the plan must not retire what is held, got holds since: {taken}. Make a new plan.")
    record = json.dumps({"retired": now.isoformat(), "kept": sorted(plan.kept)}).encode()
    for version in plan.retired:  # first: a reader that finds a file gone learns why
        store.bucket.put(store.retired_key(version), record, absent=True)
    markers = {key: store.bucket.delete(key) for key in plan.keys}
    published = (m for m in store.history() if m.version > plan.newest or m.version in plan.kept)
    restored = needed_keys(published) & markers.keys()
    for key in restored:
        store.bucket.undelete(key, markers[key])
    return len(markers) - len(restored)


def needed_keys(manifests: Iterable[Manifest]) -> set[str]:
    """Objects that the files of some versions are made of."""
    keys: set[str] = set()
    for manifest in manifests:
        for file in manifest.files.values():
            keys |= {blob.key for blob in stored_objects(file)}
    return keys


def needed_by_runs(store: "PolicyStore", manifests: Sequence[Manifest]) -> dict[int, list[str]]:
    """Version -> what of the campaign may yet read it, under any configuration that it was run with."""
    needed: dict[int, list[str]] = {}

    def need(version: int, reader: str) -> None:
        if reader not in needed.setdefault(version, []):
            needed[version].append(reader)

    known = dict(configs(store))
    newest = max((manifest.version for manifest in manifests), default=0)
    for config in known.values():
        for version in range(max(0, newest - config.schedule.max_staleness), newest + 1):
            need(version, "open iterations")
        if config.algorithm.kl != "none":
            need(config.algorithm.reference_version, "the reference of the loss")
    evaluated = evaluated_versions(store)
    for manifest in manifests:
        config = known.get(manifest.config_digest)
        if config is None or manifest.kind != "iteration" or manifest.version in evaluated:
            continue
        if is_evaluated(config, manifest.iteration):
            need(manifest.version, "its evaluation")
    return needed


def evaluation_scores(store: "PolicyStore", metric: str) -> dict[int, float]:
    """The metric of each evaluated version."""
    return {found["version"]: float(found[metric]) for found in evaluations(store) if metric in found}


# Holds


def hold(store: "PolicyStore", version: int, holder: str, *, hours: float | None) -> None:
    """Keep a version for a reader: for some hours, or until it is released."""
    if hours is not None and not 0 < hours <= MOST_HOURS:
        raise ValueError(
            f"hours must be above 0 and at most {MOST_HOURS}, got {hours:g}. Leave it out to hold the "
            "version until it is released."
        )
    store.reference(version)
    until = None if hours is None else (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
    store.replace_object(_hold_key(version, holder), json.dumps({"until": until}).encode())


def release(store: "PolicyStore", version: int, holder: str) -> None:
    store.bucket.delete(store.root + _hold_key(version, holder))


def holders(store: "PolicyStore", *, now: datetime) -> dict[int, list[str]]:
    """Version -> who holds it at the moment."""
    held: dict[int, list[str]] = {}
    for key in store.list_objects(HOLDS):
        data = store.find_object(key)
        until = json.loads(data)["until"] if data else now.isoformat()  # released a moment ago
        if until is None or datetime.fromisoformat(until) > now:
            number, name = key.removeprefix(HOLDS).removesuffix(".json").split("/")
            held.setdefault(int(number), []).append(name)
    return held


def _hold_key(version: int, holder: str) -> str:
    if not holder or "/" in holder:
        raise ValueError(f"holder must be a name without '/', got {holder!r}.")
    return f"{HOLDS}{version:012d}/{holder}.json"
