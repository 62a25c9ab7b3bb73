"""Preflight: refuse a slow or wrong start, on a node of each pool, before anything else of a campaign.

    python -m tasks.preflight --config configs/campaigns/laptop.yaml                 (this machine)
    python -m tasks.preflight --config configs/campaigns/one_node.yaml --role cluster
    python -m tasks.preflight --config C --role trainer --record facts.json          (on a node) ...
    python -m tasks.preflight --config C --role trainer --facts facts.json           (... judged elsewhere)

Roles trainer, rollout and cpu run on a node of their pool; as tasks where ``preflight.roles`` names them.
Role cluster asks Kubernetes, Flyte and the registry from wherever ``kubectl`` and ``pyflyte`` are configured.
Exit code 1: something refuses.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytekit import task

from tasks import placement
from tasks.config import CampaignConfig
from tasks.planning.check import Wanted
from tasks.planning.instances import gib
from tasks.records import CampaignRun
from tasks.say import say
from tasks.session import ROOT, is_local_store, read_config, store_folder

ROLES = ("laptop", "cpu", "rollout", "trainer", "cluster")
POOL_ROLES = ("cpu", "rollout", "trainer")
CHECKED_VERSIONS = ("torch", "nccl", "sglang", "deep_ep")


def pool_of(config: CampaignConfig, role: str) -> placement.Pool:
    """Where a node of the role stands."""
    trainer = placement.TRAINER_OF[config.train.topology]
    return {"cpu": placement.CPU, "rollout": placement.ROLLOUT, "trainer": trainer}[role]


def wanted(config: CampaignConfig, role: str) -> Wanted:
    """What placement and the configuration say a node of the role is."""
    import yaml

    shared = {
        "role": role,
        "dispatcher": config.train.dispatcher,
        "model_folder": config.model.folder or "",
        "needs_tls": not is_local_store(config),
        "max_time_skew_seconds": config.preflight.max_time_skew_seconds,
        "images": tuple(sorted({f"{placement.REGISTRY}/{pool.image}" for pool in placement.POOLS})),
        "queue": placement.TRAINER.queue,
        "asks_metadata": bool(config.rollout.metadata_url),
    }
    if role not in POOL_ROLES:
        return Wanted(**shared, scratch_gib=config.checkpoint.min_free_gb)
    pool = pool_of(config, role)
    image = pool.image.partition(":")[0]
    versions = yaml.safe_load((ROOT / "images/versions.yaml").read_text())["target"][image]
    return Wanted(
        **shared,
        gpus=pool.gpus,
        gpu_name=pool.instance.gpu_name,
        gpu_mib=pool.instance.gpu_mib,
        efa=pool.efa,
        hugepages=int(gib(pool.hugepages) * 512) if pool.hugepages else 0,
        shared_memory_gib=gib(pool.shared_memory) if pool.shared_memory else 0.0,
        memory_gib=gib(pool.memory),
        cpus=int(pool.cpu),
        scratch_gib=0.5 * gib(pool.scratch),
        needs_nvme=pool.is_whole_node,
        versions={name: str(versions[name]) for name in CHECKED_VERSIONS if name in versions},
    )


def examine(run: CampaignRun, role: str) -> CampaignRun:
    """Read, judge and say; raises unless every check of the role passes."""
    from tasks.planning.facts import read
    from tasks.planning.preflight import in_use, judge, require

    want = wanted(run.config, role)
    facts = read(run.config, want, _cache(run.config))
    outcomes = judge(facts, want)
    say("preflight", f"{role}: {in_use(facts)}")
    say("preflight", f"{role}: {sum(o.is_passed for o in outcomes)} of {len(outcomes)} checks pass")
    for outcome in outcomes:
        if not outcome.is_passed:
            say("preflight", f"{outcome.name}: {outcome.problem}")
    require(outcomes, role=role)
    return run


def _cache(config: CampaignConfig) -> Path:
    return store_folder(config) if is_local_store(config) else Path(placement.CACHE)


@task(**placement.CPU.task_arguments())
def preflight_laptop(run: CampaignRun) -> CampaignRun:
    """Everything that a machine without GPUs can check."""
    return examine(run, "laptop")


@task(**placement.CPU.task_arguments())
def preflight_cpu(run: CampaignRun) -> CampaignRun:
    """Store, buffer, clock and checkpoints, from where versions are committed."""
    return examine(run, "cpu")


@task(**placement.ROLLOUT.task_arguments())
def preflight_rollout(run: CampaignRun) -> CampaignRun:
    """One Spot node."""
    return examine(run, "rollout")


@task(**placement.TRAINER.task_arguments())
def preflight_trainer(run: CampaignRun) -> CampaignRun:
    """One training node."""
    return examine(run, "trainer")


@task(**placement.SINGLE.task_arguments())
def preflight_single(run: CampaignRun) -> CampaignRun:
    """One training node of one GPU."""
    return examine(run, "trainer")


PREFLIGHT = {
    "cpu": preflight_cpu,
    "rollout-spot": preflight_rollout,
    "trainer": preflight_trainer,
    "trainer-single": preflight_single,
}
"""By pool."""


def preflight_task(config: CampaignConfig, role: str) -> Any:
    """The task that examines a node of the role."""
    return preflight_laptop if role == "laptop" else PREFLIGHT[pool_of(config, role).name]


def main(arguments: Sequence[str]) -> int:
    from tasks.planning.facts import read
    from tasks.planning.preflight import in_use, judge, table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--role", choices=ROLES, default="laptop")
    parser.add_argument("--store", default=None, help="overrides checkpoint.store")
    parser.add_argument("--record", type=Path, help="write the facts and judge nothing")
    parser.add_argument("--facts", type=Path, help="judge recorded facts instead of this machine's")
    options = parser.parse_args(arguments)
    config = read_config(options.config, checkpoint__store=options.store)
    want = wanted(config, options.role)
    facts = json.loads(options.facts.read_text()) if options.facts else read(config, want, _cache(config))
    if options.record:
        options.record.write_text(json.dumps(facts, indent=1) + "\n")
        return 0
    outcomes = judge(facts, want)
    print(table(outcomes))
    if options.role != "cluster":  # which reads no node
        print(f"in use: {in_use(facts)}")
    refused = sum(not outcome.is_passed for outcome in outcomes)
    print(f"{options.role}: {len(outcomes) - refused} of {len(outcomes)} checks pass")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
