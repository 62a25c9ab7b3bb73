"""Reads what the preflight's checks judge: this node, and what it reaches.

Every reader returns plain JSON; what it raises is recorded as ``{"error": ...}``. Readers of text that a tool
printed are split into running the tool and ``parse_*``, so that recorded output is a test's input.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from tasks.config import CampaignConfig
from tasks.planning.check import Wanted
from tasks.planning.two_ranks import exchange

EFA_VENDOR = "0x1d0f"
INFINIBAND = Path("/sys/class/infiniband")
PACKAGES = {"torch": ("torch",), "sglang": ("sglang",), "transformers": ("transformers",),
            "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12")}  # fmt: skip
GPU_FIELDS = ("index", "name", "memory.total", "memory.used", "ecc.mode.current",
              "ecc.errors.uncorrected.volatile.total", "clocks.max.sm", "clocks_event_reasons.hw_slowdown",
              "driver_version", "fabric.state")  # fmt: skip


def run(*command: str, timeout: float = 60) -> str:
    """What a tool prints; its complaint is the error."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(result.stderr or result.stdout).strip()[-300:]}")
    return result.stdout


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """``nvidia-smi --query-gpu`` as CSV without header and units."""
    found = []
    for line in text.strip().splitlines():
        index, name, total, used, ecc, uncorrected, sm, slow, driver, fabric = (
            part.strip() for part in line.split(",")
        )
        found.append(
            {
                "index": int(index), "name": name, "memory_mib": int(total), "used_mib": int(used),
                "ecc": ecc, "uncorrected": int(uncorrected) if uncorrected.isdigit() else 0,
                "max_sm_mhz": int(sm),
                "hw_slowdown": slow == "Active", "driver": driver, "fabric": fabric,
            }
        )  # fmt: skip
    return found


def parse_nvlinks(text: str) -> dict[str, int]:
    """``nvidia-smi nvlink --status``: GPU -> links that have a speed."""
    found: dict[str, int] = {}
    gpu = ""
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = head[1]
            found[gpu] = 0
        elif re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            found[gpu] += 1
    return found


def parse_nodes(text: str) -> list[dict[str, Any]]:
    """``kubectl get nodes -o json``: what Kubernetes can hand out on the pools' nodes."""
    return [
        {
            "name": item["metadata"]["name"],
            "type": item["metadata"]["labels"].get("node.kubernetes.io/instance-type", ""),
            "zone": item["metadata"]["labels"].get("topology.kubernetes.io/zone", ""),
            "gpus": int(item["status"]["allocatable"].get("nvidia.com/gpu", 0)),
            "efa": int(item["status"]["allocatable"].get("vpc.amazonaws.com/efa", 0)),
        }
        for item in json.loads(text)["items"]
    ]


def efa_devices(folder: Path = INFINIBAND) -> list[str]:
    found = []
    for device in sorted(folder.glob("*")):
        vendor = device / "device/vendor"
        if vendor.exists() and vendor.read_text().strip() == EFA_VENDOR:
            found.append(device.name)
    return found


def efa_bytes(folder: Path = INFINIBAND) -> int:
    """All bytes that the devices counted so far, sent, received, read and written."""
    counters = folder.glob("*/ports/*/hw_counters/*bytes")
    return sum(int(counter.read_text()) for counter in counters)


def memory_info(text: str) -> dict[str, int]:
    """``/proc/meminfo`` name -> number."""
    return {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if ":" in line}


