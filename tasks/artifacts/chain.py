"""Storing a file as what changed since its parent's: chains of patches, begun anew now and then."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.artifacts.content import Content, digests_of
from tasks.artifacts.manifest import Patch, PatchedBlob, StoredFile
from tasks.artifacts.patch import make_patch

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def put_patched(
    store: PolicyStore,
    content: Content,
    parent: StoredFile | None,
    *,
    full_every: int,
    whole_beside: bool = False,
) -> StoredFile:
    """Store a safetensors file as what changed since the parent's; whole where that is smaller, as every
    ``full_every``-th of a chain, and beside it if asked. A file that is the parent's is not sent at all."""
    if parent is None or full_every == 1:
        return store.put(content)
    known = digests_of(content)
    if known.sha256 == parent.sha256:
        content.require_unchanged()
        return parent
    chain = parent.patches if isinstance(parent, PatchedBlob) else ()
    if len(chain) + 1 >= full_every:
        return store.put(content, known=known)
    base = store.cache.folder / "bases" / f"{known.sha256}.{os.getpid()}" / "parent"
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder) / "patch"
        try:
            store.cache.link(base.name, parent, base.parent)
            is_made = make_patch(base, content, patch, num_threads=store.num_threads)
        finally:
            shutil.rmtree(base.parent, ignore_errors=True)
        if not is_made:
            return store.put(content, known=known)
        content.require_unchanged()
        added = Patch(sha256=known.sha256, blob=store.put_file(patch))
    return PatchedBlob(
        sha256=known.sha256,
        blake3=known.blake3,
        size=parent.size,
        full=parent.full if isinstance(parent, PatchedBlob) else parent,
        patches=(*chain, added),
        whole=store.put(content, known=known) if whole_beside else None,
    )
