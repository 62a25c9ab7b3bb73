"""Ready-made campaigns: what an operator starts from the console, by name, or on a schedule.

    pyflyte run workflows/launch_plans.py laptop                       (here, by the variable's name)
    pyflyte run --remote workflows/launch_plans.py eks_grpo --iterations 50 --fresh
    pyflyte register ... --activate-launchplans workflows              (turns the schedule on)

A plan's configuration is one file of ``configs/campaigns``, fixed when the plan is registered: changing the
file changes nothing until it is registered again, as another version. The console shows it as JSON; the
scalars that operators change (name, iterations, learning rate, store, fresh) stand beside it and override it
where given.
"""

# pyright: reportArgumentType=false
# ``@workflow`` declares that it returns the function it got.

from pathlib import Path

from flytekit import ConcurrencyLimitBehavior, ConcurrencyPolicy, CronSchedule, LaunchPlan

from tasks.campaign_file import read_campaign
from tasks.config import CampaignConfig
from workflows.campaign import campaign

CAMPAIGNS = Path(__file__).resolve().parent.parent / "configs/campaigns"
NIGHTLY = "0 2 * * *"
"""UTC."""
NUM_PARALLEL_NODES = 64
"""Of one workflow record; Flyte's own default of 25 would hold nodes back that have their inputs."""


def shipped(name: str) -> CampaignConfig:
    """The configuration of a file in ``configs/campaigns``."""
    return CampaignConfig.model_validate(read_campaign(CAMPAIGNS / f"{name}.yaml"))


laptop = LaunchPlan.get_or_create(
    workflow=campaign,
    name="laptop",
    default_inputs={"config": shipped("laptop")},
)
"""The two-minute campaign; needs embedded servers, so everything on one machine."""

one_node = LaunchPlan.get_or_create(
    workflow=campaign,
    name="one_node",
    default_inputs={"config": shipped("one_node")},
    max_parallelism=NUM_PARALLEL_NODES,
)
"""One training node of eight GPUs and two for rollouts: the first thing to run on a new cluster."""

eks_grpo = LaunchPlan.get_or_create(
    workflow=campaign,
    name="eks_grpo",
    default_inputs={"config": shipped("qwen3_30b_a3b")},
    max_parallelism=NUM_PARALLEL_NODES,
)
"""Sixteen training nodes and 32 Spot nodes."""

nightly = LaunchPlan.get_or_create(
    workflow=campaign,
    name="nightly",
    fixed_inputs={"config": shipped("one_node"), "name": "nightly", "fresh": False},
    schedule=CronSchedule(schedule=NIGHTLY),
    concurrency=ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP),
    max_parallelism=NUM_PARALLEL_NODES,
)
"""Goes on from the last published version, every night, until the schedule's iterations are done. Its inputs
are fixed, so nobody's launch changes them; a night is skipped while the one before still runs."""
