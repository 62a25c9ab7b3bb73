"""One policy update from plain ``torchrun``, without Flyte: the same function that the elastic task calls.

    torchrun --nproc-per-node 2 -m tasks.policy.launch --config configs/campaigns/laptop.yaml \\
        --iteration 3 --output candidate.json

Trains the iteration's sealed batch from the version that trained it in the campaign, and stores the shards of
the candidate. It publishes nothing: a candidate becomes a version by ``publish`` alone.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.config import CampaignConfig
from tasks.policy.training.update import update
from tasks.records import CampaignRun, PolicyVersion, TrainBatch
from tasks.session import find_sealed, newest_run, read_config, run_store
from tasks.train_config import TOPOLOGIES


def inputs(config: CampaignConfig, iteration: int) -> tuple[CampaignRun, TrainBatch, PolicyVersion]:
    """The campaign's newest run, the batch it sealed for the iteration, and the version to train."""
    run = newest_run(config)
    if run is None:
        raise ValueError(
            f"{config.checkpoint.store} must hold a campaign {config.name}, got none. Run one first."
        )
    batch = find_sealed(run, iteration)
    if batch is None:
        raise ValueError(
            f"iteration {iteration} of {run.campaign} must have a sealed batch, got none under "
            f"configuration {run.config.digest()}. Let the campaign assemble it first."
        )
    store = run_store(run)
    head = store.head()
    for number in range(head.version if head else -1, -1, -1):
        if store.manifest(number).iteration == iteration:
            return run, batch, store.reference(number)
    raise ValueError(f"a version that iteration {iteration} can train must be published, got none.")


def require_topology(config: CampaignConfig) -> None:
    """torchrun's ranks must be the configuration's."""
    nodes, ranks = TOPOLOGIES[config.train.topology]
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if (world, local) != (nodes * ranks, ranks):
        raise ValueError(
            f"torchrun must start {nodes} x {ranks} ranks for topology {config.train.topology}, got {world} "
            f"ranks, {local} a node. Set --nnodes and --nproc-per-node, or train.topology."
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--store", default=None, help="overrides checkpoint.store")
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    config = read_config(options.config, checkpoint__store=options.store)
    require_topology(config)
    candidate = update(*inputs(config, options.iteration))
    if os.environ.get("RANK", "0") == "0":
        options.output.write_text(candidate.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
