"""Which prompts a campaign is given: order, splits, mixes and curricula, files, reasoning-gym.

What these tests cannot see: files too large to hold as a list of problems.
"""

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import polars as pl
import pytest
import torch

from tasks.environment_config import EnvironmentConfig
from tasks.environments.make import make_environment
from tasks.environments.mix import BLOCK, MixedEnvironment, Share
from tasks.environments.order import PromptOrder, content_digest, split
from tasks.environments.pool import Call
from tasks.environments.problems import Problem, ProblemEnvironment
from tasks.environments.prompt_files import read_rows
from tasks.environments.protocol import Outcome
from tasks.environments.scorer import judged


def test_each_epoch_is_another_permutation_and_a_position_alone_names_its_prompt():
    order = PromptOrder(50, key="a")
    stream = [order.at(position) for position in range(150)]
    epochs = [[index for epoch, index in stream if epoch == number] for number in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    later = PromptOrder(50, key="a")  # a resumed campaign asks for no earlier position
    assert [later.at(position) for position in range(149, 60, -1)] == stream[149:60:-1]
    assert [PromptOrder(50, key="b").at(position) for position in range(50)] != stream[:50]


def test_the_split_depends_on_its_key_alone_and_leaves_no_prompt_out():
    train, held = split(40, held_out=10, key="k")
    assert len(held) == 10 and sorted(train + held) == list(range(40))
    assert (train, held) == split(40, held_out=10, key="k") != split(40, held_out=10, key="l")
    assert held != list(range(10)) and held != list(range(30, 40))
    with pytest.raises(ValueError, match=r"held_out must be below the 40 distinct prompts, got 40"):
        split(40, held_out=40, key="k")
    with pytest.raises(ValueError, match=r"the 0 distinct prompts, got 1\. Give it more\."):  # 0 is refused
        split(0, held_out=1, key="k")
    with pytest.raises(ValueError, match="must have prompts to train on, got 0"):
        PromptOrder(0, key="k")


def test_a_digest_tells_where_texts_are_cut():
    assert content_digest(["ab", "c"]) != content_digest(["a", "bc"]) != content_digest(["abc"])
    assert content_digest(["ab", "c"]) == content_digest(iter(["ab", "c"])) != content_digest(["c", "ab"])


def mixed(*parts, curriculum=0, seed=0):
    """Of digits environments: (name, weight, final weight)."""
    mix = [
        {"environment": {"name": name, "num_digits": 3, "held_out": 20}, "weight": first}
        | ({} if last is None else {"final_weight": last})
        for name, first, last in parts
    ]
    return make_environment(EnvironmentConfig(mix=mix, curriculum_prompts=curriculum), seed=seed)


THREE_TO_ONE = (("reverse_digits", 3.0, None), ("sort_digits", 1.0, None))


def part_of(prompt):
    return int(prompt.prompt_id.split(":")[0])


def test_a_mix_keeps_its_weights_and_hands_each_part_its_own_stream():
    mix = mixed(*THREE_TO_ONE)
    prompts = [mix.train_prompt(position) for position in range(4 * BLOCK)]
    assert Counter(map(part_of, prompts)) == {0: 3 * BLOCK, 1: BLOCK}
    for part, share in enumerate(mix.shares):
        own = [p for p in prompts if part_of(p) == part]
        inner = [share.environment.train_prompt(position) for position in range(len(own))]
        assert [p.prompt_id for p in own] == [f"{part}:{p.prompt_id}" for p in inner]
        assert [p.text for p in own] == [p.text for p in inner]
    places = [part_of(p) for p in prompts[:BLOCK]]
    assert places != sorted(places) and places != [part_of(p) for p in prompts[BLOCK : 2 * BLOCK]]


def test_shares_that_do_not_divide_a_block_come_out_even_in_the_long_run():
    parts = (("reverse_digits", 1.0, None), ("sort_digits", 1.0, None), ("reverse_digits", 1.0, None))
    mix = mixed(*parts)
    counts = Counter(part_of(mix.train_prompt(position)) for position in range(30 * BLOCK))
    assert set(counts.values()) == {10 * BLOCK}


def test_a_mix_resumes_anywhere_without_its_past():
    asked = [mixed(*THREE_TO_ONE).train_prompt(position) for position in (700, 3, 64, 63)]
    mix = mixed(*THREE_TO_ONE)
    stream = [mix.train_prompt(position) for position in range(701)]
    assert asked == [stream[700], stream[3], stream[64], stream[63]]
    other = mixed(*THREE_TO_ONE, seed=1)
    assert [part_of(other.train_prompt(i)) for i in range(BLOCK)] != [part_of(p) for p in stream[:BLOCK]]


def test_a_curriculum_goes_from_the_first_weights_to_the_last_and_stays():
    mix = mixed(("reverse_digits", 1.0, 0.0), ("sort_digits", 0.0, 1.0), curriculum=8 * BLOCK)
    shares = [
        sum(part_of(mix.train_prompt(block * BLOCK + place)) for place in range(BLOCK)) / BLOCK
        for block in range(12)
    ]
    # at the block's first prompt the second part's weight is block / 8, of a sum of 1
    assert shares[:9] == [block / 8 for block in range(9)] and shares[9:] == [1.0] * 3
    half = mixed(("reverse_digits", 1.0, 0.5), ("sort_digits", 0.0, 0.5), curriculum=2 * BLOCK)
    late = [part_of(half.train_prompt(position)) for position in range(2 * BLOCK, 8 * BLOCK)]
    assert Counter(late) == {0: 3 * BLOCK, 1: 3 * BLOCK}
    assert mix.fingerprint() != mixed(("reverse_digits", 1.0, 0.0), ("sort_digits", 0.0, 1.0),
                                      curriculum=4 * BLOCK).fingerprint()  # fmt: skip


def test_each_part_of_a_mix_judges_holds_out_and_demonstrates_its_own():
    mix = mixed(*THREE_TO_ONE)
    held = mix.held_out_prompts()
    assert Counter(map(part_of, held)) == {0: 20, 1: 20}
    for prompt in (held[0], held[-1], mix.train_prompt(5)):
        good = mix.demonstration(prompt)
        assert mix.verify(prompt.prompt_id, good, is_finished=True).is_exact
        assert not mix.verify(prompt.prompt_id, good + "0", is_finished=True).is_exact
        assert mix.demonstration_turns(prompt) == [good] and mix.reply(prompt.prompt_id, [good]) is None
    assert mix.is_trusted and mix.max_turns == 1
    assert mix.demonstration(held[-1]) == "".join(sorted(held[-1].text.split()[1]))


def test_a_mix_with_a_tool_answers_that_part_alone():
    config = {
        "mix": [{"environment": {"held_out": 8}}, {"environment": {"name": "calculator", "held_out": 8}}]
    }
    mix = make_environment(EnvironmentConfig.model_validate(config), seed=0)
    assert mix.max_turns == 2
    assert mix.reply("0:000000000-1234", ["=1+2"]) is None and mix.reply("1:0~1+2", ["=1+2"]) == "3"
    assert mix.verify_turns("1:0~1+2", ["=1+2", "3"], is_finished=True).is_exact


class Echo:
    """Answers with the prompt's own id."""

    max_turns = 2

    def reply(self, prompt_id, turns):
        return prompt_id

    def verify_turns(self, prompt_id, turns, *, is_finished):
        return Outcome(kind="abstain", reason=prompt_id)


def test_a_part_of_a_mix_is_asked_by_its_own_ids():
    share = Share(environment=Echo(), weight=1.0, final_weight=1.0)
    mix = MixedEnvironment([share, share], curriculum_prompts=0, seed=0)
    assert mix.reply("1:0:a", [""]) == "0:a" and mix.verify("1:0:a", "", is_finished=True).reason == "0:a"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"curriculum_prompts": 64}, "must be given with a final_weight"),
        ({"mix": [{"environment": {}, "final_weight": 1.0}]}, "must be given with a final_weight"),
        ({"mix": [{"environment": {}, "weight": 0.0}]}, "some weight of the mix must be positive"),
        (
            {"mix": [{"environment": {}, "final_weight": 0.0}], "curriculum_prompts": 9},
            "some final_weight of the mix must be positive",
        ),
    ],
)
def test_weights_that_say_nothing_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        EnvironmentConfig.model_validate(change)


