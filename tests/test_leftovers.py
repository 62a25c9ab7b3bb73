"""What an iteration does not need or finish is the next one's, once, and the ledger says so.

What these tests cannot see: a trainer between the two iterations (the second version is a copy of the first).
"""

import dataclasses
from pathlib import Path

import polars as pl
import pytest
from campaigns import SMALL
from test_operations import config as settings
from test_operations import scored
from test_stages import archive, assemble, initialize, kill_valkey, offer_prompts, rollout_worker, score

from tasks.config import CampaignConfig, ConfigError, with_overrides
from tasks.experience.ledger import CampaignLedger, IterationLedger, LedgerImbalance
from tasks.experience.leftovers import find_leftovers
from tasks.experience.records import Group
from tasks.records import CampaignRun, PolicyVersion, TrainBatch
from tasks.rl.assembly import assemble_frame, sample_fates
from tasks.schema import PromptFrame, RolloutFrame, ScoredFrame, TrainFrame, from_bytes, make_frame, to_bytes
from tasks.session import run_buffer, run_store

ROLLOUT = SMALL["rollout"] | {
    "oversample": 0.5, "leftovers": "keep", "partial": "keep", "max_portions_per_worker": 0,
    "groups_per_portion": 10, "batch_size": 80,
}  # fmt: skip
"""48 groups of 8 are needed and 72 offered, in portions of 10 that are published whole: 50 are finished."""


@pytest.fixture
def run(tmp_path: Path, leave_servers: None) -> CampaignRun:
    config = CampaignConfig.model_validate(SMALL | {"rollout": ROLLOUT})
    config = with_overrides(config, checkpoint__store=str(tmp_path / "store"))
    return CampaignRun(config=config, lineage=1, code_revision="test")


def iterate(run: CampaignRun, k: int, version: PolicyVersion) -> TrainBatch:
    prompts = offer_prompts(run=run, iteration=k, behavior=version)
    report = rollout_worker(worker=k, run=run, prompts=prompts, behavior=version)
    scores = score(run=run, prompts=prompts, behavior=version, rollouts=[report])
    batch = assemble(run=run, scores=scores, policy=version)
    archive(run=run, batch=batch, policy=version)
    return batch


def copy_of(run: CampaignRun, version: PolicyVersion) -> PolicyVersion:
    store = run_store(run)
    changes = {"version": version.version + 1, "parent": version.version, "kind": "warm_start"}
    return store.commit(store.manifest(version).model_copy(update=changes))


def entry(batch: TrainBatch) -> IterationLedger:
    return IterationLedger(
        iteration=batch.iteration, produced=batch.produced, trained=batch.num_samples, pending=0,
        rejected=batch.rejected, carried_in=batch.carried_in, carried_out=batch.carried_out,
        oldest_policy_version=0, newest_policy_version=1,
    )  # fmt: skip


def interrupt(run: CampaignRun, version: PolicyVersion) -> dict[str, list[int]]:
    """A straggler holds the last two portions, and one of its groups has three tokens a sample when the
    iteration ends."""
    buffer = run_buffer(run)
    offer_prompts(run=run, iteration=0, behavior=version)
    leases = buffer.lease("straggler", iteration=0, max_items=8)
    for lease in leases[:-1]:
        buffer.return_(lease)
    prompts = from_bytes(leases[-1].item.payload, schema=PromptFrame).rows(named=True)
    rows = [
        prompts[0] | {"sample_index": i, "policy_version": 0, "response_ids": [5, 6, 7 + i],
                      "behavior_logprob": [-1.0] * 3, "finish_reason": "abort"}
        for i in range(8)
    ]  # fmt: skip
    name = prompts[0]["prompt_id"]
    group = Group(group_id=name, num_samples=8, payload=to_bytes(make_frame(rows, RolloutFrame)))
    assert buffer.park(leases[-1], [group]) == 1
    return {name: [5, 6]}


def test_leftovers_are_the_next_iterations_and_every_sample_is_accounted_for(run: CampaignRun) -> None:
    first = initialize(run=run)
    ((name, beginning),) = interrupt(run, first).items()
    one = iterate(run, 0, first)
    assert (one.produced, one.carried_in, one.carried_out) == (50 * 8, 0, 2 * 8)
    assert (one.offered, one.handed_on) == (72 * 8, 22 * 8)
    left = find_leftovers(run, 0)
    assert left and left.num_groups == 2 and len(left.prompts) == 22
    assert set(left.begun["prompt_id"]) == {name}
    run_buffer(run).drop(0)  # as publishing does
    kill_valkey(run, loses_data=True)
    second = copy_of(run, first)
    two = iterate(run, 1, second)
    # 2 inherited count; of 22 + 72 offered, portions of 10, 10, 2 and 10, 10, 10 are finished
    assert (two.produced, two.carried_in, two.carried_out) == (52 * 8, 2 * 8, 6 * 8)
    assert two.offered == (72 + 22) * 8 and two.oldest_version == 0
    ledger = CampaignLedger(iterations=(entry(one), entry(two)))
    assert ledger.settled().require_balanced().totals().pending == 6 * 8
    samples = pl.read_parquet(
        run_store(run).get_object(two.key.replace("batches/", "samples/").replace(".arrow", ".parquet"))
    )
    assert len(samples) == two.produced + two.carried_in
    assert dict(samples.group_by("fate").len().iter_rows())["kept"] == two.carried_out
    again = samples.filter(pl.col("prompt_id") == name).sort("sample_index")
    assert again["iteration"].to_list() == [0] * 8 and again["policy_version"].to_list() == [0] * 8
    for ids, spans in again.select("response_ids", "version_spans").iter_rows():
        assert ids[:2] == beginning and len(ids) <= run.config.rollout.max_new_tokens
        assert [span["policy_version"] for span in spans] == [0, 1]
        assert [span["num_tokens"] for span in spans] == [3, len(ids) - 3]


