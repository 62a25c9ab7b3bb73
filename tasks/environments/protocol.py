"""What a task to learn must provide.

Add one: a class with the members of ``Environment`` in a file of its own, named by ``environment.module``
(README, "How to change it"), or in a file here and in ``make.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard

Kind = Literal["score", "abstain", "failure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem. ``prompt_id`` alone is enough for the environment to find it again."""

    prompt_id: str
    text: str
    """What the user says; the policy's chat template is put around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one scorer said of a response, on its own scale."""

    name: str
    kind: Kind
    value: float | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The word on one response. A failure carries a reason and never a reward (it is not a 0)."""

    kind: Kind
    reward: float | None = None
    is_exact: bool = False
    reason: str = ""
    parts: tuple[Part, ...] = ()
    """What it was made of; empty where the environment's verifier alone said it."""


class Environment(Protocol):
    """Prompts in a fixed, seeded order, and a verifier.

    A class attribute ``is_trusted = True`` lets the verifier run inside the scoring process: only for code
    that can neither hang nor grow. Every other verifier runs in a killable process of its own.
    """

    def fingerprint(self) -> str:
        """Names the data and their order; a campaign refuses to resume on other data."""
        ...

    def train_prompt(self, position: int) -> Prompt:
        """The prompt at a position of the endless training stream; equal positions give equal prompts. Ids
        must be unique among those of one iteration: put the position into them."""
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


class MultiTurnEnvironment(Environment, Protocol):
    """An environment that answers: a tool's output, or the next message of a user.

    ``turns`` are the policy's, oldest first. The tokens of a reply are read by the policy and never trained.
    A worker that samples several portions at once calls ``reply`` of one environment from several threads.
    """

    max_turns: int

    def reply(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """What the policy reads before its next turn; None ends the conversation."""
        ...

    def demonstration_turns(self, prompt: Prompt) -> list[str]:
        """Right turns, for a supervised warm start."""
        ...

    def verify_turns(self, prompt_id: str, turns: Sequence[str], *, is_finished: bool) -> Outcome:
        """Judge a whole conversation."""
        ...


Talks = Sequence[tuple[str, tuple[str, ...]]]
"""(prompt id, turns so far) of several conversations."""
Reply = tuple[bool, str | None]
"""Whether the environment answered, and what; None ends the conversation."""
Replies = Callable[[Talks], list[Reply]]


def known_prompts(environment: Environment) -> Iterable[Prompt]:
    """All prompts of an environment that lists them with a method ``all_prompts``; else held-out ones."""
    return getattr(environment, "all_prompts", environment.held_out_prompts)()


def is_multi_turn(environment: Environment) -> TypeGuard[MultiTurnEnvironment]:
    """Whether the environment judges whole conversations, of a single turn or more."""
    return hasattr(environment, "verify_turns")


def answers_turns(environment: Environment) -> TypeGuard[MultiTurnEnvironment]:
    """Whether the environment answers the policy's turns."""
    return is_multi_turn(environment) and environment.max_turns > 1


def verify(environment: Environment, prompt_id: str, turns: Sequence[str], *, is_finished: bool) -> Outcome:
    """One conversation's outcome, whichever kind of environment it is; raises what the verifier raises."""
    if is_multi_turn(environment):
        outcome = environment.verify_turns(prompt_id, turns, is_finished=is_finished)
    else:
        outcome = environment.verify(prompt_id, turns[-1], is_finished=is_finished)
    if not isinstance(outcome, Outcome):
        raise TypeError(f"verify must return an Outcome, got {type(outcome).__name__}")
    if (outcome.kind == "score") != isinstance(outcome.reward, int | float):
        raise TypeError(f"a score must have a reward and nothing else may, got {outcome}")
    return outcome


def is_trusted(environment: Environment) -> bool:
    """Whether its verifier may run inside the scoring process."""
    return bool(getattr(environment, "is_trusted", False))
