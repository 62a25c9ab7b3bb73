"""Random schedules on the buffer's work stream agree with a reference model.

A worker's death is a lease that nobody touches again; its delay and its late wake-up are calls on leases that
were lost long ago; duplicate delivery is publishing the same group again. Leases live on the server's clock
alone, so a worker's skewed clock is a caller with another idea of a lease's length (``hasty``).
"""

import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from test_experience import group, item, make
from test_experience_faults import OwnServer, start_server

from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import LeaseLost
from tasks.experience.ledger import IterationLedger
from tasks.experience.records import Lease, Produced

__all__ = ["start_server"]  # a fixture


@dataclass
class Model:
    """The work stream as it should behave with ``max_attempts`` 3, one call at a time."""

    new: list[int] = field(default_factory=list)
    pending: dict[int, list] = field(default_factory=dict)  # portion -> [worker or None, attempt, returns]
    done: set[int] = field(default_factory=set)
    poisoned: set[int] = field(default_factory=set)
    published: set[str] = field(default_factory=set)
    parked: dict[str, bytes] = field(default_factory=dict)
    settled_by: list[Lease] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    duplicates: int = 0
    late: int = 0
    left: int = 0
    is_closed: bool = False

    def put(self, portions: list[int]) -> int:
        if self.is_closed:
            return 0
        known = {*self.new, *self.pending, *self.done, *self.poisoned}
        added = [portion for portion in dict.fromkeys(portions) if portion not in known]
        self.new += added
        self.order += added
        return len(added)

    def lease(self, worker: str, number: int, *, is_patient: bool) -> list[tuple[int, int]]:
        taken = []
        for portion in [portion for portion in self.order if portion in self.pending]:
            owner, attempt, returns = self.pending[portion]
            if len(taken) == number or (is_patient and owner is not None):
                continue
            if attempt - returns >= 3:
                del self.pending[portion]
                self.poisoned.add(portion)
            else:
                self.pending[portion] = [worker, attempt + 1, returns]
                taken.append((portion, attempt + 1))
        while self.new and len(taken) < number:
            portion = self.new.pop(0)
            self.pending[portion] = [worker, 1, 0]
            taken.append((portion, 1))
        return taken

    def holds(self, lease: Lease) -> bool:
        return self.pending.get(lease.item.portion, [None])[:2] == [lease.worker, lease.attempt]

    def close(self) -> int:
        if self.is_closed:
            return 0
        self.is_closed, self.left = True, len(self.new) + len(self.pending)
        self.new, self.pending = [], {}
        return self.left

    def publish(self, name: str) -> int:
        is_new = name not in self.published
        self.published.add(name)
        self.parked.pop(name, None)
        self.duplicates += not is_new
        return int(is_new)

    def park(self, lease: Lease, name: str, payload: bytes) -> int:
        if name in self.published or not (self.is_closed or self.holds(lease)):
            return 0
        if self.is_closed and name in self.parked:
            return 0
        self.parked[name] = payload
        return 1


def step(
    rng: random.Random, model: Model, patient: ExperienceBuffer, hasty: ExperienceBuffer, leases: list
) -> None:
    actions = [
        "put",
        "lease",
        "lease",
        "hasty",
        "publish",
        "publish",
        "settle",
        "return",
        "renew",
        "fail",
        "park",
    ]
    action = "close" if rng.random() < 0.01 else rng.choice(actions)
    if action == "close":
        assert patient.close(1) == model.close()
    elif action == "put":
        portions = [rng.randrange(8) for _ in range(3)]
        assert patient.put_work([item(portion) for portion in portions]) == model.put(portions)
    elif action in ("lease", "hasty"):
        worker, number, is_patient = rng.choice("uv"), rng.randint(1, 3), action == "lease"
        if not is_patient:
            time.sleep(0.002)
        taken = (patient if is_patient else hasty).lease(worker, iteration=1, max_items=number)
        expected = model.lease(worker, number, is_patient=is_patient)
        assert [(lease.item.portion, lease.attempt) for lease in taken] == expected
        leases += taken
    elif leases:
        touch(rng, action, model, patient, rng.choice(leases))  # often one that was lost long ago


