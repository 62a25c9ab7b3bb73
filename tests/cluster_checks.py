"""What the cluster's files must agree on, as functions from loaded files to problems in words.

Pure, so that a test can change any value of any file and see who notices.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks import placement, standing
from tasks.config import CampaignConfig, with_overrides
from tasks.planning.instances import INSTANCES, gib
from tasks.train_config import TOPOLOGIES

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "configs/cluster"
Files = dict[str, list[dict[str, Any]]]
NAMESPACE = placement.NAMESPACE
CODE = "s3://moe-rl-flyte/code/9d8ca4c.tar.gz"
STANDING = ("one_node", "qwen3_30b_a3b")
"""Campaigns whose pods beside them are checked like the files: one training node and several."""


def load() -> Files:
    """File name -> its documents; campaigns, and what stands beside two of them, with the cluster's own."""
    paths = [*CLUSTER.glob("*.yaml"), *CLUSTER.glob("*/*.yaml"), *(ROOT / "configs/campaigns").glob("*.yaml")]
    files = {
        str(path.relative_to(ROOT / "configs")): [d for d in yaml.safe_load_all(path.read_text()) if d]
        for path in sorted(paths)
    }
    return files | {f"standing/{name}": beside(name) for name in STANDING}


def beside(name: str) -> list[dict[str, Any]]:
    """What stands beside a shipped campaign with both pools standing, as its YAML says it."""
    text = (ROOT / f"configs/campaigns/{name}.yaml").read_text()
    config = with_overrides(
        CampaignConfig.model_validate(yaml.safe_load(text)), train__pool="standing", rollout__pool="standing"
    )
    return list(yaml.safe_load_all(standing.dumped(standing.manifests(config, text=text, code=CODE))))


def documents(files: Files, kind: str) -> list[dict[str, Any]]:
    return [d for documents in files.values() for d in documents if d.get("kind") == kind]


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """The pod template of whatever makes pods."""
    spec = document["spec"]
    return spec["template"] if "template" in spec else spec["pytorchReplicaSpecs"]["Worker"]["template"]


def makers(files: Files) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that makes pods on a pool: its name and itself."""
    for kind in ("Deployment", "StatefulSet", "PyTorchJob"):
        for document in documents(files, kind):
            yield f"{kind} {document['metadata']['name']}", document


def named(files: Files, kind: str, name: str) -> dict[str, Any]:
    return next(d for d in documents(files, kind) if d["metadata"]["name"] == name)


def campaigns(files: Files) -> dict[str, CampaignConfig]:
    """Those that run on the cluster."""
    found = {n: CampaignConfig.model_validate(d[0]) for n, d in files.items() if n.startswith("campaigns/")}
    return {name: config for name, config in found.items() if config.checkpoint.store.startswith("s3://")}


class Nodes:
    """One group of equal nodes, whoever makes it."""

    def __init__(
        self, *, name: str, labels: dict, taints: list, types: list, zones: list, maker: str
    ) -> None:
        self.name, self.labels, self.types, self.zones, self.maker = name, labels, types, zones, maker
        self.taints = {(t["key"], t.get("value", "")) for t in taints}
        self.pool = labels.get(placement.POOL_LABEL, "")


def nodes(files: Files) -> list[Nodes]:
    found = []
    for group in files["cluster/eksctl.yaml"][0]["managedNodeGroups"]:
        found.append(
            Nodes(
                name=group["name"], labels=group.get("labels", {}), taints=group.get("taints", []),
                types=[group["instanceType"]], zones=group.get("availabilityZones", []), maker="eksctl",
            )
        )  # fmt: skip
    for pool in documents(files, "NodePool"):
        spec = pool["spec"]["template"]["spec"]
        wanted = {r["key"]: r["values"] for r in spec["requirements"]}
        found.append(
            Nodes(
                name=pool["metadata"]["name"], labels=pool["spec"]["template"]["metadata"]["labels"],
                taints=spec.get("taints", []), types=wanted.get("node.kubernetes.io/instance-type", []),
                zones=wanted.get("topology.kubernetes.io/zone", []), maker="karpenter",
            )
        )  # fmt: skip
    return found


def workloads(files: Files) -> Iterator[tuple[str, dict[str, Any], set]]:
    """Name, pod spec and tolerations of everything that runs on a pool: manifests and Flyte's tasks."""
    for name, document in makers(files):
        spec = pod_of(document)["spec"]
        yield name, spec, _tolerated(spec.get("tolerations", []))
    flyte = files["cluster/flyte.yaml"][0]["configmap"]["k8s"]["plugins"]["k8s"]
    for pool in placement.POOLS:
        template = pool.pod_template().pod_spec
        spec = {
            "nodeSelector": template.node_selector,
            "serviceAccountName": template.service_account_name,
            "terminationGracePeriodSeconds": template.termination_grace_period_seconds,
        }
        tolerated = {(t.key, t.value) for t in template.tolerations}
        yield f"task on demand of {pool.name}", spec, tolerated
        if pool.is_spot:
            spot = tolerated | _tolerated(flyte.get("interruptible-tolerations", []))
            yield f"task of {pool.name}", spec, spot


