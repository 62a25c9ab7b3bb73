"""The losses and advantages of verl, TRL and AReaL, from their installed code; for the parity tests.

Nothing is copied: functions are imported, and where they are part of a method that needs a cluster, or of a
module that imports one, their source is read from the installed file and executed by itself.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

HOW = "pip install --no-deps what the extra 'parity' lists, as .ci/run does"


def peer(module: str) -> Any:
    """A peer's module. Who asks for parity is told if it cannot be had: a skipped comparison looks equal."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"needs {module.partition('.')[0]} ({error}): {HOW}")


def verl() -> Any:
    return peer("verl.trainer.ppo.core_algos")


def verl_corrections() -> Any:
    return peer("verl.trainer.ppo.rollout_corr_helper")


def verl_config(**changes: Any) -> Any:
    from verl.workers.config import ActorConfig

    no_dual_clip = {"clip_ratio_c": 1e9}
    return ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, **{**no_dual_clip, **changes})


def trl() -> Any:
    return peer("trl.trainer.grpo_trainer")


def trl_loss(batch: Any, logprob_BL: Tensor, **changes: Any) -> Tensor:
    """``GRPOTrainer._compute_loss`` on a batch whose log-probabilities are given instead of computed."""
    settings: dict[str, Any] = {
        "loss_type": "dapo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28,
        "beta": 0.0, "delta": None, "bias_correction": False, "threshold": None, "weight": None,
        "entropy_coef": 0.0, "length": 16,
    }  # fmt: skip
    settings |= changes
    trainer = trl().GRPOTrainer
    one = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, sync_gradients=True,
        device="cpu", reduce=lambda x, reduction: x,
    )  # fmt: skip
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob_BL, batch.entropy_BL, None),
        args=SimpleNamespace(
            use_bias_correction_kl=settings["bias_correction"], delta=settings["delta"],
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1,
        ),
        accelerator=one, model=SimpleNamespace(training=True), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=settings["threshold"],
        get_off_policy_mask=trainer.get_off_policy_mask, current_gradient_accumulation_steps=1,
        use_vllm=settings["weight"] is not None, vllm_importance_sampling_correction=True,
        max_completion_length=settings["length"], use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{k: settings[k] for k in ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high")},
        beta=settings["beta"], entropy_coef=settings["entropy_coef"],
    )  # fmt: skip
    mask_BL = batch.mask_BL.double()
    none_B0 = torch.zeros(len(mask_BL), 0)
    inputs = {
        "prompt_ids": none_B0, "prompt_mask": none_B0, "completion_ids": mask_BL, "completion_mask": mask_BL,
        "advantages": batch.advantage_B, "old_per_token_logps": batch.proximal_BL,
        "sampling_per_token_logps": batch.behavior_BL, "ref_per_token_logps": batch.reference_BL,
        "num_items_in_batch": mask_BL.sum(), "importance_sampling_ratio": settings["weight"],
    }  # fmt: skip
    return trainer._compute_loss(stub, None, inputs)


def trl_advantages(reward_MK: Tensor, *, group: int, how: str, scale: str, weight_K: Tensor) -> Tensor:
    """The statements of ``GRPOTrainer._generate_and_score_completions`` that turn rewards into advantages."""
    names = {
        "torch": torch,
        "nanstd": trl().nanstd,
        "self": SimpleNamespace(
            multi_objective_aggregation=how, scale_rewards=scale, reward_weights=weight_K,
            reward_funcs=[None] * len(weight_K),
        ),
        "num_generations": group,
        "rewards_per_func": reward_MK,
        "unscorable_mask": reward_MK.isnan().all(dim=1),
        "device": "cpu",
    }  # fmt: skip
    tree = _tree(trl().__file__)
    (choice,) = [
        node
        for node in ast.walk(_function(tree, "_generate_and_score_completions"))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("== 'sum_then_normalize'")
    ]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # its nanstd divides two counts, which gives the default type
    try:
        _execute([choice], names)
    finally:
        torch.set_default_dtype(default)
    return torch.nan_to_num(names["advantages"], nan=0.0)


def trl_leave_one_out(reward_M: Tensor, *, group: int) -> Tensor:
    """The statements of ``RLOOTrainer`` from the number of scorable rewards to the advantages."""
    module = peer("trl.trainer.rloo_trainer")
    body = _function(_tree(module.__file__), "_generate_and_score_completions").body
    first = next(i for i, node in enumerate(body) if ast.unparse(node).startswith("scorable_counts ="))
    names = {
        "torch": torch, "rewards": reward_M, "grouped_rewards": reward_M.view(-1, group),
        "num_generations": group,
    }  # fmt: skip
    _execute(body[first : first + 3], names)
    return names["advantages"]


def areal(*names: str) -> dict[str, Any]:
    """Functions of AReaL's ``functional.py``, whose imports need its whole cluster stack."""
    spec = importlib.util.find_spec("areal")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"needs areal: {HOW}")
    path = Path(spec.submodule_search_locations[0]) / "utils/functional/functional.py"
    wanted = {*names, "RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling"}
    body = [node for node in _tree(path).body if getattr(node, "name", "") in wanted]
    found: dict[str, Any] = {
        "torch": torch, "dataclass": dataclass, "math": math, "RejectionSamplingConfig": Any, "Any": Any,
    }  # fmt: skip
    _execute(body, found)
    return found


def _tree(path: Any) -> ast.Module:
    return ast.parse(Path(path).read_text())


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def _execute(statements: list[Any], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(body=statements, type_ignores=[]), "<installed reference>", "exec"), names)
