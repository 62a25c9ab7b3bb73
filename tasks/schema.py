"""Records between stages as data frames, each boundary guarded by a pandera schema.

``RolloutFrame`` leaves a worker, ``ScoredFrame`` leaves the reward stage, ``TrainFrame`` is what a policy
update reads. One row is one sample, identified by ``(iteration, prompt_id, sample_index)``. A violation names
the rows and the rule. Frames are eager on purpose: pandera checks only the types of a lazy frame and lets bad
values pass. Import this module inside task bodies: polars and pandera cost 0.7 s.
"""

import io
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import pandera.polars as pa
import polars as pl
import polars.selectors as cs
from pandera.polars import PolarsData

from tasks.rl.routing_records import routing_fault

RECORDED = ("version_spans", "routed_experts", "routed_weights")
"""Columns that are null where nothing was recorded, and that payloads of earlier releases do not have."""
PARTS = pl.List(
    pl.Struct(
        {
            "name": pl.String,
            "kind": pl.String,
            "value": pl.Float64,
            "reason": pl.String,
            "seconds": pl.Float64,
        }
    )
)
VERSION_SPANS = pl.List(pl.Struct({"policy_version": pl.Int64, "num_tokens": pl.Int32}))


class SchemaViolation(ValueError):
    """Rows that break a rule of a stage boundary."""


class Strict(pa.DataFrameModel):
    """Exactly the columns that are declared, and in a list no null; where a list itself may be null, its
    column says so."""

    class Config(pa.DataFrameModel.Config):
        strict = True

    @pa.dataframe_check
    def no_list_holds_a_null(cls, data: PolarsData) -> pl.LazyFrame:
        is_value = cs.list().list.eval(pl.element().is_not_null()).list.all().fill_null(True)
        return data.lazyframe.select(pl.all_horizontal(is_value))


class PromptFrame(Strict):
    """One prompt group of a work item."""

    iteration: int = pa.Field(ge=0)
    prompt_id: str = pa.Field(unique=True)
    prompt_ids: pl.List(pl.Int32)  # pyright: ignore[reportInvalidTypeForm]

    @pa.dataframe_check
    def prompt_is_not_empty(cls, data: PolarsData) -> pl.LazyFrame:
        return data.lazyframe.select(pl.col("prompt_ids").list.len() > 0)


class Recorded(Strict):
    """A response: its tokens with the log-probabilities of the distribution that was sampled, one value each,
    and what is recorded beside them, where asked.

    ``version_spans``: which policy version sampled which tokens, in order, where a response was interrupted
    and continued; null = all of them by ``policy_version``, which is the oldest of the spans otherwise.
    ``routed_experts`` and ``routed_weights``: see ``tasks.rl.routing_records``.
    """

    version_spans: VERSION_SPANS = pa.Field(nullable=True)  # pyright: ignore[reportInvalidTypeForm]
    routed_experts: pl.Binary = pa.Field(nullable=True)
    routed_weights: pl.Binary = pa.Field(nullable=True)
    iteration: int = pa.Field(ge=-1)
    prompt_id: str
    sample_index: int = pa.Field(ge=0)
    policy_version: int = pa.Field(ge=-1)
    prompt_ids: pl.List(pl.Int32)  # pyright: ignore[reportInvalidTypeForm]
    response_ids: pl.List(pl.Int32)  # pyright: ignore[reportInvalidTypeForm]
    behavior_logprob: pl.List(pl.Float32)  # pyright: ignore[reportInvalidTypeForm]

    @pa.dataframe_check
    def sample_ids_are_unique(cls, data: PolarsData) -> pl.LazyFrame:
        return data.lazyframe.select(pl.struct("iteration", "prompt_id", "sample_index").is_unique())

    @pa.dataframe_check
    def spans_cover_the_response_in_order_from_the_oldest_version(cls, data: PolarsData) -> pl.LazyFrame:
        spans, field = pl.col("version_spans"), pl.element().struct.field
        tokens = spans.list.eval(field("num_tokens")).list
        versions = spans.list.eval(field("policy_version")).list
        good = (
            (tokens.sum() == pl.col("response_ids").list.len())
            & (tokens.min() > 0)
            & (versions.diff(null_behavior="drop").list.min().fill_null(0) >= 0)
            & (versions.min() == pl.col("policy_version"))
        )
        return data.lazyframe.select(good.fill_null(pl.col("version_spans").is_null()))


