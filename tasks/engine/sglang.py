"""SGLang behind the engine protocol: servers that all hold exactly the required policy version, or none.

Shape key: P prompts of a call, G samples of a prompt.

A ``Fleet`` is the servers a process talks to, launched by it or attached to; engines are views of it, one a
thread that samples, so that portions overlap and no server idles at the end of one. A version is adopted in
place: each server reads the folder, flushes its key-value cache and must then report the version and weights
that changed. A server that fails at it is out of service, never on old weights under a new name.

What surprises: one request with a token outside the vocabulary ends a whole server, and a request that is on
its way when an abort arrives escapes it; so ids are checked here, and aborts are repeated.
"""

import asyncio
import itertools
import json
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engine.protocol import Completion, Request, SamplingParams
from tasks.engine.sglang_client import Address, Budget, Client, Loop, SglangError
from tasks.engine.sglang_format import completion, request_body, single_bodies
from tasks.engine.sglang_fp8 import quantised_folder
from tasks.engine.sglang_model import files_identity, routing_shape, served_folder, vocabulary
from tasks.engine.sglang_server import LaunchedServer
from tasks.sglang_config import SglangConfig

ABORT_SECONDS = 0.2
"""How often an abort is repeated until nothing of it is left."""
PROBE_LENGTH = 16
OVERCOMMIT = 1.25
"""Sequences on their way for each that is decoded: a finished one is replaced without a round trip."""


