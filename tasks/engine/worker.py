"""The rollout worker: lease a portion, sample its groups, publish them, settle; until the iteration's queue
is empty.

The same loop serves a mapped Flyte task and a standing worker. A worker that vanishes loses its lease by
expiry and others take over; one that fails hands its lease back at once. Groups are identified by what they
are samples of, so work done twice is stored once.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tasks.engine.protocol import Engine, Request, SamplingParams
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import LeaseLost
from tasks.experience.ledger import seed_of
from tasks.experience.records import Group, Lease
from tasks.schema import PromptFrame, RolloutFrame, from_bytes, make_frame, to_bytes

POLL_SECONDS = 0.2


@dataclass(kw_only=True, slots=True)
class WorkDone:
    num_portions: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def drain_queue(
    engine: Engine,
    buffer: ExperienceBuffer,
    *,
    worker: str,
    iteration: int,
    params: SamplingParams,
    base_seed: int,
    group_size: int,
    max_portions: int,
) -> WorkDone:
    """Work until every portion of the iteration is settled, by this worker or another.

    Args:
        max_portions: leave after this many portions; 0 = no bound.
    """
    done = WorkDone()
    while max_portions == 0 or done.num_portions < max_portions:
        leases = buffer.lease(worker, iteration=iteration, policy_version=engine.version)
        if not leases:
            if buffer.outstanding(iteration) == 0:
                break
            time.sleep(
                POLL_SECONDS
            )  # the rest is leased to others: wait for the end, or for a lease to expire
            continue
        start = time.monotonic()
        for lease in leases:
            try:
                with _renewed(buffer, lease):
                    groups, num_tokens = sample_portion(
                        engine, lease, params=params, base_seed=base_seed, group_size=group_size
                    )
                    buffer.publish(lease, groups)
            except LeaseLost:
                continue  # another worker has the portion now; its samples are the same
            except BaseException:
                buffer.return_(lease)
                raise
            buffer.settle(lease)
            done.num_portions += 1
            done.num_samples += sum(group.num_samples for group in groups)
            done.num_tokens += num_tokens
        done.seconds += time.monotonic() - start
    return done


def sample_portion(
    engine: Engine, lease: Lease, *, params: SamplingParams, base_seed: int, group_size: int
) -> tuple[list[Group], int]:
    """The sampled groups of one portion and the number of tokens generated."""
    if engine.version != lease.item.policy_version:
        raise RuntimeError(
            f"portion {lease.item.item_id} must be sampled by policy version {lease.item.policy_version}, "
            f"the engine holds version {engine.version}. Load the required version first."
        )
    prompts = from_bytes(lease.item.payload, schema=PromptFrame).rows(named=True)
    requests = [
        Request(
            prompt_ids=tuple(prompt["prompt_ids"]),
            seeds=tuple(
                seed_of(base_seed, prompt["iteration"], prompt["prompt_id"], index)
                for index in range(group_size)
            ),
        )
        for prompt in prompts
    ]
    rows: list[dict[str, Any]] = [
        {
            **prompt,
            "sample_index": index,
            "policy_version": engine.version,
            "response_ids": completion.response_ids,
            "behavior_logprob": completion.logprobs,
            "finish_reason": completion.finish_reason,
        }
        for prompt, completions in zip(prompts, engine.generate(requests, params), strict=True)
        for index, completion in enumerate(completions)
    ]
    frame = make_frame(rows, RolloutFrame)  # validated once a portion, stored once a group
    groups = [
        Group(
            group_id=prompt["prompt_id"],
            num_samples=group_size,
            payload=to_bytes(frame.slice(i * group_size, group_size)),
        )
        for i, prompt in enumerate(prompts)
    ]
    return groups, int(frame["response_ids"].list.len().sum())


@contextmanager
def _renewed(buffer: ExperienceBuffer, lease: Lease) -> Iterator[None]:
    """Renew a lease three times per period while the block runs."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(buffer.lease_seconds / 3):
            if not buffer.renew(lease):
                return

    thread = threading.Thread(target=renew, name=f"renew {lease.item.item_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
