"""How a running SGLang server takes a policy version, and how one shows that it holds it.

In place: it reads the folder and flushes its key-value cache. It must then report the version, and weights
that changed exactly if their files did. Nothing here waits for requests or decides what becomes of a server
that fails: ``tasks.engine.sglang`` does.
"""

import contextlib
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.engine.sglang_client import Address, Client, SglangError
from tasks.engine.sglang_model import vocabulary, weight_files

PROBE_LENGTH = 16
PAUSES_SINCE = (0, 5, 21)
"""The first SGLang that flushes its cache while paused requests wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVersion:
    """A policy version as a server is to read it."""

    version: int
    folder: Path
    """The policy's."""
    served: Path
    """The same weights as SGLang reads them right; often ``folder`` itself."""


async def update(client: Client, address: Address, policy: ServedVersion) -> None:
    """The server reads the weights and forgets its key-value cache, or answers with an error."""
    model, version = str(policy.served.absolute()), str(policy.version)
    body = {"model_path": model, "weight_version": version, "flush_cache": True}
    await client.control(address.url, "update_weights_from_disk", body)


async def swap(client: Client, address: Address, policy: ServedVersion) -> None:
    """``update`` under requests that run: they wait, without a key-value cache, and go on with the new
    weights. If it fails they are aborted: they must not go on with torn ones."""
    await client.control(address.url, "pause_generation", {"mode": "retract"})
    try:
        await update(client, address, policy)
    except SglangError:
        await client.control(address.url, "abort_request", {"abort_all": True})
        raise
    finally:
        await client.control(address.url, "continue_generation", {})


async def build(client: Client, address: Address, *, pauses: bool) -> str:
    """SGLang's version; refused if it cannot swap weights under requests and ``pauses`` asks for that."""
    said = str((await client.control(address.url, "v1/loads?include=core"))["version"])
    numbers = tuple(int(part) for part in re.findall(r"\d+", said)[:3])
    if pauses and numbers < PAUSES_SINCE:
        raise ValueError(
            f"rollout.sglang.in_flight 'pause' must have SGLang {'.'.join(map(str, PAUSES_SINCE))} or newer, "
            f"got {said} on {address.url}: it ends at the flush of a cache that paused requests wait for. "
            "Install a newer one, or set in_flight to 'finish' or 'abort'."
        )
    return said


async def verify(client: Client, address: Address, policy: ServedVersion, *, device: str) -> None:
    """The server reports the version, and weights that changed exactly if their files did."""
    info = await client.control(address.url, "model_info")
    if info["weight_version"] != str(policy.version):
        raise SglangError(
            f"{address.url} must hold weight version {policy.version}, got {info['weight_version']!r}. "
            "Another client changed it; give each campaign servers of its own."
        )
    files = weight_files(policy.folder)
    fingerprint = await _fingerprint(client, address, policy, device=device)
    if address.weights is not None:
        before, held = address.weights
        is_torn = held != fingerprint and before.files == files.files
        is_deaf = held == fingerprint and before.samples != files.samples
        if is_torn or is_deaf:
            raise SglangError(
                f"{address.url} must hold the weights of {policy.folder}, but reports "
                f"{'other' if is_torn else 'the same'} weights than before the update. Restart it."
            )
    address.weights = (files, fingerprint)


async def spare_old_objects(client: Client, address: Address) -> None:
    """A server's Python stops looking for garbage in what was made at its start, as ours does
    (``tasks.engine.collector``): its processes stood still for 0.4 s about every thousand samples."""
    with contextlib.suppress(SglangError):  # a server that cannot is slower, no more
        await client.control(address.url, "freeze_gc", {})


async def _fingerprint(client: Client, address: Address, policy: ServedVersion, *, device: str) -> str:
    """What changes with the weights: the server's checksum; on a CPU the score of a fixed text."""
    if device == "cuda":
        answer = await client.control(address.url, "weights_checker", {"action": "checksum"})
        return json.dumps(answer["ranks"], sort_keys=True)
    size = vocabulary(policy.folder)
    body = {
        "input_ids": [[index % size for index in range(PROBE_LENGTH)]],
        "sampling_params": [{"max_new_tokens": 0, "temperature": 1.0}],
        "rid": [f"probe-{secrets.token_hex(4)}"], "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    (answer,) = await client.generate(address.url, body)
    return json.dumps([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


async def join_router(client: Client, router_url: str, address: Address) -> None:
    """The router sends requests to a server that it had been told to leave."""
    if not await _router_names(client, router_url, address):
        await client.control(router_url, "workers", {"url": address.url})


async def leave_router(client: Client, router_url: str, address: Address) -> None:
    """The router notices a dead worker only after a minute; until then it sends requests there."""
    with contextlib.suppress(SglangError):  # a router that is gone sends nothing, and says so when asked
        for name in await _router_names(client, router_url, address):
            async with client.session.delete(f"{router_url}/workers/{name}"):
                pass


async def _router_names(client: Client, router_url: str, address: Address) -> list[Any]:
    answer = await client.control(router_url, "workers")
    return [w["id"] for w in answer.get("workers", []) if str(w.get("url", "")).rstrip("/") == address.url]
