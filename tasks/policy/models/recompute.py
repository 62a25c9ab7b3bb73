"""Activation checkpointing: keep the inputs of a layer's parts and compute these again in the backward pass.

Parts are what lies between two exchanges of tokens: norms, attention, router, shared experts, and the rows of
this rank's experts. The exchanges themselves stay outside, so that no collective is ever repeated: it would
cost the exchange twice, and all ranks would have to repeat it in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.policy.parallel.collectives import KEPT_WHEN_RECOMPUTING
from tasks.policy.parallel.experts import experts_modules


def checkpoint_activations(model: PreTrainedModel, *, is_context_split: bool = False) -> None:
    """Recompute every part of every layer from now on, where gradients are asked for.

    With context parallelism attention joins keys and values inside: they are kept, not joined again.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # transformers' base class of repeated layers
            _recompute_parts(layer, partial(recomputed, is_context_split=is_context_split))


def recomputed(function: Callable[..., Any], *, is_context_split: bool = False) -> Callable[..., Any]:
    """The function, keeping nothing for the backward pass but its arguments and joined keys and values."""
    keep: dict[str, Any] = {}
    if is_context_split:
        keep["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_WHEN_RECOMPUTING)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, **keep, **kwargs)

    return forward


def _recompute_parts(module: nn.Module, wrap: Callable[..., Any]) -> None:
    experts = {id(inner) for _, inner in experts_modules(module)}
    for child in module.children():
        if id(child) in experts:
            child.compute_rows = wrap(child.compute_rows)  # type: ignore[assignment]
        elif any(True for _ in experts_modules(child)):
            _recompute_parts(child, wrap)
        elif any(True for _ in child.parameters()):
            child.forward = wrap(child.forward)  # on the instance: hooks of the module stay outside
