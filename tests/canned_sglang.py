"""Answers as an SGLang server that takes no time, so that clients can be measured alone.

    python tests/canned_sglang.py --port 30000 --tokens 256

Each response has as many tokens as are asked for here, with log-probabilities, whatever was asked.
"""

import argparse
import json

from aiohttp import web


def canned(tokens: int) -> str:
    """One answer, without its name."""
    entries = [[-1.2345678 - index * 1e-7, 1000 + index, None] for index in range(tokens)]
    meta = {
        "id": "RID", "output_token_logprobs": entries, "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "VERSION", "prompt_tokens": 128, "completion_tokens": tokens, "cached_tokens": 0,
        "e2e_latency": 1.0,
    }  # fmt: skip
    return json.dumps({"text": "", "output_ids": [entry[1] for entry in entries], "meta_info": meta})


def make_app(tokens: int) -> web.Application:
    answer, state = canned(tokens), {"version": "none", "weights": 0}

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        if body["rid"][0].startswith("probe-"):
            scores = [[-float(state["weights"]), token, None] for token in body["input_ids"][0]]
            return web.json_response([{"meta_info": {"input_token_logprobs": scores}}])
        whole = answer.replace("VERSION", state["version"])
        is_list = isinstance(body["input_ids"][0], list)
        text = f"[{','.join([whole] * len(body['input_ids']))}]" if is_list else whole
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
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    web.run_app(make_app(options.tokens), host="127.0.0.1", port=options.port, print=None)
