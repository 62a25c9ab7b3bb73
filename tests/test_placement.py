"""Pools and pod templates: what every serialized task keeps, and that its nodes can hold it."""

from typing import Any

import pytest
import yaml
from test_graph import ROOT, serialized_tasks

from tasks import placement
from tasks.planning.instances import INSTANCES, gib
from tasks.session import code_digest, code_name, code_revision
from tasks.train_config import TOPOLOGIES

TEMPLATES = serialized_tasks()
POOL = {pool.name: pool for pool in placement.POOLS}
OBSOLETE = {
    "FI_EFA_USE_DEVICE_RDMA",
    "FI_EFA_FORK_SAFE",
    "RDMAV_FORK_SAFE",
    "FI_EFA_ENABLE_SHM_TRANSFER",
    "FI_EFA_SET_CUDA_SYNC_MEMOPS",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_IB_DISABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_NVLS_ENABLE",
    "OFI_NCCL_ENDPOINT_PER_COMM",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
}
"""Set by many public samples; the default now, harmful, or unknown to the versions in ``images/``."""


def spec(name: str) -> dict[str, Any]:
    return TEMPLATES[name].k8s_pod.pod_spec


def pool_of(name: str) -> placement.Pool:
    return POOL[spec(name)["nodeSelector"][placement.POOL_LABEL]]


