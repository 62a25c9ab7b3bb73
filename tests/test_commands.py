"""What the commands beside ``pyflyte run`` answer to a user's mistakes: a few words, and no traceback."""

import json

import pytest
import yaml
from campaigns import ROOT

from tasks import adopt, plan, preflight
from tasks import standing as pods
from tasks.campaign_file import load_campaign, load_json, read_campaign
from tasks.engine import standing as worker
from tasks.experience import watch
from tasks.policy import launch
from tasks.policy import standing as trainer
from tasks.session import read_config

COMMANDS = {
    "worker": (worker.main, []),
    "trainer": (trainer.main, []),
    "launch": (launch.main, ["--iteration", "0", "--output", "candidate.json"]),
    "preflight": (preflight.main, []),
    "pods": (pods.main, ["--code", "s3://bucket/code.tar.gz"]),
    "adopt": (adopt.main, ["--folder", "policy"]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"[1, 2", "expected ',' or ']'"),
        (b"", "got an empty file, or nothing but comments. Write some into it"),
        (b"# all of it\n", "got an empty file, or nothing but comments. Write some into it"),
        (b"[]", "Input should be an object, got []"),
        (b"nmae: laptop", "unknown key 'nmae'. Did you mean name?"),
        (b"name: caf\xe9", "can't decode byte 0xe9"),
        (b"name: 2026-11-30", "not JSON serializable"),
        (b"train: {ep: 1}\nname: a\ntrain: {ep: 2}", "key 'train' must be there once, got it again"),
    ],
)
def test_a_configuration_that_cannot_be_read_ends_a_command_in_a_few_words(command, content, words, tmp_path):
    path = tmp_path / "campaign.yaml"
    if content is not None:
        path.write_bytes(content)
    main, more = COMMANDS[command]
    with pytest.raises(SystemExit) as end:
        main(["--config", str(path), *more])
    assert words in str(end.value) and str(path) in str(end.value)


TWICE = '{"name": "abc", "train": {\n\t"ep": 1,\n\t"tp": 1,\n\t"ep": 2}}'


def test_a_json_file_is_read_as_strictly_as_a_yaml(tmp_path):
    """The last of two equal keys counted."""
    path = tmp_path / "campaign.json"
    path.write_text(TWICE)
    with pytest.raises(SystemExit, match=r"key 'ep' must be there once, got it again.*\n.*line 4, column 2"):
        read_config(path)
    path.write_text(TWICE.replace('"ep": 2', '"dp": 1e0').replace('"name": "abc", ', ""))
    assert read_campaign(path) == {"train": {"ep": 1, "tp": 1, "dp": 1.0}}
    path.write_text(" \n")
    with pytest.raises(SystemExit, match="got an empty file"):
        read_config(path)


@pytest.mark.parametrize(
    "text", ['{"a": "\\u00e9\\/\\ud83d\\ude00\\n", "b": [{}, []], "": null}', '{"a":{"a":1},"b":-1E+2}']
)
def test_whatever_json_says_without_repeating_a_key_is_read_as_json_reads_it(text):
    assert load_json(text) == json.loads(text)


def test_a_key_beside_those_that_are_merged_in_is_there_once():
    text = "a: {x: &b {<<: {k: 1}, k: 2}}\nc: {<<: *b}"
    assert load_campaign(text) == yaml.safe_load(text)


def test_a_name_that_no_campaign_can_have_ends_a_command_in_a_few_words(tmp_path):
    with pytest.raises(SystemExit, match=r"name: must be 3 to 63 lower-case letters, .*, got 'No Such!'"):
        watch.main(["--once", "--store", str(tmp_path), "--campaign", "No Such!"])


def test_a_plan_of_no_time_is_refused(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--config", str(ROOT / "configs/campaigns/qwen3_30b_a3b.yaml"), "--seconds", "-5"])
    assert "--seconds must be above 0, got -5" in capsys.readouterr().err