ROWS = [{"prompt": f"{n} + {n}", "answer": str(2 * n)} for n in range(20)]


def from_files(path, seed=0, **changes):
    files = {"path": str(path), "verifier": "number"} | changes
    return make_environment(EnvironmentConfig(name="prompt_files", held_out=5, prompt_files=files), seed=seed)


def write(folder, kind, rows=ROWS):
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        path.write_text(json.dumps({"data": rows}))
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_files_of_each_kind_give_the_same_prompts_and_verdicts(tmp_path, kind):
    environment = from_files(write(tmp_path, kind))
    texts = {environment.train_prompt(position).text for position in range(15)}
    held = {prompt.text for prompt in environment.held_out_prompts()}
    assert texts | held == {row["prompt"] for row in ROWS} and not texts & held
    for prompt in (environment.train_prompt(0), environment.held_out_prompts()[0]):
        value = 2 * int(prompt.text.split()[0])
        assert environment.demonstration(prompt) == str(value)
        assert environment.verify(prompt.prompt_id, f"it is {value}.0", is_finished=True).is_exact
        assert environment.verify(prompt.prompt_id, f"{value + 1}", is_finished=True).reward == 0
        assert environment.verify(prompt.prompt_id, str(value), is_finished=False).reward == 0
    (tmp_path / "again").mkdir()
    same = from_files(write(tmp_path / "again", "jsonl"))
    assert same.fingerprint() == environment.fingerprint() != from_files(tmp_path, seed=1).fingerprint()


