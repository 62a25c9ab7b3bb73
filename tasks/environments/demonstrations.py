"""Right answers as tokens, for a supervised warm start."""

from tasks.environments.protocol import Environment, Prompt, is_multi_turn
from tasks.policy.models.chat import Chat
from tasks.policy.models.tokenizer import encode


def demonstrated(environment: Environment, chat: Chat, prompt: Prompt) -> tuple[list[int], list[bool]]:
    """Response tokens of a demonstration, and which of them the policy is taught: its turns, not the
    replies."""
    turns = [environment.demonstration(prompt)]
    if is_multi_turn(environment):
        turns = environment.demonstration_turns(prompt)
    ids: list[int] = []
    mask: list[bool] = []
    for number, turn in enumerate(turns, start=1):
        said = [*encode(chat.tokenizer, turn), int(chat.tokenizer.eos_token_id)]  # pyright: ignore[reportArgumentType]
        ids, mask = ids + said, mask + [True] * len(said)
        reply = None
        if is_multi_turn(environment) and number < len(turns):
            reply = environment.reply(prompt.prompt_id, turns[:number])
        if reply is not None:
            heard = chat.reply_ids(reply)
            ids, mask = ids + heard, mask + [False] * len(heard)
    return ids, mask
