"""Answers as an SGLang server that computes nothing, so that clients can be measured alone.

    python tests/canned_sglang.py --port 30000 --tokens 256 [--step-ms 4.1]

Each response has as many tokens as are asked for here, with log-probabilities, whatever was asked. With
``--step-ms`` it comes when a server of that speed would send it, otherwise at once.
"""

import argparse
import asyncio
import json
import time
from collections import deque

from aiohttp import web

RUNNING = 256
"""Sequences decoded together."""
PREFILL_S, PREFILL_SEQUENCE_S = 2e-3, 0.2e-3
"""A pass that reads prompts, and each prompt of it: 128 tokens of the benchmark's large policy on an H200."""


def tokens_per_s(step_s: float, tokens: int) -> float:
    """What the server gives to clients that never let it wait."""
    wave_s = PREFILL_S + PREFILL_SEQUENCE_S * RUNNING + step_s * (tokens - 1)
    return RUNNING * tokens / wave_s


class Clock:
    """When a server with continuous batching would be done with each sequence, all of them ``tokens`` long.

    As SGLang's scheduler: prompts that find a place are read first, all of them in one pass, then everything
    that runs decodes a token a step. Time that the answers themselves cost this process is made up for, so
    the server is as fast as its steps, and only what a client does not send in time is lost.
    """

    def __init__(self, step_s: float, tokens: int):
        self.step_s, self.tokens = step_s, tokens
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running: deque[tuple[int, asyncio.Future[None]]] = deque()  # with the step that ends it
        self._came = asyncio.Event()

    async def done(self) -> None:
        """Returns when one sequence that comes now has its last token."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._came.set()
        await turn

    async def run(self) -> None:
        now, step = time.perf_counter(), 0
        while True:
            if not self._waiting and not self._running:
                self._came.clear()
                await self._came.wait()
                now = time.perf_counter()
            admitted = min(RUNNING - len(self._running), len(self._waiting))
            if admitted:
                now += PREFILL_S + PREFILL_SEQUENCE_S * admitted
                ends = step + self.tokens - 1  # a prompt's pass gives the first token
                self._running.extend((ends, self._waiting.popleft()) for _ in range(admitted))
            step += 1
            now += self.step_s
            await asyncio.sleep(max(now - time.perf_counter(), 0))
            while self._running and self._running[0][0] <= step:
                self._running.popleft()[1].set_result(None)


def canned(tokens: int) -> str:
    """One answer, without its name."""
    entries = [[-1.2345678 - index * 1e-7, 1000 + index, None] for index in range(tokens)]
    meta = {
        "id": "RID", "output_token_logprobs": entries, "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "VERSION", "prompt_tokens": 128, "completion_tokens": tokens, "cached_tokens": 0,
        "e2e_latency": 1.0,
    }  # fmt: skip
    return json.dumps({"text": "", "output_ids": [entry[1] for entry in entries], "meta_info": meta})


def make_app(tokens: int, step_s: float) -> web.Application:
    answer, state = canned(tokens), {"version": "none", "weights": 0}
    clock = Clock(step_s, tokens)

    async def run_clock(app: web.Application):
        running = asyncio.create_task(clock.run())
        yield
        running.cancel()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("rid", [""])[0].startswith("probe-"):  # SGLang's client names none
            scores = [[-float(state["weights"]), token, None] for token in body["input_ids"][0]]
            return web.json_response([{"meta_info": {"input_token_logprobs": scores}}])
        whole = answer.replace("VERSION", state["version"])
        is_list = isinstance(body["input_ids"][0], list)
        count = len(body["input_ids"]) if is_list else 1
        if step_s:
            await asyncio.gather(*(clock.done() for _ in range(count)))
        text = f"[{','.join([whole] * count)}]" if is_list else whole
        return web.Response(text=text, content_type="application/json")

    async def update(request: web.Request) -> web.Response:
        state["version"] = (await request.json())["weight_version"]
        state["weights"] += 1
        return web.json_response({"success": True})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"is_generation": True, "weight_version": state["version"]})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.17"})

    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.post("/generate", generate), web.post("/update_weights_from_disk", update),
            web.get("/model_info", info), web.get("/v1/loads", loads),
        ]
    )  # fmt: skip
    app.cleanup_ctx.append(run_clock)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0, help="one decoded token of all; 0 = no time")
    options = parser.parse_args()
    web.run_app(
        make_app(options.tokens, options.step_ms / 1e3), host="127.0.0.1", port=options.port, print=None
    )
