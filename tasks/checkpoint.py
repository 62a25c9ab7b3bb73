"""Versions of the policy: open or resume a campaign, make version 0, publish what a trainer made."""

import json
import secrets
import time
from typing import TYPE_CHECKING

from flytekit import FlyteContextManager, task

from tasks import placement
from tasks.artifacts.catalogue import chosen_lineage, config_of, keep_config, lineage_key, lineages
from tasks.artifacts.critics import publish_critic, require_critic
from tasks.artifacts.errors import ObjectConflict
from tasks.config import (
    FIXED_BY_TRAINING,
    IMMUTABLE_SECTIONS,
    CampaignConfig,
    ConfigError,
    changes,
    with_overrides,
)
from tasks.experience.set_aside import owners, set_aside
from tasks.records import CampaignRun, CampaignState, Candidate, Evaluation, PolicyVersion, SampleArchive
from tasks.say import say
from tasks.session import (
    CURRENT_RUN,
    code_revision,
    is_local_store,
    open_store,
    run_buffer,
    run_store,
    store_folder,
)
from tasks.train_config import TOPOLOGIES

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore
    from tasks.environments.protocol import Environment


@task(**placement.CPU.task_arguments())
def open_campaign(
    config: CampaignConfig,
    name: str | None,
    iterations: int | None,
    learning_rate: float | None,
    store: str | None,
    fresh: bool,
) -> CampaignRun:
    """Fix the effective configuration and the lineage: the newest of this name; with ``fresh`` the next; that
    of ``name`` itself where it ends as lineages do (``laptop.0001``)."""
    name, _, chosen = (name or "").partition(".")
    config = with_overrides(
        config,
        name=name or None,
        schedule__iterations=iterations,
        train__learning_rate=learning_rate,
        checkpoint__store=store,
    )
    environment = _made_environment(config)
    _require_gpus(config)
    if is_local_store(config):
        from tasks.embedded.disk import require_free_space

        require_free_space(store_folder(config), int(config.checkpoint.min_free_gb * 2**30))
    root = open_store(config, config.name)
    if chosen and fresh:
        raise ConfigError(
            f"name must be without a lineage where --fresh starts the next one, got {config.name}.{chosen}. "
            "Leave out the end, or --fresh."
        )
    lineage = chosen_lineage(root, chosen) if chosen else _lineage(root, fresh=fresh)
    run = CampaignRun(config=config, lineage=lineage, code_revision=code_revision())
    campaign = run_store(run)
    _refuse_another_lineage(campaign, run, environment)
    root.replace_object(CURRENT_RUN, run.model_dump_json().encode())
    keep_config(campaign, config)
    print(config.departures())
    where = store_folder(config) if is_local_store(config) else config.checkpoint.store
    say(
        "campaign",
        f"{run.campaign}, configuration {config.digest()} (defaults but for the lines above), "
        f"code {run.code_revision}, store {where}",
    )
    return run


@task(**placement.CPU.task_arguments())
def resume(run: CampaignRun) -> CampaignState:
    """What is published already; an empty state for a new lineage."""
    store = run_store(run)
    head = store.head()
    if head is None:
        return CampaignState(versions=[], iterations_done=0)
    manifest = store.manifest(head)
    done, total = manifest.iteration, run.config.schedule.iterations
    rest = (
        f"continues with iteration {done}"
        if done < total
        else f"all {total} iterations are done, nothing to train"
    )
    say(
        "resume",
        f"found version {head.version} after {done} iterations: {rest} (--fresh starts a new lineage)",
    )
    set_aside(store, run, owners(store.history()))
    for published in range(max(0, done - run.config.schedule.max_staleness - 1), done):
        run_buffer(run).drop(published)  # a run killed between commit and drop left them
    first = head.version - done  # the version that iteration 0 trained; earlier ones never sample
    oldest = max(first, head.version - run.config.schedule.max_staleness)
    versions = [store.reference(number) for number in range(oldest, head.version + 1)]
    return CampaignState(versions=versions, iterations_done=done)


@task(**placement.CPU.task_arguments())
def hand_on(
    versions: list[PolicyVersion], iterations_done: int, evaluations: list[Evaluation]
) -> CampaignState:
    """The state after a segment; it waits for the segment's evaluations."""
    return CampaignState(versions=versions, iterations_done=iterations_done)


@task(**placement.CPU.task_arguments())
def initialize(run: CampaignRun) -> PolicyVersion:
    """Version 0: a Hugging Face folder adopted as it is, or a random policy."""
    say("init", f"version 0 from {run.config.model.folder or 'a random policy'}")
    from tasks.policy.checkpoint.initial import initial_manifest

    store = run_store(run)
    version = store.commit(initial_manifest(store, run))
    say("publish", f"v{version.version} {version.manifest_uri}")
    return version


