"""Problems and scorers of reasoning-gym (extra ``environments``)."""

import json
import re
from typing import Any

from tasks.environment_config import ReasoningGymConfig
from tasks.environments.problems import Problem, ProblemEnvironment

GENERATOR_SEED = 20260101
"""The same problems for every campaign: its seed orders them."""


def reasoning_environment(config: ReasoningGymConfig, *, held_out: int, seed: int) -> ProblemEnvironment:
    """The generator's problems with its own scorer. What it raises on a response is a failure."""
    import reasoning_gym

    if config.dataset not in reasoning_gym.factory.DATASETS:
        raise ValueError(
            f"reasoning_gym.dataset must be one of its {len(reasoning_gym.factory.DATASETS)} generators, got "
            f"{config.dataset!r}. Known: {', '.join(sorted(reasoning_gym.factory.DATASETS))}."
        )
    dataset = reasoning_gym.create_dataset(
        config.dataset, seed=GENERATOR_SEED, size=config.size, **json.loads(config.options)
    )
    entries: dict[str, dict[str, Any]] = {}
    for entry in dataset:
        entries.setdefault(_asked(entry["question"], config), entry)
    by_index = list(entries.values())

    def score(index: int, response: str) -> float:
        entry = by_index[index]
        if config.lowercase:
            entry = {**entry, "answer": entry["answer"].lower()}
        return float(dataset.score_answer(answer=response, entry=entry))

    problems = [
        Problem(text=text, answer=entry["answer"].lower() if config.lowercase else entry["answer"])
        for text, entry in entries.items()
    ]
    return ProblemEnvironment(
        problems, score=score, name=f"reasoning_gym.{config.dataset}", held_out=held_out, seed=seed
    )


def _asked(question: str, config: ReasoningGymConfig) -> str:
    text = question.lower() if config.lowercase else question
    if not config.pattern:
        return text.strip()
    found = re.search(config.pattern, text)
    if found is None or not found.groups():
        raise ValueError(
            "reasoning_gym.pattern must match every question and have a group, got "
            f"{config.pattern!r} and the question {text!r}. Mend the pattern, or leave it empty."
        )
    return found.group(1).strip()
