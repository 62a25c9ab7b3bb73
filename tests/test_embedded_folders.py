"""Embedded servers: what they leave when power or a process is lost, and what their folders may be called."""

import errno
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from test_embedded import answer, owner, ping, wait_until_gone

from tasks.embedded.process import Launch, Server, ensure_running
from tasks.embedded.seaweed import ensure_s3
from tasks.embedded.valkey import ensure_valkey

pytestmark = pytest.mark.usefixtures("leave_servers")


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"70000"])
def test_files_that_a_lost_power_left_empty_or_cut_do_not_keep_a_server_down(
    tmp_path: Path, damage: bytes
) -> None:
    folder = tmp_path / "valkey"
    folder.mkdir()
    for name in ("server.json", "last_port"):
        (folder / name).write_bytes(damage)
    (folder / "password").touch()
    url = ensure_valkey(tmp_path)
    assert ping(url) == b"+OK\r\n+PONG\r\n" and "valkey://:@" not in url


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "line\nfeed", "with space # \u00fc"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    assert ping(ensure_valkey(tmp_path / name)) == b"+OK\r\n+PONG\r\n"
    assert list((tmp_path / name / "valkey/data").iterdir()), "the append-only file"


def test_an_s3_store_may_lie_in_a_folder_with_a_comma(tmp_path: Path) -> None:
    """SeaweedFS took it for two folders and ended."""
    ensure_s3(tmp_path / "a, b\nc")
    assert list((tmp_path / "a, b\nc/seaweedfs/data").iterdir()), "its volumes"


def test_a_store_that_is_a_file_or_on_a_disk_that_is_only_read_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r"must be a folder on a disk that can be written, got .* for .*\. Choose another"
    (tmp_path / "file").touch()
    (tmp_path / "valkey").touch()
    for store in (tmp_path / "file", tmp_path):
        with pytest.raises(ValueError, match=words):
            ensure_valkey(store)

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)  # to mount such a disk takes rights
    with pytest.raises(ValueError, match=words):
        ensure_valkey(tmp_path / "disk")


def test_what_may_not_be_read_elsewhere_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    def plan(folder: Path, ports: list[int]) -> Launch:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/opt/server")

    server = Server(name="Elsewhere", port_field="port", num_ports=1, plan=plan,
                    is_ready=lambda folder, ports: True, grace_s=1.0, deadline_s=1.0)  # fmt: skip
    with pytest.raises(PermissionError, match="Permission denied: '/opt/server'"):
        ensure_running(server, tmp_path)


def test_a_folder_of_another_user_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """It was "Permission denied: '.../server.json'"."""
    user, folder = os.geteuid(), tmp_path / "store"
    folder.mkdir(mode=0o500)
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(
            ValueError, match=r"store/valkey must belong to the user .* Permission denied for "
        ):
            ensure_valkey(folder)
    finally:
        os.seteuid(user)


def test_a_killed_s3_owner_leaves_neither_process_nor_socket(tmp_path: Path) -> None:
    with owner(tmp_path, "time.sleep(60)", kind="s3") as child:
        answer(child)
        opened = sockets(tmp_path)
        assert len(opened) == 6
        child.kill()
        wait_until_gone(tmp_path)
    assert not [path for path in opened if path.exists()]


def test_the_next_start_removes_the_sockets_of_a_server_whose_guard_was_killed(tmp_path: Path) -> None:
    with owner(tmp_path, "time.sleep(60)", kind="s3") as child:
        answer(child)
        opened = sockets(tmp_path)
        os.kill(json.loads((tmp_path / "seaweedfs" / "server.json").read_text())["guard"], signal.SIGKILL)
        wait_until_gone(tmp_path)
        left = [path for path in opened if path.exists() and "-s3-grpc-" not in path.name]
    of_another = next(path for path in opened if "-s3-grpc-" in path.name)
    of_another.unlink()
    with socket.socket(socket.AF_UNIX) as server, owner(tmp_path, "time.sleep(60)", kind="s3") as child:
        server.bind(str(of_another))
        server.listen()
        answer(child)
        assert left and not {path for path in left if path.exists()} - set(sockets(tmp_path))
        assert of_another.exists()
    of_another.unlink()


def sockets(folder: Path) -> list[Path]:
    """What the folder's server has in /tmp: others' are there as well, on any port but with another name."""
    ports = json.loads((folder / "seaweedfs" / "server.json").read_text())["ports"]
    names = ("s3", "s3-grpc", "master", "master-grpc", "volume", "volume-grpc", "filer", "filer-grpc")
    paths = [Path(f"/tmp/seaweedfs-{name}-{port}.sock") for name, port in zip(names, ports, strict=True)]
    return [path for path in paths if path.exists()]
