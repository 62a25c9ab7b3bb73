"""One optimizer step over a mini-batch, on any number of ranks, with the gradient of a single process.

Shape key: B sequences of a micro-batch, L tokens of the longest, l of this rank's block, D features.

Expert parallelism makes every forward and backward pass a collective call: ranks must make equally many. A
rank with fewer micro-batches than another runs empty ones, which exchange tokens and contribute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from tasks.policy.models.routers import Routers
from tasks.policy.parallel.context import my_block
from tasks.policy.parallel.mesh import ParallelMesh, clip_gradients, reduce_gradients
from tasks.policy.parallel.pipeline import run_passes
from tasks.policy.parallel.place import layout_of
from tasks.policy.ranks.progress import BLOCKED, Progress
from tasks.policy.ranks.stopping import StopAgreed, StopRequest
from tasks.policy.step.adamw import OnePassAdamW
from tasks.policy.step.head_rows import HEAD_ROWS
from tasks.policy.step.logprobs import LogprobKernel, stage_inputs, token_logprobs_and_entropy
from tasks.rl.packing import MicroBatch

LossFn = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""From what ``Read`` gave (of a policy: log-probabilities and entropies) and the micro-batch to a loss that
is already divided by the global token count, and metrics that are sums over tokens."""


class Read(Protocol):
    """The last part of a forward pass over a micro-batch: what the loss needs of it, [B, L] each."""

    def __call__(
        self,
        model: PreTrainedModel,
        micro_batch: MicroBatch,
        *,
        hidden_BlD: Tensor | None = None,
        cp_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Learner:
    """What one pass over a batch changes, and who watches: PPO's critic, or the policy (``Trainee``)."""

    model: PreTrainedModel
    optimizer: AdamW
    mesh: ParallelMesh
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest | None = None
    reseed: Callable[[int], None] = lambda _number: None
    """Called before each mini-batch with its place in the pass: what is drawn there depends on that alone."""


def make_optimizer(
    model: PreTrainedModel,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool | None = None,
    is_one_pass: bool = False,
) -> AdamW:
    """AdamW over the trained parameters; decay applies to all of them, so leave it 0 or keep it small."""
    params = [param for param in model.parameters() if param.requires_grad]
    if is_one_pass:
        return OnePassAdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


def policy_reader(*, temperature: float = 1.0, kernel: LogprobKernel = "torch", keep_gb: float = 0.0) -> Read:
    """Reads log-probabilities and entropies, of trained tokens where a micro-batch says which."""

    def read(model: PreTrainedModel, micro_batch: MicroBatch, **split: Any) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropy(
            model,
            micro_batch["input_ids"],
            micro_batch["attention_mask"],
            temperature,
            position_BL=micro_batch.get("position_ids"),
            kernel=kernel,
            keep_gb=keep_gb,
            wanted_BL=micro_batch["mask"] if HEAD_ROWS in micro_batch else None,
            row_N=micro_batch.get(HEAD_ROWS),
            **split,
        )

    return read


def train_minibatch(
    learner: Learner,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    num_global_tokens: int,
    max_grad_norm: float,
    read: Read | None = None,
    min_micro_batches: int = 1,
    routers: Routers | None = None,
    on_nonfinite: Callable[[list[int]], None] | None = None,
) -> dict[str, float]:
    """Accumulate over this rank's micro-batches, reduce, clip, step; returns metrics summed over all ranks.

    Without ``read`` the model is a policy at temperature 1.
    ``num_global_tokens`` is what ``loss_fn`` divided by; ranks that disagree on it are refused. Beside the
    loss function's sums the metrics hold ``loss``, ``grad_norm``, ``micro_batches`` and ``skipped``: 1 when
    loss or gradient was not finite on any rank, in which case no rank stepped and ``on_nonfinite`` got the
    numbers of this rank's micro-batches at fault: those without a finite loss, or all if every loss was.
    Nothing has changed when it raises ``StopAgreed``, because some rank was told to stop.
    """
    model, optimizer, mesh, routers = learner.model, learner.optimizer, learner.mesh, routers or Routers()
    num_passes = agree_on_passes(
        model, mesh, len(micro_batches), num_global_tokens, min_micro_batches, stop=learner.stop
    )
    optimizer.zero_grad(set_to_none=True)
    passes = _Passes(learner, micro_batches, loss_fn, num_global_tokens, read or policy_reader(), routers)
    with learner.progress.working():
        run_passes(mesh, num_passes, passes.forward, passes.room)
    learner.progress.at("reduce gradients")
    reduce_gradients(model, mesh)
    grad_norm, sums = clip_gradients(model, mesh, max_grad_norm, passes.sums)
    mine = {"loss": 0.0, "micro_batches": float(len(micro_batches)), **sums}
    totals = _sum_over_ranks(mine if mesh.is_reporter else {}, mesh)
    is_finite = math.isfinite(totals["loss"]) and math.isfinite(grad_norm)  # the same answer on every rank
    routers.step(mesh, is_finite=is_finite)
    if is_finite:
        optimizer.step()
    elif on_nonfinite is not None and mesh.is_reporter:
        is_every_loss_finite = math.isfinite(totals["loss"])
        losses = enumerate(passes.losses)
        on_nonfinite([i for i, loss in losses if is_every_loss_finite or not loss.isfinite()])
    optimizer.zero_grad(set_to_none=True)
    return {**totals, "grad_norm": grad_norm, "skipped": float(not is_finite)}


@dataclass(frozen=True, slots=True)
class _Passes:
    """This rank's part of the forward passes of a mini-batch, and what they add up to."""

    learner: Learner
    micro_batches: Sequence[MicroBatch]
    loss_fn: LossFn
    num_global_tokens: int
    read: Read
    routers: Routers
    sums: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def forward(self, index: int, hidden_BlD: Tensor | None) -> Tensor:
        """The hidden states that this pipeline stage makes of those before it, or the loss on the last."""
        self.learner.progress.at("forward and backward", index)
        output = self._run(index, hidden_BlD)
        is_real = index < len(self.micro_batches)
        self.routers.count(self.micro_batches[index] if is_real else None, self.learner.mesh.cp_group)
        return output

    def _run(self, index: int, hidden_BlD: Tensor | None) -> Tensor:
        micro, model, mesh = self._micro_batch(index), self.learner.model, self.learner.mesh
        self.routers.use(micro)
        if mesh.stage < mesh.pp - 1:
            tokens = micro["input_ids"], micro["attention_mask"], micro.get("position_ids")
            return model(**stage_inputs(model, *tokens, hidden_BlD, mesh.cp_group)).logits
        outputs = self.read(model, micro, hidden_BlD=hidden_BlD, cp_group=mesh.cp_group)
        if index >= len(self.micro_batches):  # weight zero, in step with the other ranks' real ones
            self.routers.clear()
            return outputs[0].sum() * 0.0
        loss, metrics = self.loss_fn(*outputs, micro)
        if (auxiliary := self.routers.loss(micro, num_global_tokens=self.num_global_tokens)) is not None:
            loss, metrics = loss + auxiliary[0], {**metrics, **auxiliary[1]}
        self.losses.append(loss.detach())
        _add(self.sums, {"loss": loss, **metrics})
        return loss

    def room(self, index: int) -> Tensor:
        """Empty, for this rank's block of the hidden states of a pass."""
        model, mesh = self.learner.model, self.learner.mesh
        rows, length = my_block(self._micro_batch(index)["input_ids"], mesh.cp_group).shape
        width = model.config.get_text_config().hidden_size
        dtype = layout_of(model).compute_dtype or model.dtype
        return torch.empty(rows, length, width, dtype=dtype, device=model.device)

    def _micro_batch(self, index: int) -> MicroBatch:
        """Of a pass, or two tokens that keep this rank in step with those that have more."""
        if index < len(self.micro_batches):
            return self.micro_batches[index]
        return empty_micro_batch(self.learner.model)


def empty_micro_batch(model: PreTrainedModel) -> MicroBatch:
    """For a pass through every layer with weight zero, in step with the other ranks' real ones."""
    input_ids_BL = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    return {"input_ids": input_ids_BL, "attention_mask": torch.ones_like(input_ids_BL)}


def agree_on_passes(
    model: PreTrainedModel,
    mesh: ParallelMesh,
    num_micro_batches: int,
    num_global_tokens: int,
    minimum: int,
    *,
    stop: StopRequest | None = None,
) -> int:
    """Passes that every rank makes: as many as the rank with the most micro-batches. None at all, by
    ``StopAgreed`` on every rank, if some rank was told to stop."""
    if num_global_tokens < 1:
        raise ValueError(
            f"num_global_tokens must be positive, got {num_global_tokens}. "
            "Skip a batch in which no token is trained."
        )
    wanted, is_asked = max(num_micro_batches, minimum), int(stop is not None and stop.is_asked)
    mine = [wanted, num_global_tokens, -num_global_tokens, is_asked]
    num_passes, most_tokens, least_tokens, is_stopped = _largest(mine, mesh, model.device)
    if stop is not None and is_stopped:
        stop.join()
        raise StopAgreed()
    if most_tokens != -least_tokens:
        raise ValueError(
            f"num_global_tokens must be equal on all ranks, got {-least_tokens} to {most_tokens} "
            f"({num_global_tokens} on rank {mesh.rank}). Count those of the whole mini-batch."
        )
    return num_passes


def agree_to_stop(stop: StopRequest, mesh: ParallelMesh, device: torch.device) -> bool:
    """Whether any rank was told to stop, where no mini-batch follows that would ask. Collective."""
    (is_stopped,) = _largest([int(stop.is_asked)], mesh, device)
    if is_stopped:
        stop.join()
    return bool(is_stopped)


def _largest(numbers: list[int], mesh: ParallelMesh, device: torch.device) -> list[int]:
    """Of each number, over all ranks."""
    if mesh.world is None:
        return numbers
    largest = torch.tensor(numbers, device=device)
    with BLOCKED:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.world)
    return largest.tolist()


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
