"""What the cluster's files must agree on, third part: pods, and the job of a standing trainer."""

from collections.abc import Iterator

import yaml
from cluster_checks import NAMESPACE, Files, makers, pod_of

from tasks import placement
from tasks.config import CampaignConfig
from tasks.train_config import TOPOLOGIES


def check_standing_trainers(files: Files) -> Iterator[str]:
    """What the operator, Kueue and torchrun need of the job, and how it ends."""
    for name in [n for n in files if n.startswith("standing/")]:
        config = CampaignConfig.model_validate(yaml.safe_load(files[name][0]["data"]["campaign.yaml"]))
        pool = placement.TRAINER_OF[config.train.topology]
        nodes_, ranks = TOPOLOGIES[config.train.topology]
        (job,) = [d for d in files[name] if d["kind"] == "PyTorchJob"]
        elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
        pod = worker["template"]
        (container,) = pod["spec"]["containers"]
        if container["name"] != "pytorch":
            yield f"{name}: the operator wants a container named pytorch"
        if worker["restartPolicy"] != "OnFailure":
            yield f"{name}: a container that ends must be started again"
        if "backoffLimit" in job["spec"]["runPolicy"]:
            yield f"{name}: a standing job must be restarted for ever"
        if {worker["replicas"], elastic["minReplicas"], elastic["maxReplicas"]} != {nodes_}:
            yield f"{name}: the topology has {nodes_} nodes"
        if (
            elastic["nProcPerNode"] != ranks
            or int(container["resources"]["limits"]["nvidia.com/gpu"]) != ranks
        ):
            yield f"{name}: a node has {ranks} ranks, each with a GPU"
        waits = {pair["key"]: int(pair["value"]) for pair in elastic["rdzvConf"]}
        if waits != placement.RENDEZVOUS:
            yield f"{name}: nodes that pull an image wait {placement.RENDEZVOUS} for each other, got {waits}"
        if job["metadata"]["labels"].get(placement.QUEUE_LABEL, "") != pool.queue:
            yield f"{name}: Kueue admits what carries its queue's label"
        if (pod["metadata"].get("annotations", {}) == placement.TOPOLOGY) != bool(pool.queue):
            yield f"{name}: nodes of one job should be neighbours"
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        shutdown = int(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if not config.train.grace_seconds < shutdown < pod["spec"]["terminationGracePeriodSeconds"]:
            yield f"{name}: train.grace_seconds < torchrun's patience < the pod's grace, got {shutdown}"
        if not {"startupProbe", "livenessProbe"} <= container.keys():
            yield f"{name}: has no probes"
        elif (start := container["startupProbe"])["periodSeconds"] * start["failureThreshold"] <= max(
            waits.values(), default=0
        ):
            yield f"{name}: nodes must be given the time to meet before the startup probe ends them"
        if pod["spec"]["serviceAccountName"] != pool.service_account:
            yield f"{name}: the trainer writes versions, and nobody else of the pools does"


def check_pods(files: Files) -> Iterator[str]:
    """What every pod must have, whoever makes it."""
    quota = {"cpu", "memory"}  # Flyte's quota of a namespace refuses pods that do not state theirs
    for what, document in makers(files):
        spec = pod_of(document)["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        volumes |= {c["metadata"]["name"] for c in document["spec"].get("volumeClaimTemplates", [])}
        for container in spec["containers"]:
            context = container.get("securityContext", {})
            if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {
                "drop": ["ALL"]
            }:
                yield f"{what} may gain privileges"
            for kind in ("requests", "limits") if document["metadata"]["namespace"] == NAMESPACE else ():
                if not quota <= container["resources"].get(kind, {}).keys():
                    yield f"{what} does not state its {kind}: the namespace's quota refuses it"
            for mount in container["volumeMounts"]:
                if mount["name"] not in volumes:
                    yield f"{what} mounts {mount['name']}, which is no volume"
