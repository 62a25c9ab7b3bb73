"""SIGTERM in a training rank: unwind, leave nothing behind, exit with 143, which nobody takes for success."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended."""


@contextlib.contextmanager
def exit_on_sigterm(*, grace_seconds: float = 10.0) -> Iterator[None]:
    """Inside, SIGTERM raises ``SystemExit(143)``; a rank that cannot unwind in time just ends.

    A rank waits most of its life in native code (a collective, a store), where Python runs no signal handler
    until the call returns; a thread that hears of the signal through a socket ends the process then. Call it
    from the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    done = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_CODE)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGTERM and not done.wait(grace_seconds):
                os._exit(EXIT_CODE)

    before = signal.signal(signal.SIGTERM, stop)
    fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(fd_before)
        signal.signal(signal.SIGTERM, before)
        writer.close()  # ends the thread
        thread.join()
        reader.close()
