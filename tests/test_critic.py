"""PPO's critic: its values, its part in the parallel step, its versions."""

from __future__ import annotations

import copy
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from campaigns import SMALL, run, start, wait_for
from families import saved, tiny_policy
from policies import write_shard
from publishing import manifest
from ranks import run_ranks
from test_packing import rows
from transformers import AutoModelForTokenClassification

from tasks.algorithm_config import AlgorithmConfig
from tasks.artifacts import critics
from tasks.config import CampaignConfig
from tasks.policy.checkpoint.weights import disk_tensors, tensor_digest, write_index
from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.shards import whole_tensor
from tasks.policy.step.reading import read_rows
from tasks.policy.step.trainer import Learner, make_optimizer
from tasks.policy.training.critic import read_values, train_critic, value_reader
from tasks.records import CampaignRun
from tasks.train_config import TrainConfig

ALGORITHM = AlgorithmConfig(advantage="gae", gae_lambda=0.95, whiten=True)
SETTINGS = TrainConfig(ep=1, dispatcher="local", micro_batch_tokens=40)


def batch() -> list[dict]:
    """Rows of two mini-batches, with rewards."""
    return [
        {**row, "minibatch": number % 2, "reward": number / 8, "iteration": 0, "prompt_id": str(number // 2)}
        for number, row in enumerate(rows())
    ]


def make_critic(folder: Path, mesh, dispatcher=None, fsdp: int = 1) -> Learner:
    def split(model) -> None:
        if fsdp > 1:
            shard_parameters(model, mesh, compute_dtype=torch.float32)

    model = load_policy(folder, dispatcher=dispatcher or LocalDispatcher(), head="value", prepare=split)
    optimizer = make_optimizer(model, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    return Learner(model.train(), optimizer, mesh)


def update(critic: Learner) -> tuple[list[dict], dict[str, float]]:
    """Rows with values, and metrics."""
    valued = read_values(critic, batch(), SETTINGS)
    return valued, train_critic(critic, valued, ALGORITHM, SETTINGS)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss"])
def test_a_policy_becomes_a_critic_that_says_nothing_yet_and_learns_what_to_expect(tmp_path, family):
    folder = saved(tiny_policy(family), tmp_path / "policy")
    critic = make_critic(folder, make_mesh(1, 1))
    errors = []
    for _ in range(4):
        valued, metrics = update(critic)
        errors.append(metrics["critic/value_loss"])
        assert [len(row["value"]) for row in valued] == [len(row["response_ids"]) for row in valued]
        if len(errors) == 1:
            assert all(value == 0 for row in valued for value in row["value"])  # as the first step found it
    assert errors[-1] < errors[0] / 2


def test_a_value_is_that_of_the_tokens_before(tmp_path):
    """Checked against transformers' own model, whose position t has seen token t."""
    critic = make_critic(saved(tiny_policy("qwen3_moe"), tmp_path / "policy"), make_mesh(1, 1))
    update(critic)
    folder = tmp_path / "critic"
    folder.mkdir()
    shard = write_shard(folder, disk_tensors(critic.model), 0, 1)
    write_index(folder, [shard])
    critic.model.config.save_pretrained(folder)
    theirs = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ours = read_rows(critic.model, batch(), critic.mesh, value_reader(), max_tokens=30, packing="packed")
    for row, values in zip(batch(), ours, strict=True):
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        said = theirs(input_ids=ids).logits[0, :, 0]
        before = said[len(row["prompt_ids"]) - 1 : -1].tolist()
        assert values == pytest.approx(before, abs=1e-5)
    again = load_policy(folder, dispatcher=LocalDispatcher(), head="value")  # not taken for a policy
    assert tensor_digest(disk_tensors(again)) == tensor_digest(disk_tensors(critic.model))


def check_ranks(rank: int, world_size: int, ep: int, fsdp: int, folder: Path, expected) -> None:
    mesh = make_mesh(world_size, ep, fsdp)
    dispatcher = make_dispatcher("all_to_all" if ep > 1 else "local", mesh.ep_group)
    critic = make_critic(folder, mesh, dispatcher, fsdp)
    valued, metrics = update(critic)
    again, _ = update(critic)
    expected_metrics, expected_values = expected
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for row, values in zip(again, expected_values, strict=True):
        assert row["value"] == pytest.approx(values, abs=1e-4)
    assert all(whole_tensor(param.detach()).isfinite().all() for param in critic.model.parameters())
    assert valued[0]["value"][0] == 0


@pytest.mark.parametrize(("ep", "fsdp"), [(2, 1), (1, 1), (2, 2)])
def test_ranks_train_the_critic_of_one_rank(tmp_path, ep, fsdp):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    critic = make_critic(folder, make_mesh(1, 1))
    _, metrics = update(critic)
    again, _ = update(critic)
    run_ranks(check_ranks, 2, ep, fsdp, folder, (metrics, [row["value"] for row in again]))


def without_tokens(row: dict) -> dict:
    return {**row, "loss_mask": [False] * len(row["loss_mask"])}


def test_a_mini_batch_without_a_trained_token_takes_no_step_and_a_batch_without_rows_none_at_all(tmp_path):
    """Such a batch is sealed when nothing is left to learn; the next version is this one again."""
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    whole, part, none = (make_critic(folder, make_mesh(1, 1)) for _ in range(3))
    before = tensor_digest(disk_tensors(none.model))
    assert train_critic(none, read_values(none, [], SETTINGS), ALGORITHM, SETTINGS) == {
        "critic/skipped_steps": 0.0
    }
    assert tensor_digest(disk_tensors(none.model)) == before
    rows = [without_tokens(row) if row["minibatch"] else row for row in read_values(whole, batch(), SETTINGS)]
    first = [row for row in rows if not row["minibatch"]]
    assert train_critic(whole, rows, ALGORITHM, SETTINGS) == train_critic(part, first, ALGORITHM, SETTINGS)
    assert tensor_digest(disk_tensors(whole.model)) == tensor_digest(disk_tensors(part.model)) != before


def test_a_step_that_is_not_finite_is_counted_and_left_out_of_the_means(tmp_path):
    folder = saved(tiny_policy("qwen3_moe"), tmp_path)
    whole, part = (make_critic(folder, make_mesh(1, 1)) for _ in range(2))
    algorithm = ALGORITHM.model_copy(update={"whiten": False})
    rows = [{**row, "reward": math.inf} if row["minibatch"] else row for row in batch()]
    rows = read_values(whole, rows, SETTINGS)
    first = [row for row in rows if not row["minibatch"]]
    expected = train_critic(part, first, algorithm, SETTINGS) | {"critic/skipped_steps": 1.0}
    assert train_critic(whole, rows, algorithm, SETTINGS) == expected


# Versions


def test_a_critic_is_published_after_its_policy_and_made_up_for_by_the_next_run(
    policy_store, store_folder, campaign, tmp_path, monkeypatch
):
    from tasks.artifacts.store import open_store

    critic_store = open_store(str(store_folder), f"{campaign}.critic", cache=tmp_path / "cache")
    monkeypatch.setattr(critics, "critic_store", lambda run: critic_store)
    run_ = CampaignRun(config=CampaignConfig(), lineage=1, code_revision="test")
    first = manifest(critic_store, 0, {"a": critic_store.put_bytes(b"0")})
    critic_store.commit(first)
    policy = manifest(policy_store, 0, {"w": policy_store.put_bytes(b"w")})
    assert critics.find_critic(run_, policy_store, policy) is None  # before the first iteration
    trained = manifest(critic_store, 1, {"a": critic_store.put_bytes(b"1")})
    key = critics.keep_candidate(policy_store, trained, is_writer=True)
    retried = trained.model_copy(update={"created": first.created})  # trained again alike, at another time
    assert critics.keep_candidate(policy_store, retried, is_writer=True) == key
    policy = manifest(policy_store, 1, {"w": policy_store.put_bytes(b"w1")}).model_copy(
        update={"critic": key, "iteration": 1}
    )
    assert critic_store.head().version == 0  # killed before the critic was published
    found = critics.find_critic(run_, policy_store, policy)
    assert found is not None and found[1].version == 1
    assert (found[0].folder / "a").read_bytes() == b"1"
    with pytest.raises(ValueError, match="must have been trained with a critic"):
        critics.find_critic(run_, policy_store, policy.model_copy(update={"critic": ""}))


PPO = copy.deepcopy(SMALL) | {
    "name": "ppo",
    "algorithm": {"num_minibatches": 4, "advantage": "gae", "gae_lambda": 0.95, "whiten": True},
    "schedule": {"iterations": 2, "segment_iterations": 2, "evaluate_every": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_with_a_critic_goes_on_to_the_same_bits(tmp_path):
    folders = [tmp_path / name for name in ("calm", "struck")]
    for folder in folders:
        folder.mkdir()
    calm = run(folders[0], PPO)
    process = start(folders[1], PPO)
    wait_for(folders[1], r"iter +0  publish", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    struck = run(folders[1], PPO)
    assert struck.digests() == calm.digests()  # the second iteration's policy needs the first one's critic
    assert "critic/value_loss" in calm.metrics()[-1]["metrics"]
