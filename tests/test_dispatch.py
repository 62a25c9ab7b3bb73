"""The exchange of tokens: one contract for every dispatcher, checked against a dense loop over experts.

Shape key: T tokens of this rank, K = 2 selections, D = 3 features, R rows received, W ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exchange import CASES, Setting, run_case
from ranks import run_ranks

from tasks.policy.dispatch.dispatcher import AllToAllDispatcher, LocalDispatcher, make_dispatcher
from tasks.policy.dispatch.permute import gather_rows, invert, sum_rows

NUM_EXPERTS = Setting().num_experts


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
    with pytest.raises(ValueError, match=r"'deepep' must be given an expert-parallel group, got None"):
        make_dispatcher("deepep", None)
    with pytest.raises(ValueError, match=r"must be one of .* got 'nccl'"):
        make_dispatcher("nccl", None)  # type: ignore[arg-type]
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
