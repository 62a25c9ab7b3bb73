"""What a rollout engine does: token ids in, token ids and their log-probabilities out.

Every engine passes the same tests (``tests/test_engine.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np


FinishReason = Literal["stop", "length", "abort", "tool_failure"]
"""``tool_failure``: the environment did not answer a turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The distribution to sample from and where to stop; log-probabilities are those of this distribution."""

    max_new_tokens: int
    temperature: float
    """0 = greedy; the log-probability is then that of the untempered distribution."""
    top_p: float
    stop_ids: frozenset[int]
    """All end-of-sequence ids of the policy. The stop token is part of the response: the policy chose it."""
    record_routing: Literal["none", "experts", "experts_and_weights"] = "none"
    """What to record of the router's choices. An engine that cannot record it refuses to generate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Samples of one prompt, one a seed. The seed alone decides a sample's randomness."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    num_sampled: int = 0
    """How many of the last ``prompt_ids`` are tokens that the response begins with, sampled before an abort.
    They count towards ``max_new_tokens``, the seed's randomness goes on behind them, and only what follows
    them is returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    response_ids: list[int]
    logprobs: list[float]
    """One value a response token, of the distribution that was sampled."""
    finish_reason: FinishReason
    chosen: list[bool] | None = None
    """False where the environment wrote the token; None = the policy chose all."""
    routed_experts: "np.ndarray | None" = field(default=None, compare=False)
    """[prompt + response - 1, layers, k] uint8 or int16, where asked: a row a position that was fed."""
    routed_weights: "np.ndarray | None" = field(default=None, compare=False)
    """float16 or float32 of the same shape."""
    version_spans: tuple[tuple[int, int], ...] | None = None
    """(policy version, how many tokens it sampled), in order; None where an environment's words are between
    them, under which no version is loaded."""


class Engine(Protocol):
    """Loads one policy version at a time and refuses to generate without one."""

    @property
    def version(self) -> int | None:
        """The version whose weights are loaded; None before the first ``load``."""
        ...

    def load(self, folder: Path, version: int) -> None:
        """Adopt the weights of a Hugging Face folder as ``version``; on an error no version is loaded.

        From another thread than a running ``generate``'s it may come at any time. No token is sampled then
        with a part of the old and a part of the new, and none on the old one's cache: responses come back as
        they are, with finish reason ``abort``, or go on under the new version. A ``generate`` that is called
        meanwhile waits for the load to end.
        """
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """Completions in the order of the requests and of their seeds."""
        ...

    def abort(self) -> None:
        """Make the running ``generate`` return soon, from another thread: what is not finished comes back as
        it is, with finish reason ``abort`` (and no token, if none was sampled yet). Nothing if none runs.
        """
        ...

    def describe(self) -> str:
        """What runs, for the report."""
        ...
