"""Verifiers in killable processes. Blind spot: a verifier that leaves the machine without memory at once."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from tasks.environments.pool import Call, PoolError, VerifierPool, standing_pool
from tasks.environments.scorer import as_outcome

MODULE = """
import os, time
from tasks.environments.protocol import Outcome, Prompt

class Torture:
    max_turns = 3
    def fingerprint(self): return "torture"
    def train_prompt(self, position): return Prompt(prompt_id=str(position), text="x")
    def held_out_prompts(self): return []
    def demonstration(self, prompt): return ""
    def demonstration_turns(self, prompt): return [""]
    def reply(self, prompt_id, turns): return None if turns[-1] == "end" else turns[-1] + "!"
    def verify(self, prompt_id, response, *, is_finished): ...
    def verify_turns(self, prompt_id, turns, *, is_finished):
        response = turns[-1]
        if response == "hang":
            time.sleep(1000)
        if response == "spin":
            while True: pass
        if response == "raise":
            raise RuntimeError("boom")
        if response == "none":
            return None
        if response == "grow":
            kept = []
            while True: kept.append(bytearray(1 << 20))
        if response == "exit":
            raise SystemExit(0)
        if response == "crash":
            os.kill(os.getpid(), 11)
        if response == "child":
            os.system("sleep 1000 &")
            time.sleep(1000)
        if response == "fork":
            os.fork()
            return Outcome(kind="score", reward=0.5)
        if response == "huge":
            return Outcome(kind="failure", reason="x" * (2 << 20))
        if response == "object":
            return Outcome(kind="score", reward=0.5, is_exact=object())
        if response == "lie":
            return Outcome(kind="failure", reward=1.0, reason="both")
        return Outcome(kind="score", reward=int(response) / 1000)

def make(*, held_out, seed, options):
    if options.get("broken"):
        raise KeyError("no data")
    return Torture()
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("module")
    (folder / "torture_environment.py").write_text(textwrap.dedent(MODULE))
    sys.path.insert(0, str(folder))
    yield {"name": "module", "module": "torture_environment"}
    sys.path.remove(str(folder))


@pytest.fixture
def pool(module):
    pool = VerifierPool(
        environment=module, seed=0, workers=2, max_workers=64, deadline_seconds=1.0, memory_mb=64
    )
    yield pool
    pool.close()


def verify(pool, *responses):
    return pool.run([Call(prompt_id=str(i), turns=(text,)) for i, text in enumerate(responses)])


def memory(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def live_workers(pool):
    children = Path(f"/proc/{pool.template_pid}/task/{pool.template_pid}/children").read_text().split()
    return [int(pid) for pid in children]


def test_a_fifth_of_bad_samples_costs_neither_the_others_nor_a_worker_nor_memory(pool):
    """1,000 samples: 5 % hang, 5 % raise, 5 % return None, 5 % allocate without bound."""
    pool.deadline_seconds = 3.0  # the machine of the tests is shared
    texts = [word for word in ("hang", "raise", "none", "grow") for _ in range(50)]
    texts += [str(i) for i in range(800)]
    random.Random(0).shuffle(texts)
    verify(pool, *texts[:100])
    before = memory(os.getpid()), memory(pool.template_pid)
    start = time.monotonic()
    answers = verify(pool, *texts)
    seconds = time.monotonic() - start
    after = memory(os.getpid()), memory(pool.template_pid)
    for text, answer in zip(texts, answers, strict=True):
        outcome = as_outcome(answer)
        if text.isdigit():
            assert (outcome.kind, outcome.reward) == ("score", int(text) / 1000)
        else:
            assert (outcome.kind, outcome.reward) == ("failure", None) and outcome.reason
    reasons = Counter(as_outcome(answer).reason.split(":")[0] for answer in answers)
    assert (reasons["TimeoutError"], reasons["RuntimeError"]) == (50, 50)
    assert (reasons["TypeError"], reasons["MemoryError"]) == (50, 50)
    assert seconds < 2 * pool.deadline_seconds, seconds
    assert pool.size == 2 and len(live_workers(pool)) == 2
    assert all(late - early < 8 << 20 for early, late in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("spin", "TimeoutError"),
        ("exit", "SystemExit"),
        ("crash", "its worker died"),
        ("huge", "it answered with"),
        ("lie", "TypeError"),
        ("object", "TypeError: Object of type object is not JSON serializable in {'kind'"),
        ("1001", "ValueError"),
    ],
)
def test_whatever_a_verifier_does_is_its_own_samples_failure(pool, text, reason):
    answers = [as_outcome(answer) for answer in verify(pool, "1", text, "2")]
    assert [outcome.kind for outcome in answers] == ["score", "failure", "score"]
    assert answers[1].reason.startswith(reason) and answers[1].reward is None
    assert pool.size == 2 and [as_outcome(a).reward for a in verify(pool, "3")] == [0.003]


