"""SIGTERM in a training rank: keep what there is if time allows, unwind, exit with 143, which nobody takes
for success.

Outside ``StopRequest.deferred`` the signal unwinds at once: nothing is lost there that would be worth the
wait. Inside, it is only noted: ranks agree on it at the next mini-batch (``agree_on_passes`` carries it in
the exchange that it makes anyway) and store the unfinished update together (``unfinished.py``). One signalled
rank is enough. What does not fit into the grace period is given up, with a line that says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from tasks.say import say

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended."""
UNWIND_SECONDS = 5.0
"""For a rank with nothing to store; one that waits for others in native code does not hear of the signal."""


class StopAgreed(Exception):
    """Some rank was told to stop; raised on all ranks, between the same two mini-batches."""


class StopRequest:
    """Whether this rank was told to stop, and whether it may finish something first."""

    def __init__(self, arm: Callable[[], object] = lambda: None) -> None:
        self.is_asked = False
        self.may_wait = False
        """Whether there is something to store first."""
        self._arm = arm

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the signal is noted and the caller asks for it; whatever then happens, the end is 143."""
        self.may_wait = True
        try:
            yield
        except Exception as error:  # the other ranks may be gone already, and their connections with them
            if self.is_asked:
                raise SystemExit(EXIT_CODE) from error
            raise
        finally:
            self.may_wait = False
        if self.is_asked:
            raise SystemExit(EXIT_CODE)

    def ask(self) -> None:
        """From the signal handler."""
        self.is_asked = True  # also where Python drops the exception, as it does in a finalizer
        if not self.may_wait:
            raise SystemExit(EXIT_CODE)

    def join(self) -> None:
        """Some rank was told to stop; the grace period of a rank without the signal begins now."""
        if not self.is_asked:
            self.is_asked = True
            self._arm()


@contextlib.contextmanager
def exit_on_sigterm(*, grace_seconds: float) -> Iterator[StopRequest]:
    """Inside, SIGTERM ends this rank with 143; one that has not ended in time just ends.

    A rank waits most of its life in native code (a collective, a store), where Python runs no signal handler
    until the call returns; a thread that hears of the signal through a socket ends the process then. Call it
    from the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    done = threading.Event()
    request = StopRequest(arm=lambda: writer.send(bytes([signal.SIGTERM])))

    def stop(_number: int, _frame: FrameType | None) -> None:
        request.ask()

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] != signal.SIGTERM:
                continue
            limit, said = min(UNWIND_SECONDS, grace_seconds), "; it had nothing to store"
            if request.may_wait:
                limit = grace_seconds
                said = " (train.grace_seconds), got no end: what this attempt had trained is given up"
            if not done.wait(limit):
                say("sigterm", f"a rank must end {limit:g} s after SIGTERM{said}")
                os._exit(EXIT_CODE)

    before = signal.signal(signal.SIGTERM, stop)
    fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="sigterm", daemon=True)
    thread.start()
    try:
        yield request
    finally:
        done.set()
        signal.set_wakeup_fd(fd_before)
        signal.signal(signal.SIGTERM, before)
        writer.close()  # ends the thread
        thread.join()
        reader.close()
