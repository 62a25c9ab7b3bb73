"""Samples that runs of a lineage made under other configurations than the one an iteration is trained with.

    set_aside/{iteration}-{digest}.json   how many a configuration made, once they are rejected

An iteration belongs to the configuration of its published version; until there is one, to the run's. What
the others made of it is rejected by name. Identity is of an iteration and a configuration: a run that comes
back to a configuration makes the same samples again, which are then its own and no longer rejected.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tasks.artifacts.catalogue import configs
from tasks.records import CampaignRun
from tasks.say import say
from tasks.session import run_buffer

if TYPE_CHECKING:
    from tasks.artifacts.manifest import Manifest
    from tasks.artifacts.store import PolicyStore

REASON = "configuration_changed"


def owners(manifests: Iterable["Manifest"]) -> dict[int, str]:
    """Published iteration -> digest of the configuration it was trained with."""
    return {m.iteration - 1: m.config_digest for m in manifests if m.kind == "iteration"}


def set_aside(store: "PolicyStore", run: CampaignRun, owned: dict[int, str]) -> None:
    """Reject what is not the run's: drop it from the buffer, and remember how much it was.

    What another run set aside of this configuration is open again: its samples are made anew.
    """
    own, done = run.config.digest(), len(owned)
    for digest, config in configs(store):
        buffer = run_buffer(run, digest=digest)
        for iteration in range(done + config.schedule.max_staleness + 1):
            key = _key(iteration, digest)
            if digest == owned.get(iteration, own):
                if iteration >= done and store.find_object(key) is not None:
                    buffer.reopen(iteration)
                continue
            samples, known = buffer.produced(iteration).samples, _count(store.find_object(key))
            if samples > known:
                store.replace_object(key, str(samples).encode())
                text = f"{samples} samples of an earlier configuration are rejected"
                say("resume", text, iteration=iteration)
            if samples:
                buffer.drop(iteration)


def set_aside_samples(store: "PolicyStore", run: CampaignRun, owned: dict[int, str]) -> dict[int, int]:
    """Iteration -> samples of others: those set aside, and of published iterations also what a run that
    lost the race to publish left in the buffer."""
    own, counts = run.config.digest(), dict[int, int]()
    stored = {key: _count(store.get_object(key)) for key in store.list_objects("set_aside/")}
    known = list(configs(store))
    for key, count in stored.items():
        iteration, digest = _parsed(key)
        if digest != owned.get(iteration, own):
            counts[iteration] = counts.get(iteration, 0) + count
    for digest, _ in known:
        lost = [iteration for iteration, owner in owned.items() if owner != digest]
        buffer = run_buffer(run, digest=digest)
        for iteration in lost:
            if more := max(0, buffer.produced(iteration).samples - stored.get(_key(iteration, digest), 0)):
                counts[iteration] = counts.get(iteration, 0) + more
    return counts


def _key(iteration: int, digest: str) -> str:
    return f"set_aside/{iteration:06d}-{digest}.json"


def _parsed(key: str) -> tuple[int, str]:
    iteration, digest = key.removeprefix("set_aside/").removesuffix(".json").split("-")
    return int(iteration), digest


def _count(found: bytes | None) -> int:
    return int(found or b"0")
