"""Stage boundaries refuse bad rows and name them with the rule."""

import polars as pl
import pytest

from tasks.schema import (
    PromptFrame,
    RolloutFrame,
    SchemaViolation,
    ScoredFrame,
    TrainFrame,
    from_bytes,
    make_frame,
    polars_schema,
    to_bytes,
    validated,
)

ROLLOUT = {
    "iteration": 2,
    "prompt_id": "p",
    "sample_index": 0,
    "policy_version": 5,
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "behavior_logprob": [-0.1, -0.2],
    "finish_reason": "stop",
}
SCORED = ROLLOUT | {"outcome": "score", "reward": 0.5, "is_exact": False, "reason": ""}
TRAIN = {
    "iteration": 2,
    "prompt_id": "p",
    "sample_index": 0,
    "policy_version": 5,
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "behavior_logprob": [-0.1, -0.2],
    "loss_mask": [True, False],
    "reward": 0.5,
    "advantage": 1.5,
    "minibatch": 0,
}
GOOD = {
    PromptFrame: {"iteration": 0, "prompt_id": "p", "prompt_ids": [1]},
    RolloutFrame: ROLLOUT,
    ScoredFrame: SCORED,
    TrainFrame: TRAIN,
}


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: schema.__name__)
def test_good_rows_pass_and_survive_the_wire(schema):
    frame = make_frame([GOOD[schema]], schema)
    assert from_bytes(to_bytes(frame), schema=schema).equals(frame)
    assert list(frame.columns) == list(polars_schema(schema))


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: schema.__name__)
def test_no_payload_is_an_empty_frame_of_the_right_type(schema):
    assert from_bytes(schema=schema).schema == polars_schema(schema)


@pytest.mark.parametrize(
    ("schema", "change", "rule"),
    [
        (PromptFrame, {"prompt_ids": []}, "prompt_is_not_empty"),
        (RolloutFrame, {"prompt_ids": []}, "prompt_is_not_empty"),
        (RolloutFrame, {"behavior_logprob": [-0.1]}, "response_and_logprobs_have_equal_length"),
        (
            RolloutFrame,
            {"response_ids": [], "behavior_logprob": []},
            "response_and_logprobs_have_equal_length",
        ),
        (RolloutFrame, {"behavior_logprob": [float("nan"), -1]}, "logprobs_are_finite_and_at_most_zero"),
        (RolloutFrame, {"behavior_logprob": [float("-inf"), -1]}, "logprobs_are_finite_and_at_most_zero"),
        (RolloutFrame, {"behavior_logprob": [0.5, -1]}, "logprobs_are_finite_and_at_most_zero"),
        (RolloutFrame, {"finish_reason": "tired"}, "isin"),
        (RolloutFrame, {"policy_version": -1}, "greater_than_or_equal_to"),
        (ScoredFrame, {"reward": None}, "reward_exists_exactly_for_scores"),
        (ScoredFrame, {"outcome": "failure", "reason": "x"}, "reward_exists_exactly_for_scores"),
        (ScoredFrame, {"outcome": "failure", "reward": None}, "a_failure_has_a_reason"),
        (ScoredFrame, {"reward": float("nan")}, "reward_exists_exactly_for_scores"),
        (ScoredFrame, {"reward": 1.5}, "less_than_or_equal_to"),
        (TrainFrame, {"loss_mask": [True]}, "lists_have_equal_length"),
        (TrainFrame, {"advantage": float("inf")}, "advantage_is_finite"),
    ],
)
def test_a_violation_names_the_row_and_the_rule(schema, change, rule):
    rows = [GOOD[schema] | {"prompt_id": "first"}, GOOD[schema] | {"prompt_id": "bad"} | change]
    with pytest.raises(SchemaViolation) as violation:
        make_frame(rows, schema)
    text = str(violation.value)
    assert rule in text and "rows [1]" in text and "/bad" in text and "first/" not in text, text


@pytest.mark.parametrize(
    "schema", [RolloutFrame, ScoredFrame, TrainFrame], ids=lambda schema: schema.__name__
)
def test_a_sample_may_occur_once(schema):
    with pytest.raises(SchemaViolation, match="sample_ids_are_unique"):
        make_frame([GOOD[schema], GOOD[schema]], schema)


def test_columns_must_be_exactly_those_of_the_schema():
    frame = make_frame([ROLLOUT], RolloutFrame)
    for changed in (frame.drop("finish_reason"), frame.with_columns(extra=pl.lit(1))):
        with pytest.raises(SchemaViolation):
            validated(changed, RolloutFrame)
    with pytest.raises(SchemaViolation, match="dtype"):
        validated(frame.with_columns(pl.col("prompt_ids").cast(pl.List(pl.Int64))), RolloutFrame)
