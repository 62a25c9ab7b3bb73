"""What the cluster's files must agree on, second part: permissions, plugins, metrics, versions, index."""

import json
import re
from collections.abc import Iterator

import promql_parser
from cluster_checks import CLUSTER, ROOT, Files, campaigns, documents, makers, named, pod_of

from tasks import placement

COMPONENTS = (
    "EKS 1.31", "node group", "EFA", "NVLink", "NVSwitch", "GPUDirect RDMA", "DeepEP", "NCCL",
    "device plugin", "one AZ", "SGLang container", "Spot", "S3", "buffer", "cache", "TorchX",
)  # fmt: skip
"""Of the published architecture; each has a row in the index of ``configs/cluster/README.md``."""
REASONS = [ROOT / "tasks/rl/assembly.py", ROOT / "tasks/experience/watch.py"]
FORBIDDEN = {"s3:*", "*", "s3:DeleteObjectVersion", "s3:PutBucketPolicy", "s3:PutLifecycleConfiguration"}


def check_permissions(files: Files) -> Iterator[str]:
    cluster = files["cluster/eksctl.yaml"][0]
    buckets = {config.checkpoint.store.split("/")[2] for config in campaigns(files).values()}
    addons = [a for addon in cluster["addons"] for a in addon.get("podIdentityAssociations", [])]
    for identity in [*cluster["iam"]["podIdentityAssociations"], *addons]:
        who, may = identity["serviceAccountName"], {}
        for statement in identity["permissionPolicy"]["Statement"]:
            for action in statement["Action"]:
                if action in FORBIDDEN:
                    yield f"{who} may {action}"
                may.setdefault(action, []).extend(statement["Resource"])
            if any(resource in ("*", "arn:aws:s3:::*") for resource in statement["Resource"]):
                yield f"{who} may touch every bucket"
        if not who.startswith("moe-rl-"):
            continue
        for bucket in buckets:
            for action in ("s3:GetObject", "s3:GetObjectVersion"):
                if f"arn:aws:s3:::{bucket}/campaigns/*" not in may.get(action, []):
                    yield f"{who} must read the campaigns of {bucket}, even behind a delete marker: {action}"
            writes = [r for r in may.get("s3:PutObject", []) if bucket in r]
            is_reader = who == placement.ROLLOUT.service_account
            campaign = f"arn:aws:s3:::{bucket}/campaigns/*"
            few = [f"{campaign}/{name}" for name in ("evaluations/*", "holds/*", "latest.json")]
            if is_reader and sorted(writes) != few:
                yield f"{who} may write {writes}: rollout nodes write {few} alone"
            if any(
                resource != f"{campaign}/blobs/*" or is_reader for resource in may.get("s3:DeleteObject", [])
            ):
                yield f"{who} may delete more than hide blobs"
            if not {"kms:Decrypt", "kms:GenerateDataKey"} <= may.keys():
                yield f"{who} cannot use the key that encrypts the bucket"
            if not is_reader and f"arn:aws:s3:::{bucket}/campaigns/*" not in writes:
                yield f"{who} must write the campaigns of {bucket}"
        if "arn:aws:s3:::moe-rl-flyte/*" not in may.get("s3:PutObject", []):
            yield f"{who} must write its outputs to Flyte's bucket"
    raw = files["cluster/flyte.yaml"][0]
    if raw["configmap"]["core"]["propeller"]["rawoutput-prefix"] != f"s3://{raw['storage']['bucketName']}/":
        yield "Flyte's raw outputs must go to its own bucket"


def check_device_plugins(files: Files) -> Iterator[str]:
    needed = {pool.name for pool in placement.POOLS if pool.gpus}
    for plugin in documents(files, "DaemonSet"):
        spec, name = plugin["spec"]["template"]["spec"], plugin["metadata"]["name"]
        terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (expression,) = terms["nodeSelectorTerms"][0]["matchExpressions"]
        if expression["key"] != placement.POOL_LABEL or not needed <= set(expression["values"]):
            yield f"{name} must run on {sorted(needed)}, got {expression}"
        tolerated = {t["key"] for t in spec["tolerations"] if t["operator"] == "Exists"}
        if not {placement.POOL_LABEL, placement.SPOT_TAINT} <= tolerated:
            yield f"{name} does not tolerate every pool"
        version = [int(n) for n in re.findall(r"\d+", spec["containers"][0]["image"].rpartition(":v")[2])]
        if "efa" in name and version < [0, 5, 10]:
            yield f"{name} {version} does not know p5en and p6: needs 0.5.10"
    if len(documents(files, "DaemonSet")) != 2:
        yield "one plugin for EFA and one for GPUs"


