"""What ``pyflyte run`` answers where a run cannot begin: a sentence and where it was raised, no traceback."""

import signal
from types import SimpleNamespace

import click
import pytest
import torch
from campaigns import SMALL, refused
from flytekit.exceptions.user import FlyteUserRuntimeException

from tasks.command_line import says_what_is_wrong
from tasks.embedded.disk import require_free_space

pytestmark = [
    pytest.mark.filterwarnings("ignore:The parameter --fresh is used more than once"),
    pytest.mark.usefixtures("leave_servers"),
]


@pytest.mark.parametrize("verbose", [0, 1])
def test_what_a_stage_raises_is_its_sentence_with_the_line_unless_more_is_asked_for(tmp_path, verbose):
    def stage():
        try:
            require_free_space(tmp_path, 2**80)
        except ValueError as error:  # as flytekit does
            error.args = (f"Error encountered while executing 'tasks.a.b':\n  {error}",)
            raise

    told = says_what_is_wrong(SimpleNamespace(local_execute=stage))
    with click.Context(click.Command("pyflyte")) as context, pytest.raises(Exception) as raised:
        context.params["verbose"] = verbose
        told.local_execute()
    if verbose:
        assert raised.type is ValueError
        return
    assert raised.type is click.ClickException
    message = str(raised.value)
    assert message.startswith("the disk of") and "Free some space" in message
    assert "tasks/embedded/disk.py:" in message and "pyflyte -v run" in message


def test_the_failure_of_a_rank_is_one_sentence():
    """Its traceback was printed where it ended; the graph's has 60 lines more."""

    def stage():
        error = FlyteUserRuntimeException(RuntimeError("rank 1 of the training failed. ValueError: no"), 1.0)
        error.args = (f"Error encountered while executing 'tasks.a.b':\n  {error}",)  # as flytekit does
        raise error

    told = says_what_is_wrong(SimpleNamespace(local_execute=stage))
    with click.Context(click.Command("pyflyte")) as context, pytest.raises(click.ClickException) as raised:
        context.params["verbose"] = 0
        told.local_execute()
    assert str(raised.value) == "rank 1 of the training failed. ValueError: no"


def test_a_fault_in_code_of_the_users_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "no_such_rows.py").write_text(
        "def make(*, held_out, seed, options):\n    return open(options['path'])  # mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = {"name": "module", "module": "no_such_rows", "options": {"path": "nothere.jsonl"}}
    output = refused(tmp_path, SMALL | {"environment": module})
    assert "Traceback" in output and "# mine" in output and "nothere.jsonl" in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory"),
        ("rollout: a: 1", "mapping values are not allowed here"),
        ("schedule:\t1", "found character '\\t' that cannot start any token"),
        ("", "got an empty file, or nothing but comments. Write some into it"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named_with_its_fault(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    output = refused(tmp_path, SMALL, "--config", str(path))
    assert f"--config': must name a YAML or JSON file, got {path}" in output and words in output
    assert "Traceback" not in output


def test_a_configuration_may_still_be_given_as_json(tmp_path):
    output = refused(tmp_path, SMALL, "--config", '{"rollout": {"workers": 0}}')
    assert "rollout.workers: Input should be greater than or equal to 1, got 0" in output
    output = refused(tmp_path, SMALL, "--config", '{"rollout": {"workers": 1, "workers": 0}}')
    assert "key 'workers' must be there once, got it again. Join the two" in output
    assert "line 1, column 28" in output and "Traceback" not in output


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two GPUs are what it asks for")
def test_ranks_without_gpus_are_refused_before_any_starts(tmp_path):
    output = refused(tmp_path, SMALL | {"train": {"backend": "nccl"}})
    assert "'nccl' needs a GPU for each of the 2 ranks of laptop_1x2 on this machine, got" in output
    assert "Set it to 'gloo'" in output and "Traceback" not in output


def test_ctrl_c_is_answered(tmp_path, monkeypatch):
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\n\n"
        "def make(*, held_out, seed, options):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    module = {"name": "module", "module": "interrupted"}
    output = refused(tmp_path, SMALL | {"environment": module}, codes=(130,))
    assert "stopped by Ctrl-C. What was published stays; run it again to go on." in output
    assert signal.getsignal(signal.SIGINT) is before
