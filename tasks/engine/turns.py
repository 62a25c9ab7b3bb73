"""Multi-turn sampling: token in, token out.

    response = turn 0, reply 0, turn 1, ...
    chosen = True * |turn 0|, False * |reply 0|, True * |turn 1|, ...

A turn's tokens and log-probabilities are the engine's own, kept as they came. A reply's tokens have
log-probability 0, are never trained, and are what the next turn was conditioned on. A conversation that
outgrows the policy's context is cut off there, as a response at ``max_new_tokens`` is.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.engine.protocol import Completion, Engine, FinishReason, Request, SamplingParams
from tasks.environments.protocol import Replies
from tasks.policy.models.chat import Chat
from tasks.say import say


@dataclass(kw_only=True, slots=True)
class Dialogue:
    """How a worker talks with an environment."""

    chat: Chat
    replies: Replies
    max_turns: int
    room: int
    """Tokens that a prompt and all that follows may have."""

    def __post_init__(self) -> None:
        self.chat.reply_frame()  # a template that breaks prefixes is refused before anything is sampled

    def generate(
        self, engine: Engine, prompt_names: Sequence[str], requests: Sequence[Request], params: SamplingParams
    ) -> list[list[Completion]]:
        """Whole conversations in the order of the requests and of their seeds."""
        first = engine.generate(requests, params)
        talks = [
            _Talk(name=name, prompt_ids=request.prompt_ids, seed=seed)
            for name, request in zip(prompt_names, requests, strict=True)
            for seed in request.seeds
        ]
        completions = [completion for group in first for completion in group]
        for talk, completion in zip(talks, completions, strict=True):
            talk.take(completion, self.chat)
        for turn in range(1, self.max_turns):
            going = self._answer([talk for talk in talks if talk.is_open])
            if not going:
                break
            for talk, group in zip(
                going, engine.generate([self._next(t, turn, params) for t in going], params), strict=True
            ):
                talk.take(group[0], self.chat)
        result = iter([talk.completion() for talk in talks])
        return [[next(result) for _ in request.seeds] for request in requests]

    def _next(self, talk: "_Talk", turn: int, params: SamplingParams) -> Request:
        """A turn counts as sampled already what of ``max_new_tokens`` the context has no room for."""
        ids = (*talk.prompt_ids, *talk.response_ids)
        lacking = max(0, len(ids) + params.max_new_tokens - self.room)
        return Request(prompt_ids=ids, seeds=(turn_seed(talk.seed, turn),), num_sampled=lacking)

    def _answer(self, talks: Sequence["_Talk"]) -> list["_Talk"]:
        """Append replies; returns the conversations that go on."""
        said = self.replies([(talk.name, tuple(talk.turns)) for talk in talks]) if talks else []
        for talk, (has_answered, text) in zip(talks, said, strict=True):
            if not has_answered:
                talk.finish_reason = "tool_failure"
            talk.is_open = has_answered and text is not None and self._hears(talk, text)
        return [talk for talk in talks if talk.is_open]

    def _hears(self, talk: "_Talk", text: str) -> bool:
        """Append a reply, if it can be and leaves room for a token; else it is not heard and ends the
        conversation."""
        try:
            ids = self.chat.reply_ids(text)
        except ValueError as error:
            say("generate", f"the reply to a turn of {talk.name} is not heard: {error}")
            talk.finish_reason = "tool_failure"
            return False
        if len(talk.prompt_ids) + len(talk.response_ids) + len(ids) >= self.room:
            talk.finish_reason = "length"
            return False
        talk.hear(ids)
        return True


@dataclass(kw_only=True, slots=True)
class _Talk:
    name: str
    prompt_ids: tuple[int, ...]
    seed: int
    turns: list[str] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    is_open: bool = True

    def take(self, completion: Completion, chat: Chat) -> None:
        self._extend(completion.response_ids, completion.logprobs, is_chosen=True)
        self.finish_reason = completion.finish_reason
        self.is_open = completion.finish_reason == "stop"  # a turn that was cut off gets no reply
        self.turns += chat.conversation(completion.response_ids, None, is_finished=self.is_open)[0]

    def hear(self, ids: list[int]) -> None:
        self._extend(ids, [0.0] * len(ids), is_chosen=False)

    def completion(self) -> Completion:
        return Completion(
            response_ids=self.response_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            chosen=self.chosen,
        )

    def _extend(self, ids: list[int], logprobs: list[float], *, is_chosen: bool) -> None:
        self.response_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.chosen.extend([is_chosen] * len(ids))


def turn_seed(seed: int, turn: int) -> int:
    """Of a later turn: unrelated to the seeds of other samples and to the steps of this one."""
    return int.from_bytes(hashlib.sha256(f"{seed}/turn {turn}".encode()).digest()[:8])
