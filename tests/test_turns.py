"""Multi-turn: token in, token out; templates that would break that are refused; the calculator."""

import pytest
from policies import save_tiny_policy

from tasks.config import CampaignConfig
from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.make import make_dialogue
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang_format import request_body
from tasks.engine.turns import Dialogue, turn_seed
from tasks.environment_config import CalculatorConfig, EnvironmentConfig
from tasks.environments.calculator import CalculatorEnvironment, evaluate
from tasks.environments.demonstrations import demonstrated
from tasks.environments.make import make_environment
from tasks.environments.scorer import Sample, Scorer
from tasks.policy.models.chat import Chat
from tasks.policy.models.tokenizer import character_tokenizer

CALCULATOR = CalculatorEnvironment(CalculatorConfig(), held_out=64, seed=0)
TOKENIZER = character_tokenizer()
STOPS = frozenset({TOKENIZER.eos_token_id, *range(4, 24)})
"""Most digits and letters end a turn too, or a random policy would hardly ever end one."""
PARAMS = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=1.0, stop_ids=STOPS)


class Recorded(EmbeddedEngine):
    """Keeps what it was asked and what it sampled."""

    def __init__(self):
        super().__init__(batch_size=16)
        self.calls = []

    def generate(self, requests, params):
        completions = super().generate(requests, params)
        self.calls.append((list(requests), completions))
        return completions


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Recorded()
    engine.load(save_tiny_policy(tmp_path_factory.mktemp("policy"), family="qwen3_moe"), 0)
    return engine


def always(text):
    return lambda talks: [(True, text) for _ in talks]


def sample(engine, replies, *, max_turns=3, seeds=(5, 6, 7, 8), room=10**6):
    engine.calls.clear()
    chat = Chat(TOKENIZER)
    dialogue = Dialogue(chat=chat, replies=replies, max_turns=max_turns, room=room)
    requests = [Request(prompt_ids=tuple(chat.prompt_ids(text)), seeds=seeds) for text in ("12+34", "5+6")]
    return requests, dialogue.generate(engine, ["a", "b"], requests, PARAMS)


def test_trained_ids_are_the_sampled_ids_through_tool_calls(engine):
    """Complaint 13: a tokenizer that read its own text back gave other ids."""
    requests, groups = sample(engine, always("46"))
    reply = Chat(TOKENIZER).reply_ids("46")
    sampled = {}  # every turn the engine made, by the tokens it was conditioned on and its seed
    for asked, completions in engine.calls:
        for request, group in zip(asked, completions, strict=True):
            for seed, completion in zip(request.seeds, group, strict=True):
                sampled[request.prompt_ids, seed] = completion
    assert len(engine.calls) == 3
    for request, group in zip(requests, groups, strict=True):
        for seed, completion in zip(request.seeds, group, strict=True):
            ids, logprobs, chosen, turn = [], [], [], 0
            while True:
                made = sampled[(*request.prompt_ids, *ids), turn_seed(seed, turn) if turn else seed]
                ids += made.response_ids
                logprobs += made.logprobs
                chosen += [True] * len(made.response_ids)
                turn += 1
                if made.finish_reason != "stop" or turn == 3:
                    break
                ids, logprobs, chosen = (
                    ids + reply,
                    logprobs + [0.0] * len(reply),
                    chosen + [False] * len(reply),
                )
            assert (completion.response_ids, completion.logprobs, completion.chosen) == (
                ids,
                logprobs,
                chosen,
            )
            assert completion.finish_reason == made.finish_reason


def test_an_environment_that_says_nothing_gives_single_turns(engine):
    requests, groups = sample(engine, lambda talks: [(True, None) for _ in talks])
    assert len(engine.calls) == 1 and all(all(c.chosen) for group in groups for c in group)
    plain = engine.generate(requests, PARAMS)
    assert [[c.response_ids for c in g] for g in groups] == [[c.response_ids for c in g] for g in plain]


