"""Every choice of the configuration reaches the policy that is trained: what each does is tested elsewhere.

An update trains what ``make_trainee`` makes, and only there are the choices read. What these tests cannot
see: two ranks, a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from families import saved, tiny_policy
from publishing import manifest
from test_faults import train_rows

from tasks.artifacts.owned import Checkpoint
from tasks.config import CampaignConfig
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models import norms, recompute, rotary
from tasks.policy.models.router import router_modules
from tasks.policy.models.router_bias import BIAS
from tasks.policy.parallel import packed
from tasks.policy.parallel.experts import experts_modules, fused_weighted_rows
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.ranks.progress import Progress
from tasks.policy.ranks.stopping import StopRequest
from tasks.policy.step import offload, reading
from tasks.policy.step.adamw import OnePassAdamW
from tasks.policy.training import epoch, workbench
from tasks.policy.training.trainee import Trainee, make_trainee
from tasks.policy.training.workbench import Workbench
from tasks.records import CampaignRun, TrainBatch
from tasks.rl.routing_records import pack

SINGLE = {"topology": "single_1x1", "ep": 1, "dispatcher": "local"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    trainee: Trainee
    config: CampaignConfig

    def train(self, rows: list[dict[str, Any]] | None = None) -> dict[str, float]:
        rows = rows or [{**row, "minibatch": 0} for row in train_rows(bad=set())]
        return epoch.train(self.trainee, rows, self.config, objective="clipped_policy")

    def routers(self) -> list[Any]:
        return [router for _, router in router_modules(self.trainee.model)]


Make = Callable[..., Subject]


@pytest.fixture
def make(policy_store, tmp_path) -> Make:
    """Of a tiny policy, by what ``train`` says; fused kernels are their formulas without CUDA, and only the
    configuration refuses them there."""

    def made(family: str = "qwen3_moe", *, before: dict[str, float] | None = None, **choices: Any) -> Subject:
        records = {"record_routing": choices.get("replay_routing", "none")}
        config = CampaignConfig.model_validate({"train": SINGLE, "rollout": records})
        config = config.model_copy(update={"train": config.train.model_copy(update=choices)})
        batch = TrainBatch(
            iteration=0, objective="clipped_policy", key="b", sha256="", num_samples=1, behavior_version=0,
            produced=1, rejected={}, metrics={}, seconds={}, sealed_at=0.0,
        )  # fmt: skip
        bench = Workbench(
            run=CampaignRun(config=config, lineage=1, code_revision="test"), store=policy_store, batch=batch,
            mesh=make_mesh(1, 1), dispatcher=LocalDispatcher(), progress=Progress(),
        )  # fmt: skip
        parent = manifest(policy_store, 0, {}, metrics=before or {})
        folder = saved(tiny_policy(family), tmp_path / family)
        trainee = make_trainee(
            bench, parent, Checkpoint(folder), resumes=False, stop=StopRequest(), held=None
        )
        return Subject(trainee=trainee, config=config)

    return made


def test_frozen_routers_are_not_trained(make):
    assert all(p.requires_grad for router in make().routers() for p in router.parameters())
    subject = make(freeze_router=True)
    weights = [router.weight.clone() for router in subject.routers()]
    subject.train()
    assert all(torch.equal(a, b.weight) for a, b in zip(weights, subject.routers(), strict=True))


def test_moments_are_put_away_and_fetched_around_every_step(make, monkeypatch):
    """On a CPU they have nowhere else to go, so it is the moves that are counted."""
    moves: list[Any] = []
    monkeypatch.setattr(offload, "_move", lambda _optimizer, device: moves.append(device))
    make().train()
    assert moves == []
    make(offload_optimizer=True).train()
    assert moves == [torch.device("cpu"), None, torch.device("cpu")]


def test_activations_are_computed_again_where_asked(make, monkeypatch):
    real, parts = recompute.checkpoint, []
    monkeypatch.setattr(recompute, "checkpoint", lambda f, *a, **k: (parts.append(f), real(f, *a, **k))[1])
    make().train()
    assert parts == []
    make(activation_checkpointing=True).train()
    assert len(parts) == 10, "two norms, attention, router and experts of two layers"


def test_the_biases_of_routers_move_at_their_rate(make):
    for rate in (0.0, 0.25):
        subject = make("deepseek_v3", router_bias_rate=rate)
        before = [getattr(router, BIAS).clone() for router in subject.routers()]
        metrics = subject.train()
        after = [getattr(router, BIAS) for router in subject.routers()]
        moved = [(new - old).abs().max().item() for new, old in zip(after, before, strict=True)]
        assert all(m == pytest.approx(rate) for m in moved) and metrics.get("router_bias_rate", 0.0) == rate


def test_the_auxiliary_loss_is_added_and_listed(make):
    """Complaint 42: one that was on without a word made gradients 3.4 times as large."""
    plain, balanced = (make(router_aux_loss_coefficient=c).train() for c in (0.0, 5.0))
    assert not any(name.startswith("router_aux") or name == "router_balance" for name in plain)
    assert balanced["router_aux_loss_coefficient"] == 5.0 and balanced["router_balance"] > 0
    assert balanced["grad_norm"] > 1.5 * plain["grad_norm"]


def test_recorded_routing_is_replayed_with_or_without_its_weights(make):
    def recorded(row: dict[str, Any]) -> dict[str, Any]:
        length = len(row["prompt_ids"]) + len(row["response_ids"]) - 1
        experts = np.tile(np.array([[0, 1], [2, 3]], dtype=np.uint8), (length, 1, 1))
        weights = np.tile(np.array([0.9, 0.1], dtype=np.float16), (length, 2, 1))
        return {**row, "minibatch": 0, "routed_experts": pack(experts), "routed_weights": pack(weights)}

    rows = [recorded(row) for row in train_rows(bad=set())]
    choices = ("none", "experts", "experts_and_weights")
    found = {choice: make(replay_routing=choice).train(rows) for choice in choices}
    assert [choice for choice in choices if "router/drift" in found[choice]] == list(choices[1:])
    assert len({round(metrics["entropy"], 4) for metrics in found.values()}) == 3


def test_skipped_steps_are_counted_over_iterations(make):
    rows = [row for row in train_rows(bad={0}) if row["minibatch"] == 0]
    make(max_nonfinite_steps=2).train(rows)
    subject = make(max_nonfinite_steps=2, before={"nonfinite_in_a_row": 1.0})
    with pytest.raises(RuntimeError, match=r"got 2 steps in a row .* mini-batch 0 of iteration 1"):
        subject.train(rows)


def test_each_part_is_computed_by_the_kernel_that_is_named(make):
    def used(subject: Subject) -> dict[str, bool]:
        model, optimizer = subject.trainee.model, subject.trainee.optimizer
        forwards = [getattr(module.forward, "__func__", None) for module in model.modules()]
        return {
            "experts": any(m.compute_rows.func is fused_weighted_rows for _, m in experts_modules(model)),
            "norms": norms._forward in forwards,
            "rotary": rotary._turn_both in [getattr(f, "__globals__", {}).get(rotary.NAME) for f in forwards],
            "optimizer": isinstance(optimizer, OnePassAdamW),
        }

    fields = {"experts": "expert_kernel", "norms": "norm_kernel"}
    fields |= {"rotary": "rotary_kernel", "optimizer": "optimizer_kernel"}
    expected = make().train()
    for part, field in fields.items():
        subject = make(**{field: "fused"})
        assert used(subject) == {name: name == part for name in fields}
        assert subject.train()["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_numbers_of_the_section_reach_optimizer_reader_and_step(make, monkeypatch):
    given: dict[str, Any] = {}
    real_step, real_reader, real_distribute = (
        epoch.train_minibatch,
        reading.policy_reader,
        workbench.distribute,
    )

    def step(*arguments: Any, **named: Any) -> dict[str, float]:
        given.update(batches=len(arguments[1]), max_grad_norm=named["max_grad_norm"])
        return real_step(*arguments, **named)

    def reader(**named: Any) -> Any:
        given["reader"] = named
        return real_reader(**named)

    def distribute(model: Any, mesh: Any, *, compute_dtype: torch.dtype) -> None:
        given["compute_dtype"] = compute_dtype
        real_distribute(model, mesh)  # half precision needs a process group

    monkeypatch.setattr(epoch, "train_minibatch", step)
    monkeypatch.setattr(reading, "policy_reader", reader)
    monkeypatch.setattr(workbench, "distribute", distribute)
    subject = make(
        learning_rate=0.5, beta1=0.1, beta2=0.2, eps=0.3, weight_decay=0.4, max_grad_norm=0.25,
        micro_batch_tokens=10, logprob_kernel="chunked", logprob_keep_gb=2.0, compute_dtype="bfloat16",
    )  # fmt: skip
    subject.train()
    (group,) = subject.trainee.optimizer.param_groups
    found = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert found == {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3, "weight_decay": 0.4}
    assert given["reader"] == {"temperature": 1.0, "kernel": "chunked", "keep_gb": 2.0}
    assert (given["batches"], given["max_grad_norm"], given["compute_dtype"]) == (5, 0.25, torch.bfloat16)


def test_packing_is_proven_on_the_policy_that_is_trained(make, monkeypatch):
    monkeypatch.setattr(packed, "packed_attention_mask", lambda model, position_BL: None)
    make("gpt_oss")
    with pytest.raises(ValueError, match=r"train.packing must be 'padded' for gpt_oss"):
        make("gpt_oss", packing="packed")
