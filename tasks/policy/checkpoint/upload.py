"""From live weights to stored shards, behind the trainer's back; nothing is a version until ``publish``.

    start    every rank copies what it owns to host memory: the only time the trainer stands still
    behind   a thread a shard: digest, find what changed since the parent, send it in parts straight
             from that memory, compare what was sent with the live tensors; weights and optimizer state at
             the same time
    finish   every rank waits for its own, then all agree: a shard that failed anywhere fails all of them,
             by rank and reason, and no manifest is made. So a version never names what is not stored

Between ``start`` and ``finish`` the caller does as it likes. With a process an update (``grain: iteration``)
there is little left to do: the node of the graph must return a candidate whose files exist, so it waits here
for the upload, with weights and optimizer state in parallel. A trainer that stays resident calls ``finish``
as late as the next rollouts allow: with ``max_staleness`` 1 or more, when the next batch is trained, so the
upload runs behind the next rollouts; with 0 the rollouts need this very version and everyone waits for it. A
manifest in two phases (weights first, optimizer state later) was considered and left: a trainer lost between
the phases would leave a version that was sampled from and cannot be trained on, and the one trained again in
its place need not have its bits. Host memory holds one snapshot: a second ``start`` waits for the first one's
upload.

Optimizer state is not in torch's distributed checkpoint format but as safetensors under the weights' own
names (``exp_avg/model.layers.0...``, one tensor an expert). It reshards as weights do, since a rank reads
what it owns by name and rows, on any number of ranks (``test_a_run_on_two_ranks_resumes_on_one``); it is
content-addressed, bitwise repeatable and carries no pickle, none of which that format is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from tasks.artifacts.chain import put_patched
from tasks.artifacts.errors import StaleWeights, UploadFailed
from tasks.policy.checkpoint import weights
from tasks.policy.checkpoint.serialized import TensorFile
from tasks.policy.checkpoint.snapshot import HostArena, bit_sum
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.parallel.shards import local_tensor

if TYPE_CHECKING:
    from tasks.artifacts.manifest import StoredFile
    from tasks.artifacts.store import PolicyStore

STEMS = ("model", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShards:
    """What all ranks stored, the same on every rank."""

    files: dict[str, StoredFile]
    tensor_digest: str
    stall_seconds: float
    """The longest of the ranks' copies to host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    stem: str
    shard: weights.Shard
    file: StoredFile
    digests: dict[str, str]


class ShardUpload:
    """Stores one snapshot after another; collective, on every rank of a mesh."""

    def __init__(
        self,
        store: PolicyStore,
        mesh: ParallelMesh,
        arena: HostArena,
        *,
        full_every: int,
        whole_beside: bool = False,
    ) -> None:
        self._store, self._mesh, self._arena = store, mesh, arena
        self._full_every, self._whole_beside = full_every, whole_beside
        self._pool = ThreadPoolExecutor(2 * len(STEMS), thread_name_prefix="upload")
        self._folder = tempfile.TemporaryDirectory()
        self._pending: dict[str, Future[_Stored]] = {}
        self._parent: Mapping[str, StoredFile] = {}
        self._dtype = ""
        self._seconds = 0.0

    def __enter__(self) -> ShardUpload:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._folder.cleanup()

    def start(
        self,
        model: PreTrainedModel,
        optimizer: AdamW,
        parent_files: Mapping[str, StoredFile],
        *,
        dtype: torch.dtype,
    ) -> None:
        """Copy, and begin to store; the model may be trained on as soon as this returns."""
        for pending in self._pending.values():
            pending.exception()  # the arena holds one snapshot: wait, and let ``finish`` tell what failed
        self._pending, self._parent = {}, parent_files
        self._dtype = str(dtype).removeprefix("torch.")
        if self._mesh.replicate_rank != 0:
            return
        snapshot = self._arena.take(named_tensors(model, optimizer, dtype))
        self._seconds = snapshot.seconds
        for stem in STEMS:
            prefix = f"{stem}:"
            tensors = {n.removeprefix(prefix): t for n, t in snapshot.tensors.items() if n.startswith(prefix)}
            sums = {name: snapshot.sums[prefix + name] for name in tensors}
            files = weights.by_file(tensors, self._mesh.copy_rank, self._mesh.copy_size, stem=stem)
            for file_name, part in files.items():
                store = self._pool.submit(self._store_shard, stem, file_name, part, sums)
                self._pending[file_name] = store

    def finish(self) -> StoredShards:
        """Wait for every rank's shards and index them."""
        mine: list[_Stored] = []
        error: Exception | None = None
        for pending in self._pending.values():
            try:
                mine.append(pending.result())
            except Exception as caught:
                error = error or caught
        everyone: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(everyone, (mine, _text(error), self._seconds))
        _require_stored({rank: said for rank, (_, said, _) in enumerate(everyone)}, error)
        # by one rank for all: the same bytes stored twice are two versions of an object, and ranks that
        # named different ones would not agree later on whether they hold what a manifest names
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [(self._indexed(everyone), "")]
            except Exception as caught:
                error, answer = caught, [(None, _text(caught))]
        dist.broadcast_object_list(answer, src=0)
        stored, said = answer[0]
        _require_stored({0: said}, error)
        return stored

    def _indexed(self, everyone: list[tuple[list[_Stored], str, float]]) -> StoredShards:
        """All ranks' shards, and what is of no rank, stored here."""
        everything = [entry for stored, _, _ in everyone for entry in stored]
        files: dict[str, StoredFile] = {
            name: file for name, file in self._parent.items() if not name.startswith(STEMS)
        }
        if weights.CONFIG in files:  # version 0 may have been stored in another type
            files[weights.CONFIG] = self._stating_dtype(files[weights.CONFIG])
        for stem in STEMS:
            of_stem = [entry for entry in everything if entry.stem == stem]
            index = weights.write_index(self._path, [entry.shard for entry in of_stem], stem=stem)
            files[index] = self._store.put_file(self._path / index)
            files |= {entry.shard.file_name: entry.file for entry in of_stem}
        digest = weights.merge_digests(entry.digests for entry in everything)
        return StoredShards(
            files=files, tensor_digest=digest, stall_seconds=max(seconds for _, _, seconds in everyone)
        )

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    def _stating_dtype(self, config: StoredFile) -> StoredFile:
        before = self._store.cache.read(weights.CONFIG, config)
        after = weights.stating_dtype(before, self._dtype)
        return config if after == before else self._store.put_bytes(after)

    def _store_shard(
        self, stem: str, file_name: str, tensors: Mapping[str, Tensor], sums: Mapping[str, int]
    ) -> _Stored:
        """One file of this rank, in a thread: no collective in here."""
        num_bytes = {name: tensor.nbytes for name, tensor in tensors.items()}
        shard = weights.Shard(file_name=file_name, num_bytes=num_bytes)
        content = TensorFile(tensors, require_unchanged=lambda: _require_live(tensors, sums, file_name))
        digests = weights.digest_tensors(tensors.items()) if stem == "model" else {}
        parent = self._parent.get(file_name)
        every = self._full_every if stem == "model" else 1  # every element of a moment changes in every step
        stored = put_patched(self._store, content, parent, full_every=every, whole_beside=self._whole_beside)
        return _Stored(stem=stem, shard=shard, file=stored, digests=digests)


