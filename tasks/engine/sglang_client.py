"""Requests to SGLang servers: token ids in; token ids, log-probabilities and the weights' version out.

One event loop in a thread of its own carries every request of a process. A group's samples travel in one HTTP
request, so they share the prompt's cache; the number of sequences on their way is bounded, just above what
the servers decode together, so that none of them waits for us and none drowns in a queue.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from tasks.engine.sglang_model import WeightFiles

T = TypeVar("T")
CONTROL_SECONDS = 600.0
"""Deadline of a weight update; a large policy is read from disk in it."""
ASK_SECONDS = 30.0
"""Deadline of the question whether a server is there: what broke off with it waits, to go elsewhere."""
CONNECT_SECONDS = 20.0
"""Until a server's host has answered at all: one that vanished does not hold up the others."""
IDLE_SECONDS = 2.0
"""How long an unused connection is kept. SGLang closes it after 5 s, and a request sent in that moment is
lost: hundreds at once, where a worker goes on just then."""


class SglangError(RuntimeError):
    """A server refused, broke off or lied; the text names it."""


class RequestRefused(SglangError):
    """What was asked for cannot be had, such as a prompt longer than the context: no server is to blame."""


class RequestOverdue(SglangError):
    """No answer before the deadline, on a connection that held."""


REFUSALS = (400, 413, 422)


class Address:
    """One server: where it is, what it has on its way, how often in a row it failed, why it is out."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.num_sequences = 0
        self.failures = 0
        self._failed_at = -math.inf
        self.reason = ""
        """Why it is out of service; empty = it serves."""
        self.weights: tuple[WeightFiles, str] | None = None
        """Files that it read last, and what it says of the weights it holds."""

    @property
    def is_out(self) -> bool:
        return bool(self.reason)

    def fail(self, error: SglangError, *, began: float) -> int:
        """Failures in a row, with that of a request sent at ``began`` (monotonic seconds). What was on its
        way when the last one was counted broke off with it: hundreds of requests are one failure. Overdue
        ones count one each: a stuck server would else get one deadline after the other."""
        if began >= self._failed_at or isinstance(error, RequestOverdue):
            self.failures, self._failed_at = self.failures + 1, time.monotonic()
        return self.failures


class Loop:
    """An event loop in a thread; ``run`` waits for a coroutine's result from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang client", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result()

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Stop after ``last``; waits for it, but not where the loop itself let go of its owner."""
        future = self.start(last)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if threading.current_thread() is not self._thread:
            future.result()


class Budget:
    """Sequences that may be on their way at once, first come, first served. A request larger than all of it
    goes alone. Used inside the loop only."""

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def share(self, count: int) -> AsyncIterator[None]:
        """``count`` sequences for as long as the block runs."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.used -= count
            self._grant()

    def _grant(self) -> None:
        """Only the head of the line is looked at: waking all who wait at each answer took half the time."""
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.cancelled():
                if self.used and self.used + count > self.size:
                    return
                self.used += count
                turn.set_result(None)
            self._waiting.popleft()


class Client:
    """HTTP to the servers; opened inside the loop on first use."""

    def __init__(self, *, request_seconds: float):
        self.request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of a request in order, one for a single sample.

        Raises:
            SglangError: the server refused, the connection broke, or the deadline passed
                (``RequestOverdue``); names request and server.
        """
        name = body["rid"] if isinstance(body["rid"], str) else body["rid"][0]
        try:
            answer = await self._post(f"{url}/generate", body, self.request_seconds)
            return answer if isinstance(answer, list) else [answer]
        except TimeoutError:
            raise RequestOverdue(
                f"request {name} must end within rollout.sglang.request_seconds={self.request_seconds:g} on "
                f"{url}, got no answer. Raise it, or lower rollout.max_new_tokens."
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise SglangError(
                f"request {name} broke off on {url}: {type(error).__name__}: {error}"
            ) from error

    async def control(
        self, url: str, path: str, body: dict[str, Any] | None = None, *, seconds: float = CONTROL_SECONDS
    ) -> Any:
        """POST ``body`` (or GET without one) to a server's control plane."""
        try:
            return await self._post(f"{url}/{path}", body, seconds)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise SglangError(f"{url}/{path} failed: {type(error).__name__}: {error}") from error

    async def _post(self, url: str, body: dict[str, Any] | None, seconds: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        method = "GET" if body is None else "POST"
        async with self.session.request(method, url, json=body, timeout=timeout) as response:
            if not response.ok:
                text = (await response.text())[:500]
                kind = RequestRefused if response.status in REFUSALS else SglangError
                raise kind(f"{url} answered {response.status}: {text}")
            if response.content_type != "application/json":
                return await response.text()
            return await response.json()
