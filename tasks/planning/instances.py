"""What an EC2 instance type is: one table that placement, cluster files, preflight and plan are checked
against.

Hardware, and what Kubernetes can allocate of it, as Karpenter v1.14.1 models it. EFA devices differ by
type and cannot be derived from the bandwidth: 32 on p5, 16 on p5en, 8 on p6-b200 for the same 3,200 Gbit/s.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """Example: ``INSTANCES["p5en.48xlarge"].efa == 16``."""

    name: str
    gpus: int = 0
    gpu_name: str = ""
    """As Karpenter's label ``karpenter.k8s.aws/instance-gpu-name`` and, in capitals, in ``nvidia-smi``."""
    gpu_mib: int = 0
    vcpus: int
    memory_gib: int
    allocatable_cpu: int
    """In thousandths of a core."""
    allocatable_mib: int
    efa: int = 0
    fabric_gbps: float
    nvme_gb: int = 0
    usd_per_hour: float = 0.0
    """On demand; 0 = not listed."""
    spot_usd_per_hour: float = 0.0
    """0 = nobody stated one."""


PRICED = "2026-07-20 on demand (us-east-1, Karpenter's generated file), 2026-08-06 Spot (us-east-2, dstack)"
"""When and by whom the prices below were stated; ``python -m tasks.plan`` shows it beside every sum."""
SPOT_USD = {"p5en.48xlarge": 26.57}
_ROWS = (
    ("p5.4xlarge", 1, "h100", 81920, 16, 256, 15890, 239554, 1, 100, 3800, 6.88),
    ("p5.48xlarge", 8, "h100", 81920, 192, 2048, 191450, 1938410, 32, 3200, 30400, 55.04),
    ("p5e.48xlarge", 8, "h200", 144384, 192, 2048, 191450, 1938410, 32, 3200, 30400, 0.0),
    ("p5en.48xlarge", 8, "h200", 144384, 192, 2048, 191450, 1937332, 16, 3200, 30400, 63.296),
    ("p6-b200.48xlarge", 8, "b200", 183359, 192, 2048, 191450, 1937332, 8, 3200, 30400, 113.93),
    ("p6-b300.48xlarge", 8, "b300", 275040, 192, 4096, 191450, 3877198, 16, 6400, 30400, 142.42),
    ("g6e.48xlarge", 8, "l40s", 45776, 192, 1536, 191450, 1449132, 4, 400, 7600, 30.13),
    ("r7i.24xlarge", 0, "", 0, 96, 768, 95690, 718987, 0, 37.5, 0, 6.35),
    ("r7i.48xlarge", 0, "", 0, 192, 1536, 191450, 1446437, 1, 50, 0, 12.70),
    ("x2idn.32xlarge", 0, "", 0, 128, 2048, 127610, 1931403, 1, 100, 3800, 13.34),
    ("c7i.48xlarge", 0, "", 0, 192, 384, 191450, 355262, 1, 50, 0, 8.57),
)
INSTANCES = {
    name: InstanceType(
        name=name, gpus=gpus, gpu_name=gpu_name, gpu_mib=gpu_mib, vcpus=vcpus, memory_gib=memory_gib,
        allocatable_cpu=allocatable_cpu, allocatable_mib=allocatable_mib, efa=efa, fabric_gbps=fabric_gbps,
        nvme_gb=nvme_gb, usd_per_hour=usd_per_hour, spot_usd_per_hour=SPOT_USD.get(name, 0.0),
    )
    for name, gpus, gpu_name, gpu_mib, vcpus, memory_gib, allocatable_cpu, allocatable_mib, efa, fabric_gbps,
        nvme_gb, usd_per_hour in _ROWS
}  # fmt: skip
GIB_PER_UNIT = {"Mi": 1 / 1024, "Gi": 1.0, "Ti": 1024.0}


def gib(quantity: str) -> float:
    """A Kubernetes memory quantity with a binary unit, in GiB."""
    return float(quantity[:-2]) * GIB_PER_UNIT[quantity[-2:]]
