"""A Hugging Face folder as version 0, and a campaign that goes on from it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from campaigns import ROOT, SMALL, run, write_config
from policies import save_tiny_policy
from safetensors.torch import load_file, save_file

from tasks.adopt import main
from tasks.checkpoint import open_campaign, resume
from tasks.config import CampaignConfig, ConfigError
from tasks.policy.checkpoint.weights import tensor_digest
from tasks.session import run_store

CONFIG = SMALL | {
    "name": "adopted",
    "warm_start": {"steps": 0},
    "rollout": {"workers": 1, "prompts_per_iteration": 12, "groups_per_portion": 6},
    "algorithm": {"num_minibatches": 1},
    "schedule": {"iterations": 1},
}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot directory as the hub's cache has it: links to files elsewhere. In half precision."""
    folder, blobs = tmp_path / "hub/snapshots/0123", tmp_path / "hub/blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    save_tiny_policy(tmp_path / "saved")
    weights = tmp_path / "saved/model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(weights).items()}, weights, metadata={"format": "pt"})
    shape = json.loads((tmp_path / "saved/config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "saved/config.json").write_text(json.dumps(shape))
    for number, path in enumerate(sorted((tmp_path / "saved").iterdir())):
        shutil.move(path, blobs / f"{number:04d}")
        (folder / path.name).symlink_to(f"../../blobs/{number:04d}")
    return folder


def reopened(config: dict, store: str):
    return open_campaign(
        config=CampaignConfig.model_validate(config), name=None, iterations=None, learning_rate=None,
        store=store, fresh=False,
    )  # fmt: skip


def test_a_hub_snapshot_becomes_version_0_and_the_written_file_goes_on_from_it(
    snapshot, tmp_path, leave_servers, capsys
):
    file, written = write_config(tmp_path, CONFIG), tmp_path / "adopted.yaml"
    address = str(tmp_path / "store")
    named = ["--config", str(file), "--folder", str(snapshot), "--store", address]
    main([*named, "--write", str(written)])
    assert re.search(r"adopted\.0001 version 0: s3://.*\nGo on: pyflyte run .* --config .*adopted\.yaml",
                     capsys.readouterr().out)  # fmt: skip
    expected = tensor_digest(load_file(snapshot / "model.safetensors").items())
    shutil.rmtree(tmp_path / "hub")  # nothing of it is needed any more
    again = reopened(yaml.safe_load(written.read_text()), address)
    state = resume(run=again)
    assert [version.version for version in state.versions] == [0] and state.iterations_done == 0
    store = run_store(again)
    assert store.manifest(0).kind == "init" and store.manifest(0).tensor_digest == expected
    assert json.loads((store.pull(0) / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match=r"may not change these: model\.folder was '.*0123', is ''"):
        reopened(CONFIG, address)
    with pytest.raises(SystemExit, match="--write must name a file that does not exist"):
        main([*named, "--write", str(written)])


def test_what_is_no_mixture_of_experts_is_refused(tmp_path):
    file = write_config(tmp_path, CONFIG)
    named = ["--config", str(file), "--store", str(tmp_path / "store"), "--folder", str(tmp_path / "dense")]
    with pytest.raises(SystemExit, match=r"must be a Hugging Face checkpoint with a config\.json"):
        main(named)
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text('{"model_type": "qwen3", "num_experts": 0}')
    with pytest.raises(SystemExit, match="must be a mixture-of-experts policy, got 'qwen3'"):
        main(named)
    (tmp_path / "dense/config.json").write_text('{"model_type":')
    with pytest.raises(SystemExit, match=r"dense/config\.json must be JSON, got: "):
        main(named)
    assert not (tmp_path / "store").exists()


def test_weights_that_cannot_be_trained_are_refused_before_anything_is_stored(
    snapshot, tmp_path, leave_servers
):
    """A NaN was adopted: every supervised step was skipped, a version published, and its samples refused."""
    file, name = write_config(tmp_path, CONFIG), "model.layers.0.self_attn.q_proj.weight"
    named = ["--config", str(file), "--folder", str(snapshot), "--store", str(tmp_path / "store")]
    weights, shape = snapshot / "model.safetensors", snapshot / "config.json"
    tensors = load_file(weights)
    for value in (float("nan"), float("-inf")):
        tensors[name][1, 2] = value
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(SystemExit, match=rf"{name} in .* must be finite, got 1 of \d+ values"):
            main(named)
    quantised = json.loads(shape.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    shape.write_text(json.dumps(quantised))
    with pytest.raises(SystemExit, match=r"must hold weights of 16 or 32 bits, .* quantization_config 'fp8'"):
        main(named)


def test_a_policy_that_could_not_end_what_it_is_taught_is_refused_before_anything_is_stored(
    snapshot, tmp_path, leave_servers
):
    """A TypeError of its warm start or responses without an end told of it, in a lineage that held it."""

    def change(name, **values):
        path = snapshot / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def refused(words, **changes):
        named = ["--folder", str(snapshot), "--store", str(tmp_path / "store")]
        with pytest.raises(SystemExit, match=words):
            main(["--config", str(write_config(tmp_path, CONFIG | changes)), *named])

    change("tokenizer_config.json", eos_token=None)
    taught = {"warm_start": {"steps": 2}}
    refused(
        r"must be one of the ids \[1\] that end a response, got None \(None\) in .*snapshots/0123", **taught
    )
    talks = {"environment": {"name": "calculator"}}
    change("tokenizer_config.json", eos_token="<user>")
    refused(r"must be one of the ids \[1\] that end a response, got '<user>' \(2\)", **talks)
    for value, words in (
        (99, r"must be in the policy's vocabulary of 54, got \[99\] in"),
        ([], r"eos_token_id in .*generation_config\.json must be a token's id or a list of them, got \[\]"),
        ("x", r"must be a token's id or a list of them, got 'x'"),
    ):
        change("generation_config.json", eos_token_id=value)
        refused(words)
    change("generation_config.json", eos_token_id=None)
    change("config.json", eos_token_id=None)
    refused("must name an eos_token_id in generation_config.json or config.json, got none")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chat_template.jinja", "", r"must have the user's message in it, got '' of 'reverse"),
        ("chat_template.jinja", "{% for m", r"must render a user's message, got: "),
        ("chat_template.jinja", "{{ raise_exception('no') }}", r"must render a user's message, got: no"),
        ("tokenizer.json", "{", r"snapshots/0123 must hold a tokenizer that can be loaded, got: "),
        ("tokenizer.json", "{}", r"must hold a tokenizer that can be loaded, got: KeyError: 'added_tokens'"),
        ("tokenizer.json", '{"added_tokens": []}', r"can be loaded, got: Exception: Model missing"),
        ("generation_config.json", "{", r"generation_config\.json must be JSON, got: "),
    ],
)
def test_a_folder_that_could_not_ask_is_refused_by_the_name_of_what_is_wrong(
    snapshot, tmp_path, leave_servers, name, text, words
):
    """An empty template was adopted, and every prompt would have been the same."""
    (snapshot / name).write_text(text)
    named = ["--folder", str(snapshot), "--store", str(tmp_path / "store")]
    with pytest.raises(SystemExit, match=words):
        main(["--config", str(write_config(tmp_path, CONFIG)), *named])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_user_adopts_a_folder_and_the_campaign_trains_it(snapshot, tmp_path):
    file = write_config(tmp_path, CONFIG)
    command = [sys.executable, "-m", "tasks.adopt", "--config", str(file), "--folder", str(snapshot)]
    command += ["--store", str(tmp_path / "store"), "--write", str(tmp_path / "adopted.yaml")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    shutil.rmtree(tmp_path / "hub")
    finished = run(tmp_path, yaml.safe_load((tmp_path / "adopted.yaml").read_text()))
    lines = finished.metrics()
    assert [line["kind"] for line in lines] == ["init", "iteration"]
    assert len(set(finished.digests())) == 2
