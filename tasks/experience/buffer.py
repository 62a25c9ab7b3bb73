"""The experience buffer: leased work, groups published once, groups scored once, on one Valkey server.

Every iteration has its own work stream, rollout stream and scored hash, all under the hash tag
``{campaign}``, so a cluster keeps a campaign on one shard and ``drop`` frees an iteration whole. Every write
is one Lua script (``scripts.py``), idempotent by id and fenced by (worker, attempt). A lost connection may
therefore be retried blindly: the worst case is a reply that calls a group a duplicate which the lost reply
called new, or a lease that nobody knows of and that expires.

What surprises: a lease that expired stays valid until somebody takes it over, and backpressure counts only
groups that wait for a scorer, so a scorer must run beside the workers or ``capacity_bytes`` must hold a whole
iteration.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from valkey.exceptions import OutOfMemoryError

from tasks.experience import scripts
from tasks.experience.errors import BufferDamaged, IterationDropped, LeaseLost, PolicyVersionMismatch
from tasks.experience.records import Group, Lease, Produced, Progress, Unscored, WorkItem
from tasks.experience.server import Server


class ExperienceBuffer:
    """One campaign's buffer. Cheap to make; safe to share between threads and over ``fork``."""

    def __init__(
        self,
        url: str,
        campaign: str,
        *,
        lease_seconds: float,
        max_attempts: int,
        capacity_bytes: int,
        reconnect_seconds: float = 30.0,
    ) -> None:
        if not campaign or set("{}") & set(campaign):
            raise ValueError(
                f"campaign must be a name without braces, got {campaign!r}. Rename the campaign."
            )
        for name, value in (("max_attempts", max_attempts), ("capacity_bytes", capacity_bytes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}. Raise buffer.{name}.")
        if lease_seconds < 0.001:  # the server counts milliseconds; 0 would take live leases away
            raise ValueError(f"lease_seconds must be at least 0.001, got {lease_seconds}. Raise it.")
        self.campaign = campaign
        self.lease_seconds = lease_seconds
        self._lease_ms = int(lease_seconds * 1000)
        self._max_attempts = max_attempts
        self._capacity_bytes = capacity_bytes
        self._server = Server(url, reconnect_seconds=reconnect_seconds)

    # ---- work ----

    def put_work(self, items: Iterable[WorkItem], *, chunk: int = 128) -> int:
        """Add what is not there yet, settled or poisoned; returns how many were new. Safe to call again."""
        added = 0
        for iteration, of_iteration in groupby(items, key=lambda item: item.iteration):
            for version, run in groupby(of_iteration, key=lambda item: item.policy_version):
                batch = list(run)
                for start in range(0, len(batch), chunk):
                    added += self._put(iteration, version, batch[start : start + chunk])
        return added

    def _put(self, iteration: int, version: int, items: Sequence[WorkItem]) -> int:
        argv: list[Any] = [version]
        for item in items:
            argv += [item.item_id, item.portion, item.num_groups, item.num_samples, item.payload]
        reply = self._server.when_room(
            "put_work", lambda: self._run("put", iteration, argv), timeout_seconds=60.0
        )
        if reply[0] == -1:
            raise PolicyVersionMismatch(iteration, int(reply[1]), version)
        if reply[0] == -2:
            raise IterationDropped(
                f"iteration {iteration} of campaign {self.campaign} must be open to take work, got a "
                "dropped one: its policy version is committed. Resume at the next iteration, or give a "
                "fresh campaign a new name."
            )
        return int(reply[1])

    def lease(
        self, worker: str, *, iteration: int, policy_version: int | None = None, max_items: int = 1
    ) -> list[Lease]:
        """Take up to ``max_items``: returned and expired leases first, oldest first, then new items.

        Empty while there is nothing to do *now*; ``outstanding`` says whether there is nothing left. All
        items of an iteration require one policy version; a worker that names another one gets
        ``PolicyVersionMismatch``.
        """
        taken = self._take("work", worker, iteration, policy_version, max_items)
        return [
            Lease(
                item=WorkItem(
                    iteration=iteration,
                    portion=int(fields[b"portion"]),
                    policy_version=int(fields[b"version"]),
                    num_groups=int(fields[b"groups"]),
                    num_samples=int(fields[b"samples"]),
                    payload=fields[b"payload"],
                ),
                entry_id=entry,
                worker=worker,
                attempt=attempt,
            )
            for entry, attempt, fields in taken
        ]

    def renew(self, lease: Lease) -> bool:
        """Start the lease's time anew; False if somebody else holds the item by now."""
        return self._run("renew", lease.item.iteration, self._holder(lease)) == 1

    def return_(self, lease: Lease) -> bool:
        """Hand the item back at once. Not counted by ``max_attempts``: a Spot notice is not its fault."""
        return self._run("return", lease.item.iteration, self._holder(lease)) == 1

    def settle(self, lease: Lease) -> bool:
        """Finish the item for good; only the holder of this attempt can. True again when asked again."""
        argv = [lease.entry_id, lease.worker, lease.attempt, lease.item.item_id]
        return self._run("settle", lease.item.iteration, argv) == 1

    def poisoned(self, iteration: int) -> list[tuple[str, str]]:
        """(item id, reason) of the items that no worker survived."""
        found = self._server.read("hgetall", self._key(iteration, "poison"))
        return sorted((item.decode(), reason.decode()) for item, reason in found.items())

    def outstanding(self, iteration: int) -> int:
        """Items neither settled nor poisoned."""
        return int(self._server.read("xlen", self._key(iteration, "work")))

    # ---- rollouts ----

    def publish(self, lease: Lease, groups: Sequence[Group], *, timeout_seconds: float = 600.0) -> int:
        """Store the groups whose ids are new, all or none; returns how many. Blocks while the buffer is full.

        Raises ``LeaseLost``, having stored nothing, when another attempt holds the item, and ``BufferFull``
        when no room appears in time. The lease is renewed meanwhile.
        """
        argv: list[Any] = [lease.entry_id, lease.worker, lease.attempt, self._capacity_bytes]
        for group in groups:
            argv += [group.group_id, group.num_samples, group.payload]

        def attempt() -> Any:
            try:
                reply = self._run("publish", lease.item.iteration, argv)
            except OutOfMemoryError:
                self.renew(lease)
                raise
            return None if reply[0] == 0 else reply

        what = f"publish of item {lease.item.item_id}"
        reply = self._server.when_room(what, attempt, timeout_seconds=timeout_seconds)
        if reply[0] == -1:
            raise LeaseLost(
                f"the lease of item {lease.item.item_id} must be held to publish, got attempt "
                f"{lease.attempt} of {lease.worker}, which was taken over, returned, settled or dropped. "
                "Discard the groups and lease again; if this is frequent, renew more often or raise "
                "buffer.lease_seconds."
            )
        return int(reply[1])

    def published(self, item: WorkItem, group_ids: Sequence[str]) -> set[str]:
        """Those of the item's groups that are stored already, by whichever attempt."""
        found = self._server.read("hmget", self._key(item.iteration, "published"), list(group_ids))
        return {group_id for group_id, entry in zip(group_ids, found, strict=True) if entry is not None}

    def take_rollouts(self, scorer: str, *, iteration: int, max_groups: int) -> list[tuple[str, Group]]:
        """Take groups to score, under the same lease rule as work. The handle names entry and attempt."""
        return [
            (
                f"{entry}@{attempt}",
                Group(
                    group_id=fields[b"id"].decode(),
                    num_samples=int(fields[b"samples"]),
                    payload=fields[b"payload"],
                ),
            )
            for entry, attempt, fields in self._take("rollouts", scorer, iteration, None, max_groups)
        ]

    def renew_rollouts(self, scorer: str, *, iteration: int, handles: Iterable[str]) -> int:
        """Start the time of these anew; returns how many are still held."""
        return int(self._run("renew", iteration, _holders(scorer, handles)))

    def return_rollouts(self, scorer: str, *, iteration: int, handles: Iterable[str]) -> int:
        """Hand these back at once; returns how many were held."""
        return int(self._run("return", iteration, _holders(scorer, handles)))

    def publish_scored(self, scorer: str, iteration: int, scored: Sequence[tuple[str, Group]]) -> int:
        """Store scored groups and settle their entries, atomically; returns how many were stored.

        A handle that another attempt took over is skipped: its new holder will publish. Never refused for
        lack of memory, since it frees what it replaces.
        """
        argv: list[Any] = [scorer]
        for handle, group in scored:
            packed = group.num_samples.to_bytes(4, "big") + group.payload
            argv += [*handle.split("@"), group.group_id, packed]
        reply = self._run("publish_scored", iteration, argv)
        if reply[0] == -1:
            raise ValueError(
                f"a scored group must keep the handle that take_rollouts gave, got group "
                f"{reply[1].decode()} with the handle of another group. Nothing was stored; pair them again."
            )
        return int(reply[1])

    def unscored(self, iteration: int) -> list[Unscored]:
        """Groups that no scorer survived, by group id: rejected samples for the ledger."""
        found = self._server.read("hgetall", self._key(iteration, "unscored"))
        records = []
        for group_id, value in sorted(found.items()):
            samples, reason = value.decode().split(" ", 1)
            records.append(Unscored(group_id=group_id.decode(), num_samples=int(samples), reason=reason))
        return records

    def scored_groups(self, iteration: int) -> list[Group]:
        """All scored groups in ascending code-point order of group id: "10" comes before "9"."""
        return list(self.scan_scored(iteration))

    def scan_scored(self, iteration: int, *, chunk: int = 32) -> Iterator[Group]:
        """``scored_groups`` with only ``chunk`` groups in memory, here and in the server's reply buffer."""
        key = self._key(iteration, "scored")
        group_ids = sorted(self._server.read("hkeys", key))
        for start in range(0, len(group_ids), chunk):
            names = group_ids[start : start + chunk]
            for name, packed in zip(names, self._server.read("hmget", key, names), strict=True):
                if packed is None:
                    raise BufferDamaged(
                        f"scored group {name.decode()} of iteration {iteration} must stay until drop, got "
                        "none. The iteration was dropped or keys were deleted while it was being read."
                    )
                samples = int.from_bytes(packed[:4], "big")
                yield Group(group_id=name.decode(), num_samples=samples, payload=packed[4:])

    # ---- the whole iteration ----

    def produced(self, iteration: int) -> Produced:
        """The buffer's counters for the sample ledger; valid after ``drop``."""
        key = self._key(iteration, "counters")
        samples, duplicates = self._server.read("hmget", key, ["produced", "duplicates"])
        return Produced(samples=int(samples or 0), duplicates=int(duplicates or 0))

    def progress(self, iteration: int) -> Progress:
        entries, oldest_ms, num_bytes, leases, flat = self._run("progress", iteration, [])
        pairs = zip(flat[::2], flat[1::2], strict=True)
        counters = {name.decode(): int(value) for name, value in pairs}
        held = {consumer.decode(): int(number) for consumer, number in leases}
        held.pop(scripts.RETURNED, None)  # handed back is queued, whatever the server calls it
        return Progress(
            queued=entries - sum(held.values()),
            leased=sum(held.values()),
            settled=counters.get("settled", 0),
            poisoned=counters.get("poisoned", 0),
            groups_published=counters.get("groups_published", 0),
            groups_scored=counters.get("groups_scored", 0),
            groups_unscored=counters.get("groups_unscored", 0),
            samples_produced=counters.get("produced", 0),
            duplicates=counters.get("duplicates", 0),
            leases_by_worker=held,
            oldest_lease_seconds=oldest_ms / 1000,
            bytes_waiting=counters.get("bytes_waiting", 0),
            bytes_used=int(num_bytes),
        )

    def drop(self, iteration: int) -> None:
        """Free everything but the counters, once the version trained on the iteration is committed."""
        self._run("drop", iteration, [])

    def check_server(self) -> None:
        """Refuse a server that may evict experience or is too old for the scripts."""
        self._server.check()

    # ---- plumbing ----

    def _take(
        self, stream: str, consumer: str, iteration: int, version: int | None, number: int
    ) -> list[tuple[str, int, dict[bytes, bytes]]]:
        if not consumer or consumer == scripts.RETURNED:
            raise ValueError(
                f"worker and scorer names must not be empty or reserved, got {consumer!r}. Rename."
            )
        if number < 1:
            raise ValueError(f"the number to take must be at least 1, got {number}.")
        wanted = "" if version is None else version
        argv = [stream, consumer, self._lease_ms, self._max_attempts, number, wanted]
        code, detail, *taken = self._run("take", iteration, argv)
        if code == -1:
            raise PolicyVersionMismatch(iteration, int(detail), version)
        if detail:
            raise BufferDamaged(
                f"every leased entry of {self._key(iteration, stream)} must exist until it is settled, got "
                f"{detail} deleted by somebody else (XTRIM, XDEL or eviction). Samples are lost: run this "
                "iteration again."
            )
        return [
            (entry.decode(), attempt, dict(zip(fields[::2], fields[1::2], strict=True)))
            for entry, attempt, fields in taken
        ]

    def _holder(self, lease: Lease) -> list[Any]:
        return ["work", lease.worker, lease.entry_id, lease.attempt]

    def _key(self, iteration: int, name: str) -> str:
        return f"{{{self.campaign}}}:{iteration}:{name}"

    def _run(self, script: str, iteration: int, argv: Sequence[Any]) -> Any:
        keys = [self._key(iteration, name) for name in scripts.KEY_NAMES]
        return self._server.run(script, keys, argv)


def _holders(scorer: str, handles: Iterable[str]) -> list[Any]:
    return ["rollouts", scorer, *(part for handle in handles for part in handle.split("@"))]
