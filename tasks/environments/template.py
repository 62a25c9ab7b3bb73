"""The process that verifier workers are forked from, and the workers: no torch, nothing of the campaign.

    python -m tasks.environments.template CONTROL_FD < specification

The template makes the environment once; a fork of it is a warm worker within milliseconds, so a worker that
hangs or grows can be killed without a second thought. Workers run untrusted code: what they say is JSON,
never pickle. They die with the template, and the template ends when its control socket closes.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from dataclasses import asdict
from typing import Any

from tasks.environments.protocol import Environment, Outcome, is_multi_turn, verify

HEAD = struct.Struct("!I")
MAX_REASON = 500
PR_SET_PDEATHSIG = 1


def main(control_fd: int) -> None:
    from tasks.environment_config import EnvironmentConfig
    from tasks.environments.make import make_environment

    control = socket.socket(fileno=control_fd)
    try:
        wanted = json.load(sys.stdin)
        config = EnvironmentConfig.model_validate(wanted["environment"])
        sys.path[:0] = [path for path in wanted["path"] if path not in sys.path]
        environment = make_environment(config, seed=wanted["seed"])
    except BaseException as error:
        control.send(f"error {type(error).__name__}: {error}"[:4000].encode())
        return
    gc.collect()
    gc.freeze()  # what workers share with the template stays shared
    control.send(b"ready")
    serve(control, environment, memory_bytes=wanted["memory_bytes"])


def serve(control: socket.socket, environment: Environment, *, memory_bytes: int) -> None:
    """Fork and kill workers on request, until the control socket closes."""
    workers: set[int] = set()
    template = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        order, _, argument = message.decode().partition(" ")
        if order == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                _die_with(template)
                work(socket.socket(fileno=fds[0]), environment, memory_bytes=memory_bytes)
                os._exit(0)
            os.close(fds[0])
            workers.add(pid)
            control.send(str(pid).encode())
        elif int(argument) in workers:  # not reaped yet, so the number is still its own
            _end(int(argument))
            workers.discard(int(argument))
            control.send(b"gone")
        else:
            control.send(b"unknown")
    for pid in workers:
        _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and what it started
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # if it died before it had a group of its own
    os.waitpid(pid, 0)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that was said
        os._exit(1)


def work(channel: socket.socket, environment: Environment, *, memory_bytes: int) -> None:
    """Answer calls until the channel closes; after running out of memory, say so and end."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _virtual_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    stream, itself = channel.makefile("rb"), os.getpid()
    while head := stream.read(HEAD.size):
        calls = json.loads(stream.read(*HEAD.unpack(head)))
        for call in calls:
            answer = answer_call(environment, call)
            if os.getpid() != itself:  # a verifier forked and let its child return: one answer a call
                os._exit(1)
            body = _encoded(answer)
            channel.sendall(HEAD.pack(len(body)) + body)
            if answer.get("reason", "").startswith("MemoryError"):
                return


def _encoded(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError) as error:  # NumPy's bool, for one: a worker that died of it had no reason
        reason = f"{type(error).__name__}: {str(error)[:MAX_REASON]} in {str(answer)[:MAX_REASON]}"
        failure = asdict(Outcome(kind="failure", reason=reason))
        return json.dumps({**failure, "seconds": answer["seconds"]}).encode()


def answer_call(environment: Environment, call: dict[str, Any]) -> dict[str, Any]:
    """An outcome as a dict, or for ``reply`` its text; whatever is raised is a failure with its reason."""
    start = time.perf_counter()
    try:
        if call["call"] == "reply":
            assert is_multi_turn(environment)
            text = environment.reply(call["prompt_id"], call["turns"])
            if text is not None and not isinstance(text, str):
                raise TypeError(f"reply must return text or None, got {type(text).__name__}")
            answer: dict[str, Any] = {"kind": "score", "text": text}
        else:
            talk: dict[str, Any] = {"turns": call["turns"], "is_finished": call["is_finished"]}
            answer = asdict(verify(environment, call["prompt_id"], **talk))
    except BaseException as error:  # SystemExit too: a verifier may not end its worker unnoticed
        reason = f"{type(error).__name__}: {str(error)[:MAX_REASON]}"
        answer = asdict(Outcome(kind="failure", reason=reason))
    return {**answer, "seconds": time.perf_counter() - start}


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