def _tolerated(tolerations: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(t["key"], t.get("value", "*")) for t in tolerations}


def _covers(tolerated: set, taint: tuple[str, str]) -> bool:
    return taint in tolerated or (taint[0], "*") in tolerated


def check_selectors_and_taints(files: Files) -> Iterator[str]:
    known, groups = {n.pool for n in nodes(files)}, nodes(files)
    taints = {taint for group in groups for taint in group.taints}
    for name, spec, tolerated in workloads(files):
        pool = spec.get("nodeSelector", {}).get(placement.POOL_LABEL)
        if pool not in known:
            yield f"{name} selects the pool {pool}, which no node has; pools are {sorted(known)}"
            continue
        for key, value in tolerated:
            if not any(key == k and value in ("*", v) for k, v in taints):
                yield f"{name} tolerates {key}={value}, which no pool has"
        open_to_it = [g for g in groups if g.pool == pool and all(_covers(tolerated, t) for t in g.taints)]
        if name.startswith("Deployment") and len(open_to_it) < len([g for g in groups if g.pool == pool]):
            yield f"{name} does not tolerate {pool} in all its node groups"
        if not open_to_it:
            yield f"{name} tolerates no whole set of taints of the pool {pool}"
    for group in groups:
        if group.pool != "system" and (placement.POOL_LABEL, group.pool) not in group.taints:
            yield f"{group.name} has the label of {group.pool} without its taint: others land there"


def check_one_zone(files: Files) -> Iterator[str]:
    zones = {group.name: tuple(group.zones) for group in nodes(files)}
    if len(set(zones.values())) != 1 or any(len(zone) != 1 for zone in zones.values()):
        yield f"all nodes must stand in one zone, got {zones}"


def check_nodes_hold_their_pods(files: Files) -> Iterator[str]:
    for pool in placement.POOLS:
        for group in nodes(files):
            for name in group.types if group.pool == pool.name else []:
                node = INSTANCES.get(name)
                if node is None:
                    yield f"{group.name} starts {name}, which tasks/planning/instances.py does not know"
                    continue
                fits = (
                    int(pool.cpu) * 1000 <= node.allocatable_cpu
                    and gib(pool.memory) <= node.allocatable_mib / 1024
                    and pool.gpus <= node.gpus
                    and pool.efa <= node.efa
                    and (not pool.gpus or node.gpu_name == pool.instance.gpu_name)
                )
                if not fits:
                    yield f"a pod of {pool.name} does not fit {name} of {group.name}"
    for what, document in makers(files):
        spec = pod_of(document)["spec"]
        need = spec["containers"][0]["resources"]["requests"]
        for group in (g for g in nodes(files) if g.pool == spec["nodeSelector"][placement.POOL_LABEL]):
            for node in (INSTANCES[name] for name in group.types if name in INSTANCES):
                if gib(need["memory"]) > node.allocatable_mib / 1024:
                    yield f"{what} does not fit {node.name}"
    for pool in placement.POOLS:
        if pool.hugepages and any(g.maker == "karpenter" for g in nodes(files) if g.pool == pool.name):
            yield f"{pool.name} asks for hugepages, which Karpenter does not know: its pods would wait"


