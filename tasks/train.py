"""Policy updates: PyTorch-elastic training, one task a topology.

Flyte fixes the number of nodes and ranks when a task is registered (an override of ``task_config`` is ignored
without a word), so each topology of ``tasks.train_config.TOPOLOGIES`` is a function of its own.
"""

from typing import Any

from flytekit import task

from tasks import placement
from tasks.config import CampaignConfig
from tasks.elastic import TorchElastic
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.train_config import TOPOLOGIES


def _elastic(topology: str) -> TorchElastic:
    nodes, ranks = TOPOLOGIES[topology]
    return TorchElastic(
        nnodes=nodes,
        nproc_per_node=ranks,
        max_restarts=3,
        monitor_interval=0.1 if nodes == 1 else 5,
        increase_shared_mem=False,  # the pod template sizes /dev/shm; Flyte would add a second volume
        rdzv_configs=placement.RENDEZVOUS,
    )


def _placed(topology: str) -> dict[str, Any]:
    return placement.TRAINER_OF[topology].task_arguments(retries=placement.TRAINER_RETRIES)


@task(task_config=_elastic("single_1x1"), **_placed("single_1x1"))
def update_policy_single_1x1(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 1 rank."""
    from tasks.policy.training.update import update

    return update(run, batch, policy)


@task(task_config=_elastic("laptop_1x2"), **_placed("laptop_1x2"))
def update_policy_laptop_1x2(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 1 node of 2 ranks."""
    from tasks.policy.training.update import update

    return update(run, batch, policy)


@task(task_config=_elastic("node_1x8"), **_placed("node_1x8"))
def update_policy_node_1x8(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 1 node of 8 ranks."""
    from tasks.policy.training.update import update

    return update(run, batch, policy)


@task(task_config=_elastic("cluster_16x8"), **_placed("cluster_16x8"))
def update_policy_cluster_16x8(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 16 nodes of 8 ranks."""
    from tasks.policy.training.update import update

    return update(run, batch, policy)


@task(**placement.CPU.task_arguments())
def await_update(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """The update stage of a standing trainer: ask it, and wait for the candidate."""
    from tasks.policy.training.request import await_candidate

    return await_candidate(run, batch, policy)


UPDATE_POLICY = {
    "single_1x1": update_policy_single_1x1,
    "laptop_1x2": update_policy_laptop_1x2,
    "node_1x8": update_policy_node_1x8,
    "cluster_16x8": update_policy_cluster_16x8,
}


def update_policy(config: CampaignConfig) -> Any:
    """The task that trains as the configuration asks."""
    return await_update if config.train.pool == "standing" else UPDATE_POLICY[config.train.topology]
