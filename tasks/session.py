"""Opens what a run's configuration points at: its store, its buffer, its environment.

With a folder as store, the embedded servers keep their data there and are started by the first task that
asks.
"""

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tasks.artifacts.catalogue import chosen_lineage, config_of
from tasks.campaign_file import read_campaign
from tasks.config import CampaignConfig, with_overrides
from tasks.records import CampaignRun, TrainBatch

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore
    from tasks.environments.protocol import Environment, Prompt
    from tasks.experience.buffer import ExperienceBuffer

WEIGHTS, OPTIMIZER = "*.safetensors*", "optimizer*"
"""Files of a version that a task leaves in the store when it pulls the rest."""
CURRENT_RUN = "current.json"
"""Object under a campaign's name: the run that was started last, for standing workers to follow."""
TRANSFER_THREADS = min(16, max(4, os.cpu_count() or 1))
"""Parts of a file on their way at once; both ends hash each, so the rate follows the cores."""
ROOT = Path(__file__).resolve().parent.parent


def is_local_store(config: CampaignConfig) -> bool:
    return not config.checkpoint.store.startswith("s3://")


def store_folder(config: CampaignConfig) -> Path:
    """Absolute folder of an embedded store."""
    return Path(config.checkpoint.store).expanduser().resolve()


def require_existing(store: str) -> None:
    """End a command that only reads when its store's folder is not there: opening it would create it."""
    if not store.startswith("s3://") and not Path(store).expanduser().is_dir():
        raise SystemExit(
            f"--store must be s3://bucket/prefix or an existing folder, got {store}. Check the spelling."
        )


def campaign_at(store: str, campaign: str, *, endpoint_url: str) -> tuple[CampaignConfig, str]:
    """Enough of a configuration to open what a command names by ``--store`` and ``--campaign``, and the end
    that says which lineage, ``0001`` of ``laptop.0001``; empty if the name has none."""
    name, _, end = campaign.partition(".")
    given = {"name": name, "checkpoint__store": store, "checkpoint__endpoint_url": endpoint_url}
    return with_overrides(CampaignConfig(), **given), end


def read_config(path: Path, **overrides: str | int | float | None) -> CampaignConfig:
    """A command's ``--config`` with what its other arguments replace (``checkpoint__store=...``). What is
    wrong with it ends the command in a few lines, without a traceback."""
    import yaml

    try:
        data = read_campaign(path)
        return with_overrides(CampaignConfig.model_validate_json(json.dumps(data)), **overrides)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:  # JSON has no dates, for one
        raise SystemExit(f"--config must name a campaign's YAML, got {path}: {error}") from None


def open_store(config: CampaignConfig, campaign: str) -> "PolicyStore":
    """The artefact store under a campaign's prefix."""
    from tasks.artifacts import store

    local, checkpoint = is_local_store(config), config.checkpoint
    folder = Path(checkpoint.cache_folder).expanduser() if checkpoint.cache_folder else None
    return store.open_store(
        str(store_folder(config)) if local else config.checkpoint.store,
        campaign,
        endpoint_url=config.checkpoint.endpoint_url,
        port=config.checkpoint.port,
        cache=folder or (store_folder(config) / "cache" if local else None),
        cache_bytes=int(checkpoint.cache_gb * 2**30),
        fetch=checkpoint.fetch,
        num_threads=TRANSFER_THREADS,
    )


def run_store(run: CampaignRun) -> "PolicyStore":
    return open_store(run.config, run.campaign)


def newest_run(config: CampaignConfig) -> CampaignRun | None:
    """The run of the campaign's name that was started last."""
    found = open_store(config, config.name).find_object(CURRENT_RUN)
    return CampaignRun.model_validate_json(found) if found else None


def lineage_run(config: CampaignConfig, end: str) -> CampaignRun:
    """The run of the lineage that the name ends in, whatever was started beside it since: as it was started,
    if nothing was, else as its newest version was made."""
    lineage, newest = chosen_lineage(open_store(config, config.name), end), newest_run(config)
    if newest is not None and newest.lineage == lineage:
        return newest
    store = open_store(config, f"{config.name}.{lineage:04d}")
    head = store.head()
    if head is None:
        raise ValueError(
            f"lineage {store.campaign} must have a version, which says how it ran, got none. Go on with it "
            f"(pyflyte run ... --name {store.campaign}), or name another one."
        )
    made = store.manifest(head)
    return CampaignRun(
        config=config_of(store, made.config_digest), lineage=lineage, code_revision=made.code_revision
    )