def test_a_verifier_whose_fork_returns_answers_its_call_once(pool):
    """Two answers to one call would be taken for the next call's, and every reward behind it be another's."""
    texts = [*map(str, range(40)), "fork", *map(str, range(40, 80))]
    pool.run([Call(prompt_id="0", turns=(text,)) for text in map(str, range(200))])  # chunks grow
    for _ in range(3):
        rewards = [as_outcome(answer).reward for answer in verify(pool, *texts)]
        assert rewards == [0.5 if text == "fork" else int(text) / 1000 for text in texts]


def test_a_kill_ends_what_the_verifier_started(pool):
    verify(pool, "child")
    deadline = time.monotonic() + 5
    while subprocess.run(["pgrep", "-f", "^sleep 1000$"], capture_output=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_hang_does_not_take_its_chunk_with_it(pool):
    verify(pool, *map(str, range(500)))  # fast calls: chunks grow
    start = time.monotonic()
    answers = verify(pool, "hang", *map(str, range(200)), "hang", *map(str, range(200)), "hang")
    assert sum(answer["kind"] == "failure" for answer in answers) == 3
    assert time.monotonic() - start < 2 * pool.deadline_seconds  # together, not one after another


def test_a_template_that_was_killed_is_started_again(pool):
    workers = live_workers(pool)
    os.kill(pool.template_pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/statm").exists() and memory(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first = verify(pool, "1", "2")
    assert [as_outcome(answer).kind for answer in first] == ["failure", "failure"]
    assert [as_outcome(answer).reward for answer in verify(pool, "1", "2")] == [0.001, 0.002]


def test_replies_come_from_the_pool_too(pool):
    calls = [Call(prompt_id="0", turns=(text,), call="reply") for text in ("a", "end")]
    assert [answer["text"] for answer in pool.run(calls)] == ["a!", None]


def test_an_environment_that_cannot_be_made_is_named(module):
    arguments = {"seed": 0, "workers": 1, "max_workers": 1, "deadline_seconds": 1.0, "memory_mb": 64}
    with pytest.raises(PoolError, match="KeyError: 'no data'"):
        VerifierPool(environment={**module, "options": '{"broken": 1}'}, **arguments)


def test_workers_end_with_the_process_that_owns_them(module):
    script = (
        "import sys, os, time\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from tasks.environments.pool import VerifierPool\n"
        f"pool = VerifierPool(environment={module!r}, seed=0, workers=2, max_workers=2, "
        "deadline_seconds=1.0, memory_mb=64)\n"
        "print(pool.template_pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    template = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{template}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_standing_pool_is_kept_and_not_shared_with_a_fork(module):
    arguments = {"seed": 0, "workers": 1, "max_workers": 1, "deadline_seconds": 1.0, "memory_mb": 64}
    first = standing_pool(environment=module, **arguments)
    assert standing_pool(environment=module, **arguments) is first
    assert standing_pool(environment=module, **{**arguments, "seed": 1}) is not first
