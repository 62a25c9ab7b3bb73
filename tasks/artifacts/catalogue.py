"""What is kept beside a lineage's versions, and under which keys.

{campaign}.{lineage}/config/{digest}.json                 every configuration that it was run with
{campaign}.{lineage}/evaluations/{version}-{digest}.json  a version's score under a configuration
{campaign}/lineages/{lineage}.json                        the lineages of a name
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.config import CampaignConfig, ConfigError

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

CONFIGS, EVALUATIONS, LINEAGES = "config/", "evaluations/", "lineages/"


def keep_config(store: "PolicyStore", config: CampaignConfig) -> None:
    store.put_object(f"{CONFIGS}{config.digest()}.json", config.model_dump_json().encode())


def config_of(store: "PolicyStore", digest: str) -> CampaignConfig:
    """Raises ``ConfigError`` for one that today's rules refuse."""
    key = f"{CONFIGS}{digest}.json"
    try:
        return CampaignConfig.model_validate_json(store.get_object(key))
    except ValueError as error:
        raise ConfigError(
            f"{store.campaign}/{key} must be a configuration of this release, under which the lineage goes "
            f"on, got one that it refuses: {error} Go on with the release that wrote it, or pass --fresh."
        ) from error


def configs(store: "PolicyStore") -> Iterator[tuple[str, CampaignConfig]]:
    """Every configuration by its digest."""
    digests = [_stem(key) for key in store.list_objects(CONFIGS)]
    return ((digest, config_of(store, digest)) for digest in digests)


def evaluation_key(version: int, digest: str) -> str:
    return f"{EVALUATIONS}{version:06d}-{digest}.json"


def evaluated_versions(store: "PolicyStore") -> set[int]:
    return {int(_stem(key).partition("-")[0]) for key in store.list_objects(EVALUATIONS)}


def evaluations(store: "PolicyStore", version: int | None = None) -> list[dict[str, Any]]:
    """Those of a version, or of all, ascending by version."""
    of_version = "" if version is None else f"{version:06d}-"
    return [json.loads(store.get_object(key)) for key in store.list_objects(EVALUATIONS + of_version)]


def lineage_key(lineage: int) -> str:
    return f"{LINEAGES}{lineage:04d}.json"


def lineages(root: "PolicyStore") -> list[int]:
    """Of a campaign's name, ascending; ``root`` is the store under the name alone."""
    return [int(_stem(key)) for key in root.list_objects(LINEAGES)]


def chosen_lineage(root: "PolicyStore", end: str) -> int:
    """The lineage that a name ends in, ``0001`` of ``laptop.0001``; without an end the newest."""
    known = {f"{lineage:04d}": lineage for lineage in lineages(root)}
    if not known:
        raise ConfigError(
            f"campaign must have been started in this store, got none named {root.campaign!r}. Check the "
            "spelling, and the store's."
        )
    if end and end not in known:
        raise ConfigError(
            "campaign must be a name alone, or end in a lineage that was started, one of "
            f"{[f'{root.campaign}.{number}' for number in known]}, got '{root.campaign}.{end}'. Name one of "
            "them."
        )
    return known[end] if end else max(known.values())


def _stem(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")
