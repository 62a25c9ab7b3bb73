"""Say a digit larger than each that was shown: what a reward model is taught to prefer, with a known truth.

The policy is rewarded by a model that saw pairs of responses; this environment's verifier is the truth that
the model stands for, so a report can show both and the gap between them.
"""

import random
from collections.abc import Iterator

from tasks.environments.order import PromptOrder, split
from tasks.environments.protocol import Outcome, Prompt


class LargeDigitsEnvironment:
    """Any ``num_digits`` digits may be the answer; the truth is their mean, as a share of nine.

    Exact is an answer of nothing but eights and nines. A wrong length is 0.
    """

    is_trusted = True

    def __init__(self, *, num_digits: int, num_held_out: int, seed: int) -> None:
        self.num_digits, self.seed = num_digits, seed
        self.train, self.held_out = split(10**num_digits, held_out=num_held_out, key=f"large/{num_digits}")
        self.order = PromptOrder(len(self.train), key=self.fingerprint())

    def fingerprint(self) -> str:
        return f"large_digits/{self.num_digits}/{len(self.held_out)}/{self.seed}"

    def train_prompt(self, position: int) -> Prompt:
        _, place = self.order.at(position)
        return self._prompt(self.train[place], f"{position:09d}")

    def held_out_prompts(self) -> list[Prompt]:
        return [self._prompt(number, "held") for number in self.held_out]

    def demonstration(self, prompt: Prompt) -> str:
        """Of the right form, no better than chance: what there is to learn is left to the reward."""
        return self._random(random.Random(f"demonstration/{prompt.prompt_id}"))

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        is_form = len(response) == self.num_digits and response.isascii() and response.isdigit()
        if not is_finished or not is_form:
            return Outcome(kind="score", reward=0.0)
        digits = [int(digit) for digit in response]
        return Outcome(
            kind="score", reward=sum(digits) / (9 * self.num_digits), is_exact=all(d >= 8 for d in digits)
        )

    def preference_pairs(self, *, seed: int) -> Iterator[tuple[Prompt, str, str]]:
        """Prompt, better and worse response, without end: some of wrong lengths, which a policy also
        tries."""
        chance, position = random.Random(f"pairs/{seed}"), 0
        while True:
            prompt = self.train_prompt(position)
            position += 1
            one, other = self._random(chance), self._candidate(chance)
            truth = [
                self.verify(prompt.prompt_id, text, is_finished=True).reward or 0.0 for text in (one, other)
            ]
            if truth[0] != truth[1]:
                yield (prompt, one, other) if truth[0] > truth[1] else (prompt, other, one)

    def _candidate(self, chance: random.Random) -> str:
        if chance.random() < 0.7:
            return self._random(chance)
        return "".join(chance.choice("0123456789") for _ in range(chance.randint(1, self.num_digits + 4)))

    def _random(self, chance: random.Random) -> str:
        return "".join(chance.choice("0123456789") for _ in range(self.num_digits))

    def _prompt(self, number: int, position: str) -> Prompt:
        digits = f"{number:0{self.num_digits}d}"
        return Prompt(prompt_id=f"{position}-{digits}", text=f"large {digits}")
