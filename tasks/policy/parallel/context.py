"""Context parallelism: the ranks of a cp group have the same samples and other positions of each.

Shape key: B rows, L positions of a row, l = L / cp of this rank, H heads, D features of a head.

A row is padded to a multiple of cp and cut into consecutive blocks. All that a layer does to one position at
a time needs nothing else. Attention joins keys and values of all ranks and masks them for its own queries, so
it is exact for any mask; the gradients of keys and values are summed back to where they came from. Every rank
knows the whole row, so each finds the token after its last one itself, and log-probabilities are joined
before the loss, which may therefore look at whole samples.

Joining keys and values instead of passing them round a ring keeps all of a layer's on every rank for its
attention: with grouped or latent attention they are the smaller part of a layer's activations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tasks.policy.parallel.collectives import join_for_own
from tasks.policy.parallel.packed import MASKS, packed_attention_mask

PREFIX = "context_parallel_"
"""Before the name of the attention that runs on joined keys and values."""
INNER = ("sdpa", "eager")


def split_context(model: PreTrainedModel, group: dist.ProcessGroup | None) -> None:
    """From now on the model takes this rank's block of every row, as ``model_inputs`` makes it."""
    if group is None:
        return
    inner = model.config._attn_implementation
    if inner not in INNER:
        raise ValueError(
            f"cp must run on attention {' or '.join(INNER)}, which take any mask, got {inner!r} for "
            f"{type(model).__name__}. Set train.cp to 1."
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - MASKS.keys()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    attentions = [[m for m in layer.modules() if type(m).__name__.endswith("Attention")] for layer in layers]
    if kinds or not all(attentions):
        raise ValueError(
            f"cp must find attention in every layer, got layers of {type(model).__name__} "
            f"{f'of the kinds {sorted(kinds)}' if kinds else 'without'}. Set train.cp to 1."
        )
    for module in (module for some in attentions for module in some):
        module.context_group = group  # type: ignore[assignment]
        setattr(module, "inner_attention", _inner_attention(module, inner))  # noqa: B010
    model.config._attn_implementation = PREFIX + inner


def model_inputs(
    model: PreTrainedModel,
    attention_mask_BL: Tensor,
    position_BL: Tensor,
    group: dist.ProcessGroup | None,
    *,
    is_packed: bool,
) -> dict[str, Any]:
    """What the model takes beside tokens or hidden states: mask and positions of this rank's block."""
    if group is None:
        mask: Any = packed_attention_mask(model, position_BL) if is_packed else attention_mask_BL
        return {"attention_mask": mask, "position_ids": position_BL, "use_cache": False}
    is_token_BL = my_block(attention_mask_BL.bool(), group, is_whole=True)
    sequence_BL = (position_BL == 0).cumsum(dim=1) if is_packed else torch.zeros_like(position_BL)
    sequence_BL = my_block(sequence_BL, group, is_whole=True)
    count = is_token_BL.shape[1] // group.size()
    return {
        "attention_mask": _masks(model, is_token_BL, sequence_BL, group.rank() * count, count),
        "position_ids": my_block(position_BL, group),
        "use_cache": False,
    }


def my_block(
    x_BL: Tensor, group: dist.ProcessGroup | None, *, fill: int = 0, is_whole: bool = False
) -> Tensor:
    """This rank's positions of rows padded to a multiple of cp; all of them with ``is_whole``."""
    if group is None:
        return x_BL
    padded_BL = F.pad(x_BL, (0, -x_BL.shape[1] % group.size()), value=fill)
    return padded_BL if is_whole else padded_BL.chunk(group.size(), dim=1)[group.rank()]


def allowed_keys(
    is_token_BL: Tensor, sequence_BL: Tensor, start: int, count: int, window: int | None
) -> Tensor:
    """[B, 1, l, L]: which keys each of ``count`` queries from ``start`` on may see.

    Those of its own sequence up to itself, no more than ``window``; itself always, so that no row is empty.
    """
    key_L = torch.arange(is_token_BL.shape[1], device=is_token_BL.device)
    query_l = key_L[start : start + count]
    distance_lL = query_l[:, None] - key_L
    is_near_lL = distance_lL >= 0
    if window is not None:
        is_near_lL &= distance_lL < window
    is_same_BlL = sequence_BL[:, start : start + count, None] == sequence_BL[:, None, :]
    allowed_BlL = is_near_lL & is_same_BlL & is_token_BL[:, None, :]
    return (allowed_BlL | (distance_lL == 0))[:, None]


def _masks(model: PreTrainedModel, is_token_BL: Tensor, sequence_BL: Tensor, start: int, count: int) -> Any:
    """One mask, or one for each kind of layer where the family has several; the same rules as its own."""
    config: Any = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)

    def mask(window: int | None) -> Tensor:
        allowed = allowed_keys(is_token_BL, sequence_BL, start, count, window)
        if config._attn_implementation == PREFIX + "sdpa":
            return allowed
        return torch.zeros((), dtype=model.dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(model.dtype).min
        )

    kinds = sorted(set(getattr(config, "layer_types", None) or ()) & MASKS.keys())
    if not kinds:
        return mask(window)
    return {kind: mask(window if kind == "sliding_attention" else None) for kind in kinds}


def _inner_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    if name == "eager":  # every modeling file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """Transformers' attention interface, with heads [B, H, l, D] of all ranks' positions joined."""
    key, value = join_for_own(module.context_group, 2, key, value)
    return module.inner_attention(module, query, key, value, attention_mask, **kwargs)


for _name in INNER:
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + _name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])