def store_shards(
    store: PolicyStore,
    model: PreTrainedModel,
    optimizer: AdamW,
    mesh: ParallelMesh,
    parent_files: Mapping[str, StoredFile],
    *,
    dtype: torch.dtype,
) -> tuple[dict[str, StoredFile], str]:
    """Store a model whole and wait for it; all ranks' files and the digest of the weights."""
    arena = HostArena(next(model.parameters()).device)
    with ShardUpload(store, mesh, arena, full_every=1) as upload:
        upload.start(model, optimizer, parent_files, dtype=dtype)
        stored = upload.finish()
    return stored.files, stored.tensor_digest


def reserved_arena(model: PreTrainedModel, dtype: torch.dtype) -> HostArena:
    """Host memory for the model's snapshots; it is pinned while the caller goes on."""
    arena = HostArena(next(model.parameters()).device)
    arena.reserve(host_bytes(model, dtype))
    return arena


def host_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Upper bound of a rank's snapshot: weights in ``dtype``, masters and two moments."""
    elements = sum(local_tensor(param).numel() for param in model.parameters())
    return elements * (dtype.itemsize + 3 * 4) + (64 << 20)


def named_tensors(
    model: PreTrainedModel, optimizer: AdamW, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """What a snapshot holds: tensors of a rank's shards, named ``<stem>:<name in the shard>``."""
    for name, tensor in weights.disk_tensors(model, dtype):
        yield f"model:{name}", tensor
    for name, tensor in weights.optimizer_tensors(model, optimizer, dtype):
        yield f"optimizer:{name}", tensor


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}" if error else ""


def _require_stored(said: Mapping[int, str], error: Exception | None) -> None:
    """What each rank says of its files; the same on every rank."""
    if failed := {rank: text for rank, text in said.items() if text}:
        listed = "\n".join(f"  rank {rank}: {text}" for rank, text in failed.items())
        raise UploadFailed(
            f"every rank must store its shards, got {len(failed)} that did not; nothing is published:\n"
            f"{listed}\nThe version before is intact: run the campaign again."
        ) from error


def _require_live(tensors: Mapping[str, Tensor], sums: Mapping[str, int], file_name: str) -> None:
    """What was stored must have the bits that the live tensors had when the snapshot was taken."""
    for name, tensor in tensors.items():
        if (got := int(bit_sum(tensor))) != sums[name]:
            raise StaleWeights(
                f"{name} in {file_name} must have the bits of the live tensor, got sum {got} instead of "
                f"{sums[name]}. Something wrote to the snapshot while it was stored; nothing is published. "
                "Run the campaign again."
            )