def test_a_tool_that_fails_fails_its_sample_and_no_other(engine):
    _, groups = sample(engine, lambda talks: [(name == "a", None) for name, _ in talks])
    assert {c.finish_reason for c in groups[0]} <= {"stop", "length"}
    ended = [c.finish_reason for c in groups[1]]
    assert "tool_failure" in ended and set(ended) <= {"tool_failure", "length"}
    scorer = Scorer(CALCULATOR, TOKENIZER)
    failed = Sample(prompt_id="0~5+6", prompt_ids=[1], response_ids=[9, 1], finish_reason="tool_failure")
    (outcome,) = scorer.outcomes([failed])
    assert (outcome.kind, outcome.reward) == ("failure", None) and outcome.reason.startswith("ToolFailure")


@pytest.mark.parametrize("room", [10, 16, 29, 60])
def test_a_conversation_that_outgrows_the_context_is_cut_off_there(engine, room):
    """Positions behind a context mean nothing to the embedded engine, and SGLang refuses the request, which
    ended the run. The longest of these conversations has 42 tokens where there is room."""
    _, groups = sample(engine, always("46"), max_turns=5, room=room)
    completions = [completion for group in groups for completion in group]
    later = [request for requests, _ in engine.calls[1:] for request in requests]
    assert bool(later) == (room > 10)
    for request in later:
        body = request_body(request, ["a"], PARAMS, vocab_size=60)
        budget = body["sampling_params"][0]["max_new_tokens"]
        assert budget == min(PARAMS.max_new_tokens, room - len(request.prompt_ids)) > 0
    assert all(completion.chosen[-1] for completion in completions)  # a reply without a turn is not heard
    reasons = [completion.finish_reason for completion in completions]
    assert set(reasons) <= {"stop", "length"} and ("length" in reasons) == (room < 60)


def test_a_reply_that_the_vocabulary_cannot_spell_fails_its_sample_and_no_other(engine):
    """It ended the run: a tool's words are known only once it speaks."""
    _, groups = sample(engine, lambda talks: [(True, "\u00e9" if name == "b" else None) for name, _ in talks])
    assert {c.finish_reason for c in groups[0]} == {"stop"}
    assert {c.finish_reason for c in groups[1]} == {"tool_failure"}


def with_template(template):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


PLAIN = TOKENIZER.chat_template


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("message['content'] }}", "(message['content'] | trim) }}"),
        PLAIN.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}"),
        PLAIN.replace("{{ '<eos>' }}", "{% if loop.last %}{{ '<eos>' }}{% endif %}"),
        PLAIN.replace("{{ '<eos>' }}", ""),
        PLAIN.replace("{{ '<assistant>' }}{% endif %}", "{{ '<assistant>think:' }}{% endif %}"),
        PLAIN.replace("in messages %}", "in messages[-1:] %}"),
    ],
    ids=["trims", "drops reasoning", "moves the end", "no end", "words in the prompt", "forgets"],
)
def test_a_template_that_breaks_prefixes_is_refused(template):
    assert template != PLAIN
    with pytest.raises(ValueError, match="a chat template must leave earlier messages as they were"):
        Dialogue(chat=Chat(with_template(template)), replies=always(None), max_turns=2, room=99)


def test_a_template_with_text_between_turns_is_kept_whole():
    chatml = (
        "{% for m in messages %}{{ '<' + m['role'] + '>:' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{{ ';' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>:' }}{% endif %}"
    )
    chat = Chat(with_template(chatml))
    assert chat.reply_frame() == (";<user>:", ";<assistant>:")
    assert chat.tokenizer.decode(chat.reply_ids("46")) == ";<user>:46;<assistant>:"
    prompt = chat.prompt_ids("12+34")
    ids = chat.tokenizer("=12+34<eos>;<user>:46;<assistant>:46<eos>", add_special_tokens=False)["input_ids"]
    chosen = [True] * 7 + [False] * len(chat.reply_ids("46")) + [True] * 3
    turns, replies = chat.conversation(ids, chosen, is_finished=True)
    assert (turns, replies) == (["=12+34", "46"], ["46"])
    rendered = chat.tokenizer.apply_chat_template(chat.messages(prompt, turns, replies), tokenize=False)
    assert rendered == chat.tokenizer.decode([*prompt, *ids]) + ";"


