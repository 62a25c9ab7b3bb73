"""The elastic task on real ranks: warm starts, the launcher's environment, errors, restarts, signals."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException, FlyteValueException

from tasks import elastic
from tasks.artifacts.errors import CorruptArtifact, VersionConflict
from tasks.config import CampaignConfig
from tasks.elastic import RANK_SERVER, TorchElastic, TrainingPreempted
from tasks.policy.ranks.restarts import LastWord, is_lasting, last_word

TWO_RANKS = TorchElastic(nnodes=1, nproc_per_node=2, max_restarts=0, monitor_interval=0.1)


@task(task_config=TWO_RANKS)
def look(name: str) -> tuple[int, bool, str, str]:
    """The rank's parent, whether the trainer was imported before, a variable, the rank's number."""
    import sys

    return (
        os.getppid(),
        "tasks.policy.training.update" in sys.modules,
        os.environ.get(name, "unset"),
        os.environ["RANK"],
    )


@task(task_config=TWO_RANKS)
def fail() -> None:
    raise ValueError(f"rank {os.environ['RANK']} must be well, got ill")


@task(task_config=TWO_RANKS)
def leave(code: int) -> None:
    os._exit(code)


def test_trainings_of_a_process_fork_their_ranks_from_one_server_that_imported_the_trainer():
    first, imported, *_ = look(name="X")
    second, imported_again, *_ = look(name="X")
    assert first == second != os.getpid()
    assert imported and imported_again


def test_ranks_see_the_environment_of_their_launch_not_of_the_servers_start(monkeypatch):
    RANK_SERVER.start()
    monkeypatch.setenv("MOE_RL_SEEN_BY_RANKS", "new")
    assert look(name="MOE_RL_SEEN_BY_RANKS")[2:] == ("new", "0")
    monkeypatch.setenv("MOE_RL_SEEN_BY_RANKS", "newer")
    assert look(name="MOE_RL_SEEN_BY_RANKS")[2] == "newer"
    monkeypatch.delenv("MOE_RL_SEEN_BY_RANKS")
    assert look(name="MOE_RL_SEEN_BY_RANKS")[2] == "unset"
    monkeypatch.delenv("PATH")
    assert look(name="PATH")[2] == "unset"


def test_the_error_of_a_rank_reaches_whoever_ran_the_task_and_no_folder_stays(tmp_path, monkeypatch):
    """An empty folder a training, hundreds a campaign, stayed on the temporary disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    look(name="X")
    with pytest.raises(Exception) as caught:
        fail()
    said = "".join(traceback.format_exception(caught.value))
    assert re.search(r"rank (\d) of the training failed\. ValueError: rank \1 must be well, got ill\n$", said)
    assert said.count("must be well, got ill") == 1  # each rank's traceback was in it five times
    assert not [*tmp_path.glob("torchelastic_*"), *tmp_path.glob("moe-rl-ranks-*")]


def test_a_rank_that_left_no_exception_is_told_by_its_exit_code_or_signal_and_with_nodes_by_its_host():
    """It said "To enable traceback see" and an address."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    with pytest.raises(Exception) as caught:
        leave(code=17)
    said = "".join(traceback.format_exception(caught.value))
    assert re.search(r"rank \d of the training failed\. Its process ended with exit code 17 and left", said)
    assert "https://" not in said
    killed = ProcessFailure(local_rank=1, pid=99, exitcode=-signal.SIGKILL, error_file="none")
    host = socket.gethostname()
    for num_nodes, where in ((1, ""), (2, f" on {host}")):
        text = f"rank 1 of the training{where} failed. Signal 9 (SIGKILL) received by PID 99"
        assert str(elastic._said(1, killed, num_nodes)) == text


FULL = """
import sys
sys.path[:0] = {path!r}
from test_elastic import look
look(name="X")
"""


def test_ranks_that_find_shared_memory_full_say_what_they_need(tmp_path):
    """In a mount namespace of its own, with 16 KiB; two ranks take 9 pages. NCCL's segments are not seen."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    full = "mount -t tmpfs -o size=16k none /dev/shm"
    if subprocess.run([*inside, full], capture_output=True).returncode:
        pytest.skip("this kernel gives users no mount namespace")
    (tmp_path / "full.py").write_text(FULL.format(path=sys.path))
    run = subprocess.run(
        [*inside, f"{full} && exec {sys.executable} {tmp_path / 'full.py'}"], capture_output=True, text=True
    )
    assert run.returncode and "/dev/shm must have 36,864 bytes free for 2 ranks to start, got" in run.stderr


@pytest.mark.parametrize("kind", [errno.EACCES, errno.ENOENT])
def test_an_error_that_is_not_of_space_stays_what_it_is_without_shared_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(elastic, "SHARED_MEMORY", str(tmp_path / "none"))
    elastic._require_shared_memory(2, OSError(kind, "of another kind"))


RESTARTED = TorchElastic(nnodes=1, nproc_per_node=2, max_restarts=2, monitor_interval=0.1)


