"""A training step on one rank asks the device for one list of numbers; an exchange between ranks, for one.

Every other question would leave the device without work until the host has the answer and has launched what
follows: 0.8 ms a layer on an H200, of 32. What ``host_reads.py`` cannot see, this cannot either.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import VOCAB, tiny_policy
from host_reads import HostReads
from loop import laptop
from ranks import run_ranks
from test_nvlink import FLOAT32, FileMemory
from test_nvlink import open_dispatcher as open_nvlink
from torch import Tensor

from tasks.policy.dispatch.dispatcher import AllToAllDispatcher, Dispatcher, LocalDispatcher
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.router import RouterBalance
from tasks.policy.models.router_bias import RouterBias
from tasks.policy.models.routers import Routers
from tasks.policy.models.routing import Routing
from tasks.policy.parallel.experts import attach_dispatcher, experts_modules
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.step.trainer import Learner, make_optimizer, policy_reader, train_minibatch
from tasks.policy.training.epoch import make_loss
from tasks.rl.packing import Packing, collate

NUM_MICRO_BATCHES = 2
ONCE_A_STEP = {"tolist at tasks/policy/parallel/mesh.py:clip_gradients"}
"""The gradient's norm and all sums."""
ONCE_A_PASS = {
    # whether there is padding at all, which lets attention do without a mask
    "_local_scalar_dense at transformers/masking_utils.py:_ignore_causal_mask_sdpa",
    # whether the row holds several sequences
    "_local_scalar_dense at transformers/masking_utils.py:find_packed_sequence_indices",
    # how many, for the auxiliary loss
    "_local_scalar_dense at tasks/policy/models/router.py:sequence_numbers",
    # the smallest number of a type, for eager attention
    "upload at transformers/masking_utils.py:eager_mask",
}
ON_THE_HOST = {
    # of step counts, which torch's AdamW keeps there
    "_local_scalar_dense at tasks/policy/step/trainer.py:train_minibatch",
}
FORMULAS = "kernels/moe_kernels/"
"""What stands for the kernels on CPU does not run on CUDA."""


def test_what_makes_the_host_wait_is_seen_in_both_passes_and_nothing_else_is():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * grads[0].sum().item()

    x = torch.arange(4.0, requires_grad=True)
    with HostReads() as nothing:
        y = torch.where(x > 1, x, 0)[torch.tensor([3, 1])].sort(stable=True).values
        torch.ops.aten._assert_async.msg((y < 9).all(), "y must be below 9")
        y.repeat_interleave(torch.tensor([2, 1]), output_size=3).sum().backward()
    assert not nothing.found
    with HostReads() as reads:
        assert x.sum() > 0
        (x[x > 1].tolist(), (x > 1).nonzero(), torch.tensor([1, 2], device="cpu"), x.detach().numpy())
        y.repeat_interleave(torch.tensor([2, 1]))
        Asks.apply(x).sum().backward()
    here = "tests/test_host_reads.py:test_what_makes_the_host_wait_is_seen_in_both_passes_and_nothing_else_is"
    names = ["index.Tensor", "tolist", "nonzero", "upload", "numpy", "repeat_interleave.Tensor"]
    # autograd's formulas have no frame of the project between them and the call
    assert reads.found == Counter(
        {
            f"_local_scalar_dense at {here}": 1,
            "_local_scalar_dense at tests/test_host_reads.py:Asks.backward": 1,
            **{f"{name} at {here}": 1 for name in names},
        }
    )


def sample_rows(count: int, seed: int) -> list[dict[str, Any]]:
    draw, rows = random.Random(seed), []
    for _ in range(count):
        num_prompt, num_response = draw.randint(2, 5), draw.randint(1, 6)
        rows.append(
            {
                "prompt_ids": [draw.randrange(2, VOCAB) for _ in range(num_prompt)],
                "response_ids": [draw.randrange(2, VOCAB) for _ in range(num_response)],
                "behavior_logprob": [-1.0] * num_response,
                "loss_mask": [True] * num_response,
                "advantage": draw.random() - 0.5,
            }
        )
    return rows


