"""What ``tasks/standing.py`` puts beside a campaign; the cluster's checks (``test_cluster.py``) judge it too.

What these tests cannot see: the operator, Kueue and the kubelet. The operator's part of a trainer's
environment (``PET_*``) is written here by hand.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_standing_trainer import SINGLE, make_run, train_batch

from tasks import placement, standing
from tasks.config import CampaignConfig
from tasks.policy.training.request import await_candidate
from tasks.session import run_store

ROOT = Path(__file__).resolve().parent.parent
CODE = "s3://moe-rl-flyte/code/9d8ca4c.tar.gz"


def beside(config: CampaignConfig, code: str = CODE) -> dict[str, dict[str, Any]]:
    """Kind and last word of the name -> manifest."""
    text = yaml.safe_dump(config.model_dump(mode="json"))
    found = list(yaml.safe_load_all(standing.dumped(standing.manifests(config, text=text, code=code))))
    return {f"{m['kind']} {m['metadata']['name'].removeprefix(config.name + '-')}": m for m in found}


def config(**train: Any) -> CampaignConfig:
    return CampaignConfig.model_validate({"name": "team-a", "train": {**SINGLE, **train}})


def test_what_the_configuration_does_not_ask_for_does_not_stand() -> None:
    assert beside(config()).keys() == {"ConfigMap campaign", "Deployment watch"}
    both = CampaignConfig.model_validate(
        {
            "name": "team-a",
            "train": {**SINGLE, "pool": "standing"},
            "rollout": {"pool": "standing", "workers": 7},
        }
    )
    found = beside(both)
    assert found.keys() == {
        "ConfigMap campaign", "Deployment watch", "PyTorchJob trainer", "Deployment rollout"
    }  # fmt: skip
    assert found["Deployment rollout"]["spec"]["replicas"] == 7
    assert {m["metadata"]["namespace"] for m in found.values()} == {"moe-production"}
    assert {m["metadata"]["name"].startswith("team-a-") for m in found.values()} == {True}
    read = CampaignConfig.model_validate(yaml.safe_load(found["ConfigMap campaign"]["data"]["campaign.yaml"]))
    assert read == both


def test_a_pod_beside_a_campaign_is_the_pod_of_its_tasks() -> None:
    """One place for pools, images, sizes, variables, volumes and grace: what differs is the command."""
    found = beside(config(pool="standing"))
    pod = found["PyTorchJob trainer"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    pool = placement.SINGLE
    assert container["resources"] == {"requests": pool.resources, "limits": pool.resources}
    assert container["image"] == f"{placement.REGISTRY}/{pool.image}"
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert pool.variables.items() <= variables.items()
    assert variables.keys() - pool.variables.keys() == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert pod["nodeSelector"] == {placement.POOL_LABEL: pool.name}
    assert pod["terminationGracePeriodSeconds"] == pool.grace_seconds == 120
    assert container["command"][:6] == [
        "pyflyte-fast-execute", "--additional-distribution", CODE, "--dest-dir", "/root", "--"
    ]  # fmt: skip
    job = found["PyTorchJob trainer"]
    assert placement.QUEUE_LABEL not in job["metadata"]["labels"], (
        "nodes that come by themselves need no queue"
    )
    watch = found["Deployment watch"]["spec"]["template"]["spec"]
    assert watch["serviceAccountName"] == "moe-rl-rollout", "who only reads may only read"


def test_a_topology_without_gpus_does_not_stand_on_the_cluster() -> None:
    laptop = CampaignConfig.model_validate({"train": {"pool": "standing"}})
    with pytest.raises(
        ValueError, match=r"must have GPUs to stand on the cluster, got laptop_1x2.*'node_1x8'"
    ):
        beside(laptop)


def test_liveness_outlasts_every_wait_of_the_ranks() -> None:
    """Else a probe would end nodes that wait for another one to pull its image, or for a slow collective."""
    for seconds in (120, 3600):
        job = beside(config(pool="standing", collective_timeout_seconds=seconds))["PyTorchJob trainer"]
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        most = int(container["livenessProbe"]["exec"]["command"][-1].rpartition(" ")[2])
        assert most >= 300 + max(seconds, *placement.RENDEZVOUS.values())


@pytest.mark.slow
@pytest.mark.usefixtures("leave_servers")
def test_the_trainers_pod_does_here_what_it_does_there(tmp_path: Path) -> None:
    """Its own command on an archive of this code: it unpacks, joins, trains, is alive, ends on SIGTERM."""
    run = make_run(tmp_path / "store", SINGLE)
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tasks", "kernels", "workflows"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    archive, root, pulse = tmp_path / "code.tar.gz", tmp_path / "root", tmp_path / "pulse"
    subprocess.run(["tar", "czf", archive, "-T", "-"], cwd=ROOT, input=names, text=True, check=True)
    root.mkdir()
    job = beside(run.config, str(archive))["PyTorchJob trainer"]
    file = tmp_path / "campaign.yaml"
    file.write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    here = {"/root": str(root), standing.CONFIG: str(file), standing.PULSE: str(pulse)}
    command = [here.get(word, word) for word in container["command"]]
    variables = {entry["name"]: entry["value"].replace("/root", str(root)) for entry in container["env"]}
    elastic = job["spec"]["elasticPolicy"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = ",".join(f"{pair['key']}={pair['value']}" for pair in elastic["rdzvConf"])
    operator = {
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}", "PET_RDZV_CONF": conf,
        "PET_NPROC_PER_NODE": str(elastic["nProcPerNode"]), "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **variables, **operator, "PATH": path, "OMP_NUM_THREADS": "1"}
    trainer = subprocess.Popen(command, cwd=root, env=environment)

    def probes() -> list[int]:
        kinds = ("startupProbe", "livenessProbe")
        words = [
            [w.replace(standing.PULSE, str(pulse)) for w in container[k]["exec"]["command"]] for k in kinds
        ]
        return [subprocess.run(word, check=False, stderr=subprocess.DEVNULL).returncode for word in words]

    try:
        assert probes()[0] == 1, "not started yet"
        candidate = await_candidate(run, train_batch(run, 0, 0), run_store(run).reference(0))
        assert '"version":1' in candidate.manifest_json and probes() == [0, 0]
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(timeout=60) not in (0, None)
    finally:
        trainer.kill()
    os.utime(pulse, (0, 0))
    assert probes() == [0, 1]
