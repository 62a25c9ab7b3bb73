"""Several sequences in one row: the attention mask that keeps them apart, and the proof that a model obeys.

Shape key: B rows, L positions, D features.

Transformers finds the sequences of a row by their positions, but only in families that hand the positions on
to the mask (gpt_oss does not, and would let a sequence see all before it without a word). Hence the proof.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def packed_attention_mask(model: PreTrainedModel, position_BL: Tensor) -> dict[str, Any] | None:
    """What to pass as ``attention_mask`` with positions that begin anew at every sequence.

    Families with several kinds of layers take a mask for each; the others make theirs from the positions if
    they get none.
    """
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds & MASKS.keys():
        return None
    shape_BL1 = torch.empty(*position_BL.shape, 1, dtype=model.dtype, device=position_BL.device)
    return {
        kind: MASKS[kind](
            config=config,
            inputs_embeds=shape_BL1,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_BL,
        )
        for kind in sorted(kinds & MASKS.keys())
    }


def require_packable(model: PreTrainedModel) -> None:
    """Refuse a model in which a packed sequence reaches the next one; one small pass on every rank.

    The outputs of the second sequence must have a gradient of exactly zero to the inputs of the first.
    """
    length = 4
    position_BL = torch.arange(length, device=model.device).repeat(2)[None]
    size = model.config.get_text_config().hidden_size
    ramp = torch.linspace(-1, 1, 2 * length * size, device=model.device, dtype=model.dtype)
    x_BLD = ramp.view(1, 2 * length, size).requires_grad_()
    output = model(
        inputs_embeds=x_BLD,
        attention_mask=packed_attention_mask(model, position_BL),
        position_ids=position_BL,
        use_cache=False,
    )
    output.logits[:, -1].float().square().sum().backward()
    model.zero_grad(set_to_none=True)
    assert x_BLD.grad is not None
    first, second = x_BLD.grad[:, :length].abs().sum(), x_BLD.grad[:, length:-1].abs().sum()
    if first.item() != 0 or second.item() == 0:
        raise ValueError(
            f"train.packing must be 'padded' for {model.config.model_type}: in a packed row a sequence must "
            f"see itself and no other, got gradients of {second.item():.2g} to its own earlier tokens and of "
            f"{first.item():.2g} to the sequence before it. Set train.packing to 'padded'."
        )
