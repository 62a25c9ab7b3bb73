"""Two SGLang servers behind SGLang's router lose one in the middle of an iteration: what it costs.

    MOE_RL_SGLANG_PYTHON=... python tests/bench_lost_server.py        (--small: for a CPU; else two GPUs)

The worker loop samples a queue of groups of 8 twice: undisturbed, and with SIGKILL for one server when two
fifths of the groups are published. Then every sample is read back from the queue and counted. At last the
server is started again and the next version takes it in.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines import sglang_config
from served import (
    LARGE,
    SMALL,
    await_gate,
    await_server,
    dtype_of,
    large_config,
    open_buffer,
    put_prompts,
    random_prompts,
    routed,
    save_policy,
    start_server,
    worker_loop,
)

from tasks.embedded.valkey import ensure_valkey
from tasks.engine.protocol import SamplingParams
from tasks.engine.sglang import Fleet
from tasks.experience.buffer import ExperienceBuffer
from tasks.schema import RolloutFrame, from_bytes
from tasks.sglang_config import SglangConfig

GROUP_SIZE, PROMPT = 8, 128
LOSE_AT = 0.4


def watch(buffer: ExperienceBuffer, total: int, lose: Callable[[], None] | None) -> list[tuple[float, int]]:
    """(seconds, published groups) until all are; ``lose`` is called when ``LOSE_AT`` of them are."""
    start, seen = time.perf_counter(), [(0.0, 0)]
    while seen[-1][1] < total:
        published = buffer.num_published(0)
        if published != seen[-1][1]:
            seen.append((time.perf_counter() - start, published))
        if lose is not None and published >= LOSE_AT * total:
            lose()
            print(f"lost at {time.perf_counter() - start:.1f} s, {published} of {total} groups", flush=True)
            lose = None
        time.sleep(0.01)
    return seen


def iteration(
    fleet: Fleet, valkey: str, num_groups: int, new: int, lose: Callable[[], None] | None, name: str
) -> None:
    buffer = open_buffer(valkey)
    per_portion = max(1, num_groups // 32)
    prompts = random_prompts(num_groups, PROMPT, seed=time.time_ns() % 2**31)
    assert fleet.version is not None
    put_prompts(buffer, prompts, groups_per_portion=per_portion, group_size=GROUP_SIZE, version=fleet.version)
    seen: list[tuple[float, int]] = []
    watcher = threading.Thread(target=lambda: seen.extend(watch(buffer, num_groups, lose)))
    watcher.start()
    params = SamplingParams(max_new_tokens=new, temperature=1.0, top_p=1.0, stop_ids=frozenset())
    start = time.perf_counter()
    done = worker_loop(
        fleet,
        buffer,
        params=params,
        group_size=GROUP_SIZE,
        groups_per_portion=per_portion,
        portions_at_once=16,
    )
    seconds = time.perf_counter() - start
    watcher.join(30)
    samples: Counter[tuple[str, int]] = Counter()
    num_tokens = 0
    for _, group in buffer.take_rollouts("reader", iteration=0, max_groups=2 * num_groups):
        frame = from_bytes(group.payload, schema=RolloutFrame)
        samples.update(zip(frame["prompt_id"], frame["sample_index"], strict=True))
        num_tokens += int(frame["response_ids"].list.len().sum())
    expected = {(f"{g:06d}", i) for g in range(num_groups) for i in range(GROUP_SIZE)}
    lost, doubled = len(expected - samples.keys()), sum(count - 1 for count in samples.values())
    foreign = len(samples.keys() - expected)
    gap = max(after[0] - before[0] for before, after in itertools.pairwise(seen))
    counts = f"{len(expected)} | {lost} | {doubled + foreign} | {len(fleet.serving)}"
    print(f"| {name} | {counts} | {num_tokens / seconds:,.0f} | {seconds:.1f} | {gap:.1f} |", flush=True)
    assert (lost, doubled, foreign) == (0, 0, 0), "no sample may be lost or doubled"
    assert done.num_samples == len(expected) and num_tokens == len(expected) * new
    print(f"published: {[(round(s, 1), n) for s, n in seen[:: max(1, len(seen) // 24)]]}", flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    num_groups: int
    new: int
    """Tokens of each response."""
    is_restarted: bool
    """Whether the lost server comes back."""
    gpus: tuple[int, int]


def bench(config: SglangConfig, shape: dict[str, int], plan: Plan, scratch: Path, gate: Path | None) -> None:
    save_policy(scratch / "policy", shape)
    servers = [
        start_server(config, scratch / "policy", scratch / str(index), number=index, gpu=gpu)
        for index, gpu in enumerate(plan.gpus)
    ]
    urls = tuple(url for _, url in servers)
    try:
        for index, (server, url) in enumerate(servers):
            await_server(server, url, scratch / str(index))
        with routed(config, urls, scratch) as router:
            changes = {"urls": list(urls), "router_url": router}
            fleet = Fleet(config.model_copy(update=changes), dtype=dtype_of(config), folder=scratch)
            await_router(router, scratch / "router.log")
            lose_one(servers, fleet, plan, scratch, gate)
    finally:
        for server, _ in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)


def lose_one(
    servers: list[tuple[subprocess.Popen, str]], fleet: Fleet, plan: Plan, scratch: Path, gate: Path | None
) -> None:
    valkey = ensure_valkey(scratch / "valkey")

    def run(name: str, *, share: float = 1, lose: Callable[[], None] | None = None) -> None:
        iteration(fleet, valkey, int(plan.num_groups * share), plan.new, lose, name)

    fleet.load(scratch / "policy", 1)
    run("warm", share=0.25)
    (scratch / "url").write_text(servers[0][1])
    await_gate(gate)
    print("| iteration | samples | lost | doubled | servers | tokens/s | s | longest silence s |")
    run("two servers")
    run("one is lost", lose=lambda: os.killpg(servers[1][0].pid, signal.SIGKILL))
    start = time.perf_counter()
    fleet.load(scratch / "policy", 2)
    seconds = time.perf_counter() - start
    print(f"version 2 adopted in {seconds:.1f} s: {fleet.view().describe()}", flush=True)
    run("one server")
    if plan.is_restarted:
        restarted(servers, fleet, scratch, gpu=plan.gpus[1])
        run("two servers again")


def restarted(servers: list[tuple[subprocess.Popen, str]], fleet: Fleet, scratch: Path, *, gpu: int) -> None:
    """The lost server comes back on its port, and the next version takes it in."""
    start = time.perf_counter()
    servers[1] = start_server(fleet.config, scratch / "policy", scratch / "1", number=1, gpu=gpu)
    await_server(*servers[1], scratch / "1")
    started = time.perf_counter()
    fleet.load(scratch / "policy", 3)
    loaded = time.perf_counter()
    await_router(fleet.config.router_url, scratch / "router.log")
    print(f"started in {started - start:.0f} s, version 3 adopted in {loaded - started:.1f} s", flush=True)


def await_router(url: str, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/workers", timeout=5) as response:
                if len(json.load(response)["workers"]) == 2:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    sys.exit(log.read_text()[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny policy, few tokens: for a CPU")
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--gate", type=Path, help="measure once this file exists")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary one")
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--no-restart", action="store_true", help="end when one server is left")
    options = parser.parse_args()
    config, shape = (sglang_config(), SMALL) if options.small else (large_config(), LARGE)
    plan = Plan(
        num_groups=32 if options.small else options.groups,
        new=32 if options.small else 256,
        is_restarted=not options.no_restart,
        gpus=tuple(options.gpus),
    )
    with tempfile.TemporaryDirectory() as name:
        bench(config, shape, plan, options.folder or Path(name), options.gate)


if __name__ == "__main__":
    main()
