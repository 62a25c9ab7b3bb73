"""A standing pool of real processes that a test kills and replaces while a campaign runs."""

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from campaigns import ROOT, start, stop, write_config

COUNTED_WORKER = Path(__file__).parent / "counted_worker.py"


@dataclass
class Pool:
    """``size`` workers; ``share_killed`` and ``share_terminated`` of those started so far end by signal.

    Signals come at random times while an iteration is being sampled.
    """

    folder: Path
    config: dict
    size: int
    share_killed: float = 0.0
    share_terminated: float = 0.0
    seed: int = 0
    name: str = "w"
    seconds_between: float = 1.0
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    started: int = 0
    exit_codes: list[int] = field(default_factory=list)
    is_over: Callable[[], bool] = lambda: False
    """Ends campaign and workers by SIGKILL once it is true."""

    def start_worker(self) -> None:
        name = f"{self.name}{self.started}"
        path = write_config(self.folder, self.config)
        command = [
            sys.executable, str(COUNTED_WORKER), str(self.folder / f"{name}.tokens"), "--config", str(path),
            "--store", str(self.folder / "store"), "--worker", name,
        ]  # fmt: skip
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        log = (self.folder / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started += 1

    def replace_the_ended(self) -> None:
        for name, process in list(self.processes.items()):
            if (code := process.poll()) is not None:
                self.exit_codes.append(code)
                del self.processes[name]
        while len(self.processes) < self.size:
            self.start_worker()

    def busy(self) -> list[str]:
        """Workers that sampled before: killing one that still imports its libraries proves nothing."""
        said = {name: (self.folder / f"{name}.log").read_text() for name in self.processes}
        return [name for name, text in said.items() if "loaded v" in text]

    def is_generating(self) -> bool:
        """Whether the campaign's newest line offers prompts: signals at other times prove less."""
        log = (self.folder / "log").read_text()
        lines = [line for line in log.splitlines() if line.startswith("iter")]
        return bool(lines) and " prompts " in lines[-1]

    def strike(self, rng: random.Random) -> bool:
        """One signal to a random worker in the middle of a chunk, while fewer than the shares of all attempts
        got one; whether it was sent."""
        struck = {*self.killed, *self.terminated}
        before = self.counts()
        time.sleep(0.03)  # about two decoding steps
        targets = [
            name for name in self.busy() if name not in struck and self.counts()[name] > before.get(name, 0)
        ]
        due = [
            (self.killed, signal.SIGKILL, self.share_killed),
            (self.terminated, signal.SIGTERM, self.share_terminated),
        ]
        behind = [entry for entry in due if len(entry[0]) < entry[2] * self.started]
        if targets and behind and self.is_generating():
            names, number, _ = rng.choice(behind)
            name = rng.choice(targets)
            os.kill(self.processes[name].pid, number)
            names.append(name)
            return True
        return False

    def run_campaign(self, *arguments: str, timeout: float = 900) -> float:
        """Run the campaign beside the pool; seconds from its start to its end."""
        rng, begin = random.Random(self.seed), time.monotonic()
        campaign = start(self.folder, self.config, *arguments)
        struck = time.monotonic()
        try:
            while campaign.poll() is None and not self.is_over():
                assert time.monotonic() - begin < timeout
                self.replace_the_ended()
                if time.monotonic() - struck > self.seconds_between * rng.uniform(0.5, 1.5):
                    struck = time.monotonic() if self.strike(rng) else struck
                time.sleep(0.02)
        finally:
            seconds = time.monotonic() - begin
            was_ended = self.is_over()
            stop(campaign)
            self.close()
        log = (self.folder / "log").read_text()
        assert was_ended or campaign.returncode == 0, log[-5000:]
        return seconds

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def tokens_sampled(self) -> int:
        """Every token that the engines sampled, also those of workers that were killed."""
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        paths = self.folder.glob(f"{self.name}*.tokens")
        payloads = {path.stem: path.read_bytes() for path in paths}
        return {name: struct.unpack("<q", count)[0] for name, count in payloads.items() if len(count) == 8}
