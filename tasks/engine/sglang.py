"""SGLang behind the engine protocol: servers that all hold exactly the required policy version, or none.

Shape key: P prompts of a call, G samples of a prompt.

A ``Fleet`` is the servers a process talks to, launched by it or attached to; engines are views of it, one a
thread that samples, so that portions overlap and no server idles at the end of one. A version is adopted in
place. A server that fails at it is out of service, never on old weights under a new name: it is named, its
requests go to the others, and the next version asks it again. Only if none is left the load fails.

What surprises: one request with a token outside the vocabulary ends a whole server, and a request that is on
its way when an abort arrives escapes it; so ids are checked here, and aborts are repeated.
"""

import asyncio
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.engine.protocol import Completion, Request, SamplingParams
from tasks.engine.sglang_adoption import (
    ServedVersion,
    build,
    join_router,
    leave_router,
    spare_old_objects,
    swap,
    update,
    verify,
)
from tasks.engine.sglang_client import ASK_SECONDS, Address, Budget, Client, Loop, RequestRefused, SglangError
from tasks.engine.sglang_format import completion, request_body, single_bodies
from tasks.engine.sglang_fp8 import quantised_folder
from tasks.engine.sglang_model import routing_shape, served_folder, vocabulary
from tasks.engine.sglang_server import LaunchedServer
from tasks.say import say
from tasks.sglang_config import SglangConfig

ABORT_SECONDS = 0.2
"""How often an abort is repeated until nothing of it is left."""
OVERCOMMIT = 1.25
"""Sequences on their way for each that is decoded: a finished one is replaced without a round trip."""


