"""A training step whose gradients can be compared with those of any other layout of ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from families import token_ids
from torch import Tensor
from transformers import PreTrainedModel

from tasks.policy.checkpoint.weights import _place, _whole_stack, disk_tensors
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.parallel.names import disk_pieces
from tasks.policy.parallel.place import layout_of
from tasks.policy.parallel.shards import whole_tensor
from tasks.policy.step.trainer import Learner, LossFn, make_optimizer, train_minibatch

MicroBatch = Mapping[str, Tensor]
NUM_TOKENS = 100


def slack(device: torch.device) -> float:
    """What a bound for one device's kernels is multiplied with: on a GPU attention with a mask, products of
    other sizes and sums over other parts are other kernels, each of float32's own rounding. Not measured."""
    return 10.0 if device.type == "cuda" else 1.0


def micro_batch(seed: int) -> MicroBatch:
    """Three sequences, the last two padded by one and two tokens, with random advantages."""
    input_ids = token_ids(seed)
    mask = torch.ones_like(input_ids)
    mask[1, -1:], mask[2, -2:] = 0, 0
    advantage = torch.randn(input_ids.shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": input_ids, "attention_mask": mask, "advantage": advantage}


def weighted_loss(
    logprob_BL: Tensor, entropy_BL: Tensor, batch: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -(logprob_BL * batch["advantage"] + 0.1 * entropy_BL).sum() / NUM_TOKENS
    return loss, {"entropy": entropy_BL.sum(), "tokens": batch["attention_mask"][:, 1:].sum()}


def one_step(
    model: PreTrainedModel,
    mesh: ParallelMesh,
    batches: Sequence[MicroBatch],
    *,
    max_grad_norm: float = 0.05,
    loss_fn: LossFn = weighted_loss,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics, and the clipped gradients that the optimizer saw, by disk name."""
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    gradients: dict[str, Tensor] = {}

    def record(*_: object) -> None:
        params = dict(model.named_parameters())
        for piece in disk_pieces(model):
            if (piece.is_local or piece.shard is None) and piece.model_name in params:
                gradient = params[piece.model_name].grad
                assert gradient is not None
                if piece.shard is not None and piece.expert is None:  # a layer's experts, stored as one
                    whole = _whole_stack(piece, gradient, _place(model))
                    gradients[piece.disk_name] = whole.clone()
                elif piece.shard is None:
                    split = layout_of(model).splits.get(piece.model_name)
                    gradients[piece.disk_name] = whole_tensor(gradient, split).clone()
                else:
                    gradients[piece.disk_name] = piece.view(gradient).clone()

    optimizer.register_step_pre_hook(record)
    metrics = train_minibatch(
        Learner(model, optimizer, mesh),
        batches,
        loss_fn,
        num_global_tokens=NUM_TOKENS,
        max_grad_norm=max_grad_norm,
    )
    return metrics, gradients


def single_process(model: PreTrainedModel, batches: Sequence[MicroBatch], **options: Any):
    model = copy.deepcopy(model)
    attach_dispatcher(model, LocalDispatcher())
    metrics, gradients = one_step(model, make_mesh(1, 1), batches, **options)
    return metrics, gradients, dict(disk_tensors(model))
