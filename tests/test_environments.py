"""Environments: fixed order, strict hold-out, and verifiers whose failures are not rewards."""

import pytest

from tasks.environment_config import EnvironmentConfig
from tasks.environments.make import make_environment
from tasks.environments.pool import Call
from tasks.environments.scorer import Scorer, judged
from tasks.environments.scoring import score_groups
from tasks.experience.records import Group
from tasks.policy.models.tokenizer import character_tokenizer, encode, prompt_ids
from tasks.schema import RolloutFrame, ScoredFrame, from_bytes, make_frame, to_bytes

REVERSE = make_environment(EnvironmentConfig(), seed=0)


def test_training_prompts_are_fixed_by_seed_and_position():
    again, other = (
        make_environment(EnvironmentConfig(), seed=0),
        make_environment(EnvironmentConfig(), seed=1),
    )
    stream = [REVERSE.train_prompt(i) for i in range(50)]
    assert stream == [again.train_prompt(i) for i in range(50)]
    assert stream != [other.train_prompt(i) for i in range(50)]
    assert REVERSE.fingerprint() == again.fingerprint() != other.fingerprint()


def test_held_out_prompts_never_occur_in_training():
    held = {prompt.text for prompt in REVERSE.held_out_prompts()}
    trained = {REVERSE.train_prompt(position).text for position in range(2 * 9744)}
    assert len(held) == 256 and len(trained) == 9744 and not held & trained


def test_an_epoch_visits_every_prompt_once_with_ids_of_its_own():
    ids = [REVERSE.train_prompt(position).prompt_id for position in range(2 * 9744)]
    assert len(set(ids)) == len(ids)
    first, second = ids[:9744], ids[9744:]
    assert sorted(i.split("-")[1] for i in first) == sorted(i.split("-")[1] for i in second)


@pytest.mark.parametrize(
    ("response", "is_finished", "reward"),
    [
        ("4321", True, 1.0),
        ("4321", False, 0.25),  # right but never ended: 0.5 x 4/4, halved
        ("4312", True, 0.25),  # two of four positions
        ("432", True, 0.375),  # three of four
        ("43210", True, 0.4),  # four of five
        ("", True, 0.0),
        ("4321 ", True, 0.4),
        ("9999", True, 0.0),
    ],
)
def test_reverse_scores_by_right_positions(response, is_finished, reward):
    outcome = REVERSE.verify("000000000-1234", response, is_finished=is_finished)
    assert outcome.reward == pytest.approx(reward) and outcome.is_exact == (reward == 1.0)


def test_sort_digits_wants_them_ascending():
    sort = make_environment(EnvironmentConfig(name="sort_digits"), seed=0)
    assert sort.verify("000000000-4213", "1234", is_finished=True).is_exact
    assert sort.train_prompt(0).text.startswith("sort ")


def test_a_demonstration_is_exact():
    prompt = REVERSE.train_prompt(17)
    assert REVERSE.verify(prompt.prompt_id, REVERSE.demonstration(prompt), is_finished=True).is_exact


class Broken:
    def verify(self, prompt_id, response, *, is_finished):
        raise TimeoutError("verifier service is down")


def test_a_crashed_verifier_is_a_failure_with_a_reason_not_a_zero():
    outcome = judged(Broken(), Call(prompt_id="x", turns=("4",)))
    assert (outcome.kind, outcome.reward) == ("failure", None) and "service is down" in outcome.reason


def test_scoring_keeps_groups_handles_and_tokens_apart():
    tokenizer = character_tokenizer()
    taken = []
    for number, answers in (("1234", ["4321", "1111"]), ("5678", ["8765", "5678"])):
        rows = [
            {
                "iteration": 0,
                "prompt_id": f"000000000-{number}",
                "sample_index": i,
                "policy_version": 0,
                "prompt_ids": [2, 3],
                "response_ids": [*encode(tokenizer, answer), tokenizer.eos_token_id],
                "behavior_logprob": [-1.0] * 5,
                "finish_reason": "stop",
            }
            for i, answer in enumerate(answers)
        ]
        payload = to_bytes(make_frame(rows, RolloutFrame))
        taken.append((f"handle-{number}", Group(group_id=number, num_samples=2, payload=payload)))
    scored = score_groups(taken, Scorer(REVERSE, tokenizer))
    assert [(handle, group.group_id) for handle, group in scored] == [
        ("handle-1234", "1234"),
        ("handle-5678", "5678"),
    ]
    for (_, before), (_, after) in zip(taken, scored, strict=True):
        frame = from_bytes(after.payload, schema=ScoredFrame)
        assert frame["is_exact"].to_list() == [True, False]
        rollouts = from_bytes(before.payload, schema=RolloutFrame)
        assert frame.select(rollouts.columns).equals(rollouts)


def test_the_chat_template_ends_with_the_assistants_turn():
    tokenizer = character_tokenizer()
    ids = prompt_ids(tokenizer, "reverse 12")
    assert tokenizer.decode(ids) == "<user>reverse 12<assistant>" and ids[
        -1
    ] == tokenizer.convert_tokens_to_ids("<assistant>")


def test_text_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="must spell the environment's text"):
        encode(character_tokenizer(), "\N{SNOWMAN}")