def check_versions(files: Files) -> Iterator[str]:
    cluster = files["cluster/eksctl.yaml"][0]
    for kind in ("gpu", "cpu"):
        spec = named(files, "EC2NodeClass", kind)["spec"]
        for term in spec["subnetSelectorTerms"] + spec["securityGroupSelectorTerms"]:
            if not term["tags"].items() <= cluster["metadata"].get("tags", {}).items():
                yield f"eksctl tags nothing with {term['tags']}: Karpenter finds no subnet for {kind} nodes"
    if tuple(int(n) for n in cluster["metadata"]["version"].split(".")) < (1, 31):
        yield f"EKS must be 1.31 or newer, got {cluster['metadata']['version']}"
    (operator,) = files["cluster/training-operator/kustomization.yaml"][0]["resources"]
    if not operator.endswith("?ref=v1.9.4"):
        yield f"Flyte submits jobs of training-operator v1, pinned to v1.9.4, got {operator}"
    for kind in ("gpu", "cpu"):
        spec = named(files, "EC2NodeClass", kind)["spec"]
        if any("latest" in term.get("alias", "latest") for term in spec["amiSelectorTerms"]):
            yield f"the AMI of {kind} must be pinned"
        if spec.get("instanceStorePolicy") != "RAID0":
            yield f"the NVMe of {kind} is no storage without instanceStorePolicy RAID0"
        if spec["metadataOptions"].get("httpTokens") != "required":
            yield f"{kind} nodes must require IMDSv2"
    trainer = next(g for g in cluster["managedNodeGroups"] if g["name"] == "trainer")
    if not trainer.get("efaEnabled"):
        yield "the trainer's nodes have no EFA devices: efaEnabled"
    if "strategy: RAID0" not in trainer.get("overrideBootstrapCommand", ""):
        yield "the trainer's NVMe is not mounted: localStorage strategy RAID0"
    if not trainer.get("placement", {}).get("groupName"):
        yield "the trainer's nodes need a placement group"
    if not trainer.get("capacityReservation") and not trainer.get("instanceMarketOptions"):
        yield "the trainer's nodes need a reservation or a capacity block"
    kueue = files["cluster/kueue-values.yaml"][0]["managerConfig"]["controllerManagerConfigYaml"]
    if "kubeflow.org/pytorchjob" not in kueue or "waitForPodsReady" not in kueue:
        yield "Kueue must hold PyTorchJobs and wait for all of their pods"


def metric_names() -> set[str]:
    """Those that the project's exporter writes, from an exporter's own output."""
    from tasks.experience.watch import View, view_metrics

    empty = {"Mapping": {}, "str": "c", "Sequence": [(1, 2)]}
    view = {
        name: next((value for kind, value in empty.items() if kind in str(field.type)), 0)
        for name, field in View.__dataclass_fields__.items()
    }
    return set(re.findall(r"# TYPE (\w+)", view_metrics(View(**view))))


def check_metrics(files: Files) -> Iterator[str]:
    exported = metric_names()
    rules = documents(files, "PrometheusRule")[0]["spec"]["groups"]
    alerts = [rule for group in rules for rule in group["rules"]]
    expressions = {rule["alert"]: rule["expr"] for rule in alerts}
    dashboard = json.loads((CLUSTER / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        expressions |= {f"panel {panel['title']}": t["expr"] for t in panel["targets"]}
    for where, expression in expressions.items():
        unknown = set(re.findall(r"\bmoe_rl_\w+", expression)) - exported
        if unknown:
            yield f"{where} uses {sorted(unknown)}, which nothing exports"
        try:
            promql_parser.parse(expression)
        except ValueError as error:
            yield f"{where} is no expression: {error}"
    for rule in alerts:
        if not {"summary", "action"} <= rule["annotations"].keys() or "severity" not in rule["labels"]:
            yield f"{rule['alert']} must say how bad it is, what is and what to do"
    monitor = documents(files, "PodMonitor")[0]
    job = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    if set(re.findall(r'\bjob="([^"]+)"', str(expressions))) != {job}:
        yield "an alert asks for a job that no PodMonitor makes"
    watches = [d for name, d in makers(files) if name.endswith("-watch")]
    for watch in watches:
        pod, spec = pod_of(watch), monitor["spec"]
        if not spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items():
            yield "the PodMonitor selects no pod"
        if spec.get("namespaceSelector", {}).get("matchNames") != [watch["metadata"]["namespace"]]:
            yield "the PodMonitor looks in another namespace"
        ports = {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
        if {e["port"] for e in spec["podMetricsEndpoints"]} - ports:
            yield "the PodMonitor scrapes a port that the pod does not have"


ALERTS = {
    "GenerationStands", "LeaseTooOld", "BufferFills", "WritersWait", "SamplesFail", "TrainerStuck",
    "MetricsMissing", "PodsCrash", "ValkeyDown", "GpuNodeWithoutEfa", "PortionsPoisoned", "WorkersBarred",
    "FewSamplesTeach",
}  # fmt: skip


def check_alerts(files: Files) -> Iterator[str]:
    """What an operator expects to be told of, and that every metric of the exporter is looked at."""
    groups = documents(files, "PrometheusRule")[0]["spec"]["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    if rules.keys() != ALERTS:
        yield f"alerts must be {sorted(ALERTS)}, got {sorted(rules)}"
    shown = str(rules) + (CLUSTER / "dashboard.json").read_text()
    unseen = {name for name in metric_names() if not re.search(rf"\b{name}\b", shown)}
    if unseen - {
        "moe_rl_worker_tokens_total",
        "moe_rl_worker_seconds_total",
    }:  # for questions, not for watching
        yield f"nobody looks at {sorted(unseen)}"
    code = "".join(path.read_text() for path in REASONS)
    named_reasons = "|".join(re.findall(r'reason[!=]~"([^"]+)"', str(rules))).split("|")
    yield from (
        f"an alert knows the reason {n}, which nothing gives" for n in named_reasons if f'"{n}"' not in code
    )


def index_problems(readme: str) -> Iterator[str]:
    """The README's table: every component, and files that exist."""
    table = "\n".join(line for line in readme.splitlines() if line.startswith("|"))
    for component in COMPONENTS:
        if component not in table:
            yield f"{component} has no row"
    for name in re.findall(r"`([\w./*-]+\.(?:yaml|json|py|Dockerfile)|[\w-]+/)`", table):
        if not list(CLUSTER.glob(name.rstrip("/"))) and not list(ROOT.glob(name.rstrip("/"))):
            yield f"{name} does not exist"
    for path in CLUSTER.iterdir():
        shown = f"{path.name}/" if path.is_dir() else path.name
        if shown not in table and not path.name.startswith(("README", "s3-")):
            yield f"{shown} is in no row"