@pytest.mark.parametrize(
    ("family", "packing"),
    [("qwen3_moe", "padded"), ("qwen3_moe", "packed"), ("glm4_moe", "packed"), ("gpt_oss", "padded")],
)
def test_a_local_step_asks_the_device_once_beside_what_transformers_asks_a_pass(
    family: str, packing: Packing
):
    """With all that watches over routers, and with parts computed again where rows are packed."""
    model = tiny_policy(family).train()
    attach_dispatcher(model, LocalDispatcher())
    bias = RouterBias(model, rate=0.01) if family == "glm4_moe" else None
    routers = Routers(routing=Routing(model), balance=RouterBalance(model, coefficient=0.1), bias=bias)
    if packing == "packed":
        checkpoint_activations(model)
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    batches = [collate(sample_rows(3, seed), packing=packing) for seed in range(NUM_MICRO_BATCHES)]
    num_tokens = sum(int(batch["mask"].sum()) for batch in batches)
    loss = make_loss(laptop(), "clipped_policy", num_global_tokens=num_tokens, num_global_sequences=6)
    mesh = make_mesh(1, 1)

    def step() -> dict[str, float]:
        return train_minibatch(
            Learner(model, optimizer, mesh), batches, loss,
            num_global_tokens=num_tokens, max_grad_norm=1.0, read=policy_reader(), routers=routers,
        )  # fmt: skip

    step()  # makes the optimizer's state
    with HostReads() as reads:
        metrics = step()
    assert metrics["tokens"] == num_tokens and metrics["grad_norm"] > 0
    assert {place: reads.found.pop(place) for place in ONCE_A_STEP} == dict.fromkeys(ONCE_A_STEP, 1)
    for place in ON_THE_HOST:
        reads.found.pop(place)
    # twice where a mask is made for each kind of layer
    assert all(count <= 2 * NUM_MICRO_BATCHES for count in reads.found.values()), reads.found
    assert reads.found.keys() <= ONCE_A_PASS


def layer_reads(dispatcher: Dispatcher, kernel: Any, *, is_recomputed: bool = False) -> Counter[str]:
    """Of one experts module, forward and backward, a third of whose selections is missing."""
    model: Any = tiny_policy("qwen3_moe").train()
    attach_dispatcher(model, dispatcher, kernel=kernel)
    if is_recomputed:
        checkpoint_activations(model)
    _, experts = next(experts_modules(model))
    generator = torch.Generator().manual_seed(dispatcher.rank)
    weight_TK, expert_TK = torch.rand(12, 8, generator=generator).topk(2, dim=1)
    expert_TK = torch.where(torch.rand(12, 2, generator=generator) < 0.33, -1, expert_TK)
    x_TD = torch.randn(12, 32, generator=generator).requires_grad_()
    experts(x_TD, expert_TK, weight_TK).sum().backward()  # the first call moves the counts of rows
    x_TD.grad = None
    with HostReads() as reads:
        experts(x_TD, expert_TK, weight_TK.requires_grad_()).sin().sum().backward()
    assert x_TD.grad is not None and weight_TK.grad is not None
    return Counter({place: n for place, n in reads.found.items() if FORMULAS not in place})


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_the_experts_of_one_rank_ask_the_device_for_nothing(kernel, is_recomputed):
    assert layer_reads(LocalDispatcher(), kernel, is_recomputed=is_recomputed) == {}


def check_exchanges(rank: int, world_size: int, folder: Path) -> None:
    route = "tolist at tasks/policy/dispatch/dispatcher.py:AllToAllDispatcher._route"
    for kernel in ("torch", "fused"):
        assert layer_reads(AllToAllDispatcher(dist.group.WORLD), kernel) == {route: 1}
    setting = {"hidden": 32, "num_experts": 8, "num_selected": 2}
    for capacity, expected in (
        (0.0, {"tolist at tasks/policy/dispatch/nvlink.py:NVLinkDispatcher.fetch": 1}),
        (9.0, {}),
    ):
        (folder / str(capacity)).mkdir(exist_ok=True)
        dist.barrier()
        dispatcher = open_nvlink(folder / str(capacity), replace(FLOAT32, **setting), capacity)
        assert isinstance(dispatcher.memory, FileMemory)
        assert layer_reads(dispatcher, "torch") == expected


def test_an_exchange_between_ranks_asks_once_for_all_counts_and_none_with_fixed_room(tmp_path):
    run_ranks(check_exchanges, 2, tmp_path)
