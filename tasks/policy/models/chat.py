"""A policy's chat template, applied once: text to tokens for prompts and replies, and back for verifiers.

What the policy sampled is never rendered again. A conversation grows by tokens: prompt, sampled turn, the
tokens of the reply with what the template puts around it, sampled turn, ... That is the conversation the
template would render only if it leaves earlier messages as they were; one that does not (it drops reasoning
from earlier turns, trims, or puts words into the generation prompt) is refused.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tasks.policy.models.tokenizer import encode, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ASKED, ANSWERED, REPLIED = "\u2063asked\u2063", "\u2063answered\u2063", "\u2063replied\u2063"
ANSWERS = (ANSWERED, f"<think>\n{ANSWERED}\n</think>\n\n{ANSWERED}", f" {ANSWERED}\n")
"""Turns on which a template may not stumble: plain, with reasoning, with white space at its ends."""


class Chat:
    """Texts and tokens of one policy's conversations."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self.tokenizer = tokenizer
        self._prompt_frame: tuple[str, str] | None = None
        self._reply_frame: tuple[str, str] | None = None

    def prompt_ids(self, text: str) -> list[int]:
        """A user's message and the generation prompt."""
        return prompt_ids(self.tokenizer, text)

    def prompt_text(self, ids: Sequence[int]) -> str:
        """What was put into the template."""
        if self._prompt_frame is None:
            head, _, tail = self._render([_message("user", ASKED)], is_prompt=True).partition(ASKED)
            self._prompt_frame = (head, tail)
        return _unframed(str(self.tokenizer.decode(list(ids))), self._prompt_frame)

    def reply_ids(self, text: str) -> list[int]:
        """Tokens between the end of a sampled turn and the start of the next, with a reply in them."""
        before, after = self.reply_frame()
        return encode(self.tokenizer, before + text + after)

    def reply_frame(self) -> tuple[str, str]:
        """What the template puts before and after a reply; refuses one that breaks prefixes."""
        if self._reply_frame is None:
            frames = {self._frame_after(answer) for answer in ANSWERS}
            if len(frames) > 1:
                raise self._breaks(f"what follows a turn depends on the turn: {sorted(frames)}")
            self._reply_frame = frames.pop()
        return self._reply_frame

    def conversation(
        self, response_ids: Sequence[int], chosen: Sequence[bool] | None, *, is_finished: bool
    ) -> tuple[list[str], list[str]]:
        """(turns of the policy, replies between them) of a response, without the tokens that end turns."""
        if chosen is None:
            return [self._turn(response_ids, is_ended=is_finished)], []
        turns, replies, start = [], [], 0
        for is_chosen, part in groupby(chosen):
            end = start + len(list(part))
            ids, start = response_ids[start:end], end
            if is_chosen:
                turns.append(self._turn(ids, is_ended=is_finished or end < len(response_ids)))
            else:
                replies.append(_unframed(str(self.tokenizer.decode(list(ids))), self.reply_frame()))
        return turns, replies

    def messages(
        self, prompt: Sequence[int], turns: Sequence[str], replies: Sequence[str]
    ) -> list[dict[str, str]]:
        """The conversation as a list of chat messages, for another model's template."""
        found = [_message("user", self.prompt_text(prompt))]
        for index, turn in enumerate(turns):
            found.append(_message("assistant", turn))
            if index < len(replies):
                found.append(_message("user", replies[index]))
        return found

    def _turn(self, ids: Sequence[int], *, is_ended: bool) -> str:
        return str(self.tokenizer.decode(list(ids[:-1] if is_ended else ids)))

    def _frame_after(self, answer: str) -> tuple[str, str]:
        asked = [_message("user", ASKED)]
        answered = [*asked, _message("assistant", answer)]
        prompt = self._render(asked, is_prompt=True)
        closed = self._render(answered, is_prompt=False)
        whole = self._render([*answered, _message("user", REPLIED)], is_prompt=True)
        begin = prompt + answer + str(self.tokenizer.eos_token)
        for name, text, prefix in (("a turn", closed, begin), ("a reply", whole, begin)):
            if not text.startswith(prefix):
                raise self._breaks(f"{prefix!r} became {text[: len(prefix)]!r} when {name} was appended")
        before, found, after = whole[len(begin) :].partition(REPLIED)
        if not found:
            raise self._breaks(f"the reply is not in {whole!r}")
        return before, after

    def _breaks(self, how: str) -> ValueError:
        return ValueError(
            "a chat template must leave earlier messages as they were when one is appended (multi-turn "
            f"training never renders sampled tokens again), got a template that does not: {how}. Give the "
            "policy's folder a template that keeps whole turns and ends them with its eos token."
        )

    def _render(self, messages: list[dict[str, str]], *, is_prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_prompt)
        )


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _unframed(text: str, frame: tuple[str, str]) -> str:
    return text.removeprefix(frame[0]).removesuffix(frame[1])
