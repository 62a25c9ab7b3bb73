"""Which communication libraries this process runs with, so that a wrong one cannot pass unnoticed.

    python -m tasks.policy.libraries --dispatcher deepep --network efa

NCCL falls back from EFA to sockets without a word, a second libnccl may be mapped beside torch's, and several
packages call themselves ``deep_ep``. What is read (``read_facts``) is kept apart from what is concluded from
it (``report``, ``problems``), so that facts recorded on one machine can be judged on another.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LIBRARIES = {
    "nccl": r"libnccl\.so",
    "nccl network plugin": r"libnccl-(net|ofi)|libnccl-net-ofi",
    "nvshmem": r"libnvshmem_host\.so",
    "libfabric": r"libfabric\.so",
    "cuda runtime": r"libcudart\.so",
    "deep_ep": r"deep_ep[^/]*/[^/]*_C[^/]*\.so|deep_ep_cpp[^/]*\.so",
}
"""Name -> what the file of a mapped library looks like."""
PACKAGES = ("torch", "transformers", "deep_ep", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nvshmem-cu13")
ELASTIC_NCCL = (2, 30, 4)
"""Oldest NCCL with the device interface that DeepEP's version 2 is built on."""
EFA_VENDOR = "0x1d0f"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What was read off one process and its machine."""

    maps: str = ""
    """``/proc/self/maps``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, as installed; ``nccl`` is what the loaded library says of itself."""
    deep_ep_file: str = ""
    """Where ``deep_ep`` was imported from; empty if it was not."""
    deep_ep_names: tuple[str, ...] = ()
    nccl_log: str = ""
    num_gpus: int = 0
    fabric_devices: Mapping[str, str] = field(default_factory=dict)
    """Device under ``/sys/class/infiniband`` -> PCI vendor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What follows from the facts."""

    loaded: Mapping[str, Sequence[str]]
    """Library -> paths that are mapped; more than one is two copies of it."""
    versions: Mapping[str, str]
    network: str
    """What NCCL says it sends through, such as ``OFI efa (efa-direct), 16 devices``, or ``unknown``."""
    num_gpus: int
    num_efa_devices: int

    def text(self) -> str:
        """One line for the log of a run."""
        paths = [f"{name} {' AND '.join(paths)}" for name, paths in self.loaded.items()]
        versions = [f"{name} {version}" for name, version in self.versions.items()]
        devices = f"{self.num_gpus} GPUs, {self.num_efa_devices} EFA devices"
        return (
            f"network {self.network}; {devices}; {', '.join(versions)}; loaded: {', '.join(paths) or 'none'}"
        )


def mapped_libraries(maps: str) -> dict[str, list[str]]:
    """Library -> distinct files mapped into the process."""
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    found: dict[str, list[str]] = {}
    for name, pattern in LIBRARIES.items():
        if paths := sorted(path for path in files if re.search(pattern, path)):
            found[name] = paths
    return found


def network(nccl_log: str) -> str:
    """The network that NCCL chose, from its INFO log; a plugin's own words count before NCCL's."""
    if chosen := re.search(r"NET/OFI Selected provider is (\w[\w;.-]*)(?:, fabric is ([\w.-]+))?", nccl_log):
        devices = re.search(r"NET/OFI .*found (\d+) nics", nccl_log)
        fabric = f" ({chosen[2]})" if chosen[2] else ""
        if not re.search(r"Using network (?:Socket|IB)\b", nccl_log):
            return f"OFI {chosen[1]}{fabric}, {devices[1] if devices else 'unknown'} devices"
    if used := re.search(r"Using network (.+)", nccl_log):
        return used[1].strip()
    return "unknown"


def report(facts: Facts) -> Report:
    return Report(
        loaded=mapped_libraries(facts.maps),
        versions=dict(facts.versions),
        network=network(facts.nccl_log),
        num_gpus=facts.num_gpus,
        num_efa_devices=sum(vendor == EFA_VENDOR for vendor in facts.fabric_devices.values()),
    )


def problems(facts: Facts, *, dispatcher: str, api: str = "elastic", network: str = "any") -> list[str]:
    """What is not as the configuration asks: each with what must hold, what was found and what to do."""
    seen, found = report(facts), []
    copies = seen.loaded.get("nccl", ())
    if len(copies) > 1:
        found.append(
            f"one libnccl must be mapped, got {len(copies)}: {', '.join(copies)}. Remove the one that torch "
            "was not linked with, or install both uses from one package."
        )
    if dispatcher == "deepep":
        found += _deepep_problems(facts, seen, api)
    if network == "efa":
        if not seen.network.startswith("OFI efa"):
            found.append(
                f"network 'efa' must be what NCCL sends through, got {seen.network!r}. Check that "
                "NCCL_NET_PLUGIN=ofi finds libnccl-net-ofi.so and that the pod asks for EFA devices."
            )
        if not seen.num_efa_devices:
            found.append("network 'efa' must find EFA devices, got none. Ask for them in the pod template.")
    return found


def _deepep_problems(facts: Facts, seen: Report, api: str) -> list[str]:
    wanted = {"elastic": "ElasticBuffer", "legacy": "Buffer"}[api]
    if not facts.deep_ep_file:
        return ["dispatcher 'deepep' must find deep_ep imported, got none. Use an image that has it."]
    found = []
    folder = Path(facts.deep_ep_file).parent
    mapped = seen.loaded.get("deep_ep", ())
    if wanted not in facts.deep_ep_names:
        found.append(
            f"deep_ep must have {wanted}, got {facts.deep_ep_file} without it: a foreign package of that "
            "name, or another version. Install DeepEP, or set deepep.api."
        )
    if len(mapped) != 1 or Path(mapped[0]).parent not in (folder, folder.parent):
        found.append(
            f"deep_ep at {folder} must map its own extension and no other, got "
            f"{', '.join(mapped) or 'none'}. Keep one package of that name on the path."
        )
    version = version_tuple(facts.versions.get("nccl", ""))
    if api == "elastic" and version < ELASTIC_NCCL:
        found.append(
            f"deepep.api 'elastic' must find NCCL {'.'.join(map(str, ELASTIC_NCCL))} or newer, got "
            f"{facts.versions.get('nccl', 'none')}. Replace nvidia-nccl, or set deepep.api to 'legacy'."
        )
    return found


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def require(facts: Facts, *, dispatcher: str, api: str = "elastic", network: str = "any") -> Report:
    """The report, or an error that names everything that is not as asked."""
    if found := problems(facts, dispatcher=dispatcher, api=api, network=network):
        raise RuntimeError("the libraries of this run are not what it asks for: " + " ".join(found))
    return report(facts)


def record_nccl_log(folder: Path, *, is_needed: bool) -> None:
    """Have NCCL write what it chooses to a file, before the process group is made.

    Where the environment asks for another log already, only if ``is_needed``: the file then takes what would
    have gone to the output (see ``nccl_warnings``). A file that the environment names is kept.
    """
    if "NCCL_DEBUG" in os.environ and not is_needed:
        return
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / "nccl.%h.%p.log"))


def nccl_warnings() -> list[str]:
    """What a failed run must still say of the log that was kept from its output."""
    return [line for line in _nccl_log().splitlines() if "NCCL WARN" in line]


def read_facts() -> Facts:
    """Off this process, as it is now: libraries that are loaded later do not show."""
    module: Any = sys.modules.get("deep_ep")
    return Facts(
        maps=Path("/proc/self/maps").read_text(),
        versions=_installed_versions(module),
        deep_ep_file=getattr(module, "__file__", None) or "",
        deep_ep_names=tuple(name for name in ("ElasticBuffer", "Buffer") if hasattr(module, name)),
        nccl_log=_nccl_log(),
        num_gpus=_num_gpus(),
        fabric_devices={
            device.name: (device / "device/vendor").read_text().strip()
            for device in Path("/sys/class/infiniband").glob("*")
            if (device / "device/vendor").exists()
        },
    )


def _installed_versions(deep_ep: Any) -> dict[str, str]:
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if version := getattr(deep_ep, "__version__", None):
        versions["deep_ep"] = str(version)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for path in mapped_libraries(Path("/proc/self/maps").read_text()).get("nccl", [])[:1]:
        number = ctypes.c_int()  # torch.cuda.nccl.version() is that of its headers
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            versions["nccl"] = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return versions


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _nccl_log() -> str:
    name = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", socket.gethostname())
    log = Path(name.replace("%p", str(os.getpid())))
    return log.read_text(errors="replace") if log.is_file() else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dispatcher", choices=["local", "all_to_all", "deepep", "nvlink"], default="all_to_all"
    )
    parser.add_argument("--api", choices=["elastic", "legacy"], default="elastic")
    parser.add_argument("--network", choices=["any", "efa"], default="any")
    parser.add_argument("--facts", action="store_true", help="print what was read, to be judged elsewhere")
    options = parser.parse_args(arguments)
    importlib.import_module("torch")
    if options.dispatcher == "deepep":
        importlib.import_module("deep_ep")
    facts = read_facts()
    if options.facts:
        print(asdict(facts))
        return 0
    print(report(facts).text())
    found = problems(facts, dispatcher=options.dispatcher, api=options.api, network=options.network)
    for problem in found:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
