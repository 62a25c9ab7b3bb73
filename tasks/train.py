"""Policy updates: PyTorch-elastic training, one task a topology.

Flyte fixes the number of nodes and ranks when a task is registered (an override of ``task_config`` is ignored
without a word), so each topology of ``tasks.train_config.TOPOLOGIES`` is a function of its own.
"""

from flytekit import task

from tasks import placement
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


@task(task_config=_elastic("laptop_1x2"), **placement.TRAINER.task_arguments())
def update_policy_laptop_1x2(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 1 node of 2 ranks."""
    from tasks.policy.update import update

    return update(run, batch, policy)


@task(task_config=_elastic("node_1x8"), **placement.TRAINER.task_arguments())
def update_policy_node_1x8(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 1 node of 8 ranks."""
    from tasks.policy.update import update

    return update(run, batch, policy)


@task(task_config=_elastic("cluster_16x8"), **placement.TRAINER.task_arguments())
def update_policy_cluster_16x8(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Train ``policy`` on ``batch``; 16 nodes of 8 ranks."""
    from tasks.policy.update import update

    return update(run, batch, policy)


UPDATE_POLICY = {
    "laptop_1x2": update_policy_laptop_1x2,
    "node_1x8": update_policy_node_1x8,
    "cluster_16x8": update_policy_cluster_16x8,
}
