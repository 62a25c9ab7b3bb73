"""Policies and optimizers on disk: the bytes Hugging Face would write, whatever the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, NUM_EXPERTS, saved, tiny_policy, token_ids
from policies import write_shard
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.policy.checkpoint.weights import (
    Shard,
    digest_tensors,
    disk_tensors,
    load_optimizer,
    merge_digests,
    optimizer_tensors,
    tensor_digest,
    write_index,
)
from tasks.policy.dispatch.dispatcher import Dispatcher, LocalDispatcher, make_dispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.parallel.experts import expert_shards
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.parallel.names import stored_tensors
from tasks.policy.step.trainer import Learner, make_optimizer, train_minibatch

SPLIT_FAMILIES = [
    family for family in FAMILIES if family != "gpt_oss"
]  # gpt_oss stores all experts in one tensor


def write(model: PreTrainedModel, folder: Path, dispatcher: Dispatcher) -> None:
    """What a trainer does: every rank its shard, rank 0 the index."""
    rank, num_ranks = dispatcher.rank, dispatcher.num_ranks
    shards = [write_shard(folder, disk_tensors(model), rank, num_ranks)]
    if num_ranks > 1:
        gathered: list[Shard | None] = [None] * num_ranks
        dist.all_gather_object(gathered, shards[0])
        shards = [shard for shard in gathered if shard is not None]
    if rank == 0:
        write_index(folder, shards)
        model.config.save_pretrained(folder)


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bytes(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_round_trip_keeps_names_and_bytes(family, tmp_path):
    source = saved(tiny_policy(family), tmp_path / "source")
    model = load_policy(source, dispatcher=LocalDispatcher())
    assert_same_bytes(dict(disk_tensors(model)), load_file(source / "model.safetensors"))
    reference = AutoModelForCausalLM.from_pretrained(source)
    for (name, ours), (_, expected) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(ours, expected), name  # rotary frequencies are not on disk
    ours, expected = model(input_ids=token_ids(0)).logits, reference(input_ids=token_ids(0)).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def check_shards(rank: int, world_size: int, folder: Path) -> None:
    dispatcher = make_dispatcher("all_to_all", dist.group.WORLD)
    for family in SPLIT_FAMILIES:
        model = load_policy(folder / family, dispatcher=dispatcher)
        for name in expert_shards(model):
            assert model.get_parameter(name).shape[0] == NUM_EXPERTS // world_size
        write(model, folder / f"{family}-written", dispatcher)
        digests: list[dict[str, str] | None] = [None] * world_size
        dist.all_gather_object(digests, digest_tensors(disk_tensors(model)))
        (folder / f"{family}.digest").write_text(merge_digests(d for d in digests if d is not None))


def test_two_ranks_write_what_one_rank_reads(tmp_path):
    originals = {family: tiny_policy(family) for family in SPLIT_FAMILIES}
    for family, model in originals.items():
        saved(model, tmp_path / family)
        (tmp_path / f"{family}-written").mkdir()
    run_ranks(check_shards, 2, tmp_path)
    for family, model in originals.items():
        written = tmp_path / f"{family}-written"
        expected = load_file(tmp_path / family / "model.safetensors")
        assert_same_bytes(read_all(written), expected)
        index = json.loads((written / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) == {path.name for path in written.glob("*.safetensors")}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
        assert (tmp_path / f"{family}.digest").read_text() == tensor_digest(expected.items())
        # transformers picks another experts kernel on its own; same weights, so only rounding may differ
        reloaded = AutoModelForCausalLM.from_pretrained(written)
        ours, logits = reloaded(input_ids=token_ids(0)).logits, model(input_ids=token_ids(0)).logits
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)


def check_stacked_family(rank: int, world_size: int, folder: Path, expected_BLV: Tensor) -> None:
    model = load_policy(folder, dispatcher=make_dispatcher("all_to_all", dist.group.WORLD))
    torch.testing.assert_close(model(input_ids=token_ids(0)).logits, expected_BLV, rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"must be put together from all ranks, .* got 4 of 8. Split the model with"
    ):
        list(disk_tensors(model))


def test_experts_stacked_on_disk_are_not_written_by_ranks_that_do_not_know_each_other(tmp_path):
    model = tiny_policy("gpt_oss")
    with torch.no_grad():
        expected_BLV = model(input_ids=token_ids(0)).logits
    run_ranks(check_stacked_family, 2, saved(model, tmp_path), expected_BLV)


def test_shards_carry_the_metadata_that_transformers_demands(tmp_path):
    shard = write_shard(tmp_path, [("a", torch.ones(2))], 1, 2)
    assert shard.file_name == "model-00002-of-00002.safetensors" and shard.num_bytes == {"a": 8}
    with safe_open(tmp_path / shard.file_name, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_digest_tells_value_shape_type_and_name_apart_but_not_the_split():
    a, b = ("a", torch.arange(4.0)), ("b", torch.ones(2, dtype=torch.bfloat16))
    whole = tensor_digest([a, b])
    assert whole == merge_digests([digest_tensors([b]), digest_tensors([a])])
    others = [
        ("a", torch.arange(4.0) + 1e-7),
        ("a", a[1].view(2, 2)),
        ("a", a[1].view(torch.int32)),
        ("c", a[1]),
    ]
    assert len({whole, *(tensor_digest([other, b]) for other in others)}) == 5
    with pytest.raises(ValueError, match=r"every tensor must come from one rank, got 1 from two: \['a'\]"):
        merge_digests([digest_tensors([a]), digest_tensors([a])])


def test_bfloat16_is_bfloat16_except_what_the_family_pins(tmp_path):
    source = saved(tiny_policy("deepseek_v3"), tmp_path)
    model = load_policy(source, dispatcher=LocalDispatcher(), dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in stored_tensors(model)}
    others = {name: dtype for name, dtype in dtypes.items() if dtype != torch.bfloat16}
    assert others == {"model.layers.1.mlp.gate.e_score_correction_bias": torch.float32}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model(input_ids=token_ids(0)).logits.isfinite().all()


def test_a_checkpoint_that_is_not_the_model_is_refused(tmp_path):
    source = saved(tiny_policy("qwen3_moe"), tmp_path)
    tensors = load_file(source / "model.safetensors")
    gone = "model.layers.1.mlp.experts.5.up_proj.weight"

    def refusal(changed: dict[str, Tensor]) -> str:
        save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError) as caught:
            load_policy(source, dispatcher=LocalDispatcher())
        return str(caught.value)

    without = {name: tensor for name, tensor in tensors.items() if name != gone}
    assert f"1 missing ['{gone}'] and 0 unexpected" in refusal(without)
    assert "0 missing [] and 1 unexpected ['surprise']" in refusal({**tensors, "surprise": torch.ones(1)})
    # one column would broadcast silently into the whole matrix
    assert f"{gone} must have the model's shape (16, 32), got (16, 1)" in refusal(
        {**tensors, gone: torch.ones(16, 1)}
    )
    (source / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"must hold model.safetensors.index.json or model.safetensors, got neither"
    ):
        load_policy(source, dispatcher=LocalDispatcher())


def test_a_second_copy_of_a_tied_weight_is_passed_over(tmp_path):
    source = saved(tiny_policy("qwen3_moe"), tmp_path)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": torch.zeros(1)}, source / "model.safetensors", metadata={"format": "pt"}
    )
    model = load_policy(source, dispatcher=LocalDispatcher())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_an_index_with_a_tensor_twice_or_a_file_absent_is_refused(tmp_path):
    shards = [write_shard(tmp_path, [("a", torch.ones(1))], rank, 2) for rank in range(2)]
    with pytest.raises(ValueError, match=r"must be in one shard, got 1 again in model-00002-of-00002"):
        write_index(tmp_path, shards)
    saved(tiny_policy("qwen3_moe"), tmp_path)
    sizes = dict.fromkeys(load_file(tmp_path / "model.safetensors"), 4)
    write_index(tmp_path, [Shard(file_name="elsewhere.safetensors", num_bytes=sizes)])
    with pytest.raises(
        ValueError, match=r"must list files that exist, got \['elsewhere.safetensors'\] absent"
    ):
        load_policy(tmp_path, dispatcher=LocalDispatcher())


def test_an_index_and_a_file_that_differ_are_refused(tmp_path):
    """Files are chosen by the index: one with a tensor that it does not list, or without one that it does."""
    saved(tiny_policy("qwen3_moe"), tmp_path)
    tensors, norm = load_file(tmp_path / "model.safetensors"), "model.norm.weight"
    others = {name: tensor for name, tensor in tensors.items() if name != norm}
    save_file({"a": torch.ones(32)}, tmp_path / "other.safetensors")
    mine = Shard(file_name="model.safetensors", num_bytes=dict.fromkeys(others, 4))
    write_index(tmp_path, [mine, Shard(file_name="other.safetensors", num_bytes={norm: 4})])
    with pytest.raises(ValueError, match=rf"model.safetensors must hold the tensors .* \['{norm}'\]"):
        load_policy(tmp_path, dispatcher=LocalDispatcher())
    save_file(others, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"other.safetensors must hold the tensors that its index lists"):
        load_policy(tmp_path, dispatcher=LocalDispatcher())


def sum_of_logprobs(logprob_BL: Tensor, entropy_BL: Tensor, micro_batch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprob_BL.sum() / 100, {}


def train(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, mesh: ParallelMesh, seeds: list[int]
) -> None:
    """One step over the given batches, shared out over the ranks."""
    mine = seeds[mesh.rank :: mesh.world_size]
    batches = [
        {"input_ids": token_ids(seed), "attention_mask": torch.ones_like(token_ids(seed))} for seed in mine
    ]
    train_minibatch(
        Learner(model, optimizer, mesh), batches, sum_of_logprobs, num_global_tokens=100, max_grad_norm=0.5
    )


def optimizer_of(model: PreTrainedModel) -> Optimizer:
    return make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_resumed_run_continues_bit_for_bit(family, tmp_path):
    mesh = make_mesh(1, 1)
    model = load_policy(saved(tiny_policy(family), tmp_path), dispatcher=LocalDispatcher())
    optimizer = optimizer_of(model)
    train(model, optimizer, mesh, [1, 2])
    train(model, optimizer, mesh, [3, 4])
    write(model, tmp_path, LocalDispatcher())
    (tmp_path / "model.safetensors").unlink()
    write_index(
        tmp_path,
        [write_shard(tmp_path, optimizer_tensors(model, optimizer), 0, 1, stem="optimizer")],
        stem="optimizer",
    )
    train(model, optimizer, mesh, [5, 6])

    resumed = load_policy(tmp_path, dispatcher=LocalDispatcher())
    resumed_optimizer = optimizer_of(resumed)
    load_optimizer(resumed, resumed_optimizer, tmp_path)
    train(resumed, resumed_optimizer, mesh, [5, 6])
    assert tensor_digest(disk_tensors(resumed)) == tensor_digest(disk_tensors(model))
    state = dict(optimizer_tensors(resumed, resumed_optimizer))
    assert_same_bytes(state, dict(optimizer_tensors(model, optimizer)))
    assert state["step"] == 3


def test_an_optimizer_saved_before_its_first_step_resumes_as_a_fresh_one(tmp_path):
    model = load_policy(saved(tiny_policy("qwen3_moe"), tmp_path), dispatcher=LocalDispatcher())
    shard = write_shard(tmp_path, optimizer_tensors(model, optimizer_of(model)), 0, 1, stem="optimizer")
    write_index(tmp_path, [shard], stem="optimizer")
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, tmp_path)
    assert list(shard.num_bytes) == ["step"] and not optimizer.state


def check_two_steps(rank: int, world_size: int, folder: Path) -> None:
    mesh = make_mesh(world_size, ep=2)
    assert mesh.ep_group is not None
    dispatcher = make_dispatcher("all_to_all", mesh.ep_group)
    model = load_policy(folder, dispatcher=dispatcher)
    optimizer = optimizer_of(model)
    train(model, optimizer, mesh, [1, 2])
    train(model, optimizer, mesh, [3, 4])
    for stem, tensors in (("model", disk_tensors(model)), ("optimizer", optimizer_tensors(model, optimizer))):
        shards: list[Shard | None] = [None] * world_size
        dist.all_gather_object(shards, write_shard(folder, tensors, rank, world_size, stem=stem))
        if rank == 0:
            write_index(folder, [shard for shard in shards if shard is not None], stem=stem)
    train(model, optimizer, mesh, [5, 6])
    write(model, folder / "continued", dispatcher)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_run_on_two_ranks_resumes_on_one(family, tmp_path):
    saved(tiny_policy(family), tmp_path)
    (tmp_path / "continued").mkdir()
    run_ranks(check_two_steps, 2, tmp_path)
    (tmp_path / "model.safetensors").unlink()

    model = load_policy(tmp_path, dispatcher=LocalDispatcher())
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, tmp_path)
    on_disk = {k: v for path in tmp_path.glob("optimizer-*.safetensors") for k, v in load_file(path).items()}
    assert_same_bytes(dict(optimizer_tensors(model, optimizer)), on_disk)
    before = {name: tensor.clone() for name, tensor in disk_tensors(model)}
    train(model, optimizer, make_mesh(1, 1), [5, 6])
    continued = read_all(tmp_path / "continued")
    for name, tensor in disk_tensors(model):
        # one AdamW step of 1e-3 from gradients equal to 1e-8: 1e-3 * 1e-8 / eps 1e-5 = 1e-6
        torch.testing.assert_close(
            tensor, continued[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert any((tensor - before[name]).abs().max() > 5e-4 for name, tensor in disk_tensors(model))
