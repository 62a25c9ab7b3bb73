"""Expert parallelism for transformers' mixture-of-experts modules, without touching a model's code.

Transformers keeps a layer's experts in one module with three-dimensional parameters and looks its forward up
in ``ALL_EXPERTS_FUNCTIONS``. ``attach_dispatcher`` slices those parameters to this rank's block of experts
and selects the function registered here; the routers stay as they are and speak of global expert numbers.

Shape key: R rows received, K selections a row, D features, P (row, expert) pairs sorted by expert, e experts
of this rank, I and O the inputs and outputs of a projection, H the width inside an expert, J = 2 H.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from moe_kernels.rows import moe_permute, moe_unpermute, permute_weights
from moe_kernels.swiglu import swiglu_weighted
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tasks.policy.dispatch.dispatcher import Dispatcher, Groups, experts_per_rank
from tasks.policy.dispatch.permute import Placement, gather_rows, invert, sum_rows
from tasks.policy.parallel.collectives import give_tokens, take_tokens
from tasks.policy.parallel.shards import local_rows

IMPLEMENTATION = "expert_parallel"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """The contiguous block of global experts that this rank holds of one layer."""

    start: int
    count: int
    num_experts: int


class SortedPairs(NamedTuple):
    """(row, expert) pairs by expert, which is how grouped products take them."""

    end_e: Tensor
    """Where each expert's pairs end."""
    expert_P: Tensor
    """No local expert's number past the last pair: those rows hold anything."""
    placement: Placement | None = None
    """Which rows the pairs are of; none where the rows are the pairs."""
    cell_P: Tensor | None = None
    """Each pair's place among the flattened routing weights; with a placement only."""


def attach_dispatcher(
    model: PreTrainedModel, dispatcher: Dispatcher, *, kernel: Literal["torch", "fused"] = "torch"
) -> None:
    """Keep this rank's experts only, and let every experts module exchange tokens through ``dispatcher``.

    Call once, on a model that holds every expert (or on the meta device), before making the optimizer.
    ``kernel`` says what computes the experts; fused kernels know SwiGLU without biases and nothing else.
    """
    modules = dict(experts_modules(model))
    if not modules:
        raise ValueError(
            f"model must have experts modules that transformers can dispatch, got {type(model).__name__} "
            "without any. Use a mixture-of-experts checkpoint that transformers supports natively."
        )
    for name, module in modules.items():
        if hasattr(module, "expert_shard"):
            raise ValueError(
                f"{name} must hold every expert, got a module with a dispatcher attached already."
            )
        if kernel == "fused" and not _is_plain_swiglu(module):
            raise ValueError(
                f"expert kernel 'fused' must meet SwiGLU experts without biases, got {name} "
                f"({type(module).__name__}). Set expert_kernel to 'torch'."
            )
        num_experts = next(module.parameters(recurse=False)).shape[0]
        count = experts_per_rank(num_experts, dispatcher.num_ranks)
        shard = ExpertShard(start=dispatcher.rank * count, count=count, num_experts=num_experts)
        for leaf, param in list(module.named_parameters(recurse=False)):
            assert param.shape[0] == num_experts, f"{name}.{leaf} is not stacked by expert: {param.shape}"
            # the clone lets go of the storage of the other ranks' experts
            local = param.detach()[shard.start : shard.start + count].clone()
            setattr(module, leaf, nn.Parameter(local, requires_grad=param.requires_grad))
        module.expert_shard = shard
        module.dispatcher = dispatcher
        module.token_group = None  # or the ranks that hold the same tokens, of which each sends a part
        module.compute_rows = partial(fused_weighted_rows if kernel == "fused" else weighted_rows, module)
        module.expert_load_e = torch.zeros(count, dtype=torch.int64)
    model.set_experts_implementation(IMPLEMENTATION)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules (of any class) that transformers' ``use_experts_implementation`` has marked."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate"):
            yield name, module


def expert_shards(model: nn.Module) -> dict[str, ExpertShard]:
    """The parameters that are stacks of experts, and which experts of them this rank keeps between steps.

    That is ``module.expert_shard``, what it computes with, or a part of it where the stack is split further.
    """
    shards = {}
    for name, module in experts_modules(model):
        for leaf, param in module.named_parameters(recurse=False):
            whole = ExpertShard(start=0, count=param.shape[0], num_experts=param.shape[0])
            computed, rows = getattr(module, "expert_shard", whole), local_rows(param)
            shards[f"{name}.{leaf}"] = replace(computed, start=computed.start + rows.start, count=rows.count)
    return shards


def take_expert_load(model: nn.Module) -> dict[str, Tensor]:
    """Rows each local expert computed since the last call, by experts module; resets them."""
    loads = {}
    for name, module in experts_modules(model):
        loads[name] = module.expert_load_e
        module.expert_load_e = torch.zeros_like(loads[name])
    return loads


def expert_parallel_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Transformers' experts interface: route out, compute the local experts, bring back."""
    x_TD, expert_TK, weight_TK = take_tokens(
        self.token_group, hidden_states, top_k_index, top_k_weights, fill=(0, -1, 0)
    )
    sent = self.dispatcher.dispatch(x_TD, expert_TK, weight_TK, num_experts=self.expert_shard.num_experts)
    if sent.groups is not None:
        y_RD = grouped_experts(self, sent.x_RD, sent.expert_RK, sent.weight_RK, sent.groups)
    else:
        y_RD = local_experts(self, sent.x_RD, sent.expert_RK, sent.weight_RK, num_pairs=sent.num_pairs)
    y_TD = self.dispatcher.combine(y_RD, sent.handle)
    return give_tokens(self.token_group, y_TD, len(hidden_states))


