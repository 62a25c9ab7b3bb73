"""Which errors of a rank a restart may mend, and how one that it cannot ends the training at its first time.

torchrun's agent starts a group again whatever ended it. Before it does, it asks the rendezvous for the new
group; the one of this file refuses where a rank has left word of an error that would only come again. With
several nodes that closes the rendezvous for all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flytekit.exceptions.user import FlyteRecoverableException, FlyteTimeout, FlyteUserException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

BACKEND = "c10d-while-restarts-help"
WORD = "word"
"""The key of ``rdzv_configs`` that names the file."""
LASTING = (ValueError, NotImplementedError, FlyteUserException)
"""What is raised with a sentence for people, and what Flyte does not run again: the configuration, a version
or the data must change. RuntimeErrors are CUDA's, NCCL's, gloo's and the store's as well."""
PASSING = (FlyteRecoverableException, FlyteTimeout, UnicodeError, json.JSONDecodeError)
"""Of those kinds, and yet perhaps of bytes that did not arrive as they were sent."""


def is_lasting(error: BaseException) -> bool:
    """Whether it would come again; not if it was raised on the way out of one that may pass."""
    cause = None if error.__suppress_context__ else error.__context__
    is_of_kind = isinstance(error, LASTING) and not isinstance(error, PASSING)
    return is_of_kind and (cause is None or is_lasting(cause))


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWord:
    """An error of a rank that no restart mends."""

    rank: int
    text: str
    timestamp: int

    def leave(self, path: Path) -> None:
        """The first of a node's ranks counts: those after it may have failed because of it."""
        own = path.with_name(f"{path.name}.{self.rank}")
        own.write_text(json.dumps(asdict(self)))
        with contextlib.suppress(FileExistsError):
            os.link(own, path)


def last_word(path: Path) -> LastWord | None:
    return LastWord(**json.loads(path.read_text())) if path.exists() else None


@contextlib.contextmanager
def word_left(path: Path) -> Iterator[None]:
    """In a rank: its error, if it would come again, is known to its agent."""
    try:
        yield
    except Exception as error:
        if is_lasting(error):
            text = f"{type(error).__name__}: {error}"  # as torch records an error
            LastWord(rank=int(os.environ["RANK"]), text=text, timestamp=int(time.time())).leave(path)
        raise


class RestartRefused(Exception):
    """A rank of this node has left word."""


class RendezvousWhileRestartsHelp(RendezvousHandler):
    """torch's own, until a rank of this node has left word."""

    def __init__(self, handler: RendezvousHandler, path: Path) -> None:
        self.handler, self.path = handler, path

    def next_rendezvous(self) -> RendezvousInfo:
        if self.path.exists():
            raise RestartRefused
        return self.handler.next_rendezvous()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self.handler.use_agent_store

    def is_closed(self) -> bool:
        return self.handler.is_closed()

    def set_closed(self) -> None:
        self.handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return self.handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self.handler.get_run_id()

    def shutdown(self) -> bool:
        return self.handler.shutdown()


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    config = dict(parameters.config)
    path = Path(config.pop(WORD))
    handler = rendezvous_handler_registry.create_handler(
        RendezvousParameters(
            "c10d",
            parameters.endpoint,
            parameters.run_id,
            parameters.min_nodes,
            parameters.max_nodes,
            parameters.local_addr,
            **config,
        )
    )
    return RendezvousWhileRestartsHelp(handler, path)


rendezvous_handler_registry.register(BACKEND, _make)
