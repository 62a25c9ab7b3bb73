"""Routing replay: what the engine recorded is what the trainer routes by, and it closes the gap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import FAMILIES, saved, tiny_policy

from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.protocol import Request, SamplingParams
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.replay import RoutingReplay
from tasks.policy.models.router import router_modules
from tasks.policy.models.routing import Routing
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.step.reading import read_rows
from tasks.policy.step.trainer import policy_reader
from tasks.rl.packing import collate
from tasks.rl.routing_records import continued, pack, unpack

PROMPTS = [(3, 4, 5, 6, 7), (8, 9), (10, 11, 12)]
PARAMS = SamplingParams(
    max_new_tokens=9, temperature=1.0, top_p=1.0, stop_ids=frozenset({1, 5, 9}),
    record_routing="experts_and_weights",
)  # fmt: skip


def rollout(folder, *, noise: float = 0.0, params: SamplingParams = PARAMS) -> list[dict]:
    """Rows sampled by an engine whose routers see their logits disturbed by ``noise``."""
    engine = EmbeddedEngine(batch_size=8)
    engine.load(folder, 0)
    assert engine.model is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, router in router_modules(engine.model):
            router.weight += noise * torch.randn(router.weight.shape, generator=generator)
    requests = [Request(prompt_ids=ids, seeds=tuple(range(4))) for ids in PROMPTS]
    return [
        {
            "prompt_ids": list(request.prompt_ids),
            "response_ids": completion.response_ids,
            "behavior_logprob": completion.logprobs,
            "loss_mask": [True] * len(completion.response_ids),
            "advantage": 1.0,
            "routed_experts": pack(completion.routed_experts),
            "routed_weights": pack(completion.routed_weights),
        }
        for request, completions in zip(requests, engine.generate(requests, params), strict=True)
        for completion in completions
    ]


def gap(folder, rows: list[dict], replay: str, *, packing="padded", max_tokens=1000) -> float:
    """Mean difference of the trainer's log-probabilities from those of the rollout."""
    model = load_policy(folder, dispatcher=LocalDispatcher())
    routing = None if replay == "none" else RoutingReplay(model, has_weights=replay == "experts_and_weights")
    values = read_rows(
        model, rows, make_mesh(1, 1), policy_reader(), max_tokens=max_tokens, packing=packing, routing=routing
    )
    found = np.concatenate(values) - np.concatenate([row["behavior_logprob"] for row in rows])
    return float(np.abs(found).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_experts_and_weights_closes_the_gap_that_experts_alone_leave(tmp_path, family):
    folder = saved(tiny_policy(family), tmp_path)
    rows = rollout(folder, noise=0.1)
    without, experts, both = (gap(folder, rows, kind) for kind in ("none", "experts", "experts_and_weights"))
    print(
        f"{family}: mean |difference| {without:.2e} without, {experts:.2e} experts, {both:.2e} with weights"
    )
    assert both <= without / 100 and both <= experts / 5 and experts < without


def with_record(rows: list[dict], name: str, change) -> list[dict]:
    return [{**row, name: pack(change(unpack(row[name])))} for row in rows]


@pytest.mark.parametrize(("packing", "max_tokens"), [("padded", 30), ("packed", 1000), ("packed", 40)])
def test_records_stay_with_their_tokens_in_every_layout(tmp_path, packing, max_tokens):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    rows = rollout(folder, noise=0.1)
    assert len({len(row["response_ids"]) for row in rows}) > 2  # otherwise the layouts would prove little
    assert gap(folder, rows, "experts_and_weights", packing=packing, max_tokens=max_tokens) < 3e-6
    late = with_record(
        with_record(rows, "routed_weights", lambda a: np.roll(a, 1, axis=0)),
        "routed_experts",
        lambda a: np.roll(a, 1, axis=0),
    )
    assert gap(folder, late, "experts_and_weights", packing=packing, max_tokens=max_tokens) > 1e-2


def test_half_precision_weights_are_enough_to_replay(tmp_path):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    rows = with_record(rollout(folder, noise=0.1), "routed_weights", lambda a: a.astype(np.float16))
    assert gap(folder, rows, "experts_and_weights") < gap(folder, rows, "none") / 100


def test_a_continued_response_replays_each_part_as_it_was_sampled(tmp_path):
    """An interrupted response goes on with another policy version, here other routers."""
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    begun = rollout(folder, noise=0.1, params=replace(PARAMS, max_new_tokens=4, stop_ids=frozenset({1})))
    engine = EmbeddedEngine(batch_size=8)
    engine.load(folder, 1)
    rows = []
    for row in begun:
        rest_ids = tuple(row["prompt_ids"] + row["response_ids"])
        request = Request(prompt_ids=rest_ids, seeds=(99,))
        rest = engine.generate([request], PARAMS)[0][0]
        for name, after in (("routed_experts", rest.routed_experts), ("routed_weights", rest.routed_weights)):
            assert after is not None
            row = {**row, name: pack(continued(unpack(row[name]), after))}
        ids, values = row["response_ids"] + rest.response_ids, row["behavior_logprob"] + rest.logprobs
        rows.append({**row, "response_ids": ids, "behavior_logprob": values, "loss_mask": [True] * len(ids)})
    first = [{**row, "response_ids": row["response_ids"][:4], "behavior_logprob": row["behavior_logprob"][:4],
              "loss_mask": [True] * 4} for row in rows]  # fmt: skip
    cut = [
        {
            **row,
            "routed_experts": pack(unpack(row["routed_experts"])[: len(row["prompt_ids"]) + 3]),
            "routed_weights": pack(unpack(row["routed_weights"])[: len(row["prompt_ids"]) + 3]),
        }
        for row in first
    ]
    assert gap(folder, cut, "experts_and_weights") < 3e-6 < 1e-2 < gap(folder, cut, "none")
    # the rest was sampled over a prefix that its engine had routed by itself: replay keeps each record
    assert gap(folder, rows, "experts_and_weights") < gap(folder, rows, "none")


def gradients(
    folder, rows: list[dict], *, replay: str, is_recomputed: bool = False
) -> dict[str, torch.Tensor]:
    model = load_policy(folder, dispatcher=LocalDispatcher()).train()
    routing = None if replay == "none" else RoutingReplay(model, has_weights=replay == "experts_and_weights")
    if is_recomputed:
        checkpoint_activations(model)
    micro_batch = collate(rows, packing="padded")
    if routing is not None:
        routing.use(micro_batch)
    logprob_BL, _ = policy_reader()(model, micro_batch)
    torch.where(micro_batch["mask"], logprob_BL, 0.0).sum().backward()
    if routing is not None:
        sums = routing.take_sums()
        assert 0 < sums["alike"] <= sums["replayed"]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_ones_own_routing_changes_no_gradient(tmp_path, family):
    """The routers included: a replayed weight has the recorded value and the router's own gradient."""
    folder = saved(tiny_policy(family), tmp_path)
    rows = rollout(folder)
    expected = gradients(folder, rows, replay="none")
    for replay in ("experts", "experts_and_weights"):
        for is_recomputed in (False, True):
            found = gradients(folder, rows, replay=replay, is_recomputed=is_recomputed)
            for name, gradient in expected.items():
                atol = 1e-4 * gradient.abs().max().item() + 1e-6
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol, msg=name)


