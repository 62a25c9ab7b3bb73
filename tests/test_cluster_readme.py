"""``configs/cluster/README.md`` can be followed: what it names exists, in an order in which it can.

What these tests cannot see: what aws, eksctl, helm and kubectl do with their arguments.
"""

import os
import re
import subprocess
from pathlib import Path

import cluster_checks as checks
import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (checks.CLUSTER / "README.md").read_text()
FILES = checks.load()
UP = TEXT[TEXT.index("## Up") : TEXT.index("## Down")]
ORDER = [
    "pip install '.[train]'", "docker build", "create-bucket", "s3 sync", "create-placement-group",
    "create-capacity-reservation",
    "eksctl create cluster", "create-vpc-endpoint", "create-db-instance", "device-plugins.yaml",
    "helm install cert-manager", "create namespace flyte", "workloads.yaml", "create secret tls moe-rl-ca",
    "-f configs/cluster/valkey.yaml", "helm install kueue", "-f configs/cluster/kueue.yaml",
    "-k configs/cluster/training-operator", "helm upgrade --install flyte", "create project",
    "pyflyte register", "tasks.preflight", "tasks.plan --config", "git archive", "tasks.standing",
]  # fmt: skip
"""The VPC is the cluster's, so what stands in it comes after; namespaces come before their secrets, secrets
before the pods that mount them, operators before their resources."""


def missing(text: str) -> list[str]:
    """Steps that are not there or come too early."""
    found, start = [], 0
    for step in ORDER:
        at = text.find(step, start)
        if at < 0:
            found.append(step)
        start = max(at, start)
    return found


def test_the_steps_come_in_an_order_in_which_they_can_be_done() -> None:
    assert missing(UP) == []
    assert missing(UP.replace("create-vpc-endpoint", "")) == ["create-vpc-endpoint"]
    early = UP.replace("aws s3 sync", "aws rds create-db-instance; aws s3 sync").replace(
        "create-db-instance --db", ""
    )
    assert missing(early) == ["create-db-instance"]


def test_every_file_and_option_that_a_command_names_exists() -> None:
    for name in set(re.findall(r"(?:configs|images|tasks)/[\w./*-]+\w", TEXT)):
        assert list(ROOT.glob(name)), name
    commands = re.findall(r"python -m (tasks[\w.]+)((?: (?:--[\w-]+|[\w./$:]+))*)", TEXT)
    assert {module for module, _ in commands} >= {"tasks.plan", "tasks.standing", "tasks.preflight"}
    for module, arguments in commands:
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
        assert [o for o in re.findall(r"--[\w-]+", arguments) if f'"{o}"' not in source] == [], module


def test_every_secret_that_a_pod_mounts_is_made() -> None:
    mounted = set(
        re.findall(r"secretName: ([\w-]+)", "".join(p.read_text() for p in checks.CLUSTER.glob("*.yaml")))
    )
    mounted |= {FILES["cluster/flyte.yaml"][0]["common"]["databaseSecret"]["name"]}
    mounted |= {str(v["secret"]["secretName"]) for _, d in checks.makers(FILES)
                for v in checks.pod_of(d)["spec"]["volumes"] if "secret" in v}  # fmt: skip
    made = set(re.findall(r"create secret (?:tls|generic) ([\w-]+)", TEXT))
    by_cert_manager = {d["spec"]["secretName"] for d in checks.documents(FILES, "Certificate")}
    assert mounted - made == by_cert_manager and "valkey-client" in mounted
    assert f"-n {checks.NAMESPACE} create secret generic valkey-client" in TEXT


def test_the_readmes_own_line_makes_the_buffers_users(tmp_path: Path) -> None:
    (line,) = [line.strip() for line in TEXT.splitlines() if line.strip().startswith("sed -n")]
    line = line.replace("> users.acl", f"> {tmp_path}/users.acl")
    environment = {**os.environ, "PASSWORD": "0123abcd", "RELOAD": "4567ef"}
    subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, check=True)
    users = (tmp_path / "users.acl").read_text().splitlines()
    assert [user.split()[1] for user in users] == ["default", "moe-rl", "probe", "reload"]
    assert users[1].split()[3] == ">0123abcd" and users[3] == "user reload on >4567ef nocommands +acl|load"


@pytest.mark.parametrize("name", ["us-east-2", "registry.example.com/moe-rl", "moe-rl-checkpoints"])
def test_what_is_to_be_replaced_is_named_and_used(name: str) -> None:
    assert name in UP
    used = [
        p for p in [*checks.CLUSTER.glob("*.yaml"), *(ROOT / "tasks").glob("*.py")] if name in p.read_text()
    ]
    assert used
