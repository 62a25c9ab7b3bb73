"""A small campaign, stage by stage, in a process that kills itself and its ranks at a chosen moment.

The stages are the tasks of the graph, called as they are; ranks are forked instead of started, which saves
their imports. ``record`` lists the moments of an undisturbed run: before and after every request to S3, every
call of the buffer, every optimizer step, every batch that the engine decodes and every phase of storing a
candidate.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.archive import archive
from tasks.artifacts.client import Bucket
from tasks.artifacts.store import PolicyStore
from tasks.buffer import assemble
from tasks.checkpoint import initialize, open_campaign, publish, resume
from tasks.config import CampaignConfig
from tasks.engine.embedded import EmbeddedEngine
from tasks.evaluate import evaluate
from tasks.experience.buffer import ExperienceBuffer
from tasks.policy.checkpoint import weights
from tasks.policy.checkpoint.snapshot import HostArena
from tasks.policy.checkpoint.upload import ShardUpload
from tasks.policy.training import epoch, update
from tasks.prompts import offer_prompts
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.reward import score
from tasks.rollout import rollout_worker


@dataclass
class Moments:
    """Names the moments of this process; kills its group at one of them."""

    target: str = ""
    trace: Path | None = None
    role: str = "main"
    seen: Counter[str] = field(default_factory=Counter)

    def pass_by(self, when: str, what: str) -> None:
        name = f"{self.role} {when} {what}"
        self.seen[name] += 1
        if self.trace and self.seen[name] == 1:
            with self.trace.open("a") as file:
                file.write(f"{name}\n")
        if name == self.target:
            os.killpg(0, signal.SIGKILL)

    def wrap(self, owner: Any, name: str, label: str = "") -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            what = label or name
            if label == "s3":
                what = f"s3 {args[1]} {_shortened(args[2])}"
            self.pass_by("before", what)
            result = original(*args, **kwargs)
            self.pass_by("after", what)
            return result

        setattr(owner, name, wrapped)

    def install(self) -> None:
        self.wrap(Bucket, "_call", "s3")
        for name in ("put_work", "lease", "publish", "settle", "exchange_rollouts", "drop"):
            self.wrap(ExperienceBuffer, name, f"buffer {name}")
        for owner, name in (
            (epoch, "train_minibatch"), (HostArena, "take"), (weights, "digest_tensors"),
            (PolicyStore, "put_patched"), (ShardUpload, "start"), (ShardUpload, "finish"),
            (PolicyStore, "commit"),
            (PolicyStore, "_advance"), (EmbeddedEngine, "generate"), (EmbeddedEngine, "load"),
        ):  # fmt: skip
            self.wrap(owner, name)


def _shortened(key: str) -> str:
    """A key without its campaign and digests."""
    return re.sub(r"[0-9a-f]{16,}", "#", re.sub(r"/[0-9a-f]{2}/", "/", re.sub(r"^[^/]*/", "", key)))


def run_campaign(config: CampaignConfig, moments: Moments) -> None:
    """The campaign to its end, from wherever it stands."""
    ranks = [Ranks(config.train.world_size, moments) for _ in range(config.schedule.iterations)]
    run = open_campaign(
        config=config, name=None, iterations=None, learning_rate=None, store=None, fresh=False
    )
    state = resume(run=run)
    versions = list(state.versions) or [initialize(run=run)]
    for k in range(state.iterations_done, config.schedule.iterations):
        policy = versions[-1]
        prompts = offer_prompts(run=run, iteration=k, behavior=policy)
        rollout_worker(worker=0, run=run, prompts=prompts, behavior=policy)
        scores = score(run=run, prompts=prompts, behavior=policy, rollouts=[])
        batch = assemble(run=run, scores=scores, policy=policy)
        kept = archive(run=run, batch=batch, policy=policy)
        trained = ranks[k].update(run, batch, policy)
        versions.append(publish(run=run, candidate=trained, archive=kept))
    evaluate(run=run, policy=versions[-1])


class Ranks:
    """The ranks of one update, forked before anything runs: the threads of polars do not survive a fork."""

    def __init__(self, size: int, moments: Moments) -> None:
        context = multiprocessing.get_context("fork")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._result, sender = context.Pipe(duplex=False)
        self._pipes, self._processes = [], []
        for rank in range(size):
            receiver, pipe = context.Pipe(duplex=False)
            arguments = (receiver, moments, rank, size, port, sender)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)

    def update(self, run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
        for pipe in self._pipes:
            pipe.send((run, batch, policy))
        while not self._result.poll(0.1):  # a rank that fails sends nothing
            codes = [process.exitcode for process in self._processes]
            assert all(code in (None, 0) for code in codes), f"ranks ended with {codes}"
        return self._result.recv()


def _rank(receiver: Any, moments: Moments, rank: int, size: int, port: int, sender: Any) -> None:
    work = receiver.recv()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in names.items()})
    moments.role = f"rank{rank}"
    candidate = update.update(*work)
    if rank == 0:
        sender.send(candidate)


def in_child(work: Callable[..., Any], *arguments: Any, log: Path) -> tuple[int, Any]:
    """Call in a forked process group of its own: the signal that ended it or 0, and the result."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sender.send(work(*arguments))
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # ranks that were not needed
    assert os.WEXITSTATUS(status) == 0, log.read_text()[-5000:]
    return 0, result


def disturbed_campaign(config: CampaignConfig, moments: Moments) -> None:
    moments.install()
    run_campaign(config, moments)
