"""Log-probabilities and entropies of a micro-batch's tokens, on whatever part of a model this rank has.

Shape key: B sequences of a micro-batch, L tokens of the longest, M = L - 1, l positions of this rank's block,
V vocabulary, D features, N = B M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_kernels.logprob import selective_logprob_entropy
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.collectives import join_to_equal
from tasks.policy.context import model_inputs, my_block
from tasks.policy.vocabulary import split_logprob_entropy

LogprobKernel = Literal["torch", "fused"]
"""``torch`` holds the logits of a whole micro-batch in float32; ``fused`` never does, and needs CUDA."""

ALTERED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration fields of models whose logits are not just hidden states times the head's weights."""


def token_logprobs_and_entropy(
    model: PreTrainedModel,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor,
    temperature: float,
    *,
    position_BL: Tensor | None = None,
    kernel: LogprobKernel = "torch",
    keep_gb: float = 0.0,
    hidden_BlD: Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and entropy of the distribution it came from.

    ``logprob[b, t]`` is that of ``input_ids[b, t]`` given its sequence before t. Both are 0.0 where there is
    no such prediction: at the first token of a sequence and at padding, on either side. With ``position_BL``
    a row is several sequences without padding, each beginning at position 0; they do not see each other.
    ``hidden_BlD`` is what the pipeline stage before made of the tokens. Both results are whole rows on every
    rank of ``cp_group``.
    """
    mask_BL = attention_mask_BL.bool()
    position_known_BL = _positions(attention_mask_BL, position_BL)
    # M = L - 1: position t predicts token t + 1
    is_predicted_BM = mask_BL[:, 1:] & mask_BL[:, :-1] & (position_known_BL[:, 1:] > 0)
    target_BM = torch.where(is_predicted_BM, input_ids_BL[:, 1:], -1)
    inputs = stage_inputs(model, input_ids_BL, attention_mask_BL, position_BL, hidden_BlD, cp_group)
    if kernel == "fused":
        if not input_ids_BL.is_cuda:
            raise ValueError(
                f"logprob_kernel 'fused' must run on CUDA, got {input_ids_BL.device}. Set it to 'torch'."
            )
        logprob_BM, entropy_BM = logprobs_without_logits(model, inputs, target_BM, temperature, keep_gb)
    elif cp_group is None:
        logits_BMV = model(**inputs).logits[:, :-1].float() / temperature
        logprob_BM, entropy_BM = _logprob_entropy(model, logits_BMV, target_BM)
    else:  # the last position of a block predicts the first token of the next, which every rank knows
        target_Bl = my_block(F.pad(target_BM, (0, 1), value=-1), cp_group, fill=-1)
        both_2Bl = torch.stack(
            _logprob_entropy(model, model(**inputs).logits.float() / temperature, target_Bl)
        )
        logprob_BM, entropy_BM = join_to_equal(both_2Bl, cp_group, dim=2)[:, :, : target_BM.shape[1]]
    none_B1 = logprob_BM.new_zeros(logprob_BM.shape[0], 1)
    return (
        torch.cat([none_B1, torch.where(is_predicted_BM, logprob_BM, 0.0)], dim=1),
        torch.cat([none_B1, torch.where(is_predicted_BM, entropy_BM, 0.0)], dim=1),
    )


def stage_inputs(
    model: PreTrainedModel,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor,
    position_BL: Tensor | None,
    hidden_BlD: Tensor | None,
    cp_group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Arguments of the model: this rank's block of the tokens, or of what was made of them."""
    known_BL = _positions(attention_mask_BL, position_BL)
    inputs = model_inputs(model, attention_mask_BL, known_BL, cp_group, is_packed=position_BL is not None)
    if hidden_BlD is not None:
        return {"inputs_embeds": hidden_BlD, **inputs}
    return {"input_ids": my_block(input_ids_BL, cp_group), **inputs}


def _positions(attention_mask_BL: Tensor, position_BL: Tensor | None) -> Tensor:
    """Counted over real tokens where they are not given, so that padding on the left moves none."""
    if position_BL is not None:
        return position_BL
    return (attention_mask_BL.bool().cumsum(dim=1) - 1).clamp(min=0)


def _logprob_entropy(model: PreTrainedModel, logits_BMV: Tensor, target_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Of each target (any where it is negative), and of its distribution."""
    target_BM = target_BM.clamp(min=0)
    group = getattr(model.get_output_embeddings(), "vocabulary_group", None)
    if group is not None:
        return split_logprob_entropy(logits_BMV, target_BM, group)
    logprobs_BMV = torch.log_softmax(logits_BMV, dim=-1)
    logprob_BM = logprobs_BMV.gather(-1, target_BM[..., None]).squeeze(-1)
    return logprob_BM, -(logprobs_BMV.exp() * logprobs_BMV).sum(dim=-1)


def logprobs_without_logits(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    target_BM: Tensor,
    temperature: float,
    keep_gb: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """From the last hidden states and the head's weights; 0 where the target is negative."""
    head: Any = model.get_output_embeddings()
    altered = [name for name in ALTERED_LOGITS if getattr(model.config, name, None)]
    if altered or getattr(head, "bias", None) is not None:
        raise ValueError(
            "logprob_kernel 'fused' needs logits that are hidden states times weights, got "
            f"{type(model).__name__} with {', '.join(altered) or 'a bias'}. Set it to 'torch'."
        )
    hidden_BMD = model.base_model(**inputs).last_hidden_state[:, :-1]
    logprob_N, entropy_N = selective_logprob_entropy(
        hidden_BMD.flatten(0, 1),
        head.weight,
        target_BM.flatten(),
        temperature=temperature,
        keep_bytes=int(keep_gb * 2**30),
    )
    return logprob_N.view(target_BM.shape), entropy_N.view(target_BM.shape)
