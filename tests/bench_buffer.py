"""What the buffer costs: python tests/bench_buffer.py prints one table. 8 producers, 2 consumers, one server.

Rows of one size: plain Valkey commands (XADD, XREADGROUP, XACK + XDEL in a pipeline) as the floor, the
buffer's publish, take and score, and the buffer with payloads in S3 objects, their keys in the stream. Then
what renewals cost while 1,000 workers hold leases. Producers and consumers are processes: threads would
share an interpreter's lock.
"""

import argparse
import multiprocessing
import platform
import tempfile
import time
import uuid
from collections.abc import Callable
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


def plain_put(url: str, name: str, number: int, each: int, size: int, store: str) -> None:
    client, payload = valkey.Valkey.from_url(url), bytes(size)
    for start in range(0, each, BATCH):
        pipe = client.pipeline(transaction=False)
        for n in range(start, start + BATCH):
            pipe.xadd(name, {"id": f"{number}/{n}", "payload": payload})
        pipe.execute()


def plain_take(url: str, name: str, number: int, total: int, size: int, store: str) -> None:
    client = valkey.Valkey.from_url(url)
    while client.get(f"{name}:done") is None:
        found: Any = client.xreadgroup("g", f"c{number}", {name: ">"}, count=BATCH, block=20)
        if not found:
            continue
        entries = [entry for entry, _ in found[0][1]]
        pipe = client.pipeline(transaction=False)
        pipe.xack(name, "g", *entries)
        pipe.xdel(name, *entries)
        pipe.incrby(f"{name}:taken", len(entries))
        if pipe.execute()[-1] >= total:
            client.set(f"{name}:done", 1)


def buffer_put(url: str, name: str, number: int, each: int, size: int, store: str) -> None:
    buffer, payload = open_buffer(url, name), bytes(size)
    objects = open_store(store, name) if store else None
    (lease,) = buffer.lease(f"p{number}", iteration=0)
    for start in range(0, each, BATCH):
        groups = []
        for n in range(start, start + BATCH):
            body = payload
            if objects:
                body = f"blobs-{number}/{n}".encode()
                objects.replace_object(body.decode(), payload)
            groups.append(Group(group_id=f"{number}/{n}", num_samples=1, payload=body))
        buffer.publish(lease, groups)
    buffer.settle(lease)


def buffer_take(url: str, name: str, number: int, total: int, size: int, store: str) -> None:
    buffer = open_buffer(url, name)
    objects = open_store(store, name) if store else None
    client = valkey.Valkey.from_url(url)
    while client.get(f"{name}:done") is None:
        taken = buffer.take_rollouts(f"c{number}", iteration=0, max_groups=BATCH)
        if not taken:
            time.sleep(0.002)
            continue
        if objects:
            for _, group in taken:
                objects.get_object(group.payload.decode())
        scores = [
            (handle, Group(group_id=group.group_id, num_samples=1, payload=b"1.0")) for handle, group in taken
        ]
        buffer.publish_scored(f"c{number}", 0, scores)
        if client.incrby(f"{name}:taken", len(taken)) >= total:
            client.set(f"{name}:done", 1)


def samples_per_second(
    url: str, put: Callable[..., None], take: Callable[..., None], *, each: int, size: int, store: str = ""
) -> float:
    """Samples a second from the first put to the last one taken and settled."""
    name, fork = f"bench-{uuid.uuid4().hex[:8]}", multiprocessing.get_context("fork")
    client = valkey.Valkey.from_url(url)
    if put is plain_put:
        client.xgroup_create(name, "g", id="0", mkstream=True)
    else:
        items = [
            WorkItem(iteration=0, portion=p, policy_version=0, num_groups=each, num_samples=each, payload=b"")
            for p in range(PRODUCERS)
        ]
        open_buffer(url, name).put_work(items)
    total = each * PRODUCERS
    processes = [fork.Process(target=put, args=(url, name, n, each, size, store)) for n in range(PRODUCERS)]
    processes += [
        fork.Process(target=take, args=(url, name, n, total, size, store)) for n in range(CONSUMERS)
    ]
    start = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.monotonic() - start
    assert int(client.get(f"{name}:taken") or 0) == total, "samples were lost or doubled"
    client.flushall()
    return total / seconds


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
    parser.add_argument("--seconds", type=float, default=3.0, help="rough length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = ensure_valkey(Path(folder))
        print(
            f"{platform.machine()}, {multiprocessing.cpu_count()} cores, {PRODUCERS} producers, {CONSUMERS} "
            "consumers"
        )
        print(f"{'sample':>8}  {'way':<28} {'samples/s':>10} {'MB/s':>8} {'of floor':>9}")
        for size, rate, s3_rate in ((8 << 10, 6000, 150), (256 << 10, 400, 100)):
            ways = (
                ("plain commands (floor)", plain_put, plain_take, rate, ""),
                ("buffer", buffer_put, buffer_take, rate, ""),
                ("buffer, payloads in S3", buffer_put, buffer_take, s3_rate, folder),
            )
            best: dict[str, float] = {}
            for _ in range(options.rounds):  # one way after the other, so that a busy machine is so for all
                for name, put, take, expected, store in ways:
                    each = max(BATCH, int(options.seconds * expected / PRODUCERS) // BATCH * BATCH)
                    found = samples_per_second(url, put, take, each=each, size=size, store=store)
                    best[name] = max(found, best.get(name, 0.0))
            floor = best[ways[0][0]]
            for name, found in best.items():
                line = f"{size >> 10:>4} KiB  {name:<28} {found:>10,.0f} {found * size / 1e6:>8,.0f}"
                print(f"{line} {found / floor:>9.0%}", flush=True)
        median, worst, rate, cpu = renewal(url)
        print(
            f"renewal by {WORKERS:,} workers with a connection each: median {median:.2f} ms, p99 "
            f"{worst:.2f} ms, {rate:,.0f} a second; {cpu:.0f} us of the server each"
        )
        print(f"one renewal a worker every 20 s takes {WORKERS / 20 * cpu / 1e6:.2%} of the server's core")


if __name__ == "__main__":
    main()
