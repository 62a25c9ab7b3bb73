"""Checks of a node itself: GPUs, NVLink, EFA, libraries, memory. A single GPU needs no NVLink and no EFA."""

import re

from tasks.planning.check import GPU, NODE, Facts, Wanted, check, get, numbers, unless
from tasks.policy.libraries import mapped_libraries, network

OBSOLETE = ("FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "NCCL_PROTO", "NCCL_IB_DISABLE",
            "FI_EFA_ENABLE_SHM_TRANSFER", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS")  # fmt: skip
MIN_DRIVER = (580,)
"""Of NVIDIA's driver for CUDA 13."""
LEAST_SHARED_MEMORY = 2**-10
"""GiB, for a role that asks for none: torch's processes keep their semaphores there."""
NVLINKS = {"h100": 18, "h200": 18, "b200": 18, "b300": 18}


@check(*GPU)
def gpu_count(facts: Facts, wanted: Wanted) -> str:
    found = len(get(facts, "gpus"))
    return unless(
        found == wanted.gpus,
        f"{wanted.gpus} GPUs must be visible, got {found}. Drain the node; a GPU fell off the bus.",
    )


@check(*GPU)
def gpu_model(facts: Facts, wanted: Wanted) -> str:
    names = {gpu["name"] for gpu in get(facts, "gpus")}
    return unless(
        names and all(wanted.gpu_name.upper() in name.upper() for name in names),
        f"GPUs must be {wanted.gpu_name.upper()}, got {sorted(names)}. Correct the pool's instance types.",
    )


@check(*GPU)
def gpu_memory(facts: Facts, wanted: Wanted) -> str:
    low = [gpu["index"] for gpu in get(facts, "gpus") if gpu["memory_mib"] < 0.98 * wanted.gpu_mib]
    return unless(
        not low, f"each GPU must have {wanted.gpu_mib} MiB, got less on {low}. MIG is on, or drain."
    )


@check(*GPU)
def gpu_is_idle(facts: Facts, wanted: Wanted) -> str:
    busy = [gpu["index"] for gpu in get(facts, "gpus") if gpu["used_mib"] > 2048]
    if not busy:
        return ""
    return f"GPUs must be free at the start, got {busy} in use. An earlier pod's process lives on."


@check(*GPU)
def gpu_ecc(facts: Facts, wanted: Wanted) -> str:
    bad = [g["index"] for g in get(facts, "gpus") if g["ecc"] != "Enabled" or g["uncorrected"] > 0]
    if not bad:
        return ""
    return f"ECC must be on without uncorrected errors, got otherwise on {bad}. Replace the node."


@check(*GPU)
def gpu_clocks(facts: Facts, wanted: Wanted) -> str:
    slow = [g["index"] for g in get(facts, "gpus") if g["hw_slowdown"] or g["max_sm_mhz"] < 1500]
    return unless(
        not slow, f"GPUs must run at full clocks, got a slowdown or cap on {slow}. Try `nvidia-smi -rac`."
    )


@check(*GPU)
def gpu_driver(facts: Facts, wanted: Wanted) -> str:
    found = {gpu["driver"] for gpu in get(facts, "gpus")}
    return unless(
        found and all(numbers(version) >= MIN_DRIVER for version in found),
        f"the driver must be {MIN_DRIVER[0]} or newer for CUDA 13, got {sorted(found)}. Pin a newer AMI.",
    )


@check(*GPU)
def nvlink(facts: Facts, wanted: Wanted) -> str:
    if wanted.gpus < 2:
        return ""
    links, want = get(facts, "nvlinks"), NVLINKS.get(wanted.gpu_name, 0)
    down = {gpu: count for gpu, count in links.items() if count < want}
    if len(links) >= wanted.gpus and not down:
        return ""
    return f"each GPU must have {want} active NVLinks, got {down or links}. Drain the node."


@check(*GPU)
def nvswitch_fabric(facts: Facts, wanted: Wanted) -> str:
    if wanted.gpus < 2:
        return ""
    states = {gpu["fabric"] for gpu in get(facts, "gpus")}
    if states == {"Completed"}:
        return ""
    return f"the NVSwitch fabric must be Completed, got {sorted(states)}. Restart fabricmanager."


@check(*GPU)
def efa_devices(facts: Facts, wanted: Wanted) -> str:
    if not wanted.efa:
        return ""
    found = len(get(facts, "efa_devices"))
    if found == wanted.efa:
        return ""
    return (
        f"{wanted.efa} EFA devices must be visible, got {found}. The device plugin does not know the type "
        "(needs 0.5.10), or the pod did not ask for them; NCCL would take TCP without a word."
    )


@check(*GPU)
def efa_provider(facts: Facts, wanted: Wanted) -> str:
    if not wanted.efa:
        return ""
    providers = set(re.findall(r"^\s*provider:\s*(\S+)", get(facts, "fi_info"), re.MULTILINE))
    if providers == {"efa"}:
        return ""
    return f"fi_info must list provider efa alone, got {sorted(providers)}. Mount no /dev/infiniband."


@check(*GPU)
def efa_is_what_nccl_uses(facts: Facts, wanted: Wanted) -> str:
    if not wanted.efa:
        return ""
    found = network(get(facts, "two_ranks")["nccl_log"])
    return unless(
        found.startswith("OFI efa"),
        f"NCCL must select efa between two ranks, got {found}. Check NCCL_NET_PLUGIN=ofi.",
    )


@check(*GPU)
def efa_counters_move(facts: Facts, wanted: Wanted) -> str:
    if not wanted.efa:
        return ""
    moved = get(facts, "two_ranks")["efa_bytes"]
    return unless(
        moved > 0,
        "EFA byte counters must move while two ranks exchange, got 0. The traffic went another way.",
    )


@check(*GPU)
def gdrcopy(facts: Facts, wanted: Wanted) -> str:
    if not wanted.efa:
        return ""
    return unless(
        get(facts, "has_gdrdrv"),
        "/dev/gdrdrv must exist for GPUDirect, got none. Set NVIDIA_GDRCOPY=enabled; check the AMI.",
    )


@check(*GPU)
def locked_memory(facts: Facts, wanted: Wanted) -> str:
    if not wanted.efa:
        return ""
    found = get(facts, "memlock_bytes")
    if found < 0:
        return ""
    return f"locked memory must be unlimited for RDMA, got {found} bytes. Raise the runtime's limit."


@check("trainer")
def hugepages(facts: Facts, wanted: Wanted) -> str:
    found = get(facts, "hugepages_total")
    return unless(
        found >= wanted.hugepages,
        f"{wanted.hugepages} hugepages must exist, got {found}. One AMI registered none; pin another.",
    )


@check(*NODE)
def obsolete_variables(facts: Facts, wanted: Wanted) -> str:
    found = sorted(set(OBSOLETE) & set(get(facts, "environment")))
    if not found:
        return ""
    return f"no obsolete EFA or NCCL variable must be set, got {found}. Remove them from the pod."


@check(*NODE)
def one_libnccl(facts: Facts, wanted: Wanted) -> str:
    copies = mapped_libraries(get(facts, "maps")).get("nccl", [])
    return unless(
        len(copies) <= 1, f"one libnccl must be mapped, got {copies}. DeepEP refuses two; remove one."
    )


@check(*NODE)
def versions(facts: Facts, wanted: Wanted) -> str:
    """Torch, NCCL, SGLang as in the image's set: the build matches what was tested together."""
    found = get(facts, "versions")
    wrong = {n: (v, found.get(n, "none")) for n, v in wanted.versions.items()
             if n != "deep_ep" and numbers(found.get(n, "")) != numbers(v)}  # fmt: skip
    if not wrong:
        return ""
    text = ", ".join(f"{name} {want} (got {got})" for name, (want, got) in wrong.items())
    return f"the image must have {text}. Rebuild it from images/, or correct images/versions.yaml."


@check("trainer")
def deep_ep(facts: Facts, wanted: Wanted) -> str:
    if wanted.dispatcher != "deepep":
        return ""
    found, want = get(facts, "deep_ep"), wanted.versions.get("deep_ep", "")
    return unless(
        "site-packages" in found["path"] and numbers(found["version"])[: len(numbers(want))] == numbers(want),
        f"deep_ep must be {want} of the image, got {found}. Remove the other package of that name.",
    )


@check(*NODE)
def two_ranks_exchange(facts: Facts, wanted: Wanted) -> str:
    found = get(facts, "two_ranks")
    return unless(
        found["sum"] == 3.0,
        f"two ranks must sum 1 and 2 to 3, got {found['sum']} ({found.get('log', '')[-300:]}).",
    )


@check(*NODE)
def shared_memory(facts: Facts, wanted: Wanted) -> str:
    found, least = get(facts, "shared_memory_gib"), wanted.shared_memory_gib or LEAST_SHARED_MEMORY
    return unless(
        found >= 0.95 * least,
        f"/dev/shm must have {least:g} GiB free, got {found:.4f}. Mount the shm volume, or remove what ended "
        "processes left in it.",
    )


@check(*NODE)
def memory_and_cores(facts: Facts, wanted: Wanted) -> str:
    found = get(facts, "machine")
    return unless(
        found["memory_gib"] >= 0.95 * wanted.memory_gib and found["cpus"] >= wanted.cpus,
        f"a pod must have {wanted.memory_gib:g} GiB, {wanted.cpus} cores, got {found}. See Flyte's limits.",
    )
