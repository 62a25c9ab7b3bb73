"""The experience buffer against a real Valkey server.

Leases expire without waiting: an "impatient" buffer of the same campaign calls a lease expired after 1 ms.
What these tests cannot see: the loss of a server's disk or of a whole node, and a failover to a replica.
"""

import pickle
import time
from collections.abc import Callable

import pytest
import valkey

from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import (
    IterationDropped,
    LeaseLost,
    PolicyVersionMismatch,
)
from tasks.experience.records import Group, Lease, Produced, Unscored, WorkItem

Open = Callable[..., ExperienceBuffer]


@pytest.fixture(params=[1, 2], ids=["one shard", "two shards"])
def open_buffer(request: pytest.FixtureRequest, shard_urls: list[str], campaign: str) -> Open:
    return lambda **changes: make(shard_urls[: request.param], campaign, **changes)


def make(url: str | list[str], campaign: str, **changes: float) -> ExperienceBuffer:
    arguments = {"lease_seconds": 60.0, "max_attempts": 3, "capacity_bytes": 1 << 20} | changes
    return ExperienceBuffer(url, campaign, **arguments)  # type: ignore[arg-type]


def item(portion: int, *, iteration: int = 1, policy_version: int = 7) -> WorkItem:
    return WorkItem(
        iteration=iteration,
        portion=portion,
        policy_version=policy_version,
        num_groups=2,
        num_samples=8,
        payload=b"prompts\x00%d" % portion,
    )


def group(name: str, payload: bytes = b"tokens\x00") -> Group:
    return Group(group_id=name, num_samples=4, payload=payload)


def take_over(open_buffer: Open, worker: str) -> Lease:
    time.sleep(0.003)
    (lease,) = open_buffer(lease_seconds=0.001).lease(worker, iteration=1)
    return lease


def test_work_is_put_once_and_comes_back_as_it_was(open_buffer: Open) -> None:
    buffer = open_buffer()
    assert buffer.put_work([item(0), item(1)]) == 2
    assert buffer.put_work([item(0), item(1), item(2)]) == 1
    leases = buffer.lease("w", iteration=1, policy_version=7, max_items=9)
    leases.sort(key=lambda lease: lease.item.portion)  # shards have no order among them
    assert [lease.item for lease in leases] == [item(0), item(1), item(2)]
    assert [lease.attempt for lease in leases] == [1, 1, 1]
    assert buffer.lease("w", iteration=2) == []