def run_buffer(run: CampaignRun, *, digest: str = "") -> "ExperienceBuffer":
    """The experience buffer and work queue of a run, or of the same lineage under another configuration's
    digest."""
    from tasks.experience.buffer import ExperienceBuffer

    config = run.config.buffer
    return ExperienceBuffer(
        _addresses(run.config),
        f"{run.campaign}@{digest or run.config.digest()}",  # samples made under other rules are other samples
        lease_seconds=run.config.rollout.lease_seconds,
        max_attempts=config.max_attempts,
        capacity_bytes=config.capacity_mb * 2**20,
        revive=lambda: _addresses(run.config),
        password_file=config.password_file,
    )


def buffer_urls(config: CampaignConfig) -> list[str]:
    """The buffer's servers with their passwords; embedded ones are started."""
    return [_with_password(url, config.buffer.password_file) for url in _addresses(config)]


def _addresses(config: CampaignConfig) -> list[str]:
    return [_server(config, shard, url) for shard, url in enumerate(config.buffer.urls)]


def _server(config: CampaignConfig, shard: int, url: str) -> str:
    if url != "embedded":
        return url
    from tasks.embedded.valkey import ensure_valkey

    folder = store_folder(config) / f"shard-{shard}" if shard else store_folder(config)
    return ensure_valkey(folder, port=config.buffer.port if shard == 0 else 0)


def _with_password(url: str, file: str) -> str:
    if not file:
        return url
    user, host = url.split("@", 1)
    return f"{user}:{quote(Path(file).read_text().strip(), safe='')}@{host}"


def batch_name(run: CampaignRun, iteration: int) -> str:
    """Key of an iteration's sealed batch, without its ending; what it was made of is named alike."""
    return f"batches/{iteration:06d}-{run.config.digest()}"


def find_sealed(run: CampaignRun, iteration: int) -> TrainBatch | None:
    """The iteration's batch, if it was sealed before: then nothing of it is sampled or scored again."""
    sealed = run_store(run).find_object(f"{batch_name(run, iteration)}.json")
    return TrainBatch.model_validate_json(sealed) if sealed else None


def run_environment(run: CampaignRun) -> "Environment":
    from tasks.environments.make import make_environment

    return make_environment(run.config.environment, seed=run.config.seed)


def run_prompts(run: CampaignRun) -> "Iterable[Prompt]":
    """The first training prompt of a run, and then what is known of all before they are asked for."""
    from tasks.environments.protocol import known_prompts

    environment = run_environment(run)
    return itertools.chain([environment.train_prompt(0)], known_prompts(environment))


def is_evaluated(config: CampaignConfig, iterations: int) -> bool:
    """Whether the campaign evaluates the version after so many iterations."""
    return iterations % config.schedule.evaluate_every == 0 or iterations == config.schedule.iterations


def code_name() -> str:
    """What people call this code: ``MOE_RL_REVISION``, which a pod got from who registered it, else git's
    description, else nothing."""
    if name := os.environ.get("MOE_RL_REVISION"):
        return name
    try:
        describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def code_digest() -> str:
    """Of the code that makes samples and versions: the same wherever the same files were unpacked."""
    found = hashlib.sha256()
    for package in ("tasks", "moe_kernels"):
        spec = importlib.util.find_spec(package)
        for folder in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                text = path.read_bytes()
                found.update(f"{package}/{path.relative_to(folder)} {len(text)}\n".encode() + text)
    return found.hexdigest()[:12]


def code_revision() -> str:
    """The revision a run executes, ``name+digest``. A pod has no git, and a name says nothing of changes that
    were not committed; the digest says whether two processes run the same code."""
    return f"{code_name() or 'unnamed'}+{code_digest()}"


def other_code(revision: str) -> str:
    """Why this process may not stand beside a campaign of ``revision``, if it may not: versions would name
    code that did not make them."""
    if revision.rpartition("+")[2] == code_digest():
        return ""
    return (
        f"what stands beside a campaign must run its code, {revision}, got {code_revision()}. Start it from "
        "the campaign's code, or the campaign from this."
    )
