"""What other versions say of a batch: the right version, at every token, one model in memory at a time."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from families import saved, tiny_policy
from publishing import manifest, put_folder
from pydantic import ValidationError
from test_packing import rows
from test_standing import leases
from transformers import PreTrainedModel

from tasks.artifacts.owned import Checkpoint, checkpoint_of
from tasks.config import CampaignConfig
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import Head, load_policy
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.ranks.progress import Progress
from tasks.policy.step.trainer import token_logprobs_and_entropy
from tasks.policy.training.beside import with_other_versions, with_proximal
from tasks.policy.training.workbench import Workbench
from tasks.records import CampaignRun, TrainBatch
from tasks.session import open_store


def make_bench(
    store: Any, store_folder: Path, algorithm: dict, *, objective: str = "clipped_policy"
) -> Workbench:
    config = CampaignConfig.model_validate(
        {
            "algorithm": algorithm,
            "rollout": {"temperature": 0.7},
            "train": {"ep": 1, "dispatcher": "local", "packing": "packed", "micro_batch_tokens": 30},
            "checkpoint": {"store": str(store_folder)},
        }
    )
    batch = TrainBatch(
        iteration=0, objective=objective, key="b", sha256="", num_samples=1, behavior_version=0, produced=1,
        rejected={}, metrics={}, seconds={}, sealed_at=0.0,
    )  # fmt: skip

    return OneAtATime(
        run=CampaignRun(config=config, lineage=1, code_revision="test"), store=store, batch=batch,
        mesh=make_mesh(1, 1), dispatcher=LocalDispatcher(), progress=Progress(),
    )  # fmt: skip


def models_in_memory() -> set[int]:
    gc.collect()
    return {id(found) for found in gc.get_objects() if issubclass(type(found), PreTrainedModel)}


@dataclass(frozen=True, kw_only=True)
class OneAtATime(Workbench):
    """Refuses to load a model beside one that it loaded before; nothing is trained or stored here."""

    earlier: set[int] = field(default_factory=models_in_memory)

    def load(self, checkpoint: Checkpoint, *, head: Head = "tokens") -> PreTrainedModel:
        assert models_in_memory() <= self.earlier, "of another test, or of this one"
        return Workbench.load(self, checkpoint, head=head)


def said(model: PreTrainedModel, row: dict) -> list[float]:
    """Of trained tokens; nobody asks for the others'."""
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
    logprob_BL, _ = token_logprobs_and_entropy(model, ids, torch.ones_like(ids), 0.7)
    return (logprob_BL[0, len(row["prompt_ids"]) :] * torch.tensor(row["loss_mask"])).tolist()


@pytest.fixture
def algorithm(policy_store, campaign, tmp_path):
    """With versions 0 and 1 as reference and teacher, which are there, and in folders of these names."""
    for number in range(2):
        folder = saved(tiny_policy("qwen3_moe", seed=number), tmp_path / str(number))
        policy_store.commit(manifest(policy_store, number, put_folder(policy_store, folder)))
    return {
        "advantage": "teacher", "teacher": {"campaign": campaign, "version": 1},
        "kl": "loss", "kl_coefficient": 0.1, "reference_version": 0,
    }  # fmt: skip


def test_reference_and_teacher_are_the_named_versions_and_share_no_memory(
    policy_store, store_folder, algorithm, tmp_path
):
    bench = make_bench(policy_store, store_folder, algorithm)
    found = with_other_versions(bench, rows())
    for column, number in (("reference_logprob", 0), ("teacher_logprob", 1)):
        model = load_policy(tmp_path / str(number), dispatcher=LocalDispatcher())
        for row in found:
            assert row[column] == pytest.approx(said(model, row), abs=1e-5)
        del model
    supervised = make_bench(policy_store, store_folder, algorithm, objective="supervised")
    assert with_other_versions(supervised, rows()) == rows()  # a warm start has neither


def test_versions_that_were_read_may_be_evicted_and_the_policy_not_even_where_it_is_the_reference(
    policy_store, store_folder, campaign, algorithm
):
    """A trainer that stays kept one more at each update, until its cache was full."""
    config = make_bench(policy_store, store_folder, algorithm).config
    policies = open_store(config, campaign)
    policy = checkpoint_of(policies, 0)
    with_other_versions(make_bench(policies, store_folder, algorithm), rows())
    assert leases(policies.cache.folder, campaign) == [0]
    policy.release()
    assert leases(policies.cache.folder, campaign) == []


def test_the_proximal_policy_is_the_one_before_the_first_step(policy_store, store_folder, tmp_path):
    model = load_policy(saved(tiny_policy("qwen3_moe"), tmp_path), dispatcher=LocalDispatcher())
    bench = make_bench(policy_store, store_folder, {"correction": {"proximal": "recomputed"}})
    for row in with_proximal(bench, model, rows(), None):
        assert row["proximal_logprob"] == pytest.approx(said(model, row), abs=1e-5)
    bench = make_bench(policy_store, store_folder, {})
    assert with_proximal(bench, model, rows(), None) == rows()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": {"advantage": "teacher"}}, "teacher.campaign must be given"),
        ({"algorithm": {"teacher": {"version": 3}}}, "campaign must be given with version"),
        ({"algorithm": {"kl": "loss", "kl_coefficient": 0.1}}, "at most 0 with warm_start.steps=0"),
        ({"train": {"replay_routing": "experts"}}, "must be something that rollout.record_routing records"),
        (
            {
                "train": {"replay_routing": "experts_and_weights"},
                "rollout": {"record_routing": "experts"},
            },
            "must be something that rollout.record_routing records",
        ),
        ({"algorithm": {"advantage": "gae"}, "train": {"topology": "node_1x8", "pp": 2, "ep": 1,
          "dispatcher": "local"}}, "train.pp must be 1 with algorithm.advantage 'gae'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_launch(changes, words):
    with pytest.raises(ValidationError, match=words):
        CampaignConfig.model_validate(changes)
