"""The only file that knows node pools, images, resources and pod templates.

Local runs ignore all of this; a serialized task shows it. Everything a pod needs is in its template: any
``requests`` or ``limits`` on ``@task`` would replace the container's resources and drop EFA devices and
hugepages without a word. What a node of a pool has is in ``tasks/planning/instances.py``; ``configs/cluster``
makes the nodes, and a test holds the three against each other.
"""

from dataclasses import dataclass, field
from typing import Any

from flytekit import PodTemplate
from kubernetes.client import (
    V1Capabilities,
    V1Container,
    V1EmptyDirVolumeSource,
    V1EnvVar,
    V1HostPathVolumeSource,
    V1PersistentVolumeClaimVolumeSource,
    V1PodSpec,
    V1ResourceRequirements,
    V1SecretVolumeSource,
    V1SecurityContext,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
)

from tasks.planning.instances import INSTANCES, InstanceType
from tasks.session import code_name

NAMESPACE = "moe-production"
"""Of everything that runs a campaign's code: Flyte's project moe, domain production."""
REGISTRY = "registry.example.com/moe-rl"
"""Where the images of ``images/`` were pushed; change it here, once."""
SPOT_RETRIES = 5
"""A lost Spot node is a retry. Flyte's ``retries`` also covers PyTorchJob failures if the backend sets
``ignore-retry-cause: true``."""
TRAINER_RETRIES = 3
"""The trainer's nodes are stable, but each of sixteen may be repaired; a failed PyTorchJob is a user failure
and spends these."""
SPOT_GRACE_SECONDS = 75
"""EC2 gives two minutes' notice; draining the node takes its share of them."""
TRAINER_GRACE_SECONDS = 120
"""Above the longest ``train.grace_seconds``, by the time that torchrun takes to end its ranks."""
SPOT_DRAIN_SECONDS = 120
"""``terminationGracePeriod`` of the Spot node pools: a longer grace of a pod would be cut."""
POOL_LABEL = "moe-rl/pool"
SPOT_TAINT = "moe-rl/spot"
"""On Spot nodes only. Flyte adds the toleration to interruptible attempts (``configs/cluster/flyte.yaml``):
the last attempt of a task goes to the pool's on-demand nodes."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY = {"kueue.x-k8s.io/podset-preferred-topology": "topology.k8s.aws/network-node-layer-3"}
"""The workers of one job close to each other where the reservation allows it."""
RENDEZVOUS = {"timeout": 1800, "join_timeout": 1800, "read_timeout": 900}
"""Seconds that torchrun's processes wait for each other: sixteen cold nodes pull an image of 20 GB first.
Without it ``read_timeout`` is 60 and the first node to arrive gives up."""
PYTHON_PATH = "/root:/root/kernels"
"""Flyte unpacks the project to ``/root``; without the second entry pods do not find ``moe_kernels``."""
REVISION = code_name() or "unnamed"
"""Of the code that is registered; a pod that unrolls a graph hands on what it was given."""
CACHE = "/root/.cache"
"""Policy versions and compiled kernels; on GPU nodes a folder of the node's NVMe that outlives the pod."""
NODE_CACHE = "/mnt/k8s-disks/0/moe-rl"
"""Where Karpenter (``instanceStorePolicy: RAID0``) and nodeadm (``strategy: RAID0``) mount the array."""
MODELS = "/mnt/models"
"""Checkpoints that campaigns start from (``model.folder``): the claim ``models`` of a bucket, read-only."""
VALKEY = "/etc/valkey"
"""Certificate and password of the buffer: the secret ``valkey-client``."""

EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",  # the NCCL plugin chooses efa by itself; NVSHMEM, NIXL and Mooncake do not
    "NCCL_NET_PLUGIN": "ofi",  # the file's name since installer 1.44; not found, NCCL uses sockets silently
    "NCCL_TUNER_PLUGIN": "ofi",
    "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni",  # by exclusion: a pod's own interface is eth0
    "NCCL_DEBUG": "WARN",  # SGLang's image says INFO, which adds twenty minutes to a start of 128 ranks
    "NVIDIA_GDRCOPY": "enabled",  # DeepEP's exchange through the CPU proxy needs /dev/gdrdrv
    "TORCH_FR_BUFFER_SIZE": "2000",  # the collectives before a time-out, and ...
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # ... the file that says which rank was missing
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3900",  # above the longest train.collective_timeout_seconds
}
"""No ``FI_EFA_USE_DEVICE_RDMA``, ``FI_EFA_FORK_SAFE``, ``RDMAV_FORK_SAFE``, ``NCCL_PROTO`` or buffer sizes:
what old samples set is the default now, does harm or is ignored."""
CACHE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "EP_JIT_CACHE_DIR": f"{CACHE}/deep_ep",
    "TRITON_CACHE_DIR": f"{CACHE}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One kind of node: label and taint value, image, and what one pod takes of it."""

    name: str
    image: str
    instance: InstanceType
    """The smallest type of the pool: a pod of it fits every type the pool may start."""
    cpu: str
    memory: str
    gpus: int = 0
    hugepages: str = ""
    """Of 2 MiB, for EFA. Karpenter does not know them, so a pool that it scales has none."""
    scratch: str = "20Gi"
    """Ephemeral storage of a pod: its own folders and, without NVMe, its cache."""
    is_spot: bool = False
    grace_seconds: int = 30
    shared_memory: str = ""
    queue: str = ""
    """Kueue's LocalQueue; all pods of a job are admitted together or none."""
    service_account: str = "moe-rl-cpu"
    """Its permissions are in ``configs/cluster/eksctl.yaml``."""
    has_models: bool = False
    retries: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole_node(self) -> bool:
        return self.gpus > 0 and self.gpus == self.instance.gpus

    @property
    def efa(self) -> int:
        """EFA devices of a pod: who has all GPUs has all of them, and a single GPU exchanges with nobody."""
        return self.instance.efa if self.is_whole_node and self.gpus > 1 else 0

    @property
    def devices(self) -> dict[str, str]:
        """GPUs, EFA devices, hugepages: equal requests and limits."""
        found = {}
        if self.gpus:
            found["nvidia.com/gpu"] = str(self.gpus)
        if self.efa:
            found["vpc.amazonaws.com/efa"] = str(self.efa)
        if self.hugepages:
            found["hugepages-2Mi"] = self.hugepages
        return found

    @property
    def resources(self) -> dict[str, str]:
        return {"cpu": self.cpu, "memory": self.memory, "ephemeral-storage": self.scratch, **self.devices}

    @property
    def variables(self) -> dict[str, str]:
        found = {"PYTHONPATH": PYTHON_PATH, "MOE_RL_REVISION": REVISION}
        if self.efa:
            found |= EFA_ENVIRONMENT | ({} if self.hugepages else {"FI_EFA_USE_HUGE_PAGE": "0"})
        return found | (CACHE_ENVIRONMENT if self.gpus else {}) | self.environment

    def _volumes(self) -> dict[str, V1Volume]:
        """Mount path -> volume."""
        cache = V1Volume(name="cache", empty_dir=V1EmptyDirVolumeSource(size_limit=self.scratch))
        if self.is_whole_node:
            on_node = V1HostPathVolumeSource(path=NODE_CACHE, type="DirectoryOrCreate")
            cache = V1Volume(name="cache", host_path=on_node)
        secret = V1SecretVolumeSource(secret_name="valkey-client", optional=True)
        found = {CACHE: cache, VALKEY: V1Volume(name="valkey", secret=secret)}
        if self.shared_memory:
            memory = V1EmptyDirVolumeSource(medium="Memory", size_limit=self.shared_memory)
            found["/dev/shm"] = V1Volume(name="shm", empty_dir=memory)
        if self.has_models:
            claim = V1PersistentVolumeClaimVolumeSource(claim_name="models", read_only=True)
            found[MODELS] = V1Volume(name="models", persistent_volume_claim=claim)
        return found

    def pod_template(self) -> PodTemplate:
        """A fresh template; Flyte's plugins change theirs in place, so no two tasks may share one."""
        volumes = self._volumes()
        container = V1Container(
            name="primary",
            image=f"{REGISTRY}/{self.image}",
            resources=V1ResourceRequirements(requests=self.resources, limits=self.resources),
            env=[V1EnvVar(name=name, value=value) for name, value in self.variables.items()],
            security_context=V1SecurityContext(
                allow_privilege_escalation=False, capabilities=V1Capabilities(drop=["ALL"])
            ),
            volume_mounts=[
                V1VolumeMount(name=volume.name, mount_path=path, read_only=path in (MODELS, VALKEY))
                for path, volume in volumes.items()
            ],
        )
        spec = V1PodSpec(
            containers=[container],
            node_selector={POOL_LABEL: self.name},
            tolerations=[
                V1Toleration(key=POOL_LABEL, operator="Equal", value=self.name, effect="NoSchedule")
            ],
            service_account_name=self.service_account,
            termination_grace_period_seconds=self.grace_seconds,
            volumes=list(volumes.values()),
        )
        return PodTemplate(
            pod_spec=spec,
            primary_container_name="primary",
            labels={POOL_LABEL: self.name},
            annotations=TOPOLOGY if self.queue else None,
        )

    def task_arguments(self, **extra: Any) -> dict[str, Any]:
        """Arguments of ``@task`` that put it here. The queue's label is the task's: Flyte copies the labels
        of a pod template to the pods of a PyTorchJob alone, where Kueue does not look."""
        return {
            "pod_template": self.pod_template(),
            "container_image": f"{REGISTRY}/{self.image}",
            "interruptible": self.is_spot,
            "retries": self.retries,
            **({"labels": {QUEUE_LABEL: self.queue}} if self.queue else {}),
            **extra,
        }


