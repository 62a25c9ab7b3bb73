"""Tensor, context and pipeline parallelism, and their products with experts: the step of a single process."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, VOCAB, tiny_policy
from ranks import run_ranks
from steps import NUM_TOKENS, micro_batch, one_step, single_process, slack, weighted_loss
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.checkpoint.weights import disk_tensors
from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.router import RouterBalance
from tasks.policy.models.routers import Routers
from tasks.policy.parallel.context import allowed_keys, split_context
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.parallel.packed import require_packable
from tasks.policy.parallel.pipeline import schedule
from tasks.policy.step.trainer import Learner, make_optimizer, train_minibatch


def packed_batch(seed: int) -> dict[str, Tensor]:
    """Sequences of 4, 9, 1 and 5 tokens: the second lies across the middle and has a padding token inside."""
    rows = micro_batch(seed)
    ids = rows["input_ids"].flatten()[None, :19].clone()
    ids[0, 7] = 0
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.cat([torch.arange(length) for length in (4, 9, 1, 5)])[None],
        "advantage": rows["advantage"].flatten()[None, :19],
    }


def check_step(
    rank: int, world_size: int, sizes: dict[str, int], model: PreTrainedModel, expected: Any, batches: Any,
    is_checkpointed: bool,
) -> None:  # fmt: skip
    mesh = make_mesh(world_size, **sizes)
    attach_dispatcher(model, make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group))
    distribute(model, mesh)
    split_context(model, mesh.cp_group)
    if is_checkpointed:
        checkpoint_activations(model, is_context_split=mesh.cp > 1)
    metrics, gradients = one_step(model, mesh, batches[mesh.share :: mesh.num_shares])
    expected_metrics, expected_gradients, expected_weights = expected
    loose = slack(model.device)
    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, (set(gradients), {name for name, _ in disk_tensors(model)}))
    assert set().union(*(these for these, _ in names)) == expected_gradients.keys()
    assert set().union(*(these for _, these in names)) == expected_weights.keys()
    assert metrics.keys() == expected_metrics.keys() and metrics["skipped"] == 0
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5 * loose), name
    for name, gradient in gradients.items():
        # as in test_trainer: the largest gradient after clipping is 4e-3 to 6e-3, and 5e-8 is 1e-5 of it
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=5e-8 * loose, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, weight in disk_tensors(model):
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=5e-6 * loose)


def check(
    family: str, world_size: int, sizes: dict[str, int], *, packed: bool = False, recompute: bool = False,
    vocab_size: int = VOCAB + 1,
) -> None:  # fmt: skip
    model = tiny_policy(family, vocab_size=vocab_size)
    batches = [packed_batch(seed) if packed else micro_batch(seed) for seed in range(3)]
    expected = single_process(model, batches)
    run_ranks(check_step, world_size, sizes, model, expected, batches, recompute)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_two_ranks_of_each_axis_make_the_step_of_one(family, axis):
    check(family, 2, {"ep": 1, axis: 2})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_packed_rows_and_recomputation_go_with_each_axis(family, axis):
    check(family, 2, {"ep": 1, axis: 2}, packed=True, recompute=True)


FEW = [
    (2, {"tp": 2, "ep": 2}),
    (2, {"cp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 2, "fsdp": 2}),
    (4, {"pp": 2, "ep": 2}),
]
MORE = [
    (4, {"tp": 2, "ep": 4}),
    (4, {"tp": 2, "ep": 1, "fsdp": 2}),
    (4, {"tp": 2, "ep": 4, "fsdp": 2}),
    (4, {"tp": 2, "cp": 2, "ep": 2}),
    (4, {"cp": 2, "ep": 4, "fsdp": 2}),
    (4, {"cp": 2, "ep": 2, "fsdp": 2}),
    (4, {"pp": 2, "ep": 2, "fsdp": 2}),
    (4, {"pp": 2, "tp": 2, "ep": 2}),
    (4, {"pp": 2, "cp": 2, "ep": 2}),
    (8, {"pp": 2, "tp": 2, "ep": 4, "fsdp": 2}),
    (8, {"pp": 2, "tp": 2, "cp": 2, "ep": 2}),
    (8, {"tp": 2, "cp": 2, "ep": 4, "fsdp": 2}),
]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("world_size", "sizes"), [*FEW, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)], ids=str
)
def test_products_of_axes_make_the_step_of_one_rank(family, world_size, sizes):
    check(family, world_size, sizes, vocab_size=VOCAB)  # odd: whole on every tp rank


def check_collectives(rank: int, world_size: int, axis: str) -> None:
    """Every collective that a step makes, counted by torch's profiler."""
    counts = []
    for is_checkpointed in (False, True):
        mesh, model = make_mesh(world_size, 2, **{axis: 2}), tiny_policy("deepseek_v3").train()
        attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
        distribute(model, mesh)
        split_context(model, mesh.cp_group)
        if is_checkpointed:
            checkpoint_activations(model, is_context_split=mesh.cp > 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            one_step(model, mesh, [packed_batch(0)])
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        names = (event.name() for event in profile.profiler.kineto_results.events())  # no tree: seconds
        counts.append(Counter(name for name in names if name.startswith("gloo:")))
    assert counts[0] == counts[1] and counts[0].total() > 10, counts


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_recomputation_repeats_no_collective(axis):
    run_ranks(check_collectives, 2, axis)


def check_half_precision(
    rank: int, world_size: int, sizes: dict[str, int], expected: dict[str, float]
) -> None:
    mesh, model = make_mesh(world_size, **sizes), tiny_policy("deepseek_v3").train()
    attach_dispatcher(model, make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group))
    distribute(model, mesh, compute_dtype=torch.bfloat16)
    checkpoint_activations(model, is_context_split=mesh.cp > 1)
    require_packable(model)
    split_context(model, mesh.cp_group)
    metrics, gradients = one_step(model, mesh, [packed_batch(seed) for seed in range(3)], max_grad_norm=1e9)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    for name in ("loss", "entropy", "grad_norm"):
        # 2 to the -8 a rounding, some dozens of them in a row and another expert chosen here and there
        assert metrics[name] == pytest.approx(expected[name], rel=0.1), (name, metrics[name], expected[name])


