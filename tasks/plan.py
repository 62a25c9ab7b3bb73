"""What a campaign takes on the cluster: nodes, GPUs, memory of a rank, bytes that an iteration moves, price.

    python -m tasks.plan --config configs/campaigns/qwen3_30b_a3b.yaml --seconds 900
    python -m tasks.plan --config configs/campaigns/qwen3_30b_a3b.yaml --store s3://moe-rl-checkpoints/campaigns

The launch plan ``eks_grpo`` is the first of these. How long an iteration takes is not guessed: ``--seconds``
says it, or ``--store`` reads it off the campaign's newest versions; without either the price is an hour's.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks import placement
from tasks.config import CampaignConfig
from tasks.planning.budget import Nodes, bytes_moved, memory_of_a_rank, price
from tasks.planning.instances import PRICED
from tasks.planning.shape import Shape, counted, described
from tasks.session import newest_run, read_config, require_existing, run_store
from tasks.train_config import TOPOLOGIES

NUM_VERSIONS = 20
"""Whose times make the median of an iteration."""


def nodes(config: CampaignConfig) -> list[Nodes]:
    """What the campaign keeps while it runs; graph, environments and scoring share a node each."""
    trainer = placement.TRAINER_OF[config.train.topology]
    numbers = ((trainer, TOPOLOGIES[config.train.topology][0]), (placement.ROLLOUT, config.rollout.workers),
               (placement.REWARD, 1), (placement.MEMORY, len(config.buffer.urls)),
               (placement.CPU, 1))  # fmt: skip
    return [
        Nodes(what=pool.name, instance=pool.instance, number=number, is_spot=pool.is_spot)
        for pool, number in numbers
    ]


def iteration_seconds(config: CampaignConfig) -> float:
    """The median time between the newest versions of the campaign's newest lineage."""
    require_existing(config.checkpoint.store)
    run = newest_run(config)
    store = run_store(run) if run else None
    head = store.head() if store else None
    first = max(0, head.version - NUM_VERSIONS) if head else 0
    made = [store.manifest(n) for n in range(first, head.version + 1)] if store and head else []
    times = [
        (later.created - earlier.created).total_seconds()
        for earlier, later in itertools.pairwise(made)
        if later.kind == "iteration"
    ]
    if not times:
        raise SystemExit(
            f"{config.checkpoint.store} must hold iterations of {config.name}, got none. Give --seconds."
        )
    return statistics.median(times)


def text(config: CampaignConfig, *, model: Path | None, seconds: float | None) -> str:
    """The plan as a page."""
    shape = counted(described(config, model))
    rollout = config.rollout
    lines = [
        f"{config.name}: {shape.parameters / 1e9:,.1f} billion parameters, {shape.experts / 1e9:,.1f} of "
        f"them in experts, {shape.active / 1e9:,.1f} active",
        f"an iteration: {rollout.samples_per_iteration:,} samples of up to {rollout.max_new_tokens:,} tokens",
        "",
        *_memory(config, shape),
        "",
        "an iteration moves, at most, GB",
        *(f"  {gb:>10,.2f}  {what}" for what, gb in bytes_moved(shape, config).items() if gb),
        "",
        *_price(config, seconds),
        "",
        f"prices: {PRICED}",
    ]
    return "\n".join(lines)


def _memory(config: CampaignConfig, shape: Shape) -> list[str]:
    nodes, ranks = TOPOLOGIES[config.train.topology]
    instance = placement.TRAINER_OF[config.train.topology].instance
    kept, room = memory_of_a_rank(shape, config.train), instance.gpu_mib * 2**20 / 1e9
    parts = ", ".join(f"{name} {gb:,.1f}" for name, gb in kept.items())
    lines = [f"a rank of {nodes} x {ranks} keeps {sum(kept.values()):,.1f} GB of {room:,.0f}: {parts}"]
    if sum(kept.values()) > room:
        lines.append("THIS DOES NOT FIT: raise train.fsdp or ep, or take a larger topology")
    return lines


def _price(config: CampaignConfig, seconds: float | None) -> list[str]:
    kept = nodes(config)
    lines = [f"{'nodes':<16}{'type':<16}{'number':>7}{'GPUs':>6}{'USD/h':>14}{'on demand':>14}"]
    for group in kept:
        gpus, note = group.number * group.instance.gpus, " Spot" if group.as_placed != group.on_demand else ""
        lines.append(
            f"{group.what:<16}{group.instance.name:<16}{group.number:>7}{gpus:>6}"
            f"{group.as_placed:>14,.2f}{group.on_demand:>14,.2f}{note}"
        )
    hour = price(kept)
    sums = {"an hour": 1.0}
    if seconds is None:
        lines.append("an iteration: give --seconds, or --store of a campaign that ran")
    else:
        sums[f"an iteration of {seconds:,.0f} s"] = seconds / 3600
        sums[f"{config.schedule.iterations} iterations"] = config.schedule.iterations * seconds / 3600
    lines += [f"{name:<45}{hour[0] * hours:>14,.2f}{hour[1] * hours:>14,.2f}" for name, hours in sums.items()]
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, help="folder with the policy's config.json; replaces model.folder"
    )
    parser.add_argument("--seconds", type=float, help="that an iteration takes")
    parser.add_argument("--store", help="where the campaign ran: its iterations' median time")
    options = parser.parse_args(arguments)
    config = read_config(options.config, checkpoint__store=options.store)
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds must be above 0, got {options.seconds:g}")
    seconds = iteration_seconds(config) if options.store else options.seconds
    print(text(config, model=options.model, seconds=seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
