"""The sample ledger's bookkeeping, by hand."""

import pytest
from pydantic import ValidationError

from tasks.experience.ledger import CampaignLedger, IterationLedger, LedgerImbalance, sample_id, seed_of


def ledger(iteration: int = 3, **changes: object) -> IterationLedger:
    # 12 + (2 + 1) + 1 = 16
    fields: dict[str, object] = {
        "iteration": iteration,
        "produced": 16,
        "trained": 12,
        "rejected": {"stale": 2, "crashed": 1},
        "pending": 1,
        "oldest_policy_version": 2,
        "newest_policy_version": 3,
    }
    return IterationLedger.model_validate(fields | changes)


def test_a_balanced_ledger_passes() -> None:
    assert ledger().balance() == 0
    assert ledger().require_balanced() == ledger()


def test_a_lost_sample_is_named_with_iteration_and_numbers() -> None:
    assert ledger(trained=11).balance() == 1
    with pytest.raises(LedgerImbalance, match=r"iteration 3: .* got 16 != 11 \+ 3 .* \+ 1: 1 unaccounted"):
        ledger(trained=11).require_balanced()


def test_a_sample_counted_twice_is_an_imbalance_too() -> None:
    assert ledger(pending=3).balance() == -2
    with pytest.raises(LedgerImbalance, match="2 counted twice"):
        CampaignLedger(iterations=(ledger(2), ledger(3, pending=3))).require_balanced()


@pytest.mark.parametrize(
    "changes",
    [
        {"trained": -1},
        {"rejected": {"": 1}},
        {"rejected": {"stale": -1}},
        {"oldest_policy_version": 4},
        {"lost": 0},
    ],
)
def test_impossible_ledgers_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ledger(**changes)


def test_campaign_totals_add_up_by_reason() -> None:
    campaign = CampaignLedger(iterations=(ledger(1), ledger(2, rejected={"stale": 3})))
    totals = campaign.totals()
    assert (totals.produced, totals.trained, totals.pending) == (32, 24, 2)
    assert totals.rejected == {"crashed": 1, "stale": 5}


def test_iterations_ascend_and_the_last_may_be_reported_again() -> None:
    campaign = CampaignLedger().append(ledger(1)).append(ledger(2))
    assert campaign.append(ledger(2)) is campaign
    for wrong in (ledger(1), ledger(2, produced=17, pending=2)):
        with pytest.raises(ValidationError, match="must ascend"):
            campaign.append(wrong)


def test_json_round_trip_is_exact_and_independent_of_the_order_of_reasons() -> None:
    campaign = CampaignLedger(iterations=(ledger(1), ledger(2)))
    assert CampaignLedger.model_validate_json(campaign.model_dump_json()) == campaign
    other = ledger(rejected={"crashed": 1, "stale": 2})
    assert other.model_dump_json() == ledger().model_dump_json()


def test_the_table_has_fixed_columns() -> None:
    table = CampaignLedger(iterations=(ledger(1), ledger(2, rejected={"stale": 3, "crashed": 0}))).format()
    assert table.splitlines() == [
        "  iteration   versions   produced    trained   rejected    pending  reasons",
        "          1        2-3         16         12          3          1  crashed: 1, stale: 2",
        "          2        2-3         16         12          3          1  stale: 3",
        "      total                    32         24          6          2  crashed: 1, stale: 5",
    ]


def test_seeds_repeat_for_the_same_sample_and_differ_for_others() -> None:
    places = [
        (base, it, f"p{p}", i) for base in (0, 1) for it in range(10) for p in range(50) for i in range(8)
    ]
    seeds = [seed_of(*place) for place in places]
    assert seeds == [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places) == 8000
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62
    assert seed_of(17, 3, "gsm8k/12", 5) == 6276434622564346778, "old checkpoints must replay"


def test_sample_ids_of_slashed_prompts_stay_distinct() -> None:
    assert sample_id(3, "gsm8k/12", 5) == "3/gsm8k/12/5"
    assert len({sample_id(1, "1/1", 1), sample_id(1, "1", 1), sample_id(1, "1/1/1", 1)}) == 3
