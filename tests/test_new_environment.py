"""The environment that the README shows works as it stands there."""

import re
import sys
from pathlib import Path

import pytest

from tasks.checkpoint import open_campaign
from tasks.config import CampaignConfig, ConfigError
from tasks.environment_config import EnvironmentConfig
from tasks.environments.make import make_environment
from tasks.environments.pool import Call, VerifierPool

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
SHOWN = re.search(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def config(tmp_path, monkeypatch):
    assert SHOWN and len(SHOWN.group(1).splitlines()) < 60
    (tmp_path / "vowels.py").write_text(SHOWN.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("vowels", None)
    return EnvironmentConfig(name="module", module="vowels", held_out=32)


def test_the_readmes_environment_asks_splits_and_scores(config):
    environment = make_environment(config, seed=0)
    held = {prompt.text for prompt in environment.held_out_prompts()}
    trained = {environment.train_prompt(position).text for position in range(2 * (625 - 32))}
    assert len(held) == 32 and len(trained) == 625 - 32 and not held & trained
    prompt = environment.train_prompt(7)
    assert environment.verify(prompt.prompt_id, environment.demonstration(prompt), is_finished=True).is_exact


def test_its_verifier_runs_in_killable_processes(config):
    environment = make_environment(config, seed=0)
    prompts = [environment.train_prompt(position) for position in range(20)]
    pool = VerifierPool(
        environment=config.model_dump(mode="json"), seed=0, workers=2, max_workers=4, deadline_seconds=10.0,
        memory_mb=64,
    )  # fmt: skip
    answers = pool.run([Call(prompt_id=p.prompt_id, turns=(environment.demonstration(p),)) for p in prompts])
    pool.close()
    assert [answer["reward"] for answer in answers] == [1.0] * 20


def test_a_module_that_is_not_there_is_named(config):
    with pytest.raises(ValueError, match=r"environment\.module must name a module.*'nowhere'"):
        make_environment(config.model_copy(update={"module": "nowhere"}), seed=0)


SINGLE_TURN_ONLY = {
    "replay": (
        {"rollout": {"record_routing": "experts"}, "train": {"replay_routing": "experts"}},
        r"rollout\.partial must be 'drop' and record_routing 'none' .* as module does, .*replay_routing",
    ),
    "partial": ({"rollout": {"partial": "keep"}}, r"rollout\.partial must be 'drop' .*got partial='keep'"),
    "newest": (
        {
            "rollout": {"pool": "standing", "follow": "newest"}, "schedule": {"max_staleness": 1},
            "train": {"deterministic": False},
        },
        r"rollout\.follow must be 'required' .*, as module does, .* got 'newest'",
    ),
}  # fmt: skip
WITH_TURNS = """
import vowels

def make(*, options, **given):
    environment = vowels.make(options={}, **given)
    if options["turns"]:
        environment.max_turns = options["turns"]
        environment.verify_turns = lambda name, turns, is_finished: environment.verify(name, turns[-1])
    return environment
"""


@pytest.mark.parametrize("choice", SINGLE_TURN_ONLY)
def test_a_module_decides_at_launch_whether_it_answers_turns_by_what_it_makes(
    choice, config, store_folder, campaign, tmp_path
):
    """Any module was refused for what some of them do."""
    sections, refusal = SINGLE_TURN_ONLY[choice]
    (tmp_path / "with_turns.py").write_text(WITH_TURNS)

    def lineage(turns, store):
        made = {"module": "with_turns", "options": {"turns": turns}}
        chosen = CampaignConfig.model_validate(
            {
                "name": campaign, "checkpoint": {"store": str(store)},
                "environment": config.model_dump() | made, **sections,
            }
        )  # fmt: skip
        return open_campaign(
            config=chosen, name=None, iterations=None, learning_rate=None, store=None, fresh=True
        ).lineage

    assert [lineage(turns, store_folder) for turns in (0, 1)] == [1, 2]
    with pytest.raises(ConfigError, match=refusal):
        lineage(2, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_what_cannot_be_asked_is_refused_at_launch_before_a_lineage_is_begun(config, tmp_path):
    """It ended the second stage of a lineage that stayed, under 95 lines of traceback."""
    refused = (({"module": "nowhere"}, "must name a module"), ({"held_out": 625}, "held_out must be"))
    for change, says in refused:
        environment, store = {**config.model_dump(), **change}, {"store": str(tmp_path / "store")}
        campaign = CampaignConfig.model_validate({"environment": environment, "checkpoint": store})
        with pytest.raises(ConfigError, match=says):
            open_campaign(
                config=campaign, name=None, iterations=None, learning_rate=None, store=None, fresh=False
            )
    assert not (tmp_path / "store").exists()