def test_a_turn_that_was_cut_off_keeps_its_last_token():
    chat = Chat(TOKENIZER)
    ids = TOKENIZER("46", add_special_tokens=False)["input_ids"]
    assert chat.conversation(ids, None, is_finished=False) == (["46"], [])
    assert chat.conversation([*ids, TOKENIZER.eos_token_id], None, is_finished=True) == (["46"], [])


def test_a_demonstration_teaches_the_policys_turns_alone():
    prompt = CALCULATOR.train_prompt(3)
    ids, mask = demonstrated(CALCULATOR, Chat(TOKENIZER), prompt)
    taught = TOKENIZER.decode([token for token, is_taught in zip(ids, mask, strict=True) if is_taught])
    answer = str(evaluate(prompt.text))
    assert taught == f"={prompt.text}<eos>{answer}<eos>"
    assert TOKENIZER.decode(ids) == f"={prompt.text}<eos><user>{answer}<assistant>{answer}<eos>"
    sample = Sample(
        prompt_id=prompt.prompt_id, prompt_ids=[1], response_ids=ids, finish_reason="stop", chosen=mask
    )
    assert Scorer(CALCULATOR, TOKENIZER).outcomes([sample])[0].is_exact


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["46"], 1.0),  # who can add needs no tool
        (["=12+34", "46"], 1.0),
        (["=12+34", "45"], 0.45),  # called, and one digit of two is right
        (["=12+34", "99"], 0.3),
        (["=12+35", "47"], 0.0),  # the sum of something else
        (["=12+34"], 0.0),
        ([""], 0.0),
        (["46."], 0.0),
    ],
)
def test_the_calculators_rewards(turns, reward):
    outcome = CALCULATOR.verify_turns("0~12+34", turns, is_finished=True)
    assert outcome.reward == pytest.approx(reward) and outcome.is_exact == (reward == 1.0)
    assert CALCULATOR.verify_turns("0~12+34", turns, is_finished=False).reward < 1.0


def test_the_calculator_answers_calls_once():
    assert CALCULATOR.reply("0~12+34", ["=12+34"]) == "46"
    assert CALCULATOR.reply("0~12+34", ["=12+"]) == CALCULATOR.reply("0~1", ["=2**9"]) == "error"
    assert CALCULATOR.reply("0~12+34", ["46"]) is None
    assert CALCULATOR.reply("0~12+34", ["=1+1", "=1+1"]) is None


@pytest.mark.parametrize(
    ("expression", "value"), [("2+3*4", 14), ("2*3+4*5-1", 25), ("7", 7), ("1-2-3", -4), ("007*2", 14)]
)
def test_arithmetic(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["", "+", "1+", "1++2", "__import__('os')", "2**3", "1/0"])
def test_what_is_no_arithmetic_is_refused(expression):
    with pytest.raises((ValueError, IndexError)):
        evaluate(expression)


def test_only_an_environment_that_answers_gets_a_dialogue(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    digits = make_environment(EnvironmentConfig(), seed=0)
    assert make_dialogue(CampaignConfig(), tmp_path, digits) is None
    config = CampaignConfig.model_validate({"environment": {"name": "calculator"}})
    dialogue = make_dialogue(config, tmp_path, CALCULATOR)
    assert (dialogue.max_turns, dialogue.room) == (2, 64)
    assert dialogue.replies([("0~1+2", ("=1+2",))]) == [(True, "3")]
