"""Stage boundaries refuse bad rows and name them with the rule."""

import pandera.polars as pa
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.schema import (
    PARTS,
    VERSION_SPANS,
    PromptFrame,
    RolloutFrame,
    SchemaViolation,
    ScoredFrame,
    TrainFrame,
    _rules,
    from_bytes,
    is_good,
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
        (PromptFrame, {"prompt_ids": [1, None]}, "no_list_holds_a_null"),
        (RolloutFrame, {"response_ids": [3, None]}, "no_list_holds_a_null"),
        (RolloutFrame, {"behavior_logprob": [None, -0.2]}, "no_list_holds_a_null"),
        (ScoredFrame, {"chosen": [True, None]}, "no_list_holds_a_null"),
        (TrainFrame, {"loss_mask": [True, None]}, "no_list_holds_a_null"),
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


def spans(*pairs):
    return [{"policy_version": version, "num_tokens": count} for version, count in pairs]


NAN, INF = float("nan"), float("inf")
VALUES = {
    pl.Int64: [None, -2, -1, 0, 5, 7],
    pl.String: [None, "", "q", "stop", "tired", "score", "abstain", "failure"],
    pl.Float64: [None, NAN, INF, -INF, -0.1, 0.0, 0.5, 1.5],
    pl.Boolean: [None, True],
    pl.Binary: [None],  # pandera never sees bytes
    pl.List(pl.Int32): [None, [], [1], [1, 2], [1, None]],
    pl.List(pl.Float32): [None, [], [-1.0], [-1, 0], [NAN, -1], [-INF, -1], [0.5, -1], [None, -1.0]],
    pl.List(pl.Boolean): [None, [], [True], [True, True], [False, True], [None, True]],
    PARTS: [None, []],
    VERSION_SPANS: [
        None, [], spans((5, 2)), spans((5, 1)), spans((6, 2)), spans((5, 1), (6, 1)), spans((6, 1), (5, 1)),
        spans((5, 2), (5, 0)), spans((5, None)), spans((None, 2)),
    ],
}  # fmt: skip


OUTCOMES = [
    {"outcome": "score"},
    {"outcome": "abstain", "reward": None},
    {"outcome": "failure", "reward": None, "reason": "q"},
]
OTHER = {
    "a column too few": lambda frame, name: frame.drop(name),
    "a column too many": lambda frame, name: frame.with_columns(pl.col(name).alias("extra")),
    "another type": lambda frame, name: frame.with_columns(pl.lit(1, pl.Int8).alias(name)),
    "another order": lambda frame, name: frame.select(name, pl.exclude(name)),
    "a row twice": lambda frame, name: pl.concat([frame, frame[:1]]),
}


def good_rows(schema):
    return [GOOD[schema] | outcome for outcome in OUTCOMES] if schema is ScoredFrame else [GOOD[schema]]


def unchecked(rows, schema):
    types = polars_schema(schema)
    return pl.DataFrame({name: [row.get(name) for row in rows] for name in types}, schema=types)


def require_agreement(frame, schema):
    try:
        schema.validate(frame, lazy=True)
    except pa.errors.SchemaErrors:
        assert not is_good(frame, schema)
    else:
        assert is_good(frame, schema)


class Strict(pa.DataFrameModel):
    number: int = pa.Field(ge=0)

    class Config(pa.DataFrameModel.Config):
        strict = True


class Loose(Strict):
    class Config(pa.DataFrameModel.Config):
        strict = False


class Filtering(Strict):
    class Config(pa.DataFrameModel.Config):
        strict = "filter"


class Coercing(Strict):
    class Config(Strict.Config):
        coerce = True


class CoercingColumn(Strict):
    number: int = pa.Field(coerce=True)


class Ordered(Strict):
    class Config(Strict.Config):
        ordered = True


class Warns(Strict):
    number: int = pa.Field(ge=0, raise_warning=True)


class WarnsOfFrame(Strict):
    @pa.dataframe_check(raise_warning=True)
    def small(cls, data):
        return data.lazyframe.select(pl.col("number") < 9)


class Pattern(Strict):
    numbers: int = pa.Field(alias="n.*", regex=True)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (Loose, "must be strict"), (Filtering, "must be strict"), (Coercing, "coerce"),
        (CoercingColumn, "number: coerce"), (Ordered, "ordered"), (Warns, "only warns"),
        (WarnsOfFrame, "only warns"), (Pattern, "must be one column"),
    ],
)  # fmt: skip
def test_what_the_one_query_would_pass_over_is_refused(schema, words):
    assert len(_rules(Strict)) == 2
    with pytest.raises(AssertionError, match=words):
        _rules(schema)


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: schema.__name__)
def test_the_one_query_judges_every_single_change_of_a_good_row_as_pandera_does(schema):
    for row in good_rows(schema):
        for name, dtype in polars_schema(schema).items():
            for value in VALUES[dtype]:
                require_agreement(unchecked([row | {name: value}], schema), schema)


@st.composite
def frames(draw, schema):
    """Good rows with up to two changed values, and perhaps other columns; often still good."""
    names = st.sampled_from(list(polars_schema(schema)))
    rows = [draw(st.sampled_from(good_rows(schema))) | {"prompt_id": f"p{i}"}
            for i in range(draw(st.integers(0, 3)))]  # fmt: skip
    for row in draw(st.lists(st.sampled_from(rows), max_size=2)) if rows else ():
        name = draw(names)
        row[name] = draw(st.sampled_from(VALUES[polars_schema(schema)[name]]))
    frame, change = unchecked(rows, schema), draw(st.sampled_from([None, *OTHER]))
    return OTHER[change](frame, draw(names)) if change else frame


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: schema.__name__)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_one_query_judges_frames_as_pandera_does(schema, data):
    require_agreement(data.draw(frames(schema)), schema)


def test_a_token_that_is_no_32_bit_integer_raises_instead_of_becoming_null():
    for token in (2**40, 1.5, "7"):
        with pytest.raises(TypeError):
            make_frame([ROLLOUT | {"response_ids": [3, token]}], RolloutFrame)