@task(**placement.CPU.task_arguments())
def publish(run: CampaignRun, candidate: Candidate, archive: SampleArchive | None = None) -> PolicyVersion:
    """Commit the candidate's manifest, the one moment at which it becomes a version, then free its
    experience, which ``archive`` keeps."""
    from tasks.artifacts.manifest import Manifest
    from tasks.artifacts.unfinished import drop_unfinished

    start, store = time.monotonic(), run_store(run)
    manifest = Manifest.model_validate_json(candidate.manifest_json)
    parent = store.manifest(manifest.version - 1)
    if (
        manifest.tensor_digest == parent.tensor_digest
        and manifest.metrics.get("skipped_steps", 0) < manifest.metrics["steps"]
    ):
        raise RuntimeError(
            f"version {manifest.version} must differ from version {parent.version} after "
            f"{manifest.metrics['steps']:.0f} optimizer steps, got the same tensor digest "
            f"{manifest.tensor_digest[:16]}. Stale weights were saved; nothing is published. Run the "
            "campaign again."
        )
    manifest = manifest.model_copy(
        update={"seconds": {**manifest.seconds, "publish": time.monotonic() - start}}
    )
    version = store.commit(manifest)
    drop_unfinished(store, version.version)
    if manifest.critic:
        publish_critic(run, store, manifest)
    if manifest.kind == "iteration" and archive is not None:
        run_buffer(run).drop(manifest.iteration - 1)
    say(
        "publish",
        f"v{version.version} digest {manifest.tensor_digest[:12]}, {time.monotonic() - start:.1f} s",
        iteration=manifest.iteration - 1,
    )
    return version


def _made_environment(config: CampaignConfig) -> "Environment":
    """A module, file or package that is missing, or a module that answers turns where none may be answered,
    ends the launch before a lineage is begun."""
    from tasks.environments.make import make_environment
    from tasks.environments.protocol import answers_turns

    try:
        environment = make_environment(config.environment, seed=config.seed)
        if answers_turns(environment):
            config.check_answered_turns()
        return environment
    except (ValueError, ModuleNotFoundError) as error:
        raise ConfigError(str(error)) from error


def _require_gpus(config: CampaignConfig) -> None:
    """Where one machine runs all: its ranks would end one after the other, each with a traceback of torch."""
    state, train = FlyteContextManager.current_context().execution_state, config.train
    if train.backend != "nccl" or train.pool != "tasks" or state is None or not state.is_local_execution():
        return
    import torch

    needed, found = TOPOLOGIES[train.topology][1], torch.cuda.device_count()
    if found < needed:
        raise ConfigError(
            f"train.backend 'nccl' needs a GPU for each of the {needed} ranks of {train.topology} on this "
            f"machine, got {found}. Set it to 'gloo', or topology to one that fits."
        )


def _lineage(root: "PolicyStore", *, fresh: bool) -> int:
    """The newest lineage, or one that no other run has: of two that start at once, each claims its own."""
    known = lineages(root)
    if known and not fresh:
        return max(known)
    claim = json.dumps({"claim": secrets.token_hex(8)}).encode()
    lineage = max(known, default=0) + 1
    while True:
        try:
            root.put_object(lineage_key(lineage), claim)
            return lineage
        except ObjectConflict:
            if not fresh:
                return lineage
            lineage += 1


def _refuse_another_lineage(store: "PolicyStore", run: CampaignRun, environment: "Environment") -> None:
    """A campaign may resume with another schedule or learning rate, not with another model or other data."""
    head = store.head()
    if head is None:
        return
    manifest = store.manifest(head)
    changed = changes(config_of(store, manifest.config_digest), run.config)
    names = (*IMMUTABLE_SECTIONS, *(FIXED_BY_TRAINING if manifest.iteration else ()))
    fixed = {name: values for name, values in changed.items() if {name, name.split(".")[0]} & {*names}}
    if fixed:
        listed = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in fixed.items())
        raise ConfigError(
            f"campaign {run.campaign} has version {head.version} and may not change these: {listed}. Restore "
            "them, choose another name, or pass --fresh to start a new lineage beside this one."
        )
    from tasks.artifacts.cursor import require_same_data

    require_same_data(manifest, environment.fingerprint())
    if run.config.algorithm.advantage == "gae":
        require_critic(manifest)
    for name, (old, new) in changed.items():
        say("resume", f"{name} changed since version {head.version}: {old!r} -> {new!r}")
