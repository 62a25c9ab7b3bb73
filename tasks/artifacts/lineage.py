"""What a version was made of, what differs between two, and any version as a Hugging Face folder."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.catalogue import chosen_lineage, config_of, evaluations
from tasks.artifacts.manifest import Manifest, PatchedBlob, stored_objects
from tasks.artifacts.store import open_store
from tasks.config import changes

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

TRAINING_ONLY = "optimizer*"
PROVENANCE = "moe-rl.json"
"""File of an export that says which version it is."""


def added_bytes(manifest: Manifest, parent: Manifest | None) -> int:
    """Bytes that a version added to the store: objects that its parent does not have."""
    before = {blob.key for blob in _objects(parent)} if parent else set()
    return sum({blob.key: blob.size for blob in _objects(manifest) if blob.key not in before}.values())


def ancestors(store: "PolicyStore", manifest: Manifest) -> list[int]:
    """Versions it descends from, the nearest first."""
    found: list[int] = []
    while manifest.parent is not None:
        found.append(manifest.parent)
        manifest = store.manifest(manifest.parent)
    return found


def describe(store: "PolicyStore", version: int) -> dict[str, Any]:
    """Everything a version says about itself and its making."""
    manifest = store.manifest(version)
    parent = None if manifest.parent is None else store.manifest(manifest.parent)
    weights = {
        n: f for n, f in manifest.files.items() if n.startswith("model") and n.endswith(".safetensors")
    }
    chain = max((len(f.patches) for f in weights.values() if isinstance(f, PatchedBlob)), default=0)
    described: dict[str, Any] = {
        "version": manifest.version,
        "campaign": manifest.campaign,
        "kind": manifest.kind,
        "created": manifest.created.isoformat(),
        "parents": ancestors(store, manifest),
        "iterations": manifest.iteration,
        "tensors": manifest.tensor_digest,
        "configuration": manifest.config_digest,
        "code": manifest.code_revision,
        "data": manifest.data.model_dump() if manifest.data else None,
        "ledger": manifest.ledger.model_dump() if manifest.ledger else None,
        "batch": manifest.batch,
        "samples": manifest.num_samples,
        "rewards": {k: v for k, v in manifest.metrics.items() if "reward" in k or k.startswith("exact")},
        "metrics": dict(manifest.metrics),
        "seconds": dict(manifest.seconds),
        "evaluations": evaluations(store, version),
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "added_bytes": added_bytes(manifest, parent),
        "stored_as": f"full and {chain} patches" if chain else "full",
        "retired": store.is_retired(version),
    }
    return described


def diff(store: "PolicyStore", old: int, new: int) -> dict[str, Any]:
    """What changed from one version to another: only what differs is named."""
    before, after = store.manifest(old), store.manifest(new)
    names = before.files.keys() | after.files.keys()
    content = {
        "added": sorted(after.files.keys() - before.files.keys()),
        "removed": sorted(before.files.keys() - after.files.keys()),
        "changed": sorted(
            name
            for name in names
            if name in before.files
            and name in after.files
            and before.files[name].sha256 != after.files[name].sha256
        ),
    }
    metrics = {
        name: [before.metrics.get(name), after.metrics.get(name)]
        for name in sorted(before.metrics.keys() | after.metrics.keys())
        if before.metrics.get(name) != after.metrics.get(name)
    }
    scores = [evaluations(store, number) for number in (old, new)]
    return {
        "versions": [old, new],
        "is_descendant": old in ancestors(store, after),
        "configuration": {n: list(v) for n, v in _config_changes(store, before, after).items()},
        "code": _pair(before.code_revision, after.code_revision),
        "data": _pair(*(m.data.model_dump() if m.data else None for m in (before, after))),
        "tensors": _pair(before.tensor_digest, after.tensor_digest),
        "files": {kind: found for kind, found in content.items() if found},
        "metrics": metrics,
        "evaluations": _pair(*scores),
        "bytes_to_fetch": added_bytes(_as_patches(after), before),
    }


def export(store: "PolicyStore", version: int, folder: Path) -> list[str]:
    """Copy a version to a plain Hugging Face folder, which appears when it is whole; returns its files."""
    if folder.exists():
        raise ValueError(f"{folder} must not exist before an export, got one. Choose another folder.")
    manifest, pulled = store.manifest(version), store.pull(version, without=TRAINING_ONLY)
    names = sorted(name for name in manifest.files if not name.startswith(TRAINING_ONLY.rstrip("*")))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        for name in names:  # copies: a link would let an edit of the export damage the cache
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pulled / name, target)
        _require_complete(partial)
        provenance = {
            "campaign": manifest.campaign, "version": version, "tensor_digest": manifest.tensor_digest,
            "config_digest": manifest.config_digest, "code_revision": manifest.code_revision,
        }  # fmt: skip
        (partial / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [*names, PROVENANCE]


def _require_complete(folder: Path) -> None:
    """Every tensor of the index is in a file, and no file has one that the index does not know."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    listed = set(json.loads(index.read_text())["weight_map"])
    found: set[str] = set()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="np") as file:
            found |= set(file.keys())
    if listed != found:
        raise ValueError(
            f"an export must hold the tensors of its index, got missing {sorted(listed - found)[:8]}, "
            f"unexpected {sorted(found - listed)[:8]}. The version is incomplete: use another one."
        )


def _as_patches(manifest: Manifest) -> Manifest:
    """Without what is stored whole beside its patches."""
    one_way = {
        name: file.model_copy(update={"whole": None}) if isinstance(file, PatchedBlob) else file
        for name, file in manifest.files.items()
    }
    return manifest.model_copy(update={"files": one_way})


def _objects(manifest: Manifest) -> Iterable[Any]:
    return (blob for file in manifest.files.values() for blob in stored_objects(file))


def _config_changes(store: "PolicyStore", before: Manifest, after: Manifest) -> dict[str, tuple[Any, Any]]:
    if before.config_digest == after.config_digest:
        return {}
    return changes(config_of(store, before.config_digest), config_of(store, after.config_digest))


def _pair(old: Any, new: Any) -> list[Any] | str:
    return "equal" if old == new else [old, new]


def open_lineage(address: str, campaign: str, *, endpoint_url: str = "") -> "PolicyStore":
    """Of ``laptop.0002`` that lineage, of ``laptop`` the newest."""
    name, _, end = campaign.partition(".")
    lineage = chosen_lineage(open_store(address, name, endpoint_url=endpoint_url), end)
    return open_store(address, f"{name}.{lineage:04d}", endpoint_url=endpoint_url)