class Fleet:
    """The servers of one process and the version they hold."""

    def __init__(self, config: SglangConfig, *, dtype: str, folder: Path, routing: bool = False):
        self.config, self.routing, self.scratch = config, routing, folder
        self.version: int | None = None
        self.history: list[int] = []
        """Versions that the servers were given, in order."""
        self.launched = None if config.urls else LaunchedServer(config, folder, dtype=dtype, routing=routing)
        self.addresses = [Address(url) for url in config.urls]
        self.client = Client(request_seconds=config.request_seconds)
        self.loop = Loop()
        self.budget = Budget(0)
        self.model = Path()
        self.vocab_size, self.routing_shape = 0, (0, 0)
        self.build = ""
        self.loading = threading.Lock()
        self._views: weakref.WeakSet[SglangEngine] = weakref.WeakSet()  # a drain makes new ones
        weakref.finalize(self, _close, self.loop, self.client)

    @property
    def serving(self) -> list[Address]:
        return [address for address in self.addresses if not address.is_out]

    def load(self, folder: Path, version: int) -> None:
        """The servers adopt the weights of ``folder`` as ``version``; those that cannot are left out.

        Raises:
            SglangError: none could; no version is served then.
        """
        with self.loading:
            if self.version == version and folder == self.model:
                return
            self.version = None
            self.history.append(version)
            served = served_folder(folder, self.scratch)
            if self.config.quantization == "fp8_blocks":
                served = quantised_folder(served, self.scratch, device=self.config.device)
            policy = ServedVersion(version=version, folder=folder, served=served)
            if self.config.in_flight == "abort":
                for view in self._views:
                    view.abort()
            if self.config.in_flight != "pause":
                self.loop.run(self._idle())
            self.model = folder
            self.vocab_size, self.routing_shape = vocabulary(folder), routing_shape(folder)
            is_fresh = self.launched is not None and self._launch(policy, self.launched)
            self.loop.run(self._adopt_all(policy, is_fresh=is_fresh))
            self.version = version

    def _launch(self, policy: ServedVersion, server: LaunchedServer) -> bool:
        """Start our server with the policy if it is not there or must not go on; whether it was started."""
        # SGLang repacks FP8 weights once, and an update would not repack them
        if self.serving and self.config.quantization == "none":
            return False
        if self.addresses:
            server.stop()
        self.addresses = [Address(server.start(policy.served, policy.version))]
        return True

    async def _idle(self) -> None:
        while any(address.num_sequences for address in self.addresses):
            await asyncio.sleep(ABORT_SECONDS / 4)

    async def _adopt_all(self, policy: ServedVersion, *, is_fresh: bool) -> None:
        await asyncio.gather(*(self._adopt(address, policy, is_fresh) for address in self.addresses))
        if not self.serving:
            reasons = "; ".join(address.reason for address in self.addresses)
            raise SglangError(f"no SGLang server could adopt version {policy.version}: {reasons}")
        self._fit_budget()

    async def _adopt(self, address: Address, policy: ServedVersion, is_fresh: bool) -> None:
        pauses = self.config.in_flight == "pause"
        try:
            self.build = await build(self.client, address, pauses=pauses)
            if not is_fresh:
                await (swap if pauses else update)(self.client, address, policy)
            is_new = address.weights is None
            await verify(self.client, address, policy, device=self.config.device)
            if is_new:
                await spare_old_objects(self.client, address)
            if self.config.router_url:
                await join_router(self.client, self.config.router_url, address)
        except SglangError as error:
            await self._take_out(address, str(error))
        else:
            address.failures, address.reason = 0, ""

    def _fit_budget(self) -> None:
        self.budget.size = int(self.config.max_running_requests * len(self.serving) * OVERCOMMIT)

    async def send(
        self, body: dict[str, Any], running: dict[str, None], is_aborted: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        """The answers of a group, from the server with the least on its way; another one if that fails, or
        aborts what nobody wanted aborted, as one does that is told to end.

        Args:
            running: has the names that servers know its samples by for as long as it runs.
        """
        names, given = body["rid"], dict[str, None]()
        tried: set[Address] = set()
        try:
            for number in range(self.config.max_failures):
                if number:  # a server holds what broke off for seconds more, and takes no name twice
                    body = body | {"rid": [f"{name}.{number}" for name in names]}
                given |= dict.fromkeys(body["rid"])
                running |= given
                address = self._choose(tried)
                tried.add(address)
                address.num_sequences += len(names)
                began = time.monotonic()
                try:
                    answers = await self._post(address, body)
                    if not is_aborted():
                        _require_unaborted(answers)
                    address.failures = 0
                    return answers
                except RequestRefused:  # as every server would; counted, it took one after the other out
                    raise
                except SglangError as error:
                    survives = await self._survives(address, error, began)
                    if not survives or number + 1 == self.config.max_failures:
                        raise
                finally:
                    address.num_sequences -= len(names)
            raise AssertionError("the last try returns or raises")
        finally:
            for name in given:
                running.pop(name, None)

    async def _post(self, address: Address, body: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.config.router_url:
            return await self.client.generate(address.url, body)
        posts = [
            asyncio.create_task(self.client.generate(self.config.router_url, part))
            for part in single_bodies(body)
        ]
        try:
            return [answer for answers in await asyncio.gather(*posts) for answer in answers]
        finally:
            for post in posts:  # where one failed all are asked again, and nobody waits for the first answers
                post.cancel()

    def _choose(self, tried: set[Address]) -> Address:
        """One that fails is the emptiest of all from then on, so those not tried come first."""
        if not self.serving:
            reasons = "; ".join(address.reason for address in self.addresses)
            raise SglangError(f"no SGLang server is left: {reasons}")
        return min(self.serving, key=lambda address: (address in tried, address.num_sequences))

    async def _survives(self, address: Address, error: SglangError, began: float) -> bool:
        """After a failure: whether another try makes sense. Every server is asked, and one without an answer
        is out of service. Behind a router the one that failed need not be the one that was chosen, so none is
        blamed beyond that."""
        await asyncio.gather(*(self._ask(other) for other in self.serving))
        if not self.config.router_url and not address.is_out:
            failures = address.fail(error, began=began)
            if failures >= self.config.max_failures:
                await self._take_out(address, f"{failures} failures in a row, the last: {error}")
        return bool(self.serving)

    async def _ask(self, address: Address) -> None:
        try:
            await self.client.control(address.url, "model_info", seconds=ASK_SECONDS)
        except SglangError as error:
            await self._take_out(address, str(error))

    async def _take_out(self, address: Address, reason: str) -> None:
        """Its requests go to the others; the next version asks it again, or restarts it if it is ours."""
        if reason != address.reason:
            say("engine", f"out of service: {reason}")
        address.reason = reason
        self._fit_budget()
        if self.config.router_url:
            await leave_router(self.client, self.config.router_url, address)

    def view(self) -> "SglangEngine":
        engine = SglangEngine(self)
        self._views.add(engine)
        return engine


class SglangEngine:
    """A view of a fleet for one thread; its ``abort`` ends only its own requests."""

    _numbers = itertools.count()

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self._name = f"{secrets.token_hex(4)}-v{next(self._numbers):04d}"  # servers may be others' as well
        self._calls = itertools.count()
        self._running: dict[str, None] = {}
        self._is_aborted = threading.Event()

    @property
    def version(self) -> int | None:
        return self.fleet.version

    def load(self, folder: Path, version: int) -> None:
        self.fleet.load(folder, version)

    def describe(self) -> str:
        config, fleet = self.fleet.config, self.fleet
        kind = "launched" if fleet.launched else "attached"
        count = f"{len(fleet.serving)} of {len(fleet.addresses)} {kind}"
        options = "started by others"  # with options of theirs, of which the section says nothing
        if fleet.launched:
            options = f"tp {config.tp}, ep {config.ep}, {config.moe_a2a} exchange, "
            options += f"weights {config.quantization}"
        out = "".join(f"; out of service: {a.reason}" for a in fleet.addresses if a.is_out)
        return f"sglang {fleet.build} ({count}, {config.device}, {options}{out})"

    def abort(self) -> None:
        self._is_aborted.set()

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        with self.fleet.loading:  # a load of another thread has ended, or aborts what is started here
            if self.version is None:
                raise RuntimeError(
                    "the engine must load a policy version before it generates; call load first."
                )
            self._require_known_ids(requests)
            self._is_aborted.clear()
            since = len(self.fleet.history) - 1
            answers = self.fleet.loop.start(self._generate(requests, params, since))
        return answers.result()

    async def _generate(
        self, requests: Sequence[Request], params: SamplingParams, since: int
    ) -> list[list[Completion]]:
        call = next(self._calls)
        rids = [
            [f"{self._name}-{call:06d}-{i:06d}-{j:04d}" for j in range(len(request.seeds))]
            for i, request in enumerate(requests)
        ]
        watcher = asyncio.create_task(self._attend_abort())
        # those that begin alike go one after another, while what they share is in the server's cache
        order = sorted(range(len(requests)), key=lambda index: requests[index].prompt_ids)
        groups = {
            index: asyncio.create_task(self._group(requests[index], rids[index], params, since))
            for index in order
        }
        try:
            return await asyncio.gather(*(groups[index] for index in range(len(requests))))
        finally:
            watcher.cancel()
            for group in groups.values():  # of a call that failed: nobody waits, and the server is told
                group.cancel()
            self._running.clear()

    async def _group(
        self, request: Request, names: list[str], params: SamplingParams, since: int
    ) -> list[Completion]:
        async with self.fleet.budget.share(len(names)):
            if self._is_aborted.is_set():
                return [Completion(response_ids=[], logprobs=[], finish_reason="abort") for _ in names]
            body = request_body(request, names, params, vocab_size=self.fleet.vocab_size)
            answers = await self.fleet.send(body, self._running, self._is_aborted.is_set)
        return [self._completion(answer, since) for answer in answers]

    def _completion(self, answer: dict[str, Any], since: int) -> Completion:
        """``since``: the version that was loaded when the call began, as an index of the fleet's history."""
        meta, expected = answer["meta_info"], self.fleet.history[since:]
        found = {meta["weight_version"], *(str(s["version"]) for s in meta.get("weight_versions") or ())}
        if not found <= {str(version) for version in expected}:
            raise SglangError(
                f"request {meta['id']} must be sampled by version {' or '.join(map(str, expected))}, the "
                f"server reports {meta['weight_version']!r}. Another client loaded it; give each campaign "
                "its own servers."
            )
        return completion(answer, routing_shape=self.fleet.routing_shape)

    async def _attend_abort(self) -> None:
        """Abort what runs, again and again: a request on its way to the server escapes one abort."""
        while True:
            await asyncio.sleep(ABORT_SECONDS / 4)
            while self._is_aborted.is_set() and self._running:
                posts = [
                    self.fleet.client.control(address.url, "abort_request", {"rid": name})
                    for name in list(self._running)
                    for address in self.fleet.serving
                ]
                await asyncio.gather(*posts, return_exceptions=True)
                await asyncio.sleep(ABORT_SECONDS)

    def _require_known_ids(self, requests: Sequence[Request]) -> None:
        for request in requests:
            wrong = [token for token in request.prompt_ids if not 0 <= token < self.fleet.vocab_size]
            if wrong or not request.prompt_ids:
                raise ValueError(
                    f"prompt ids must be in 0..{self.fleet.vocab_size - 1} and at least one, got "
                    f"{wrong or 'none'}."
                )


def _require_unaborted(answers: Sequence[dict[str, Any]]) -> None:
    for meta in (answer["meta_info"] for answer in answers):
        if meta["finish_reason"]["type"] == "abort":
            raise SglangError(f"request {meta['id']} was aborted by the server: {meta['finish_reason']}")


def _close(loop: Loop, client: Client) -> None:
    loop.end(client.close())
