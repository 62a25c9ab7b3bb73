"""The queue and the buffer of a running campaign: a live view, and metrics for Prometheus.

    python -m tasks.experience.watch --store ./runs --campaign laptop [--once] [--metrics-port 9100]

Each shard's numbers are one snapshot. Rejections are those of sealed iterations by their reasons, and of the
open ones what the buffer itself refused.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

from tasks.artifacts.errors import StoreError
from tasks.artifacts.store import PolicyStore
from tasks.config import CampaignConfig
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.records import Progress
from tasks.records import CampaignRun, TrainBatch
from tasks.session import (
    CURRENT_RUN,
    campaign_at,
    lineage_run,
    open_store,
    require_existing,
    run_buffer,
    run_store,
)

CLEAR = "\x1b[2J\x1b[H"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What there is to see at one moment."""

    campaign: str
    seconds: float
    """Monotonic time of the look."""
    iterations: Mapping[int, tuple[int, Progress]]
    """Open iteration -> (policy version it needs, progress)."""
    rejected: Mapping[str, int]
    barred: Mapping[str, str]
    workers: Mapping[str, tuple[int, int, float]]
    """Samples, tokens and seconds sampling of each worker, in sealed and in open iterations."""
    total_samples: int
    """Published so far: in sealed and in open iterations."""
    total_tokens: int
    version: int
    """The newest published one; -1 = none."""
    untrained_seconds: float
    """Age of the oldest sealed batch of this run that no version is trained on; 0 = none waits."""
    servers: Sequence[tuple[int, int]]
    """Bytes that each shard's server uses, and those that it may use."""
    capacity_bytes: int
    """Of payloads that wait for a scorer, at which writers wait, on all shards."""


@dataclass(kw_only=True, slots=True)
class Watcher:
    """Looks at one run; remembers the sealed batches and the newest version, which never change."""

    run: CampaignRun
    buffer: ExperienceBuffer
    store: PolicyStore
    _sealed: dict[str, TrainBatch] = field(default_factory=dict)
    _newest: tuple[int, int] = (-1, 0)
    """A version and the iterations that it has trained."""

    def _untrained_seconds(self) -> float:
        head, ending = self.store.head(), f"-{self.run.config.digest()}.json"
        if head is not None and head.version != self._newest[0]:
            self._newest = (head.version, self.store.manifest(head).iteration)
        waiting = [
            batch.sealed_at
            for key, batch in self._sealed.items()
            if key.endswith(ending) and batch.iteration >= self._newest[1]
        ]
        return max(0.0, time.time() - min(waiting)) if waiting else 0.0

    def look(self) -> View:
        for key in self.store.list_objects("batches/"):
            if key.endswith(".json") and key not in self._sealed:
                self._sealed[key] = TrainBatch.model_validate_json(self.store.get_object(key))
        iterations = {
            iteration: (version, self.buffer.progress(iteration))
            for iteration, version in self.buffer.open_iterations().items()
        }
        sealed = self._sealed.values()
        rejected: dict[str, int] = {}
        for batch in sealed:
            for reason, count in {**batch.rejected, "late": batch.late}.items():
                rejected[reason] = rejected.get(reason, 0) + count
        for _, progress in iterations.values():
            refusals = {
                "duplicate groups": progress.duplicates,
                "refused": progress.refused,
                "late": progress.late,
            }
            for reason, count in refusals.items():
                rejected[reason] = rejected.get(reason, 0) + count
        shares = [share for batch in sealed for share in batch.workers.items()]
        shares += [share for _, progress in iterations.values() for share in progress.workers.items()]
        workers: dict[str, tuple[int, int, float]] = {}
        for name, share in shares:
            samples, tokens, seconds = workers.get(name, (0, 0, 0.0))
            workers[name] = (samples + share.samples, tokens + share.tokens, seconds + share.seconds)
        servers, capacity = self.buffer.memory(), self.run.config.buffer.capacity_mb * 2**20
        return View(
            campaign=self.run.campaign,
            seconds=time.monotonic(),
            untrained_seconds=self._untrained_seconds(),
            version=self._newest[0],
            servers=servers,
            capacity_bytes=capacity * len(servers),
            iterations=iterations,
            rejected={reason: count for reason, count in sorted(rejected.items()) if count},
            barred=self.buffer.barred(),
            workers=workers,
            total_samples=sum(samples for samples, _, _ in workers.values()),
            total_tokens=sum(tokens for _, tokens, _ in workers.values()),
        )


