"""The rollout worker: lease a portion, sample its groups, publish them, settle; until the queue is empty.

The same loop serves a mapped Flyte task and a standing worker. A portion is sampled and published in chunks:
a worker that vanishes loses the tokens of one chunk: its lease expires and another worker goes on behind the
last published chunk. A worker that has to leave takes no new lease, finishes what fits into its grace period
and hands the rest back. Groups are identified by what they are samples of, so work done twice is stored once.

What surprises: in deterministic mode a chunk that was interrupted is sampled again whole. The last bits of a
log-probability depend on the rows a matrix product is made with, so only equal batches repeat bit for bit.
Where partial responses are kept, their tokens go on from where they are, and bits may differ; so they do
where newer versions are taken while responses run (``required_version``).
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tasks.engine.notices import Departure
from tasks.engine.partial import Begun, Row, group_rows, is_finished, read_parked, requests_of
from tasks.engine.protocol import Completion, Engine, Request, SamplingParams
from tasks.engine.turns import Dialogue
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import LeaseLost
from tasks.experience.ledger import seed_of
from tasks.experience.meanwhile import meanwhile
from tasks.experience.records import Group, Lease
from tasks.schema import PromptFrame, RolloutFrame, from_bytes, make_frame, to_bytes

POLL_SECONDS = 0.2
ATTEND_SECONDS = 0.05
"""How soon an engine learns that its lease or its time is over."""
STRAGGLER_SECONDS = 0.5
"""How often a worker asks whether the quota is met without it."""


@dataclass(kw_only=True, slots=True)
class WorkDone:
    num_portions: int = 0
    num_returned: int = 0
    """Leases handed back because the worker had to leave."""
    num_samples: int = 0
    num_tokens: int = 0
    """Every token that was sampled, published or not."""
    num_parked: int = 0
    """Tokens of unfinished responses that were kept for whoever goes on."""
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class RolloutWorker:
    """One engine that works on a campaign's queue."""

    engine: Engine
    buffer: ExperienceBuffer
    name: str
    params: SamplingParams
    base_seed: int
    group_size: int
    chunk_samples: int
    """Samples that are decoded and published together; at least one group."""
    is_deterministic: bool = True
    keeps_partial: bool = False
    """Whether the tokens of interrupted responses are kept and continued."""
    quota_groups: int = 0
    """Published groups at which the iteration is closed, by whoever gets there; 0 = never."""
    dialogue: Dialogue | None = None
    """Where the environment answers the policy's turns."""
    departure: Departure = field(default_factory=lambda: Departure(grace_seconds=math.inf))
    required_version: int | None = None
    """What the portions to lease require, where the engine may hold a newer version and be given others while
    it samples (``tasks.engine.in_flight``); None = they require exactly the one it holds."""
    _chunk_seconds: float = 0.0

    def drain(self, iteration: int, *, max_portions: int = 0, waits: bool = True) -> WorkDone:
        """Work until all portions of the iteration are settled, by whichever worker, or this one must leave.

        Args:
            max_portions: leave after this many portions; 0 = no bound.
            waits: stay while the rest is leased to others; otherwise return as soon as nothing is to be had.
        """
        done = WorkDone()
        while not self.departure.is_due and (max_portions == 0 or done.num_portions < max_portions):
            self._close_if_met(iteration)  # it may have inherited enough
            version = self.engine.version if self.required_version is None else self.required_version
            leases = self.buffer.lease(self.name, iteration=iteration, policy_version=version)
            if not leases:
                if not waits or self.buffer.outstanding(iteration) == 0:
                    break
                time.sleep(POLL_SECONDS)  # the rest is with others: wait for the end, or for an expiry
                continue
            start = time.monotonic()
            for lease in leases:
                self._work(lease, done)
            done.seconds += time.monotonic() - start
        return done

    def _work(self, lease: Lease, done: WorkDone) -> None:
        is_complete = False
        try:
            with self._attended(lease) as is_lost:
                is_complete = self._sample_chunks(lease, done, is_lost)
        except LeaseLost:
            return  # another worker has the portion now; its samples are the same
        except Exception as error:
            if self.engine.version is None:  # a load failed under it
                self.buffer.return_(lease)
            else:  # may be the portion's fault: counted, or it would go round for ever
                self.buffer.fail(lease, f"{type(error).__name__}: {str(error)[:200]}")
            raise
        except BaseException:
            self.buffer.return_(lease)
            raise
        if is_complete:
            done.num_portions += self.buffer.settle(lease)  # not if one of its groups was refused meanwhile
        elif not is_lost.is_set():
            self.buffer.return_(lease)
            done.num_returned += 1

    def _sample_chunks(self, lease: Lease, done: WorkDone, is_lost: threading.Event) -> bool:
        """Whether every group of the portion is published now."""
        prompts = from_bytes(lease.item.payload, schema=PromptFrame).rows(named=True)
        per_chunk = max(1, self.chunk_samples // self.group_size)
        known = self._known(lease, prompts)
        for first in range(0, len(prompts), per_chunk):
            chunk = prompts[first : first + per_chunk]
            missing = [prompt for prompt in chunk if prompt["prompt_id"] not in known]
            if not missing:
                continue
            needed = 0.0 if self.keeps_partial else self._chunk_seconds
            if is_lost.is_set() or self.departure.seconds_left() <= needed:
                return False
            start = time.monotonic()
            repeats = self.is_deterministic and not self.keeps_partial
            groups, num_tokens, is_whole = self.sample(lease, chunk if repeats else missing, done, is_lost)
            done.num_tokens += num_tokens
            if groups and not is_lost.is_set():
                seconds = time.monotonic() - start
                self.buffer.publish(lease, groups, num_tokens=num_tokens, seconds=seconds)
                self._close_if_met(lease.item.iteration)
                done.num_samples += sum(group.num_samples for group in groups)
            if not is_whole:
                return False
            self._chunk_seconds = time.monotonic() - start
        return True

    def _close_if_met(self, iteration: int) -> None:
        if self.quota_groups and self.buffer.has_met(iteration, self.quota_groups):
            self.buffer.close(iteration)

    def _known(self, lease: Lease, prompts: Sequence[dict[str, Any]]) -> set[str]:
        """Groups of the portion that an earlier attempt published."""
        return self.buffer.published(lease.item, [prompt["prompt_id"] for prompt in prompts])

    def sample(
        self, lease: Lease, prompts: Sequence[Row], done: WorkDone, is_lost: threading.Event
    ) -> tuple[list[Group], int, bool]:
        """The finished groups of some prompts, tokens sampled, and whether none was aborted."""
        self._require_version(lease)
        begun, num_tokens = self._begun(lease, prompts), 0
        while True:
            groups, count = self._go_on(lease, prompts, begun)
            num_tokens += count
            finished = [rows for rows in groups if is_finished(rows, self.group_size)]
            is_whole = len(finished) == len(prompts)
            is_over = is_lost.is_set() or self.departure.seconds_left() <= 0
            if is_whole or is_over or self.required_version is None:
                break
            begun = {(row["prompt_id"], row["sample_index"]): row for rows in groups for row in rows}
        if self.keeps_partial:
            rest = [rows for rows in groups if rows and not is_finished(rows, self.group_size)]
            done.num_parked += self._park(lease, rest)
        elif self.is_deterministic and not is_whole:
            return [], num_tokens, False  # sampled again whole, so nothing of it may be stored
        return _packed(finished), num_tokens, is_whole

    def _require_version(self, lease: Lease) -> None:
        version = lease.item.policy_version
        if self.required_version is None and self.engine.version != version:
            raise RuntimeError(
                f"portion {lease.item.item_id} must be sampled by policy version "
                f"{version}, the engine holds version {self.engine.version}. "
                "Load the required version first."
            )

    def _go_on(self, lease: Lease, prompts: Sequence[Row], begun: Begun) -> tuple[list[list[Row]], int]:
        """The samples of each group once the engine has answered for what is missing, and its tokens."""
        requests = [requests_of(prompt, begun, self._seeds(prompt)) for prompt in prompts]
        completions = iter(self._generate(prompts, requests))
        answers = [[next(completions) for _ in each] for each in requests]
        groups = [
            group_rows(
                prompt,
                begun,
                each,
                group_size=self.group_size,
                policy_version=lease.item.policy_version,
                params=self.params,
            )
            for prompt, each in zip(prompts, answers, strict=True)
        ]
        return groups, sum(len(c.response_ids) for each in answers for group in each for c in group)

    def _generate(self, prompts: Sequence[Row], requests: Sequence[list[Request]]) -> list[list[Completion]]:
        flat = [one for each in requests for one in each]
        if self.dialogue is None:
            return self.engine.generate(flat, self.params)
        names = [p["prompt_id"] for p, each in zip(prompts, requests, strict=True) for _ in each]
        return self.dialogue.generate(self.engine, names, flat, self.params)

    def _seeds(self, prompt: Row) -> list[int]:
        return [
            seed_of(self.base_seed, prompt["iteration"], prompt["prompt_id"], index)
            for index in range(self.group_size)
        ]

    def _begun(self, lease: Lease, prompts: Sequence[Row]) -> Begun:
        """What earlier attempts, or the iteration before, left of these groups."""
        if not self.keeps_partial:
            return {}
        names = [prompt["prompt_id"] for prompt in prompts]
        return read_parked(self.buffer.parked(lease.item, names))

    def _park(self, lease: Lease, groups: Sequence[Sequence[Row]]) -> int:
        """Keep unfinished groups; returns their tokens, 0 where another attempt has the portion by now."""
        stored = self.buffer.park(lease, _packed(groups)) if groups else 0
        return sum(len(row["response_ids"]) for rows in groups for row in rows) if stored else 0

    @contextmanager
    def _attended(self, lease: Lease) -> Iterator[threading.Event]:
        """While the block runs, renew the lease three times per period, and stop the engine once the lease or
        the worker's time is over. The event says that the lease is lost."""
        is_lost, renewed = threading.Event(), time.monotonic()
        period = self.buffer.lease_seconds / 3
        if self.quota_groups:  # a closed iteration voids its leases, and stragglers should learn that soon
            period = min(period, STRAGGLER_SECONDS)

        def attend() -> None:
            nonlocal renewed
            if time.monotonic() - renewed > period and not is_lost.is_set():
                renewed = time.monotonic()
                if not self.buffer.renew(lease):
                    is_lost.set()
            if is_lost.is_set() or self.departure.seconds_left() <= 0:
                self.engine.abort()

        with meanwhile(attend, every=min(ATTEND_SECONDS, period), name=f"attend {lease.item.item_id}"):
            yield is_lost


def _packed(groups: Sequence[Sequence[Row]]) -> list[Group]:
    """Validated together, stored a group at a time."""
    frame, first, packed = make_frame([row for rows in groups for row in rows], RolloutFrame), 0, []
    for rows in groups:
        payload = to_bytes(frame.slice(first, len(rows)))
        packed.append(Group(group_id=rows[0]["prompt_id"], num_samples=len(rows), payload=payload))
        first += len(rows)
    return packed
