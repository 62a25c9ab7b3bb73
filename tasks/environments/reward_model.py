"""A reward model in this process: any Hugging Face sequence-classification model with one output.

Rows of like length share a forward pass, and a pass holds at most ``batch_tokens`` with its padding. The
value of a part is the model's output.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tasks.environments.grades import Graded, Messages, scored
from tasks.environments.protocol import Part
from tasks.policy.models.tokenizer import encode
from tasks.reward_config import RewardModelConfig

NAME = "reward_model"


class RewardModel:
    """Grades conversations by the outputs of a model and its own chat template."""

    def __init__(self, config: RewardModelConfig) -> None:
        folder = Path(config.folder).expanduser()
        if not (folder / "config.json").exists():
            raise ValueError(
                f"reward.model.folder must be a Hugging Face checkpoint with a config.json, got {folder}. "
                "Train one with `pyflyte run workflows/reward_model.py reward_model --config` and this "
                "file, or name another."
            )
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).to(config.device).eval()
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"a reward model must have one output, got num_labels={self.model.config.num_labels} in "
                f"{folder}."
            )

    def grade(self, messages: Messages) -> list[Graded]:
        """One grade a conversation; text that the model's tokenizer cannot spell is a failure."""
        start, rows, failures = time.perf_counter(), [], {}
        for index, talk in enumerate(messages):
            try:
                rows.append((index, encode_conversation(self.tokenizer, talk)))
            except ValueError as error:
                failures[index] = Graded(part=Part(name=NAME, kind="failure", reason=str(error)[:300]))
        values = dict(zip([i for i, _ in rows], self.values([ids for _, ids in rows]), strict=True))
        for index, value in values.items():
            if not math.isfinite(value):
                reason = f"the model's output must be finite, got {value}"
                failures[index] = Graded(part=Part(name=NAME, kind="failure", reason=reason))
        good = [index for index in values if index not in failures]
        seconds = time.perf_counter() - start
        grades = scored(NAME, [values[i] for i in good], scale=self.config.scale, seconds=seconds)
        found = dict(zip(good, grades, strict=True))
        return [found[index] if index in found else failures[index] for index in range(len(messages))]

    @torch.inference_mode()
    def values(self, rows: Sequence[list[int]]) -> list[float]:
        """The model's output for each row of token ids, in their order."""
        found = [0.0] * len(rows)
        for batch in length_sorted_batches([len(row) for row in rows], max_tokens=self.config.batch_tokens):
            output = forward(self.model, [rows[index] for index in batch])
            for index, value in zip(batch, output.float().tolist(), strict=True):
                found[index] = value
        return found


def length_sorted_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices by batch, longest first; a batch's size times its longest row stays within ``max_tokens``."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def forward(model: PreTrainedModel, rows: Sequence[list[int]]) -> torch.Tensor:
    """[rows] outputs; padded on the right, where causal attention does not look."""
    length = max(len(row) for row in rows)
    input_BL = torch.full((len(rows), length), int(model.config.pad_token_id))
    mask_BL = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        input_BL[index, : len(row)] = torch.tensor(row)
        mask_BL[index, : len(row)] = 1
    device = model.device
    return model(input_ids=input_BL.to(device), attention_mask=mask_BL.to(device)).logits.squeeze(-1)


def encode_conversation(tokenizer: "PreTrainedTokenizerFast", messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a whole conversation in the reward model's own template."""
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    return encode(tokenizer, text)


_standing: dict[str, RewardModel] = {}


def standing_reward_model(config: RewardModelConfig) -> RewardModel:
    """Loaded once a process."""
    key = config.model_dump_json()
    if key not in _standing:
        _standing[key] = RewardModel(config)
    return _standing[key]
