"""When a worker has to leave: SIGTERM, or a notice of EC2's instance metadata service (IMDSv2).

SIGTERM is the signal that counts: the kubelet sends it when a node is drained. The metadata service only
speaks earlier, and a pod reaches it only with a hop limit of 2, so polling is off unless an address is
configured. A reclaim (``spot/instance-action``) sets a deadline; a rebalance recommendation sets none: the
worker finishes what it holds and takes nothing new.
"""

import json
import math
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

from tasks.say import say

EXIT_CODE = 143
"""128 + SIGTERM. Never 0: Flyte would take a worker that left early for one that finished."""
RESERVE_SECONDS = 5.0
"""Kept of the time that a reclaim notice leaves, to hand leases back and to end."""
TOKEN_SECONDS = 21600
_TOKEN, _ACTION, _REBALANCE = (
    "/latest/api/token",
    "/latest/meta-data/spot/instance-action",
    "/latest/meta-data/events/recommendations/rebalance",
)


class Departure:
    """Whether this worker has to leave, why, and how long it may still work.

    Plain assignments and no lock: a signal handler may interrupt whoever holds one.
    """

    def __init__(self, *, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.reason = ""
        self._deadline = math.inf

    @property
    def is_due(self) -> bool:
        return bool(self.reason)

    def begin(self, reason: str, *, seconds: float | None = None) -> None:
        """Leave within ``seconds`` (default: the grace period). First reason and earliest deadline stay."""
        self._deadline = min(
            self._deadline, time.monotonic() + (self.grace_seconds if seconds is None else seconds)
        )
        self.reason = self.reason or reason

    def seconds_left(self) -> float:
        """Infinite while nothing forces the worker out."""
        return self._deadline - time.monotonic()

    def exit(self) -> None:
        """End the process with 143 if the worker had to leave; return if it had not."""
        if self.is_due:
            raise SystemExit(EXIT_CODE)


@contextmanager
def departing(
    *, grace_seconds: float, metadata_url: str = "", poll_seconds: float = 5.0
) -> Iterator[Departure]:
    """Inside, SIGTERM and metadata notices begin a departure instead of ending the process.

    Python delivers signals to the main thread alone: elsewhere (a server that runs tasks in threads) the
    caller's own handling of SIGTERM stays, and only the metadata service is watched.
    """
    departure, is_over = Departure(grace_seconds=grace_seconds), threading.Event()
    is_main = threading.current_thread() is threading.main_thread()

    def leave(signum: int, frame: FrameType | None) -> None:
        departure.begin("SIGTERM")

    before = signal.signal(signal.SIGTERM, leave) if is_main else None
    watch = threading.Thread(
        target=_watch, args=(departure, metadata_url.rstrip("/"), poll_seconds, is_over), daemon=True
    )
    if metadata_url:
        watch.start()
    try:
        yield departure
    finally:
        is_over.set()
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _watch(departure: Departure, url: str, poll_seconds: float, is_over: threading.Event) -> None:
    service = Metadata(url)
    while True:
        try:
            service.apply(departure)
        except (OSError, ValueError) as error:  # best effort by design: SIGTERM comes in any case
            if not service.has_complained:
                say(
                    "notice",
                    f"metadata service {url} must answer to give early notice of a reclaim, got {error}. "
                    "SIGTERM still works; set the node's HTTP hop limit to 2, or rollout.metadata_url to ''.",
                )
            service.has_complained = True
        if is_over.wait(poll_seconds):
            return


class Metadata:
    """The three requests of IMDSv2 that matter here."""

    def __init__(self, url: str) -> None:
        self.url, self.token, self.has_complained = url, "", False

    def apply(self, departure: Departure) -> None:
        """Ask once; begin the departure that a notice demands."""
        if action := self._get(_ACTION):
            notice = json.loads(action)
            at = datetime.fromisoformat(notice["time"]).astimezone(UTC)
            left = (at - datetime.now(UTC)).total_seconds() - RESERVE_SECONDS
            seconds = min(departure.grace_seconds, max(0.0, left))
            departure.begin(f"instance-action {notice['action']}", seconds=seconds)
        elif not departure.is_due and self._get(_REBALANCE):
            departure.begin("rebalance recommendation", seconds=math.inf)

    def _get(self, path: str) -> bytes | None:
        """The answer; None where there is no notice (404). A token that expired is fetched anew, once."""
        for is_last in (False, True):
            if not self.token:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                self.token = self._send(_TOKEN, ttl, method="PUT").decode()
            try:
                return self._send(path, {"X-aws-ec2-metadata-token": self.token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401 or is_last:
                    raise
                self.token = ""
        return None

    def _send(self, path: str, headers: dict[str, str], *, method: str = "GET") -> bytes:
        request = urllib.request.Request(self.url + path, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=2.0) as answer:
            return answer.read()
