"""A server process that lives exactly as long as somebody uses it, shared by every process of this machine.

``ensure_running`` finds the server of a folder, or starts it, and makes the calling process one of its users.
When the last user has ended, by return, exception, signal or SIGKILL, the server is stopped (see
``guard.py``). A second campaign on the same folder is simply one more user: it keeps the server when the
first one ends. A server that crashed is started again by the next call, on the port it had if that is still
free.

Files in the folder:
    server.json   discovery: the ports, a token, what the server leaves behind when killed; written when the
                  server answers, withdrawn before it stops
    start.lock    held while one process looks for the server or starts it
    alive.lock    held by the guard and the server, whoever lives longer; a stale server.json has no holder
    users.fifo    each user holds it open for writing; "no writer left" stops the server
    last_port     the public port of the last start, preferred by the next one
    server.log    output of the server; server.log.1 is the previous start's

A forked child is not a user until it calls ``ensure_running`` itself. All of it works on one machine: the
folder must be on a file system with FIFOs and ``flock``.
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.embedded.files import POLL_S, exclusive, is_held, write_private
from tasks.embedded.ports import HOST, accepts, answers, free_ports, is_free

GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of a server on given ports."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    """Files that the server leaves behind when killed; the guard removes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A kind of server: how to start it in a folder, and how to know that it answers."""

    name: str
    port_field: str
    """The configuration field that fixes the port; named in errors."""
    num_ports: int
    """The first port is the public one; the others are chosen."""
    plan: Callable[[Path, list[int]], Launch]
    is_ready: Callable[[Path, list[int]], bool]
    grace_s: float
    """Time from SIGTERM to SIGKILL."""
    deadline_s: float = 120.0
    """For a hang: a server that ends is noticed at once, and on a busy machine one may need a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Membership:
    token: str
    fifo: int


_memberships: dict[Path, _Membership] = {}
_guards: list[subprocess.Popen[bytes]] = []  # kept, so that ended guards are reaped without a ResourceWarning
_mutex = threading.Lock()


