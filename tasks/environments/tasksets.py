"""Tasksets of the library ``verifiers`` (extra ``verifiers``) as environments: their prompts, their rewards.

A single turn without a container: the campaign samples the response itself, the taskset's ``@reward``
functions judge it. A task that needs tools, a runtime or a system prompt of its own is refused, not played
differently.
"""

import asyncio
import inspect
import json
from typing import Any

from tasks.environment_config import VerifiersConfig
from tasks.environments.problems import Problem, ProblemEnvironment


def taskset_environment(config: VerifiersConfig, *, held_out: int, seed: int) -> ProblemEnvironment:
    """The first ``num_tasks`` tasks. Rewards are the weighted sum of the taskset's, which must lie in [0,
    1]."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    settings = loaders.taskset_config_type(config.taskset)
    taskset = loaders.load_taskset(settings(id=config.taskset, **json.loads(config.options)))
    by_text: dict[str, Any] = {}
    for task in taskset.take(config.num_tasks):
        _require_one_turn(task, config.taskset)
        by_text.setdefault(task.data.prompt_text, task)
    tasks = list(by_text.values())

    def score(index: int, response: str) -> float:
        return asyncio.run(_reward(vf, tasks[index], response))

    problems = [Problem(text=text, answer=_answer(task)) for text, task in by_text.items()]
    name = f"verifiers.{config.taskset}"
    return ProblemEnvironment(problems, score=score, name=name, held_out=held_out, seed=seed)


async def _reward(vf: Any, task: Any, response: str) -> float:
    from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.trace import AgentInfo, TraceTask  # pyright: ignore[reportMissingImports]

    nodes = [
        MessageNode(message=vf.UserMessage(content=task.data.prompt_text)),
        MessageNode(message=vf.AssistantMessage(content=response), parent=0, sampled=True),
    ]
    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
    )
    await task.score(trace)
    total = sum(reward.value for reward in trace.rewards.values() if reward is not None)
    if not trace.rewards or not 0 <= total <= 1:
        raise ValueError(f"the rewards of a taskset must add up to 0 to 1, got {trace.rewards}")
    return float(total)


def _require_one_turn(task: Any, name: str) -> None:
    needs_runtime = [
        hook.__name__
        for hook in task.hooks("reward")
        if (found := inspect.signature(hook).parameters.get("runtime"))
        and found.default is inspect.Parameter.empty
    ]
    reasons = {
        "a container": task.NEEDS_CONTAINER or task.data.image,
        "a runtime for its rewards": needs_runtime,
        "tools": task.toolsets(task.config),
        "a system prompt": task.data.system_prompt,
        "a text or a single user message as prompt": not isinstance(task.data.prompt, str)
        and [message.role for message in task.data.prompt or []] != ["user"],
    }
    if found := [reason for reason, is_needed in reasons.items() if is_needed]:
        raise ValueError(
            f"verifiers.taskset {name!r} must be of single turns that need nothing but a response, got a "
            f"task that needs {', '.join(found)}. Choose another taskset."
        )


def _answer(task: Any) -> str:
    """For a warm start, where the taskset's rows hold an answer by that name."""
    return str(getattr(task.data, "answer", ""))
