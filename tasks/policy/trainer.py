"""One optimizer step over a mini-batch, on any number of ranks, with the gradient of a single process.

Shape key: B sequences of a micro-batch, L tokens of the longest, M = L - 1, V vocabulary, D features,
N = B M.

Expert parallelism makes every forward and backward pass a collective call: ranks must make equally many. A
rank with fewer micro-batches than another runs empty ones, which exchange tokens and contribute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from moe_kernels.logprob import selective_logprob_entropy
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from tasks.policy.mesh import ParallelMesh, clip_gradients, reduce_gradients
from tasks.policy.packed import packed_attention_mask
from tasks.policy.progress import BLOCKED, Progress
from tasks.policy.router import RouterBalance

LogprobKernel = Literal["torch", "fused"]
"""``torch`` holds the logits of a whole micro-batch in float32; ``fused`` never does, and needs CUDA."""

ALTERED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration fields of models whose logits are not just hidden states times the head's weights."""

MicroBatch = Mapping[str, Tensor]
"""[B, L]: ``input_ids``, ``attention_mask``, ``position_ids`` if packed, and what the loss function reads."""


class LossFn(Protocol):
    """A loss already divided by the global token count, and metrics that are sums over tokens."""

    def __call__(
        self, logprob_BL: Tensor, entropy_BL: Tensor, micro_batch: MicroBatch, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]: ...


def make_optimizer(
    model: PreTrainedModel,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool | None = None,
) -> AdamW:
    """AdamW over the trained parameters; decay applies to all of them, so leave it 0 or keep it small."""
    params = [param for param in model.parameters() if param.requires_grad]
    return AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


