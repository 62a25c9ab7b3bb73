"""``configs/cluster``: valid against public schemas, and in agreement with campaigns and placement.

What these tests cannot see: a cluster. Rules in CEL, cert-manager's and Prometheus' schemas, whether an alert
fires, and whether a reservation exists are not checked. Every file is changed in many places to show that the
checks see it.
"""

import copy
import os
from pathlib import Path
from typing import Any

import cluster_access as access
import cluster_checks as checks
import cluster_pods as pods
import pytest
import yaml
from cluster_schemas import KUBERNETES, schema_problems
from test_graph import serialized_tasks

from tasks import placement
from tasks.train_config import TOPOLOGIES

FILES = checks.load()
DOCUMENTS = [(name, d) for name, documents in FILES.items() for d in documents if "apiVersion" in d]
CHECKS = [
    check
    for module in (checks, access, pods)
    for name, check in vars(module).items()
    if name.startswith("check_") and getattr(check, "__module__", "") == module.__name__
]


def problems(files: checks.Files) -> list[str]:
    return [problem for check in CHECKS for problem in check(files)]


@pytest.mark.parametrize(
    ("name", "document"), DOCUMENTS, ids=lambda v: v["kind"] if isinstance(v, dict) else Path(v).stem
)
def test_a_document_obeys_its_schema(name: str, document: dict[str, Any]) -> None:
    if document["kind"] == "Kustomization":
        assert set(document) == {"apiVersion", "kind", "resources"}
    else:
        assert schema_problems(document) == []


def test_all_supported_kubernetes_versions_are_tried() -> None:
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}, "spce": {}}
    assert len(schema_problems(document)) == len(KUBERNETES) == 6


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_files_agree(check: Any) -> None:
    assert list(check(FILES)) == []


def test_the_index_names_the_file_of_every_component() -> None:
    readme = (checks.CLUSTER / "README.md").read_text()
    assert list(access.index_problems(readme)) == []
    assert "DeepEP has no row" in list(access.index_problems(readme.replace("DeepEP", "")))
    assert "karpeter.yaml does not exist" in list(access.index_problems(readme.replace("karpen", "karpe")))


def changed(file: str, path: str, value: Any) -> checks.Files:
    """The files with one value changed; ``path`` is dotted, numbers are indices, ``-`` deletes."""
    files = copy.deepcopy(FILES)
    target: Any = files[file]
    *parents, last = [int(p) if p.lstrip("-").isdigit() else p.replace("~", ".") for p in path.split(".")]
    for key in parents:
        target = target[key]
    if value == "-":
        del target[last]
    else:
        target[last] = value
    return files


