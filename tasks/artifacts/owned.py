"""The files of a version that hold what their reader owns: chosen by its index, before they are fetched.

Files and not ranges of them, and each is verified whole: what is in the cache is a whole content, whoever
asked for it. A trainer's ranks store their own experts apart from what several ranks need (``by_file`` in
``tasks/policy/checkpoint/weights.py``), so that a node leaves out the experts of others.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore
    from tasks.artifacts.version import PolicyVersion

TENSORS = "*.safetensors"
"""What stays in the store until it is asked for."""
Fetch = Callable[[Collection[str]], object]
"""Puts files into a checkpoint's folder, by name."""


def already_there(_names: Collection[str]) -> None:
    """Of a folder that has all its files."""


def not_leased() -> None:
    """Of a folder that no cache evicts."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a checkpoint's configuration and indexes; its tensors come when they are asked for."""

    folder: Path
    fetch: Fetch = already_there
    release: Callable[[], None] = not_leased
    """Lets the cache evict the folder, once it has been read."""


def checkpoint_of(store: "PolicyStore", version: "int | PolicyVersion") -> Checkpoint:
    """A version, in the folder that ``pull`` makes: whoever needs all of it pulls, which brings the rest."""
    folder = store.pull(version, without=TENSORS)
    return Checkpoint(folder, lambda names: store.pull(version, names=names), lambda: store.release(folder))


def files_holding(owned: Collection[str], index: Mapping[str, str]) -> list[str]:
    """The files that hold any of the tensors, by the index's word for where each one is."""
    return sorted({index[name] for name in owned})
