"""The part ``nodes`` of ``bench_artifacts.py``: two nodes of two ranks fetch a version of their mesh.

A node is a cache folder, and all runs on this machine: bytes are those of two machines, seconds are not.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_transfers import THREADS, timed
from publishing import manifest
from ranks import run_ranks
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tasks.artifacts.owned import Checkpoint, checkpoint_of
from tasks.artifacts.store import PolicyStore, open_store
from tasks.policy.checkpoint.upload import store_shards
from tasks.policy.checkpoint.weights import load_optimizer
from tasks.policy.dispatch.dispatcher import make_dispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.step.trainer import make_optimizer

RANKS, NODES, MESH = 4, 2, {"ep": 2, "fsdp": 4}
SHAPE = {
    "vocab_size": 8000, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
LAYER_MB = 64 * 3 * 256 * 256 * 14 / 1e6
"""Of a layer's experts: weights in half precision, masters and two moments."""


def bench_nodes(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers = max(1, round(options.mb / LAYER_MB))
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, num_hidden_layers=layers))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model.save_pretrained(folder / "policy")
        store = opened(folder, "publisher")
        run_ranks(publish, RANKS, folder)
        files = store.manifest(0).files.values()
        print(f"{sum(file.size for file in files) / 1e6:.0f} MB in {len(files)} files, mesh {MESH}\n")
        print("| way | node | fetched MB | s until loaded | CPU s of its ranks |\n|---|---|---|---|---|")
        for number in range(options.rounds):
            for way in ("whole", "owned") if number % 2 else ("owned", "whole"):
                run_ranks(read, RANKS, folder, way, number)
        print_ranges(store)


def opened(folder: Path, cache: str) -> PolicyStore:
    return open_store(str(folder / "store"), "bench", cache=folder / cache, num_threads=THREADS)


def loaded(mesh: ParallelMesh, checkpoint: Checkpoint, *, resumes: bool) -> tuple[Any, Any]:
    dispatcher = make_dispatcher("all_to_all", mesh.ep_group)
    split = partial(distribute, mesh=mesh)
    model = load_policy(checkpoint.folder, dispatcher=dispatcher, prepare=split, fetch=checkpoint.fetch)
    optimizer = make_optimizer(model, lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    if resumes:
        load_optimizer(model, optimizer, checkpoint.folder, fetch=checkpoint.fetch)
    return model, optimizer


def publish(rank: int, world_size: int, folder: Path) -> None:
    mesh, store = make_mesh(world_size, **MESH), opened(folder, "publisher")
    model, optimizer = loaded(mesh, Checkpoint(folder / "policy"), resumes=False)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    files = {"config.json": store.put_file(folder / "policy" / "config.json")} if rank == 0 else {}
    files, _ = store_shards(store, model, optimizer, mesh, files, dtype=torch.bfloat16)
    if rank == 0:
        store.commit(manifest(store, 0, files))


def read(rank: int, world_size: int, folder: Path, way: str, number: int) -> None:
    mesh, node = make_mesh(world_size, **MESH), rank * NODES // world_size
    store = opened(folder, f"{way}-{number}-{node}")
    dist.barrier()
    start, cpu = time.monotonic(), time.process_time()
    loaded(mesh, checkpoint_of(store, 0) if way == "owned" else Checkpoint(store.pull(0)), resumes=True)
    dist.barrier()
    mine = (node, store.cache.received.full_bytes / 1e6, time.process_time() - cpu)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    for which in range(NODES) if rank == 0 else ():
        of_node = [found for found in everyone if found[0] == which]
        megabytes, seconds = (sum(found[i] for found in of_node) for i in (1, 2))
        clock = time.monotonic() - start
        print(f"| {way} | {which} | {megabytes:.1f} | {clock:.2f} | {seconds:.2f} |", flush=True)


def print_ranges(store: PolicyStore) -> None:
    """What ranges could still leave out: of dense state, the rows that another node's ranks own. They come
    without a digest to verify them by."""
    dense = {n: f for n, f in store.manifest(0).files.items() if n.startswith("optimizer-dense-")}
    ranges = [(file, *bounds) for file in dense.values() for bounds in own_rows(store, file)]
    target = store.cache.folder / "target"

    def fetch(file: Any, start: int, stop: int) -> int:
        where = {"Bucket": store.bucket.name, "Key": file.key, "VersionId": file.version_id}
        body = store.bucket._client.get_object(**where, Range=f"bytes={start}-{stop - 1}")["Body"]
        return len(body.read())

    def whole() -> None:
        for name, file in dense.items():
            store.cache._fetch(name, file, target)

    def by_ranges() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda which: fetch(*which), ranges))

    print("\n| state of dense parts | MB | requests | s | CPU s |\n|---|---|---|---|---|")
    for label, run, size, number in (
        ("whole files, verified", whole, sum(file.size for file in dense.values()), len(dense)),
        ("own rows, by ranges", by_ranges, sum(stop - start for _, start, stop in ranges), len(ranges)),
    ):
        clock, cpu = min(timed(run) for _ in range(3))
        print(f"| {label} | {size / 1e6:.1f} | {number} | {clock:.2f} | {cpu:.2f} |", flush=True)


def own_rows(store: PolicyStore, file: Any) -> Iterator[tuple[int, int]]:
    """Of each tensor in a file the first node's rows."""
    data = store.cache.read("file", file)
    base = 8 + struct.unpack("<Q", data[:8])[0]
    for name, tensor in json.loads(data[8:base]).items():
        if name != "__metadata__" and tensor["shape"]:
            start, stop = tensor["data_offsets"]
            yield base + start, base + start + (stop - start) // NODES
