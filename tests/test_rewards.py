"""What a reward is made of: parts, reward models, remote scorers against a real HTTP server, alerts."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import polars as pl
import pytest
import torch

from tasks.config import CampaignConfig
from tasks.environments.grades import Graded
from tasks.environments.health import reward_metrics
from tasks.environments.large_digits import LargeDigitsEnvironment
from tasks.environments.protocol import Outcome, Part
from tasks.environments.remote import ClassifyClient, JudgeClient, read_grade
from tasks.environments.reward_model import RewardModel, length_sorted_batches
from tasks.environments.reward_training import save_reward_model, train_reward_model
from tasks.environments.scorer import Sample, Scorer, weighed
from tasks.policy.models.tokenizer import character_tokenizer, encode
from tasks.reward_config import ClassifyConfig, JudgeConfig
from tasks.rl.preferences import bradley_terry_loss, pair_accuracy

TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def grade(name, reward, kind="score", reason=""):
    return Graded(part=Part(name=name, kind=kind, value=reward, reason=reason), reward=reward)


@pytest.mark.parametrize(
    ("parts", "weights", "kind", "reward"),
    [
        ({"a": grade("a", 1.0), "b": grade("b", 0.5)}, {"a": 1, "b": 3}, "score", 0.625),  # (1 + 1.5) / 4
        ({"a": grade("a", 1.0), "b": grade("b", None, "abstain", "no")}, {"a": 1, "b": 3}, "score", 1.0),
        ({"a": grade("a", None, "abstain", "no")}, {"a": 1}, "abstain", None),
        ({"a": grade("a", 1.0), "b": grade("b", None, "failure", "down")}, {"a": 1, "b": 3}, "failure", None),
        ({"a": grade("a", 1.0), "b": grade("b", None, "failure", "down")}, {"a": 1, "b": 0}, "score", 1.0),
    ],
)
def test_parts_are_weighed_and_a_failure_is_never_a_zero(parts, weights, kind, reward):
    outcome = weighed(parts, weights, is_exact=False)
    assert (outcome.kind, outcome.reward) == (kind, reward) and len(outcome.parts) == len(parts)
    assert kind != "failure" or outcome.reason == "b: down"


def test_bradley_terry_by_hand():
    better, worse = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    # -log sigmoid(1) = 0.31326, -log sigmoid(0) = 0.69315; their mean is 0.50320
    torch.testing.assert_close(bradley_terry_loss(better, worse), torch.tensor(0.50320), atol=1e-5, rtol=0)
    assert float(pair_accuracy(better, worse)) == 0.75  # one right, one tie


def test_rows_of_like_length_share_a_pass_within_its_tokens():
    batches = length_sorted_batches([3, 9, 1, 8, 2], max_tokens=18)
    assert batches == [[1, 3], [0, 4, 2]]
    assert sorted(i for batch in batches for i in batch) == list(range(5))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward") / "model"
    config = CampaignConfig.model_validate({
        "environment": {"name": "large_digits", "num_digits": 3, "held_out": 16},
        "reward": {"model": {"folder": str(folder), "pairs": 1024, "steps": 60, "batch_pairs": 64}},
    })  # fmt: skip
    training = train_reward_model(config)
    save_reward_model(training, folder)
    return training, config


def test_a_reward_model_learns_the_preference_and_comes_back_from_its_folder(model):
    training, config = model
    assert training.accuracy > 0.8 and training.losses[-1] < training.losses[0]
    loaded = RewardModel(config.reward.model)
    talks = [
        [{"role": "user", "content": "large 123"}, {"role": "assistant", "content": t}]
        for t in ("999", "000", "55")
    ]
    grades = loaded.grade(talks)
    assert [g.part.kind for g in grades] == ["score"] * 3 and grades[0].reward > grades[1].reward
    alone = [loaded.grade([talk])[0].part.value for talk in talks]  # padding changes nothing
    torch.testing.assert_close(
        torch.tensor([g.part.value for g in grades]), torch.tensor(alone), atol=1e-5, rtol=0
    )


def test_text_a_reward_model_cannot_read_is_a_failure_of_that_sample(model):
    snow = [{"role": "user", "content": "large 123"}, {"role": "assistant", "content": "\N{SNOWMAN}"}]
    kinds = [g.part.kind for g in RewardModel(model[1].reward.model).grade([TALK, snow])]
    assert kinds == ["score", "failure"]


def test_the_truth_is_watched_at_weight_zero(model):
    environment = LargeDigitsEnvironment(num_digits=3, num_held_out=16, seed=0)
    tokenizer, loaded = character_tokenizer(), RewardModel(model[1].reward.model)
    scorer = Scorer(
        environment,
        tokenizer,
        weights={"reward_model": 1.0, "verifier": 0.0},
        others={"reward_model": loaded.grade},
    )
    prompt = environment.train_prompt(0)
    samples = [
        Sample(
            prompt_id=prompt.prompt_id, prompt_ids=scorer.chat.prompt_ids(prompt.text),
            response_ids=[*encode(tokenizer, text), tokenizer.eos_token_id], finish_reason="stop",
        )
        for text in ("999", "000")
    ]  # fmt: skip
    outcomes = scorer.outcomes(samples)
    parts = [{part.name: part.value for part in outcome.parts} for outcome in outcomes]
    assert [p["verifier"] for p in parts] == [1.0, 0.0] and [o.is_exact for o in outcomes] == [True, False]
    assert outcomes[0].reward == pytest.approx(
        1 / (1 + torch.exp(torch.tensor(-parts[0]["reward_model"])).item())
    )


class Service(BaseHTTPRequestHandler):
    """Answers by what the last message holds."""

    seen: list = []  # noqa: RUF012 - of one server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        text = json.dumps(body)
        status, said = 200, "good\ngrade: 7"
        if "slow" in text:
            time.sleep(3)
        if "flaky" in text and sum("flaky" in json.dumps(b) for _, _, b in self.seen) < 3:
            status = 503
        for word, code in (("broken", 500), ("forbidden", 403)):
            status = code if word in text else status
        for word, words in (("none", "grade: none"), ("mute", "fine"), ("range", "grade: 11")):
            said = words if f"<{word}>" in text else said
        answer = {"choices": [{"message": {"content": said}}]}
        if self.path.endswith("/classify"):
            answer = [{"embedding": [float(len(text))]} for text in body["text"]]
            answer = answer[:-1] if "short" in text else answer
        data = b"not json" if "garbage" in text else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url():
    Service.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asked(text):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "an answer"}]


def test_a_judge_grades_and_every_trouble_is_a_failure_with_a_reason(url, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    config = JudgeConfig(
        url=f"{url}/v1", model="m", deadline_seconds=1.5, attempts=3, key_file=str(tmp_path / "key")
    )
    words = ["plain", "flaky", "<none>", "<mute>", "<range>", "broken", "forbidden", "garbage", "slow"]
    start = time.monotonic()
    grades = dict(zip(words, JudgeClient(config).grade([asked(word) for word in words]), strict=True))
    assert time.monotonic() - start < 6
    assert grades["plain"].reward == grades["flaky"].reward == 0.7 and grades["plain"].part.value == 7
    assert grades["<none>"].part.kind == "abstain"
    reasons = {"<mute>": "must end with", "<range>": "from 0 to 10", "broken": "3 attempts, last: HTTP 500",
               "forbidden": "HTTP 403", "garbage": "Expecting value",
               "slow": "within the deadline"}  # fmt: skip
    for word, reason in reasons.items():
        part = grades[word].part
        assert (part.kind, part.value, grades[word].reward) == (
            "failure",
            None,
            None,
        ) and reason in part.reason
    assert sum("forbidden" in json.dumps(body) for _, _, body in Service.seen) == 1  # not tried again
    assert {key for _, key, _ in Service.seen} == {"Bearer secret"}


def test_a_judge_that_is_not_there_is_a_failure():
    config = JudgeConfig(url="http://127.0.0.1:9/v1", model="m", deadline_seconds=2.0, attempts=2)
    (one,) = JudgeClient(config).grade([asked("x")])
    assert one.part.kind == "failure" and "2 attempts" in one.part.reason


@pytest.mark.parametrize(
    ("said", "grade"),
    [("grade: 7", 7), ("grade: 3\nno, Grade: 8.5", 8.5), ("grade: none", None), ("grade: 0", 0)],
)
def test_the_last_grade_counts(said, grade):
    assert read_grade(said, largest=10) == grade


@pytest.mark.parametrize("said", ["", "7", "grade: seven", "grade: -1", "grade: 10.5", "grade: 1.2.3"])
def test_words_without_a_grade_are_refused(said):
    with pytest.raises(ValueError, match="grade"):
        read_grade(said, largest=10)


def test_sglangs_classify_endpoint_scores_in_the_order_it_was_asked(url, tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    config = ClassifyConfig(
        url=url, model="m", tokenizer=str(tmp_path), batch_size=2, deadline_seconds=2, attempts=1
    )
    texts = [
        "a",
        "a long one",
        "mid",
        "short",
    ]  # the longest two share a batch, of which the service forgets one
    grades = ClassifyClient(config).grade([asked(text) for text in texts])
    assert [g.part.kind for g in grades] == ["score", "failure", "score", "failure"]
    frame = grades[0].part.value - len("a")  # the fake scores by length
    assert grades[2].part.value == frame + len("mid") and 0 < grades[0].reward <= grades[2].reward <= 1


def scored(*rows):
    columns = [{"outcome": kind, "reward": reward, "parts": parts} for kind, reward, parts in rows]
    part = pl.Struct(
        {
            "name": pl.String,
            "kind": pl.String,
            "value": pl.Float64,
            "reason": pl.String,
            "seconds": pl.Float64,
        }
    )
    return pl.DataFrame(columns, schema={"outcome": pl.String, "reward": pl.Float64, "parts": pl.List(part)})


@pytest.mark.parametrize(
    ("rows", "alerts"),
    [
        ([("score", 0.0, []), ("score", 0.0, [])], {"alert/all_floor", "alert/all_equal"}),
        ([("score", 0.5, []), ("score", 0.5, [])], {"alert/all_equal"}),
        ([("score", 0.0, []), ("score", 0.5, [])], set()),
        ([("failure", None, []), ("abstain", None, [])], {"alert/none_scored"}),
    ],
)
def test_batches_without_information_raise_an_alert(rows, alerts):
    assert {name for name in reward_metrics(scored(*rows)) if name.startswith("alert/")} == alerts


def test_metrics_name_each_part_with_its_failures():
    part = {"name": "judge", "kind": "score", "value": 4.0, "reason": "", "seconds": 1.0}
    lost = {**part, "kind": "failure", "value": None, "reason": "down"}
    metrics = reward_metrics(scored(("score", 0.4, [part]), ("failure", None, [lost])))
    assert (
        metrics["part/judge"] == 4.0
        and metrics["part_failure/judge"] == 1
        and metrics["part_seconds/judge"] == 2
    )


def test_an_outcome_without_parts_is_the_verifiers_alone():
    assert Outcome(kind="score", reward=1.0).parts == ()


def test_the_gap_to_the_truth_is_measured_where_another_part_rewards():
    def of(reward, truth, kind="score"):
        parts = [("reward_model", 2.0, "score"), ("verifier", truth, kind)]
        return ("score", reward, [
            {"name": name, "kind": kind, "value": value, "reason": "", "seconds": 0.0}
            for name, value, kind in parts
        ])  # fmt: skip

    rows = [of(0.5, 0.25), of(0.75, 0.25), of(1.0, 0.5), of(0.0, None, "failure")]
    metrics = reward_metrics(scored(*rows))
    # of the three that both judged: rewards less their mean -1/4 0 1/4, truths -1/12 -1/12 1/6; products sum
    # to 1/16, squares to 1/8 and 1/24
    assert metrics["truth/value"] == pytest.approx(1 / 3)
    assert metrics["truth/gap"] == pytest.approx(0.75 - 1 / 3)
    assert metrics["truth/correlation"] == pytest.approx((1 / 16) / (1 / 8 / 24) ** 0.5)
    flat = reward_metrics(scored(of(0.5, 0.25), of(0.75, 0.25)))
    assert "truth/correlation" not in flat and flat["truth/gap"] == pytest.approx(0.375)
    alone = [{"name": "verifier", "kind": "score", "value": 1.0, "reason": "", "seconds": 0.0}]
    assert not any(name.startswith("truth/") for name in reward_metrics(scored(("score", 1.0, alone))))
