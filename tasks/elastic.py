"""PyTorch-elastic tasks: they register without torch, start warm, and say how a training ended.

Four differences from the plugin's ``Elastic``. Its task imports torch to be defined, only to parse
``nnodes``; ours does not, so any machine can register the graph. Its ranks import torch and transformers
anew; ours are forked from one process that did, so that only a campaign's first training waits for it. And
the plugin turns SIGTERM (a drained node) into exit code 0 without outputs; a task of one node here fails as
recoverable instead, so that Flyte runs it again. With several nodes the process of the drained one exits with
143, and its pod is started again elsewhere. Ctrl-C stays Ctrl-C. And an error that would only come again ends
the run at its first time, while torch starts a group again whatever ended it (``ranks/restarts.py``).
"""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import flytekit
from flytekit import PythonFunctionTask
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekitplugins.kfpytorch.task import Elastic, PytorchElasticFunctionTask

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

PRELOADED = ["__main__", "tasks.train", "tasks.policy.training.update"]
"""What the ranks' server imports; it must leave CUDA alone, which no forked process can use again."""


class TrainingPreempted(Exception):
    """The node of a single-node training was taken away; nothing was published, but the next attempt may
    find what this one stored."""


@dataclass
class TorchElastic(Elastic):
    """``Elastic`` with a fixed number of nodes (a range is refused), and seconds that may be fractions."""

    monitor_interval: float = 5.0  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def num_nodes(self) -> int:
        return int(self.nnodes)


class RankServer:
    """The process that ranks are forked from: alone, with one thread, and with the heavy imports done.

    It keeps the environment it was started with, so ranks are told what changed since.
    """

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None

    def start(self) -> None:
        """Returns at once; a second call does nothing."""
        if self._environment is None:
            multiprocessing.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()
            self._environment = dict(os.environ)

    def changes(self) -> dict[str, str | None]:
        """Variables set since the server's start, and with None those that are gone."""
        self.start()
        assert self._environment is not None
        names = self._environment.keys() | os.environ.keys()
        return {
            name: os.environ.get(name)
            for name in names
            if os.environ.get(name) != self._environment.get(name)
        }


RANK_SERVER = RankServer()
SHARED_MEMORY = "/dev/shm"


def run_rank(
    changes: Mapping[str, str | None], function: bytes, inputs: Mapping[str, Any], word: Path
) -> Any:
    """In a rank: the task's function, in the environment of the process that launched it."""
    from tasks.policy.ranks.restarts import word_left

    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with word_left(word):
        return cloudpickle.loads(function)(**inputs)


SHUTDOWN_SECONDS = 115
"""Between the longest ``train.grace_seconds`` and the grace period of the trainer's pods."""
_TAKEN_BY_TORCH = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class _Stopped:
    """What a training returns whose launching process got a signal. The loss of ranks never does: torch
    raises for signals to that process alone."""

    by: signal.Signals