E, K, Q, F = "cluster/eksctl.yaml", "cluster/karpenter.yaml", "cluster/kueue.yaml", "cluster/flyte.yaml"
V, W, D, M = (
    "cluster/valkey.yaml",
    "cluster/workloads.yaml",
    "cluster/device-plugins.yaml",
    "cluster/monitoring.yaml",
)
B, WATCH, TRAINER, ROLLOUT = "standing/qwen3_30b_a3b", 1, 2, 3  # the campaign itself is 0
JOB = f"{TRAINER}.spec.pytorchReplicaSpecs.Worker"
SPOT, FALLBACK = "2.spec.template.spec", "3.spec.template.spec"
QUOTAS = "2.spec.resourceGroups.0.flavors.0.resources"
TASKS = "0.configmap.task_resource_defaults.task_resources.limits"
IDENTITY, K8S = "0.iam.podIdentityAssociations", "0.configmap.k8s.plugins.k8s"
PLUGINS = "0.configmap.enabled_plugins.tasks.task-plugins"
SCHEMA_MUTATIONS = [
    (E, "0.managedNodeGroups.1.efaEnable", True),
    (E, "0.managedNodeGroups.1.desiredCapacity", "sixteen"),
    (E, "0.karpenter.interruptionQueue", "x"),
    (E, "0.addons.0.nmae", "x"),
    (K, "0.spec.instanceStorePolicy", "RAID5"),
    (K, "0.spec.metadataOptions.httpPutResponseHopLimi", 2),
    (K, f"{SPOT}.terminationGracePeriods", "2m"),
    (K, f"{SPOT}.taints.0.effect", "NoScheduling"),
    (K, "2.spec.disruption.consolidationPolicy", "Never"),
    (K, f"{SPOT}.requirements.0.operator", "in"),
    (Q, "1.spec.topology", "network"),
    (Q, "2.spec.queueingStrategy", "Fair"),
    (Q, "3.spec.clusterQueues", ["trainer"]),
    (Q, "0.spec.levels.0.label", "x"),
    (D, "0.spec.template.spec.containers.0.imagePullPolice", "Always"),
    (V, "4.spec.template.spec.terminationGracePeriodSecond", 5),
    (B, f"{ROLLOUT}.spec.replicas", "many"),
    (B, f"{JOB}.template.spec.containers.0.livenessProbe.periodSecond", 5),
    (B, f"{TRAINER}.spec.elasticPolicy.maxRestart", 3),
    (W, "5.template.spec.restartPolicys", "Never"),
    (W, "7.spec.accessModes", "ReadOnlyMany"),
    (B, f"{WATCH}.spec.template.spec.containers.0.ports.0.containerPorts", 1),
]
MUTATIONS = [
    (E, "0.metadata.version", "1.30", "must be 1.31"),
    (E, "0.managedNodeGroups.1.availabilityZones", ["us-east-2b"], "one zone"),
    (E, "0.managedNodeGroups.1.availabilityZones", ["us-east-2a", "us-east-2b"], "one zone"),
    (E, "0.managedNodeGroups.1.desiredCapacity", 15, "a campaign needs 16"),
    (E, "0.managedNodeGroups.1.instanceType", "p5.48xlarge", "does not fit"),
    (E, "0.managedNodeGroups.1.instanceType", "p5x.48xlarge", "does not know"),
    (E, "0.managedNodeGroups.1.efaEnabled", False, "no EFA devices"),
    (E, "0.managedNodeGroups.1.labels", {"moe-rl/pool": "train"}, "which no node has"),
    (E, "0.managedNodeGroups.1.taints", [], "without its taint"),
    (E, "0.managedNodeGroups.1.overrideBootstrapCommand", "", "NVMe is not mounted"),
    (E, "0.managedNodeGroups.1.placement", "-", "placement group"),
    (E, "0.managedNodeGroups.1.capacityReservation", "-", "reservation"),
    (E, "0.metadata.tags", "-", "finds no subnet"),
    (E, "0.karpenter.withSpotInterruptionQueue", False, "hears of no interruption"),
    (E, f"{IDENTITY}.4.serviceAccountName", "moe-rl-cp", "has no permissions"),
    (E, f"{IDENTITY}.3.permissionPolicy.Statement.3.Action", ["s3:*"], "may s3:*"),
    (E, f"{IDENTITY}.3.permissionPolicy.Statement.3.Resource", ["*"], "every bucket"),
    (E, f"{IDENTITY}.3.permissionPolicy.Statement.3.Action.1", "s3:GetObjectAcl", "read the"),
    (E, f"{IDENTITY}.5.permissionPolicy.Statement.4.Resource",
     ["arn:aws:s3:::moe-rl-checkpoints/campaigns/*"], "latest.json'] alone"),
    (E, f"{IDENTITY}.5.permissionPolicy.Statement.4.Action",
     ["s3:PutObject", "s3:DeleteObject"], "may delete"),
    (E, f"{IDENTITY}.3.permissionPolicy.Statement.4.Resource",
     ["arn:aws:s3:::moe-rl-checkpoints/campaigns/*"], "may delete"),
    (E, f"{IDENTITY}.3.permissionPolicy.Statement.5", "-", "cannot use the key"),
    (E, f"{IDENTITY}.3.permissionPolicy.Statement.1.Action", ["s3:GetObject"], "its outputs"),
    (K, f"{SPOT}.requirements.2.values", ["us-east-2b"], "one zone"),
    (K, f"{SPOT}.requirements.1.values", ["p6-b200.48xlarge"], "does not fit"),
    (K, f"{SPOT}.requirements.1.values", ["p5.48xlarge"], "does not fit"),  # H100: other memory, other bits
    (K, f"{SPOT}.taints.0.value", "rollout", "without its taint"),
    (K, f"{SPOT}.taints.1", "-", "last attempts land on Spot"),
    (K, f"{SPOT}.taints", [{"key": "a", "effect": "NoSchedule"}], "last attempts land on Spot"),
    (K, f"{SPOT}.terminationGracePeriod", "10m", "two minutes"),
    (K, f"{SPOT}.nodeClassRef.name", "gpus", "names no EC2NodeClass"),
    (K, "2.spec.limits", {"nvidia.com/gpu": "128"}, "limited to 128 GPUs"),
    (K, "2.spec.template.metadata.labels", {"moe-rl/pool": "rollouts"}, "label of rollouts"),
    (K, f"{FALLBACK}.taints.0.value", "spot", "tolerates no whole set"),
    (K, "0.spec.metadataOptions.httpPutResponseHopLimit", 1, "hop limit of 1"),
    (K, "0.spec.instanceStorePolicy", "-", "RAID0"),
    (K, "4.spec.template.spec.requirements.1.values", ["g6e.48xlarge"], "trainer-single does not fit"),
    (K, "4.spec.template.metadata.labels", {"moe-rl/pool": "single"}, "which no node has"),
    (K, "0.spec.amiSelectorTerms.0.alias", "al2023@latest", "pinned"),
    (K, "0.spec.metadataOptions.httpTokens", "optional", "IMDSv2"),
    (K, "6.spec.template.spec.requirements.1.values", ["c7i.48xlarge"], "StatefulSet valkey does not fit"),
    (Q, f"{QUOTAS}.3.nominalQuota", "120", "needs 16 x 8"),
    (Q, f"{QUOTAS}.1.nominalQuota", "28Ti", "quota of memory"),
    (Q, f"{QUOTAS}.5", "-", "has quotas for"),
    (Q, "2.spec.resourceGroups.0.flavors.0.name", "trainers", "does not exist"),
    (Q, "3.metadata.name", "train", "trainers queue at"),
    (Q, "3.metadata.namespace", "moe-rl", "trainers queue at"),
    (Q, "3.spec.clusterQueue", "train", "names no ClusterQueue"),
    (Q, "0.spec.levels", [{"nodeLabel": "kubernetes.io/hostname"}], "no level of the topology"),
    (Q, "1.spec.nodeLabels", {"moe-rl/pool": "cpu"}, "other nodes than the trainer's"),
    (Q, "1.spec.topologyName", "net", "topology net does not exist"),
    (F, "0.configmap.core.propeller.node-config.ignore-retry-cause", False, "never leave Spot"),
    (F, "0.configmap.core.propeller.node-config.interruptible-failure-threshold", 1, "one on demand"),
    (F, "0.configmap.core.propeller.rawoutput-prefix", "s3://moe-rl-checkpoints/", "its own bucket"),
    (F, "0.configmap.core.propeller.literal-offloading-config.enabled", False, "offloaded"),
    (F, f"{K8S}.inject-finalizer", False, "inject-finalizer"),
    (F, f"{K8S}.default-pod-template-name", "template", "must exist"),
    (F, f"{K8S}.interruptible-tolerations.0.key", "moe-rl/sopt", "which no pool has"),
    (F, f"{K8S}.interruptible-node-selector-requirement.values", ["Spot"], "go to Spot"),
    (F, f"{K8S}.non-interruptible-node-selector-requirement.operator", "In", "NotIn"),
    (F, f"{PLUGINS}.default-for-task-types.pytorch", "container", "pytorch"),
    (F, f"{PLUGINS}.enabled-plugins", ["container", "sidecar"], "pytorch"),
    (F, f"{TASKS}.cpu", "96", "would shrink"),
    (F, f"{TASKS}.ephemeralStorage", "100Gi", "would shrink"),
    (F, f"{TASKS}.gpu", "4", "would shrink"),
    (F, "0.cluster_resource_manager.config.cluster_resources.customData.0.production.0.projectQuotaCpu.value",
     "5", "projectQuotaCpu is 5"),
    (F, "0.configmap.namespace_config.namespace_mapping.template", "{{ project }}", "are not moe-production"),
    (V, "4.spec.replicas", 3, "does not name"),
    (V, "2.spec.dnsNames", ["localhost"], "does not name"),
    (V, "4.spec.template.spec.nodeSelector", {"moe-rl/pool": "memories"}, "which no node has"),
    (V, "4.spec.template.spec.containers.0.resources.limits.memory", "400Gi", "leave 15 %"),
    (V, "4.spec.template.spec.containers.0.securityContext", "-", "may gain privileges"),
    (V, "3.spec.selector.matchLabels", {"moe-rl/pool": "rollout-spot"}, "disruption budget"),
    (V, "0.data.valkey~conf", "port 0", "must read renewed certificates"),
    (B, f"{ROLLOUT}.spec.template.spec.tolerations.1", "-", "does not tolerate rollout-spot"),
    (B, f"{ROLLOUT}.spec.template.spec.terminationGracePeriodSeconds", 300, "has 300 s of grace"),
    (B, f"{ROLLOUT}.spec.template.metadata.annotations", {"karpenter.sh/do-not-disrupt": "true"},
     "no SIGTERM"),
    (B, f"{ROLLOUT}.spec.replicas", 40, "standing workers need 320"),
    (B, f"{ROLLOUT}.spec.template.spec.serviceAccountName", "default", "does not exist"),
    (B, f"{ROLLOUT}.spec.template.spec.containers.0.image", "registry.example.com/moe-rl/rollout:0.0.9",
     "no image"),
    (B, f"{ROLLOUT}.spec.template.spec.containers.0.resources.limits", {"cpu": "180"}, "quota"),
    (B, f"{ROLLOUT}.spec.template.spec.volumes.0", "-", "mounts cache, which is no volume"),
    (B, f"{JOB}.template.spec.containers.0.name", "trainer", "named pytorch"),
    (B, f"{JOB}.restartPolicy", "Never", "started again"),
    (B, f"{TRAINER}.spec.runPolicy.backoffLimit", 3, "for ever"),
    (B, f"{JOB}.replicas", 15, "16 nodes"),
    (B, f"{TRAINER}.spec.elasticPolicy.minReplicas", 8, "16 nodes"),
    (B, f"{TRAINER}.spec.elasticPolicy.nProcPerNode", 4, "8 ranks"),
    (B, f"{TRAINER}.spec.elasticPolicy.rdzvConf", [], "pull an image"),
    (B, f"{TRAINER}.metadata.labels", {}, "Kueue"),
    (B, f"{JOB}.template.metadata.annotations", {}, "neighbours"),
    (B, f"{JOB}.template.spec.terminationGracePeriodSeconds", 60, "grace"),
    (B, f"{JOB}.template.spec.containers.0.env.15.value", "20", "grace"),
    (B, f"{JOB}.template.spec.containers.0.livenessProbe", "-", "probes"),
    (B, f"{JOB}.template.spec.containers.0.startupProbe.failureThreshold", 10, "meet"),
    (B, f"{JOB}.template.spec.containers.0.securityContext.capabilities", {}, "may gain privileges"),
    (B, f"{JOB}.template.spec.serviceAccountName", "moe-rl-rollout", "writes versions"),
    (B, f"{WATCH}.spec.template.metadata.labels.app", "watcher", "selects no pod"),
    (B, f"{WATCH}.metadata.namespace", "moe-rl", "does not exist"),
    (B, f"{WATCH}.spec.template.spec.containers.0.ports.0.name", "http", "scrapes a port"),
    (W, "2.metadata.name", "moe-rl-train", "does not exist"),
    (W, "8.metadata.namespace", "default", "claim `models`"),
    (W, "5.template.spec.containers.0.name", "main", "must exist"),
    (W, "5.template.spec.containers.0.image", "registry.example.com/moe-rl/cpus:0.1.0", "no image"),
    (D, "0.spec.template.spec.tolerations.1", "-", "every pool"),
    (D, "1.spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution."
        "nodeSelectorTerms.0.matchExpressions.0.values", ["trainer"], "must run on"),
    (D, "0.spec.template.spec.containers.0.image", "x/aws-efa-k8s-device-plugin:v0.5.9", "needs 0.5.10"),
    (D, "1", "-", "one plugin for EFA"),
    (M, "1.spec.groups.0.rules.0.expr", "moe_rl_portion > 0", "which nothing exports"),
    (M, "1.spec.groups.0.rules.4.expr", "sum by (reason) (moe_rl_rejected_total[1h])", "is no expression"),
    (M, "1.spec.groups.0.rules.0.annotations", {"summary": "x"}, "what to do"),
    (M, "1.spec.groups.0.rules.6", "-", "alerts must be"),
    (M, "1.spec.groups.0.rules.4.expr", "moe_rl_rejected_total{reason=~\"zero_varianz\"} > 0",
     "which nothing gives"),
    (M, "1.spec.groups.0.rules.9.expr", "up{job=\"watch\"} == 0", "no PodMonitor makes"),
    (M, "0.spec.podMetricsEndpoints.0.port", "http", "scrapes a port"),
    (M, "0.spec.namespaceSelector", "-", "in another namespace"),
    ("cluster/kueue-values.yaml", "0.managerConfig.controllerManagerConfigYaml", "{}", "hold PyTorchJobs"),
    ("cluster/training-operator/kustomization.yaml", "0.resources", ["x?ref=v2.0.0"], "pinned to v1.9.4"),
    ("campaigns/one_node.yaml", "0.buffer.url.1", "valkeys://moe-rl@valkey-0.valkey.moe-rl.svc:6379/0",
     "every shard once"),
    ("campaigns/one_node.yaml", "0.rollout.grace_seconds", 80, "must be below"),
    ("campaigns/one_node.yaml", "0.train", {"topology": "laptop_1x2", "backend": "nccl"}, "has no GPUs"),
    ("campaigns/qwen3_30b_a3b.yaml", "0.rollout.workers", 40, "a campaign needs 320"),
    ("campaigns/qwen3_30b_a3b.yaml", "0.checkpoint.store", "s3://elsewhere/x", "campaigns of elsewhere"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "path", "value"), SCHEMA_MUTATIONS, ids=lambda v: str(v)[-40:])