def touch(rng: random.Random, action: str, model: Model, patient: ExperienceBuffer, lease: Lease) -> None:
    """What a worker may do with a lease that it holds, or believes to hold."""
    portion, is_held = lease.item.portion, model.holds(lease)
    if action == "fail":
        assert patient.fail(lease, "broken") == is_held
        if is_held:
            model.pending[portion] = [None, lease.attempt, model.pending[portion][2]]
    elif action == "publish":
        name = f"{portion}/{rng.randrange(2)}"
        if is_held:
            assert patient.publish(lease, [group(name)]) == model.publish(name)
        else:
            with pytest.raises(LeaseLost):
                patient.publish(lease, [group(name)])
            model.late += 4 * (model.is_closed and name not in model.published)
    elif action == "park":
        name, payload = f"{portion}/{rng.randrange(2)}", b"%d" % rng.randrange(10**9)
        expected = model.park(lease, name, payload)
        assert patient.park(lease, [group(name, payload)]) == expected
    elif action == "settle":
        again = lease in model.settled_by
        assert patient.settle(lease) == (is_held or again)
        if is_held:
            del model.pending[portion]
            model.done.add(portion)
            model.settled_by.append(lease)
    elif action == "return":
        assert patient.return_(lease) == is_held
        if is_held:
            model.pending[portion] = [None, lease.attempt, model.pending[portion][2] + 1]
    else:
        assert patient.renew(lease) == is_held


def run_schedules(
    urls: list[str], seeds: Iterable[int], *, restart: Callable[[], None] = lambda: None
) -> None:
    """30 steps a seed; ``restart`` is called in the middle of every 100th."""
    for seed in seeds:
        rng, model, leases = random.Random(seed), Model(), []
        name = f"model-{uuid.uuid4().hex[:8]}"
        patient, hasty = make(urls, name), make(urls, name, lease_seconds=0.001)
        for number in range(30):
            step(rng, model, patient, hasty, leases)
            if seed % 100 == 99 and number == 15:
                restart()
        check_end(model, patient, seed)


def check_end(model: Model, buffer: ExperienceBuffer, seed: int) -> None:
    progress = buffer.progress(1)
    leased = [entry for entry in model.pending.values() if entry[0] is not None]
    assert progress.queued == len(model.new) + len(model.pending) - len(leased), seed
    assert (progress.leased, progress.settled, progress.left) == (len(leased), len(model.done), model.left), (
        seed
    )
    assert [name for name, _ in buffer.poisoned(1)] == sorted(f"1/{n}" for n in model.poisoned), seed
    assert buffer.all_parked(1) == model.parked, seed
    expected = Produced(samples=4 * len(model.published), duplicates=model.duplicates, late=model.late)
    assert buffer.produced(1) == expected, seed
    taken = buffer.take_rollouts("s", iteration=1, max_groups=99)
    assert sorted(found.group_id for _, found in taken) == sorted(model.published), seed
    scored = buffer.publish_scored("s", 1, taken[: len(taken) // 2])
    ledger = IterationLedger(
        iteration=1, produced=expected.samples, trained=4 * scored, pending=4 * (len(taken) - scored),
        oldest_policy_version=0, newest_policy_version=0,
    )  # fmt: skip
    ledger.require_balanced()
    buffer.drop(1)


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_agree_with_a_model(valkey_url: str, block: int) -> None:
    """80 schedules a block. Sees no concurrency: every step is over before the next begins."""
    run_schedules([valkey_url], range(80 * block, 80 * block + 80))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_schedules_agree_with_a_model_over_server_restarts(
    start_server: Callable[..., OwnServer], block: int
) -> None:
    """1,000 schedules a block; in ten of them the server is killed and comes back with its log."""
    server = start_server("--appendonly", "yes", "--appendfsync", "everysec")

    def restart() -> None:
        server.kill()
        server.start()

    run_schedules([server.url], range(1000 * block, 1000 * block + 1000), restart=restart)
