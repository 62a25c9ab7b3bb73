"""Interrupted responses go on where they are, by whichever worker and version comes next.

What these tests cannot see: an engine whose abort loses tokens that it had sampled.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_embedded_engine import AbortsAfter
from test_experience import group, item, make
from test_worker import GROUP_SIZE, buffer, folder, member, published, put

from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.notices import Departure
from tasks.engine.partial import group_rows, is_finished, read_parked, requests_of
from tasks.engine.protocol import Completion, SamplingParams
from tasks.engine.worker import RolloutWorker, WorkDone
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import IterationClosed
from tasks.experience.records import Lease, WorkItem
from tasks.rl.routing_records import unpack
from tasks.schema import RolloutFrame, from_bytes, make_frame, to_bytes

__all__ = ["buffer", "folder"]  # fixtures
WHOLE = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))


def loaded(folder: Any, version: int = 5) -> EmbeddedEngine:
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folder, version)
    return engine


def keeper(buffer: Any, name: str, engine: EmbeddedEngine, **changes: Any) -> RolloutWorker:
    worker = member(buffer, name, engine=engine, keeps_partial=True, **changes)
    worker.params = WHOLE
    return worker


def interrupted(buffer: Any, folder: Any, name: str, steps: int, *, make: Any = keeper) -> WorkDone:
    """A worker that has to leave after so many decoding steps, without any grace."""
    engine, departure = loaded(folder), Departure(grace_seconds=0)
    worker = make(buffer, name, engine=engine, departure=departure, chunk_samples=99)

    class Leaves(AbortsAfter):
        @property
        def temperature(self) -> float:
            if self.steps_left == 1:
                departure.begin("SIGTERM")
            return super().temperature

    worker.params = Leaves(engine, steps)  # type: ignore[assignment]
    return worker.drain(2)


def test_three_workers_make_one_sample_and_no_token_is_sampled_twice(
    buffer: Any, folder: Any, valkey_url: str, campaign: str
) -> None:
    """Row 39: preemption lost or repeated work. Here partial tokens are kept and the work is handed on."""
    put(buffer, 1)
    first, second = interrupted(buffer, folder, "a", 3), interrupted(buffer, folder, "b", 4)
    assert (first.num_returned, second.num_returned) == (1, 1) and first.num_parked and second.num_parked
    last = keeper(buffer, "c", loaded(folder), chunk_samples=99).drain(2)
    frame = published(buffer)
    assert len(frame) == 2 * GROUP_SIZE and set(frame["finish_reason"]) <= {"stop", "length"}
    sampled = first.num_tokens + second.num_tokens + last.num_tokens
    assert sampled == frame["response_ids"].list.len().sum(), "extra tokens"
    other = ExperienceBuffer(
        valkey_url, campaign + "-b", lease_seconds=1, max_attempts=3, capacity_bytes=2**20
    )
    put(other, 1)
    keeper(other, "z", loaded(folder)).drain(2)
    calm = published(other)
    assert frame["response_ids"].to_list() == calm["response_ids"].to_list()
    for mine, theirs in zip(frame["behavior_logprob"], calm["behavior_logprob"], strict=True):
        assert mine.to_list() == pytest.approx(theirs.to_list(), abs=1e-4)
    assert frame["version_spans"].null_count() == len(frame), "one version sampled all of it"
    (lease,) = [Lease(item=work_item(buffer), entry_id="", worker="", attempt=0)]
    assert buffer.parked(lease.item, ["0-0", "0-1"]) == {}, "published groups are parked no more"


def work_item(buffer: Any) -> WorkItem:
    return WorkItem(
        iteration=2, portion=0, policy_version=5, num_groups=2, num_samples=2 * GROUP_SIZE, payload=b""
    )


PROMPT = {"iteration": 2, "prompt_id": "p", "prompt_ids": [7, 8]}
EARLIER = {
    "iteration": 2, "prompt_id": "p", "policy_version": 5, "prompt_ids": [7, 8], "version_spans": None,
    "routed_weights": None,
}  # fmt: skip


def begun() -> dict[tuple[str, int], dict[str, Any]]:
    """Sample 0 done, 1 interrupted after two tokens, 2 interrupted twice; 3 untouched."""
    from tasks.rl.routing_records import pack

    def rows(number: int) -> bytes:
        return pack(np.full((2 + number - 1, 1, 1), 9, np.uint8))

    spans = [{"policy_version": 4, "num_tokens": 1}, {"policy_version": 5, "num_tokens": 1}]
    frame = make_frame(
        [
            EARLIER | {"sample_index": 0, "response_ids": [3, 1], "behavior_logprob": [-1.0, -2.0],
                       "finish_reason": "stop", "routed_experts": rows(2)},
            EARLIER | {"sample_index": 1, "response_ids": [4, 5], "behavior_logprob": [-0.5, -0.25],
                       "finish_reason": "abort", "routed_experts": rows(2)},
            EARLIER | {"sample_index": 2, "response_ids": [6, 6], "behavior_logprob": [-0.5, -0.5],
                       "finish_reason": "abort", "routed_experts": rows(2), "version_spans": spans,
                       "policy_version": 4},
        ],
        RolloutFrame,
    )  # fmt: skip
    return read_parked({"p": to_bytes(frame)})


def test_only_what_is_missing_is_asked_for() -> None:
    fresh, second, third = requests_of(PROMPT, begun(), [10, 11, 12, 13])
    assert (fresh.prompt_ids, fresh.seeds, fresh.num_sampled) == ((7, 8), (13,), 0)
    assert (second.prompt_ids, second.seeds, second.num_sampled) == ((7, 8, 4, 5), (11,), 2)
    assert (third.prompt_ids, third.seeds, third.num_sampled) == ((7, 8, 6, 6), (12,), 2)


def answer(ids: list[int], reason: str, *, num_rows: int) -> list[Completion]:
    experts = np.full((num_rows, 1, 1), 3, np.uint8)
    values = [-0.125] * len(ids)
    return [
        Completion(response_ids=ids, logprobs=values, finish_reason=reason, routed_experts=experts)  # type: ignore[arg-type]
    ]


def joined(*answers: list[Completion]) -> list[dict[str, Any]]:
    params = replace(WHOLE, record_routing="experts")
    return group_rows(PROMPT, begun(), answers, group_size=4, policy_version=6, params=params)


def test_a_sample_names_the_version_of_each_span_and_keeps_its_first_log_probabilities_and_routing() -> None:
    """Complaint 26: what is trained of a resumed response must have its length."""
    rows = joined(
        answer([2, 1], "stop", num_rows=3),
        answer([8, 1], "stop", num_rows=5),
        answer([1], "stop", num_rows=4),
    )
    frame = make_frame(rows, RolloutFrame)  # spans and routing obey the schema
    assert is_finished(rows, 4) and frame["policy_version"].to_list() == [5, 5, 4, 6]
    assert frame["response_ids"].to_list() == [[3, 1], [4, 5, 8, 1], [6, 6, 1], [2, 1]]
    assert frame["behavior_logprob"].to_list()[1] == [-0.5, -0.25, -0.125, -0.125]
    spans = [
        [(s["policy_version"], s["num_tokens"]) for s in row] if row is not None else None
        for row in frame["version_spans"].to_list()
    ]
    assert spans == [None, [(5, 2), (6, 2)], [(4, 1), (5, 1), (6, 1)], None]
    assert unpack(rows[1]["routed_experts"]).ravel().tolist() == [9, 9, 9, 3, 3]


def test_what_is_aborted_again_without_a_token_stays_as_it_is() -> None:
    rows = joined(
        answer([], "abort", num_rows=0), answer([], "abort", num_rows=0), answer([2], "abort", num_rows=4)
    )
    assert [row["sample_index"] for row in rows] == [0, 1, 2] and not is_finished(rows, 4)
    assert rows[1] == begun()["p", 1] and rows[2]["response_ids"] == [6, 6, 2]


def test_an_old_attempt_cannot_park_over_a_new_one(valkey_url: str, campaign: str) -> None:
    buffer = make(valkey_url, campaign)
    buffer.put_work([item(0)])
    (old,) = buffer.lease("a", iteration=1)
    assert buffer.park(old, [group("g", b"old")]) == 1
    (new,) = make(valkey_url, campaign, lease_seconds=0.001).lease("b", iteration=1) or [None]
    while new is None:
        (new,) = make(valkey_url, campaign, lease_seconds=0.001).lease("b", iteration=1) or [None]
    assert buffer.parked(new.item, ["g", "h"]) == {"g": b"old"}
    assert buffer.park(new, [group("g", b"new")]) == 1 and buffer.park(old, [group("g", b"late")]) == 0
    assert buffer.parked(new.item, ["g"]) == {"g": b"new"}
    assert buffer.publish(new, [group("g")]) == 1 and buffer.parked(new.item, ["g"]) == {}
    assert buffer.park(new, [group("g", b"again")]) == 0, "a published group has nothing left to do"


def test_of_a_closed_iteration_the_first_parked_stays_until_it_is_dropped(
    valkey_url: str, campaign: str
) -> None:
    buffer = make(valkey_url, campaign)
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("a", iteration=1)
    buffer.close(1)
    with pytest.raises(IterationClosed):
        buffer.publish(lease, [group("g")])
    assert buffer.park(lease, [group("g", b"x")]) == 1 and buffer.park(lease, [group("g", b"y")]) == 0
    assert buffer.parked(lease.item, ["g"]) == {"g": b"x"}
    buffer.drop(1)
    assert buffer.park(lease, [group("g", b"x")]) == 0 and buffer.parked(lease.item, ["g"]) == {}


def test_a_worker_without_partial_responses_parks_nothing(buffer: Any, folder: Any) -> None:
    put(buffer, 1)
    done = interrupted(buffer, folder, "a", 3, make=member)
    assert done.num_returned == 1 and done.num_parked == 0 and done.num_tokens > 0
    assert buffer.parked(work_item(buffer), ["0-0", "0-1"]) == {}


def test_what_cannot_be_read_begins_anew(buffer: Any, folder: Any) -> None:
    put(buffer, 1)
    (lease,) = buffer.lease("bad", iteration=2)
    assert buffer.park(lease, [group("0-0", b"garbage")]) == 1
    buffer.return_(lease)
    assert interrupted(buffer, folder, "a", 2).num_parked > 0
    payloads = buffer.parked(work_item(buffer), ["0-0", "0-1"])
    frame = from_bytes(*payloads.values(), schema=RolloutFrame)
    assert set(payloads) == {"0-0", "0-1"} and "abort" in set(frame["finish_reason"])
