"""Runs the campaign as a user does, in a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
PYFLYTE = str(Path(sys.executable).parent / "pyflyte")

SMALL = {
    "name": "small",
    "warm_start": {"steps": 8},
    "model": {
        "random": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "expert_width": 32}
    },
    "rollout": {
        "workers": 2,
        "prompts_per_iteration": 48,
        "groups_per_portion": 12,
        "max_portions_per_worker": 2,
        "lease_seconds": 2.0,
    },
    "algorithm": {"num_minibatches": 4},
    "schedule": {"iterations": 3, "segment_iterations": 2, "evaluate_every": 2},
}
"""A whole campaign in half a minute: every stage, two segments, nothing learned."""


@dataclass(frozen=True)
class Finished:
    output: str
    store: Path

    @property
    def folder(self) -> Path:
        """Where report and metrics of the newest lineage lie."""
        return max(path for path in self.store.iterdir() if re.fullmatch(r".+\.\d{4}", path.name))

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def digests(self) -> list[str]:
        return [line["tensor_digest"] for line in self.metrics()]


def write_config(folder: Path, config: dict) -> Path:
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(folder: Path, config: dict, *arguments: str) -> list[str]:
    """Runs the campaign with its store in ``folder``/store."""
    return [
        PYFLYTE,
        "run",
        str(ROOT / "workflows/campaign.py"),
        "campaign",
        "--config",
        str(write_config(folder, config)),
        "--store",
        str(folder / "store"),
        *arguments,
    ]


def start(folder: Path, config: dict, *arguments: str) -> subprocess.Popen:
    """In a session of its own."""
    log = (folder / "log").open("a")
    return subprocess.Popen(
        command(folder, config, *arguments),
        cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def run(folder: Path, config: dict, *arguments: str, timeout: float = 600) -> Finished:
    """Run the campaign to its end; its whole output so far is in the result."""
    process = start(folder, config, *arguments)
    try:
        code = process.wait(timeout)
    finally:
        stop(process)
    output = (folder / "log").read_text()
    assert code == 0, output[-5000:]
    return Finished(output, folder / "store")


def refused(folder: Path, config: dict, *arguments: str, codes: tuple[int, ...] = (1, 2)) -> str:
    """What the command says, on one line, before it ends with one of ``codes``; in this process, which has
    imported all it needs."""
    from flytekit.clis.sdk_in_container import pyflyte
    from flytekit.loggers import logger

    level, wide = logger.level, CliRunner(env={"COLUMNS": "1000"})  # errors come in a box of that width
    try:
        with contextlib.chdir(folder):
            ended = wide.invoke(pyflyte.main, command(folder, config, *arguments)[1:])
    finally:
        logger.setLevel(level)
    assert ended.exit_code in codes, ended.output
    return " ".join(ended.output.split())


def wait_for(folder: Path, pattern: str, process: subprocess.Popen, *, timeout: float = 200) -> None:
    """Until the log matches; fails if the process ends first."""
    deadline = time.monotonic() + timeout
    while not re.search(pattern, (folder / "log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        time.sleep(0.05)


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def servers_of(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and "pytest" not in line:
                found.append(line)
    return found