def machine(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> dict[str, float]:
    """What this pod or machine may use: the control group's limit where there is one."""
    total = memory_info(Path("/proc/meminfo").read_text())["MemTotal"] * 1024
    text = limit.read_text().strip() if limit.exists() else "max"
    allowed = total if text == "max" else min(total, int(text))
    return {"memory_gib": round(allowed / 2**30, 2), "cpus": len(os.sched_getaffinity(0))}


def scratch(folder: Path) -> dict[str, Any]:
    """Free space of the cache's folder and the device under it."""
    folder.mkdir(parents=True, exist_ok=True)
    real = folder.resolve()
    mounts = [line.split()[:2] for line in Path("/proc/mounts").read_text().splitlines()]
    device = max((m for m in mounts if real.is_relative_to(m[1])), key=lambda m: len(m[1]))[0]
    return {"free_gib": round(shutil.disk_usage(real).free / 2**30, 2), "device": device}


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = {}
    for name, packages in PACKAGES.items():
        for package in packages:
            try:
                found[name] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
    return found


def loaded_libraries() -> str:
    """The memory map of this process with torch in it."""
    import torch  # noqa: F401

    return "\n".join(line for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line)


def deep_ep() -> dict[str, str]:
    import importlib

    module = importlib.import_module("deep_ep")
    return {"path": str(module.__file__), "version": str(getattr(module, "__version__", "none"))}


def store(config: CampaignConfig, *, writes: bool) -> dict[str, Any]:
    """Opens the campaign's store, which is refused without versioning; writes a probe; reads its clock."""
    from tasks.session import open_store

    bucket = open_store(config, "preflight").bucket
    found: dict[str, Any] = {"versioning": "Enabled"}
    if writes:
        key = f"preflight/probes/{uuid.uuid4().hex}"
        if config.checkpoint.store.startswith("s3://"):
            prefix = config.checkpoint.store.removeprefix("s3://").partition("/")[2].strip("/")
            key = f"{prefix}/{key}" if prefix else key
        answers = [bucket.put(key, b"preflight", absent=True) for _ in range(2)]
        found["conditional"] = [200 if answer else 412 for answer in answers]
    before = time.time()
    answer = bucket._client.list_objects_v2(Bucket=bucket.name, MaxKeys=1, Prefix="preflight/")
    middle = (before + time.time()) / 2
    date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
    # the header has whole seconds, rounded down
    found["skew_seconds"] = round(middle - parsedate_to_datetime(date).timestamp() - 0.5, 1)
    return found


def buffer(config: CampaignConfig) -> list[dict[str, Any]]:
    """Each shard of the buffer: version, eviction, TLS; never its password."""
    import valkey

    from tasks.session import buffer_urls

    found = []
    for url in buffer_urls(config):
        where = url.rpartition("@")[2].partition("/")[0].replace("valkey://", "")
        shard: dict[str, Any] = {"where": where, "tls": url.startswith(("valkeys://", "rediss://"))}
        try:
            info: Any = valkey.Valkey.from_url(url, socket_timeout=10, socket_connect_timeout=10).info()
            version = info.get("valkey_version") or info["redis_version"]
            shard |= {"version": str(version), "policy": info["maxmemory_policy"]}
        except valkey.ValkeyError as error:
            shard["error"] = str(error)
        found.append(shard)
    return found


def metadata(url: str) -> dict[str, str]:
    from tasks.engine.notices import Metadata

    answer = Metadata(url.rstrip("/"))._get("/latest/meta-data/placement/availability-zone")
    return {"zone": (answer or b"").decode()}


def flyte_version() -> str:
    """Of the backend that ``pyflyte`` is configured for."""
    from flyteidl.admin.version_pb2 import GetVersionRequest
    from flytekit.clients.friendly import SynchronousFlyteClient
    from flytekit.configuration import PlatformConfig

    answer = SynchronousFlyteClient(PlatformConfig.auto())._stub.GetVersion(GetVersionRequest())
    return answer.control_plane_version.Version


def image_answers(images: tuple[str, ...], *, scheme: str = "https") -> dict[str, int]:
    """Image -> HTTP status of its manifest; 401 from a private registry says nothing of the image."""
    found = {}
    for image in images:
        host, _, rest = image.partition("/")
        name, _, tag = rest.rpartition(":")
        request = urllib.request.Request(f"{scheme}://{host}/v2/{name}/manifests/{tag}", method="HEAD")
        request.add_header("Accept", "application/vnd.oci.image.index.v1+json")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found[image] = answer.status
        except urllib.error.HTTPError as error:
            found[image] = error.code
    return found


def readers(config: CampaignConfig, wanted: Wanted, cache: Path) -> Mapping[str, Callable[[], Any]]:
    """Fact -> how a node of this role reads it."""
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    node: dict[str, Callable[[], Any]] = {
        "environment": lambda: sorted(os.environ),
        "maps": loaded_libraries,
        "versions": versions,
        "two_ranks": lambda: exchange(gpus=wanted.gpus, counters=efa_bytes),
        "shared_memory_gib": lambda: shutil.disk_usage("/dev/shm").free / 2**30,
        "machine": machine,
        "scratch": lambda: scratch(cache),
        "store": lambda: store(config, writes=wanted.role in ("laptop", "cpu")),
        "buffer": lambda: buffer(config),
        "model_folder": lambda: (Path(wanted.model_folder) / "config.json").is_file(),
    }
    gpu: dict[str, Callable[[], Any]] = {
        "gpus": lambda: parse_gpus(run(*query)),
        "nvlinks": lambda: parse_nvlinks(run("nvidia-smi", "nvlink", "--status")),
        "efa_devices": efa_devices,
        "fi_info": lambda: run(shutil.which("fi_info") or "/opt/amazon/efa/bin/fi_info", "-p", "efa"),
        "has_gdrdrv": lambda: Path("/dev/gdrdrv").exists(),
        "memlock_bytes": lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "hugepages_total": lambda: memory_info(Path("/proc/meminfo").read_text())["HugePages_Total"],
        "deep_ep": deep_ep,
        "metadata": lambda: metadata(config.rollout.metadata_url),
    }
    cluster: dict[str, Callable[[], Any]] = {
        "nodes": lambda: parse_nodes(run("kubectl", "get", "nodes", "-l", "moe-rl/pool", "-o", "json")),
        "queues": lambda: run("kubectl", "get", "localqueues", "-A", "-o", "name").split(),
        "flyte_version": flyte_version,
        "images": lambda: image_answers(wanted.images),
    }
    if wanted.role == "cluster":
        return cluster
    return {**node, **(gpu if wanted.role in ("trainer", "rollout") else {})}


def read(config: CampaignConfig, wanted: Wanted, cache: Path) -> dict[str, Any]:
    """All facts of the role; a reader that fails leaves its error."""
    facts: dict[str, Any] = {}
    for name, reader in readers(config, wanted, cache).items():
        try:
            facts[name] = reader()
        except Exception as error:  # recorded, and judged by the checks that need the fact
            facts[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return facts
