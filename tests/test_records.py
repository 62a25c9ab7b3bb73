"""What travels with a sample beside its tokens: routing records and version spans, from worker to archive.

What these tests cannot see: whether an engine recorded the right experts.
"""

import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_experience import item, make
from test_operations import config, scored
from test_schema import ROLLOUT
from test_worker import PARAMS, buffer, folder, member, put

from tasks.engine.embedded import EmbeddedEngine
from tasks.environments.protocol import Outcome
from tasks.environments.scorer import Scorer
from tasks.environments.scoring import readable, score_groups
from tasks.experience.archive import archive_bytes
from tasks.experience.records import Group
from tasks.rl.assembly import assemble_frame, sample_fates
from tasks.rl.routing_records import continued, pack, routing_fault, unpack
from tasks.schema import (
    RECORDED,
    RolloutFrame,
    SchemaViolation,
    ScoredFrame,
    TrainFrame,
    from_bytes,
    make_frame,
    to_bytes,
)

__all__ = ["buffer", "folder"]  # fixtures
LAYERS, K = 3, 2


def record(num_rows: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (num_rows, LAYERS, K)
    return rng.integers(0, 128, shape, dtype=np.uint8), rng.random(shape, dtype=np.float32)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "float32"])
def test_a_record_comes_back_bit_for_bit_and_costs_a_header_of_128_bytes(dtype: str) -> None:
    array = (np.arange(5 * LAYERS * K).reshape(5, LAYERS, K) * 3).astype(dtype)
    payload = pack(array[::-1])  # a view that is not contiguous
    assert np.array_equal(unpack(payload), array[::-1]) and unpack(payload).dtype == dtype
    assert len(payload) == array.nbytes + 128


def test_the_continuation_keeps_the_routing_under_which_the_prefix_was_sampled() -> None:
    before, after = np.zeros((4, 1, 1), np.uint8), np.ones((7, 1, 1), np.uint8)
    assert continued(before, after)[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 1, 1]


EXPERTS, WEIGHTS = record(3)


@pytest.mark.parametrize(
    ("experts", "weights", "fault"),
    [
        (None, None, ""),
        (pack(EXPERTS), None, ""),
        (pack(EXPERTS), pack(WEIGHTS), ""),
        (pack(EXPERTS), pack(WEIGHTS.astype(np.float16)), ""),
        (None, pack(WEIGHTS), "without expert ids"),
        (pack(EXPERTS[:2]), None, r"must be \[3, layers, k\]"),
        (pack(EXPERTS), pack(WEIGHTS[..., :1]), "shapes must be"),
        (pack(EXPERTS[..., 0]), None, "shapes must be"),
        (pack(EXPERTS.astype(np.int64)), None, "got int64"),
        (pack(EXPERTS), pack(EXPERTS), "got uint8"),
        (pack(EXPERTS)[:-1], None, "bytes must be those of"),
        (b"garbage", None, "magic"),
    ],
)
def test_a_record_must_cover_every_position_but_the_last(
    experts: bytes | None, weights: bytes | None, fault: str
) -> None:
    found = routing_fault(experts, weights, num_rows=3)
    assert bool(found) == bool(fault) and re.search(fault, found)
    row = ROLLOUT | {"routed_experts": experts, "routed_weights": weights}  # 2 + 2 tokens: 3 rows
    if fault:
        with pytest.raises(
            SchemaViolation, match="routing_covers_every_position_but_the_last broken by rows"
        ):
            make_frame([ROLLOUT, row | {"prompt_id": "q"}], RolloutFrame)
    else:
        assert make_frame([row], RolloutFrame)["routed_experts"].to_list() == [experts]


@pytest.mark.parametrize(
    ("spans", "is_good"),
    [
        (None, True),
        ([(5, 2)], True),
        ([(5, 1), (6, 1)], True),
        ([(5, 1), (5, 1)], True),
        ([(5, 1)], False),  # one token by nobody
        ([(5, 2), (6, 0)], False),
        ([(6, 1), (5, 1)], False),  # versions only rise
        ([(6, 2)], False),  # policy_version is the oldest
        ([], False),
    ],
)
def test_spans_name_the_version_of_every_token(spans: Any, is_good: bool) -> None:
    named = spans and [{"policy_version": version, "num_tokens": number} for version, number in spans]
    row = ROLLOUT | {"version_spans": named if spans is not None else None}
    if is_good:
        assert from_bytes(to_bytes(make_frame([row], RolloutFrame)), schema=RolloutFrame).height == 1
    else:
        with pytest.raises(SchemaViolation, match="spans_cover_the_response"):
            make_frame([row], RolloutFrame)