def test_sealing_and_offering_again_changes_nothing(run: CampaignRun) -> None:
    version = initialize(run=run)
    one = iterate(run, 0, version)
    prompts = offer_prompts(run=run, iteration=1, behavior=version)
    before = run_buffer(run).progress(1)
    assert offer_prompts(run=run, iteration=1, behavior=version) == prompts
    assert run_buffer(run).progress(1) == dataclasses.replace(
        before, bytes_used=run_buffer(run).progress(1).bytes_used
    )
    assert before.queued == 11 and prompts.num_groups == 94
    first = run_buffer(run).lease("w", iteration=1, max_items=1)[0]
    names = from_bytes(first.item.payload, schema=PromptFrame)
    assert names["iteration"].unique().to_list() == [0], "what was begun comes first"
    assert one.handed_on == 22 * 8


def test_generation_that_runs_ahead_gets_the_leftovers_when_they_are_sealed(run: CampaignRun) -> None:
    version = initialize(run=run)
    offer_prompts(run=run, iteration=1, behavior=version)  # before iteration 0 is assembled
    assert run_buffer(run).outstanding(1) == 8
    iterate(run, 0, version)
    assert run_buffer(run).outstanding(1) == 8 + 3 and run_buffer(run).has_met(1, 2)
    assert not run_buffer(run).has_met(1, 3)


ROWS = [
    *scored("x", [0.0, 1.0], iteration=0, policy_version=0),
    *(row for prompt in "abc" for row in scored(prompt, [0.0, 1.0], iteration=1, policy_version=1)),
]


@pytest.mark.parametrize(
    ("leftovers", "iterations", "fates"),
    [
        ("keep", 9, {"trained": 4, "kept": 4}),  # x comes first although its name is last
        ("keep", 2, {"trained": 4, "over_quota": 4}),  # the last iteration keeps nothing
        ("drop", 9, {"stale": 2, "trained": 2, "over_quota": 4}),
    ],
)
def test_inherited_groups_come_first_and_what_is_left_is_kept_once(
    leftovers: str, iterations: int, fates: dict[str, int]
) -> None:
    chosen = settings(oversample=0.5, leftovers=leftovers)
    chosen = chosen.model_copy(
        update={"schedule": chosen.schedule.model_copy(update={"iterations": iterations})}
    )
    frame = make_frame(ROWS, ScoredFrame)
    train, rejected, _ = assemble_frame(frame, chosen, iteration=1, policy_version=1)
    found = sample_fates(frame, train, chosen, policy_version=1)
    counts = dict(found.group_by("fate").len().iter_rows())
    assert counts == fates and set(train.schema) == set(make_frame([], TrainFrame).schema)
    assert {**{k: n for k, n in rejected.items() if n}, "trained": len(train)} == fates
    if leftovers == "keep":
        assert set(train["prompt_id"]) == {"x", "a"}


def line(iteration: int, **counts: int) -> IterationLedger:
    base = {"produced": 8, "trained": 8, "pending": 0, "oldest_policy_version": 0, "newest_policy_version": 0}
    return IterationLedger(iteration=iteration, **(base | counts))  # type: ignore[arg-type]


def test_the_ledger_follows_samples_from_one_iteration_to_the_next() -> None:
    keeps, inherits = (
        line(0, trained=6, carried_out=2),
        line(1, trained=9, carried_in=2, rejected={"stale": 1}),
    )  # type: ignore[arg-type]
    ledger = CampaignLedger(iterations=(keeps, inherits))
    assert ledger.settled() == ledger.require_balanced() and ledger.totals().produced == 16
    assert "kept: 2" in keeps.reasons() and "inherited: 2" in inherits.reasons()
    with pytest.raises(LedgerImbalance, match="got 2 kept by iteration 0 and 0 inherited by None"):
        CampaignLedger(iterations=(keeps,)).require_balanced()
    with pytest.raises(LedgerImbalance, match="0 kept by iteration None and 2 inherited by 1"):
        CampaignLedger(iterations=(inherits,)).require_balanced()
    (newest,) = CampaignLedger(iterations=(keeps,)).settled().require_balanced().iterations
    assert newest.pending == 2
    changed = CampaignLedger(iterations=(keeps, line(1))).settled().require_balanced()
    assert changed.totals().rejected == {"configuration_changed": 2}


def test_leftovers_without_over_sampling_are_refused() -> None:
    with pytest.raises(ConfigError, match="oversample must be above 0 where leftovers are kept"):
        CampaignConfig.model_validate_json('{"rollout": {"leftovers": "keep"}}')
