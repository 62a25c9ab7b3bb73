"""Checks of what a node reaches: disk, store, buffer, metadata service, Kueue, Flyte, registry."""

import re

from tasks.planning.check import GPU, NODE, SHARED, Facts, Wanted, check, get, numbers, unless
from tasks.planning.instances import INSTANCES

MIN_FLYTE = (1, 16, 4)
"""Before it, retries of mapped tasks were not counted."""


@check(*NODE)
def scratch_space(facts: Facts, wanted: Wanted) -> str:
    free = get(facts, "scratch")["free_gib"]
    if free >= wanted.scratch_gib:
        return ""
    return f"the cache must have {wanted.scratch_gib:g} GiB free, got {free:.1f}. Empty it or add a disk."


@check(*GPU)
def nvme_mounted(facts: Facts, wanted: Wanted) -> str:
    device = get(facts, "scratch")["device"]
    return unless(
        not wanted.needs_nvme or re.match(r"/dev/(md|nvme)", device),
        f"the cache must lie on NVMe, got {device}. Set instanceStorePolicy or localStorage to RAID0.",
    )


@check(*SHARED, "rollout", "trainer")
def bucket_versioned(facts: Facts, wanted: Wanted) -> str:
    found = get(facts, "store")["versioning"]
    return unless(found == "Enabled", f"the bucket must be versioned, got {found or 'off'}. Turn it on.")


@check(*SHARED)
def bucket_takes_conditional_writes(facts: Facts, wanted: Wanted) -> str:
    first, second = get(facts, "store")["conditional"]
    if (first, second) == (200, 412):
        return ""
    return (
        f"a PUT If-None-Match must answer 200 and then 412, got {first} and {second}. Without it two "
        "trainers can publish one version; use a store that has it and a role that may write."
    )


@check(*NODE)
def clock(facts: Facts, wanted: Wanted) -> str:
    skew = get(facts, "store")["skew_seconds"]
    return unless(
        abs(skew) <= wanted.max_time_skew_seconds,
        f"the clock must be {wanted.max_time_skew_seconds:g} s or less off the store's, got {skew:+.1f}.",
    )


@check(*NODE)
def valkey_reachable(facts: Facts, wanted: Wanted) -> str:
    bad = [shard["where"] for shard in get(facts, "buffer") if shard.get("error") or not shard["version"]]
    if not bad:
        return ""
    return f"every shard must answer, got none from {bad}. Check the secret valkey-client and DNS."


@check(*NODE)
def valkey_never_evicts(facts: Facts, wanted: Wanted) -> str:
    found = {s["where"]: s.get("policy") for s in get(facts, "buffer") if s.get("policy") != "noeviction"}
    return unless(
        not found, f"maxmemory-policy must be noeviction, got {found}. An evicted sample is a lost one."
    )


@check(*NODE)
def valkey_tls(facts: Facts, wanted: Wanted) -> str:
    plain = [shard["where"] for shard in get(facts, "buffer") if not shard["tls"]]
    return unless(
        not wanted.needs_tls or not plain,
        f"the buffer must be reached over TLS, got {plain} without. Write valkeys:// in buffer.url.",
    )


@check(*NODE)
def model_folder(facts: Facts, wanted: Wanted) -> str:
    return unless(
        not wanted.model_folder or get(facts, "model_folder"),
        f"{wanted.model_folder} must hold a config.json, got none. Check the claim `models`.",
    )


@check("rollout")
def metadata_service(facts: Facts, wanted: Wanted) -> str:
    return unless(
        not wanted.asks_metadata or get(facts, "metadata")["zone"],
        "the metadata service must answer: rollout.metadata_url is set. Give the node a hop limit of 2.",
    )


@check("cluster")
def one_zone(facts: Facts, wanted: Wanted) -> str:
    zones = {node["zone"] for node in get(facts, "nodes")}
    return unless(
        len(zones) == 1, f"all nodes must stand in one zone, got {sorted(zones)}. EFA does not cross zones."
    )


@check("cluster")
def efa_allocatable(facts: Facts, wanted: Wanted) -> str:
    known = [n for n in get(facts, "nodes") if n["gpus"] == 8 and n["type"] in INSTANCES]
    wrong = {n["name"]: n["efa"] for n in known if n["efa"] != INSTANCES[n["type"]].efa}
    return unless(
        not wrong,
        f"allocatable EFA devices must equal the type's, got {wrong}. Restart the EFA plugin there.",
    )


@check("cluster")
def kueue_queue(facts: Facts, wanted: Wanted) -> str:
    if any(name.endswith(f"/{wanted.queue}") for name in get(facts, "queues")):
        return ""
    return f"Kueue must have the queue {wanted.queue}, got {facts['queues']}. Apply kueue.yaml."


@check("cluster")
def flyte_version(facts: Facts, wanted: Wanted) -> str:
    found = get(facts, "flyte_version")
    return unless(
        numbers(found) >= MIN_FLYTE,
        f"Flyte must be {'.'.join(map(str, MIN_FLYTE))} or newer, got {found}. Upgrade it.",
    )


@check("cluster")
def images_resolve(facts: Facts, wanted: Wanted) -> str:
    missing = {i: get(facts, "images").get(i, "not asked") for i in wanted.images}
    missing = {image: answer for image, answer in missing.items() if answer != 200}
    return unless(
        not missing, f"every image must be in its registry, got {missing}. Push it, or correct REGISTRY."
    )
