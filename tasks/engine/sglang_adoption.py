"""How a running SGLang server takes a policy version, and how one shows that it holds it.

In place: it reads the folder and flushes its key-value cache. It must then report the version, and weights
that changed exactly if their files did. Nothing here waits for requests or decides what becomes of a server
that fails: ``tasks.engine.sglang`` does.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.engine.sglang_client import Address, Client, SglangError
from tasks.engine.sglang_model import vocabulary, weight_files

PROBE_LENGTH = 16


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


async def _fingerprint(client: Client, address: Address, policy: ServedVersion, *, device: str) -> str:
    """What changes with the weights: the server's checksum; on a CPU the score of a fixed text."""
    if device == "cuda":
        answer = await client.control(address.url, "weights_checker", {"action": "checksum"})
        return json.dumps(answer["ranks"], sort_keys=True)
    size = vocabulary(policy.folder)
    body = {
        "input_ids": [[index % size for index in range(PROBE_LENGTH)]],
        "sampling_params": [{"max_new_tokens": 0, "temperature": 1.0}],
        "rid": ["probe"], "return_logprob": True, "logprob_start_len": 0,
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