def test_a_schema_refuses_a_wrong_field(file: str, path: str, value: Any) -> None:
    index = int(path.split(".")[0])
    assert schema_problems(changed(file, path, value)[file][index], versions=("1.34",))


@pytest.mark.parametrize(("file", "path", "value", "says"), MUTATIONS, ids=lambda v: str(v)[-40:])
def test_a_wrong_value_is_noticed(file: str, path: str, value: Any, says: str) -> None:
    found = problems(changed(file, path, value))
    assert any(says in problem for problem in found), found


def test_no_file_is_without_mutations() -> None:
    touched = {mutation[0] for mutation in [*MUTATIONS, *SCHEMA_MUTATIONS]}
    assert {name for name in FILES if name.startswith("cluster/") and "s3-" not in name} <= touched


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_job_that_flyte_makes_of_a_training_is_valid(topology: str) -> None:
    """The PyTorchJob as Flyte's plugin builds it: the task's template as workers, its elastic policy."""
    nodes, ranks = TOPOLOGIES[topology]
    template = serialized_tasks()[f"tasks.train.update_policy_{topology}"]
    pod = {
        "metadata": {"labels": {**template.k8s_pod.metadata.labels}},
        "spec": {**template.k8s_pod.pod_spec, "restartPolicy": "Never"},
    }
    assert schema_problems({"apiVersion": "v1", "kind": "Pod", **pod}) == []
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "x", "labels": {placement.QUEUE_LABEL: placement.TRAINER.queue}},
        "spec": {
            "elasticPolicy": {"minReplicas": nodes, "maxReplicas": nodes, "nProcPerNode": ranks,
                              "maxRestarts": 3, "rdzvBackend": "c10d"},
            "runPolicy": {"cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {
                "Worker": {"replicas": nodes, "restartPolicy": "Never", "template": pod}
            },
        },
    }  # fmt: skip
    assert schema_problems(job) == []
    job["spec"]["elasticPolicy"]["rdzvBackends"] = "c10d"
    assert schema_problems(job)


