"""What a task to learn must provide. Add one: a class with these members in a file here, and its name in
``make.py``."""

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem. ``prompt_id`` alone is enough for the environment to find it again."""

    prompt_id: str
    text: str
    """What the user says; the policy's chat template is put around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The verifier's word on one response. A failure carries a reason and never a reward (it is not a 0)."""

    kind: Literal["score", "abstain", "failure"]
    reward: float | None = None
    is_exact: bool = False
    reason: str = ""


class Environment(Protocol):
    """Prompts in a fixed, seeded order, and a verifier."""

    def fingerprint(self) -> str:
        """Names the data and their order; a campaign refuses to resume on other data."""
        ...

    def train_prompt(self, position: int) -> Prompt:
        """The prompt at a position of the endless training stream; equal positions give equal prompts."""
        ...

    def held_out_prompts(self) -> list[Prompt]:
        """Prompts that never occur in training."""
        ...

    def demonstration(self, prompt: Prompt) -> str:
        """A right response, for a supervised warm start."""
        ...

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        """Judge a response; ``is_finished`` is False if the limit cut it off. Raising is a failure."""
        ...
