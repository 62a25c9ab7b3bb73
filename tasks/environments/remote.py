"""Scorers behind HTTP: a judge (any OpenAI-compatible chat endpoint) and a reward model served by SGLang.

Every sample has one deadline for all its attempts. What cannot be had within it, or cannot be read, is a
failure with its reason; the judge's own "cannot be judged" is an abstention. Neither is ever a reward of 0.
"""

import asyncio
import concurrent.futures
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from tasks.environments.grades import Graded, Messages, scored
from tasks.environments.protocol import Part
from tasks.reward_config import ClassifyConfig, EndpointConfig, JudgeConfig

GRADE = re.compile(r"grade:\s*(none|-?\d{1,6}(?:\.\d{1,6})?)(?![\d.])", re.IGNORECASE)
FIRST_WAIT_SECONDS = 0.25
MAX_BODY_BYTES = 4 << 20
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}


class RemoteError(RuntimeError):
    """Why a request has no usable answer."""


class JudgeClient:
    """Asks a language model for a grade of each conversation."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config

    def grade(self, messages: Messages) -> list[Graded]:
        async def run(client: "_Client") -> list[Graded]:
            return await asyncio.gather(*(self._one(client, talk) for talk in messages))

        return _in_a_loop(_with_client(self.config, run))

    async def _one(self, client: "_Client", talk: list[dict[str, str]]) -> Graded:
        start, body = time.monotonic(), self._request(talk)

        def made(kind: Any, *, value: float | None = None, reason: str = "") -> Graded:
            seconds = time.monotonic() - start
            part = Part(name="judge", kind=kind, value=value, reason=reason, seconds=seconds)
            return Graded(part=part, reward=None if value is None else value / self.config.largest_grade)

        try:
            answer = await client.post("/chat/completions", body)
            said = answer["choices"][0]["message"]["content"]
            grade = read_grade(said, largest=self.config.largest_grade)
        except (RemoteError, KeyError, IndexError, TypeError, ValueError) as error:
            return made("failure", reason=f"{type(error).__name__}: {str(error)[:300]}")
        return (
            made("abstain", reason="the judge cannot judge it")
            if grade is None
            else made("score", value=grade)
        )

    def _request(self, talk: list[dict[str, str]]) -> dict[str, Any]:
        shown = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in talk)
        return {
            "model": self.config.model, "temperature": 0.0, "max_tokens": self.config.max_tokens,
            "messages": [
                {"role": "system", "content": self.config.instruction},
                {"role": "user", "content": f"<conversation>\n{shown}\n</conversation>"},
            ],
        }  # fmt: skip


def read_grade(said: str, *, largest: float) -> float | None:
    """The last grade in a judge's words; None if it says that there is none to give. Raises if there is no
    word of a grade, or one out of range."""
    found = GRADE.findall(said)
    if not found:
        raise ValueError(f"the judge must end with a line `grade: N`, got {said[-120:]!r}")
    if found[-1].lower() == "none":
        return None
    grade = float(found[-1])
    if not 0 <= grade <= largest:
        raise ValueError(f"a grade must be from 0 to {largest:g}, got {grade:g}")
    return grade


class ClassifyClient:
    """Scores of a reward model that SGLang serves (``--is-embedding``), rows of like length together."""

    def __init__(self, config: ClassifyConfig) -> None:
        from transformers import AutoTokenizer

        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)

    def grade(self, messages: Messages) -> list[Graded]:
        texts = [str(self.tokenizer.apply_chat_template(talk, tokenize=False)) for talk in messages]
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        size = self.config.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]

        async def run(client: "_Client") -> list[list[Graded]]:
            return await asyncio.gather(
                *(self._batch(client, [texts[i] for i in batch]) for batch in batches)
            )

        found: dict[int, Graded] = {}
        for batch, grades in zip(batches, _in_a_loop(_with_client(self.config, run)), strict=True):
            found |= dict(zip(batch, grades, strict=True))
        return [found[index] for index in range(len(texts))]

    async def _batch(self, client: "_Client", texts: list[str]) -> list[Graded]:
        start = time.monotonic()
        try:
            answer = await client.post("/classify", {"model": self.config.model, "text": texts})
            values = [float(row["embedding"][0]) for row in answer]
            if len(values) != len(texts) or not all(map(math.isfinite, values)):
                raise ValueError(f"the service must give {len(texts)} finite scores, got {values[:4]}")
        except (RemoteError, KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            return [Graded(part=Part(name="classify", kind="failure", reason=reason)) for _ in texts]
        return scored("classify", values, scale=self.config.scale, seconds=time.monotonic() - start)


class _Client:
    """Posts JSON with a deadline, retries and a bound on what runs at once."""

    def __init__(self, session: aiohttp.ClientSession, config: EndpointConfig) -> None:
        self.session, self.config = session, config
        self.gate = asyncio.Semaphore(config.concurrency)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.gate:  # its turn first: waiting for others is not the sample's time
            try:
                async with asyncio.timeout(self.config.deadline_seconds):
                    return await self._retried(self.config.url.rstrip("/") + path, body)
            except TimeoutError:
                limit = self.config.deadline_seconds
                raise RemoteError(f"no answer within the deadline of {limit:g} s") from None

    async def _retried(self, url: str, body: dict[str, Any]) -> Any:
        reason = ""
        for attempt in range(1, self.config.attempts + 1):
            try:
                async with self.session.post(url, json=body) as response:
                    data = await response.content.read(MAX_BODY_BYTES)
                    if response.status == 200:
                        return json.loads(data)
                    reason = f"HTTP {response.status}: {data[:200].decode(errors='replace')}"
                    if response.status not in RETRIED:
                        raise RemoteError(reason)
            except (aiohttp.ClientError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt == self.config.attempts:
                break
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1) * (0.5 + random.random()))
        raise RemoteError(f"{self.config.attempts} attempts, last: {reason}")


async def _with_client(config: EndpointConfig, run: Callable[[_Client], Awaitable[Any]]) -> Any:
    headers = {}
    if config.key_file:
        headers["Authorization"] = f"Bearer {Path(config.key_file).read_text().strip()}"
    async with aiohttp.ClientSession(headers=headers) as session:
        return await run(_Client(session, config))


def _in_a_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: the caller's may run a loop already."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()
