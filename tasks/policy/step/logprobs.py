"""Log-probabilities and entropies of a micro-batch's tokens, on whatever part of a model this rank has.

Shape key: B sequences of a micro-batch, L tokens of the longest, M = L - 1, l positions of this rank's block,
m either of these, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_kernels.logprob import selective_logprob_entropy
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.parallel.collectives import join_to_equal
from tasks.policy.parallel.context import model_inputs, my_block
from tasks.policy.parallel.vocabulary import split_logprob_entropy, vocabulary_block
from tasks.policy.step.head_rows import head_reads, spread

LogprobKernel = Literal["torch", "chunked", "fused"]
"""``torch`` holds the logits of a whole micro-batch in float32; the others never do: ``chunked`` on CPU,
``fused`` on CUDA."""

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
    wanted_BL: Tensor | None = None,
    row_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and entropy of the distribution it came from.

    ``logprob[b, t]`` is that of ``input_ids[b, t]`` given its sequence before t. Both are 0.0 where there is
    no such prediction: at the first token of a sequence and at padding, on either side. With ``position_BL``
    a row is several sequences without padding, each beginning at position 0; they do not see each other.
    ``hidden_BlD`` is what the pipeline stage before made of the tokens. Both results are whole rows on every
    rank of ``cp_group``. With ``row_N``, which ``head_rows.py`` makes of ``wanted_BL``, the head reads no
    other positions, and both are 0.0 at tokens that are not wanted.
    """
    mask_BL = attention_mask_BL.bool()
    position_known_BL = _positions(attention_mask_BL, position_BL)
    # M = L - 1: position t predicts token t + 1
    is_predicted_BM = mask_BL[:, 1:] & mask_BL[:, :-1] & (position_known_BL[:, 1:] > 0)
    if wanted_BL is not None:
        is_predicted_BM = is_predicted_BM & wanted_BL[:, 1:]
    target_BM = torch.where(is_predicted_BM, input_ids_BL[:, 1:], -1)
    inputs = stage_inputs(model, input_ids_BL, attention_mask_BL, position_BL, hidden_BlD, cp_group)
    if kernel != "torch" and (kernel == "fused") != input_ids_BL.is_cuda:
        place, other = ("CUDA", "chunked") if kernel == "fused" else ("a CPU", "fused")
        raise ValueError(
            f"logprob_kernel {kernel!r} must run on {place}, got {input_ids_BL.device}. Set it to {other!r}."
        )
    read = _from_logits if kernel == "torch" else without_logits(keep_gb)
    target_Bm = target_BM
    if cp_group is not None or row_N is not None:
        # the last position of a block predicts the first token of the next, which every rank knows
        target_Bm = my_block(F.pad(target_BM, (0, 1), value=-1), cp_group, fill=-1)
    if row_N is None:
        both_2Bm = torch.stack(read(model, inputs, target_Bm, temperature))
    else:
        with head_reads(model.get_output_embeddings(), row_N):
            both = read(model, inputs, target_Bm.flatten()[row_N][None], temperature)
        both_2Bm = torch.stack([spread(value_1N, row_N, target_Bm) for value_1N in both])
    if cp_group is not None:
        both_2Bm = join_to_equal(both_2Bm, cp_group, dim=2)
    logprob_BM, entropy_BM = both_2Bm[:, :, : target_BM.shape[1]]
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


def _from_logits(
    model: PreTrainedModel, inputs: Mapping[str, Any], target_Bm: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Of each target (any where it is negative), and of its distribution; m positions from the first on."""
    logits_BmV = model(**inputs).logits[:, : target_Bm.shape[1]].float() / temperature
    target_Bm = target_Bm.clamp(min=0)
    group = getattr(model.get_output_embeddings(), "vocabulary_group", None)
    if group is not None:
        return split_logprob_entropy(logits_BmV, target_Bm, group)
    logprobs_BmV = torch.log_softmax(logits_BmV, dim=-1)
    logprob_Bm = logprobs_BmV.gather(-1, target_Bm[..., None]).squeeze(-1)
    return logprob_Bm, -(logprobs_BmV.exp() * logprobs_BmV).sum(dim=-1)


def without_logits(keep_gb: float = 0.0) -> Callable[..., tuple[Tensor, Tensor]]:
    """``_from_logits`` that never holds them; 0 where the target is negative.

    It runs as the head's own forward, inside the model's: only there are the weights whole and of the type
    that is computed in, where ``fully_shard`` keeps rows of float32 masters, and only there does it see to
    their gradient.
    """

    def read(
        model: PreTrainedModel, inputs: Mapping[str, Any], target_Bm: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        head: Any = model.get_output_embeddings()
        altered = [name for name in ALTERED_LOGITS if getattr(model.config, name, None)]
        if altered or getattr(head, "bias", None) is not None:
            raise ValueError(
                "a logprob_kernel other than 'torch' needs logits that are hidden states times weights, got "
                f"{type(model).__name__} with {', '.join(altered) or 'a bias'}. Set it to 'torch'."
            )

        def forward(hidden_BlD: Tensor) -> Tensor:
            hidden_BmD = hidden_BlD[:, : target_Bm.shape[1]]
            both = selective_logprob_entropy(
                hidden_BmD.flatten(0, 1),
                head.weight,
                target_Bm.flatten(),
                temperature=temperature,
                keep_bytes=int(keep_gb * 2**30),
                block=vocabulary_block(head),
            )
            return torch.stack([part.view(target_Bm.shape) for part in both], dim=-1)

        own = vars(head).get("forward")  # that of a head split by tensor parallelism
        head.forward = forward
        try:
            both_Bm2 = model(**inputs).logits
        finally:
            del head.forward
            if own is not None:
                head.forward = own
        return both_Bm2[..., 0], both_Bm2[..., 1]

    return read
