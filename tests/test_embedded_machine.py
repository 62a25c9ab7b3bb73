"""What embedded servers keep from the machine's other users, and what they take of it. Real processes.

What these tests cannot see: macOS (they read /proc).
"""

import json
import random
import shutil
import stat
from pathlib import Path

import pytest
from test_embedded import processes_of

from tasks.embedded.disk import require_free_space
from tasks.embedded.ports import free_ports
from tasks.embedded.seaweed import S3Endpoint
from tasks.embedded.valkey import ensure_valkey

pytestmark = pytest.mark.usefixtures("leave_servers")


def test_secrets_are_private_and_differ_by_folder(tmp_path: Path, store_folder: Path) -> None:
    urls = [ensure_valkey(tmp_path / name) for name in ("a", "b")]
    passwords = {url.partition("@")[0] for url in urls}
    assert len(passwords) == 2
    names = [
        tmp_path / "a/valkey/password",
        tmp_path / "a/valkey/valkey.conf",
        store_folder / "seaweedfs/s3.json",
    ]
    assert {stat.S_IMODE(name.stat().st_mode) for name in names} == {0o600}
    assert not [
        pid for pid in processes_of(tmp_path) if any(p[10:].encode() in cmdline(pid) for p in passwords)
    ]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_servers_listen_on_loopback_only(tmp_path: Path, store_folder: Path, s3_endpoint: S3Endpoint) -> None:
    ensure_valkey(tmp_path)
    ports = []
    for path in (tmp_path / "valkey/server.json", store_folder / "seaweedfs/server.json"):
        ports += json.loads(path.read_text())["ports"]
    listening = {}  # /proc/net/tcp: local address is hexadecimal, state 0A is LISTEN
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        if state == "0A":
            listening.setdefault(int(local.split(":")[1], 16), set()).add(local.split(":")[0])
    assert {port: listening[port] for port in ports} == {port: {"0100007F"} for port in ports}
    assert int(s3_endpoint.url.rpartition(":")[2]) in ports


def test_too_little_free_space_is_refused_before_work_starts(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    require_free_space(folder, 1)
    with pytest.raises(ValueError, match=r"must have at least .* GiB free, got .* GiB"):
        require_free_space(folder, shutil.disk_usage(tmp_path).free + 2**30)
    assert not folder.exists()


def test_ports_do_not_depend_on_the_global_random_generator() -> None:
    chosen = []
    for _ in range(2):
        random.seed(0)
        chosen.append(free_ports(8))
    assert chosen[0] != chosen[1]
