"""Where a campaign's seconds and bytes go: ``python tests/bench_campaign.py [runs] [config]``. Not a test.

Runs the main command in a fresh store each time and prints medians over the runs: wall and CPU seconds, peak
memory of the whole process tree with its servers (proportional set size, so that shared pages count once),
seconds by stage.
"""

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from pathlib import Path

import yaml
from campaigns import ROOT, Finished, start

PR_SET_CHILD_SUBREAPER = 36
STAGES = ("start_up", "load_engine", "generate", "score", "assemble", "load", "train", "upload", "publish")


def process_tree(root: int, store: Path) -> list[Path]:
    """Processes of the run's session, and servers that name its store."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_ours = (
                os.getsid(int(entry.name)) == root or str(store).encode() in (entry / "cmdline").read_bytes()
            )
        except OSError:
            continue
        if is_ours:
            found.append(entry)
    return found


def proportional_bytes(process: Path) -> int:
    try:
        text = (process / "smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, so that their CPU seconds count too."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(patience: float = 20.0) -> None:
    for _ in range(int(patience / 0.1)):
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
        except ChildProcessError:
            return
    raise SystemExit(f"every process of a run must end with it, but one still runs after {patience:g} s")


def measure(config: dict) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before, begin, peak = os.times(), time.monotonic(), 0
        process = start(folder, config)
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, process_tree(process.pid, folder / "store"))))
            time.sleep(0.5)
        wall = time.monotonic() - begin
        reap_orphans()
        after = os.times()
        if process.returncode:
            raise SystemExit((folder / "log").read_text()[-3000:])
        lines = Finished("", folder / "store").metrics()
        evaluations = [line["evaluation"]["exact_sampled"] for line in lines if "evaluation" in line]
        stages = {stage: sum(line["seconds"].get(stage, 0.0) for line in lines) for stage in STAGES}
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return {
            "wall s": wall,
            "CPU s": cpu,
            "peak GiB": peak / 2**30,
            "exact before": evaluations[0],
            "exact after": evaluations[-1],
            **stages,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Medians of a campaign's seconds and bytes over its runs.")
    parser.add_argument("runs", nargs="?", type=int, default=3)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs/campaigns/laptop.yaml")
    options = parser.parse_args()
    runs, path = options.runs, options.config
    config = yaml.safe_load(path.read_text())
    adopt_orphans()
    results = [measure(config | {"seed": seed}) for seed in range(runs)]
    print(
        f"{path.name}, {runs} runs (seeds 0..{runs - 1}), {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    )
    print(f"{'':14}{'median':>10}{'min':>10}{'max':>10}{'share':>8}")
    total = statistics.median(result["wall s"] for result in results)
    for name in results[0]:
        values = [result[name] for result in results]
        middle = statistics.median(values)
        share = f"{middle / total:8.1%}" if name in STAGES else ""
        print(f"{name:14}{middle:10.3f}{min(values):10.3f}{max(values):10.3f}{share}")


if __name__ == "__main__":
    main()
