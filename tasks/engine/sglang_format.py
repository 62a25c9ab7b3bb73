"""What a request to SGLang's ``/generate`` says and what its answer means; checked against 0.5.17.

Log-probabilities are those of the distribution that was sampled. SGLang's own are of the tempered
distribution before nucleus truncation, so with ``top_p`` below 1 its renormalised ones are asked for, which
it gives for a finite ``top_k``: the whole vocabulary.
"""

import base64
import math
from typing import Any

import numpy as np

from tasks.engine.protocol import Completion, Request, SamplingParams

SEED_BITS = 63
"""Seeds are signed 64-bit integers there; ours are unsigned."""


def request_body(
    request: Request, names: list[str], params: SamplingParams, *, vocab_size: int
) -> dict[str, Any]:
    """One list request: the samples of a prompt, each with its name and seed."""
    is_truncated = params.top_p < 1 and params.temperature > 0
    shared = {
        "max_new_tokens": params.max_new_tokens - request.num_sampled,
        "temperature": params.temperature,
        "stop_token_ids": sorted(params.stop_ids),
        "ignore_eos": not params.stop_ids,  # otherwise the checkpoint's own end ids stop as well
        "top_p": params.top_p,
        "top_k": vocab_size if is_truncated else -1,
    }
    return {
        "rid": names,
        "input_ids": [list(request.prompt_ids)] * len(names),
        "sampling_params": [shared | {"sampling_seed": seed % 2**SEED_BITS} for seed in request.seeds],
        "return_logprob": True,
        "return_sampling_mask": is_truncated,
        "return_routed_experts": params.record_routing == "experts",
    }


def single_bodies(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A list request as one request a sample: SGLang's router takes no list of names."""
    lists = ("rid", "input_ids", "sampling_params")
    shared = {name: value for name, value in body.items() if name not in lists}
    return [
        shared | dict(zip(lists, values, strict=True))
        for values in zip(*(body[n] for n in lists), strict=True)
    ]


def completion(answer: dict[str, Any], *, routing_shape: tuple[int, int]) -> Completion:
    """The sampled ids, end token included, as the server reports them; nothing is tokenised again.

    Args:
        routing_shape: layers and experts a token, of the routing record if one was asked for.
    """
    meta = answer["meta_info"]
    entries = meta["output_token_logprobs"]
    logprobs = meta.get("output_token_sampling_logprobs") or [entry[0] for entry in entries]
    ids = [entry[1] for entry in entries]
    wrong = [index for index, value in enumerate(logprobs) if value is None or not math.isfinite(value)]
    if wrong:
        raise ValueError(
            f"request {meta['id']} must have log-probabilities that are numbers, got {logprobs[wrong[0]]} at "
            f"token {wrong[0]} of {len(ids)}. Weights of version {meta['weight_version']} are not finite, or "
            "were changed while they were in use."
        )
    if len(logprobs) != len(ids):
        raise ValueError(
            f"request {meta['id']} must have a log-probability for each of {len(ids)} tokens, got "
            f"{len(logprobs)}."
        )
    return Completion(
        response_ids=ids,
        logprobs=[value if value < 0 else 0.0 for value in logprobs],
        finish_reason=meta["finish_reason"]["type"],
        routed_experts=_routed_experts(meta.get("routed_experts"), routing_shape),
        version_spans=version_spans(meta),
    )


def version_spans(meta: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """(version, tokens) in the order of the response; SGLang lists them from 0.5.19 on, and before says only
    which version held at the end."""
    listed = [span for span in meta.get("weight_versions") or () if span["end"] > span["start"]]
    if not listed:
        return ((int(meta["weight_version"]), len(meta["output_token_logprobs"])),)
    return tuple((int(span["version"]), span["end"] - span["start"]) for span in listed)


def _routed_experts(encoded: str | None, shape: tuple[int, int]) -> np.ndarray | None:
    """int32 as the server sends them, in as few bytes as the ids need."""
    if encoded is None:
        return None
    ids = np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, *shape)
    return ids.astype(np.uint8 if ids.size == 0 or ids.max() < 256 else np.int16)