def _forget_after_fork() -> None:
    """A fork must not keep its parent's server alive, nor deadlock on a lock another thread held."""
    global _mutex
    _mutex = threading.Lock()
    for membership in _memberships.values():
        os.close(membership.fifo)
    _memberships.clear()
    _guards.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def ensure_running(server: Server, folder: Path, *, port: int = 0) -> list[int]:
    """Ports of the running server of ``folder``; starts it if needed. About 0.2 ms when it runs already."""
    try:
        ports = _join(folder)
        if ports is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users of the machine stay out
            with exclusive(folder / "start.lock", deadline_s=2 * server.deadline_s):
                ports = _wait_for_join(server, folder)
                if ports is None:
                    ports = _start(server, folder, port)
    except OSError as error:
        where = Path(str(error.filename))
        if folder not in (where, *where.parents) and where not in folder.parents:
            raise  # the server's program, for one
        if error.errno in (errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ValueError(
                f"{folder} must be a folder on a disk that can be written, got {error.strerror} for "
                f"{error.filename}. Choose another (checkpoint.store)."
            ) from error
        if not isinstance(error, PermissionError):
            raise
        raise ValueError(
            f"{folder} must belong to the user that runs this, {os.geteuid()}, who must write into it, got "
            f"{error.strerror} for {error.filename}. An embedded server is one user's: choose a folder of "
            "your own (checkpoint.store), or share an S3 service."
        ) from error
    if port not in (0, ports[0]):
        raise ValueError(
            f"{server.port_field} must be the port of the server that already runs in {folder}, got {port}, "
            f"runs on {ports[0]}. Set {server.port_field} to 0 or {ports[0]}, or wait until its users "
            "have ended."
        )
    return ports


def leave(folder: Path, *, deadline_s: float) -> None:
    """Stop being a user of the folder's server, and wait until it has ended, unless it has other users."""
    with _mutex:
        membership = _memberships.pop(folder, None)
    if membership is None:
        return
    os.close(membership.fifo)
    end = time.monotonic() + deadline_s
    while is_held(folder / "alive.lock") and time.monotonic() < end:
        time.sleep(POLL_S)


def _join(folder: Path) -> list[int] | None:
    """Become a user of the running server; None if there is none, or it is on its way down."""
    found = _discovery(folder)
    if found is None or not is_held(folder / "alive.lock"):
        return None
    with _mutex:
        held = _memberships.get(folder)
        if held is None or held.token != found["token"]:
            try:
                fifo = os.open(folder / "users.fifo", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in (errno.ENXIO, errno.ENOENT):  # no reader: the guard has ended
                    return None
                raise
            again = _discovery(folder)  # order matters: open the FIFO, then read; see guard.retire
            if again is None or again["token"] != found["token"]:
                os.close(fifo)
                return None
            _admit(folder, _Membership(token=found["token"], fifo=fifo))
    return found["ports"] if accepts(found["ports"][0]) else None


def _admit(folder: Path, membership: _Membership) -> None:
    previous = _memberships.pop(folder, None)
    if previous is not None:
        os.close(previous.fifo)
    _memberships[folder] = membership


def _wait_for_join(server: Server, folder: Path) -> list[int] | None:
    """Join, or wait for a server that is going down to be gone (then None: the caller starts one)."""
    end = time.monotonic() + server.deadline_s
    while time.monotonic() < end:
        ports = _join(folder)
        if ports is not None or not is_held(folder / "alive.lock"):
            return ports
        time.sleep(POLL_S)
    raise RuntimeError(
        f"{server.name} in {folder} must answer or end within {server.deadline_s:.0f} s, got neither. "
        f"Another machine or a hung process holds {folder / 'alive.lock'}: `fuser "
        f"{folder / 'alive.lock'}` names it."
    )


def _start(server: Server, folder: Path, port: int) -> list[int]:
    _remove_what_a_killed_guard_left(folder)
    ports = _choose_ports(server, folder, port)
    launch = server.plan(folder, ports)
    log = folder / "server.log"
    if log.exists():
        log.replace(folder / "server.log.1")
    fifo = _start_guard(server, folder, launch)
    try:
        _wait_until_ready(server, folder, ports)
        token = uuid.uuid4().hex
        record = {
            "token": token,
            "ports": ports,
            "guard": _guards[-1].pid,
            "started": time.time(),
            "leftovers": launch.leftovers,
        }
        write_private(folder / "server.json", json.dumps(record))
        write_private(folder / "last_port", str(ports[0]))
    except BaseException:  # Ctrl-C as well: the guard then stops the server
        os.close(fifo)
        raise
    with _mutex:
        _admit(folder, _Membership(token=token, fifo=fifo))
    return ports


def _remove_what_a_killed_guard_left(folder: Path) -> None:
    """Only a guard that was killed has not withdrawn its discovery file, nor removed what that names. By now
    another server may have a port of its, and the socket of the same name."""
    for path in (_discovery(folder) or {}).get("leftovers", []):
        if not answers(path):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _start_guard(server: Server, folder: Path, launch: Launch) -> int:
    """Start the guard, which starts the server; returns this process's writing end of the FIFO."""
    path = folder / "users.fifo"
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    spec = {
        "argv": launch.argv,
        "env": {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), **launch.env},
        "cwd": str(folder),
        "lock": str(folder / "alive.lock"),
        "discovery": str(folder / "server.json"),
        "leftovers": launch.leftovers,
        "grace_s": server.grace_s,
    }
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(reader, "rb") as stdin, (folder / "server.log").open("ab") as log:
        _guards[:] = [guard for guard in _guards if guard.poll() is None]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), json.dumps(spec)],
            stdin=stdin,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    _guards.append(guard)
    return writer


def _wait_until_ready(server: Server, folder: Path, ports: list[int]) -> None:
    end = time.monotonic() + server.deadline_s
    while not server.is_ready(folder, ports):
        ended = _guards[-1].poll() is not None
        if ended or time.monotonic() > end:
            log = folder / "server.log"
            lines = log.read_text(errors="replace").splitlines()[-15:]
            got = "it ended" if ended else "no answer"
            raise RuntimeError(
                f"{server.name} in {folder} must answer on {HOST}:{ports[0]} within "
                f"{server.deadline_s:.0f} s, got: {got}. Last lines of {log}:\n" + "\n".join(lines)
            )
        time.sleep(POLL_S)


def _choose_ports(server: Server, folder: Path, port: int) -> list[int]:
    if port and not is_free(port):
        raise ValueError(
            f"{server.port_field} {port} is in use by another process; the embedded {server.name} in "
            f"{folder} must have a free port. Set {server.port_field} to 0 (any free port), or end the "
            f"process that `ss -ltnp 'sport = :{port}'` names."
        )
    wanted = port or _last_port(folder)
    return free_ports(server.num_ports, preferred=[wanted] if wanted else [])


def _last_port(folder: Path) -> int:
    """A preference; 0 if there is none, or none that can be read: a lost power leaves empty files."""
    try:
        last = int((folder / "last_port").read_text())
    except (FileNotFoundError, ValueError):
        return 0
    return last if 0 < last < 1 << 16 else 0


def _discovery(folder: Path) -> dict | None:
    """None without a file, and with one that says nothing: whoever starts a server replaces it."""
    try:
        found = json.loads((folder / "server.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and {"token", "ports"} <= found.keys() else None
