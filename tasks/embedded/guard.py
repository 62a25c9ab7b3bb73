"""Runs one server as a child and stops it when its last user is gone. A script: standard library only, never
imported.

Standard input is the reading end of a FIFO; every process that uses the server holds a writing end. The
kernel closes those ends however a process dies (SIGKILL included), so "no writer left" is the one signal that
cannot be forgotten. The guard has its own session: Ctrl-C at the terminal and a kill of the owner's process
group do not reach it.

The lock file descriptor is inherited by the server, so the lock is held for as long as either of the two
lives.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1


def has_users(poll: select.poll) -> bool:
    return not any(event & select.POLLHUP for fd, event in poll.poll(0) if fd == 0)


def retire(spec: dict, poll: select.poll) -> bool:
    """Withdraw the discovery file; True if nobody joined in the meantime.

    A joining process opens the FIFO and then reads the discovery file; this withdraws the file and then looks
    at the FIFO. Whatever the interleaving, one of the two sees the other.
    """
    withdrawn = spec["discovery"] + ".stopping"
    with contextlib.suppress(FileNotFoundError):
        os.rename(spec["discovery"], withdrawn)
    if has_users(poll):
        with contextlib.suppress(FileNotFoundError):
            os.rename(withdrawn, spec["discovery"])
        return False
    return True


def wait_for_last_user(spec: dict, server: subprocess.Popen, wakeup: int) -> None:
    poll = select.poll()
    poll.register(0, 0)  # only POLLHUP, which needs no registration: no writer is left
    poll.register(wakeup, select.POLLIN)
    while server.poll() is None:
        events = dict(poll.poll())
        if wakeup in events and signal.SIGTERM in os.read(wakeup, 64):
            return
        if events.get(0, 0) & select.POLLHUP and retire(spec, poll):
            return


def stop(server: subprocess.Popen, grace_s: float) -> None:
    """SIGTERM, a grace period, SIGKILL; whatever the server started ends with it."""
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def die_with_guard() -> None:
    """A guard that is itself killed by SIGKILL cannot stop the server; on Linux the kernel does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    spec = json.loads(sys.argv[1])
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lock = os.open(spec["lock"], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # free, but for processes that look at it for an instant
    server = subprocess.Popen(
        spec["argv"],
        stdin=subprocess.DEVNULL,
        cwd=spec["cwd"],
        env=spec["env"],
        pass_fds=[lock],
        process_group=0,
        preexec_fn=die_with_guard,
    )
    started = time.monotonic()
    wait_for_last_user(spec, server, wakeup)
    if server.poll() is not None:
        lived = time.monotonic() - started
        print(f"guard: the server ended by itself, code {server.returncode}, after {lived:.1f} s")
    stop(server, spec["grace_s"])
    for path in [spec["discovery"], spec["discovery"] + ".stopping", *spec["leftovers"]]:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main()
