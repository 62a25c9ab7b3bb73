"""Packed rows train as padded ones do: same log-probabilities and gradients, and no sample sees another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, tiny_policy
from torch import Tensor
from transformers import PreTrainedModel

from tasks.algorithm_config import AlgorithmConfig
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.parallel import packed
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.parallel.packed import require_packable
from tasks.policy.step.trainer import Learner, make_optimizer, token_logprobs_and_entropy, train_minibatch
from tasks.rl.objective import policy_objective
from tasks.rl.packing import Packing, collate, micro_batches, num_trained_tokens, plan_micro_batches

LENGTHS = ((3, 4), (1, 1), (2, 7), (1, 5), (4, 2))
"""Prompt and response; the second sample is as short as one can be, others exceed gpt_oss' window of 4."""


def rows(lengths=LENGTHS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(2, VOCAB, (length,), generator=generator).tolist()

    return [
        {
            "prompt_ids": draw(prompt),
            "response_ids": draw(response),
            "behavior_logprob": [-2.0] * response,
            "loss_mask": [i != 1 for i in range(response)],
            "advantage": float(index) - 1.5,
        }
        for index, (prompt, response) in enumerate(lengths)
    ]


def test_a_packed_micro_batch_aligns_every_tensor_with_its_token():
    first, second = rows(((2, 3), (1, 1)))
    batch = collate([first, second], packing="packed")
    ids = [*first["prompt_ids"], *first["response_ids"], *second["prompt_ids"], *second["response_ids"]]
    assert batch["input_ids"].tolist() == [ids]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch["attention_mask"].tolist() == [[1] * 7]
    assert batch["mask"].tolist() == [[False, False, True, False, True, False, True]]
    assert batch["behavior_logprob"].tolist() == [[0, 0, -2, -2, -2, 0, -2]]
    assert batch["advantage"].tolist() == [[0, 0, -1.5, -1.5, -1.5, 0, -0.5]]


def test_each_sample_goes_into_the_first_micro_batch_with_room():
    # budget 10: 7 + 3, then 6 + 4, then 5 + 2; the 3 goes back to the first although the last has room too
    samples = rows(((3, 4), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1)))
    plan = plan_micro_batches(samples, max_tokens=10, packing="packed")
    lengths = [[len(r["prompt_ids"]) + len(r["response_ids"]) for r in batch] for batch in plan]
    assert lengths == [[7, 3], [6, 4], [5, 2]]


@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("max_tokens", [1, 8, 16, 1000])
def test_every_sample_is_in_one_micro_batch_within_the_budget(packing: Packing, max_tokens):
    samples = rows()
    batches = micro_batches(samples, max_tokens=max_tokens, packing=packing)
    assert sum(int(batch["mask"].sum()) for batch in batches) == num_trained_tokens(samples)
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == sum(p + r for p, r in LENGTHS)
    for batch in batches:
        num_samples = (batch["position_ids"] == 0).sum() if packing == "packed" else len(batch["input_ids"])
        assert batch["input_ids"].numel() <= max_tokens or num_samples == 1


def logprobs(model: PreTrainedModel, samples: list[dict], packing: Packing) -> list[tuple[Tensor, Tensor]]:
    """Log-probability and entropy of each sample, whatever it was computed in."""
    batch = collate(samples, packing=packing)
    both = token_logprobs_and_entropy(
        model, batch["input_ids"], batch["attention_mask"], 0.7, position_BL=batch.get("position_ids")
    )
    lengths = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in samples]
    if packing == "packed":
        split = [value[0].split(lengths) for value in both]
    else:
        split = [[row[:length] for row, length in zip(value, lengths, strict=True)] for value in both]
    return list(zip(*split, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_entropies_equal_padded_ones(family):
    model = tiny_policy(family)
    attach_dispatcher(model, LocalDispatcher())
    require_packable(model)
    samples = rows()
    with torch.no_grad():
        packed, padded = logprobs(model, samples, "packed"), logprobs(model, samples, "padded")
        alone = [logprobs(model, [sample], "padded")[0] for sample in samples]
    for ours, theirs, single in zip(packed, padded, alone, strict=True):
        for values in zip(ours, theirs, single, strict=True):
            # the largest is 9, one float32 rounding of it 1e-6; logits are divided by 0.7
            torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(values[0], values[2], rtol=1e-6, atol=2e-6)
        assert ours[0][0] == 0 and (ours[0][1:] < 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_a_packed_row_does_not_see_another(family):
    model = tiny_policy(family)
    attach_dispatcher(model, LocalDispatcher())
    samples = rows()
    changed = copy.deepcopy(samples)
    changed[2]["prompt_ids"] = [token % (VOCAB - 2) + 2 for token in changed[2]["prompt_ids"]]
    with torch.no_grad():
        before, after = logprobs(model, samples, "packed"), logprobs(model, changed, "packed")
    for index, (ours, theirs) in enumerate(zip(before, after, strict=True)):
        difference = (ours[0] - theirs[0]).abs().max()
        # measured: 5e-7 at most for the others, from other groups in the experts' products
        assert difference > 0.1 if index == 2 else difference < 2e-6, (index, difference)


def step(model: PreTrainedModel, packing: Packing, max_tokens: int) -> tuple[dict, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    attach_dispatcher(model, LocalDispatcher())
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    gradients: dict[str, Tensor] = {}

    def record(*_: object) -> None:
        gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(record)
    samples = rows()
    tokens = num_trained_tokens(samples)
    loss = policy_objective(
        AlgorithmConfig(entropy_coefficient=0.1),
        num_global_tokens=tokens,
        num_global_sequences=len(samples),
        fixed_length=7,
    )
    batches = micro_batches(samples, max_tokens=max_tokens, packing=packing)
    metrics = train_minibatch(
        Learner(model, optimizer, make_mesh(1, 1)), batches, loss, num_global_tokens=tokens, max_grad_norm=1e9
    )
    return metrics, gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_tokens", [12, 1000])
def test_packed_gradients_equal_padded_ones(family, max_tokens):
    model = tiny_policy(family)
    metrics, gradients = step(model, "padded", 1000)
    packed_metrics, packed = step(model, "packed", max_tokens)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name in ("loss", "entropy", "policy_loss", "tokens"):
        assert packed_metrics[name] == pytest.approx(metrics[name], rel=1e-6, abs=1e-6)
    assert packed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed[name], gradient, rtol=0, atol=1e-6 * max(largest, 1.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_lets_packed_sequences_meet_is_refused(family, monkeypatch):
    model = tiny_policy(family)
    attach_dispatcher(model, LocalDispatcher())
    require_packable(model)
    assert all(param.grad is None for param in model.parameters())
    # as gpt_oss does on its own, and as any family with recurrent layers would
    monkeypatch.setattr(packed, "packed_attention_mask", lambda *_: torch.ones(1, 8))
    with pytest.raises(
        ValueError, match=f"must be 'padded' for {model.config.model_type}.* Set train.packing"
    ):
        require_packable(model)