def test_a_disturbed_router_gets_gradients_at_the_recorded_experts(tmp_path):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    rows = rollout(folder, noise=0.1)
    plain = gradients(folder, rows, replay="experts_and_weights")
    again = gradients(folder, rows, replay="experts_and_weights", is_recomputed=True)
    routers = [name for name in plain if ".gate." in name]
    assert routers and all(plain[name].abs().max() > 0 for name in routers)
    for name, gradient in plain.items():  # a part computed again in the backward pass is routed alike
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=1e-5)


def test_an_engine_records_only_what_is_asked(tmp_path):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    engine = EmbeddedEngine(batch_size=8)
    engine.load(folder, 0)
    request = Request(prompt_ids=PROMPTS[0], seeds=(1, 2))
    plain, experts, both = (
        engine.generate([request], replace(PARAMS, record_routing=kind))[0]
        for kind in ("none", "experts", "experts_and_weights")
    )
    assert plain == experts == both  # recording changes no sample
    assert plain[0].routed_experts is None and experts[0].routed_weights is None
    assert both[0].routed_experts is not None and both[0].routed_experts.dtype == np.uint8
    rows = len(PROMPTS[0]) + len(both[0].response_ids) - 1
    assert both[0].routed_experts.shape == both[0].routed_weights.shape == (rows, 2, 2)


def test_router_metrics_by_hand_and_without_padding():
    model = tiny_policy("qwen3_moe")
    routing = Routing(model)
    rows = [
        {
            "prompt_ids": [3, 4],
            "response_ids": [5] * n,
            "behavior_logprob": [0.0] * n,
            "loss_mask": [True] * n,
            "advantage": 0.0,
        }
        for n in (1, 6)
    ]
    with torch.no_grad():
        for _, router in router_modules(model):
            router.weight.zero_()
    attach_dispatcher(model, LocalDispatcher())
    micro_batch = collate(rows, packing="padded")
    routing.use(micro_batch)
    policy_reader()(model, micro_batch)
    # equal scores: every token takes the same 2 of 8 experts, so their load is 4 means and entropy is full
    assert sum(int(load_E.sum()) for load_E in routing._load_E.values()) == 2 * 2 * (
        3 + 8
    )  # layers, experts, tokens
    assert routing.metrics(make_mesh(1, 1)) == {
        "router/load_max": pytest.approx(4.0),
        "router/load_min": 0.0,
        "router/entropy": pytest.approx(1.0),
    }
    assert routing.metrics(make_mesh(1, 1)) == {}  # taken


def test_drift_is_the_share_of_choices_that_the_trainer_would_not_make(tmp_path):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    drifts = []
    for noise in (0.0, 0.1):
        model = load_policy(folder, dispatcher=LocalDispatcher())
        routing = Routing(model, replay="experts_and_weights")
        micro_batch = collate(rollout(folder, noise=noise), packing="packed")
        routing.use(micro_batch)
        policy_reader()(model, micro_batch)
        drifts.append(routing.metrics(make_mesh(1, 1))["router/drift"])
    assert drifts[0] == 0 and 0.05 < drifts[1] < 0.8
