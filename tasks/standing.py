"""What stands beside a campaign on the cluster, as manifests made of its configuration and of placement.

    python -m tasks.standing --config configs/campaigns/one_node.yaml \\
        --code s3://moe-rl-flyte/code/9d8ca4c.tar.gz | kubectl apply -f -

Always the exporter of its metrics. With ``train: {pool: standing}`` a PyTorchJob of the topology's nodes and
ranks, which Kueue admits whole; with ``rollout: {pool: standing}`` a Deployment of ``rollout.workers`` Spot
pods. The pods are those of the campaign's tasks (``tasks/placement.py``) with another command. ``--code`` is
an archive of the project, as ``configs/cluster/README.md`` makes it; other code than the campaign's is
refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient

from tasks import placement
from tasks.config import CampaignConfig
from tasks.elastic import SHUTDOWN_SECONDS
from tasks.session import read_config
from tasks.train_config import TOPOLOGIES

METRICS_PORT = 9100
CONFIG = "/campaign/campaign.yaml"
PULSE = "/tmp/pulse"
WAIT_SECONDS = placement.RENDEZVOUS["join_timeout"]
"""For the other nodes: until then no rank runs, at the start and after a loss."""
START_SECONDS = WAIT_SECONDS + 600
"""From a container's start until its ranks have met and imported the trainer."""
MAX_RESTARTS = 3
"""Of the ranks by torchrun; then the container ends, and the kubelet starts it again."""
Manifest = dict[str, Any]


class _Plain(yaml.SafeDumper):
    """No anchors, and files as they are written."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Plain.add_representer(str, _Plain.represent_str)


def manifests(config: CampaignConfig, *, text: str, code: str) -> list[Manifest]:
    """Everything that stands beside the campaign; ``text`` is its YAML."""
    found = [_campaign(config, text), _exporter(config, code)]
    if config.train.pool == "standing":
        found.append(_trainer(config, code))
    if config.rollout.pool == "standing":
        found.append(_workers(config, code))
    return found


def _campaign(config: CampaignConfig, text: str) -> Manifest:
    data = {Path(CONFIG).name: text}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(config, "campaign"), "data": data}


def _metadata(config: CampaignConfig, what: str, **labels: str) -> Manifest:
    labels = {"moe-rl/campaign": config.name, **labels}
    return {"name": f"{config.name}-{what}", "namespace": placement.NAMESPACE, "labels": labels}


def _pod(config: CampaignConfig, pool: placement.Pool, what: str, code: str, *program: str) -> Manifest:
    """A pod template of the pool that unpacks ``code`` where Flyte does and runs ``program`` of it."""
    template = pool.pod_template()
    spec: Any = ApiClient().sanitize_for_serialization(template.pod_spec)
    (container,) = spec["containers"]
    unpack = ["pyflyte-fast-execute", "--additional-distribution", code, "--dest-dir", "/root", "--"]
    container |= {"name": what, "command": [*unpack, *program], "workingDir": "/root"}
    mount = {"name": "campaign", "mountPath": str(Path(CONFIG).parent), "readOnly": True}
    container["volumeMounts"].append(mount)
    spec["volumes"].append({"name": "campaign", "configMap": {"name": f"{config.name}-campaign"}})
    labels = {**(template.labels or {}), "app": what, "moe-rl/campaign": config.name}
    metadata = {"labels": labels, **({"annotations": template.annotations} if template.annotations else {})}
    return {"metadata": metadata, "spec": {**spec, "enableServiceLinks": False}}


def _deployment(config: CampaignConfig, what: str, pod: Manifest, *, replicas: int) -> Manifest:
    """A node's pods leave before new ones come: there is no room for both."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(config, what),
        "spec": {
            "replicas": replicas,
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
            "selector": {"matchLabels": {"app": what, "moe-rl/campaign": config.name}},
            "template": pod,
        },
    }