def check_quotas(files: Files) -> Iterator[str]:
    runs = campaigns(files).values()
    most = max(TOPOLOGIES[config.train.topology][0] for config in runs)
    for config in runs:
        if config.train.backend == "nccl" and not placement.TRAINER_OF[config.train.topology].gpus:
            yield f"{config.name}: {config.train.topology} has no GPUs on a cluster"
    workers = max(config.rollout.workers for config in runs)
    queue = documents(files, "ClusterQueue")[0]["spec"]["resourceGroups"][0]
    quota = {r["name"]: r["nominalQuota"] for f in queue["flavors"] for r in f["resources"]}
    if set(queue["coveredResources"]) != set(quota):
        yield f"the queue covers {queue['coveredResources']} and has quotas for {sorted(quota)}"
    for name, value in placement.TRAINER.resources.items():
        if name not in quota:
            yield f"the queue does not cover {name}: the job would never be admitted"
        elif _number(quota[name]) < most * _number(value):
            yield f"the quota of {name} is {quota[name]}, the largest campaign needs {most} x {value}"
    groups = {g["name"]: g for g in files["cluster/eksctl.yaml"][0]["managedNodeGroups"]}
    if groups["trainer"]["desiredCapacity"] < most:
        yield f"the trainer's group has {groups['trainer']['desiredCapacity']} nodes, a campaign needs {most}"
    gpus = _number(str(named(files, "NodePool", "rollout-spot")["spec"]["limits"]["nvidia.com/gpu"]))
    if gpus < 8 * workers:
        yield f"rollout-spot is limited to {gpus:.0f} GPUs, a campaign needs {8 * workers}"
    for what, document in makers(files):
        replicas = document["spec"].get("replicas", 1)
        if what.endswith("-rollout") and gpus < 8 * replicas:
            yield f"rollout-spot is limited to {gpus:.0f} GPUs, the standing workers need {8 * replicas}"
    yield from _flyte_limits(files, most=most, workers=workers)


def _flyte_limits(files: Files, *, most: int, workers: int) -> Iterator[str]:
    values = files["cluster/flyte.yaml"][0]
    limits = values["configmap"]["task_resource_defaults"]["task_resources"]["limits"]
    for pool in placement.POOLS:
        if int(pool.cpu) > _number(limits["cpu"]) or gib(pool.memory) > _number(limits["memory"]):
            yield f"Flyte would shrink a pod of {pool.name}: its limits are {limits}"
        if pool.gpus > int(limits["gpu"]) or gib(pool.scratch) > _number(limits["ephemeralStorage"]):
            yield f"Flyte would shrink a pod of {pool.name}: its limits are {limits}"
    data = values["cluster_resource_manager"]["config"]["cluster_resources"]["customData"]
    production = {k: v["value"] for d in data for item in d.get("production", []) for k, v in item.items()}
    for key, one in (("projectQuotaCpu", "cpu"), ("projectQuotaMemory", "memory")):
        need = most * _number(placement.TRAINER.resources[one])
        need += workers * _number(placement.ROLLOUT.resources[one])
        if _number(production[key]) < need:
            yield f"{key} is {production[key]}, the largest campaign needs {need:.0f}"


def _number(quantity: str) -> float:
    text = str(quantity)
    return gib(text) if text.endswith("i") else float(text)