def test_settled_work_is_not_put_again(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    assert buffer.settle(lease)
    assert buffer.settle(lease), "the holder asks again when the first reply is lost"
    assert buffer.put_work([item(0)]) == 0
    assert (buffer.outstanding(1), buffer.progress(1).settled) == (0, 1)


def test_one_iteration_requires_one_policy_version(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    with pytest.raises(PolicyVersionMismatch) as refused:
        buffer.lease("w", iteration=1, policy_version=6)
    assert pickle.loads(pickle.dumps(refused.value)).required == 7
    assert "must be 7" in str(refused.value) and "got 6" in str(refused.value)
    with pytest.raises(PolicyVersionMismatch):
        buffer.put_work([item(1, policy_version=8)])


def test_groups_are_published_once_and_the_first_wins(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    assert buffer.publish(lease, [group("a", b"first"), group("a", b"twin")]) == 1
    assert buffer.publish(lease, [group("a", b"second"), group("b")]) == 1
    assert buffer.produced(1) == Produced(samples=8, duplicates=2)
    taken = buffer.take_rollouts("s", iteration=1, max_groups=9)
    assert [found for _, found in taken] == [group("a", b"first"), group("b")]


def test_an_expired_lease_is_taken_over_and_a_live_one_is_not(open_buffer: Open) -> None:
    buffer = open_buffer(lease_seconds=0.2)
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w1", iteration=1)
    time.sleep(0.02)
    assert buffer.lease("w2", iteration=1) == []
    time.sleep(0.25)
    (second,) = buffer.lease("w2", iteration=1)
    assert (second.item, second.attempt) == (lease.item, 2)


@pytest.mark.parametrize("successor", ["other", "late"])
def test_a_late_holder_cannot_write_even_under_its_successors_name(open_buffer: Open, successor: str) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (late,) = buffer.lease("late", iteration=1)
    holder = take_over(open_buffer, successor)
    with pytest.raises(LeaseLost, match="attempt 1 of late"):
        buffer.publish(late, [group("a")])
    assert (buffer.settle(late), buffer.renew(late), buffer.return_(late)) == (False, False, False)
    assert buffer.produced(1) == Produced(samples=0, duplicates=0)
    assert buffer.publish(holder, [group("a")]) == 1
    assert buffer.settle(holder) and not buffer.settle(late)


def test_returned_work_goes_to_the_next_caller_at_once(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0), item(1)])
    (lease,) = buffer.lease("w1", iteration=1)
    assert buffer.return_(lease)
    progress = buffer.progress(1)
    assert (progress.queued, progress.leased, progress.leases_by_worker) == (2, 0, {})
    assert not buffer.settle(lease), "what was handed back is no longer held"
    assert [again.item.portion for again in buffer.lease("w2", iteration=1, max_items=2)] == [0, 1]


def test_renewing_keeps_a_lease_beyond_its_time(open_buffer: Open) -> None:
    buffer = open_buffer(lease_seconds=0.3)
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w1", iteration=1)
    for _ in range(5):
        time.sleep(0.1)
        assert buffer.renew(lease)
    assert buffer.lease("w2", iteration=1) == []
    assert buffer.settle(lease), "a renewal is not a new attempt"


def test_work_that_kills_its_workers_is_set_aside_with_a_reason(open_buffer: Open) -> None:
    buffer, impatient = open_buffer(), open_buffer(lease_seconds=0.001)
    buffer.put_work([item(0), item(2)])  # both on the first shard
    for attempt in (1, 2, 3):
        time.sleep(0.003)
        (lease,) = impatient.lease(f"w{attempt}", iteration=1)
        assert (lease.item.portion, lease.attempt) == (0, attempt)
    time.sleep(0.003)
    assert [lease.item.portion for lease in impatient.lease("w4", iteration=1)] == [2]
    assert buffer.poisoned(1) == [("1/0", "3 attempts failed, the last by w3")]
    assert (buffer.outstanding(1), buffer.progress(1).poisoned) == (1, 1)
    assert buffer.put_work([item(0)]) == 0


def test_returning_is_not_held_against_the_work(open_buffer: Open) -> None:
    buffer = open_buffer(max_attempts=1)
    buffer.put_work([item(0)])
    for attempt in range(1, 6):
        (lease,) = buffer.lease("w", iteration=1)
        assert lease.attempt == attempt and buffer.return_(lease)


def test_two_scorers_and_a_dead_one_score_every_group_once(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [group(f"g{n:02}") for n in range(12)])
    dead = buffer.take_rollouts("dead", iteration=1, max_groups=4)
    first = buffer.take_rollouts("s1", iteration=1, max_groups=4)
    second = buffer.take_rollouts("s2", iteration=1, max_groups=9)
    assert (len(dead), len(first), len(second)) == (4, 4, 4)
    assert buffer.publish_scored("s1", 1, first) == 4
    assert buffer.publish_scored("s2", 1, second) == 4
    time.sleep(0.003)
    inherited = open_buffer(lease_seconds=0.001).take_rollouts("s1", iteration=1, max_groups=9)
    assert [found for _, found in inherited] == [found for _, found in dead]
    assert buffer.publish_scored("dead", 1, dead) == 0, "taken over meanwhile"
    assert buffer.publish_scored("s1", 1, inherited) == 4
    assert buffer.publish_scored("s1", 1, inherited) == 0
    assert [found.group_id for found in buffer.scan_scored(1, chunk=5)] == [f"g{n:02}" for n in range(12)]
    progress = buffer.progress(1)
    assert (progress.groups_scored, progress.groups_published, progress.bytes_waiting) == (12, 12, 0)


def test_scoring_settles_what_was_taken_and_takes_the_next_in_one_step(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(n) for n in range(4)])
    for n, lease in enumerate(buffer.lease("w", iteration=1, max_items=9)):
        buffer.publish(lease, [group(f"{n}{letter}") for letter in "abc"])
    stored, taken = buffer.exchange_rollouts("s", 1, [], max_groups=5)
    assert stored == 0 and len(taken) == 5
    stored, more = buffer.exchange_rollouts("s", 1, taken, max_groups=9)
    assert (
        stored == 5 and len(more) == 7 and not {g.group_id for _, g in more} & {g.group_id for _, g in taken}
    )
    assert buffer.exchange_rollouts("s", 1, [*taken, *more], max_groups=1) == (7, [])
    assert len(buffer.scored_groups(1)) == 12 and buffer.progress(1).bytes_waiting == 0


def test_a_scorers_late_handle_cannot_score_even_under_its_successors_name(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [group("a")])
    late = buffer.take_rollouts("s", iteration=1, max_groups=1)
    time.sleep(0.003)
    again = open_buffer(lease_seconds=0.001).take_rollouts("s", iteration=1, max_groups=1)
    assert buffer.publish_scored("s", 1, late) == 0
    assert buffer.publish_scored("s", 1, again) == 1