def _exporter(config: CampaignConfig, code: str) -> Manifest:
    store, name = config.checkpoint.store, config.name
    watch = ["python", "-m", "tasks.experience.watch", "--store", store, "--campaign", name]
    pod = _pod(config, placement.MEMORY, "watch", code, *watch, "--metrics-port", str(METRICS_PORT),
               "--seconds", "60")  # fmt: skip
    (container,) = pod["spec"]["containers"]
    size = {"cpu": "500m", "memory": "2Gi", "ephemeral-storage": placement.MEMORY.scratch}
    container["resources"] = {"requests": size, "limits": size}
    container["ports"] = [{"name": "metrics", "containerPort": METRICS_PORT}]
    pod["spec"]["serviceAccountName"] = placement.ROLLOUT.service_account  # it only reads
    return _deployment(config, "watch", pod, replicas=1)


def _workers(config: CampaignConfig, code: str) -> Manifest:
    """No do-not-disrupt and no disruption budget: either would take away the SIGTERM of a Spot notice."""
    run = ["python", "-m", "tasks.engine.standing", "--config", CONFIG]
    pod = _pod(config, placement.ROLLOUT, "rollout", code, *run)
    pod["spec"]["tolerations"].append(
        {"key": placement.SPOT_TAINT, "operator": "Exists", "effect": "NoSchedule"}
    )
    return _deployment(config, "rollout", pod, replicas=config.rollout.workers)


def _trainer(config: CampaignConfig, code: str) -> Manifest:
    """One pod a node. The operator tells torchrun who the others are (``PET_*``); a pod that is lost is made
    again, its ranks meet the others', and the update goes on where it was stored."""
    pool = placement.TRAINER_OF[config.train.topology]
    if not pool.gpus:
        raise ValueError(
            f"train.topology must have GPUs to stand on the cluster, got {config.train.topology}. Set it to "
            f"one of {[name for name, where in placement.TRAINER_OF.items() if where.gpus]}."
        )
    nodes, ranks = TOPOLOGIES[config.train.topology]
    run = ["torchrun", "-m", "tasks.policy.standing", "--config", CONFIG, "--pulse", PULSE]
    pod = _pod(config, pool, "pytorch", code, *run)  # the operator knows the container by this name
    (container,) = pod["spec"]["containers"]
    container["env"].append({"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(SHUTDOWN_SECONDS)})
    container |= _probes(config)
    queue = {placement.QUEUE_LABEL: pool.queue} if pool.queue else {}
    rendezvous = [{"key": key, "value": str(value)} for key, value in placement.RENDEZVOUS.items()]
    elastic = {"rdzvBackend": "c10d", "rdzvConf": rendezvous, "minReplicas": nodes, "maxReplicas": nodes,
               "nProcPerNode": ranks, "maxRestarts": MAX_RESTARTS}  # fmt: skip
    worker = {"replicas": nodes, "restartPolicy": "OnFailure", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(config, "trainer", **queue),
        "spec": {
            "elasticPolicy": elastic,
            "runPolicy": {"cleanPodPolicy": "All"},
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def _probes(config: CampaignConfig) -> Manifest:
    """Started once its ranks run; dead when none of them moved for longer than a collective or a meeting may
    last, which would have ended them."""
    seconds = max(config.train.collective_timeout_seconds, WAIT_SECONDS) + 300
    age = f"$(( $(date +%s) - $(stat -c %Y {PULSE}) ))"
    return {
        "startupProbe": {
            "exec": {"command": ["test", "-e", PULSE]},
            "periodSeconds": 10,
            "failureThreshold": START_SECONDS // 10,
        },
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f"test {age} -lt {seconds}"]},
            "periodSeconds": 60,
            "timeoutSeconds": 10,
            "failureThreshold": 2,
        },
    }


def dumped(found: Sequence[Manifest]) -> str:
    """As YAML."""
    return yaml.dump_all(found, Dumper=_Plain, sort_keys=False, width=110)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="the campaign's YAML")
    parser.add_argument("--code", required=True, help="s3:// address of the archive of the project")
    options = parser.parse_args(arguments)
    config, text = read_config(options.config), options.config.read_text(encoding="utf-8")
    print(dumped(manifests(config, text=text, code=options.code)))


if __name__ == "__main__":
    main(sys.argv[1:])