def local_experts(
    experts: Any, x_RD: Tensor, expert_RK: Tensor, weight_RK: Tensor, *, num_pairs: int | None = None
) -> Tensor:
    """Weighted sum of each row's local experts; zero for a row without one.

    Memory is taken for ``num_pairs`` selections, at least as many as are local; without it for as many as
    the device has found, and the host waits for their number.
    """
    num_rows, num_places = expert_RK.shape
    count = experts.expert_shard.count
    # on the device: the host need not wait, and nothing after it runs
    torch.ops.aten._assert_async.msg(
        (expert_RK < count).all(),
        f"local expert numbers must be below {count}. Check that the router and the experts come from the "
        "same configuration.",
    )
    # Stable, so a pair's place among its expert's rows, and with it every sum, does not vary from run to run.
    sorted_expert, order = torch.where(expert_RK >= 0, expert_RK, count).flatten().sort(stable=True)
    end_e = torch.searchsorted(
        sorted_expert, torch.arange(count, device=x_RD.device), right=True, out_int32=True
    )
    if num_pairs is None:
        num_pairs = int(end_e[-1].item())
    # Pairs past the last are nobody's: grouped_mm leaves their rows uninitialised, so nothing may read them.
    cell_P, expert_P = order[:num_pairs], sorted_expert[:num_pairs]
    placement = invert(cell_P, num_rows, num_places, num_live=end_e[-1])
    _add_load(experts, torch.diff(end_e, prepend=end_e.new_zeros(1)))
    pairs = SortedPairs(end_e=end_e, expert_P=expert_P, placement=placement, cell_P=cell_P)
    return experts.compute_rows(x_RD, weight_RK, pairs)


def grouped_experts(
    experts: Any, x_PD: Tensor, expert_P1: Tensor, weight_P1: Tensor, groups: Groups
) -> Tensor:
    """``local_experts`` of rows that came sorted, each with one expert; the host waits for nothing.

    What comes out in rows past the last is unspecified, and so is their gradient.
    """
    _add_load(experts, groups.count_e)
    return experts.compute_rows(x_PD, weight_P1, SortedPairs(end_e=groups.end_e, expert_P=expert_P1[:, 0]))


def weighted_rows(experts: Any, x_RD: Tensor, weight_RK: Tensor, pairs: SortedPairs) -> Tensor:
    """What ``local_experts`` returns once the pairs are sorted; may run again in the backward pass."""
    placement = pairs.placement
    x_PD = x_RD if placement is None else gather_rows(x_RD, placement)
    if experts.has_gate:
        h_PH = experts._apply_gate(_grouped_linear(experts, "gate_up_proj", x_PD, pairs))
    else:
        h_PH = experts.act_fn(_grouped_linear(experts, "up_proj", x_PD, pairs))
    y_PD = _grouped_linear(experts, "down_proj", h_PH, pairs) * _pair_weights(weight_RK, pairs)[:, None]
    return (y_PD if placement is None else sum_rows(y_PD, placement)).to(x_RD.dtype)


def fused_weighted_rows(experts: Any, x_RD: Tensor, weight_RK: Tensor, pairs: SortedPairs) -> Tensor:
    """``weighted_rows`` for SwiGLU without biases, with the weight applied before the down projection."""
    x_PD, weight_P, end_e, placement = x_RD, _pair_weights(weight_RK, pairs), pairs.end_e, pairs.placement
    if placement is not None:
        x_PD = moe_permute(x_RD, placement.slot_TK, pairs.expert_P.numel())
    gate_up_PJ = _grouped_product(experts, "gate_up_proj", x_PD, end_e)
    y_PD = _grouped_product(experts, "down_proj", swiglu_weighted(gate_up_PJ, weight_P, end_e[-1]), end_e)
    return (y_PD if placement is None else moe_unpermute(y_PD, placement.slot_TK)).to(x_RD.dtype)


def _pair_weights(weight_RK: Tensor, pairs: SortedPairs) -> Tensor:
    if pairs.placement is None or pairs.cell_P is None:
        return weight_RK.flatten()
    return permute_weights(weight_RK, pairs.cell_P, pairs.placement.slot_TK)


def _is_plain_swiglu(experts: Any) -> bool:
    """Silu of the first half times the second, by the base class's own gate, which reads ``act_fn``."""
    if not experts.has_gate or experts.has_bias or not getattr(experts, "is_concatenated", True):
        return False
    has_default_gate = type(experts)._apply_gate.__name__ == "_default_apply_gate"
    return has_default_gate and isinstance(experts.act_fn, (nn.SiLU, SiLUActivation))


def _grouped_product(experts: Any, leaf: str, x_PI: Tensor, end_e: Tensor) -> Tensor:
    weight = getattr(experts, leaf)
    return F.grouped_mm(x_PI, weight if experts.is_transposed else weight.transpose(1, 2), offs=end_e)


def _grouped_linear(experts: Any, leaf: str, x_PI: Tensor, pairs: SortedPairs) -> Tensor:
    y_PO, expert_P = _grouped_product(experts, leaf, x_PI, pairs.end_e), pairs.expert_P
    if not experts.has_bias:
        return y_PO
    # a row without an expert must leave nothing in a bias's gradient
    bias_eO = getattr(experts, f"{leaf}_bias")
    number_P = expert_P.clamp(0, len(bias_eO) - 1)
    return y_PO + torch.where((number_P == expert_P)[:, None], bias_eO[number_P], 0)


def _add_load(experts: Any, load_e: Tensor) -> None:
    experts.expert_load_e = experts.expert_load_e.to(load_e.device) + load_e


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_parallel_forward)