def variables(name: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in spec(name)["containers"][0]["env"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_serialized_task_keeps_efa_hugepages_and_shared_memory(name: str) -> None:
    pool, container = pool_of(name), spec(name)["containers"][0]
    for kind in ("requests", "limits"):
        kept = container["resources"][kind]
        assert kept.get("vpc.amazonaws.com/efa") == (str(pool.instance.efa) if pool.gpus == 8 else None)
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert kept.get("hugepages-2Mi") == (pool.hugepages or None)
        assert kept.get("nvidia.com/gpu") == (str(pool.gpus) if pool.gpus else None)
    sizes = {v["name"]: v["emptyDir"].get("sizeLimit") for v in spec(name)["volumes"] if "emptyDir" in v}
    assert sizes.get("shm", "") == pool.shared_memory
    assert not TEMPLATES[name].extended_resources  # a second /dev/shm, added by Flyte


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_obsolete_variable_and_the_projects_path(name: str) -> None:
    assert not OBSOLETE & variables(name).keys()
    assert variables(name)["PYTHONPATH"] == "/root:/root/kernels"


def test_efa_without_hugepages_says_so() -> None:
    for pool in placement.POOLS:
        if "vpc.amazonaws.com/efa" in pool.devices:
            assert (pool.variables.get("FI_EFA_USE_HUGE_PAGE") == "0") == (not pool.hugepages)
            assert pool.variables["FI_PROVIDER"] == "efa" and pool.variables["NCCL_NET_PLUGIN"] == "ofi"


def test_the_efa_count_is_the_tables_and_never_a_constant() -> None:
    counts = {name: INSTANCES[name].efa for name in INSTANCES if name.startswith("p")}
    assert counts == {
        "p5.4xlarge": 1,
        "p5.48xlarge": 32,
        "p5e.48xlarge": 32,
        "p5en.48xlarge": 16,
        "p6-b200.48xlarge": 8,
        "p6-b300.48xlarge": 16,
    }
    moved = placement.Pool(**{**vars(placement.TRAINER), "instance": INSTANCES["p6-b200.48xlarge"]})
    assert moved.devices["vpc.amazonaws.com/efa"] == "8"


@pytest.mark.parametrize("pool", placement.POOLS, ids=lambda pool: pool.name)
def test_a_pod_fits_its_node_with_room_for_the_systems_own(pool: placement.Pool) -> None:
    pods = pool.instance.gpus // pool.gpus if pool.gpus else 1
    assert pods * int(pool.cpu) * 1000 <= 0.96 * pool.instance.allocatable_cpu
    memory = gib(pool.memory) + (gib(pool.hugepages) if pool.hugepages else 0)
    assert pods * memory <= 0.96 * pool.instance.allocatable_mib / 1024
    assert not pool.shared_memory or gib(pool.shared_memory) < gib(pool.memory)  # counts against it


@pytest.mark.parametrize("name", TEMPLATES)
def test_spot_pods_may_be_disrupted_and_are_gone_before_the_node(name: str) -> None:
    pool, template = pool_of(name), TEMPLATES[name]
    everything = f"{template.k8s_pod.metadata} {template.metadata}"
    assert "do-not-disrupt" not in everything
    grace = spec(name)["terminationGracePeriodSeconds"]
    assert grace == pool.grace_seconds
    if pool.is_spot:
        assert grace == 75 < placement.SPOT_DRAIN_SECONDS == 120
        assert template.metadata.interruptible and template.metadata.retries.retries == 5


def test_a_training_job_queues_as_a_whole_and_asks_for_neighbours() -> None:
    for topology, (nodes, ranks) in TOPOLOGIES.items():
        template = TEMPLATES[f"tasks.train.update_policy_{topology}"]
        if ranks < 8:  # on nodes that come and go by themselves, where there is nobody to wait for
            assert template.k8s_pod.metadata.annotations in (None, {}) and nodes == 1
            continue
        labels = template.to_flyte_idl().metadata.metadata.labels
        assert dict(labels) == {"kueue.x-k8s.io/queue-name": "trainer"}
        assert template.k8s_pod.metadata.annotations == {
            "kueue.x-k8s.io/podset-preferred-topology": "topology.k8s.aws/network-node-layer-3"
        }
        assert template.type == ("pytorch" if nodes > 1 else "python-task")


def test_a_topology_asks_for_a_gpu_a_rank_and_the_laptops_for_none() -> None:
    assert placement.TRAINER_OF.keys() == TOPOLOGIES.keys()
    for topology, (_, ranks) in TOPOLOGIES.items():
        name = f"tasks.train.update_policy_{topology}"
        limits = spec(name)["containers"][0]["resources"]["limits"]
        gpus = int(limits.get("nvidia.com/gpu", 0))
        assert gpus == (0 if topology == "laptop_1x2" else ranks), topology
        assert pool_of(name) is placement.TRAINER_OF[topology]
        assert spec(name)["terminationGracePeriodSeconds"] == (120 if gpus else 30)
    single = placement.SINGLE
    assert "vpc.amazonaws.com/efa" not in single.devices and "FI_PROVIDER" not in single.variables
    assert single.instance.usd_per_hour * 8 == INSTANCES["p5.48xlarge"].usd_per_hour  # an eighth of the node


def test_a_pod_is_told_what_its_code_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TEMPLATES:
        assert variables(name)["MOE_RL_REVISION"] == placement.REVISION
    monkeypatch.setenv("MOE_RL_REVISION", "9d8ca4c")
    assert code_name() == "9d8ca4c" and code_revision() == f"9d8ca4c+{code_digest()}"


def test_processes_wait_for_slow_nodes_to_pull_their_image() -> None:
    from tasks.train import update_policy_cluster_16x8

    waits = update_policy_cluster_16x8.task_config.rdzv_configs
    assert waits["join_timeout"] >= 1800 and waits["read_timeout"] >= 900


def test_the_watchdog_outlasts_the_longest_collective() -> None:
    for path in (ROOT / "configs/campaigns").glob("*.yaml"):
        wait = yaml.safe_load(path.read_text())["train"].get("collective_timeout_seconds", 0)
        assert wait < int(placement.EFA_ENVIRONMENT["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])


def test_gpu_nodes_keep_their_cache_and_others_do_not_write_to_the_node() -> None:
    for pool in placement.POOLS:
        volumes = {v.name: v for v in pool.pod_template().pod_spec.volumes}
        assert bool(volumes["cache"].host_path) == pool.is_whole_node


def test_a_template_belongs_to_one_task() -> None:
    assert placement.TRAINER.pod_template() is not placement.TRAINER.pod_template()
    assert len({id(v) for pool in placement.POOLS for v in pool.pod_template().pod_spec.volumes}) > 5
