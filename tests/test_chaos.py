"""A campaign whose generation pool is killed under its feet: real processes, real signals.

What these tests cannot see: the loss of a whole node, and engines whose batches are not repeatable.
"""

import re
import signal
from pathlib import Path

import pytest
from campaigns import SMALL, Finished
from chaos import Pool

POOL = {
    "warm_start": {"steps": 0},
    "rollout": {
        "pool": "standing", "prompts_per_iteration": 96, "groups_per_portion": 12, "batch_size": 24,
        "lease_seconds": 2.0,
    },
    "schedule": {"iterations": 2, "segment_iterations": 2, "evaluate_every": 2},
}  # fmt: skip
CHAOS = {**SMALL, **POOL}
"""Eight portions an iteration, each published in four chunks of three groups."""


def pool_run(folder: Path, **shares: float) -> tuple[Pool, Finished, float]:
    pool = Pool(folder, CHAOS, size=3, seconds_between=0.4, **shares)
    seconds = pool.run_campaign()
    return pool, Finished((folder / "log").read_text(), folder / "store"), seconds


def tokens_trained_on(finished: Finished) -> int:
    return int(sum(line["metrics"].get("generated_tokens", 0) for line in finished.metrics()))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pool, Finished, float]:
    return pool_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_killed_and_terminated_workers_change_no_bit_and_waste_little(
    undisturbed: tuple[Pool, Finished, float], tmp_path: Path
) -> None:
    _, calm, calm_seconds = undisturbed
    pool, hit, seconds = pool_run(tmp_path, share_killed=0.3, share_terminated=0.3)
    assert pool.killed and pool.terminated, "no signal was sent"
    assert hit.digests() == calm.digests()
    (row,) = re.findall(r"^ +total +(\d+) +(\d+) +(\d+) +(\d+)", hit.output, re.MULTILINE)
    produced, trained, rejected, pending = map(int, row)
    assert produced == trained + rejected + pending == 2 * 96 * 8 and pending == 0
    assert set(pool.exit_codes) <= {143, -signal.SIGKILL}
    # a killed worker wastes at most the chunk in flight, one that is terminated nothing
    needed = tokens_trained_on(hit)
    wasted = needed * len(pool.killed) * 24 / (2 * 96 * 8)
    print(
        f"chaos: {pool.started} attempts, {len(pool.killed)} SIGKILL, {len(pool.terminated)} SIGTERM, "
        f"exit codes {sorted(pool.exit_codes)}; {needed} tokens needed, at most {wasted / needed:.1%} extra; "
        f"{seconds:.0f} s, undisturbed {calm_seconds:.0f} s; final digest {hit.digests()[-1][:12]}"
    )
    assert wasted <= 0.05 * needed
