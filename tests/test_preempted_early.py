"""A training told to stop before its policy's pass: what its critic learned is kept, and the end is prompt.

As in ``test_preemption.py``: real ranks, store and signals.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job
from test_preemption import attempt, content, disturbed, forget, made, make_job, told_at

from tasks.artifacts.unfinished import unfinished_updates
from tasks.session import run_store

ALGORITHM = {
    "num_epochs": 2, "advantage": "gae", "gae_lambda": 0.95, "whiten": True,
    "correction": {"proximal": "recomputed", "weight": "truncate", "high": 5.0},
}  # fmt: skip
NUM_STEPS = 4
"""Of the critic, and then of the policy: two epochs over two mini-batches."""


@pytest.fixture(scope="module")
def job(store_folder: Path) -> Job:
    return make_job("early", store_folder, ALGORITHM, minibatches=2)


def while_it_loads(do: Callable[[], None], *, head: str = "tokens") -> Callable[[], None]:
    """Call ``do`` when a rank has the policy, or the critic, half in memory."""

    def hurt() -> None:
        from tasks.policy.models import model
        from tasks.policy.training import workbench

        load, fill = workbench.load_policy, model.fill

        def load_policy(*args: Any, **kwargs: Any) -> Any:
            if kwargs["head"] == head:
                left = iter([None] * 5)
                model.fill = lambda *a: (next(left, 0) == 0 and do(), fill(*a))
            return load(*args, **kwargs)

        workbench.load_policy = load_policy

    return hurt


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def refuse(_rank: int, _stop: Any) -> None:
    raise AssertionError("trained again")


def test_what_a_critic_learned_is_kept_and_an_update_ends_with_the_same_bits(job, tmp_path):
    """Told to stop in the middle of the critic's pass, then while the policy loads."""
    codes, said = attempt(job, tmp_path)
    assert codes == [0, 0], said
    undisturbed = content(made(tmp_path))
    assert undisturbed["critic"] and undisturbed["metrics"]["critic/grad_norm"] > 0
    forget(job)
    codes, said = attempt(job, tmp_path, told_at(3, of="critic"))
    assert codes == [143, 143] and "stored the critic after 3 mini-batches" in said, said
    codes, said = attempt(job, tmp_path, while_it_loads(tell))
    assert codes == [143, 143] and "behind 3 mini-batches of the critic" in said, said
    assert not (tmp_path / "candidate.json").exists()
    ((_key, update, _),) = unfinished_updates(run_store(job[0]), 1)
    assert update.critic == undisturbed["critic"] and not update.files and not update.done
    codes, said = attempt(job, tmp_path, lambda: disturbed(0, refuse, of="critic"))
    assert codes == [0, 0] and "with the critic that an earlier attempt had trained" in said, said
    assert content(made(tmp_path)) == undisturbed


def wait_in_native_code() -> None:
    """As for another rank, where Python hears of no signal: on a lock of this thread's own."""
    threading.Timer(0.2, tell).start()
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(lock)


@pytest.mark.parametrize("do", [tell, wait_in_native_code])
def test_told_to_stop_while_it_loads_a_training_ends_at_once_and_stores_nothing(job, tmp_path, do):
    forget(job)
    begin = time.monotonic()
    codes, said = attempt(job, tmp_path, while_it_loads(do, head="value"))
    assert codes == [143, 143], said
    assert time.monotonic() - begin < job[0].config.train.grace_seconds
    assert not list(unfinished_updates(run_store(job[0]), 1)) and not (tmp_path / "candidate.json").exists()