@contextlib.contextmanager
def _signals_given_back() -> Iterator[None]:
    """torch's agent answers these signals with an ordinary exception, and goes on to do so when it has ended:
    Ctrl-C in the next generate stage was taken for the loss of a worker, and the run went on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _TAKEN_BY_TORCH}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


class TorchElasticTask(PytorchElasticFunctionTask):
    def __init__(self, task_config: TorchElastic, task_function: Callable, **kwargs: Any):
        self.num_nodes = task_config.num_nodes
        standalone = self.num_nodes == 1
        PythonFunctionTask.__init__(
            self,
            task_config=task_config,
            task_type=self._ELASTIC_TASK_TYPE_STANDALONE if standalone else self._ELASTIC_TASK_TYPE,
            task_function=task_function,
            task_type_version=1,
            **kwargs,
        )
        self.min_nodes = self.max_nodes = self.num_nodes
        self.rdzv_backend = "c10d"

    def execute(self, **kwargs: Any) -> Any:
        """Train on this node's ranks; the result of rank zero.

        Raises:
            FlyteUserRuntimeException: ranks failed more than ``max_restarts`` times, or once with what no
                restart mends; the error.
            IgnoreOutputs: the ranks of this node ended well and rank zero was another node's.
            KeyboardInterrupt: Ctrl-C.
            SystemExit: 143, SIGTERM on one of several nodes.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default too
        # told to stop, ranks store what they have done; torch kills them after 30 s unless it is told
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        # torch's own folder would stay
        with tempfile.TemporaryDirectory(prefix="moe-rl-ranks-") as logs, _signals_given_back():
            return self._launch(logs, kwargs)

    def _launch(self, logs: str, inputs: Mapping[str, Any]) -> Any:
        """With a folder for what ranks say of their errors."""
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from tasks.policy.ranks.restarts import BACKEND, WORD, RestartRefused, last_word

        word = Path(logs) / "last-word"
        settings = cast(TorchElastic, self.task_config)
        config = LaunchConfig(
            run_id=flytekit.current_context().execution_id.name,
            min_nodes=self.num_nodes,
            max_nodes=self.num_nodes,
            nproc_per_node=settings.nproc_per_node,
            rdzv_backend=BACKEND,
            rdzv_configs={**settings.rdzv_configs, WORD: str(word)},
            rdzv_endpoint=os.environ.get("PET_RDZV_ENDPOINT", "localhost:0"),
            max_restarts=settings.max_restarts,
            monitor_interval=settings.monitor_interval,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        function = cloudpickle.dumps(self._task_function)
        try:
            results = elastic_launch(config, run_rank)(RANK_SERVER.changes(), function, inputs, word)
        except (ChildFailedError, RestartRefused) as failed:
            # torch has logged each rank's traceback, and would have this one end with it five times again
            if last := last_word(word):
                raise FlyteUserRuntimeException(
                    _failed(last.rank, last.text, self.num_nodes), timestamp=last.timestamp
                ) from None
            assert isinstance(failed, ChildFailedError)
            rank, first = failed.get_first_failure()
            raise FlyteUserRuntimeException(
                _said(rank, first, self.num_nodes), timestamp=first.timestamp
            ) from None
        except OSError as error:
            _require_shared_memory(settings.nproc_per_node, error)
            raise
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            if self.num_nodes == 1:
                return _Stopped(stopped.sigval)
            raise SystemExit(128 + signal.SIGTERM) from None
        if 0 not in results:
            raise IgnoreOutputs
        return results[0]

    def post_execute(self, user_params: Any, rval: Any) -> Any:
        if isinstance(rval, _Stopped):
            # raised here, outside the user's code, Flyte counts it as the system's failure
            raise TrainingPreempted(
                f"the training's process got {rval.by.name} and stopped. Run the campaign again to go on."
            )
        return super().post_execute(user_params, rval)


def _said(rank: int, failure: "ProcessFailure", num_nodes: int) -> RuntimeError:
    """A rank that a signal or ``os._exit`` ended left no record of an exception: torch's text would then be
    how to ask for one, without the exit code. An agent has failures of its own node only."""
    message: Any = failure.message
    text = message["message"] if isinstance(message, dict) else message
    if failure.exitcode >= 0 and not os.path.isfile(failure.error_file):
        text = (
            f"Its process ended with exit code {failure.exitcode} and left no exception; what it wrote is in "
            "the log of its node."
        )
    return _failed(rank, text, num_nodes)


def _failed(rank: int, text: str, num_nodes: int) -> RuntimeError:
    where = f" on {socket.gethostname()}" if num_nodes > 1 else ""
    return RuntimeError(f"rank {rank} of the training{where} failed. {text}")


def _require_shared_memory(num_ranks: int, error: OSError) -> None:
    """Torch makes a page of shared memory for each of its semaphores: two a rank and five."""
    if error.errno != errno.ENOSPC:  # of another kind, perhaps on a machine without such a folder
        return
    needed, free = (2 * num_ranks + 5) * os.sysconf("SC_PAGE_SIZE"), shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise RuntimeError(
            f"{SHARED_MEMORY} must have {needed:,} bytes free for {num_ranks} ranks to start, got {free:,}. "
            "Remove what ended processes left there, or give this machine more: docker run --shm-size=1g, or "
            "the shm volume of the pod."
        ) from error


TaskPlugins.register_pythontask_plugin(TorchElastic, TorchElasticTask)
