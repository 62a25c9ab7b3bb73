"""What ends an iteration and what isolates a worker, over one and two shards.

What these tests cannot see: a shard that is lost while another one answers.
"""

import pytest
from test_experience import Open, group, item, make, open_buffer, take_over

from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import IterationClosed, ShardMismatch, WorkerBarred
from tasks.experience.records import Lease, WorkerShare

__all__ = ["open_buffer"]  # a fixture


def lease_of(buffer: ExperienceBuffer, worker: str, portion: int = 0) -> Lease:
    (lease,) = [
        found for found in buffer.lease(worker, iteration=1, max_items=9) if found.item.portion == portion
    ]
    return lease


def test_work_and_its_groups_spread_over_shards_by_portion(shard_urls: list[str], campaign: str) -> None:
    both, first, second = (make(urls, campaign) for urls in (shard_urls, shard_urls[:1], shard_urls[1:]))
    both.put_work([item(n) for n in range(5)])
    assert (first.outstanding(1), second.outstanding(1), both.outstanding(1)) == (3, 2, 5)
    for lease in both.lease("w", iteration=1, max_items=9):
        both.publish(lease, [group(f"g{lease.item.portion}")])
    taken = both.take_rollouts("s", iteration=1, max_groups=9)
    assert both.publish_scored("s", 1, taken) == 5
    assert [found.group_id for found in both.scan_scored(1, chunk=2)] == [f"g{n}" for n in range(5)]
    assert (len(first.scored_groups(1)), len(second.scored_groups(1))) == (3, 2)
    assert both.progress(1).samples_produced == both.produced(1).samples == 20


def test_an_iteration_is_used_with_the_servers_it_was_put_on(shard_urls: list[str], campaign: str) -> None:
    make(shard_urls, campaign).put_work([item(0), item(1)])
    for urls in (shard_urls[:1], shard_urls[::-1]):
        for call in (
            lambda b: b.lease("w", iteration=1, max_items=9),
            lambda b: b.put_work([item(0), item(1)]),
        ):
            with pytest.raises(ShardMismatch, match=r"[01]/2"):
                call(make(urls, campaign))


def test_open_iterations_name_the_version_they_need_until_closed(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0, iteration=3, policy_version=9), item(1, iteration=3, policy_version=9), item(0)])
    assert list(buffer.open_iterations().items()) == [(1, 7), (3, 9)]
    buffer.close(3)
    buffer.put_work([item(0, iteration=3, policy_version=9)])
    assert buffer.open_iterations() == {1: 7}
    buffer.drop(1)
    assert buffer.open_iterations() == {}


def test_a_closed_iteration_hands_out_nothing_and_counts_what_comes_late(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(n) for n in range(4)])
    leases = buffer.lease("w", iteration=1, max_items=2)
    buffer.publish(leases[0], [group("a")])
    buffer.settle(leases[0])
    assert buffer.close(1) == 3 and buffer.close(1) == 0
    assert (buffer.outstanding(1), buffer.lease("w", iteration=1), buffer.renew(leases[1])) == (0, [], False)
    with pytest.raises(IterationClosed, match="quota is met or its scoring"):
        buffer.publish(leases[1], [group("b")])
    assert buffer.put_work([item(9)]) == 0 and not buffer.settle(leases[1])
    progress = buffer.progress(1)
    assert (progress.settled, progress.left, progress.late, progress.queued, progress.leased) == (
        1,
        3,
        4,
        0,
        0,
    )
    assert (buffer.produced(1).samples, buffer.num_published(1)) == (4, 1)
    assert len(buffer.take_rollouts("s", iteration=1, max_groups=9)) == 1


def test_failing_is_held_against_the_work_and_names_the_last_reason(open_buffer: Open) -> None:
    buffer = open_buffer(max_attempts=2)
    buffer.put_work([item(0)])
    for worker in ("a", "b"):
        assert buffer.fail(lease_of(buffer, worker), "RuntimeError: out of memory")
    assert buffer.lease("c", iteration=1) == []
    assert buffer.poisoned(1) == [("1/0", "2 attempts failed, the last by b: RuntimeError: out of memory")]


def test_only_the_holder_can_fail_an_item(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    late = lease_of(buffer, "a")
    take_over(open_buffer, "b")
    assert not buffer.fail(late, "x") and buffer.progress(1).leases_by_worker == {"b": 1}


@pytest.mark.parametrize("is_settled", [True, False])
def test_an_unreadable_group_is_sampled_again_and_its_worker_barred(
    open_buffer: Open, is_settled: bool
) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0)])
    lease = lease_of(buffer, "bad")
    buffer.publish(lease, [group("a", b"garbage"), group("b")])
    if is_settled:
        assert buffer.settle(lease)
    (handle,) = [
        h for h, found in buffer.take_rollouts("s", iteration=1, max_groups=9) if found.group_id == "a"
    ]
    assert buffer.refuse_rollout("s", 1, handle, "schema: no column") == "bad"
    assert buffer.refuse_rollout("s", 1, handle, "again") is None
    if not is_settled:
        assert not buffer.settle(lease), "the item goes back to the queue instead"
    with pytest.raises(WorkerBarred, match="schema: no column"):
        buffer.lease("bad", iteration=1)
    again = lease_of(buffer, "good")
    assert again.item == item(0) and buffer.published(again.item, ["a", "b"]) == {"b"}
    assert buffer.publish(again, [group("a"), group("b")]) == 1 and buffer.settle(again)
    assert buffer.barred() == {"bad": "schema: no column"}
    produced, progress = buffer.produced(1), buffer.progress(1)
    assert (produced.samples, produced.refused, progress.settled, progress.groups_published) == (12, 4, 1, 2)


def test_progress_shows_each_workers_share(open_buffer: Open) -> None:
    buffer = open_buffer()
    buffer.put_work([item(0), item(1), item(2)])
    for worker, seconds in (("a", 0.5), ("b", 2.0), ("a", 1.5)):
        (lease,) = buffer.lease(worker, iteration=1)
        buffer.publish(lease, [group(f"g{lease.item.portion}")], num_tokens=30, seconds=seconds)
        buffer.settle(lease)
    assert buffer.progress(1).workers == {
        "a": WorkerShare(samples=8, tokens=60, seconds=2.0),
        "b": WorkerShare(samples=4, tokens=30, seconds=2.0),
    }