class Follower:
    """The watcher of the run that was started last, None before a campaign's first; or of the lineage that
    the name ends in, and then of no other."""

    def __init__(self, config: CampaignConfig, end: str = "") -> None:
        self._root = open_store(config, config.name)
        self._lock = Lock()
        self._found: bytes | None = None
        self._watcher: Watcher | None = None
        self._only = lineage_run(config, end) if end else None

    def __call__(self) -> Watcher | None:
        with self._lock:  # a scrape and the screen may both find another run
            found = b"" if self._only else self._root.find_object(CURRENT_RUN)
            if found is not None and found != self._found:
                run = self._only or CampaignRun.model_validate_json(found)
                self._watcher = Watcher(run=run, buffer=run_buffer(run), store=run_store(run))
                self._found = found
            return self._watcher


def view_text(view: View, before: View | None = None) -> str:
    """A screenful; rates are those since ``before``."""
    since = view.seconds - before.seconds if before else 0.0
    samples = (view.total_samples - before.total_samples) / since if before and since else 0.0
    tokens = (view.total_tokens - before.total_tokens) / since if before and since else 0.0
    lines = [
        f"{view.campaign}   {view.total_samples:,} samples, {view.total_tokens:,} tokens   "
        f"{samples:,.0f} samples/s, {tokens:,.0f} tokens/s"
    ]
    for iteration, (version, p) in view.iterations.items():
        lines += [
            f"iteration {iteration} by version {version}: {p.queued} queued, {p.leased} leased, {p.settled} "
            "settled, "
            f"{p.poisoned} poisoned; oldest lease {p.oldest_lease_seconds:.1f} s",
            f"  groups {p.groups_published} published, {p.groups_scored} scored; buffer "
            f"{p.bytes_waiting / 2**20:.1f} MiB "
            f"waiting, {p.bytes_used / 2**20:.1f} MiB in all",
        ]
        for worker in sorted({*p.workers, *p.leases_by_worker}):
            share, leases = p.workers.get(worker), p.leases_by_worker.get(worker, 0)
            rate = f"{share.tokens / share.seconds:>9,.0f} tokens/s" if share and share.seconds else ""
            lines.append(f"  {worker:<32} {leases} leases {share.samples if share else 0:>7} samples {rate}")
    if not view.iterations:
        lines.append("no iteration is open")
    lines.append(
        "rejected: " + (", ".join(f"{count:,} {reason}" for reason, count in view.rejected.items()) or "none")
    )
    lines += [f"barred: {worker}: {why}" for worker, why in view.barred.items()]
    return "\n".join(lines)