@pytest.mark.parametrize("sizes", [{"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "ep": 1}], ids=str)
def test_half_precision_compute_goes_with_each_axis(sizes):
    batches = [packed_batch(seed) for seed in range(3)]
    metrics, _, _ = single_process(tiny_policy("deepseek_v3"), batches, max_grad_norm=1e9)
    run_ranks(check_half_precision, 2, sizes, metrics)


def check_refusals(rank: int, world_size: int) -> None:
    mesh = make_mesh(world_size, 1, pp=2)
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, make_dispatcher("local"))
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=r"train.pp must be at most the 1 layers of the model, got 2"):
        distribute(model, mesh)
    mesh = make_mesh(world_size, 1, tp=2)
    model = tiny_policy("qwen3_moe")
    del model.model.layers[1].self_attn.o_proj
    with pytest.raises(ValueError, match=r"one projection out of model.layers.1.self_attn, got"):
        distribute(model, mesh)
    model = tiny_policy("qwen3_moe")
    model.model.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"a part to split in every layer, got model.layers.1 \(Qwen3Moe"):
        distribute(model, mesh)
    with pytest.raises(ValueError, match=r"cp must find attention in every layer, .* without"):
        split_context(model, mesh.tp_group)
    model = tiny_policy("gpt_oss")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(
        ValueError, match=r"got layers of GptOssForCausalLM of the kinds \['linear_attention'\]"
    ):
        split_context(model, mesh.tp_group)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match=r"cp must run on attention sdpa or eager, .* got 'flash_attention_2'"
    ):
        split_context(model, mesh.tp_group)


def test_a_stage_runs_ahead_of_those_behind_it_and_then_one_forward_one_backward():
    def order(stage: int, num_passes: int) -> str:
        return " ".join(f"{'FB'[is_backward]}{n}" for is_backward, n in schedule(stage, 3, num_passes))

    assert order(0, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order(1, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order(2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order(0, 1) == "F0 B0"


def test_what_an_axis_cannot_split_is_refused_by_name():
    run_ranks(check_refusals, 2)


def test_a_query_sees_its_own_sequence_up_to_itself_and_within_the_window():
    is_token = torch.tensor([[True, True, True, True, False, True]])
    sequence = torch.tensor([[1, 1, 1, 2, 2, 2]])
    allowed = allowed_keys(is_token, sequence, 2, 4, window=None)[0, 0].int().tolist()
    assert allowed == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1]]
    near = allowed_keys(is_token, sequence, 2, 4, window=2)[0, 0].int().tolist()
    assert near == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]


def balanced_step(model: PreTrainedModel, mesh: ParallelMesh) -> dict[str, float]:
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    batches = [{**packed_batch(seed), "mask": torch.ones(1, 19, dtype=torch.bool)} for seed in range(2)]
    balance = RouterBalance(model, coefficient=0.5)
    return train_minibatch(
        Learner(model, optimizer, mesh), batches, weighted_loss,
        num_global_tokens=NUM_TOKENS, max_grad_norm=1e9, routers=Routers(balance=balance),
    )  # fmt: skip


def check_balance(rank: int, world_size: int, model: PreTrainedModel, expected: dict[str, float]) -> None:
    mesh = make_mesh(world_size, 2, tp=2)
    attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
    distribute(model, mesh)
    assert balanced_step(model, mesh) == pytest.approx(expected, rel=1e-5)


def test_the_auxiliary_loss_goes_with_tensor_parallelism():
    model = tiny_policy("qwen3_moe")
    alone = copy.deepcopy(model)
    attach_dispatcher(alone, LocalDispatcher())
    expected = balanced_step(alone, make_mesh(1, 1))
    assert expected["router_balance"] > 0.1 and expected["grad_norm"] > 0.1
    run_ranks(check_balance, 2, model, expected)