def token_logprobs_and_entropy(
    model: PreTrainedModel,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor,
    temperature: float,
    *,
    position_BL: Tensor | None = None,
    kernel: LogprobKernel = "torch",
    keep_gb: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and entropy of the distribution it came from.

    ``logprob[b, t]`` is that of ``input_ids[b, t]`` given its sequence before t. Both are 0.0 where there is
    no such prediction: at the first token of a sequence and at padding, on either side. With ``position_BL``
    a row is several sequences without padding, each beginning at position 0; they do not see each other.
    """
    mask_BL = attention_mask_BL.bool()
    if position_BL is not None:
        model_mask: Any = packed_attention_mask(model, position_BL)
    else:  # counted over real tokens, so that padding on the left moves no position
        model_mask, position_BL = attention_mask_BL, (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {
        "input_ids": input_ids_BL,
        "attention_mask": model_mask,
        "position_ids": position_BL,
        "use_cache": False,
    }
    # M = L - 1: position t predicts token t + 1
    is_predicted_BM = mask_BL[:, 1:] & mask_BL[:, :-1] & (position_BL[:, 1:] > 0)
    if kernel == "fused":
        if not input_ids_BL.is_cuda:
            raise ValueError(
                f"logprob_kernel 'fused' must run on CUDA, got {input_ids_BL.device}. Set it to 'torch'."
            )
        target_BM = torch.where(is_predicted_BM, input_ids_BL[:, 1:], -1)
        logprob_BM, entropy_BM = logprobs_without_logits(model, inputs, target_BM, temperature, keep_gb)
    else:
        logits_BMV = model(**inputs).logits[:, :-1].float() / temperature
        logprobs_BMV = torch.log_softmax(logits_BMV, dim=-1)
        logprob_BM = logprobs_BMV.gather(-1, input_ids_BL[:, 1:, None]).squeeze(-1)
        entropy_BM = -(logprobs_BMV.exp() * logprobs_BMV).sum(dim=-1)
    none_B1 = logprob_BM.new_zeros(logprob_BM.shape[0], 1)
    return (
        torch.cat([none_B1, torch.where(is_predicted_BM, logprob_BM, 0.0)], dim=1),
        torch.cat([none_B1, torch.where(is_predicted_BM, entropy_BM, 0.0)], dim=1),
    )


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


def train_minibatch(
    model: PreTrainedModel,
    optimizer: Optimizer,
    mesh: ParallelMesh,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    num_global_tokens: int,
    max_grad_norm: float,
    temperature: float = 1.0,
    min_micro_batches: int = 1,
    logprob_kernel: LogprobKernel = "torch",
    logprob_keep_gb: float = 0.0,
    balance: RouterBalance | None = None,
    progress: Progress | None = None,
    on_nonfinite: Callable[[list[int]], None] | None = None,
) -> dict[str, float]:
    """Accumulate over this rank's micro-batches, reduce, clip, step; returns metrics summed over all ranks.

    ``num_global_tokens`` is what ``loss_fn`` divided by; ranks that disagree on it are refused. Beside the
    loss function's sums the metrics hold ``loss``, ``grad_norm``, ``micro_batches`` and ``skipped``: 1 when
    loss or gradient was not finite on any rank, in which case no rank stepped and ``on_nonfinite`` got the
    numbers of this rank's micro-batches at fault: those without a finite loss, or all if every loss was.
    """
    progress = progress or Progress()
    num_passes = _agree_on_passes(model, mesh, len(micro_batches), num_global_tokens, min_micro_batches)
    options = {"temperature": temperature, "kernel": logprob_kernel, "keep_gb": logprob_keep_gb}
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    losses: list[Tensor] = []
    with progress.working():
        for index in range(num_passes):
            progress.at("forward and backward", index)
            if index < len(micro_batches):
                loss, metrics = _loss(model, micro_batches[index], loss_fn, options)
                if balance is not None:
                    extra, seen = balance.loss(micro_batches[index], num_global_tokens=num_global_tokens)
                    loss, metrics = loss + extra, {**metrics, **seen}
                losses.append(loss.detach())
                _add(sums, {"loss": loss, **metrics})
            else:
                loss = _empty_loss(model, options)
                if balance is not None:
                    balance.clear()
            loss.backward()
    progress.at("reduce gradients")
    reduce_gradients(model, mesh)
    grad_norm = clip_gradients(model, mesh, max_grad_norm)
    # read once, after all passes: every read stops the device
    mine = {"loss": 0.0, "micro_batches": float(len(micro_batches))}
    totals = _sum_over_ranks({**mine, **{name: value.item() for name, value in sums.items()}}, mesh)
    is_finite = math.isfinite(totals["loss"]) and math.isfinite(grad_norm)  # the same answer on every rank
    if is_finite:
        optimizer.step()
    elif on_nonfinite is not None:
        is_every_loss_finite = math.isfinite(totals["loss"])
        on_nonfinite([i for i, loss in enumerate(losses) if is_every_loss_finite or not loss.isfinite()])
    optimizer.zero_grad(set_to_none=True)
    return {**totals, "grad_norm": grad_norm, "skipped": float(not is_finite)}


def _loss(
    model: PreTrainedModel, micro_batch: MicroBatch, loss_fn: LossFn, options: dict[str, Any]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    logprob_BL, entropy_BL = token_logprobs_and_entropy(
        model,
        micro_batch["input_ids"],
        micro_batch["attention_mask"],
        position_BL=micro_batch.get("position_ids"),
        **options,
    )
    return loss_fn(logprob_BL, entropy_BL, micro_batch)


def _empty_loss(model: PreTrainedModel, options: dict[str, Any]) -> Tensor:
    """A pass through every layer with weight zero, in step with the other ranks' real ones."""
    input_ids_BL = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    logprob_BL, _ = token_logprobs_and_entropy(model, input_ids_BL, torch.ones_like(input_ids_BL), **options)
    return logprob_BL.sum() * 0.0


def _agree_on_passes(
    model: PreTrainedModel, mesh: ParallelMesh, num_micro_batches: int, num_global_tokens: int, minimum: int
) -> int:
    if num_global_tokens < 1:
        raise ValueError(
            f"num_global_tokens must be positive, got {num_global_tokens}. "
            "Skip a batch in which no token is trained."
        )
    wanted = max(num_micro_batches, minimum)
    if mesh.world is None:
        return wanted
    largest = torch.tensor([wanted, num_global_tokens, -num_global_tokens], device=model.device)
    with BLOCKED:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.world)
    num_passes, most_tokens, least_tokens = largest.tolist()
    if most_tokens != -least_tokens:
        raise ValueError(
            f"num_global_tokens must be equal on all ranks, got {-least_tokens} to {most_tokens} "
            f"({num_global_tokens} on rank {mesh.rank}). Count those of the whole mini-batch."
        )
    return num_passes


def _add(sums: dict[str, Tensor], metrics: Mapping[str, Tensor]) -> None:
    for name, value in metrics.items():
        value = value.detach().to(torch.float64)
        sums[name] = sums[name] + value if name in sums else value


def _sum_over_ranks(sums: dict[str, float], mesh: ParallelMesh) -> dict[str, float]:
    """By name, because a rank that ran only empty passes does not know the loss function's metrics."""
    if mesh.world is None:
        return sums
    by_rank: list[dict[str, float] | None] = [None] * mesh.world_size
    with BLOCKED:
        dist.all_gather_object(by_rank, sums, group=mesh.world)
    totals: dict[str, float] = {}
    for theirs in by_rank:
        for name, value in (theirs or {}).items():
            totals[name] = totals.get(name, 0.0) + value
    return totals
