"""The trainer without Flyte: plain torchrun gives the campaign's own bits, a TorchX component describes it.

What these tests cannot see: Volcano, which TorchX's Kubernetes scheduler submits to.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from campaigns import SMALL, run

from tasks import placement
from tasks.config import CampaignConfig
from tasks.policy.launch import require_topology
from tasks.records import Candidate

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_plain_torchrun_trains_the_version_that_the_campaign_published(
    tmp_path: Path, leave_servers: None
) -> None:
    config = {**SMALL, "warm_start": {"steps": 0}, "schedule": {"iterations": 1}}
    published = run(tmp_path, config, timeout=900).digests()[-1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tasks.policy.launch",
        "--config", str(tmp_path / "campaign.yaml"), "--store", str(tmp_path / "store"),
        "--iteration", "0", "--output", str(tmp_path / "candidate.json"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    candidate = Candidate.model_validate_json((tmp_path / "candidate.json").read_text())
    from tasks.artifacts.manifest import Manifest

    assert Manifest.model_validate_json(candidate.manifest_json).tensor_digest == published


def test_the_wrong_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"must start 1 x 2 ranks.*got 4"):
        require_topology(CampaignConfig())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    require_topology(CampaignConfig())


def appdef(config: str):
    pytest.importorskip("torchx", reason="pip install -e '.[torchx]'")
    from tasks.torchx_component import trainer

    return trainer(f"configs/campaigns/{config}.yaml", iteration=3, code="s3://moe-rl-flyte/code/x.tar.gz")


@pytest.mark.parametrize(("config", "nodes"), [("one_node", 1), ("qwen3_30b_a3b", 16)])
def test_the_component_describes_the_trainers_pool(
    config: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (role,) = appdef(config).roles
    assert role.num_replicas == nodes and role.image == f"{placement.REGISTRY}/trainer:0.1.0"
    assert (role.resource.cpu, role.resource.gpu) == (180, 8) and role.resource.memMB == 1800 * 1024
    assert role.resource.devices == {"vpc.amazonaws.com/efa": 16}
    assert role.env.items() >= {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}.items()
    assert role.env["PYTHONPATH"] == placement.PYTHON_PATH
    command = role.args[1]
    assert f"--nnodes {nodes}" in command and "--nproc_per_node 8" in command
    assert "--rdzv_conf timeout=1800,join_timeout=1800,read_timeout=900" in command
    assert f"-m tasks.policy.launch --config /root/configs/campaigns/{config}.yaml --iteration 3" in command
    assert command.startswith("pyflyte-fast-execute --additional-distribution s3://")


def test_a_dry_run_makes_a_volcano_job_with_efa_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    app = appdef("qwen3_30b_a3b")
    from torchx.schedulers.kubernetes_scheduler import create_scheduler

    scheduler = create_scheduler("dry")
    job = scheduler.submit_dryrun(app, {"queue": "default", "namespace": "moe-production"}).request.resource
    tasks = job["spec"]["tasks"]
    assert job["apiVersion"] == "batch.volcano.sh/v1alpha1" and len(tasks) == 16
    container = tasks[0]["template"].spec.containers[0]
    assert container.resources.limits["vpc.amazonaws.com/efa"] == "16"
    assert container.resources.limits["nvidia.com/gpu"] == "8"
    assert yaml.safe_load((ROOT / "configs/campaigns/qwen3_30b_a3b.yaml").read_text())["train"]["topology"]