CPU = Pool(
    name="cpu", image="cpu:0.1.0", instance=INSTANCES["c7i.48xlarge"], cpu="4", memory="16Gi",
    has_models=True,
)  # fmt: skip
MEMORY = Pool(
    name="memory", image="cpu:0.1.0", instance=INSTANCES["r7i.24xlarge"], cpu="8", memory="128Gi",
)  # fmt: skip
REWARD = Pool(
    name="reward", image="rollout:0.1.0", instance=INSTANCES["g6e.48xlarge"], cpu="20", memory="160Gi",
    gpus=1, scratch="400Gi", shared_memory="32Gi", service_account="moe-rl-rollout", has_models=True,
)  # fmt: skip
ROLLOUT = Pool(
    name="rollout-spot", image="rollout:0.1.0", instance=INSTANCES["p5en.48xlarge"], cpu="180",
    memory="1500Gi", gpus=8, scratch="200Gi", is_spot=True, grace_seconds=SPOT_GRACE_SECONDS,
    shared_memory="256Gi", service_account="moe-rl-rollout", retries=SPOT_RETRIES,
)  # fmt: skip
TRAINER = Pool(
    name="trainer", image="trainer:0.1.0", instance=INSTANCES["p5en.48xlarge"], cpu="180", memory="1800Gi",
    gpus=8, hugepages="5120Mi", scratch="200Gi", grace_seconds=TRAINER_GRACE_SECONDS, shared_memory="512Gi",
    queue="trainer", service_account="moe-rl-trainer", retries=TRAINER_RETRIES,
)  # fmt: skip
SINGLE = Pool(
    name="trainer-single", image="trainer:0.1.0", instance=INSTANCES["p5.4xlarge"], cpu="14", memory="200Gi",
    gpus=1, scratch="200Gi", grace_seconds=TRAINER_GRACE_SECONDS, shared_memory="64Gi",
    service_account="moe-rl-trainer", retries=TRAINER_RETRIES,
)  # fmt: skip
POOLS = (CPU, MEMORY, REWARD, ROLLOUT, TRAINER, SINGLE)
TRAINER_OF = {"single_1x1": SINGLE, "laptop_1x2": CPU, "node_1x8": TRAINER, "cluster_16x8": TRAINER}
"""Where a topology of ``tasks/train_config.py`` trains: a GPU for each rank, or none on the laptop."""
