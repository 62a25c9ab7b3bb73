"""Several environments by weight, with a curriculum: weights that change over the training prompts.

Positions are dealt in blocks. Within a block each part gets its share to the nearest prompt, and what
rounding owes it is paid later, so shares are exact in the long run and a position alone says which prompt it
is.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.environments.order import content_digest
from tasks.environments.protocol import (
    Environment,
    Outcome,
    Prompt,
    is_multi_turn,
    is_trusted,
    known_prompts,
    verify,
)

BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    environment: Environment
    weight: float
    final_weight: float


class MixedEnvironment:
    """Prompts of its parts; each is judged, and answered, by the part it came from."""

    def __init__(self, shares: Sequence[Share], *, curriculum_prompts: int, seed: int) -> None:
        self.shares, self.curriculum_prompts, self.seed = list(shares), curriculum_prompts, seed
        self.is_trusted = all(is_trusted(share.environment) for share in shares)
        turns = [share.environment.max_turns for share in shares if is_multi_turn(share.environment)]
        self.max_turns = max(turns, default=1)
        self._dealt: list[tuple[list[int], list[int]]] = []  # of each block: parts by place, counts before it
        self._owed = [0.0] * len(self.shares)
        self._counts = [0] * len(self.shares)

    def fingerprint(self) -> str:
        parts = [f"{s.environment.fingerprint()}*{s.weight}->{s.final_weight}" for s in self.shares]
        return f"mix/{content_digest(parts)}/{self.curriculum_prompts}/{self.seed}"

    def train_prompt(self, position: int) -> Prompt:
        block, place = divmod(position, BLOCK)
        while len(self._dealt) <= block:
            self._deal(len(self._dealt))
        parts, before = self._dealt[block]
        part = parts[place]
        inner = before[part] + parts[:place].count(part)
        return self._named(part, self.shares[part].environment.train_prompt(inner))

    def all_prompts(self) -> Iterator[Prompt]:
        for part, share in enumerate(self.shares):
            yield from (self._named(part, prompt) for prompt in known_prompts(share.environment))

    def held_out_prompts(self) -> list[Prompt]:
        return [
            self._named(part, prompt)
            for part, share in enumerate(self.shares)
            for prompt in share.environment.held_out_prompts()
        ]

    def demonstration(self, prompt: Prompt) -> str:
        environment, inner = self._part(prompt.prompt_id)
        return environment.demonstration(Prompt(prompt_id=inner, text=prompt.text))

    def demonstration_turns(self, prompt: Prompt) -> list[str]:
        environment, inner = self._part(prompt.prompt_id)
        prompt = Prompt(prompt_id=inner, text=prompt.text)
        if is_multi_turn(environment):
            return environment.demonstration_turns(prompt)
        return [environment.demonstration(prompt)]

    def reply(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        environment, inner = self._part(prompt_id)
        return environment.reply(inner, turns) if is_multi_turn(environment) else None

    def verify(self, prompt_id: str, response: str, *, is_finished: bool) -> Outcome:
        return self.verify_turns(prompt_id, [response], is_finished=is_finished)

    def verify_turns(self, prompt_id: str, turns: Sequence[str], *, is_finished: bool) -> Outcome:
        environment, inner = self._part(prompt_id)
        return verify(environment, inner, turns, is_finished=is_finished)

    def _deal(self, block: int) -> None:
        done = min(block * BLOCK / self.curriculum_prompts, 1.0) if self.curriculum_prompts else 0.0
        weights = [s.weight + (s.final_weight - s.weight) * done for s in self.shares]
        wanted = [
            owed + BLOCK * weight / sum(weights) for owed, weight in zip(self._owed, weights, strict=True)
        ]
        counts = [max(int(share), 0) for share in wanted]
        by_rest = sorted(range(len(wanted)), key=lambda part: (counts[part] - wanted[part], part))
        for part in by_rest[: BLOCK - sum(counts)]:
            counts[part] += 1
        self._owed = [share - count for share, count in zip(wanted, counts, strict=True)]
        places = [part for part, count in enumerate(counts) for _ in range(count)][:BLOCK]
        random.Random(f"mix/{self.seed}/{block}").shuffle(places)
        self._dealt.append((places, list(self._counts)))
        for part in places:
            self._counts[part] += 1

    def _named(self, part: int, prompt: Prompt) -> Prompt:
        return Prompt(prompt_id=f"{part}:{prompt.prompt_id}", text=prompt.text)

    def _part(self, prompt_id: str) -> tuple[Environment, str]:
        part, inner = prompt_id.split(":", 1)
        return self.shares[int(part)].environment, inner
