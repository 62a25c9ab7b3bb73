"""A campaign whose generation pool is killed under its feet: real processes, real signals.

What these tests cannot see: the loss of a whole node, and engines whose batches are not repeatable.
"""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from campaigns import SMALL, Finished
from chaos import Pool
from test_stages import kill_valkey

from tasks.config import CampaignConfig, with_overrides
from tasks.records import CampaignRun
from tasks.session import run_buffer

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


SAMPLES = 2 * 96 * 8


def make_pool(folder: Path, **shares: Any) -> Pool:
    folder.mkdir(exist_ok=True)
    return Pool(folder, CHAOS, size=3, seconds_between=0.4, **shares)


def finished(pool: Pool) -> Finished:
    return Finished((pool.folder / "log").read_text(), pool.folder / "store")


def tokens_needed(run: Finished) -> list[int]:
    """Tokens of the samples of each iteration."""
    return [
        int(line["metrics"]["generated_tokens"])
        for line in run.metrics()
        if "generated_tokens" in line["metrics"]
    ]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_and_terminated_workers_change_no_bit_and_waste_little(tmp_path: Path) -> None:
    """Both campaigns run at once: whatever else the machine does, it does to both."""
    calm = make_pool(tmp_path / "calm")
    struck = make_pool(tmp_path / "struck", share_killed=0.3, share_terminated=0.3)
    with ThreadPoolExecutor(2) as threads:
        calm_seconds, seconds = threads.map(lambda pool: pool.run_campaign(timeout=2000), (calm, struck))
    hit, undisturbed = finished(struck), finished(calm)
    (row,) = re.findall(r"^ +total +(\d+) +(\d+) +(\d+) +(\d+)", hit.output, re.MULTILINE)
    produced, trained, rejected, pending = map(int, row)
    needed, sampled = sum(tokens_needed(hit)), struck.tokens_sampled()
    load = os.getloadavg()[1]
    print(
        f"chaos: {struck.started} attempts, {len(struck.killed)} SIGKILL, {len(struck.terminated)} SIGTERM, "
        f"exit codes {sorted(struck.exit_codes)}\n"
        f"{produced} samples produced = {trained} trained + {rejected} rejected + {pending} pending\n"
        f"{needed:,} tokens needed, {sampled:,} sampled: {sampled / needed - 1:.1%} extra\n"
        f"{seconds:.0f} s, undisturbed beside it {calm_seconds:.0f} s: {seconds / calm_seconds:.2f}x; "
        f"load {load:.0f}\n"
        f"final digest {hit.digests()[-1][:12]}, undisturbed {undisturbed.digests()[-1][:12]}"
    )
    assert struck.killed and struck.terminated, "no signal was sent"
    assert hit.digests() == undisturbed.digests()
    assert produced == trained + rejected + pending == SAMPLES and pending == 0
    assert set(struck.exit_codes) <= {143, -signal.SIGKILL}
    assert calm.tokens_sampled() == sum(tokens_needed(undisturbed)) == needed, "nobody was disturbed"
    assert needed <= sampled <= 1.05 * needed
    assert seconds <= 1.25 * calm_seconds


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("loses_data", [False, True])
def test_a_killed_campaign_samples_only_what_its_server_lost(
    tmp_path: Path, leave_servers: None, loses_data: bool
) -> None:
    """Campaign, workers and server get SIGKILL in the middle of iteration 1; then all are started again."""
    before = make_pool(tmp_path)
    before.is_over = lambda: groups_published(tmp_path, iteration=1) >= 24
    before.run_campaign()
    published = groups_published(tmp_path, iteration=1)
    kill_valkey(of_first_lineage(tmp_path), loses_data=loses_data)
    spent, after = before.tokens_sampled(), make_pool(tmp_path, name="again")
    after.run_campaign()
    first, second = tokens_needed(finished(after))
    again = after.tokens_sampled()
    print(
        f"killed with {published} of 96 groups of iteration 1 published, server's data "
        f"{'lost' if loses_data else 'kept'}: {first:,} + {second:,} tokens needed, {spent:,} sampled before "
        f"and {again:,} after"
    )
    in_flight = 3 * 24 * 8  # workers, samples of a chunk, tokens of a sample
    if loses_data:
        assert again == second, "iteration 0 was sealed; of iteration 1 nothing was left"
    else:
        assert 0 <= spent + again - (first + second) <= in_flight and again < second


def of_first_lineage(folder: Path) -> CampaignRun:
    """The run as the campaign in this folder opened it: its buffer can be looked at from here."""
    config = with_overrides(CampaignConfig.model_validate(CHAOS), checkpoint__store=str(folder / "store"))
    return CampaignRun(config=config, lineage=1, code_revision="test")


def groups_published(folder: Path, *, iteration: int) -> int:
    has_begun = re.search(rf"^iter +{iteration} +prompts", (folder / "log").read_text(), re.MULTILINE)
    return run_buffer(of_first_lineage(folder)).num_published(iteration) if has_begun else 0
