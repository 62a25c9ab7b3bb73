"""The experience buffer: leased work, groups published once, groups scored once, on Valkey servers.

Every iteration has its own work stream, rollout stream and scored hash under the hash tag ``{campaign}`` on
each server (shard). A portion and all its groups live on shard ``portion % shards``, so every write is one
Lua script (``scripts.py``) on one shard, idempotent by id and fenced by (worker, attempt); only the payloads
of groups travel beside it (``group_scripts.py``). A lost connection may therefore be retried blindly: the
worst case is a reply that calls a group a duplicate which the lost reply called new, or a lease that nobody
knows of and that expires.

``close`` ends an iteration's generation: no more leases, no more groups; ``drop`` frees it whole.

What surprises: a lease that expired stays valid until somebody takes it over, and backpressure counts only
groups that wait for a scorer, so a scorer must run beside the workers or ``capacity_bytes`` (a shard) must
hold a whole iteration.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from valkey.exceptions import OutOfMemoryError

from tasks.experience.errors import BufferDamaged, IterationClosed, LeaseLost
from tasks.experience.prelude import RETURNED
from tasks.experience.records import (
    Group,
    Held,
    Lease,
    Produced,
    Progress,
    Unscored,
    WorkItem,
    combined,
    progress,
)
from tasks.experience.shards import Shards


class ExperienceBuffer:
    """One campaign's buffer. Cheap to make; safe to share between threads and over ``fork``."""

    def __init__(
        self,
        url: str | Sequence[str],
        campaign: str,
        *,
        lease_seconds: float,
        max_attempts: int,
        capacity_bytes: int,
        **connection: Any,
    ) -> None:
        """``connection``: how each ``Server`` is reached."""
        if not campaign or set("{}") & set(campaign):
            raise ValueError(
                f"campaign must be a name without braces, got {campaign!r}. Rename the campaign."
            )
        for key, value in (("max_attempts", max_attempts), ("capacity_mb", capacity_bytes)):
            if value < 1:
                raise ValueError(f"buffer.{key} must be above 0, got {value}. Raise it.")
        if lease_seconds < 0.001:  # the server counts milliseconds; 0 would take live leases away
            raise ValueError(f"rollout.lease_seconds must be at least 0.001, got {lease_seconds}. Raise it.")
        self.campaign = campaign
        self.lease_seconds = lease_seconds
        self._terms = [int(lease_seconds * 1000), max_attempts]
        self._capacity_bytes = capacity_bytes
        urls = [url] if isinstance(url, str) else url
        self._shards = Shards(urls, campaign, **connection)

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
        added = 0
        for shard in self._shards.numbers:
            argv: list[Any] = [version, iteration, self._shards.layout(shard)]
            for item in items:
                if self._shards.of(item) == shard:
                    argv += [item.item_id, item.portion, item.num_groups, item.num_samples, item.payload]
            put = partial(self._shards.run, "put", iteration, argv, shard)
            reply = self._shards.servers[shard].when_room("put_work", put, timeout_seconds=60.0)
            self._shards.refuse(reply, iteration, version, shard)
            added += int(reply[1])
        return added

    def lease(
        self, worker: str, *, iteration: int, policy_version: int | None = None, max_items: int = 1
    ) -> list[Lease]:
        """Take up to ``max_items``: returned and expired leases first, oldest first, then new items.

        Workers begin at different shards, and each shard orders its own.
        Empty while there is nothing to do *now*; ``outstanding`` says whether there is nothing left. All
        items of an iteration require one policy version; a worker that names another one gets
        ``PolicyVersionMismatch``.
        """
        leases = []
        taken, _ = self._shards.take(
            "work", worker, self._terms, iteration=iteration, version=policy_version, number=max_items
        )
        for _, head, payload in taken:
            entry, attempt, portion, version, groups, samples = head.split(" ")
            found = WorkItem(
                iteration=iteration,
                portion=int(portion),
                policy_version=int(version),
                num_groups=int(groups),
                num_samples=int(samples),
                payload=payload,
            )
            leases.append(Lease(item=found, entry_id=entry, worker=worker, attempt=int(attempt)))
        return leases

    def renew(self, lease: Lease) -> bool:
        """Start the lease's time anew; False if somebody else holds the item by now."""
        return self._shards.run_for(lease.item, "renew", self._holder(lease)) == 1

    def return_(self, lease: Lease) -> bool:
        """Hand the item back at once. Not counted by ``max_attempts``: a Spot notice is not its fault."""
        return self._shards.run_for(lease.item, "return", self._holder(lease)) == 1

    def fail(self, lease: Lease, reason: str) -> bool:
        """Hand the item back at once, as an attempt that failed: ``max_attempts`` of them set it aside."""
        argv = [lease.entry_id, lease.worker, lease.attempt, reason]
        return self._shards.run_for(lease.item, "fail", argv) == 1

    def settle(self, lease: Lease) -> bool:
        """Finish the item for good; only the holder of this attempt can. True again when asked again."""
        argv = [lease.entry_id, lease.worker, lease.attempt, lease.item.item_id]
        return self._shards.run_for(lease.item, "settle", argv) == 1

    def poisoned(self, iteration: int) -> list[tuple[str, str]]:
        """(item id, reason) of the items that no worker survived."""
        found = self._shards.read("hgetall", self._shards.key(iteration, "poison"))
        return sorted((item.decode(), reason.decode()) for each in found for item, reason in each.items())

    def outstanding(self, iteration: int) -> int:
        """Items neither settled nor poisoned; none once the iteration is closed."""
        return sum(map(int, self._shards.read("xlen", self._shards.key(iteration, "work"))))

    def open_iterations(self) -> dict[int, int]:
        """Iteration -> policy version that must sample it, ascending; closed ones are not in it."""
        found = self._shards.read("hgetall", self._shards.campaign_key("open"))
        return dict(sorted((int(k), int(version)) for each in found for k, version in each.items()))

    def close(self, iteration: int) -> int:
        """End generation: leases are void, late groups refused. Returns the items left over; repeatable."""
        return sum(int(self._shards.run("close", iteration, [iteration], n)) for n in self._shards.numbers)

    def barred(self) -> dict[str, str]:
        """Worker -> why it gets no more work."""
        found = self._shards.read("hgetall", self._shards.campaign_key("barred"))
        return {worker.decode(): why.decode() for each in found for worker, why in each.items()}

    # ---- rollouts ----

    def publish(
        self,
        lease: Lease,
        groups: Sequence[Group],
        *,
        num_tokens: int = 0,
        seconds: float = 0.0,
        timeout_seconds: float = 600.0,
    ) -> int:
        """Store the groups whose ids are new, all or none; returns how many. Blocks while the buffer is full.

        Raises ``LeaseLost``, having stored nothing, when another attempt holds the item or the iteration is
        closed, and ``BufferFull`` when no room appears in time. The lease is renewed meanwhile.
        ``num_tokens`` and ``seconds`` are what the groups took, for the worker's throughput.
        """
        argv: list[Any] = [lease.entry_id, lease.worker, lease.attempt, self._capacity_bytes]
        argv += [lease.item.item_id, num_tokens, round(seconds * 1000)]
        for group in groups:
            argv += [group.group_id, group.num_samples, len(group.payload)]
        payloads, is_full = [group.payload for group in groups], False

        def attempt() -> Any:
            nonlocal is_full
            if is_full:  # asked without the payloads, which the server's log would otherwise hold each time
                reply = self._shards.run_for(lease.item, "publish", ["", *argv])
                if reply[0] != 1:
                    return reply if reply[0] else None
            try:
                if payloads:
                    reply = self._shards.publish(lease.item, argv, payloads)
                else:
                    reply = self._shards.run_for(lease.item, "publish", ["none", *argv])
            except OutOfMemoryError:
                self.renew(lease)
                raise
            if reply[0] == -3:  # replied by a server that had memory again by then
                return None
            is_full = reply[0] == 0
            return None if is_full else reply

        what = f"publish of item {lease.item.item_id}"
        server = self._shards.servers[self._shards.of(lease.item)]
        reply = server.when_room(what, attempt, timeout_seconds=timeout_seconds)
        if reply[0] == -2:
            raise IterationClosed(
                f"iteration {lease.item.iteration} must be open to publish, got a closed one: its "
                "quota is met or its scoring has begun. Discard the groups and lease of another iteration."
            )
        if reply[0] == -1:
            raise LeaseLost(
                f"the lease of item {lease.item.item_id} must be held to publish, got attempt "
                f"{lease.attempt} of {lease.worker}, which was taken over, returned, settled or dropped. "
                "Discard the groups and lease again; if this is frequent, renew more often or raise "
                "rollout.lease_seconds."
            )
        return int(reply[1])

    def published(self, item: WorkItem, group_ids: Sequence[str]) -> set[str]:
        """Those of the item's groups that are stored already, by whichever attempt."""
        server = self._shards.servers[self._shards.of(item)]
        found = server.read("hmget", self._shards.key(item.iteration, "published"), list(group_ids))
        return {group_id for group_id, entry in zip(group_ids, found, strict=True) if entry is not None}

    def park(self, lease: Lease, groups: Sequence[Group]) -> int:
        """Keep what unfinished groups have so far, for whoever goes on; returns how many were kept.

        None of an item that another attempt holds, nor where the server is out of memory: parking saves work
        and must never stand in a departing worker's way.
        """
        argv: list[Any] = [lease.entry_id, lease.worker, lease.attempt]
        for group in groups:
            argv += [group.group_id, group.payload]
        try:
            return int(self._shards.run_for(lease.item, "park", argv))
        except OutOfMemoryError:
            return 0

    def inherit(self, item: WorkItem, groups: Sequence[Group]) -> int:
        """Park what an earlier iteration has of the item's groups, before the item is put on the queue."""
        argv: list[Any] = ["", "", 0]
        for group in groups:
            argv += [group.group_id, group.payload]
        return int(self._shards.run_for(item, "park", argv)) if groups else 0

    def all_parked(self, iteration: int) -> dict[str, bytes]:
        """Group id -> what it has so far, of every group that was interrupted and is not published."""
        found = self._shards.read("hgetall", self._shards.key(iteration, "parked"))
        return {name.decode(): payload for each in found for name, payload in each.items()}

    def parked(self, item: WorkItem, group_ids: Sequence[str]) -> dict[str, bytes]:
        """What was kept of the item's groups, where anything was."""
        server = self._shards.servers[self._shards.of(item)]
        found = server.read("hmget", self._shards.key(item.iteration, "parked"), list(group_ids))
        return {name: payload for name, payload in zip(group_ids, found, strict=True) if payload is not None}

    def take_rollouts(self, scorer: str, *, iteration: int, max_groups: int) -> list[Held]:
        """Take groups to score, under the same lease rule as work. The handle names entry and attempt."""
        return self.exchange_rollouts(scorer, iteration, [], max_groups=max_groups)[1]

    def renew_rollouts(self, scorer: str, *, iteration: int, handles: Iterable[str]) -> int:
        """Start the time of these anew; returns how many are still held."""
        return self._shards.run_handles("renew", iteration, ["rollouts", scorer], handles)

    def return_rollouts(self, scorer: str, *, iteration: int, handles: Iterable[str]) -> int:
        """Hand these back at once; returns how many were held."""
        return self._shards.run_handles("return", iteration, ["rollouts", scorer], handles)

    def refuse_rollout(self, scorer: str, iteration: int, handle: str, reason: str) -> str | None:
        """Forget a group that cannot be read, bar the worker that published it and put its item on the queue
        again; returns that worker, or None if the group was taken over."""
        entry, attempt, shard = handle.split("@")
        reply = self._shards.run("refuse", iteration, [scorer, entry, attempt, reason], int(shard))
        return reply[1].decode() if reply[0] == 1 else None

    def publish_scored(self, scorer: str, iteration: int, scored: Sequence[Held]) -> int:
        """Store scored groups and settle their entries, atomically; returns how many were stored.

        A handle that another attempt took over is skipped: its new holder will publish. Never refused for
        lack of memory, since it frees what it replaces.
        """
        return self.exchange_rollouts(scorer, iteration, scored, max_groups=0)[0] if scored else 0

    def exchange_rollouts(
        self, scorer: str, iteration: int, scored: Sequence[Held], *, max_groups: int
    ) -> tuple[int, list[Held]]:
        """``publish_scored``, then ``take_rollouts``, in as many round trips as the second alone.

        Returns (how many were stored, groups taken).
        """
        argv: dict[int, list[Any]] = {}
        for handle, group in scored:
            entry, attempt, shard = handle.split("@")
            packed = group.num_samples.to_bytes(4, "big") + group.payload
            argv.setdefault(int(shard), [scorer]).extend((entry, attempt, group.group_id, packed))
        found, stored = self._shards.take(
            "rollouts", scorer, self._terms, iteration=iteration, number=max_groups, scored=argv
        )
        taken = []
        for shard, head, payload in found:
            entry, attempt, _, _, samples, group_id = head.split(" ", 5)
            group = Group(group_id=group_id, num_samples=int(samples), payload=payload)
            taken.append((f"{entry}@{attempt}@{shard}", group))
        return stored, taken

    def unscored(self, iteration: int) -> list[Unscored]:
        """Groups that no scorer survived, by group id: rejected samples for the ledger."""
        records = []
        for found in self._shards.read("hgetall", self._shards.key(iteration, "unscored")):
            for group_id, value in found.items():
                head, payload = value.split(b"\n", 1)
                samples, reason = head.decode().split(" ", 1)
                group = Group(group_id=group_id.decode(), num_samples=int(samples), payload=payload)
                records.append(Unscored(group=group, reason=reason))
        return sorted(records, key=lambda record: record.group.group_id)

    def scored_groups(self, iteration: int) -> list[Group]:
        """All scored groups in ascending code-point order of group id: "10" comes before "9"."""
        return list(self.scan_scored(iteration))

    def scan_scored(self, iteration: int, *, chunk: int = 32) -> Iterator[Group]:
        """``scored_groups`` with only ``chunk`` groups in memory, here and in the server's reply buffer."""
        key = self._shards.key(iteration, "scored")
        found = enumerate(self._shards.read("hkeys", key))
        names = sorted((name, shard) for shard, keys in found for name in keys)
        for start in range(0, len(names), chunk):
            part, values = names[start : start + chunk], {}
            for shard, server in enumerate(self._shards.servers):
                if here := [name for name, where in part if where == shard]:
                    values |= dict(zip(here, server.read("hmget", key, here), strict=True))
            for name, _ in part:
                packed = values[name]
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
        names = ["produced", "duplicates", "refused", "late", "dropped"]
        found = self._shards.read("hmget", self._shards.key(iteration, "counters"), names)
        samples, twice, refused, late, gone = (
            sum(int(n or 0) for n in column) for column in zip(*found, strict=True)
        )
        return Produced(samples=samples, duplicates=twice, refused=refused, late=late, is_dropped=gone > 0)

    def num_published(self, iteration: int) -> int:
        """Groups stored so far; what a quota counts."""
        found = self._shards.read("hget", self._shards.key(iteration, "counters"), "groups_published")
        return sum(int(number or 0) for number in found)

    def credit(self, iteration: int, groups: int) -> None:
        """Finished groups that the iteration inherits: they count towards its quota. Safe to repeat."""
        self._shards.servers[0].read("hset", self._shards.key(iteration, "counters"), "credited", groups)

    def has_met(self, iteration: int, quota: int) -> bool:
        """Whether as many groups are published or inherited."""
        names = ["groups_published", "credited"]
        found = self._shards.read("hmget", self._shards.key(iteration, "counters"), names)
        return sum(int(number or 0) for each in found for number in each) >= quota

    def progress(self, iteration: int) -> Progress:
        """Consistent a shard."""
        return combined(
            [
                progress(self._shards.run("progress", iteration, [], n), returned=RETURNED)
                for n in self._shards.numbers
            ]
        )

    def drop(self, iteration: int) -> None:
        """Free everything but the counters, once the version trained on the iteration is committed."""
        for shard in self._shards.numbers:
            self._shards.run("drop", iteration, [iteration], shard)

    def memory(self) -> list[tuple[int, int]]:
        """Bytes that each server uses, and those that it may use."""
        found = self._shards.read("info", "memory")
        return [(int(server["used_memory"]), int(server["maxmemory"])) for server in found]

    def reopen(self, iteration: int) -> None:
        """Let a dropped iteration that no version was trained on begin anew, its counters too."""
        for shard in self._shards.numbers:
            self._shards.run("reopen", iteration, [], shard)

    def check_server(self) -> None:
        """Refuse servers that may evict experience or are too old for the scripts."""
        for server in self._shards.servers:
            server.check()

    def _holder(self, lease: Lease) -> list[Any]:
        return ["work", lease.worker, lease.entry_id, lease.attempt]