class RolloutFrame(Recorded):
    """Sampled by a published version."""

    iteration: int = pa.Field(ge=0)
    policy_version: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length", "abort", "tool_failure"])
    chosen: pl.List(pl.Boolean) = pa.Field(nullable=True)  # pyright: ignore[reportInvalidTypeForm]
    """False where the environment wrote the token; null = the policy chose all."""

    @pa.dataframe_check
    def response_and_logprobs_have_equal_length(cls, data: PolarsData) -> pl.LazyFrame:
        length = pl.col("response_ids").list.len()
        return data.lazyframe.select((length > 0) & (length == pl.col("behavior_logprob").list.len()))

    @pa.dataframe_check
    def chosen_has_a_value_a_token_and_begins_with_the_policy(cls, data: PolarsData) -> pl.LazyFrame:
        chosen = pl.col("chosen").list
        good = (chosen.len() == pl.col("response_ids").list.len()) & chosen.first()
        return data.lazyframe.select(good.fill_null(pl.col("chosen").is_null()))

    @pa.dataframe_check
    def logprobs_are_finite_and_at_most_zero(cls, data: PolarsData) -> pl.LazyFrame:
        values = pl.element()
        good = pl.col("behavior_logprob").list.eval(values.is_finite() & (values <= 1e-4)).list.all()
        return data.lazyframe.select(good)

    @pa.dataframe_check
    def prompt_is_not_empty(cls, data: PolarsData) -> pl.LazyFrame:
        return data.lazyframe.select(pl.col("prompt_ids").list.len() > 0)


class ScoredFrame(RolloutFrame):
    """Rollouts with their outcome: a score, an abstention, or a failure with its reason; a failure has no
    reward."""

    outcome: str = pa.Field(isin=["score", "abstain", "failure"])
    reward: float = pa.Field(nullable=True, ge=0, le=1)
    is_exact: bool
    reason: str
    parts: PARTS = pa.Field(nullable=True)  # pyright: ignore[reportInvalidTypeForm]
    """What each scorer said; empty where the verifier alone scored, in the scoring process."""

    @pa.dataframe_check
    def reward_exists_exactly_for_scores(cls, data: PolarsData) -> pl.LazyFrame:
        has_reward = pl.col("reward").is_not_null() & pl.col("reward").is_not_nan()
        return data.lazyframe.select(has_reward == (pl.col("outcome") == "score"))

    @pa.dataframe_check
    def a_failure_has_a_reason(cls, data: PolarsData) -> pl.LazyFrame:
        return data.lazyframe.select(
            (pl.col("outcome") != "failure") | (pl.col("reason").str.len_chars() > 0)
        )


class TrainFrame(Recorded):
    """Rows of one policy update. ``loss_mask`` is True where the policy chose the token; others are never
    trained."""

    loss_mask: pl.List(pl.Boolean)  # pyright: ignore[reportInvalidTypeForm]
    reward: float = pa.Field(nullable=True)
    advantage: float
    minibatch: int = pa.Field(ge=0)

    @pa.dataframe_check
    def lists_have_equal_length(cls, data: PolarsData) -> pl.LazyFrame:
        length = pl.col("response_ids").list.len()
        same = (length == pl.col("behavior_logprob").list.len()) & (length == pl.col("loss_mask").list.len())
        return data.lazyframe.select((length > 0) & same)

    @pa.dataframe_check
    def advantage_is_finite(cls, data: PolarsData) -> pl.LazyFrame:
        return data.lazyframe.select(pl.col("advantage").is_finite())


Frame = type[PromptFrame] | type[RolloutFrame] | type[ScoredFrame] | type[TrainFrame]


def polars_schema(schema: Frame) -> dict[str, Any]:
    """Column -> polars type, in the schema's order."""
    return {name: column.dtype.type for name, column in schema.to_schema().columns.items()}


def make_frame(rows: Sequence[dict[str, Any]], schema: Frame) -> pl.DataFrame:
    """A validated frame from dicts, one a row. By column: from dicts polars takes thrice as long, and writes
    null for a token that is no 32-bit integer where this raises."""
    types = polars_schema(schema)
    columns = {name: [row.get(name) for row in rows] for name in types}
    return validated(pl.DataFrame(columns, schema=types), schema)


def validated(frame: pl.DataFrame, schema: Frame) -> pl.DataFrame:
    """The frame itself if it obeys the schema; else ``SchemaViolation`` with the rule and the first rows that
    break it."""
    if not is_good(frame, schema):
        _refuse(frame, schema)
    bytes_columns = [name for name, dtype in frame.schema.items() if dtype == pl.Binary]
    if bytes_columns and any(frame[name].null_count() < len(frame) for name in bytes_columns):
        _require_routing(frame, schema)
    return frame


def is_good(frame: pl.DataFrame, schema: Frame) -> bool:
    """Whether pandera would find nothing: its rules for a good frame, asked in one query."""
    return dict(frame.schema) == polars_schema(schema) and all(frame.select(_rules(schema)).row(0))


class _Question:
    """Stands where a rule expects a frame, and hands out what the rule selects of it."""

    def select(self, expression: pl.Expr) -> pl.Expr:
        return expression


