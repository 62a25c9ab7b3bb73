"""Activation checkpointing changes memory and time, never a gradient, and repeats no exchange of tokens."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from families import FAMILIES, tiny_policy, token_ids
from ranks import run_ranks
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.dispatch.dispatcher import Dispatched, Dispatcher, LocalDispatcher, make_dispatcher
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.parallel.experts import attach_dispatcher, take_expert_load
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.shards import local_tensor
from tasks.policy.step.trainer import token_logprobs_and_entropy


class CountingDispatcher:
    """Passes on to another dispatcher and counts the calls."""

    def __init__(self, inner: Dispatcher):
        self.inner = inner
        self.num_ranks, self.rank = inner.num_ranks, inner.rank
        self.calls: Counter[str] = Counter()

    def dispatch(self, *args: Any, **kwargs: Any) -> Dispatched:
        self.calls["dispatch"] += 1
        return self.inner.dispatch(*args, **kwargs)

    def combine(self, *args: Any) -> Tensor:
        self.calls["combine"] += 1
        return self.inner.combine(*args)

    def describe(self) -> str:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()


def backward(model: PreTrainedModel, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and this rank's gradients by parameter."""
    ids = token_ids(seed)
    logprob_BL, entropy_BL = token_logprobs_and_entropy(model, ids, torch.ones_like(ids), 1.0)
    loss = (logprob_BL - 0.1 * entropy_BL).square().sum() / 100
    loss.backward()
    return loss.detach(), {
        name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


def num_saved(model: PreTrainedModel) -> int:
    """Numbers that autograd keeps outside recomputed parts."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    ids = token_ids(0, num_sequences=8, length=16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=ids)
    return sum(sizes.values()) - sum(p.numel() for p in model.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_bits_and_each_part_runs_twice(family):
    plain = tiny_policy(family)
    attach_dispatcher(plain, CountingDispatcher(LocalDispatcher()))
    model = copy.deepcopy(plain)
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if hasattr(module, "compute_rows") or name.endswith(("self_attn", "gate", "router", "layernorm")):
            leaf = "compute_rows" if hasattr(module, "compute_rows") else "forward"
            function = getattr(module, leaf)

            def count(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
                calls[name] += 1
                return function(*args, **kwargs)

            setattr(module, leaf, count)
    checkpoint_activations(model)
    expected, ours = backward(plain), backward(model)
    assert torch.equal(expected[0], ours[0]) and expected[1].keys() == ours[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(gradient, ours[1][name]), name
    assert len(calls) >= 7 and set(calls.values()) == {2}, calls
    assert num_saved(model) < 0.5 * num_saved(plain)
    with torch.no_grad():
        model(input_ids=token_ids(0))
    assert set(calls.values()) == {4}  # num_saved and this one: once each without a backward pass


def check_ranks(rank: int, world_size: int, fsdp: int) -> None:
    results, loads, counts = [], [], []
    for is_checkpointed in (False, True):
        mesh = make_mesh(world_size, ep=2, fsdp=fsdp)
        dispatcher = CountingDispatcher(make_dispatcher("all_to_all", mesh.ep_group))
        model = tiny_policy("deepseek_v3").train()
        attach_dispatcher(model, dispatcher)
        if fsdp > 1:
            shard_parameters(model, mesh, compute_dtype=torch.float32)
        if is_checkpointed:
            checkpoint_activations(model)
        results.append(backward(model, seed=rank))
        loads.append(take_expert_load(model))
        counts.append(dispatcher.calls)
    assert counts[0] == counts[1] == Counter(dispatch=1, combine=1)  # one layer of two has experts
    for name, load_e in loads[0].items():
        assert torch.equal(load_e, loads[1][name]) and load_e.sum() > 0
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


@pytest.mark.parametrize("fsdp", [1, 2])
def test_no_exchange_is_repeated_and_no_row_counted_twice(fsdp):
    run_ranks(check_ranks, 2, fsdp)
