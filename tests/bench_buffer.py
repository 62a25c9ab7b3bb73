"""What the buffer costs: python tests/bench_buffer.py prints one table. 8 producers, 2 consumers, one server.

Rows of one size: plain Valkey commands as the floor, the buffer's publish, take and score, and the buffer
with payloads in S3 objects, their keys in the stream. Then what renewals cost with 1,000 workers.

The floor is what a plain queue that works needs: XADD, XREADGROUP, then XACK and XDEL, each in batches of 16.
It leaves out all that the buffer is for: a sample published twice is two samples, nobody holds a lease and a
late worker writes what it likes, an entry whose consumer died is never taken again, nothing bounds the memory
or counts for a ledger, and the score goes nowhere (the buffer stores it in the same step as the XACK).

Every way is run in short rounds in turn, and a round is compared with the floor's round beside it: by speed,
which depends on what else the machine does, and by CPU seconds of server and clients, which hardly do.
Producers and consumers are processes: threads would share an interpreter's lock.
"""

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import valkey

from tasks.artifacts.store import open_store
from tasks.embedded.valkey import ensure_valkey
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.records import Group, WorkItem

PRODUCERS, CONSUMERS, BATCH = 8, 2, 16


def open_buffer(url: str, campaign: str) -> ExperienceBuffer:
    return ExperienceBuffer(url, campaign, lease_seconds=600, max_attempts=9, capacity_bytes=1 << 40)


def plain_put(job: "Job", number: int) -> None:
    client, payload = valkey.Valkey.from_url(job.url), bytes(job.size)
    client.ping()
    with job.measured():
        for start in range(0, job.each, BATCH):
            pipe = client.pipeline(transaction=False)
            for n in range(start, start + BATCH):
                pipe.xadd(job.name, {"id": f"{number}/{n}", "payload": payload})
            pipe.execute()


def plain_take(job: "Job", number: int) -> None:
    client = valkey.Valkey.from_url(job.url)
    client.ping()
    with job.measured():
        while job.is_waiting():
            found: Any = client.xreadgroup("g", f"c{number}", {job.name: ">"}, count=BATCH)
            if not found:
                time.sleep(0.002)
                continue
            entries = [entry for entry, _ in found[0][1]]
            pipe = client.pipeline(transaction=False)
            pipe.xack(job.name, "g", *entries)
            pipe.xdel(job.name, *entries)
            pipe.execute()
            job.count(len(entries))


def buffer_put(job: "Job", number: int) -> None:
    buffer, payload = open_buffer(job.url, job.name), bytes(job.size)
    objects = open_store(job.store, job.name) if job.store else None
    (lease,) = buffer.lease(f"p{number}", iteration=0)
    with job.measured():
        for start in range(0, job.each, BATCH):
            groups = []
            for n in range(start, start + BATCH):
                body = payload
                if objects:
                    body = f"blobs-{number}/{n}".encode()
                    objects.replace_object(body.decode(), payload)
                groups.append(Group(group_id=f"{number}/{n}", num_samples=1, payload=body))
            buffer.publish(lease, groups)
        buffer.settle(lease)


def buffer_take(job: "Job", number: int) -> None:
    buffer, scorer = open_buffer(job.url, job.name), f"c{number}"
    objects = open_store(job.store, job.name) if job.store else None
    buffer.outstanding(0)
    scores: list[tuple[str, Group]] = []
    with job.measured():
        while job.is_waiting():
            stored, taken = buffer.exchange_rollouts(scorer, 0, scores, max_groups=BATCH)
            job.count(stored)
            if objects:
                for _, group in taken:
                    objects.get_object(group.payload.decode())
            scores = [
                (handle, Group(group_id=group.group_id, num_samples=1, payload=b"1.0"))
                for handle, group in taken
            ]
            if not taken:
                time.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Cost:
    samples_per_second: float
    server_us: float
    """CPU microseconds of the server for a sample."""
    clients_us: float

    @property
    def cpu_us(self) -> float:
        return self.server_us + self.clients_us


class Job:
    """One round: what its processes do and what they spent. They begin together, once all are connected."""

    def __init__(self, url: str, *, each: int, size: int, store: str) -> None:
        self.url, self.each, self.size, self.store = url, each, size, store
        self.name, self.fork = f"bench-{uuid.uuid4().hex[:8]}", multiprocessing.get_context("fork")
        self._total = each * PRODUCERS
        self._begin = self.fork.Barrier(PRODUCERS + CONSUMERS + 1)
        self._taken, self._cpu = self.fork.Value("q", 0), self.fork.Value("d", 0.0)

    def is_waiting(self) -> bool:
        return self._taken.value < self._total

    def count(self, samples: int) -> None:
        with self._taken:
            self._taken.value += samples

    @contextmanager
    def measured(self) -> Iterator[None]:
        self._begin.wait()
        before = os.times()
        yield
        after = os.times()
        with self._cpu:
            self._cpu.value += after.user + after.system - before.user - before.system

    def run(self, put: Callable[["Job", int], None], take: Callable[["Job", int], None]) -> Cost:
        client = valkey.Valkey.from_url(self.url)
        if put is plain_put:
            client.xgroup_create(self.name, "g", id="0", mkstream=True)
        else:
            open_buffer(self.url, self.name).put_work(
                WorkItem(
                    iteration=0,
                    portion=p,
                    policy_version=0,
                    num_groups=self.each,
                    num_samples=self.each,
                    payload=b"",
                )
                for p in range(PRODUCERS)
            )
        processes = [self.fork.Process(target=put, args=(self, n)) for n in range(PRODUCERS)]
        processes += [self.fork.Process(target=take, args=(self, n)) for n in range(CONSUMERS)]
        for process in processes:
            process.start()
        before = server_seconds(client)
        self._begin.wait(timeout=60)
        start = time.monotonic()
        for process in processes:
            process.join()
        seconds, server = time.monotonic() - start, server_seconds(client) - before
        assert self._taken.value == self._total, "samples were lost or doubled"
        client.flushall()
        scale = 1e6 / self._total
        return Cost(self._total / seconds, server * scale, self._cpu.value * scale)


