"""The head reads positions before trained tokens only: values and step of one that reads all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import VOCAB, tiny_policy
from ranks import run_ranks
from steps import NUM_TOKENS, micro_batch, one_step, single_process, slack
from test_packing import rows
from test_parallel import packed_batch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.parallel.context import split_context
from tasks.policy.parallel.distribute import distribute
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.step import logprobs
from tasks.policy.step.head_rows import HEAD_ROWS, head_reads, spread, with_head_rows
from tasks.policy.step.reading import read_rows
from tasks.policy.step.trainer import policy_reader
from tasks.rl.packing import collate

PLAIN: Any = logprobs._from_logits


def batch(seed: int, *, packed: bool) -> dict[str, Tensor]:
    """The first is trained nowhere, the second in places, the third at one token: the last there is."""
    found = dict(packed_batch(seed) if packed else micro_batch(seed))
    ids = found["input_ids"]
    draw = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
    mask = (draw < 0.4) & found["attention_mask"].bool()
    mask &= found.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids)) > 0
    if seed != 1:
        mask[:] = False
    mask[0, -1] |= seed == 2
    return {**found, "mask": mask}


def masked_loss(logprob_BL: Tensor, entropy_BL: Tensor, micro: Mapping[str, Tensor]) -> tuple[Tensor, dict]:
    """Only trained tokens count; NaN anywhere else must not leak."""
    kept = [torch.where(micro["mask"], part, 0.0) for part in (logprob_BL, entropy_BL)]
    loss = -(kept[0] * micro["advantage"] + 0.1 * kept[1]).sum() / NUM_TOKENS
    return loss, {"entropy": kept[1].sum(), "logprob": kept[0].sum()}


def check_step(
    rank: int, world_size: int, sizes: dict[str, int], model: PreTrainedModel, batches: list, expected: Any,
    is_fused: bool,
) -> None:  # fmt: skip
    mesh = make_mesh(world_size, **sizes)
    logprobs._from_logits = logprobs.without_logits() if is_fused else PLAIN
    attach_dispatcher(model, make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group))
    distribute(model, mesh)
    split_context(model, mesh.cp_group)
    shares = [with_head_rows(one, mesh.cp_group) for one in batches[mesh.share :: mesh.num_shares]]
    metrics, gradients = one_step(model, mesh, shares, loss_fn=masked_loss)
    (expected_metrics, expected_gradients, _), loose = expected, slack(model.device)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5 * loose), name
    for name, gradient in gradients.items():  # the bound of test_parallel
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=5e-8 * loose, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 1}, {"ep": 2}, {"ep": 2, "fsdp": 2}, {"ep": 1, "tp": 2}, {"ep": 1, "cp": 2},
        {"ep": 1, "pp": 2}, {"ep": 2, "cp": 2},
    ],
    ids=str,
)  # fmt: skip
def test_the_step_is_that_of_a_head_that_reads_everything(sizes, packed, is_fused):
    """On two ranks one has a batch of which nothing is trained, or a block of it."""
    model = tiny_policy("qwen3_moe", vocab_size=VOCAB + 1)
    batches = [batch(seed, packed=packed) for seed in range(3)]
    expected = single_process(model, batches, loss_fn=masked_loss)
    assert max(gradient.abs().max() for gradient in expected[1].values()) > 1e-3
    run_ranks(check_step, 2, sizes, model, batches, expected, is_fused)


def check_batch_without_training(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    mesh, model = make_mesh(world_size, **sizes), tiny_policy("deepseek_v3")
    attach_dispatcher(model, make_dispatcher("all_to_all" if mesh.ep > 1 else "local", mesh.ep_group))
    distribute(model, mesh)
    nothing = with_head_rows(batch(0, packed=rank == 0), None)
    assert nothing[HEAD_ROWS].tolist() == [0]
    assert not any(part.any() for part in policy_reader()(model, nothing)), "one row is read, and not given"
    metrics, gradients = one_step(model, mesh, [nothing], loss_fn=masked_loss)
    assert metrics["loss"] == metrics["entropy"] == metrics["grad_norm"] == metrics["skipped"] == 0
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 1, "fsdp": 2}], ids=str)
def test_a_rank_that_trains_nothing_takes_part_with_zeros(sizes):
    run_ranks(check_batch_without_training, 2, sizes)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_rows_are_read_where_they_are_trained_and_the_head_sees_no_more(packing):
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, LocalDispatcher())
    seen: list[int] = []
    model.lm_head.register_forward_hook(
        lambda _head, inputs, _output: seen.append(inputs[0].shape[:-1].numel())
    )
    options: Any = {"max_tokens": 30, "packing": packing}
    found = read_rows(model, rows(), make_mesh(1, 1), policy_reader(), **options)
    assert sum(seen) == sum(sum(row["loss_mask"]) for row in rows())
    for row, values in zip(rows(), found, strict=True):
        with torch.no_grad():
            logprob_BL, _ = policy_reader()(model, collate([row], packing=packing))
        whole = logprob_BL[0, len(row["prompt_ids"]) :].tolist()
        expected = [
            value if is_trained else 0.0 for value, is_trained in zip(whole, row["loss_mask"], strict=True)
        ]
        assert values == pytest.approx(expected, abs=1e-5)


def check_blocks(rank: int, world_size: int) -> None:
    mask = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 1, 0]]).bool()
    found = with_head_rows({"mask": mask}, dist.group.WORLD)[HEAD_ROWS].tolist()
    # the token before each, in rows of 6 cut in halves: columns 0 and 3 of the first, 2 of the second
    assert found == ([0, 5], [0])[rank]


def test_each_rank_of_a_row_reads_its_own_block():
    run_ranks(check_blocks, 2)
    mask = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 1, 0]]).bool()
    assert with_head_rows({"mask": mask}, None)[HEAD_ROWS].tolist() == [0, 3, 7]


def test_gradients_of_rows_land_where_they_came_from():
    head, row_N = nn.Linear(2, 3, bias=False), torch.tensor([1, 4])
    x_BLD = torch.randn(2, 3, 2, requires_grad=True)
    with head_reads(head, row_N):
        y_1NV = head(x_BLD)
    assert y_1NV.shape == (1, 2, 3) and head(x_BLD).shape == (2, 3, 3), "and all again behind it"
    y_1NV.sum().backward()
    assert x_BLD.grad is not None
    expected = torch.zeros(6, 2)
    expected[row_N] = head.weight.sum(dim=0)
    torch.testing.assert_close(x_BLD.grad.view(6, 2), expected)
    assert spread(torch.tensor([[5.0, 7.0]]), row_N, torch.zeros(2, 3)).tolist() == [[0, 5, 0], [0, 7, 0]]