@task(task_config=RESTARTED)
def fail_as(kind: str, times: int, starts: str) -> int:
    """Rank 1 fails in that way so many times, while rank 0 waits; the number of starts."""
    if os.environ["RANK"] == "0":
        while len(Path(starts).read_text()) <= times:
            time.sleep(0.01)
    else:
        with Path(starts).open("a") as file:
            file.write(".")
        if len(Path(starts).read_text()) <= times:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"sentence": ValueError, "cuda": torch.AcceleratorError}[kind]("it must be well, got ill")
    return len(Path(starts).read_text())


def starts_of(kind: str, times: int, folder: Path) -> tuple[int, str]:
    """Of rank 1, and what is said in the end."""
    starts = folder / "starts"
    starts.touch()
    try:
        fail_as(kind=kind, times=times, starts=str(starts))
        said = ""
    except Exception as error:  # of flytekit's wrappers, any
        said = "".join(traceback.format_exception(error))
    return len(starts.read_text()), said


def test_an_error_that_would_come_again_ends_the_run_at_its_first_time_with_its_sentence(tmp_path):
    """torch starts a group again whatever ended it."""
    num_starts, said = starts_of("sentence", 9, tmp_path)
    assert num_starts == 1
    assert said.endswith("rank 1 of the training failed. ValueError: it must be well, got ill\n")


@pytest.mark.parametrize("kind", ["cuda", "killed"])
def test_an_error_that_may_pass_is_started_again_as_often_as_allowed(tmp_path, kind):
    """And ranks that are killed are not taken for a training that was told to stop."""
    num_starts, said = starts_of(kind, 9, tmp_path)
    assert num_starts == 3 and "rank 1 of the training failed. " in said
    assert ("SIGKILL" if kind == "killed" else "AcceleratorError: it must be well") in said


def test_a_restart_that_helps_ends_well(tmp_path):
    assert starts_of("killed", 1, tmp_path) == (2, "")


def test_sentences_last_and_what_machines_raise_may_pass():
    def raised(*errors: Exception, way: str = "while handling") -> Exception:
        """The last one, raised on the way out of those before it."""
        for before, error in pairwise(errors):
            error.__context__ = before
            if way == "from":
                error.__cause__ = before  # sets __suppress_context__
        return errors[-1]

    with pytest.raises(ValueError) as refused:
        CampaignConfig.model_validate({"rollout": {"workers": 0}})
    lasting = [
        refused.value, ValueError("a"), VersionConflict("a"), NotImplementedError("a"),
        FlyteValueException(1, "a"), raised(ValueError("a"), ValueError("b")),
        raised(OSError("a"), ValueError("b"), way="from"),
    ]  # fmt: skip
    broken = json.JSONDecodeError("a", "{", 1)
    passing = [
        RuntimeError("a"), torch.OutOfMemoryError("a"), torch.distributed.DistBackendError("a"),
        torch.distributed.DistNetworkError("a"), ConnectionError("a"), TimeoutError("a"),
        CorruptArtifact("a"), broken, FlyteRecoverableException("a"), AssertionError("a"),
        raised(RuntimeError("a"), ValueError("b")), raised(OSError("a"), ValueError("b"), ValueError("c")),
    ]  # fmt: skip
    assert [error for error in lasting if not is_lasting(error)] == []
    assert [error for error in passing if is_lasting(error)] == []


def test_of_two_ranks_that_leave_word_the_first_counts(tmp_path):
    words = [LastWord(rank=rank, text=f"of {rank}", timestamp=7) for rank in (1, 0)]
    for word in words:
        word.leave(tmp_path / "word")
    assert last_word(tmp_path / "word") == words[0] and last_word(tmp_path / "none") is None


@task(task_config=RESTARTED)
def signal_launcher(number: int, launcher: int) -> None:
    if os.environ["RANK"] == "0":
        os.kill(launcher, number)
    time.sleep(60)


@pytest.mark.parametrize(
    ("number", "raised", "said"),
    [
        (int(signal.SIGINT), KeyboardInterrupt, "^$"),
        (int(signal.SIGTERM), TrainingPreempted, "got SIGTERM and stopped"),
    ],
)
def test_ctrl_c_while_ranks_train_stays_ctrl_c_and_sigterm_is_named(number, raised, said):
    """Both were a TrainingPreempted, which did not say by what."""
    with pytest.raises(raised, match=said):
        signal_launcher(number=number, launcher=os.getpid())


def test_a_signal_after_a_training_does_what_it_did_before():
    """torch's agent left its handlers behind: Ctrl-C became an exception that ``min_success_ratio`` hides."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in signals]
    look(name="X")
    with pytest.raises(Exception, match="must be well"):
        fail()
    assert [signal.getsignal(number) for number in signals] == before


@pytest.mark.gpu
def test_ranks_of_a_warm_server_can_use_their_gpu():
    assert touch_gpu() == 3.0


@task(task_config=TorchElastic(nnodes=1, nproc_per_node=1, max_restarts=0, monitor_interval=0.1))
def touch_gpu() -> float:
    import torch

    return float(torch.ones(3, device="cuda").sum())