def server_seconds(client: valkey.Valkey) -> float:
    spent: Any = client.info("cpu")
    return spent["used_cpu_user"] + spent["used_cpu_sys"]


def compare(url: str, folder: str, size: int, rates: Sequence[int], *, seconds: float, rounds: int) -> None:
    """Prints a row a way. One short round of each after the other, so that a busy machine is so for all."""
    ways = (
        ("plain commands (floor)", plain_put, plain_take, rates[0], ""),
        ("buffer", buffer_put, buffer_take, rates[0], ""),
        ("buffer, payloads in S3", buffer_put, buffer_take, rates[1], folder),
    )
    costs: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        for name, put, take, expected, store in ways:
            each = max(BATCH, int(seconds * expected / PRODUCERS) // BATCH * BATCH)
            costs.setdefault(name, []).append(Job(url, each=each, size=size, store=store).run(put, take))
    floor = costs[ways[0][0]]
    for name, found in costs.items():
        rate = statistics.median(cost.samples_per_second for cost in found)
        pairs = list(zip(found, floor, strict=True))
        speed = [cost.samples_per_second / least.samples_per_second for cost, least in pairs]
        thrift = [least.cpu_us / cost.cpu_us for cost, least in pairs]
        print(
            f"{size >> 10:>4} KiB  {name:<23} {rate:>8,.0f} {rate * size / 1e6:>6,.0f} "
            f"{statistics.median(speed):>6.0%} ({min(speed):.0%}-{max(speed):.0%}) "
            f"{statistics.median(thrift):>6.0%} ({min(thrift):.0%}-{max(thrift):.0%}) "
            f"{statistics.median(cost.server_us for cost in found):>7.0f} "
            f"{statistics.median(cost.clients_us for cost in found):>7.0f}",
            flush=True,
        )


WORKERS, RENEWERS, RENEWALS = 1000, 8, 5
"""Simulated workers, the processes that hold their connections, and renewals of each worker."""


def renew_all(url: str, name: str, number: int, times: Any) -> None:
    """The leases of some workers, each worker with a connection and a lease of its own."""
    names = range(number, WORKERS, RENEWERS)
    held = [(buffer := open_buffer(url, name), buffer.lease(f"w{n}", iteration=0)[0]) for n in names]
    measured = []
    for _ in range(RENEWALS):
        for buffer, lease in held:
            start = time.perf_counter()
            assert buffer.renew(lease)
            measured.append(time.perf_counter() - start)
    times.put(measured)


def renewal(url: str) -> tuple[float, float, float, float]:
    """Median and 99th percentile of a renewal in ms, renewals a second, and the server's CPU microseconds for
    one: that count does not depend on what else the machine does."""
    name, fork = f"bench-{uuid.uuid4().hex[:8]}", multiprocessing.get_context("fork")
    open_buffer(url, name).put_work(
        WorkItem(iteration=0, portion=p, policy_version=0, num_groups=1, num_samples=1, payload=b"x" * 4096)
        for p in range(WORKERS)
    )
    times, client = fork.Queue(), valkey.Valkey.from_url(url)
    processes = [fork.Process(target=renew_all, args=(url, name, n, times)) for n in range(RENEWERS)]
    before, start = client.info("commandstats"), time.monotonic()
    for process in processes:
        process.start()
    found = sorted(seconds for _ in processes for seconds in times.get())
    elapsed, after = time.monotonic() - start, client.info("commandstats")
    for process in processes:
        process.join()
    renew = "cmdstat_evalsha"  # leases are scripts too: one for each worker, beside RENEWALS renewals
    spent = after[renew]["usec"] - before.get(renew, {"usec": 0})["usec"]
    calls = after[renew]["calls"] - before.get(renew, {"calls": 0})["calls"]
    return (
        1e3 * found[len(found) // 2],
        1e3 * found[int(len(found) * 0.99)],
        len(found) / elapsed,
        spent / calls,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0, help="rough length of one round")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each way; medians are printed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = ensure_valkey(Path(folder))
        print(
            f"{platform.machine()}, {multiprocessing.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, "
            f"{PRODUCERS} producers, {CONSUMERS} consumers, medians of {options.rounds} rounds"
        )
        print(f"  sample  {'way':<23} {'samples/s MB/s':>15}  of floor: speed, CPU   CPU us: server, clients")
        for size, rates in ((8 << 10, (12000, 150)), (256 << 10, (800, 100))):
            compare(url, folder, size, rates, seconds=options.seconds, rounds=options.rounds)
        median, worst, rate, cpu = renewal(url)
        print(
            f"renewal by {WORKERS:,} workers with a connection each: median {median:.2f} ms, p99 "
            f"{worst:.2f} ms, {rate:,.0f} a second; {cpu:.0f} us of the server each"
        )
        print(f"one renewal a worker every 20 s takes {WORKERS / 20 * cpu / 1e6:.2%} of the server's core")


if __name__ == "__main__":
    main()
