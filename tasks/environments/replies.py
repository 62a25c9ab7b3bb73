"""What a multi-turn environment says to the policy: in this process if it is trusted, else in the pool."""

from typing import Any

from tasks.config import CampaignConfig
from tasks.environments.pool import Call
from tasks.environments.protocol import MultiTurnEnvironment, Replies, Reply, Talks, is_trusted
from tasks.environments.scorer import environment_pool
from tasks.environments.template import answer_call
from tasks.say import say


def environment_replies(config: CampaignConfig, environment: MultiTurnEnvironment) -> Replies:
    """A function from (prompt id, turns) of several conversations to replies. A tool that raises, hangs or
    grows fails its sample alone; the reason goes to the log."""

    def run(talks: Talks) -> list[Reply]:
        calls = [Call(prompt_id=name, turns=turns, call="reply") for name, turns in talks]
        if is_trusted(environment):
            answers = [answer_call(environment, call.as_dict()) for call in calls]
        else:
            answers = environment_pool(config).run(calls)
        replies = [_reply(answer) for answer in answers]
        failed = [a for a, (has_answered, _) in zip(answers, replies, strict=True) if not has_answered]
        if failed:
            reason = failed[0].get("reason") or "no text"
            say("generate", f"{len(failed)} of {len(calls)} turns were not answered; first: {reason}")
        return replies

    return run


def _reply(answer: dict[str, Any]) -> Reply:
    text = answer.get("text")
    if answer.get("kind") != "score" or not isinstance(text, str | None):
        return False, None
    return True, text