def view_metrics(view: View) -> str:
    """The view in Prometheus' text format."""
    queue, leases, gauges = [], [], []
    for iteration, (_, p) in view.iterations.items():
        for state in ("queued", "leased", "settled", "poisoned"):
            queue.append(({"iteration": iteration, "state": state}, getattr(p, state)))
        leases += [
            ({"iteration": iteration, "worker": worker}, n) for worker, n in p.leases_by_worker.items()
        ]
        gauges.append((iteration, p))
    families = [
        ("portions", "gauge", "work of the open iterations by state", queue),
        ("leases", "gauge", "portions held by each worker", leases),
        ("oldest_lease_seconds", "gauge", "age of the oldest lease",
         [({"iteration": k}, p.oldest_lease_seconds) for k, p in gauges]),
        ("buffer_waiting_bytes", "gauge", "payloads that wait for a scorer",
         [({"iteration": k}, p.bytes_waiting) for k, p in gauges]),
        ("buffer_used_bytes", "gauge", "memory of the iteration on the servers",
         [({"iteration": k}, p.bytes_used) for k, p in gauges]),
        ("buffer_capacity_bytes", "gauge", "waiting payloads at which writers wait",
         [({}, view.capacity_bytes)]),
        ("server_used_bytes", "gauge", "memory that a shard's server uses, for all campaigns",
         [({"shard": n}, used) for n, (used, _) in enumerate(view.servers)]),
        ("server_max_bytes", "gauge", "memory that a shard's server may use; 0 = no bound",
         [({"shard": n}, most) for n, (_, most) in enumerate(view.servers)]),
        ("version", "gauge", "newest published policy version", [({}, view.version)]),
        ("untrained_batch_seconds", "gauge", "age of the oldest sealed batch without a version",
         [({}, view.untrained_seconds)]),
        ("samples_total", "counter", "samples published", [({}, view.total_samples)]),
        ("tokens_total", "counter", "tokens of published samples", [({}, view.total_tokens)]),
        ("rejected_total", "counter", "samples rejected by reason",
         [({"reason": reason}, count) for reason, count in view.rejected.items()]),
        ("worker_tokens_total", "counter", "tokens of samples that each worker published",
         [({"worker": worker}, tokens) for worker, (_, tokens, _) in view.workers.items()]),
        ("worker_seconds_total", "counter", "seconds that each worker sampled for them",
         [({"worker": worker}, seconds) for worker, (_, _, seconds) in view.workers.items()]),
        ("barred_workers", "gauge", "workers that get no more work", [({}, len(view.barred))]),
    ]  # fmt: skip
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP moe_rl_{name} {text}", f"# TYPE moe_rl_{name} {kind}"]
        for labels, value in values:
            lines.append(f"moe_rl_{name}{_labels({'campaign': view.campaign, **labels})} {value:g}")
    return "\n".join(lines) + "\n"


def serve_metrics(follow: Callable[[], Watcher | None], port: int) -> ThreadingHTTPServer:
    """Answer ``GET /metrics`` with a fresh look, from a thread; port 0 picks one. Nothing before a campaign
    began."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_metrics = self.path == "/metrics"
            watcher = follow() if is_metrics else None
            body = view_metrics(watcher.look()).encode() if watcher else b""
            self.send_response(200 if is_metrics else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # a scrape is no news
            pass

    server = ThreadingHTTPServer(("", port), Handler)
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Live view of a campaign's queue and buffer.")
    parser.add_argument("--store", required=True)
    parser.add_argument("--campaign", required=True, help="name, with or without lineage")
    parser.add_argument("--endpoint-url", default="")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two looks")
    parser.add_argument("--once", action="store_true", help="look once, print and end")
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="serve Prometheus metrics there; 0 = do not"
    )
    options = parser.parse_args(arguments)
    require_existing(options.store)
    try:
        follow = Follower(*campaign_at(options.store, options.campaign, endpoint_url=options.endpoint_url))
    except (ValueError, StoreError) as error:
        raise SystemExit(str(error)) from None
    if options.metrics_port:
        serve_metrics(follow, options.metrics_port)
    elif follow() is None:
        raise SystemExit(
            f"campaign must have been started in {options.store}, got none named {options.campaign!r}. "
            "Check the spelling."
        )
    before = None
    while True:
        if (watcher := follow()) is not None:
            view = watcher.look()
            print(("" if options.once else CLEAR) + view_text(view, before), flush=True)
            if options.once:
                return
            before = view
        time.sleep(options.seconds)


def _labels(labels: Mapping[str, object]) -> str:
    escaped = (
        (name, str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


if __name__ == "__main__":
    main()
