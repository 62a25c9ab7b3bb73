"""The servers that one campaign's buffer is spread over: which one holds what, and how all are asked."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.experience import scripts
from tasks.experience.errors import (
    BufferDamaged,
    IterationDropped,
    PolicyVersionMismatch,
    ShardMismatch,
    WorkerBarred,
)
from tasks.experience.prelude import CAMPAIGN_KEYS, RETURNED
from tasks.experience.records import WorkItem
from tasks.experience.server import Call, Server

Taken = tuple[int, str, bytes]
"""(shard, head, payload) of what a consumer was handed; the head's values are in the script's order."""


class Shards:
    """A fixed list of servers; its order and length are part of an iteration: scripts refuse another list."""

    def __init__(self, urls: Sequence[str], campaign: str, **connection: Any) -> None:
        """``connection``: how each ``Server`` is reached."""
        if not urls or len(set(urls)) < len(urls):
            raise ValueError("buffer.url must name one or more different servers. Remove repetitions.")
        self.campaign = campaign
        self.servers = [Server(url, **connection) for url in urls]
        self.numbers = range(len(self.servers))
        self._key_lists: dict[tuple[str, int], list[bytes]] = {}

    def of(self, item: WorkItem) -> int:
        return item.portion % len(self.servers)

    def layout(self, shard: int) -> str:
        return f"{shard}/{len(self.servers)}"

    def key(self, iteration: int, name: str) -> str:
        return f"{{{self.campaign}}}:{iteration}:{name}"

    def campaign_key(self, name: str) -> str:
        return f"{{{self.campaign}}}:{name}"

    def read(self, command: str, *arguments: Any) -> list[Any]:
        """The answer of every server."""
        return [server.read(command, *arguments) for server in self.servers]

    def run(self, script: str, iteration: int, argv: Sequence[Any], shard: int) -> Any:
        return self.servers[shard].run(script, self._keys(script, iteration), argv)

    def _keys(self, script: str, iteration: int) -> list[bytes]:
        """KEYS of the script, encoded once: a scorer's time goes into small strings."""
        if (keys := self._key_lists.get((script, iteration))) is None:
            keys = [
                (self.campaign_key(name) if name in CAMPAIGN_KEYS else self.key(iteration, name)).encode()
                for name in scripts.ALL[script].key_names
            ]
            self._key_lists[script, iteration] = keys
        return keys

    def run_for(self, item: WorkItem, script: str, argv: Sequence[Any]) -> Any:
        return self.run(script, item.iteration, argv, self.of(item))

    def run_handles(self, script: str, iteration: int, head: list[Any], handles: Iterable[str]) -> int:
        """Sum of the replies to lists of (entry, attempt), each sent to the shard that its handles name."""
        split = [handle.split("@") for handle in handles]
        total = 0
        for shard in self.numbers:
            if here := [part for *fence, where in split if int(where) == shard for part in fence]:
                total += int(self.run(script, iteration, [*head, *here], shard))
        return total

    def take(
        self,
        stream: str,
        consumer: str,
        terms: list[int],
        *,
        iteration: int,
        version: int | None = None,
        number: int,
        scored: Mapping[int, Sequence[Any]] = {},
    ) -> tuple[list[Taken], int]:
        """Up to ``number`` entries. Consumers begin at different shards, so that none is asked by all first.

        Args:
            terms: lease in ms, attempts at most.
            scored: by shard, arguments of ``publish_scored``, which runs just before the shard is asked.

        Returns:
            the entries, and how many scored groups were stored.
        """
        if not consumer or consumer == RETURNED:
            raise ValueError(
                f"worker and scorer names must not be empty or reserved, got {consumer!r}. Rename."
            )
        if number < 1 and not scored:
            raise ValueError(f"the number to take must be at least 1, got {number}.")
        taken: list[Taken] = []
        stored = 0
        first = zlib.crc32(consumer.encode())
        for shard in ((first + n) % len(self.servers) for n in self.numbers):
            calls: list[Call] = []
            if shard in scored:
                calls.append(("publish_scored", self._keys("publish_scored", iteration), scored[shard]))
            if len(taken) < number:
                wanted = "" if version is None else version
                argv = [stream, consumer, *terms, number - len(taken), wanted, self.layout(shard)]
                calls.append(("take", self._keys("take", iteration), argv))
            found = self.servers[shard].run_all(calls) if calls else []
            if shard in scored:
                stored += self._stored(found[0])
            if len(taken) < number:
                taken += self._taken(stream, consumer, found[-1], iteration, version, shard)
        return taken, stored

    def _stored(self, reply: Sequence[Any]) -> int:
        if reply[0] == -1:
            raise ValueError(
                f"a scored group must keep the handle that take_rollouts gave, got group {reply[1].decode()} "
                "with the handle of another group. Nothing of its shard was stored; pair them again."
            )
        return int(reply[1])

    def _taken(
        self, stream: str, consumer: str, reply: list[Any], iteration: int, version: int | None, shard: int
    ) -> list[Taken]:
        """What the script ``take`` handed out."""
        if reply[0] == -2:
            raise WorkerBarred(
                f"worker {consumer} must publish groups that can be read, got barred: "
                f"{reply[1].decode()}. Its items went back to the queue; replace the worker."
            )
        self.refuse(reply, iteration, version, shard)
        if reply[1]:
            raise BufferDamaged(
                f"every leased entry of {self.key(iteration, stream)} must exist until it is settled, "
                f"got {reply[1]} deleted by somebody else (XTRIM, XDEL or eviction). Samples are lost: "
                "run this iteration again."
            )
        if stream == "work":
            pairs = zip(reply[2::2], reply[3::2], strict=True)
            return [(shard, head.decode(), payload) for head, payload in pairs]
        heads = [head.decode() for head in reply[2:]]
        return self._with_payloads(consumer, iteration, shard, heads) if heads else []

    def _with_payloads(self, scorer: str, iteration: int, shard: int, heads: list[str]) -> list[Taken]:
        """Groups with their payloads, less those that another scorer took over and scored meanwhile."""
        key, complete = self.key(iteration, "payloads"), []
        blobs = [head.split(" ", 3)[2] for head in heads]
        for head, payload in zip(heads, self.servers[shard].read("hmget", key, blobs), strict=True):
            if payload is not None:
                complete.append((shard, head, payload))
                continue
            entry, attempt, blob, _ = head.split(" ", 3)
            if self.run("renew", iteration, ["rollouts", scorer, entry, attempt], shard):
                raise BufferDamaged(
                    f"every payload of {key} must exist until its group is scored, got {blob} deleted by "
                    "somebody else (HDEL or eviction). Samples are lost: run this iteration again."
                )
        return complete

    def publish(self, item: WorkItem, argv: Sequence[Any], payloads: Sequence[bytes]) -> Any:
        """The script ``publish``, behind the payloads of its groups."""
        key, keys = self.key(item.iteration, "payloads"), self._keys("publish", item.iteration)
        return self.servers[self.of(item)].run_with_values("publish", keys, argv, key, payloads)

    def refuse(self, reply: Sequence[Any], iteration: int, version: int | None, shard: int) -> None:
        """Raise what a negative first value of a reply stands for."""
        if reply[0] == -1:
            raise PolicyVersionMismatch(iteration, int(reply[1]), version)
        if reply[0] == -2:
            raise IterationDropped(
                f"iteration {iteration} of campaign {self.campaign} must be open to take work, got a "
                "dropped one: its policy version is committed, or another run of the campaign set it aside. "
                "Let one run of a campaign work at a time, and run it again to go on."
            )
        if reply[0] == -3:
            raise ShardMismatch(
                f"iteration {iteration} must be used with the servers it was put on, shard "
                f"{reply[1].decode()} (number/all), got shard {self.layout(shard)}. Restore buffer.url, or "
                "let the iteration end before it changes."
            )
