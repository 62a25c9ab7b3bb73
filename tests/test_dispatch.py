"""The exchange of tokens: one contract for every dispatcher, checked against a dense loop over experts.

Shape key: T tokens of this rank, K = 2 selections, D = 3 features, R rows received, W ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from tasks.policy.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher, make_dispatcher
from tasks.policy.permute import gather_rows, invert, sum_rows

NUM_EXPERTS = 6
CASES = {  # tokens on each rank, and what they select
    "random": ([5, 3, 4], "random"),
    "a rank without tokens": ([0, 7, 2], "random"),
    "no tokens anywhere": ([0, 0, 0], "random"),
    "one token": ([1, 0, 0], "random"),
    "first expert takes all": ([5, 3, 4], "first"),
    "last expert takes all": ([5, 3, 4], "last"),
    "some selections missing": ([9, 8, 7], "some missing"),
    "every selection missing": ([5, 3, 4], "none"),
    "odd counts": ([17, 31, 13], "random"),
}


def selections(kind: str, num_tokens: int, generator: torch.Generator) -> Tensor:
    if num_tokens == 0:
        return torch.empty(0, 2, dtype=torch.int64)
    chosen_TK = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(num_tokens)])
    if kind == "some missing":
        return torch.where(torch.rand(chosen_TK.shape, generator=generator) < 0.5, chosen_TK, -1)
    constant = {"first": 0, "last": NUM_EXPERTS - 1, "none": -1}
    return torch.full_like(chosen_TK, constant[kind]) if kind in constant else chosen_TK


def expert(x_TD: Tensor, number_T: Tensor) -> Tensor:
    """Not linear, so that a row summed too early shows; another function for every global number."""
    return (x_TD * (number_T + 1)[:, None]).sin()


def weighted_sum(x_TD: Tensor, number_TK: Tensor, weight_TK: Tensor) -> Tensor:
    y_TD = torch.zeros_like(x_TD)
    for number_T, weight_T in zip(number_TK.unbind(1), weight_TK.unbind(1), strict=True):
        weight_T = torch.where(number_T >= 0, weight_T, 0)
        y_TD = y_TD + expert(x_TD, number_T) * weight_T[:, None]
    return y_TD


def run_case(dispatcher: Dispatcher, case: str) -> tuple[Tensor, ...]:
    """Output and gradients through the dispatcher, checked against the dense loop."""
    tokens, kind = CASES[case]
    generator = torch.Generator().manual_seed(dispatcher.rank)
    number_TK = selections(kind, tokens[dispatcher.rank], generator)
    x_TD = torch.randn(number_TK.shape[0], 3, dtype=torch.float64, generator=generator)
    weight_TK = torch.rand(number_TK.shape, dtype=torch.float64, generator=generator)
    weight_TK[number_TK < 0] = torch.nan  # a missing selection's weight must not leak

    results = []
    for through_dispatcher in (True, False):
        x, weight = x_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
        if through_dispatcher:
            sent = dispatcher.dispatch(x, number_TK, weight, NUM_EXPERTS)
            start = dispatcher.rank * NUM_EXPERTS // dispatcher.num_ranks
            number_RK = torch.where(sent.expert_RK >= 0, sent.expert_RK + start, -1)
            y = dispatcher.combine(weighted_sum(sent.x_RD, number_RK, sent.weight_RK), sent.handle)
        else:
            y = weighted_sum(x, number_TK, weight)
        (y * torch.arange(1, 4)).square().sum().backward()
        assert x.grad is not None and weight.grad is not None
        results.append((y.detach(), x.grad, weight.grad))
    for ours, dense in zip(*results, strict=True):
        # float64, and nothing larger than 100 (gradients): 1e-12 is 45 roundings of the largest
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12, msg=lambda text: f"{case}: {text}")
    return results[0]


def check_contract(rank: int, world_size: int) -> None:
    dispatcher = AllToAllDispatcher(dist.group.WORLD)
    assert (dispatcher.rank, dispatcher.num_ranks) == (rank, world_size)
    for case in CASES:
        first = run_case(dispatcher, case)
        assert all(torch.equal(a, b) for a, b in zip(first, run_case(dispatcher, case), strict=True)), case


def check_one_copy_per_rank(rank: int, world_size: int) -> None:
    dispatcher = AllToAllDispatcher(dist.group.WORLD)
    # token 0 selects both experts 0 and 1 (rank 0 twice), token 1 experts 1 and 4, token 2 nothing
    number_TK = torch.tensor([[0, 1], [1, 4], [-1, -1]])
    weight_TK = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) + 10 * rank
    sent = dispatcher.dispatch(torch.arange(3.0)[:, None] + 10 * rank, number_TK, weight_TK, NUM_EXPERTS)
    if rank == 0:
        assert sent.x_RD.flatten().tolist() == [0, 1, 10, 11]  # by source rank, then by token
        assert sent.expert_RK.tolist() == [[0, 1], [1, -1], [0, 1], [1, -1]]
    else:
        assert sent.x_RD.flatten().tolist() == [1, 11]
        assert sent.expert_RK.tolist() == [[-1, 1], [-1, 1]]  # expert 4 is rank 1's second
        assert sent.weight_RK[:, 1].tolist() == [4, 14]
    assert dispatcher.describe() == "all_to_all over gloo, 2 ranks"


def check_refusals(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"'local' must run on 1 expert-parallel rank, got 2"):
        make_dispatcher("local", dist.group.WORLD)
    dispatcher = make_dispatcher("all_to_all", dist.group.WORLD)
    x, number, weight = torch.ones(2, 3), torch.tensor([[0, 6], [1, 2]]), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"must be below num_experts, got 1 selections"):
        dispatcher.dispatch(x, number, weight, NUM_EXPERTS)
    with pytest.raises(ValueError, match=r"num_experts \(7\) must be a multiple .* choose one of \[1, 7\]"):
        dispatcher.dispatch(x, number, weight, 7)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_to_all_equals_dense_experts_in_output_and_gradient(world_size):
    run_ranks(check_contract, world_size)


@pytest.mark.parametrize("case", CASES)
def test_local_equals_dense_experts_in_output_and_gradient(case):
    run_case(LocalDispatcher(), case)


def test_a_token_travels_once_to_each_rank_in_source_order():
    run_ranks(check_one_copy_per_rank, 2)


def test_what_cannot_run_is_refused_on_two_ranks():
    run_ranks(check_refusals, 2)


def test_what_cannot_run_is_refused_on_one_rank():
    with pytest.raises(ValueError, match=r"'all_to_all' must be given an expert-parallel group, got None"):
        make_dispatcher("all_to_all", None)
    with pytest.raises(ValueError, match=r"must be one of .* got 'deepep'"):
        make_dispatcher("deepep", None)  # type: ignore[arg-type]
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"must agree on tokens T"):
        LocalDispatcher().dispatch(torch.ones(3, 3), ones.long(), ones, NUM_EXPERTS)
    with pytest.raises(ValueError, match=r"must be int64, got torch.int32"):
        LocalDispatcher().dispatch(torch.ones(2, 3), ones.int(), ones, NUM_EXPERTS)


def test_gather_and_sum_are_transposes_of_each_other():
    # row 0 is copied to places 1, row 2 to places 0 and 1, row 1 nowhere
    placement = invert(torch.tensor([4, 1, 5]), num_rows=3, num_places=2)
    assert placement.slot_TK.tolist() == [[-1, 1], [-1, -1], [0, 2]]
    x_TD = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64, requires_grad=True)
    assert gather_rows(x_TD, placement).flatten().tolist() == [3, 1, 3]
    assert sum_rows(torch.tensor([[10.0], [20.0], [30.0]]), placement).flatten().tolist() == [20, 0, 40]
    assert torch.autograd.gradcheck(lambda x: sum_rows(gather_rows(x, placement).square(), placement), x_TD)