def test_a_folder_is_read_in_the_order_of_its_files_names_and_equal_prompts_are_one(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", "parquet", [{"prompt": "later", "answer": "1"}])
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "first", "answer": "2"}\n{"prompt": "later", "answer": "1"}'
    )
    (tmp_path / "readme.md").write_text("not data")
    rows = list(read_rows(str(tmp_path), field="x"))
    assert [row["answer"] for _, row in rows] == ["2", "1", "1"]
    assert rows[1][0].endswith("a.jsonl row 1")
    environment = make_environment(
        EnvironmentConfig(name="prompt_files", held_out=1, prompt_files={"path": str(tmp_path)}), seed=0
    )
    (held,) = environment.held_out_prompts()
    both = {held.text: environment.demonstration(held)}
    both |= {p.text: environment.demonstration(p) for p in (environment.train_prompt(0),)}
    assert both == {"first": "2", "later": "1"}


def test_equal_prompts_with_two_answers_are_refused(tmp_path):
    """The later answer counted, and whoever gave the earlier one was wrong."""
    rows = [{"prompt": "say it", "answer": "2"}, {"prompt": "say it", "answer": "3"}, *ROWS]
    with pytest.raises(ValueError, match=r"must have one answer, got '2' and '3' to 'say it'"):
        from_files(write(tmp_path, "jsonl", rows))


def test_chats_of_one_message_are_asked_and_others_are_refused(tmp_path):
    def rows(*messages):
        return write(tmp_path, "jsonl", [{"prompt": list(messages), "answer": "1"}] * 2 + ROWS)

    user = {"role": "user", "content": "1 * 1"}
    assert "1 * 1" in {problem.text for problem in from_files(rows(user)).problems}
    parts = {"role": "user", "content": [{"type": "text", "text": "1 * 1"}]}  # was asked as Python spells it
    for others in ([{"role": "system", "content": "be brief"}, user], [{"role": "user"}], ["1 * 1"], [parts]):
        with pytest.raises(
            ValueError, match=r"row 0 must be text or a chat of one user message of text, got"
        ):
            from_files(rows(*others))


