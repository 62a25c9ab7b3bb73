"""The fused kernels in a policy: the same step as the plain path, or no further from float32 than it is.

The CPU tests run the kernels' torch formulas, so they see the wiring; Triton needs the ``gpu`` tests.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import VOCAB, tiny_policy, token_ids
from ranks import run_ranks
from steps import micro_batch, one_step, single_process
from test_parallel import check_step, packed_batch
from torch import Tensor

from tasks.policy.dispatch.dispatcher import AllToAllDispatcher, LocalDispatcher
from tasks.policy.models.norms import use_fused_norms
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.rotary import use_fused_rotary
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.shards import whole_tensor
from tasks.policy.step import logprobs
from tasks.policy.step.logprobs import token_logprobs_and_entropy

FUSED_FAMILIES = ["qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe"]
TURNS_HALVES = ["qwen3_moe", "mixtral", "glm4_moe"]


def step(
    family: str,
    *,
    fused: bool,
    device: str,
    dtype: torch.dtype,
    rounded_to: torch.dtype = torch.float32,
    packed: bool = False,
    checkpointed: bool = False,
) -> dict[str, Tensor]:
    """Log-probabilities, entropies and all gradients of a loss over both, on padded or packed sequences."""
    model = tiny_policy(family).to(rounded_to).to(device, dtype)
    attach_dispatcher(model, LocalDispatcher(), kernel="fused" if fused else "torch")
    if fused:
        use_fused_norms(model)
        if family in TURNS_HALVES:
            use_fused_rotary(model)
    if checkpointed:
        checkpoint_activations(model)
    ids_BL = token_ids(0).to(device)
    mask_BL, position_BL = torch.ones_like(ids_BL), None
    if packed:
        position_BL = torch.arange(ids_BL.shape[1], device=device).repeat(ids_BL.shape[0])[None]
        ids_BL, mask_BL = ids_BL.view(1, -1), mask_BL.view(1, -1)
    else:
        mask_BL[1, -1:], mask_BL[2, :2] = 0, 0
    kernel = "torch" if not fused else "chunked" if device == "cpu" else "fused"
    logprob_BL, entropy_BL = token_logprobs_and_entropy(
        model, ids_BL, mask_BL, 0.8, position_BL=position_BL, kernel=kernel
    )
    (logprob_BL.sum() - 0.1 * entropy_BL.square().sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logprob": logprob_BL.detach(), "entropy": entropy_BL.detach(), **gradients}


@pytest.mark.parametrize("family", FUSED_FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_the_fused_step_is_the_plain_step(family, packed):
    plain = step(family, fused=False, device="cpu", dtype=torch.float32, packed=packed)
    fused = step(family, fused=True, device="cpu", dtype=torch.float32, packed=packed, checkpointed=packed)
    assert fused.keys() == plain.keys()
    for name, value in plain.items():
        # measured below 3e-6 of the largest entry
        bound = 2e-5 * value.abs().max().item() + 1e-7
        torch.testing.assert_close(fused[name], value, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def check_two_ranks(rank: int, world_size: int, expected: list[Tensor]) -> None:
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, AllToAllDispatcher(dist.group.WORLD), kernel="fused")
    logits = model(input_ids=token_ids(rank)).logits
    torch.testing.assert_close(logits, expected[rank], rtol=0, atol=1e-5)  # as in the plain path's test
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_fused_experts_on_two_ranks_equal_one():
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, LocalDispatcher())
    with torch.no_grad():
        expected = [model(input_ids=token_ids(rank)).logits for rank in range(2)]
    run_ranks(check_two_ranks, 2, expected)


def check_sharded(rank: int, world_size: int) -> None:
    """Experts and norms read their weights inside a layer's forward, where ``fully_shard`` has them whole."""
    gradients: list[dict[str, Tensor]] = []
    for fused in (False, True):
        mesh = make_mesh(world_size, ep=1, fsdp=2)
        model = tiny_policy("qwen3_moe").train()
        attach_dispatcher(model, LocalDispatcher(), kernel="fused" if fused else "torch")
        shard_parameters(model, mesh, compute_dtype=torch.float32)
        if fused:
            use_fused_norms(model)
            use_fused_rotary(model)
        checkpoint_activations(model)
        ids_BL = token_ids(rank)
        logprob_BL, _ = token_logprobs_and_entropy(model, ids_BL, torch.ones_like(ids_BL), 1.0)
        logprob_BL.sum().backward()
        gradients.append({n: whole_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        bound = 2e-5 * gradient.abs().max().item() + 1e-7
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=bound)


def test_fused_experts_norms_and_rotary_work_on_split_parameters():
    run_ranks(check_sharded, 2)


def check_fused_logprobs(rank: int, world_size: int, *args: Any) -> None:
    """The plain step's own check, with log-probabilities by the kernel's formula; forked, so it ends here."""
    logprobs._from_logits = logprobs.without_logits()
    check_step(rank, world_size, *args)


@pytest.mark.parametrize(("family", "packed"), [("qwen3_moe", False), ("deepseek_v3", True)])
@pytest.mark.parametrize(
    "sizes",
    [{"ep": 1, "fsdp": 2}, {"ep": 2, "fsdp": 2}, {"ep": 1, "tp": 2}, {"ep": 1, "cp": 2}, {"ep": 1, "pp": 2}],
    ids=str,
)
def test_fused_logprobs_make_the_step_of_one_rank_on_each_axis(family, sizes, packed):
    model = tiny_policy(family, vocab_size=VOCAB + 1)  # even, so that tp splits it
    batches = [packed_batch(seed) if packed else micro_batch(seed) for seed in range(3)]
    expected = single_process(model, batches)
    run_ranks(check_fused_logprobs, 2, sizes, model, expected, batches, False)


def check_half_precision_logprobs(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    plain, found = logprobs._from_logits, []
    for read in (plain, logprobs.without_logits()):
        logprobs._from_logits = read
        mesh, model = make_mesh(world_size, **sizes), tiny_policy("qwen3_moe").train()
        attach_dispatcher(model, LocalDispatcher())
        distribute(model, mesh, compute_dtype=torch.bfloat16)
        found.append(one_step(model, mesh, [micro_batch(seed) for seed in range(3)], max_grad_norm=1e9))
    (plain_metrics, plain_gradients), (metrics, gradients) = found
    assert metrics["loss"] == pytest.approx(plain_metrics["loss"], rel=1e-5)  # the same bf16 logits
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        # the slope of a logit is rounded to bf16 once more (2 to the -9), as each product after it is
        assert (gradient - plain_gradients[name]).norm() <= 1e-2 * plain_gradients[name].norm() + 1e-9, name


@pytest.mark.parametrize("sizes", [{"ep": 1, "fsdp": 2}, {"ep": 1}], ids=str)
def test_fused_logprobs_take_the_weights_that_are_computed_with(sizes):
    run_ranks(check_half_precision_logprobs, 2, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FUSED_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_on_cuda_the_fused_step_is_as_near_to_float32_on_the_host_as_the_plain_one(packed, dtype, family):
    """Rounding may choose another expert in half precision, which is why the bound is loose."""
    exact = step(family, fused=False, device="cpu", dtype=torch.float32, rounded_to=dtype, packed=packed)
    size = sum(e.norm() ** 2 for e in exact.values()) ** 0.5
    errors = {}
    for fused in (False, True):
        got = step(family, fused=fused, device="cuda", dtype=dtype, packed=packed, checkpointed=packed)
        assert got.keys() == exact.keys()
        errors[fused] = float(
            sum((got[n].cpu().float() - e).norm() ** 2 for n, e in exact.items()) ** 0.5 / size
        )
    print(family, dtype, errors)
    assert errors[True] < 2 * errors[False] + 1e-5, errors


def test_fused_kernels_are_refused_where_they_cannot_run():
    from tasks.train_config import TrainConfig  # needs pydantic, which the gpu tests do not

    with pytest.raises(ValueError, match="fused kernels need CUDA"):
        TrainConfig(logprob_kernel="fused")
    with pytest.raises(ValueError, match="logprob_kernel 'chunked' is for CPUs, got backend='nccl'"):
        TrainConfig(backend="nccl", logprob_kernel="chunked")
    with pytest.raises(ValueError, match=r"logprob_keep_gb must be 0 with logprob_kernel 'torch', .* got 1"):
        TrainConfig(logprob_keep_gb=1)
    assert TrainConfig(logprob_kernel="chunked", logprob_keep_gb=1).kernels["logprob"] == "chunked"
    assert TrainConfig(backend="nccl", norm_kernel="fused").kernels["norms"] == "fused"
    assert set(TrainConfig().kernels.values()) == {"torch"}
    for split in ({"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"compute_dtype": "bfloat16"}):
        TrainConfig.model_validate({"backend": "nccl", "logprob_kernel": "fused", **split})
    model = tiny_policy("qwen3_moe")
    with pytest.raises(ValueError, match="must run on CUDA"):
        token_logprobs_and_entropy(model, token_ids(0), torch.ones_like(token_ids(0)), 1.0, kernel="fused")
    with pytest.raises(ValueError, match=r"halves of a head, got model.layers.0.self_attn \(Deepseek"):
        use_fused_rotary(tiny_policy("deepseek_v3"))
    with pytest.raises(ValueError, match="needs attention that calls apply_rotary_pos_emb, got Linear"):
        use_fused_rotary(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SwiGLU experts without biases"):
        attach_dispatcher(copy.deepcopy(tiny_policy("gpt_oss")), LocalDispatcher(), kernel="fused")