def check_spot(files: Files) -> Iterator[str]:
    for pool in documents(files, "NodePool"):
        spec = pool["spec"]["template"]["spec"]
        kinds = {r["key"]: r["values"] for r in spec["requirements"]}["karpenter.sh/capacity-type"]
        if "spot" not in kinds:
            continue
        if spec.get("terminationGracePeriod") != f"{placement.SPOT_DRAIN_SECONDS // 60}m":
            yield f"{pool['metadata']['name']} must drain within the two minutes that EC2 gives"
        if (placement.SPOT_TAINT, "true") not in {(t["key"], t.get("value")) for t in spec.get("taints", [])}:
            yield f"{pool['metadata']['name']} has no {placement.SPOT_TAINT}: last attempts land on Spot"
    for name, spec, _ in workloads(files):
        if spec["nodeSelector"].get(placement.POOL_LABEL) == placement.ROLLOUT.name:
            grace = spec.get("terminationGracePeriodSeconds", 30)
            if not grace < placement.SPOT_DRAIN_SECONDS or grace != placement.SPOT_GRACE_SECONDS:
                yield f"{name} has {grace} s of grace, the drain gives {placement.SPOT_GRACE_SECONDS}"
    for document in documents(files, "Deployment"):
        if "do-not-disrupt" in str(document["spec"]["template"].get("metadata", {})):
            yield f"{document['metadata']['name']} holds a drain up and would get no SIGTERM"
    if not files["cluster/eksctl.yaml"][0]["karpenter"].get("withSpotInterruptionQueue"):
        yield "Karpenter hears of no interruption: withSpotInterruptionQueue is off"
    asks = [name for name, config in campaigns(files).items() if config.rollout.metadata_url]
    hops = named(files, "EC2NodeClass", "gpu")["spec"].get("metadataOptions", {})
    if asks and hops.get("httpPutResponseHopLimit", 1) < 2:
        yield f"{asks} ask the metadata service, whose hop limit of 1 stops at the node"
    for config in campaigns(files).values():
        if config.rollout.grace_seconds >= placement.SPOT_GRACE_SECONDS:
            yield f"{config.name}: grace_seconds must be below the pod's {placement.SPOT_GRACE_SECONDS}"
    budgets = [d["spec"]["selector"]["matchLabels"] for d in documents(files, "PodDisruptionBudget")]
    for what, document in makers(files):
        labels = pod_of(document)["metadata"]["labels"]
        if "StatefulSet" not in what and any(b.items() <= labels.items() for b in budgets):
            yield f"{what} has a disruption budget, which holds a drain up until nobody is told"


def check_names(files: Files) -> Iterator[str]:
    """What one file names and another must have."""
    accounts = {
        (d["metadata"]["namespace"], d["metadata"]["name"]) for d in documents(files, "ServiceAccount")
    }
    identities = {
        (a["namespace"], a["serviceAccountName"])
        for a in files["cluster/eksctl.yaml"][0]["iam"]["podIdentityAssociations"]
    }
    wanted = {(NAMESPACE, pool.service_account) for pool in placement.POOLS}
    for _, d in makers(files):
        if account := pod_of(d)["spec"].get("serviceAccountName"):
            wanted.add((d["metadata"]["namespace"], account))
    yield from (f"service account {a} is used and does not exist" for a in sorted(wanted - accounts))
    yield from (f"service account {a} has no permissions" for a in sorted(wanted - identities))
    (queue,) = documents(files, "LocalQueue")
    if (queue["metadata"]["namespace"], queue["metadata"]["name"]) != (NAMESPACE, placement.TRAINER.queue):
        yield f"trainers queue at {NAMESPACE}/{placement.TRAINER.queue}, the queue is {queue['metadata']}"
    if queue["spec"]["clusterQueue"] != documents(files, "ClusterQueue")[0]["metadata"]["name"]:
        yield "the LocalQueue names no ClusterQueue"
    claims = {
        (d["metadata"]["namespace"], d["metadata"]["name"]) for d in documents(files, "PersistentVolumeClaim")
    }
    if (NAMESPACE, "models") not in claims:
        yield "pods mount the claim `models`, which does not exist"
    levels = [level["nodeLabel"] for d in documents(files, "Topology") for level in d["spec"]["levels"]]
    yield from (f"{v} is no level of the topology" for v in placement.TOPOLOGY.values() if v not in levels)
    flavors = {d["metadata"]["name"]: d["spec"] for d in documents(files, "ResourceFlavor")}
    for flavor in documents(files, "ClusterQueue")[0]["spec"]["resourceGroups"][0]["flavors"]:
        if flavor["name"] not in flavors:
            yield f"the queue's flavor {flavor['name']} does not exist"
    for spec in flavors.values():
        if spec["topologyName"] not in {d["metadata"]["name"] for d in documents(files, "Topology")}:
            yield f"the flavor's topology {spec['topologyName']} does not exist"
        if spec["nodeLabels"].get(placement.POOL_LABEL) != placement.TRAINER.name:
            yield "the flavor selects other nodes than the trainer's"
    images = {f"{placement.REGISTRY}/{pool.image}" for pool in placement.POOLS}
    for image in re.findall(rf"{placement.REGISTRY}/[^\s'\"]+", str(list(files.values()))):
        if image.rstrip("]},") not in images:
            yield f"{image} is no image of tasks/placement.py"
    classes = {d["metadata"]["name"] for d in documents(files, "EC2NodeClass")}
    for pool in documents(files, "NodePool"):
        if pool["spec"]["template"]["spec"]["nodeClassRef"]["name"] not in classes:
            yield f"{pool['metadata']['name']} names no EC2NodeClass"


