"""Responses that were interrupted: what to ask an engine for to go on, and how the pieces become one sample.

A parked group is a ``RolloutFrame`` of what its samples have so far; a sample without a row begins anew, one
with another finish reason than ``abort`` is done. Whoever goes on, with whichever policy version, adds a span
to the sample, so that a correction knows which version chose which token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.engine.protocol import Completion, Request, SamplingParams
from tasks.rl.routing_records import continued, pack, unpack
from tasks.say import say
from tasks.schema import RECORDED, RolloutFrame, from_bytes

Row = dict[str, Any]
Begun = Mapping[tuple[str, int], Row]
"""(prompt id, sample index) -> the row so far."""


def read_parked(parked: Mapping[str, bytes]) -> dict[tuple[str, int], Row]:
    """What was kept of some groups; one that cannot be read begins anew."""
    begun = {}
    for name, payload in parked.items():
        try:
            rows = from_bytes(payload, schema=RolloutFrame).rows(named=True)
        except Exception as error:  # bytes of a stranger; the portion must not fail for them
            say("generate", f"what was kept of group {name} must be readable, got {error}. Sampled anew.")
            continue
        begun |= {(name, row["sample_index"]): row for row in rows if row["prompt_id"] == name}
    return begun


def requests_of(prompt: Row, begun: Begun, seeds: Sequence[int]) -> list[Request]:
    """What is missing of a group: its untouched samples as one request, each interrupted one by itself."""
    name = prompt["prompt_id"]
    fresh = tuple(seed for index, seed in enumerate(seeds) if (name, index) not in begun)
    requests = [Request(prompt_ids=tuple(prompt["prompt_ids"]), seeds=fresh)] if fresh else []
    for index, seed in enumerate(seeds):
        row = begun.get((name, index))
        if row and row["finish_reason"] == "abort":
            ids = (*prompt["prompt_ids"], *row["response_ids"])
            requests.append(Request(prompt_ids=ids, seeds=(seed,), num_sampled=len(row["response_ids"])))
    return requests


def group_rows(
    prompt: Row,
    begun: Begun,
    completions: Sequence[Sequence[Completion]],
    *,
    group_size: int,
    policy_version: int,
    params: SamplingParams,
) -> list[Row]:
    """The group's samples from the answers to ``requests_of``; without those that have no token yet."""
    answers = (completion for group in completions for completion in group)
    before = [begun.get((prompt["prompt_id"], index)) for index in range(group_size)]
    found = {index: next(answers) for index, row in enumerate(before) if row is None}
    found |= {i: next(answers) for i, row in enumerate(before) if row and row["finish_reason"] == "abort"}
    rows = []
    for index, row in enumerate(before):
        completion = found.get(index)
        if completion and completion.response_ids:
            new = _row(prompt, index, completion, policy_version, params)
            rows.append(_continued(row, new) if row else new)
        elif row:
            rows.append(row)
    return rows


def is_finished(rows: Sequence[Row], group_size: int) -> bool:
    return len(rows) == group_size and all(row["finish_reason"] != "abort" for row in rows)


def _row(prompt: Row, index: int, completion: Completion, policy_version: int, params: SamplingParams) -> Row:
    return {
        **dict.fromkeys(RECORDED),
        **prompt,
        "sample_index": index,
        **_versions(completion, policy_version),
        "response_ids": completion.response_ids,
        "behavior_logprob": completion.logprobs,
        "finish_reason": completion.finish_reason,
        "chosen": completion.chosen,
        **_routing(completion, params),
    }


def _versions(completion: Completion, policy_version: int) -> Row:
    """Which version sampled what: as the engine says, which may have taken another one under the response;
    of a dialogue all by the version it was asked for."""
    spans = completion.version_spans or ((policy_version, len(completion.response_ids)),)
    listed = [{"policy_version": version, "num_tokens": count} for version, count in spans]
    return {"policy_version": spans[0][0], "version_spans": listed if len(spans) > 1 else None}


def _continued(before: Row, after: Row) -> Row:
    """``before`` with the tokens of ``after`` behind its own; ``policy_version`` stays the oldest."""
    spans, (first, *rest) = _spans(before), _spans(after)
    if spans[-1]["policy_version"] == first["policy_version"]:
        spans[-1] = {**first, "num_tokens": spans[-1]["num_tokens"] + first["num_tokens"]}
    else:
        spans.append(first)
    spans += rest
    routing = {
        name: pack(continued(unpack(before[name]), unpack(after[name])))
        for name in ("routed_experts", "routed_weights")
        if before[name] is not None and after[name] is not None
    }
    return {
        **before,
        "response_ids": [*before["response_ids"], *after["response_ids"]],
        "behavior_logprob": [*before["behavior_logprob"], *after["behavior_logprob"]],
        "finish_reason": after["finish_reason"],
        "version_spans": spans if len(spans) > 1 else None,
        **routing,
    }


def _spans(row: Row) -> list[dict[str, int]]:
    whole = {"policy_version": row["policy_version"], "num_tokens": len(row["response_ids"])}
    return list(row["version_spans"] or [whole])


def _routing(completion: Completion, params: SamplingParams) -> dict[str, bytes]:
    """The columns of the routing record that was asked for; an engine that left it out is an error."""
    if params.record_routing == "none":
        return {}
    found = {"routed_experts": completion.routed_experts}
    if params.record_routing == "experts_and_weights":
        found["routed_weights"] = completion.routed_weights
    columns = {name: pack(array) for name, array in found.items() if array is not None}
    if len(columns) < len(found):
        raise RuntimeError(
            f"the engine must record {params.record_routing} for every response, got {sorted(columns)}. Set "
            "rollout.record_routing to what it can record."
        )
    return columns
