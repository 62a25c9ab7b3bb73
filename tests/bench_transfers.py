"""The parts of ``bench_artifacts.py`` that move bytes: ``server`` and ``fetch``."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

THREADS = 4


def plain_client(endpoint: Any) -> Any:
    """The client as it comes: it signs bodies over plain HTTP, after taking their checksum."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3", endpoint_url=endpoint.url, aws_access_key_id=endpoint.access_key,
        aws_secret_access_key=endpoint.secret_key, region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=64),
    )  # fmt: skip


def bare_put(client: Any, bucket: str, path: Path, *, part_bytes: int, connections: int) -> None:
    """Parts from the page cache into sockets and no hash at all: what is left is the server's time."""
    where = {"Bucket": bucket, "Key": f"bare-{path.name}-{connections}"}
    upload, size = client.create_multipart_upload(**where)["UploadId"], path.stat().st_size
    file = os.open(path, os.O_RDONLY)

    def send(number: int) -> dict[str, Any]:
        params = where | {"UploadId": upload, "PartNumber": number + 1}
        url = urlsplit(client.generate_presigned_url("upload_part", Params=params))
        at, stop = number * part_bytes, min((number + 1) * part_bytes, size)
        head = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        with socket.create_connection((url.hostname, url.port)) as link:
            link.sendall(f"{head}Content-Length: {stop - at}\r\n\r\n".encode())
            while at < stop:
                at += os.sendfile(link.fileno(), file, at, stop - at)
            answer = b"".join(iter(partial(link.recv, 1 << 16), b"")).decode()
        assert " 200 " in answer[:20], answer
        tag = next(line for line in answer.split("\r\n") if line.lower().startswith("etag:"))
        return {"PartNumber": number + 1, "ETag": tag.split(":", 1)[1].strip()}

    with ThreadPoolExecutor(connections) as pool:
        parts = list(pool.map(send, range(-(-size // part_bytes))))
    os.close(file)
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})


def bench_server(options: argparse.Namespace) -> None:
    """Alternating rounds: the plain client's own transfer of a file, the store's with hashes and checks, from
    a file and from a rank's tensors in memory; parts through bare sockets, which show the server; a read that
    is hashed behind its transfer. CPU seconds are this process's, of all threads."""
    from boto3.s3.transfer import TransferConfig

    from tasks.artifacts.client import PART_BYTES
    from tasks.artifacts.store import open_store
    from tasks.embedded.seaweed import ensure_s3
    from tasks.policy.checkpoint.serialized import TensorFile

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        store = open_store(str(folder / "store"), "bench", cache=folder / "cache", num_threads=THREADS)
        client, bucket = plain_client(ensure_s3(folder / "store")), store.bucket.name
        config = TransferConfig(  # the client's best: its own pieces of 256 KiB take four times as many calls
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=THREADS,
            io_chunksize=1 << 20, max_io_queue=256, preferred_transfer_client="classic",
        )  # fmt: skip
        size, target = options.mb << 20, folder / "raw-target"
        spent: dict[str, list[tuple[float, float]]] = {}

        def measure(*runs: tuple[str, Callable[[], Any]], number: int) -> None:
            for label, run in runs if number % 2 else reversed(runs):
                spent.setdefault(label, []).append(timed(run))

        for number in range(options.rounds):
            path, raw = folder / f"file-{number}", folder / f"raw-{number}"
            for made in (path, raw):
                made.write_bytes(os.urandom(size))
            tensors = {str(i): torch.randn(size // 64) for i in range(16)}
            memory = TensorFile(tensors, require_unchanged=lambda: None)
            extra = {"ChecksumAlgorithm": "SHA256"}
            put = partial(client.upload_file, str(raw), bucket, raw.name, ExtraArgs=extra, Config=config)
            bare = partial(bare_put, client, bucket, raw, part_bytes=PART_BYTES)
            measure(
                ("raw put", put),
                ("store put", partial(store.put_file, path)),
                ("from memory put", partial(store.put, memory)),
                (f"bare, {THREADS} connections, put", partial(bare, connections=THREADS)),
                ("bare, 16 connections, put", partial(bare, connections=16)),
                number=number,
            )
            blob, stored = store.put_file(path), store.bucket.head(raw.name)
            assert stored is not None
            version = {"VersionId": stored.version_id}
            get = partial(
                client.download_file, bucket, raw.name, str(target), ExtraArgs=version, Config=config
            )
            for again in range(options.reads):
                measure_reads(store, blob, get, target, partial(measure, number=again))
            path.unlink()
            raw.unlink()
        print_shares(f"{options.mb} MiB, {options.rounds} files", size, spent)


def measure_reads(store: Any, blob: Any, get: Callable[[], Any], target: Path, measure: Any) -> None:
    """A file by the plain client, by the store, and hashed behind the plain client."""
    from tasks.artifacts.content import digests_of

    links = target.with_name("links")
    measure(
        ("raw get", get),
        ("store get", partial(store.cache.link, "file", blob, links)),
        ("hashed after get", lambda: (get(), digests_of(target))),
    )
    store.cache._path(blob.sha256).unlink()  # so that the next read fetches it again
    (links / "file").unlink()
    target.unlink()


def print_shares(title: str, size: int, spent: dict[str, list[tuple[float, float]]]) -> None:
    print(f"| {title} | median MB/s | share of raw: median | by CPU |\n|---|---|---|---|")
    for label, pairs in spent.items():
        raw_pairs = spent["raw " + label.split()[-1]]
        shares = [[r[i] / p[i] for r, p in zip(raw_pairs, pairs, strict=True)] for i in (0, 1)]
        wall, cpu = map(statistics.median, shares)
        rate = size / 1e6 / statistics.median(seconds for seconds, _ in pairs)
        between = f"{min(shares[0]):.0%}-{max(shares[0]):.0%}"
        print(f"| {label} | {rate:.0f} | {wall:.0%} ({between}) | {cpu:.0%} |", flush=True)


def bench_fetch(options: argparse.Namespace) -> None:
    """A reader of the version before, on links of several speeds: by either way and by its own choice.

    A link is imitated by waiting after each transfer until it would have brought so many bytes.
    """
    from safetensors.torch import save_file
    from test_patches import put_patched

    from tasks.artifacts.store import open_store

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        publisher = open_store(str(folder / "store"), "bench", cache=folder / "publisher")
        generator = torch.Generator().manual_seed(0)
        masters = torch.randn(16, options.mb << 15, generator=generator) / 50
        files: list[Any] = []
        for _ in range(3):
            rows = {str(i): row.bfloat16() for i, row in enumerate(masters)}
            save_file(rows, folder / "weights", metadata={"format": "pt"})
            parent = files[-1] if files else None
            files.append(put_patched(publisher, folder / "weights", parent, full_every=9, whole_beside=True))
            masters += 1e-6 * torch.randn(masters.shape, generator=generator).sign()
        size, patch = files[0].size, files[1].patches[-1].blob.size
        print(f"{size / 1e6:.0f} MB, patch {patch / size:.2%}\n\n| link, MB/s | by | MB | s | CPU s |")
        print("|---|---|---|---|---|")
        for link in options.links:
            cache = folder / f"cache-{link}"
            for fetch in ("whole", "patches", "measured"):
                reader = open_store(
                    str(folder / "store"), "bench", cache=cache, fetch=fetch, num_threads=THREADS
                )
                slow_down(reader, link)
                reader.cache.link("f", files[0], folder / "held")
                for file in files[1:] if fetch == "measured" else files[1:2]:
                    moved = -travelled(reader)
                    clock, cpu = timed(partial(reader.cache.link, "f", file, folder / "made"))
                    moved += travelled(reader)
                    row = f"| {link or 'loopback'} | {fetch} | {moved:.1f} | {clock:.2f} | {cpu:.2f} |"
                    print(row, flush=True)
                for file in files[1:]:
                    reader.cache._path(file.sha256).unlink(missing_ok=True)


def travelled(reader: Any) -> float:
    """Megabytes that a reader has fetched."""
    received = reader.cache.received
    return (received.full_bytes + received.patch_bytes) / 1e6


def slow_down(reader: Any, link: int) -> None:
    """A link of so many MB/s, all of a reader's transfers one behind another."""
    download = reader.bucket.download

    def slowly(*arguments: Any, size: int, **options: Any) -> Any:
        start = time.monotonic()
        found = download(*arguments, size=size, **options)
        time.sleep(max(0.0, start + size / 1e6 / link - time.monotonic()))
        return found

    if link:
        reader.bucket.download = slowly


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock and of this process's CPU."""
    start, cpu = time.monotonic(), time.process_time()
    run()
    return time.monotonic() - start, time.process_time() - cpu
