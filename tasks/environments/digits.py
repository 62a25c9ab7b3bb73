"""Rearrange a few digits: a problem small enough for a random policy to learn by reward alone."""

import functools
import random
from collections.abc import Callable, Iterable

from tasks.environments.protocol import Outcome, Prompt

PARTIAL_CREDIT = 0.5
"""Most that a wrong answer earns; scaled by the share of its positions that are right."""


def reverse(digits: str) -> Iterable[str]:
    return reversed(digits)


class DigitsEnvironment:
    """All numbers of ``num_digits`` digits in an order drawn from the seed; the first ``num_held_out`` are
    held out.

    Reward 1.0 for the exact answer, else up to 0.5 by the share of right positions, halved if it did not end.
    """

    is_trusted = True

    def __init__(
        self,
        *,
        name: str,
        transform: Callable[[str], Iterable[str]],
        num_digits: int,
        num_held_out: int,
        seed: int,
    ):
        self.name, self.transform, self.num_digits, self.num_held_out, self.seed = (
            name, transform, num_digits, num_held_out, seed,
        )  # fmt: skip
        order = list(range(10**num_digits))
        random.Random(f"{name}/{num_digits}").shuffle(
            order
        )  # the same split for every seed: scores stay comparable
        self.held_out, self.train = order[:num_held_out], order[num_held_out:]

    def fingerprint(self) -> str:
        return f"{self.name}/{self.num_digits}/{self.num_held_out}/{self.seed}"

    def train_prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.train))
        return self._prompt(self._epoch_order(epoch)[index], f"{position:09d}")

    def held_out_prompts(self) -> list[Prompt]:
        return [self._prompt(number, "held") for number in self.held_out]

    def demonstration(self, prompt: Prompt) -> str:
        return self._answer(prompt.prompt_id)

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        answer = self._answer(prompt_id)
        if response == answer and is_finished:
            return Outcome(kind="score", reward=1.0, is_exact=True)
        right = sum(a == b for a, b in zip(answer, response, strict=False)) / max(len(answer), len(response))
        return Outcome(kind="score", reward=PARTIAL_CREDIT * right * (1.0 if is_finished else 0.5))

    def _prompt(self, number: int, position: str) -> Prompt:
        digits = f"{number:0{self.num_digits}d}"
        return Prompt(prompt_id=f"{position}-{digits}", text=f"{self.name.split('_')[0]} {digits}")

    def _answer(self, prompt_id: str) -> str:
        return "".join(self.transform(prompt_id.rsplit("-", 1)[1]))

    @functools.lru_cache(maxsize=4)  # noqa: B019 - an environment lives as long as its task
    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(self.train)
        random.Random(f"{self.fingerprint()}/{epoch}").shuffle(order)
        return order
