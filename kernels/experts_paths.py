"""One layer's experts as transformers and torchtitan compute them, and ours: same weights, same routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peers
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.parallel.experts import attach_dispatcher

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def experts_steps(
    num_tokens: int, hidden: int, width: int, num_experts: int, num_selected: int, rotation: int
) -> dict[str, Callable[[int], None]]:
    """Forward and backward with gradients for rows, routing weights and weights, by path."""
    shape: dict[str, Any] = {
        "hidden_size": hidden, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 128, "num_hidden_layers": 1, "num_experts": num_experts,
        "num_experts_per_tok": num_selected, "moe_intermediate_size": width,
    }  # fmt: skip
    functions: dict[str, tuple[Any, list[Tensor]]] = {}
    for path in ("fused", "transformers grouped_mm"):
        torch.manual_seed(0)
        config: Any = Qwen3MoeConfig(**shape)
        config._experts_implementation = "grouped_mm"
        with torch.device(DEVICE):
            model: Any = Qwen3MoeForCausalLM(config).bfloat16()
        if path == "fused":
            attach_dispatcher(model, LocalDispatcher(), kernel="fused")
        experts = model.model.layers[0].mlp.experts
        functions[path] = experts, list(experts.parameters())
    theirs = functions["transformers grouped_mm"][0]
    if titan := peers.torchtitan_experts(theirs.gate_up_proj, theirs.down_proj, num_selected):
        functions["torchtitan"] = titan, list(titan.module.parameters())  # type: ignore[attr-defined]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    inputs = []
    for _ in range(rotation):
        score_TK, expert_TK = torch.rand(num_tokens, num_experts, device=DEVICE).topk(num_selected, dim=1)
        weight_TK = torch.softmax(score_TK, dim=1).bfloat16().requires_grad_()
        inputs.append([random(num_tokens, hidden).requires_grad_(), expert_TK, weight_TK])
    slopes = [random(num_tokens, hidden) for _ in inputs]
    check_that_all_agree(functions, inputs[0])

    def step(function: Any, weights: list[Tensor], i: int) -> None:
        torch.autograd.grad(function(*inputs[i]), [inputs[i][0], inputs[i][2], *weights], slopes[i])

    return {path: partial(step, *parts) for path, parts in functions.items()}


def check_that_all_agree(functions: dict[str, tuple[Any, list[Tensor]]], inputs: list[Tensor]) -> None:
    outputs = {path: function(*inputs).float() for path, (function, _) in functions.items()}
    ours = outputs.pop("fused")
    for path, output in outputs.items():
        error = ((output - ours).norm() / ours.norm()).item()
        if not error < 2e-2:
            raise AssertionError(f"{path} must compute what ours does, got a relative difference of {error}")
