"""Where an iteration reads in the training data: behind what every iteration before it was offered.

A product of the iteration's number and the configured prompts would skip or repeat prompts without a word
when a campaign goes on with another number of them. So the position is counted, and each manifest holds it.
"""

from typing import TYPE_CHECKING

from tasks.artifacts.errors import NotFound
from tasks.artifacts.manifest import Manifest
from tasks.artifacts.version import PolicyVersion

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

DATASET = "data/fingerprint"


def fix_dataset(store: "PolicyStore", fingerprint: str) -> None:
    """The data of a whole lineage, by whoever first makes prompts of them: a position means the same prompt
    for ever, whatever became of the files it came from."""
    known = store.find_object(DATASET)
    if known is None:
        store.put_object(DATASET, fingerprint.encode())
    elif known.decode() != fingerprint:
        raise ValueError(
            f"campaign {store.campaign} must go on with the data it began with, got {fingerprint!r} instead "
            f"of {known.decode()!r}. Restore the data, or pass --fresh to start a new lineage."
        )


def fixed_dataset(store: "PolicyStore") -> str:
    """For those that have no environment, as ranks: neither its files nor its packages need to be there."""
    return store.get_object(DATASET).decode()


def position_after(manifest: Manifest, *, offered: int) -> int:
    """Prompts offered up to a version; in one of an earlier release, what the configuration says of each."""
    return manifest.data.position if manifest.data else manifest.iteration * offered


def first_prompt(store: "PolicyStore", behavior: PolicyVersion, iteration: int, *, offered: int) -> int:
    """Position of an iteration's first prompt: that of the newest version before it, and what the iterations
    that are still in flight between the two are offered."""
    manifest = store.manifest(behavior)
    for number in reversed(
        range(behavior.version + 1, behavior.version + iteration - manifest.iteration + 1)
    ):
        try:
            manifest = store.manifest(number)
            break
        except NotFound:  # not trained yet
            continue
    return position_after(manifest, offered=offered) + (iteration - manifest.iteration) * offered


def require_same_data(manifest: Manifest, dataset: str) -> None:
    """Refuse to go on in other data than the version's position counts."""
    if manifest.data and manifest.data.dataset != dataset:
        raise ValueError(
            f"the training data must be those of version {manifest.version}, {manifest.data.dataset!r}, of "
            f"which {manifest.data.position} prompts were offered, got {dataset!r}. Restore them, or pass "
            "--fresh to start a new lineage beside this one."
        )
