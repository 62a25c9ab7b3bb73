"""Train a reward model on preference pairs: Bradley-Terry, one process."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, Qwen3Config

from tasks.config import CampaignConfig
from tasks.environments.make import make_environment
from tasks.environments.reward_model import encode_conversation, forward, length_sorted_batches
from tasks.policy.models.tokenizer import character_tokenizer
from tasks.reward_config import RewardModelConfig
from tasks.rl.preferences import bradley_terry_loss, pair_accuracy

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
"""Of a model that is trained from random weights, for the policy of a laptop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    prompt: str
    better: str
    worse: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What came of it."""

    model: PreTrainedModel
    tokenizer: Any
    losses: list[float]
    accuracy: float
    """Of pairs that were kept out."""


def train_reward_model(config: CampaignConfig) -> Training:
    """A model that ranks the better response of a pair above the worse; repeats bit for bit on one thread."""
    settings = config.reward.model
    torch.set_num_threads(1)
    num_held_out = max(settings.pairs // 16, 1)
    pairs = list(islice(_pairs(config), settings.pairs + num_held_out))
    if len(pairs) < settings.pairs + num_held_out:
        raise ValueError(
            f"reward.model.pairs must be at most 16/17 of the pairs there are, got {settings.pairs} and "
            f"{len(pairs)} in all. Lower it to {len(pairs) * 16 // 17}."
        )
    held_out, train = pairs[:num_held_out], pairs[num_held_out:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model, tokenizer = _base(settings)
        model.to(torch.device(settings.device))  # pyright: ignore[reportArgumentType]
    rows = [_encoded(tokenizer, pair) for pair in train]
    losses = _steps(model, rows, settings, seed=config.seed)
    accuracy = held_out_accuracy(model, [_encoded(tokenizer, pair) for pair in held_out], settings)
    return Training(model=model.eval(), tokenizer=tokenizer, losses=losses, accuracy=accuracy)


def save_reward_model(training: Training, folder: Path) -> None:
    """Whole or not at all: written beside its place, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        made = Path(name) / "model"
        save_model(training.model, made)
        training.tokenizer.save_pretrained(made)
        if folder.exists():
            folder.rename(Path(name) / "before")
        made.rename(folder)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """With a bias of zero at the score: SGLang has one there, and fills it at random where none is stored.
    Transformers has none and ignores it."""
    tensors = model.state_dict()
    score = tensors["score.weight"]
    model.save_pretrained(folder, state_dict={**tensors, "score.bias": score.new_zeros(len(score))})


@torch.inference_mode()
def held_out_accuracy(
    model: PreTrainedModel, rows: Sequence[tuple[list[int], list[int]]], settings: RewardModelConfig
) -> float:
    """Share of pairs that the model ranks as they were given."""
    flat = [ids for pair in rows for ids in pair]
    values = torch.zeros(len(flat))
    for batch in length_sorted_batches([len(ids) for ids in flat], max_tokens=settings.batch_tokens):
        values[batch] = forward(model.eval(), [flat[index] for index in batch]).float().cpu()
    return float(pair_accuracy(values[0::2], values[1::2]))


def _steps(
    model: PreTrainedModel,
    rows: Sequence[tuple[list[int], list[int]]],
    settings: RewardModelConfig,
    *,
    seed: int,
) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0
    )
    chance, losses = random.Random(f"reward model/{seed}"), []
    model.train()
    for _ in range(settings.steps):
        batch = chance.sample(range(len(rows)), min(settings.batch_pairs, len(rows)))
        values = forward(model, [rows[i][0] for i in batch] + [rows[i][1] for i in batch]).float()
        loss = bradley_terry_loss(values[: len(batch)], values[len(batch) :])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def _base(settings: RewardModelConfig) -> tuple[PreTrainedModel, Any]:
    if settings.base:
        model = AutoModelForSequenceClassification.from_pretrained(settings.base, num_labels=1)
        return model, AutoTokenizer.from_pretrained(settings.base)
    tokenizer = character_tokenizer()
    shape: dict[str, Any] = {
        **SHAPE,
        "vocab_size": len(tokenizer),
        "num_labels": 1,
        "tie_word_embeddings": True,
    }
    tokens = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen3Config(**shape, **tokens, max_position_embeddings=4096)
    return AutoModelForSequenceClassification.from_config(config), tokenizer


def _encoded(tokenizer: Any, pair: Pair) -> tuple[list[int], list[int]]:
    asked = {"role": "user", "content": pair.prompt}
    better, worse = (
        encode_conversation(tokenizer, [asked, {"role": "assistant", "content": text}])
        for text in (pair.better, pair.worse)
    )
    return better, worse


def _pairs(config: CampaignConfig) -> Iterator[Pair]:
    if path := config.reward.model.pairs_path:
        from tasks.environments.prompt_files import read_rows

        for where, row in read_rows(path, field="reward.model.pairs_path"):
            try:
                yield Pair(prompt=row["prompt"], better=row["chosen"], worse=row["rejected"])
            except KeyError as error:
                raise ValueError(
                    f"{where} must have the fields prompt, chosen and rejected, got {sorted(row)}."
                ) from error
        return
    environment = make_environment(config.environment, seed=config.seed)
    found = getattr(environment, "preference_pairs", None)
    if found is None:
        raise ValueError(
            f"environment {config.environment.title!r} has no preference_pairs, and reward.model.pairs_path "
            "is empty. Name a file of pairs with the fields prompt, chosen and rejected."
        )
    for prompt, better, worse in found(seed=config.seed):
        yield Pair(prompt=prompt.text, better=better, worse=worse)
