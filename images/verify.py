"""Ends an image's build unless it is what it says: versions, one libnccl, a plugin that carries DeepEP.

python verify.py torch=2.12.1 nccl=2.31.2 --plugin /opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so

A build machine has no GPU and no EFA device, so this looks at files and at what ``ldd`` resolves; the
preflight looks at the running process.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

DISTRIBUTIONS = {"torch": "torch", "sglang": "sglang", "deep_ep": "deep_ep", "transformers": "transformers"}
GIN = "ncclGinPlugin_v1"
"""Prefix of the symbol (``_v13`` proxy, ``_v14`` device) without which NCCL's device API has no network."""


def problems(
    wanted: dict[str, str],
    *,
    found: dict[str, str],
    libraries: list[str],
    links: dict[str, str],
    symbols: str,
) -> list[str]:
    """What is wrong, in words; ``links`` is extension file -> output of ``ldd``."""
    wrong = [
        f"{name} must be {version}, got {found.get(name, 'none')}"
        for name, version in wanted.items()
        if found.get(name, "").split("+")[0] != version
    ]
    if len(libraries) != 1:
        wrong.append(f"exactly one libnccl must be installed, got {libraries or 'none'}; remove the others")
    for extension, text in links.items():
        wrong += [f"{extension}: {line.strip()}" for line in text.splitlines() if "not found" in line]
    if symbols and GIN not in symbols:
        wrong.append(f"the OFI plugin must export {GIN}*, got none: its version is below 1.21")
    return wrong


def installed(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        if name == "nccl":
            candidates = (f"nvidia-nccl-cu{major}" for major in (13, 12))
        else:
            candidates = iter((DISTRIBUTIONS[name],))
        for candidate in candidates:
            try:
                found[name] = importlib.metadata.version(candidate)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def libnccl_files(root: Path = Path("/")) -> list[str]:
    """Real files, links resolved, outside of kernel file systems."""
    skipped = {"proc", "sys", "dev"}
    tops = [path for path in root.iterdir() if path.is_dir() and path.name not in skipped]
    files = {
        p.resolve() for top in tops for p in top.rglob("libnccl.so*") if re.search(r"\.so(\.|$)", p.name)
    }
    return sorted(str(path) for path in files)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="+")
    parser.add_argument("--plugin", default="")
    parser.add_argument("--extension", action="append", default=[])
    options = parser.parse_args()
    wanted = dict(pair.split("=", 1) for pair in options.wanted)
    wrong = problems(
        wanted,
        found=installed(list(wanted)),
        libraries=libnccl_files(),
        links={path: _output("ldd", path) for path in options.extension},
        symbols=(_output("nm", "-D", options.plugin) or "the plugin is missing") if options.plugin else "",
    )
    if wrong:
        sys.exit("image refused:\n" + "\n".join(wrong))
    print(f"image verified: {wanted}")


if __name__ == "__main__":
    main()
