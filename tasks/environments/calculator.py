"""Sums with a calculator: the multi-turn example.

The policy may say ``=12+34`` and reads ``46``, then answers. Or it answers at once; what counts is the
answer.
"""

import random
import re
from collections.abc import Sequence

from tasks.environment_config import CalculatorConfig
from tasks.environments.order import PromptOrder, split
from tasks.environments.protocol import Outcome, Prompt

CALL = re.compile(r"=((?:\d{1,6}[-+*]){0,7}\d{1,6})")
TOKEN = re.compile(r"\d+|[-+*]")
MAX_PROMPTS = 20_000
CALL_CREDIT = 0.3
"""Reward of a wrong answer after a call that works on the sum that was asked; digits' share adds as much."""


class CalculatorEnvironment:
    """Expressions of ``num_terms`` terms; the answer is their value, in decimal."""

    is_trusted = True  # bounded integers of at most eight factors of six digits

    def __init__(self, config: CalculatorConfig, *, held_out: int, seed: int) -> None:
        self.config, self.seed, self.max_turns = config, seed, config.max_turns
        self.expressions = _expressions(config)
        key = f"calculator/{config.model_dump_json()}"
        self.train, self.held_out = split(len(self.expressions), held_out=held_out, key=key)
        self.order = PromptOrder(len(self.train), key=self.fingerprint())

    def fingerprint(self) -> str:
        return f"calculator/{self.config.model_dump_json()}/{len(self.held_out)}/{self.seed}"

    def train_prompt(self, position: int) -> Prompt:
        _, place = self.order.at(position)
        return self._prompt(self.expressions[self.train[place]], f"{position:09d}")

    def held_out_prompts(self) -> list[Prompt]:
        return [self._prompt(self.expressions[index], "held") for index in self.held_out]

    def demonstration(self, prompt: Prompt) -> str:
        return str(evaluate(prompt.text))

    def demonstration_turns(self, prompt: Prompt) -> list[str]:
        return [f"={prompt.text}", self.demonstration(prompt)]

    def reply(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """The calculator's word on a call; an answer ends the conversation."""
        if not turns[-1].startswith("=") or len(turns) >= self.max_turns:
            return None
        found = CALL.fullmatch(turns[-1])
        return str(evaluate(found.group(1))) if found else "error"

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        return self.verify_turns(prompt_id, [response], is_finished=is_finished)

    def verify_turns(self, prompt_id: str, turns: Sequence[str], *, is_finished: bool) -> Outcome:
        expression = prompt_id.split("~", 1)[1]
        answer = str(evaluate(expression))
        if is_finished and turns[-1] == answer:
            return Outcome(kind="score", reward=1.0, is_exact=True)
        called = any(turn == f"={expression}" for turn in turns[:-1])
        said = turns[-1] if is_finished and called else ""
        right = sum(a == b for a, b in zip(answer, said, strict=False)) / max(len(answer), len(said), 1)
        return Outcome(kind="score", reward=CALL_CREDIT * (called + right))

    def _prompt(self, expression: str, position: str) -> Prompt:
        return Prompt(prompt_id=f"{position}~{expression}", text=expression)


def evaluate(expression: str) -> int:
    """Value of terms joined by ``+ - *``, products first; raises on anything else."""
    tokens = TOKEN.findall(expression)
    if "".join(tokens) != expression or len(tokens) % 2 == 0:
        raise ValueError(f"an expression must be terms joined by + - *, got {expression!r}.")
    total, product, sign = 0, int(tokens[0]), 1
    for operator, term in zip(tokens[1::2], tokens[2::2], strict=True):
        if operator == "*":
            product *= int(term)
        else:
            total += sign * product
            product, sign = int(term), 1 if operator == "+" else -1
    return total + sign * product


def _expressions(config: CalculatorConfig) -> list[str]:
    """Distinct ones in a fixed order, at most ``MAX_PROMPTS``."""
    chance, found = random.Random(f"calculator/{config.model_dump_json()}"), {}
    possible = (config.largest_term + 1) ** config.num_terms * len(set(config.operators)) ** (
        config.num_terms - 1
    )
    for _ in range(20 * MAX_PROMPTS):
        if len(found) >= min(MAX_PROMPTS, possible // 2):
            break
        terms = [str(chance.randint(0, config.largest_term)) for _ in range(config.num_terms)]
        signs = [chance.choice(config.operators) for _ in terms[1:]]
        found["".join(a + b for a, b in zip(terms, [*signs, ""], strict=True))] = None
    return list(found)
