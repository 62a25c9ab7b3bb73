"""Pipeline parallelism: a stage holds consecutive layers and passes hidden states on to the next.

A model is cut without touching its code: layers of other stages become modules that hand on what they get,
a stage after the first starts from ``inputs_embeds``, one before the last has no norm and no head, so that
its ``logits`` are hidden states. Names stay those of the whole model. An embedding that is the head's as well
is held by the first and the last stage, which sum its gradients.

The schedule is 1F1B: a stage runs as many forward passes ahead as there are stages after it, then one forward
and one backward in turn, so it keeps activations of that many micro-batches at most. It is ours because
micro-batches differ in shape, by the samples in them; torch.distributed.pipelining fixes one shape for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.parallel.names import disk_pieces
from tasks.policy.parallel.place import layout_of, set_layout
from tasks.policy.ranks.progress import BLOCKED


class Elsewhere(nn.Module):
    """In the place of a layer that another stage computes."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def cut_stage(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Keep the layers of this rank's stage; before anything else is split, on the meta device or off it."""
    if mesh.pp == 1:
        return
    base: Any = model.base_model
    parts = {"embed_tokens", "layers", "norm"} - {name for name, _ in base.named_children()}
    if parts or base is model:
        raise ValueError(
            f"pp must find embed_tokens, layers and norm in {type(base).__name__}, got no {sorted(parts)}. "
            "Set train.pp to 1."
        )
    num_layers = len(base.layers)
    if mesh.pp > num_layers:
        raise ValueError(
            f"train.pp must be at most the {num_layers} layers of the model, got {mesh.pp}. Lower train.pp."
        )
    whole = {piece.disk_name for piece in disk_pieces(model)}
    first, last = mesh.stage == 0, mesh.stage == mesh.pp - 1
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is getattr(head, "weight", None)
    mine = range(num_layers * mesh.stage // mesh.pp, num_layers * (mesh.stage + 1) // mesh.pp)
    for number in set(range(num_layers)) - set(mine):
        base.layers[number] = Elsewhere()
    if not last:
        base.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
    if not first and not (last and is_tied):
        model.set_input_embeddings(nn.Identity())
    names = {name for name, param in model.named_parameters() if param is embedding.weight}
    tied = frozenset(names if is_tied else ())
    elsewhere = whole - {piece.disk_name for piece in disk_pieces(model)}
    layout = replace(layout_of(model), tied=tied, copies=frozenset() if first else tied)
    set_layout(model, replace(layout, elsewhere=frozenset(elsewhere)))


def run_passes(
    mesh: ParallelMesh,
    num_passes: int,
    forward: Callable[[int, Tensor | None], Tensor],
    empty_like: Callable[[int], Tensor],
) -> None:
    """Forward and backward of every pass, on all stages; gradients add up in the parameters.

    ``forward`` takes a pass' number and the hidden states that the stage before made (None on the first), and
    returns this stage's, or the loss on the last. ``empty_like`` makes room for hidden states to receive.
    """
    pipe = _Pipe(mesh)
    inputs: dict[int, Tensor | None] = {}
    outputs: dict[int, Tensor] = {}
    for is_backward, number in schedule(mesh.stage, mesh.pp, num_passes):
        if is_backward:
            received, output = inputs.pop(number), outputs.pop(number)
            torch.autograd.backward(output, pipe.receive_backward(output))
            pipe.send_backward(received)
        else:
            inputs[number] = pipe.receive_forward(partial(empty_like, number))
            outputs[number] = forward(number, inputs[number])
            pipe.send_forward(outputs[number])
    pipe.finish()


def schedule(stage: int, num_stages: int, num_passes: int) -> Iterator[tuple[bool, int]]:
    """1F1B of one stage: (is backward, number of the pass), in order."""
    ahead = min(num_stages - 1 - stage, num_passes)
    for turn in range(num_passes + ahead):
        if turn < num_passes:
            yield False, turn
        if turn >= ahead:
            yield True, turn - ahead


class _Pipe:
    """The two neighbours of a stage; an end of the pipeline has one, and a single stage none."""

    def __init__(self, mesh: ParallelMesh):
        self.stage, self.last = mesh.stage, mesh.pp - 1
        self.groups = mesh.stage_groups
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def receive_forward(self, room: Callable[[], Tensor]) -> Tensor | None:
        if self.stage == 0:
            return None
        return self._receive(room(), self.stage - 1, 0).requires_grad_()

    def send_forward(self, output: Tensor) -> None:
        if self.stage < self.last:
            self._send(output.detach(), self.stage + 1, 0)

    def receive_backward(self, output: Tensor) -> Tensor | None:
        if self.stage == self.last:
            return None
        return self._receive(torch.empty_like(output), self.stage + 1, 1)

    def send_backward(self, received: Tensor | None) -> None:
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self.stage - 1, 1)

    def finish(self) -> None:
        with BLOCKED:
            for work, _ in self._sent:
                work.wait()

    def _group(self, direction: int) -> dist.ProcessGroup:
        assert self.groups is not None
        return self.groups[direction]

    def _receive(self, room: Tensor, stage: int, direction: int) -> Tensor:
        group = self._group(direction)
        with BLOCKED:
            dist.recv(room, dist.get_global_rank(group, stage), group)
        return room

    def _send(self, tensor: Tensor, stage: int, direction: int) -> None:
        group, tensor = self._group(direction), tensor.contiguous()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        work = dist.isend(tensor, dist.get_global_rank(group, stage), group)
        assert work is not None
        self._sent.append((work, tensor))  # the tensor must live until it has left