CHART = os.environ.get("MOE_RL_FLYTE_CHART", "")


@pytest.mark.skipif(not CHART, reason="needs MOE_RL_FLYTE_CHART: a folder with the chart flyte-core")
def test_flytes_chart_takes_the_values() -> None:
    helm = pytest.importorskip("helm_python")
    chart = helm.Chart.load(CHART)
    rendered = chart.render(FILES[F][0], name="flyte", namespace="flyte")
    maps = {
        d["metadata"]["name"]: d["data"]
        for text in rendered.values()
        for d in yaml.safe_load_all(text)
        if d and d["kind"] == "ConfigMap" and "data" in d
    }
    propeller = maps["flyte-propeller-config"]
    node = yaml.safe_load(propeller["core.yaml"])["propeller"]["node-config"]
    assert node["ignore-retry-cause"] is True
    plugins = yaml.safe_load(propeller["k8s.yaml"])["plugins"]["k8s"]
    assert plugins["interruptible-tolerations"][0]["key"] == placement.SPOT_TAINT
    assert plugins["default-pod-template-name"] == "flyte-template"
    kinds = yaml.safe_load(propeller["enabled_plugins.yaml"])["tasks"]["task-plugins"]
    assert kinds["default-for-task-types"]["pytorch"] == "pytorch"
    limits = yaml.safe_load(maps["flyte-admin-base-config"]["task_resource_defaults.yaml"])
    assert limits["task_resources"]["limits"]["cpu"] == "192"
