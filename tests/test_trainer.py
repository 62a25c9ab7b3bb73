"""A training step on several ranks is the step of a single process; log-probabilities sit at their tokens."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from families import tiny_policy, token_ids
from ranks import run_ranks
from steps import MicroBatch, micro_batch, one_step, single_process, weighted_loss
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.checkpoint.weights import disk_tensors, tensor_digest
from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import (
    _square_sum,
    clip_gradients,
    make_mesh,
    named_parameters,
    norm_dtype,
    reduce_gradients,
)
from tasks.policy.parallel.shards import local_tensor
from tasks.policy.step.trainer import Learner, make_optimizer, token_logprobs_and_entropy, train_minibatch


def check_step(
    rank: int, world_size: int, ep: int, fsdp: int, model: PreTrainedModel, expected, shares
) -> None:
    mesh = make_mesh(world_size, ep, fsdp)
    dispatcher = make_dispatcher("all_to_all" if ep > 1 else "local", mesh.ep_group)
    attach_dispatcher(model, dispatcher)
    if fsdp > 1:
        shard_parameters(model, mesh, compute_dtype=torch.float32)
        kept = [sum(local_tensor(p).numel() for p in params.values()) for params in named_parameters(model)]
        sizes = {name: weight.numel() for name, weight in expected[2].items()}
        whole = sum(size for name, size in sizes.items() if ".experts." in name)
        assert kept[1] * mesh.copy_size == whole and kept[0] < (sum(sizes.values()) - whole) / fsdp * 1.1
    metrics, gradients = one_step(model, mesh, [micro_batch(seed) for seed in shares[rank]])
    expected_metrics, expected_gradients, expected_weights = expected
    assert metrics.keys() == expected_metrics.keys() and metrics["skipped"] == 0
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    for name, gradient in gradients.items():
        # the largest gradient after clipping is 4e-3 to 6e-3: 5e-8 is 1e-5 of it, 25 times what is measured
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=5e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, weight in disk_tensors(model):
        # the step is 1e-3 * g / (|g| + eps 1e-5): a gradient off by 5e-8 moves a weight by 5e-6 at most
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=5e-6)


LAYOUTS = [
    pytest.param(2, 2, 1, [[0, 1], [2, 3]], id="two expert ranks"),
    pytest.param(2, 2, 1, [[0, 1, 2, 3], []], id="one rank without micro-batches"),
    pytest.param(2, 1, 1, [[0], [1, 2, 3]], id="two replicas"),
    pytest.param(4, 2, 1, [[0], [1], [2, 3], []], id="two replicas of two expert ranks"),
    pytest.param(2, 1, 2, [[0], [1, 2, 3]], id="two shards"),
    pytest.param(2, 2, 2, [[0, 1, 2, 3], []], id="two expert ranks that share dense parameters"),
    pytest.param(4, 2, 4, [[0], [1], [2, 3], []], id="two shards of two expert ranks"),
    pytest.param(4, 2, 2, [[0], [1], [2, 3], []], id="two replicas of two sharding expert ranks"),
    pytest.param(4, 1, 2, [[0], [1], [2, 3], []], id="two replicas of two shards"),
]


@pytest.mark.parametrize(("world_size", "ep", "fsdp", "shares"), LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_loss_gradients_norm_and_step_equal_a_single_process(family, world_size, ep, fsdp, shares):
    model = tiny_policy(family)
    expected = single_process(model, [micro_batch(seed) for seed in range(4)])
    metrics, gradients, _ = expected
    assert metrics["grad_norm"] > 0.1  # so the clip to 0.05 is at work
    loud = [name for name, gradient in gradients.items() if gradient.abs().max() > 1e-4]
    assert any(".experts." in name for name in loud) and any(".gate." in name for name in loud)
    run_ranks(check_step, world_size, ep, fsdp, model, expected, shares)


def test_micro_batching_does_not_change_the_gradient():
    model = tiny_policy("qwen3_moe")
    batches = [micro_batch(seed) for seed in range(2)]
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    # not clipped: a clip would hide a wrong scale
    metrics, gradients, _ = single_process(model, batches, max_grad_norm=math.inf)
    joined_metrics, joined_gradients, _ = single_process(model, [joined], max_grad_norm=math.inf)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert joined_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(joined_gradients[name], gradient, rtol=0, atol=1e-5 * largest)


def test_two_runs_give_the_same_bits():
    runs = [single_process(tiny_policy("deepseek_v3"), [micro_batch(0), micro_batch(1)]) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert tensor_digest(runs[0][2].items()) == tensor_digest(runs[1][2].items())


def test_logprob_and_entropy_belong_to_the_token_they_predict():
    model = tiny_policy("qwen3_moe")
    ids_BL = token_ids(0, num_sequences=1, length=4)
    logprob_BL, entropy_BL = token_logprobs_and_entropy(
        model, ids_BL, torch.ones_like(ids_BL), temperature=0.5
    )
    assert logprob_BL.shape == ids_BL.shape and logprob_BL[0, 0] == 0 and entropy_BL[0, 0] == 0
    for t in range(1, 4):
        distribution_V = (model(input_ids=ids_BL[:, :t]).logits[0, -1] / 0.5).softmax(0)
        assert logprob_BL[0, t].item() == pytest.approx(distribution_V[ids_BL[0, t]].log().item(), abs=1e-5)
        entropy = -(distribution_V * distribution_V.log()).sum().item()
        assert entropy_BL[0, t].item() == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_padding_on_either_side_changes_nothing_and_has_no_logprob(family):
    model = tiny_policy(family)
    ids, pad = token_ids(0, num_sequences=1, length=5), torch.zeros(1, 2, dtype=torch.int64)
    ones = torch.ones_like(ids)
    plain = token_logprobs_and_entropy(model, ids, ones, 1.0)
    right = token_logprobs_and_entropy(model, torch.cat([ids, pad], 1), torch.cat([ones, pad], 1), 1.0)
    left = token_logprobs_and_entropy(model, torch.cat([pad, ids], 1), torch.cat([pad, ones], 1), 1.0)
    for expected, after, before in zip(plain, right, left, strict=True):
        torch.testing.assert_close(after[:, :5], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(before[:, 2:], expected, rtol=0, atol=1e-5)
        assert after[:, 5:].abs().sum() == 0 and before[:, :3].abs().sum() == 0


def check_skip(rank: int, world_size: int, model: PreTrainedModel, case: str) -> None:
    mesh = make_mesh(world_size, ep=2)
    assert mesh.ep_group is not None
    attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    before = tensor_digest(disk_tensors(model))

    def loss_fn(
        logprob_BL: Tensor, entropy_BL: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = weighted_loss(logprob_BL, entropy_BL, batch)
        if rank == 1 and case == "loss":
            return loss * torch.nan, metrics
        if rank == 1 and case == "gradient":  # sqrt(0) is finite and its slope is not
            return loss + (logprob_BL * 0).sum().abs().sqrt(), metrics
        return loss, metrics

    def step() -> dict[str, float]:
        batches = [micro_batch(rank), micro_batch(2 + rank)]
        return train_minibatch(
            Learner(model, optimizer, mesh),
            batches,
            loss_fn,
            num_global_tokens=100,
            max_grad_norm=1.0,
            on_nonfinite=at_fault.extend,
        )

    at_fault: list[int] = []
    assert step()["skipped"] == 1
    # a gradient that is not finite has no micro-batch that is known to have made it
    assert at_fault == ([0, 1] if case == "gradient" or rank == 1 else [])
    assert tensor_digest(disk_tensors(model)) == before and not optimizer.state
    case = "sound"
    assert step()["skipped"] == 0  # and the next step is not poisoned
    assert tensor_digest(disk_tensors(model)) != before


@pytest.mark.parametrize("case", ["loss", "gradient"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(case):
    run_ranks(check_skip, 2, tiny_policy("qwen3_moe"), case)


def check_disagreement(rank: int, world_size: int, model: PreTrainedModel) -> None:
    mesh = make_mesh(world_size, ep=1)
    attach_dispatcher(model, LocalDispatcher())
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"must be equal on all ranks, got 10 to 11"):
        train_minibatch(
            Learner(model, optimizer, mesh), [], weighted_loss, num_global_tokens=10 + rank, max_grad_norm=1.0
        )
    with pytest.raises(ValueError, match=r"num_global_tokens must be positive, got 0"):
        train_minibatch(
            Learner(model, optimizer, mesh), [], weighted_loss, num_global_tokens=0, max_grad_norm=1.0
        )
    with pytest.raises(
        ValueError, match=r"world_size must equal the number of ranks started, got world_size=3 and 2"
    ):
        make_mesh(3, 1)


def test_ranks_that_disagree_on_the_token_count_are_refused():
    run_ranks(check_disagreement, 2, tiny_policy("qwen3_moe"))


def check_empty_passes(rank: int, world_size: int, model: PreTrainedModel) -> None:
    mesh = make_mesh(world_size, ep=2)
    assert mesh.ep_group is not None
    attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    metrics = train_minibatch(
        Learner(model, optimizer, mesh),
        [micro_batch(0)] * rank,
        weighted_loss,
        num_global_tokens=100,
        max_grad_norm=1.0,
        min_micro_batches=3,
    )
    assert len(passes) == 3 and metrics["micro_batches"] == 1


def test_every_rank_makes_at_least_the_asked_number_of_passes():
    run_ranks(check_empty_passes, 2, tiny_policy("qwen3_moe"))


def check_reduction(rank: int, world_size: int, model: PreTrainedModel) -> None:
    """Gradients of one on every rank, in buckets so small that there are many."""
    mesh = make_mesh(world_size, ep=2)
    assert mesh.replicate_rank == rank // 2
    assert mesh.ep_group is not None and mesh.replicate_group is not None
    assert dist.get_process_group_ranks(mesh.ep_group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert dist.get_process_group_ranks(mesh.replicate_group) == [rank % 2, rank % 2 + 2]
    attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
    for name, param in model.named_parameters():
        param.grad = None if "norm" in name and rank else torch.ones_like(param)
    reduce_gradients(model, mesh, bucket_bytes=4096)
    total = 0
    for name, param in model.named_parameters():
        summed = 2 if ".experts." in name else 1 if "norm" in name else 4
        assert param.grad is not None and (param.grad == summed).all(), name
        total += param.numel() * summed**2 * (2 if ".experts." in name else 1)  # the other rank's experts too
    assert clip_gradients(model, mesh, 1.0, {})[0] == pytest.approx(total**0.5, rel=1e-12)
    assert clip_gradients(model, mesh, 9.0, {})[0] == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients(model, mesh, 0.9, {})[0] == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients(model, mesh, math.inf, {})[0] == pytest.approx(0.9, rel=1e-5)


def test_gradients_are_summed_where_a_parameter_is_shared_and_counted_once_in_the_norm():
    run_ranks(check_reduction, 4, tiny_policy("qwen3_moe"))


def test_a_rank_with_nothing_to_count_counts_it_where_its_parameters_are():
    """Two sums of one device are stacked; over NCCL the first rank without a dense part to count failed."""
    assert _square_sum([], torch.device("meta")).device.type == "meta"


def test_a_mesh_or_norm_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"ep must divide the 8 ranks, got ep=3. .* \[1, 2, 4, 8\]"):
        make_mesh(8, 3)
    with pytest.raises(ValueError, match=r"got world_size=2 and no process group"):
        make_mesh(2, 1)
    with pytest.raises(ValueError, match=r"max_norm must be positive, got 0"):
        clip_gradients(tiny_policy("qwen3_moe"), make_mesh(1, 1), 0, {})


@pytest.mark.parametrize(
    ("grad", "device", "expected"),
    [
        (torch.bfloat16, "cpu", torch.float64), (torch.float32, "cpu", torch.float64),
        (torch.bfloat16, "cuda", torch.float32), (torch.float32, "cuda", torch.float32),
        (torch.float64, "cuda", torch.float64),
    ],
)  # fmt: skip
def test_squares_of_a_gradient_are_added_up_in_no_less_than_float32(grad, device, expected):
    assert norm_dtype(grad, device) is expected
    values = torch.full((1000,), 3e-3, dtype=grad)
    norm = torch.linalg.vector_norm(values, dtype=norm_dtype(grad, device))
    assert norm.item() == pytest.approx(values.double().square().sum().sqrt().item(), rel=1e-6)
