"""Public kernels that ``bench.py`` sets beside ours, each as a function of the same arguments.

A package that is not installed, or does not import on this torch, is left out and its error printed. None is
a requirement of the project:

    pip install --no-deps liger-kernel==0.8.5 cut-cross-entropy==25.1.1 torchtitan==0.3.0 spmd_types==0.2.3 \
        tyro docstring-parser shtab typeguard verl==0.9.1

Shape key: T tokens, D features, V vocabulary, K experts a token, E experts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def logprob_peers() -> dict[str, Function]:
    """Functions of hidden, weight and ids: log-probabilities, with entropy where the package has it."""
    peers: dict[str, Function] = {}
    if verl := found("verl.utils.kernel.linear_cross_entropy"):

        def with_verl(hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor) -> Any:
            return verl.linear_cross_entropy(hidden_TD, weight_VD, ids_T, 1.0, "none")

        peers["verl"] = with_verl
    if liger := found("liger_kernel.ops.fused_linear_cross_entropy"):

        def with_liger(hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor) -> Any:
            function = liger.LigerFusedLinearCrossEntropyFunction
            out = function.apply(hidden_TD, weight_VD, ids_T, None, None, -100, 0.0, 0.0, "none")
            return out[0] if isinstance(out, tuple) else out

        peers["Liger, no entropy"] = with_liger
    if cce := found("cut_cross_entropy"):

        def with_cce(filter_eps: Any) -> Function:
            def run(hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor) -> Any:
                return cce.linear_cross_entropy(
                    hidden_TD, weight_VD, ids_T, reduction="none", filter_eps=filter_eps
                )

            return run

        peers["cut-cross-entropy, filtered gradients, no entropy"] = with_cce("high")
        peers["cut-cross-entropy, exact, no entropy"] = with_cce(None)
    return peers


def torchtitan_experts(gate_up_EJD: Tensor, down_EDH: Tensor, num_selected: int) -> Function | None:
    """Its experts on one rank, with our weights: a function of rows, expert numbers and routing weights."""
    moe, dispatch = found("torchtitan.models.common.moe"), found("torchtitan.models.common.token_dispatcher")
    if not moe or not dispatch:
        return None
    num_experts, width, hidden = down_EDH.shape[0], down_EDH.shape[2], down_EDH.shape[1]
    config = moe.RoutedExperts.Config(
        inner_experts=moe.GroupedExperts.Config(dim=hidden, hidden_dim=width, num_experts=num_experts),
        token_dispatcher=dispatch.LocalTokenDispatcher.Config(num_experts=num_experts, top_k=num_selected),
    )
    module = config.build().to(down_EDH.device, down_EDH.dtype)
    gate_EHD, up_EHD = gate_up_EJD.detach().chunk(2, dim=1)
    with torch.no_grad():
        module.inner_experts.w1_EFD.copy_(gate_EHD)
        module.inner_experts.w3_EFD.copy_(up_EHD)
        module.inner_experts.w2_EDF.copy_(down_EDH)

    def run(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        count_E = torch.histc(expert_TK.flatten().float(), num_experts, 0, num_experts - 1)
        return module(x_TD[None], weight_TK[None], expert_TK[None], count_E)[0]

    run.module = module  # type: ignore[attr-defined]
    return run


def found(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        print(f"  (without {name}: {type(error).__name__}: {error})", flush=True)
        return None
