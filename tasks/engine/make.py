"""The engine and the distribution that a configuration names."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.config import CampaignConfig
from tasks.engine.notices import Departure
from tasks.engine.protocol import Engine, SamplingParams
from tasks.engine.turns import Dialogue
from tasks.engine.worker import RolloutWorker
from tasks.experience.buffer import ExperienceBuffer
from tasks.rollout_config import RolloutConfig
from tasks.say import say
from tasks.sglang_config import SglangConfig

if TYPE_CHECKING:
    from tasks.engine.sglang import Fleet
    from tasks.environments.protocol import Environment


def make_engine(config: RolloutConfig, *, dtype: str) -> Engine:
    """The configured engine, and no other: there is no fallback."""
    if config.engine == "sglang":
        return _sglang_fleet(
            config.sglang.model_dump_json(), config.record_routing == "experts", dtype
        ).view()
    import torch

    from tasks.engine.embedded import EmbeddedEngine

    return EmbeddedEngine(batch_size=config.batch_size, dtype=getattr(torch, dtype))


@functools.cache
def _sglang_fleet(config_json: str, routing: bool, dtype: str) -> "Fleet":
    """One for all tasks that a process runs: a server outlives a task and takes the next version in place."""
    from tasks.engine.sglang import Fleet

    config = SglangConfig.model_validate_json(config_json)
    folder = Path(tempfile.mkdtemp(prefix="moe-rl-sglang-"))
    say("engine", f"SGLang's log: {folder / 'server.log'}" if not config.urls else f"SGLang at {config.urls}")
    return Fleet(config, dtype=dtype, folder=folder, routing=routing)


def portions_at_once(rollout: RolloutConfig) -> int:
    """Leases that a worker samples at the same time: as configured, or by the engine."""
    workers = 1 if rollout.pool == "standing" else rollout.workers  # how many stand is not configured
    share = min(rollout.num_portions // workers, 4) if rollout.engine == "sglang" else 1
    return rollout.portions_at_once or max(share, 1)


def make_workers(
    config: CampaignConfig,
    engine: Engine,
    buffer: ExperienceBuffer,
    *,
    folder: Path,
    name: str,
    departure: Departure,
    required_version: int | None = None,
) -> list[RolloutWorker]:
    """As many configured workers as portions are to be sampled at once, around one engine that holds the
    policy in ``folder``."""
    engines = [engine]
    at_once = portions_at_once(config.rollout)
    if at_once > 1:
        from tasks.engine.sglang import SglangEngine

        assert isinstance(engine, SglangEngine), "the configuration allows it for no other"
        engines += [engine.fleet.view() for _ in range(at_once - 1)]
    rollout, environment = config.rollout, None
    if config.environment.may_answer:
        from tasks.environments.make import make_environment

        environment = make_environment(config.environment, seed=config.seed)
    return [
        RolloutWorker(
            engine=one,
            buffer=buffer,
            name=f"{name}+{number}" if number else name,
            params=replace(sampling_params(rollout, folder), record_routing=rollout.record_routing),
            base_seed=config.seed,
            group_size=rollout.group_size,
            chunk_samples=rollout.batch_size,
            is_deterministic=config.train.deterministic and rollout.is_repeatable,
            keeps_partial=rollout.partial == "keep",
            quota_groups=rollout.quota_groups,
            dialogue=make_dialogue(config, folder, environment),
            departure=departure,
            required_version=required_version,
        )
        for number, one in enumerate(engines)
    ]


def make_dialogue(config: CampaignConfig, folder: Path, environment: "Environment | None") -> Dialogue | None:
    """How the engine talks with the campaign's environment; None if that never answers, or was not made."""
    from tasks.environments.protocol import answers_turns
    from tasks.environments.replies import environment_replies
    from tasks.policy.models.chat import Chat
    from tasks.policy.models.tokenizer import context_room, load_tokenizer

    if environment is None or not answers_turns(environment):
        return None
    return Dialogue(
        chat=Chat(load_tokenizer(folder)),
        replies=environment_replies(config, environment),
        max_turns=environment.max_turns,
        room=context_room(folder, config.rollout),
    )


def sampling_params(config: RolloutConfig, folder: Path, *, greedy: bool = False) -> SamplingParams:
    """The configured distribution, with every end-of-sequence id of the policy in ``folder``."""
    from tasks.policy.models.tokenizer import stop_ids

    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=0.0 if greedy else config.temperature,
        top_p=config.top_p,
        stop_ids=stop_ids(folder),
    )
