"""The only file that knows node pools, images, resources and pod templates.

Local runs ignore all of this; a serialized task shows it. Everything a pod needs is in its template: any
``requests`` or ``limits`` on ``@task`` would replace the container's resources and drop EFA devices and
hugepages without a word. Sizes follow p5en.48xlarge (8 H200, 192 vCPU, 2 TiB), of which EKS hands out 15 of
16 EFA devices.
"""

from dataclasses import dataclass, field
from typing import Any

from flytekit import PodTemplate
from kubernetes.client import (
    V1Container,
    V1EmptyDirVolumeSource,
    V1EnvVar,
    V1PodSpec,
    V1ResourceRequirements,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
)

REGISTRY = "registry.example.com/moe-rl"
"""Where the images of ``images/`` were pushed; change it here, once."""
SPOT_RETRIES = 5
"""A lost Spot node is a retry. Flyte's ``retries`` also covers PyTorchJob failures if the backend sets
``ignore-retry-cause: true``."""
SPOT_GRACE_SECONDS = 75
"""EC2 gives two minutes' notice; draining the node takes its share of them."""
POOL_LABEL = "moe-rl/pool"


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One kind of node: label and taint value, image, and what one pod takes of it."""

    name: str
    image: str
    cpu: str
    memory: str
    devices: dict[str, str] = field(default_factory=dict)
    """GPUs, EFA devices, hugepages: equal requests and limits."""
    is_spot: bool = False
    shared_memory: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def pod_template(self) -> PodTemplate:
        """A fresh template; Flyte's plugins change theirs in place, so no two tasks may share one."""
        resources = {"cpu": self.cpu, "memory": self.memory, **self.devices}
        shm = [
            V1Volume(
                name="shm", empty_dir=V1EmptyDirVolumeSource(medium="Memory", size_limit=self.shared_memory)
            )
        ]
        mounts = [V1VolumeMount(name="shm", mount_path="/dev/shm")]
        container = V1Container(
            name="primary",
            image=f"{REGISTRY}/{self.image}",
            resources=V1ResourceRequirements(requests=resources, limits=resources),
            env=[V1EnvVar(name=name, value=value) for name, value in self.environment.items()],
            volume_mounts=mounts if self.shared_memory else None,
        )
        spec = V1PodSpec(
            containers=[container],
            node_selector={POOL_LABEL: self.name},
            tolerations=[
                V1Toleration(key=POOL_LABEL, operator="Equal", value=self.name, effect="NoSchedule")
            ],
            termination_grace_period_seconds=SPOT_GRACE_SECONDS if self.is_spot else None,
            volumes=shm if self.shared_memory else None,
        )
        return PodTemplate(pod_spec=spec, primary_container_name="primary", labels={POOL_LABEL: self.name})

    def task_arguments(self, **extra: Any) -> dict[str, Any]:
        """Arguments of ``@task`` that put it here."""
        retries = SPOT_RETRIES if self.is_spot else 1
        return {
            "pod_template": self.pod_template(),
            "container_image": f"{REGISTRY}/{self.image}",
            "interruptible": self.is_spot,
            "retries": retries,
            **extra,
        }


EFA_ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_NET_PLUGIN": "ofi"}

CPU = Pool(name="cpu", image="cpu:0.1.0", cpu="4", memory="16Gi")
MEMORY = Pool(name="memory", image="cpu:0.1.0", cpu="8", memory="128Gi")
REWARD = Pool(name="reward", image="cpu:0.1.0", cpu="16", memory="64Gi")
ROLLOUT = Pool(
    name="rollout-spot", image="rollout:0.1.0", cpu="180", memory="1500Gi", is_spot=True,
    shared_memory="256Gi",
    devices={"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "15", "hugepages-2Mi": "5120Mi"},
    environment=EFA_ENVIRONMENT,
)  # fmt: skip
TRAINER = Pool(
    name="trainer", image="trainer:0.1.0", cpu="180", memory="1800Gi", shared_memory="512Gi",
    devices={"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "15", "hugepages-2Mi": "5120Mi"},
    environment=EFA_ENVIRONMENT,
)  # fmt: skip
POOLS = (CPU, MEMORY, REWARD, ROLLOUT, TRAINER)
