"""Verifiers in killable processes: a deadline for each sample, a memory limit for each worker.

A pool has ``workers`` processes and grows to ``max_workers`` while samples wait behind slow ones; after a
batch it is back at its size, whatever was killed. Each worker holds a chunk of calls, sized by the measured
rate, and answers one by one: a kill costs the one call that hung, the rest of its chunk goes to another
worker.

What surprises: the deadline is wall time. On a machine with more spinning workers than cores a good call also
takes longer, so a deadline should be several times what a verifier needs.
"""

import atexit
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.environments.template import HEAD

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 120.0
STALL_SECONDS = 0.05
"""A worker that is at one call for longer makes the pool grow, if others wait."""
CHUNK_SECONDS = 0.02
MAX_CHUNK = 64
MAX_ANSWER_BYTES = 1 << 20


class PoolError(RuntimeError):
    """The environment could not be made in the template process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Verify a conversation, or ask the environment for its next reply."""

    prompt_id: str
    turns: tuple[str, ...]
    is_finished: bool = True
    call: str = "verify"

    def as_dict(self) -> dict[str, Any]:
        return {
            "call": self.call, "prompt_id": self.prompt_id, "turns": self.turns,
            "is_finished": self.is_finished,
        }  # fmt: skip


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    channel: socket.socket
    assigned: deque[int] = field(default_factory=deque)
    since: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    is_stale: bool = False
    """What it was sent after the call at hand was given to others."""


