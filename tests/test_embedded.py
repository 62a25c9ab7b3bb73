"""Embedded servers: they live exactly as long as somebody uses them. Real processes, real signals.

Most tests use Valkey, which starts in 0.1 s; the code that is tested is the same for SeaweedFS.
What these tests cannot see: a power cut, a folder on a network file system, and macOS (they read /proc).
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.embedded import process
from tasks.embedded.guard import retire
from tasks.embedded.process import Launch, Server, ensure_running
from tasks.embedded.seaweed import ensure_s3
from tasks.embedded.valkey import ensure_valkey

ROOT = Path(__file__).resolve().parent.parent
OWNER = """
import os, sys, time
from pathlib import Path
from tasks.embedded.valkey import ensure_valkey
from tasks.embedded.seaweed import ensure_s3
print({"valkey": ensure_valkey, "s3": ensure_s3}[sys.argv[2]](Path(sys.argv[1])), flush=True)
"""


pytestmark = pytest.mark.usefixtures("leave_servers")


@contextlib.contextmanager
def owner(folder: Path, then: str, kind: str = "valkey") -> Iterator[subprocess.Popen[str]]:
    """A process that has the server and then does something; a group of its own, as at a terminal."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER + then, str(folder), kind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def processes_of(folder: Path) -> list[int]:
    """Every guard and server of the folder: they, and only they, work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


def server_of(folder: Path) -> int:
    """The server's own process: the guard's child."""
    guard = json.loads((folder / "server.json").read_text())["guard"]
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


def wait_until_gone(folder: Path, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while processes_of(folder):
        assert time.monotonic() < end, f"still running: {processes_of(folder)}"
        time.sleep(0.02)


def ping(url: str) -> bytes:
    password, _, address = url.removeprefix("valkey://:").removesuffix("/0").partition("@")
    with socket.create_connection(("127.0.0.1", int(address.split(":")[1])), timeout=5) as connection:
        connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
        received = b""
        while received.count(b"\r\n") < 2 and (more := connection.recv(64)):
            received += more
        return received


@pytest.mark.parametrize(
    ("then", "signal_number"),
    [
        ("", None),
        ("raise RuntimeError", None),
        ("os._exit(3)", None),
        ("time.sleep(60)", signal.SIGINT),
        ("time.sleep(60)", signal.SIGTERM),
        ("time.sleep(60)", signal.SIGKILL),
    ],
)
def test_no_server_remains_however_its_owner_ends(
    tmp_path: Path, then: str, signal_number: signal.Signals | None
) -> None:
    with owner(tmp_path, then) as child:
        assert answer(child).startswith("valkey://")
        if signal_number:
            assert processes_of(tmp_path)
            os.killpg(child.pid, signal_number)  # the whole foreground group, as Ctrl-C does
        child.wait(10)
        wait_until_gone(tmp_path)
    assert not (tmp_path / "valkey" / "server.json").exists()


def test_ctrl_c_during_the_start_leaves_no_server(tmp_path: Path) -> None:
    with owner(tmp_path, "", kind="s3") as child:
        end = time.monotonic() + 10
        while len(processes_of(tmp_path)) < 2:  # the server is being started, which takes 2 s
            assert time.monotonic() < end
            time.sleep(0.02)
        os.killpg(child.pid, signal.SIGINT)
        assert answer(child) == ""
        wait_until_gone(tmp_path)


def test_a_second_process_reuses_the_server_and_keeps_it_when_the_first_ends(tmp_path: Path) -> None:
    with owner(tmp_path, "time.sleep(60)") as first:
        url = answer(first)
        server = server_of(tmp_path / "valkey")
        with owner(tmp_path, "time.sleep(60)") as second:
            assert answer(second) == url
            first.kill()
            first.wait()
            time.sleep(0.3)
            assert server_of(tmp_path / "valkey") == server
            assert ping(url) == b"+OK\r\n+PONG\r\n"
        wait_until_gone(tmp_path)


def test_processes_that_start_at_once_share_one_server(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(owner(tmp_path, "time.sleep(60)")) for _ in range(4)]
        assert len({answer(child) for child in children}) == 1
        assert len(processes_of(tmp_path)) == 2  # one guard, one server


def test_a_url_works_although_other_users_come_and_go(tmp_path: Path) -> None:
    """Each user leaves at once, so that many joins meet a server that is being stopped."""
    problems = []

    def users(seed: int) -> None:
        delay = random.Random(seed)
        for _ in range(5):
            with owner(tmp_path, f"time.sleep({delay.uniform(0.0, 0.1)})") as child:
                url = answer(child)
                try:
                    if child.poll() is None and ping(url) != b"+OK\r\n+PONG\r\n" and child.poll() is None:
                        problems.append(url)
                except OSError as error:
                    if child.poll() is None:
                        problems.append(repr(error))

    threads = [threading.Thread(target=users, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    wait_until_gone(tmp_path)


class FakePoll:
    """Stands for the FIFO: whether a user holds it open when the guard looks."""

    def __init__(self, has_user: bool) -> None:
        self._has_user = has_user

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        return [] if self._has_user else [(0, 16)]  # 16 is POLLHUP


@pytest.mark.parametrize("joined", [True, False])
def test_a_user_who_joins_while_the_server_is_withdrawn_keeps_it(tmp_path: Path, joined: bool) -> None:
    discovery = tmp_path / "server.json"
    discovery.write_text("{}")
    is_retired = retire({"discovery": str(discovery)}, FakePoll(joined))  # type: ignore[arg-type]
    assert (is_retired, discovery.exists()) == (not joined, joined)


def test_a_user_who_finds_the_server_withdrawn_after_joining_leaves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other half of the handshake: the file was there, the FIFO opened, and then the file was gone."""
    os.mkfifo(tmp_path / "users.fifo")
    reader = os.open(tmp_path / "users.fifo", os.O_RDONLY | os.O_NONBLOCK)
    answers = [{"token": "t", "ports": [1]}, None]
    monkeypatch.setattr(process, "_discovery", lambda folder: answers.pop(0))
    monkeypatch.setattr(process, "is_held", lambda path: True)
    assert process._join(tmp_path) is None
    assert tmp_path not in process._memberships
    poll = select.poll()
    poll.register(reader, 0)
    assert poll.poll(0) == [(reader, select.POLLHUP)]  # no writer is left
    os.close(reader)