def test_payloads_from_before_these_columns_are_read_as_unrecorded() -> None:
    old = make_frame([ROLLOUT], RolloutFrame).drop(RECORDED)
    frame = from_bytes(to_bytes(old), to_bytes(make_frame([ROLLOUT | {"prompt_id": "q"}], RolloutFrame)),
                       schema=RolloutFrame)  # fmt: skip
    assert frame["prompt_id"].to_list() == ["p", "q"]
    assert frame.select(RECORDED).null_count().row(0) == (2, 2, 2)


class Records(EmbeddedEngine):
    """Adds a record to what its parent samples."""

    def generate(self, requests: Any, params: Any) -> Any:
        completions = super().generate(requests, replace(params, record_routing="none"))
        for request, group in zip(requests, completions, strict=True):
            for i, completion in enumerate(group):
                experts, weights = record(
                    len(request.prompt_ids) + len(completion.response_ids) - 1, seed=request.seeds[i] % 2**32
                )
                group[i] = replace(completion, routed_experts=experts, routed_weights=weights)
        return completions


class Half:
    """A verifier under which every second sample is right: groups of any prompt have a signal."""

    def __init__(self) -> None:
        self.calls = 0

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        self.calls += 1
        return Outcome(kind="score", reward=float(self.calls % 2))


class Letters:
    eos_token = "."

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("asked", ["none", "experts", "experts_and_weights"])
def test_routing_reaches_train_rows_and_archive_bit_for_bit_where_asked(
    buffer: Any, folder: Any, asked: str
) -> None:
    put(buffer, 2)
    engine = Records(batch_size=16)
    engine.load(folder, 5)
    worker = member(buffer, "a", engine=engine)
    worker.params = replace(PARAMS, record_routing=asked)
    worker.drain(2)
    groups, bad = readable(buffer.take_rollouts("s", iteration=2, max_groups=9))
    sent = from_bytes(*(found.payload for _, found in groups), schema=RolloutFrame)
    buffer.publish_scored("s", 2, score_groups(groups, Scorer(Half(), Letters())))  # type: ignore[arg-type]
    frame = from_bytes(*(found.payload for found in buffer.scan_scored(2)), schema=ScoredFrame)
    settings = config(group_size=3)
    train, _, _ = assemble_frame(frame, settings, iteration=2, policy_version=5)
    assert not bad and len(train) == len(sent) == 4 * 3
    train = from_bytes(to_bytes(train), schema=TrainFrame)
    fates = sample_fates(frame, train, settings, policy_version=5)
    kept = pl.read_parquet(io.BytesIO(archive_bytes(fates, [])))
    key = ["prompt_id", "sample_index"]
    for name in ("routed_experts", "routed_weights"):
        is_asked = asked != "none" and (name == "routed_experts" or asked == "experts_and_weights")
        assert sent[name].null_count() == (0 if is_asked else len(sent))
        for rows in (train, kept):
            assert rows.sort(key)[name].to_list() == sent.sort(key)[name].to_list()


def test_an_engine_that_leaves_the_asked_record_out_is_an_error(buffer: Any, folder: Any) -> None:
    put(buffer, 1)

    class Forgets(EmbeddedEngine):
        def generate(self, requests: Any, params: Any) -> Any:
            return super().generate(requests, replace(params, record_routing="none"))

    engine = Forgets(batch_size=16)
    engine.load(folder, 5)
    worker = member(buffer, "a", engine=engine)
    worker.params = replace(PARAMS, record_routing="experts")
    with pytest.raises(RuntimeError, match="must record experts for every response"):
        worker.drain(2)


def test_samples_without_records_carry_at_most_48_bytes_more() -> None:
    """Two views of 16 bytes and an offset of 8; without the columns themselves 1 KiB a payload."""
    rows = [row for n in range(200) for row in scored(f"{n}", [0.0, 1.0])]
    frame = make_frame(rows, ScoredFrame)
    assert len(to_bytes(frame)) - len(to_bytes(frame.drop(RECORDED))) < 48 * len(rows) + 1024


def test_a_group_of_megabytes_passes_through_the_buffer(valkey_url: str, campaign: str) -> None:
    """48 layers, 8 of 128 experts, 2,000 tokens: 2.3 MB a sample with float16 weights."""
    experts = np.zeros((2003, 48, 8), np.uint8)
    row = ROLLOUT | {
        "response_ids": [3] * 2002, "behavior_logprob": [-0.5] * 2002,
        "routed_experts": pack(experts), "routed_weights": pack(experts.astype(np.float16)),
    }  # fmt: skip
    payload = to_bytes(make_frame([row], RolloutFrame))
    assert 2.3e6 < len(payload) < 2.4e6
    buffer = make(valkey_url, campaign, capacity_bytes=10**8)
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [Group(group_id="p", num_samples=1, payload=payload)])
    ((_, found),) = buffer.take_rollouts("s", iteration=1, max_groups=1)
    assert np.array_equal(
        unpack(from_bytes(found.payload, schema=RolloutFrame)["routed_experts"][0]), experts
    )