def test_a_scorer_renews_and_returns_what_it_took(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [group("a"), group("b")])
    handles = [handle for handle, _ in buffer.take_rollouts("s1", iteration=1, max_groups=2)]
    assert buffer.renew_rollouts("s1", iteration=1, handles=handles) == 2
    assert buffer.renew_rollouts("s2", iteration=1, handles=handles) == 0
    assert buffer.return_rollouts("s1", iteration=1, handles=handles[:1]) == 1
    assert [found.group_id for _, found in buffer.take_rollouts("s2", iteration=1, max_groups=2)] == ["a"]


def test_a_group_that_kills_its_scorers_is_counted_for_the_ledger(open_buffer: Open) -> None:
    buffer, impatient = open_buffer(), open_buffer(lease_seconds=0.001, max_attempts=1)
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [group("a")])
    assert len(impatient.take_rollouts("s", iteration=1, max_groups=1)) == 1
    time.sleep(0.003)
    assert impatient.take_rollouts("s", iteration=1, max_groups=1) == []
    reason = "1 attempts failed, the last by s"
    assert buffer.unscored(1) == [Unscored(group=group("a"), reason=reason)]
    assert (buffer.progress(1).groups_unscored, buffer.progress(1).bytes_waiting) == (1, 0)


def test_a_score_under_the_wrong_handle_is_refused_whole(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [group("a"), group("b")])
    (one, a), (two, b) = buffer.take_rollouts("s", iteration=1, max_groups=2)
    with pytest.raises(ValueError, match="handle of another group"):
        buffer.publish_scored("s", 1, [(one, b), (two, a)])
    assert buffer.scored_groups(1) == []
    assert buffer.publish_scored("s", 1, [(one, a), (two, b)]) == 2


def test_scored_groups_come_in_code_point_order_of_their_ids(open_buffer: Open) -> None:
    buffer = open_buffer()
    names = ["10", "9", "a/2", "a/10", "A", "\u00e9", "z"]
    buffer.put_work([item(0)])
    (lease,) = buffer.lease("w", iteration=1)
    buffer.publish(lease, [group(name, name.encode()) for name in names])
    taken = buffer.take_rollouts("s", iteration=1, max_groups=99)
    buffer.publish_scored("s", 1, taken[::-1])
    assert buffer.scored_groups(1) == [group(name, name.encode()) for name in sorted(names)]


def test_drop_frees_all_but_the_counters_and_closes_the_iteration(
    open_buffer: Open, valkey_url: str, campaign: str
) -> None:
    buffer, client = open_buffer(), valkey.Valkey.from_url(valkey_url)
    buffer.put_work([item(n) for n in range(4)] + [item(0, iteration=2)])
    lease, other = buffer.lease("w", iteration=1, max_items=2)
    buffer.publish(lease, [group("a"), group("b")])
    ((handle, taken), _) = buffer.take_rollouts("s", iteration=1, max_groups=2)
    buffer.publish_scored("s", 1, [(handle, taken)])
    buffer.return_(other)
    assert buffer.progress(1).bytes_used > 0
    for _ in range(2):
        buffer.drop(1)
        assert client.keys(f"{{{campaign}}}:1:*") == [f"{{{campaign}}}:1:counters".encode()]
    assert buffer.produced(1) == Produced(samples=8, duplicates=0, is_dropped=True)
    assert (buffer.outstanding(1), buffer.outstanding(2)) == (0, 1)
    with pytest.raises(LeaseLost):
        buffer.publish(lease, [group("c")])
    with pytest.raises(IterationDropped, match="Let one run of a campaign work at a time"):
        buffer.put_work([item(9)])
    assert not buffer.settle(lease) and buffer.publish_scored("s", 1, [(handle, taken)]) == 0
    assert buffer.lease("w", iteration=1) == []
    assert client.keys(f"{{{campaign}}}:1:*") == [f"{{{campaign}}}:1:counters".encode()]


def test_progress_accounts_for_every_item(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(n) for n in range(6)])
    leases = buffer.lease("w1", iteration=1, max_items=2)
    buffer.lease("w2", iteration=1)
    buffer.settle(leases[0])
    time.sleep(0.05)
    assert buffer.renew(leases[1])
    progress = buffer.progress(1)
    assert (progress.queued, progress.leased, progress.settled, progress.poisoned) == (3, 2, 1, 0)
    assert progress.leases_by_worker == {"w1": 1, "w2": 1}
    assert 0.04 < progress.oldest_lease_seconds < 30, "the age counts from the hand-out, not from renewal"
