"""What a weight update of a worker on SGLang costs, and what the time is made of.

    MOE_RL_SGLANG_PYTHON=... python tests/bench_weights.py --gb 1 4 8      (--small: for a CPU)

A version travels as it does in a campaign: store, cache, the server's own update from disk, and the checks
that it holds the weights. By disk: a worker with an empty cache fetches the whole version. By delta: one that
has the version before fetches what changed. The store is the embedded S3 server on this machine's disk, so
its network is loopback. The new version is the old one after a first step of AdamW at a learning rate of
1e-6, which moves every float32 master weight by that much; the masters lie anywhere within the rounding of
their bfloat16 weights.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from engines import sglang_config
from publishing import manifest
from served import GB_A_LAYER, SMALL, await_gate, dtype_of, gigabytes, make_policy, save_tokenizer

from tasks.artifacts import cache
from tasks.artifacts.chain import put_patched
from tasks.artifacts.content import FileContent
from tasks.artifacts.manifest import StoredFile
from tasks.artifacts.store import PolicyStore, open_store
from tasks.engine import sglang
from tasks.engine.sglang import Fleet

LEARNING_RATE = 1e-6
THREADS = 4


class Clock:
    """Seconds by name, of all threads together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def timed(self, owner: Any, attribute: str, name: str) -> None:
        """Count what a function takes, from now on."""
        real = getattr(owner, attribute)

        def counted(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*arguments, **options)
            finally:
                self.add(name, start)

        async def counted_async(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return await real(*arguments, **options)
            finally:
                self.add(name, start)

        is_async = attribute in ("update", "verify")
        setattr(owner, attribute, counted_async if is_async else counted)

    def add(self, name: str, start: float) -> None:
        with self._lock:
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken = {name: round(value, 2) for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken


CLOCK = Clock()
CLOCK.timed(cache.Cache, "_fetch", "fetch and hash what travels")
CLOCK.timed(cache, "apply_patches", "apply and hash")
CLOCK.timed(sglang, "update", "SGLang reads")
CLOCK.timed(sglang, "verify", "checks")


@torch.no_grad()
def step(model: torch.nn.Module) -> None:
    """Every master weight moves by the learning rate, towards either side."""
    for parameter in model.parameters():
        exponent = torch.frexp(parameter.float()).exponent
        rounding = torch.ldexp(torch.rand_like(parameter, dtype=torch.float32) - 0.5, exponent - 8)
        moved = torch.where(torch.rand_like(rounding) < 0.5, -LEARNING_RATE, LEARNING_RATE)
        parameter.copy_(parameter.float() + rounding + moved)


def put(store: PolicyStore, path: Path, parent: dict[str, Any]) -> StoredFile:
    before = parent.get(path.name) if path.suffix == ".safetensors" else None
    with FileContent(path) as content:
        return put_patched(store, content, before, full_every=10)


def publish(store: PolicyStore, folder: Path, version: int, parent: dict[str, Any]) -> dict[str, Any]:
    """The folder as the next version, its tensor files as what changed since ``parent``."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        stored = pool.map(lambda path: put(store, path, parent), paths)
        files = dict(zip([path.name for path in paths], stored, strict=True))
    store.commit(manifest(store, version, files))
    return files


def prepare(folder: Path, shape: dict[str, int]) -> tuple[PolicyStore, PolicyStore]:
    """Two versions on disk and in the store, and the second one alone under another name."""
    model = make_policy(shape)
    model.save_pretrained(folder / "v0", max_shard_size="1GB")
    step(model)
    model.save_pretrained(folder / "v1", max_shard_size="1GB")
    for version in ("v0", "v1"):
        save_tokenizer(folder / version)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    chain, whole = (
        open_store(str(folder / "store"), name, cache=folder / f"trainer-{name}", num_threads=THREADS)
        for name in ("chain", "whole")
    )
    start = time.perf_counter()
    files = publish(chain, folder / "v0", 0, {})
    first = time.perf_counter() - start
    for name, file in files.items():  # the trainer has its parent's files
        chain.cache.link(name, file, folder / "parent")
    start = time.perf_counter()
    publish(chain, folder / "v1", 1, files)
    second = time.perf_counter() - start
    publish(whole, folder / "v1", 0, {})
    for done in ("v1", "parent", "trainer-chain", "trainer-whole"):  # a disk's worth, at 8 GB
        shutil.rmtree(folder / done, ignore_errors=True)
    size = gigabytes(folder / "v0")
    print(f"{size:.2f} GB published in {first:.1f} s, its successor in {second:.1f} s", flush=True)
    return chain, whole


def pulled(store: PolicyStore, version: int) -> tuple[Path, float, float, dict[str, float]]:
    """Folder, seconds, gigabytes that travelled, and where the threads' seconds went."""
    received = store.cache.received
    before = received.full_bytes + received.patch_bytes
    CLOCK.take()
    start = time.perf_counter()
    folder = store.pull(version)
    seconds = time.perf_counter() - start
    return folder, seconds, (received.full_bytes + received.patch_bytes - before) / 1e9, CLOCK.take()


def loaded(fleet: Fleet, folder: Path, version: int) -> tuple[float, dict[str, float]]:
    CLOCK.take()
    start = time.perf_counter()
    fleet.load(folder, version)
    return time.perf_counter() - start, CLOCK.take()


def measure(folder: Path, stores: tuple[PolicyStore, PolicyStore], fleet: Fleet, rounds: int) -> None:
    """Alternate between a worker that has the version before and one that has nothing."""
    rows: dict[str, list[tuple[float, float, float]]] = {"delta": [], "disk": []}
    size, version = gigabytes(folder / "v0"), 0
    for number in range(rounds):
        for way, store, newest in (("delta", stores[0], 1), ("disk", stores[1], 0)):
            reader = open_store(
                str(folder / "store"), store.campaign, cache=folder / f"{way}-{number}", num_threads=THREADS
            )
            if way == "delta":
                before = reader.pull(0)
                version += 1
                fleet.load(before, version)
            path, seconds, travelled, parts = pulled(reader, newest)
            version += 1
            load, made_of = loaded(fleet, path, version)
            shutil.rmtree(folder / f"{way}-{number}")
            rows[way].append((seconds, load, travelled))
            print(
                f"{size:.2f} GB by {way}: {travelled:.4f} GB travelled, pull {seconds:.2f} s {parts}, ",
                end="",
            )
            print(f"load {load:.2f} s {made_of}", flush=True)
    for way, values in rows.items():
        pull, load, travelled = (statistics.median(column) for column in zip(*values, strict=True))
        total = pull + load
        print(
            f"| {size:.1f} GB by {way} | {travelled:.4f} | {pull:.2f} | {load:.2f} | {total:.2f} |",
            flush=True,
        )


def bench(folder: Path, shape: dict[str, int], rounds: int, *, gate: Path | None) -> None:
    config = sglang_config()
    stores = prepare(folder, shape)
    fleet = Fleet(config, dtype=dtype_of(config), folder=folder / "server")
    fleet.load(folder / "v0", 0)
    (folder / "ready").touch()
    await_gate(gate)
    measure(folder, stores, fleet, rounds)
    assert fleet.launched is not None
    fleet.launched.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny policy: for a CPU")
    parser.add_argument("--gb", type=float, nargs="*", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary one")
    parser.add_argument("--gate", type=Path, help="measure once this file exists")
    options = parser.parse_args()
    for size in [0.01] if options.small else options.gb:
        layers = max(1, round((size - 0.27) / GB_A_LAYER))
        large = {"num_layers": layers, "hidden": 2048, "experts": 64, "width": 768}
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            (Path(name) / "server").mkdir()
            bench(Path(name), SMALL if options.small else large, options.rounds, gate=options.gate)


if __name__ == "__main__":
    main()
