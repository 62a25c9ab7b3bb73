"""Libraries of a run: what follows from recorded facts, and that a run ends where they are not as asked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.policy.libraries import (
    Facts,
    mapped_libraries,
    nccl_warnings,
    network,
    problems,
    read_facts,
    record_nccl_log,
    report,
    require,
    version_tuple,
)
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.training.means import open_dispatcher
from tasks.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SITE = "/opt/venv/lib/python3.12/site-packages"
NCCL, DEEP_EP = f"{SITE}/nvidia/nccl/lib/libnccl.so.2", f"{SITE}/deep_ep/_C.cpython-312-x86_64-linux-gnu.so"

NVSHMEM = f"{SITE}/nvidia/nvshmem/lib/libnvshmem_host.so.3"


def maps(*paths: str) -> str:
    """Each file twice, as code and data are mapped apart, among lines without a file."""
    lines = [f"7f00-7f{i:02x} r-xp 00000000 fe:00 {i}    {path}" for i, path in enumerate(paths + paths)]
    return "\n".join(["7ffd-7ffe rw-p 00000000 00:00 0", *lines, "7fff-8000 r-xp 00000000 00:00 0  [vdso]"])


EFA_LOG = """\
ip-10-0-0-1:77:77 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.21.1
ip-10-0-0-1:77:77 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
ip-10-0-0-1:77:77 [0] NCCL INFO Using network Libfabric
"""
SOCKET_LOG = """\
ip-10-0-0-1:77:77 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net-ofi.so
ip-10-0-0-1:77:77 [0] NCCL INFO NET/IB : No device found.
ip-10-0-0-1:77:77 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
ip-10-0-0-1:77:77 [0] NCCL INFO Using network Socket
"""
GOOD = Facts(
    maps=maps(NCCL, DEEP_EP, NVSHMEM, "/opt/amazon/efa/lib/libfabric.so.1"),
    versions={"torch": "2.12.1", "deep_ep": "2.1.0", "nccl": "2.31.2"},
    deep_ep_file=f"{SITE}/deep_ep/__init__.py",
    deep_ep_names=("ElasticBuffer", "Buffer"),
    nccl_log=EFA_LOG,
    num_gpus=8,
    fabric_devices={f"rdmap{i}s0": "0x1d0f" for i in range(16)} | {"ibp0": "0x15b3"},
)  # fmt: skip
ALL = {"dispatcher": "deepep", "network": "efa"}


def test_what_is_as_asked_is_reported_in_one_line():
    assert problems(GOOD, **ALL) == []
    text = require(GOOD, **ALL).text()
    assert text.startswith(
        "network OFI efa (efa-direct), 16 devices; 8 GPUs, 16 EFA devices; torch 2.12.1, deep_ep 2.1.0, "
        f"nccl 2.31.2; loaded: nccl {NCCL}, nvshmem {NVSHMEM}, libfabric /opt/amazon/efa/"
    )
    assert "\n" not in text and text.endswith(f"deep_ep {DEEP_EP}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"maps": GOOD.maps + "\n" + maps("/usr/lib/libnccl.so.2")}, "one libnccl must be mapped, got 2: "),
        ({"nccl_log": SOCKET_LOG}, "network 'efa' must be what NCCL sends through, got 'Socket'"),
        ({"nccl_log": EFA_LOG.replace("Libfabric", "Socket")}, "NCCL sends through, got 'Socket'"),
        ({"nccl_log": EFA_LOG.replace("is efa,", "is tcp,")}, "got 'OFI tcp (efa-direct), 16 devices'"),
        ({"nccl_log": ""}, "NCCL sends through, got 'unknown'"),
        ({"fabric_devices": {"ibp0": "0x15b3"}}, "must find EFA devices, got none"),
        ({"deep_ep_file": ""}, "must find deep_ep imported, got none"),
        ({"deep_ep_names": ("Buffer",)}, "deep_ep must have ElasticBuffer, got "),
        ({"maps": maps(NCCL)}, "must map its own extension and no other, got none"),
        ({"maps": maps(NCCL, "/x/uccl/deep_ep/_C.so")}, "and no other, got /x/uccl/deep_ep/_C.so"),
        ({"maps": maps(NCCL, DEEP_EP, "/x/deep_ep_cpp.so")}, "must map its own extension and no other"),
        ({"versions": {"nccl": "2.28.9"}}, "NCCL 2.30.4 or newer, got 2.28.9"),
        ({"versions": {}}, "NCCL 2.30.4 or newer, got none"),
    ],
)
def test_what_is_not_as_asked_ends_the_run_and_is_named(changes, words):
    facts = replace(GOOD, **changes)
    found = problems(facts, **ALL)
    assert len(found) == 1 and words in found[0], found
    with pytest.raises(RuntimeError, match="the libraries of this run are not what it asks for: "):
        require(facts, **ALL)


def test_what_is_not_asked_for_is_no_problem():
    bare = Facts(nccl_log=SOCKET_LOG)
    assert problems(bare, dispatcher="all_to_all") == [] and network(SOCKET_LOG) == "Socket"
    old = replace(GOOD, versions={"nccl": "2.28.9"}, deep_ep_names=("Buffer",))
    assert problems(old, dispatcher="deepep", api="legacy") == []
    version_1 = replace(old, maps=maps(NCCL, f"{SITE}/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"))
    assert problems(version_1, dispatcher="deepep", api="legacy") == []
    assert len(problems(replace(GOOD, fabric_devices={}, nccl_log=""), **ALL)) == 2


def test_versions_compare_by_number():
    assert version_tuple("2.31.2+cuda13.0") == (2, 31, 2) > version_tuple("2.4.10")


def test_this_process_maps_no_nccl_and_its_log_is_read_where_the_environment_says(tmp_path, monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # so that it is put back, also where it was not set
        monkeypatch.delenv(name)
    assert read_facts().nccl_log == ""
    record_nccl_log(tmp_path, is_needed=False)
    assert os.environ["NCCL_DEBUG"] == "INFO" and os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    (tmp_path / f"nccl.{os.uname().nodename}.{os.getpid()}.log").write_text(
        EFA_LOG + "h:1:1 [0] NCCL WARN Call failed\n"
    )
    assert nccl_warnings() == ["h:1:1 [0] NCCL WARN Call failed"]
    facts = read_facts()
    assert report(facts).network == "OFI efa (efa-direct), 16 devices"
    assert "torch" in facts.versions and mapped_libraries(facts.maps).get("nccl", []) == []
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/elsewhere/%h")
    record_nccl_log(tmp_path, is_needed=False)  # whoever runs it has a log of his own
    assert os.environ["NCCL_DEBUG"] == "WARN"
    record_nccl_log(tmp_path, is_needed=True)
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"]) == ("INFO", "/elsewhere/%h")


def test_a_training_says_what_it_uses_and_ends_where_that_is_not_what_was_asked(tmp_path):
    mesh = make_mesh(1, 1)
    train = TrainConfig.model_construct(world_size=1, ep=1, dispatcher="local")
    dispatcher, means = open_dispatcher(train, mesh, tmp_path)
    assert means["dispatcher"] == dispatcher.describe() == "local, 1 rank"
    kinds = ("logprob", "experts", "norms", "loss", "rotary", "optimizer")
    assert means["kernels"] == ", ".join(f"{kind} torch" for kind in kinds)
    assert means["libraries"] == report(read_facts()).text()
    with pytest.raises(RuntimeError, match="network 'efa' must be what NCCL sends through, got 'unknown'"):
        open_dispatcher(train.model_copy(update={"network": "efa"}), mesh, tmp_path)


def test_the_command_prints_the_report_and_exits_1_where_something_is_not_as_asked():
    command = [sys.executable, "-m", "tasks.policy.libraries", "--network", "efa"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and result.stdout.startswith("network unknown; 0 GPUs")
    assert "problem: network 'efa' must be what NCCL sends through, got 'unknown'" in result.stderr
