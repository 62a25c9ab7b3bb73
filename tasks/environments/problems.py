"""An environment made of a fixed list of problems: what most data is once it is read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tasks.environments.order import PromptOrder, content_digest, split
from tasks.environments.protocol import Outcome, Prompt

Verify = Callable[[int, str], float | None]
"""(index of the problem, response) -> score from 0 to 1, or None to abstain."""
TOLERANCE = 1e-6
"""Of a score that was summed up from parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    text: str
    answer: str


class ProblemEnvironment:
    """Problems with distinct texts, split and ordered; ``score`` judges finished responses."""

    def __init__(
        self, problems: Sequence[Problem], *, score: Verify, name: str, held_out: int, seed: int
    ) -> None:
        distinct = {problem.text: problem for problem in problems}
        self.problems, self.score, self.name, self.seed = list(distinct.values()), score, name, seed
        self.digest = content_digest(f"{p.text}\0{p.answer}" for p in self.problems)
        self.train, self.held_out = split(len(self.problems), held_out=held_out, key=f"{name}/{self.digest}")
        self.order = PromptOrder(len(self.train), key=self.fingerprint())

    def fingerprint(self) -> str:
        return f"{self.name}/{self.digest}/{len(self.held_out)}/{self.seed}"

    def train_prompt(self, position: int) -> Prompt:
        _, place = self.order.at(position)
        return self._prompt(self.train[place], f"{position:09d}")

    def held_out_prompts(self) -> list[Prompt]:
        return [self._prompt(index, "held") for index in self.held_out]

    def all_prompts(self) -> Iterator[Prompt]:
        return (self._prompt(index, "any") for index in range(len(self.problems)))

    def demonstration(self, prompt: Prompt) -> str:
        return self.problems[self.index(prompt.prompt_id)].answer

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        if not is_finished:  # an answer that was cut off is not known
            return Outcome(kind="score", reward=0.0)
        reward = self.score(self.index(prompt_id), response)
        if reward is None:
            return Outcome(kind="abstain", reason="the verifier could not judge it")
        if not -TOLERANCE <= reward <= 1 + TOLERANCE:  # NaN neither
            raise ValueError(f"score must return a number from 0 to 1, or None to abstain, got {reward}.")
        return Outcome(kind="score", reward=min(max(float(reward), 0.0), 1.0), is_exact=bool(reward >= 1.0))

    def index(self, prompt_id: str) -> int:
        return int(prompt_id.rsplit("-", 1)[1])

    def _prompt(self, index: int, position: str) -> Prompt:
        return Prompt(prompt_id=f"{position}-{index}", text=self.problems[index].text)