def test_a_row_without_its_fields_and_a_path_without_files_are_named(tmp_path):
    path = write(tmp_path, "jsonl", [*ROWS, {"question": "1", "answer": "1"}])
    with pytest.raises(ValueError, match=r"row 20 must have the field 'prompt', got \['answer'"):
        from_files(path)
    with pytest.raises(ValueError, match=r"prompt_files\.path must name files that end in"):
        from_files(tmp_path / "nothing*")


def test_a_line_of_json_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    texts = [f"a{mark}b" for mark in ("\u2028", "\u2029", "\x85", "\x1c")] + ["c", "d", "e"]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": text, "answer": "1"}, ensure_ascii=False) for text in texts]
    path.write_text("\r\n".join(lines) + "\n", encoding="utf-8-sig")  # as on Windows
    assert [problem.text for problem in from_files(path).problems] == texts


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "rows.jsonl",
            '{"prompt": "1", "answer": "1"}\n{"prompt": \n',
            r"rows.jsonl line 2: Expecting value",
        ),
        ("rows.json", '{"rows": []}', r"a list of rows, or one under 'data'"),
        ("rows.json", "", r"a list of rows, or one under 'data'"),
        ("rows.jsonl", "[1, 2]\n", r"row 0 must be an object with fields, got \[1, 2\]"),
        ("rows.jsonl", b'{"prompt": "caf\xe9", "answer": "1"}', r"in UTF-8, got .*rows\.jsonl: .* byte 0xe9"),
        ("rows.jsonl", "[" * 100_000, r"rows.jsonl line 1: maximum recursion depth"),
        ("rows.jsonl", '{"prompt": 1, "answer": "1"}', r"row 0 must be text or a chat of one"),
        (
            "rows.jsonl",
            '{"prompt": "1", "answer": ["1", "2"]}',
            r"row 0 must have one text or number in 'ans",
        ),
        ("rows.jsonl", '{"prompt": "\\ud800", "answer": "1"}', r"row 0 must hold whole characters, got"),
        ("rows.parquet", b"PAR1 cut off", r"whole Parquet files, got .*rows\.parquet"),
        ("rows.parquet", b"", r"whole Parquet files, got .*rows\.parquet"),
    ],
)
def test_a_file_that_is_no_table_is_named_with_the_place(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    with pytest.raises(ValueError, match=words):
        from_files(path)


@pytest.mark.parametrize(
    ("score", "is_exact"), [(np.float32(1.0), True), (torch.tensor(0.5), False), (1, True)]
)
def test_a_score_of_another_librarys_type_is_a_score(score, is_exact):
    """As NumPy's mean: a comparison with it is no bool, at which the verifier's process died unexplained."""
    problems = [Problem(text=str(n), answer="") for n in range(9)]
    environment = ProblemEnvironment(problems, score=lambda *_: score, name="n", held_out=1, seed=0)
    outcome = environment.verify(environment.train_prompt(0).prompt_id, "x", is_finished=True)
    assert json.loads(json.dumps(asdict(outcome)))["reward"] == float(score) and outcome.is_exact is is_exact


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf"), 85.0, -1.0, "1.0"])
def test_a_score_outside_its_range_is_a_failure_and_not_the_nearest_reward(score):
    problems = [Problem(text=str(n), answer="") for n in range(9)]
    environment = ProblemEnvironment(problems, score=lambda *_: score, name="n", held_out=1, seed=0)
    prompt = environment.train_prompt(0).prompt_id
    outcome = judged(environment, Call(prompt_id=prompt, turns=("x",)))
    assert (outcome.kind, outcome.reward) == ("failure", None) and outcome.reason


def test_a_known_answer_that_cannot_be_read_is_an_abstention_and_never_a_zero(tmp_path):
    environment = from_files(write(tmp_path, "jsonl", [{"prompt": f"q{n}", "answer": "?"} for n in range(9)]))
    outcome = environment.verify(environment.train_prompt(0).prompt_id, "5", is_finished=True)
    assert (outcome.kind, outcome.reward) == ("abstain", None) and outcome.reason


def reasoning(seed=0, **changes):
    gym = {"dataset": "chain_sum", "size": 60, "options": {"max_terms": 2, "max_digits": 1}} | changes
    return make_environment(
        EnvironmentConfig.model_validate({"name": "reasoning_gym", "held_out": 10, "reasoning_gym": gym}),
        seed=seed,
    )


def test_reasoning_gyms_problems_and_scorer_are_its_own():
    import reasoning_gym

    environment = reasoning(size=40)
    entry = reasoning_gym.create_dataset("chain_sum", seed=20260101, size=40, max_terms=2, max_digits=1)[0]
    (index,) = [i for i, p in enumerate(environment.problems) if p.text == entry["question"].strip()][:1]
    assert environment.problems[index].answer == entry["answer"]
    good = environment.verify(f"x-{index}", entry["answer"], is_finished=True)
    assert good.is_exact and good.reward == 1.0
    wrong = str(int(entry["answer"]) + 1)
    scorer = reasoning_gym.get_score_answer_fn("chain_sum")
    assert environment.verify(f"x-{index}", wrong, is_finished=True).reward == pytest.approx(
        scorer(answer=wrong, entry=entry)
    )
    assert not getattr(environment, "is_trusted", False), "its scorers are code of others: never in process"
    assert reasoning().fingerprint() == reasoning().fingerprint() != reasoning(size=61).fingerprint()
    assert {p.text for p in reasoning(seed=1).held_out_prompts()} == {
        p.text for p in reasoning().held_out_prompts()
    }


def test_a_pattern_asks_for_its_group_and_one_that_does_not_match_is_refused():
    words = {"dataset": "spell_backward", "size": 40, "options": {"min_word_len": 3, "max_word_len": 3}}
    environment = reasoning(**words, pattern=r"\): (.*)$", lowercase=True)
    for problem in environment.problems:
        assert len(problem.text) == 3 and problem.answer == problem.text[::-1] == problem.answer.lower()
    part = environment.verify("x-0", environment.problems[0].answer[:2], is_finished=True)
    assert part.reward == pytest.approx(2 / 3) and not part.is_exact
    with pytest.raises(ValueError, match=r"reasoning_gym\.pattern must match every question"):
        reasoning(**words, pattern="no such words: (.*)")
    with pytest.raises(ValueError, match=r"must match every question and have a group"):
        reasoning(**words, pattern="Spell")
    with pytest.raises(ValueError, match=r"must be one of its \d+ generators, got 'unheard_of'"):
        reasoning(dataset="unheard_of")


@pytest.mark.parametrize("name", ["spell_backward", "calculator", "learned_reward"])
def test_shipped_environments_ask_what_the_laptops_policy_can_read_and_finish(name):
    from loop import campaign

    from tasks.environments.demonstrations import demonstrated
    from tasks.policy.models.chat import Chat
    from tasks.policy.models.tokenizer import character_tokenizer, encode

    config, chat = campaign(name), Chat(character_tokenizer())
    environment = make_environment(config.environment, seed=config.seed)
    for prompt in [environment.train_prompt(position) for position in range(64)]:
        assert chat.prompt_ids(prompt.text)
        _, taught = demonstrated(environment, chat, prompt)
        turns = [environment.demonstration(prompt)]
        if hasattr(environment, "demonstration_turns"):
            turns = environment.demonstration_turns(prompt)
        longest = max(len(encode(chat.tokenizer, turn)) + 1 for turn in turns)  # and its end
        assert longest <= config.rollout.max_new_tokens and any(taught)