@cache
def _rules(schema: Frame) -> list[pl.Expr]:
    """One truth for each rule of a schema. Pandera runs some queries for each at every call, 7 ms for a
    portion's rollouts, under the lock of an interpreter that should be sending requests."""
    declared = schema.to_schema()
    _require_translated(declared)
    schema.validate(pl.DataFrame(schema=polars_schema(schema)))  # built-in rules are known once one was asked
    rules = []
    for name, column in declared.columns.items():
        if not column.nullable:
            rules.append(pl.col(name).is_not_null())
            if column.dtype.type.is_float():
                rules.append(pl.col(name).is_not_nan())
        if column.unique:
            rules.append(pl.col(name).is_unique())
        rules += [_question(check, name) for check in column.checks]
    rules += [_question(check, "*") for check in declared.checks or ()]
    return [rule.all().alias(str(number)) for number, rule in enumerate(rules)]


def _require_translated(declared: pa.DataFrameSchema) -> None:
    """What else pandera can be told, which ``_rules`` and ``is_good`` would pass over; parsers of
    polars frames it refuses itself."""
    columns = declared.columns.values()
    checks = [*(declared.checks or ()), *(check for column in columns for check in column.checks)]
    assert declared.strict is True, "a schema must be strict: the one query asks for exactly its columns"
    assert not (declared.unique or declared.ordered), "the query asks no frame to be unique or ordered"
    for part in (declared, *columns):
        assert not part.coerce, f"{part.name}: coerce changes what is only asked here"
    for column in columns:
        assert column.required and not column.regex, f"{column.name} must be one column that is always there"
    assert not any(check.raise_warning for check in checks), "a check that only warns would refuse here"


def _question(check: pa.Check, column: str) -> pl.Expr:
    is_own = not pa.Check.is_builtin_check(check.name)
    rule = check._check_fn if is_own else pa.Check.get_builtin_check_fn(check.name)
    asked = rule(PolarsData(cast(pl.LazyFrame, _Question()), column), **check._check_kwargs)
    return asked if check.ignore_na else asked.fill_null(False)


def _refuse(frame: pl.DataFrame, schema: Frame) -> None:
    """Raise what pandera finds, with its words."""
    bytes_columns = [name for name, dtype in frame.schema.items() if dtype == pl.Binary]
    try:  # without the bytes: pandera prints the rows of a violation as JSON, at which polars panics
        schema.validate(
            frame.with_columns(pl.lit(None, pl.Binary).alias(n) for n in bytes_columns), lazy=True
        )
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases
        rules = []
        for (column, check), rows in cases.group_by("column", "check", maintain_order=True):
            index = [i for i in rows["index"].to_list()[:5] if i is not None]
            where = f"rows {index} ({_sample_ids(frame, index)})" if index else "the frame"
            first = str(rows["failure_case"][0]).splitlines()[0][:200]
            rules.append(
                f"{column or schema.__name__}: rule {check} broken by {where}, {len(rows)} in all; first "
                f"{first}"
            )
        raise SchemaViolation(f"{schema.__name__} refused {len(frame)} rows.\n" + "\n".join(rules)) from None


def _require_routing(frame: pl.DataFrame, schema: Frame) -> None:
    """The rule of ``Recorded`` that is about bytes."""
    rows = pl.col("prompt_ids").list.len() + pl.col("response_ids").list.len() - 1
    records = frame.select(rows.cast(pl.Int64), "routed_experts", "routed_weights").iter_rows()
    faults = {
        index: fault
        for index, (num_rows, experts, weights) in enumerate(records)
        if (fault := routing_fault(experts, weights, num_rows=num_rows))
    }
    if faults:
        first = list(faults)[:5]
        raise SchemaViolation(
            f"{schema.__name__} refused {len(frame)} rows.\n{schema.__name__}: rule routing_covers_every_"
            f"position_but_the_last broken by rows {first} ({_sample_ids(frame, first)}), {len(faults)} in "
            f"all; first {faults[first[0]]}"
        )


def to_bytes(frame: pl.DataFrame) -> bytes:
    """Arrow IPC stream, uncompressed: 50 times faster than Parquet to write and read, and this crosses a
    network once."""
    sink = io.BytesIO()
    frame.write_ipc_stream(sink)
    return sink.getvalue()


def from_bytes(*payloads: bytes, schema: Frame) -> pl.DataFrame:
    """The validated frame of one or more payloads."""
    frames = [_with_recorded(pl.read_ipc_stream(payload), schema) for payload in payloads]
    return validated(pl.concat(frames) if frames else pl.DataFrame(schema=polars_schema(schema)), schema)


def _with_recorded(frame: pl.DataFrame, schema: Frame) -> pl.DataFrame:
    """A payload of an earlier release has no ``RECORDED`` columns."""
    if not issubclass(schema, Recorded):
        return frame
    types = polars_schema(schema)
    absent = [name for name in (*RECORDED, "chosen", "parts") if name in types.keys() - frame.columns]
    if not absent:
        return frame
    frame = frame.with_columns(pl.lit(None, dtype=types[name]).alias(name) for name in absent)
    return frame.select(list(types)) if set(types) == set(frame.columns) else frame


def _sample_ids(frame: pl.DataFrame, index: list[int]) -> str:
    names = [c for c in ("iteration", "prompt_id", "sample_index") if c in frame.columns]
    return ", ".join("/".join(str(frame[name][i]) for name in names) for i in index if i < len(frame))