def check_buffer(files: Files) -> Iterator[str]:
    shards = named(files, "StatefulSet", "valkey")["spec"]["replicas"]
    hosts = {f"valkey-{number}.valkey.moe-rl.svc" for number in range(shards)}
    names = set(documents(files, "Certificate")[0]["spec"]["dnsNames"])
    if not hosts <= names:
        yield f"the certificate does not name {sorted(hosts - names)}"
    for name, config in campaigns(files).items():
        urls = [config.buffer.url] if isinstance(config.buffer.url, str) else config.buffer.url
        found = [m[1] for url in urls if (m := re.match(r"valkeys://[^@]+@([^:/]+):6379/", url))]
        if set(found) != hosts or len(urls) != len(found):
            yield f"{name} must name every shard once, over TLS, got {urls}"
        if any(f"ssl_ca_certs={placement.VALKEY}/ca.crt" not in url for url in urls):
            yield f"{name} does not check the shards' certificate"
        if config.buffer.password_file != f"{placement.VALKEY}/password":
            yield f"{name} must read the password from the mounted secret"
    policy = named(files, "ConfigMap", "valkey")["data"]["valkey.conf"]
    if not re.search(r"^tls-auto-reload-interval [1-9]", policy, re.M):
        yield "Valkey must read renewed certificates"
    if "maxmemory-policy noeviction" not in policy:
        yield "Valkey would evict samples"
    valkey = named(files, "StatefulSet", "valkey")["spec"]["template"]["spec"]["containers"][0]
    limit, most = gib(valkey["resources"]["limits"]["memory"]), re.search(r"^maxmemory (\d+)gb", policy, re.M)
    if not most or int(most[1]) > 0.85 * limit:
        yield f"maxmemory must leave 15 % of the pod's {limit:.0f} GiB to clients and the log's rewrite"


def check_flyte(files: Files) -> Iterator[str]:
    values = files["cluster/flyte.yaml"][0]["configmap"]
    node, kubernetes = values["core"]["propeller"]["node-config"], values["k8s"]["plugins"]["k8s"]
    if node.get("ignore-retry-cause") is not True:
        yield "a lost PyTorchJob would never leave Spot: ignore-retry-cause must be true"
    if node.get("interruptible-failure-threshold", -1) != -1:
        yield "the last attempt must be the one on demand: interruptible-failure-threshold must be -1"
    plugins = values["enabled_plugins"]["tasks"]["task-plugins"]
    kinds = plugins["default-for-task-types"]
    if kinds.get("pytorch") != "pytorch" or not set(kinds.values()) <= set(plugins["enabled-plugins"]):
        yield "trainings need the pytorch plugin, enabled and chosen"
    if kubernetes.get("inject-finalizer") is not True:
        yield "without inject-finalizer a deleted pod looks like one that never was"
    if not values["core"]["propeller"]["literal-offloading-config"]["enabled"]:
        yield "literals above 10 MB must be offloaded"
    template = kubernetes.get("default-pod-template-name")
    found = [d for d in documents(files, "PodTemplate") if d["metadata"]["name"] == template]
    if not found or found[0]["template"]["spec"]["containers"][0]["name"] not in ("default", "primary"):
        yield f"the default pod template {template} must exist with a container that Flyte merges"
    spot = kubernetes.get("interruptible-node-selector-requirement", {})
    other = kubernetes.get("non-interruptible-node-selector-requirement", {})
    if (spot.get("operator"), spot.get("values")) != ("In", ["spot"]) or other.get("operator") != "NotIn":
        yield "interruptible attempts go to Spot and others, with NotIn, to everything else"
    mapping = values["namespace_config"]["namespace_mapping"]["template"]
    if mapping.replace("{{ project }}", "moe").replace("{{ domain }}", "production") != NAMESPACE:
        yield f"Flyte's namespaces {mapping} are not {NAMESPACE}"