def test_a_forked_child_does_not_keep_its_parents_server(tmp_path: Path) -> None:
    with owner(tmp_path, "os.write(1, b'%d\\n' % os.fork()); time.sleep(60)") as child:
        answer(child)
        forked = max(int(answer(child)), int(answer(child)))  # both print; the child prints 0
        child.kill()
        wait_until_gone(tmp_path)
        os.kill(forked, signal.SIGKILL)  # raises if it had ended before


def test_a_killed_guard_takes_the_server_with_it(tmp_path: Path) -> None:
    with owner(tmp_path, "time.sleep(60)") as child:
        answer(child)
        os.kill(json.loads((tmp_path / "valkey" / "server.json").read_text())["guard"], signal.SIGKILL)
        wait_until_gone(tmp_path)


def test_a_crashed_server_is_started_again_on_its_port_with_its_data(tmp_path: Path) -> None:
    import valkey

    url = ensure_valkey(tmp_path)
    valkey.from_url(url).set("kept", "yes")
    server = server_of(tmp_path / "valkey")
    os.kill(server, signal.SIGKILL)
    while Path(f"/proc/{server}").exists():  # until then the kernel still accepts connections for it
        time.sleep(0.01)
    assert ensure_valkey(tmp_path) == url
    assert valkey.from_url(url).get("kept") == b"yes"


def test_a_start_waits_for_the_previous_server_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "valkey"
    with owner(tmp_path, "time.sleep(60)") as first:
        answer(first)
        old = server_of(folder)
        os.kill(old, signal.SIGSTOP)  # it cannot end yet
        first.kill()
        first.wait()
        with owner(tmp_path, "time.sleep(60)") as second:
            time.sleep(1.0)
            assert server_pids(folder) == [old]
            assert len(processes_of(folder)) == 2  # it and its guard
            os.kill(old, signal.SIGCONT)
            assert ping(answer(second)) == b"+OK\r\n+PONG\r\n"
            assert server_of(folder) != old


def server_pids(folder: Path) -> list[int]:
    return [
        pid for pid in processes_of(folder) if Path(f"/proc/{pid}/exe").readlink().name == "valkey-server"
    ]


def test_a_stale_discovery_file_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "valkey"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as foreign:  # answers on the port that the file names
        port = foreign.getsockname()[1]
        record = {"token": "stale", "ports": [port], "guard": 1, "started": 0.0}
        (folder / "server.json").write_text(json.dumps(record))
        url = ensure_valkey(tmp_path)
        assert f":{port}/" not in url
        assert ping(url) == b"+OK\r\n+PONG\r\n"


def test_a_fixed_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        with pytest.raises(ValueError, match=f"checkpoint.port {port} is in use by another process"):
            ensure_s3(tmp_path, port=port)
    assert not processes_of(tmp_path)
    assert not (tmp_path / "seaweedfs" / "server.log").exists()


def test_a_fixed_port_is_used_and_another_one_is_refused_while_the_server_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert f":{port}/" in ensure_valkey(tmp_path, port=port)
    with pytest.raises(ValueError, match=rf"buffer\.port must be the port .* got {port + 1}, runs on {port}"):
        ensure_valkey(tmp_path, port=port + 1)


@pytest.mark.parametrize(
    ("script", "got"),
    [("echo out of luck; exit 3", "it ended"), ("echo out of luck; sleep 60", "no answer")],
)
def test_a_server_that_does_not_come_up_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, script: str, got: str
) -> None:
    server = Server(
        name="Broken",
        port_field="broken.port",
        num_ports=1,
        plan=lambda folder, ports: Launch(argv=["sh", "-c", script, str(folder)]),
        is_ready=lambda folder, ports: False,
        grace_s=1.0,
        deadline_s=0.5,
    )
    with pytest.raises(RuntimeError, match=rf"(?s)Broken in .* got: {got}.*out of luck"):
        ensure_running(server, tmp_path)
    wait_until_gone(tmp_path)


def test_finding_a_running_server_takes_under_five_milliseconds(tmp_path: Path) -> None:
    ensure_valkey(tmp_path)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        ensure_valkey(tmp_path)
        seconds.append(time.perf_counter() - begin)
    assert sorted(seconds)[10] < 0.005, seconds  # 0.2 ms measured on two idle cores