class VerifierPool:
    """One environment's verifier in ``workers`` processes. Use it from one thread at a time (it locks)."""

    def __init__(
        self,
        *,
        environment: dict[str, Any],
        seed: int,
        workers: int,
        max_workers: int,
        deadline_seconds: float,
        memory_mb: int,
    ) -> None:
        self.workers, self.max_workers, self.deadline_seconds = workers, max_workers, deadline_seconds
        wanted = {
            "environment": environment, "seed": seed, "memory_bytes": memory_mb * 2**20, "path": sys.path,
        }  # fmt: skip
        self._wanted = json.dumps(wanted)
        self._lock = threading.Lock()
        self._live: list[_Worker] = []
        self._rate = 0.0
        self.num_killed = 0
        self._start()

    @property
    def size(self) -> int:
        return len(self._live)

    @property
    def calls_per_second(self) -> float:
        """Of one worker, measured; 0 before the first answer."""
        return self._rate

    @property
    def template_pid(self) -> int:
        return self._template.pid

    def run(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """An answer a call, in their order: an outcome as a dict, with ``seconds``. Never raises for a
        call."""
        with self._lock:
            try:
                return _Batch(self, calls).run()
            finally:
                self._restore()

    def close(self) -> None:
        """End all workers; the pool cannot be used afterwards."""
        for worker in self._live:
            worker.channel.close()
        self._live.clear()
        self._control.close()  # the template kills what is left and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._template.wait(5)
        if self._template.poll() is None:
            self._template.kill()
            self._template.wait()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-m", "tasks.environments.template", str(theirs.fileno())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        assert self._template.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._template.stdin as stdin:
            stdin.write(self._wanted.encode())
        self._control.settimeout(START_SECONDS)
        try:
            said = self._control.recv(4096).decode()
        except TimeoutError:
            said = f"error no answer within {START_SECONDS:g} s"
        if said != "ready":
            self._template.kill()
            self._template.wait()
            self._control.close()
            raise PoolError(
                "the environment must be made in the verifiers' process, got "
                f"{said.removeprefix('error ') or 'a process that ended'}. Mend the environment's "
                "configuration or install what it needs."
            )
        self._live = [self._fork() for _ in range(self.workers)]

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
        pid = self._control.recv(64)
        if not pid:
            raise ConnectionError("the template process ended")
        ours.setblocking(False)
        return _Worker(pid=int(pid), channel=ours)

    def _kill(self, worker: _Worker) -> None:
        self._live.remove(worker)
        worker.channel.close()
        self.num_killed += 1
        self._control.send(f"kill {worker.pid}".encode())
        self._control.recv(64)

    def _restore(self) -> None:
        """Back to full size, neither less nor more; a template that died is started again."""
        try:
            for worker in [worker for worker in self._live if worker.assigned]:
                self._kill(worker)
            for worker in self._live[self.workers :]:
                self._kill(worker)
            while len(self._live) < self.workers:
                self._live.append(self._fork())
        except (OSError, ValueError):
            self.close()
            self._start()

    def _measure(self, seconds: float) -> None:
        rate = 1 / max(seconds, 1e-5)
        self._rate = rate if self._rate == 0 else 0.9 * self._rate + 0.1 * rate


class _Batch:
    """One run: which calls wait, which worker has which, what was answered."""

    def __init__(self, pool: VerifierPool, calls: Sequence[Call]) -> None:
        self.pool, self.calls = pool, calls
        self.waiting = deque(range(len(calls)))
        self.answers: dict[int, dict[str, Any]] = {}
        self.selector = selectors.DefaultSelector()

    def run(self) -> list[dict[str, Any]]:
        try:
            for worker in self.pool._live:
                self.selector.register(worker.channel, selectors.EVENT_READ, worker)
            while len(self.answers) < len(self.calls):
                self._assign()
                for key, _ in self.selector.select(timeout=0.02):
                    self._read(key.data)
                self._enforce()
        except OSError as error:  # the template died, and its workers with it
            for index in range(len(self.calls)):
                reason = f"the verifiers' process ended: {error}"
                self.answers.setdefault(index, {"kind": "failure", "reason": reason, "seconds": 0.0})
        finally:
            self.selector.close()
        return [self.answers[index] for index in range(len(self.calls))]

    def _assign(self) -> None:
        pool, now = self.pool, time.monotonic()
        idle = [worker for worker in pool._live if not worker.assigned]
        stalled = sum(1 for w in pool._live if w.assigned and now - w.since > STALL_SECONDS)
        if self.waiting and not idle and stalled:
            for _ in range(min(stalled, len(self.waiting), pool.max_workers - pool.size)):
                idle.append(self._add())
        for worker in idle:
            share = -(-len(self.waiting) // (2 * pool.size))
            size = max(1, min(MAX_CHUNK, int(pool.calls_per_second * CHUNK_SECONDS), share))
            chunk = [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]
            if chunk:
                self._send(worker, chunk)

    def _add(self) -> _Worker:
        worker = self.pool._fork()
        self.pool._live.append(worker)
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _send(self, worker: _Worker, chunk: list[int]) -> None:
        body = json.dumps([self.calls[index].as_dict() for index in chunk]).encode()
        worker.assigned.extend(chunk)
        worker.since = time.monotonic()
        worker.channel.settimeout(self.pool.deadline_seconds)
        try:
            worker.channel.sendall(HEAD.pack(len(body)) + body)
        except OSError:
            self._lose(worker, "its worker ended")
            return
        worker.channel.setblocking(False)

    def _read(self, worker: _Worker) -> None:
        try:
            data = worker.channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        worker.received += data
        while len(worker.received) >= HEAD.size and worker.assigned:
            (length,) = HEAD.unpack_from(worker.received)
            if length > MAX_ANSWER_BYTES:
                return self._lose(worker, f"it answered with {length} bytes")
            if len(worker.received) < HEAD.size + length:
                break
            body = bytes(worker.received[HEAD.size : HEAD.size + length])
            del worker.received[: HEAD.size + length]
            try:
                answer = json.loads(body)
                self.pool._measure(float(answer["seconds"]))
            except (ValueError, KeyError, TypeError):
                return self._lose(worker, "it answered what cannot be read")
            self.answers[worker.assigned.popleft()] = answer
            worker.since = time.monotonic()
            if worker.is_stale:
                return self._lose(worker, "")
            if answer.get("reason", "").startswith("MemoryError"):
                return self._lose(worker, "")  # it ends by itself; its memory goes with it
        if not data:
            self._lose(worker, "its worker died (out of memory, or a crash)")
        return None

    def _lose(self, worker: _Worker, reason: str) -> None:
        """The call at hand failed, if there is a ``reason``; the rest of the chunk waits again."""
        if reason and worker.assigned:
            seconds = time.monotonic() - worker.since
            failure = {"kind": "failure", "reason": reason, "seconds": seconds}
            self.answers[worker.assigned.popleft()] = failure
        self.waiting.extendleft(reversed(worker.assigned))
        worker.assigned.clear()
        self.selector.unregister(worker.channel)
        self.pool._kill(worker)
        if self.pool.size < self.pool.workers:
            self._add()

    def _enforce(self) -> None:
        now, limit = time.monotonic(), self.pool.deadline_seconds
        for worker in list(self.pool._live):
            if worker.assigned and now - worker.since > limit:
                self._lose(worker, f"TimeoutError: no answer within the deadline of {limit:g} s; killed")
            elif len(worker.assigned) > 1 and now - worker.since > STALL_SECONDS:
                current = worker.assigned.popleft()  # or one call after another would wait for its deadline
                self.waiting.extendleft(reversed(worker.assigned))
                worker.assigned.clear()
                worker.assigned.append(current)
                worker.is_stale = True


_standing: dict[tuple[int, str], VerifierPool] = {}


def standing_pool(**arguments: Any) -> VerifierPool:
    """This process's pool for these arguments, kept from one stage to the next."""
    key = (os.getpid(), json.dumps(arguments, sort_keys=True))  # a fork must not talk to its parent's workers
    if key not in _standing:
        _standing[key] = VerifierPool(**arguments)
    return _standing[key]


@atexit.register
def _close_standing() -> None:
    for (pid, _), pool in list(_standing.items()):
        if pid == os.getpid():
            pool.close()