class Fleet:
    """The servers of one process and the version they hold."""

    def __init__(self, config: SglangConfig, *, dtype: str, folder: Path, routing: bool = False):
        self.config, self.routing, self.scratch = config, routing, folder
        self.version: int | None = None
        self.launched = None if config.urls else LaunchedServer(config, folder, dtype=dtype, routing=routing)
        self.addresses = [Address(url) for url in config.urls]
        self.client = Client(request_seconds=config.request_seconds)
        self.loop = Loop()
        self.budget = self.loop.run(self._make_budget())
        self.model = Path()
        self.vocab_size, self.routing_shape = 0, (0, 0)
        self.build = ""
        self._prints: dict[str, tuple[str, Any]] = {}
        self._loading = threading.Lock()
        self._views: weakref.WeakSet[SglangEngine] = weakref.WeakSet()  # a drain makes new ones

    async def _make_budget(self) -> Budget:
        servers = max(len(self.config.urls), 1)
        return Budget(int(self.config.max_running_requests * servers * OVERCOMMIT))

    def load(self, folder: Path, version: int) -> None:
        """Every server adopts the weights of ``folder`` as ``version``; on an error none is served."""
        with self._loading:
            if self.version == version and folder == self.model:
                return
            self.version = None
            served = served_folder(folder, self.scratch)
            if self.config.quantization == "fp8_blocks":
                served = quantised_folder(served, self.scratch, device=self.config.device)
            if self.config.in_flight == "abort":
                for view in self._views:
                    view.abort()
            self.loop.run(self._idle())
            self.model = folder
            self.vocab_size, self.routing_shape = vocabulary(folder), routing_shape(folder)
            if self.launched is not None and self.addresses and self.config.quantization != "none":
                self.launched.stop()  # SGLang repacks FP8 weights once, and an update would not repack them
                self.addresses = []
            if self.launched is not None and self._needs_start():
                self.addresses = [Address(self.launched.start(served, version))]
            else:
                self.loop.run(self._update_all(served, version))
            self.loop.run(self._verify_all(folder, version))
            self.version = version

    def _needs_start(self) -> bool:
        return not self.addresses or self.addresses[0].is_out

    async def _idle(self) -> None:
        while any(address.num_sequences for address in self.addresses):
            await asyncio.sleep(ABORT_SECONDS / 4)

    async def _update_all(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder.absolute()), "weight_version": str(version), "flush_cache": True}
        urls = [address.url for address in self.addresses]
        await asyncio.gather(*(self.client.control(url, "update_weights_from_disk", body) for url in urls))

    async def _verify_all(self, folder: Path, version: int) -> None:
        """Every server reports the version, and weights that changed exactly if their files did."""
        identity = files_identity(folder)
        for address in self.addresses:
            info = await self.client.control(address.url, "model_info")
            if info["weight_version"] != str(version):
                raise SglangError(
                    f"{address.url} must hold weight version {version}, got {info['weight_version']!r}. "
                    "Another client changed it; give each campaign servers of its own."
                )
            fingerprint = await self._fingerprint(address.url)
            before = self._prints.get(address.url)
            if before is not None and (before[0] == identity) != (before[1] == fingerprint):
                raise SglangError(
                    f"{address.url} must hold the weights of {folder}, but reports "
                    f"{'other' if before[0] == identity else 'the same'} weights than before the update. "
                    "It is out of service; restart it."
                )
            self._prints[address.url] = (identity, fingerprint)
            address.failures, address.is_out = 0, False
        self.build = str(
            (await self.client.control(self.addresses[0].url, "v1/loads?include=core"))["version"]
        )

    async def _fingerprint(self, url: str) -> Any:
        """What changes with the weights: the server's checksum; on a CPU the score of a fixed text."""
        if self.config.device == "cuda":
            answer = await self.client.control(url, "weights_checker", {"action": "checksum"})
            return json.dumps(answer["ranks"], sort_keys=True)
        ids = [index % self.vocab_size for index in range(PROBE_LENGTH)]
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {
            "input_ids": [ids], "sampling_params": [params], "rid": ["probe"],
            "return_logprob": True, "logprob_start_len": 0,
        }  # fmt: skip
        (answer,) = await self.client.generate(url, body)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def send(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of a group, from the server with the least on its way; another one if that fails."""
        count = len(body["rid"])
        await self.budget.take(count)
        try:
            for tries_left in reversed(range(self.config.max_failures)):
                address = self._choose()
                address.num_sequences += count
                try:
                    answers = await self._post(address, body)
                    address.failures = 0
                    return answers
                except SglangError:
                    if not await self._survives(address) or not tries_left:
                        raise
                finally:
                    address.num_sequences -= count
            raise AssertionError("the last try returns or raises")
        finally:
            await self.budget.give(count)

    async def _post(self, address: Address, body: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.config.router_url:
            return await self.client.generate(address.url, body)
        parts = await asyncio.gather(
            *(self.client.generate(self.config.router_url, part) for part in single_bodies(body))
        )
        return [answer for part in parts for answer in part]

    def _choose(self) -> Address:
        serving = [address for address in self.addresses if not address.is_out]
        if not serving:
            raise SglangError(
                f"no SGLang server is left of {[a.url for a in self.addresses]}. Their logs say why."
            )
        return min(serving, key=lambda address: address.num_sequences)

    async def _survives(self, address: Address) -> bool:
        """After a failure: whether another try makes sense. Every server is asked, and one without an answer
        is out of service. Behind a router the one that failed need not be the one that was chosen, so none is
        blamed beyond that."""
        await asyncio.gather(*(self._ask(other) for other in self.addresses if not other.is_out))
        if not self.config.router_url:
            address.failures += 1
            if address.failures >= self.config.max_failures:
                await self._take_out(address)
        return any(not other.is_out for other in self.addresses)

    async def _ask(self, address: Address) -> None:
        try:
            await self.client.control(address.url, "model_info")
        except SglangError:
            await self._take_out(address)

    async def _take_out(self, address: Address) -> None:
        address.is_out = True
        if self.config.router_url:
            await self._leave_router(address)

    async def _leave_router(self, address: Address) -> None:
        """The router notices a dead worker only after a minute; until then it sends requests there."""
        workers = await self.client.control(self.config.router_url, "workers")
        for worker in workers.get("workers", []):
            if str(worker.get("url", "")).rstrip("/") == address.url:
                async with self.client.session.delete(f"{self.config.router_url}/workers/{worker['id']}"):
                    pass

    def view(self) -> "SglangEngine":
        engine = SglangEngine(self)
        self._views.add(engine)
        return engine


class SglangEngine:
    """A view of a fleet for one thread; its ``abort`` ends only its own requests."""

    _numbers = itertools.count()

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self._name = f"v{next(self._numbers):04d}"
        self._calls = itertools.count()
        self._running: dict[str, Address | None] = {}
        self._is_aborted = threading.Event()

    @property
    def version(self) -> int | None:
        return self.fleet.version

    def load(self, folder: Path, version: int) -> None:
        self.fleet.load(folder, version)

    def describe(self) -> str:
        config, fleet = self.fleet.config, self.fleet
        kind = "launched" if fleet.launched else "attached"
        options = f"tp {config.tp}, ep {config.ep}, {config.moe_a2a} exchange, weights {config.quantization}"
        return f"sglang {fleet.build} ({len(fleet.addresses)} {kind}, {config.device}, {options})"

    def abort(self) -> None:
        self._is_aborted.set()

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        if self.version is None:
            raise RuntimeError("the engine must load a policy version before it generates; call load first.")
        self._require_known_ids(requests)
        self._is_aborted.clear()
        return self.fleet.loop.run(self._generate(requests, params))

    async def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        call = next(self._calls)
        rids = [
            [f"{self._name}-{call:06d}-{i:06d}-{j:04d}" for j in range(len(request.seeds))]
            for i, request in enumerate(requests)
        ]
        watcher = asyncio.create_task(self._attend_abort())
        try:
            return await asyncio.gather(
                *(self._group(request, names, params) for request, names in zip(requests, rids, strict=True))
            )
        finally:
            watcher.cancel()
            self._running.clear()

    async def _group(self, request: Request, names: list[str], params: SamplingParams) -> list[Completion]:
        if self._is_aborted.is_set():
            return [Completion(response_ids=[], logprobs=[], finish_reason="abort") for _ in names]
        self._running |= dict.fromkeys(names)
        answers = await self.fleet.send(
            request_body(request, names, params, vocab_size=self.fleet.vocab_size)
        )
        for name in names:
            self._running.pop(name, None)
        return [self._completion(answer) for answer in answers]

    def _completion(self, answer: dict[str, Any]) -> Completion:
        meta = answer["meta_info"]
        if meta["weight_version"] != str(self.version):
            raise SglangError(
                f"request {meta['id']} must be sampled by version {self.version}, the server reports "
                f"{meta['weight_version']!r}. Another client loaded it; give each campaign its own servers."
            )
        reason = meta["finish_reason"]["type"]
        if reason == "abort" and not self._is_aborted.is_set():
            raise SglangError(f"request {meta['id']} was aborted by the server: {meta['finish_reason']}")
        return completion(answer, routing_shape=self.fleet.routing_shape)

    async def _attend_abort(self) -> None:
        """Abort what runs, again and again: a request on its way to the server escapes one abort."""
        while True:
            await asyncio.sleep(ABORT_SECONDS / 4)
            while self._is_aborted.is_set() and self._running:
                posts = [
                    self.fleet.client.control(address.url, "abort_request", {"rid": name})
                    for name in list(self._running)
                    for address in self.fleet.addresses
                    if not address.is_out
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
