"""Typed values that travel between tasks: references, counts and statistics, never token data.

Shared by every task, so this file imports nothing heavy. ``PolicyVersion`` lives with the store that makes
it.
"""

import json
from typing import Any, Self

from pydantic import Field, model_validator

from tasks.artifacts.version import PolicyVersion
from tasks.config import CampaignConfig
from tasks.section import Section


class CampaignRun(Section):
    """The effective configuration of one run, fixed by the first task."""

    config: CampaignConfig
    lineage: int
    """``--fresh`` starts the next lineage of a campaign's name; earlier ones stay as they are."""
    code_revision: str
    config_digest: str = ""
    """Of ``config``, where it was written: what is left out there must mean the same where it is read."""

    @model_validator(mode="after")
    def _defaults_mean_the_same(self) -> Self:
        if self.config_digest and self.config_digest != self.config.digest():
            raise ValueError(
                "a run's configuration must be read by code with the defaults it was written with, got "
                f"digest {self.config.digest()} instead of {self.config_digest}. Start the run anew with "
                "this code."
            )
        object.__setattr__(self, "config_digest", "")  # it is checked, and says nothing more
        return self

    def model_dump_json(self, **kwargs: Any) -> str:  # what Flyte stores, in every node of an unrolled graph
        """Without the defaults: a segment's record would outgrow Flyte's limit."""
        data = json.loads(super().model_dump_json(exclude_defaults=True, **kwargs))
        return json.dumps({**data, "config_digest": self.config.digest()})

    @property
    def campaign(self) -> str:
        """Prefix of everything this lineage stores."""
        return f"{self.config.name}.{self.lineage:04d}"


class CampaignState(Section):
    """Where a campaign stands when a run starts."""

    versions: list[PolicyVersion]
    """The newest ``max_staleness + 1`` published versions, oldest first; empty for a new campaign."""
    iterations_done: int


class PromptSet(Section):
    """The work of one iteration, on the queue."""

    iteration: int
    behavior_version: int
    """The policy version that must sample it; with ``rollout.follow: newest`` the oldest that may."""
    num_portions: int
    num_groups: int
    num_samples: int
    refill: int = 0
    """0 = the iteration's first prompts; n = those of its n-th refill."""


class RolloutReport(Section):
    """What one worker did in one task."""

    iteration: int
    worker: str
    engine: str
    num_portions: int
    num_samples: int
    num_tokens: int
    seconds: float
    load_seconds: float


class ScoreReport(Section):
    """The rewards of one iteration, summed up."""

    iteration: int
    behavior_version: int
    num_samples: int
    num_failures: int
    reward_mean: float
    exact_share: float
    finished_share: float
    response_tokens_mean: float
    generate_seconds: float
    generate_load_seconds: float
    generated_tokens: int
    score_seconds: float
    num_offered: int = 0
    """Samples whose prompts were put on the queue, refills included."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Parts of the reward, and alerts."""
    waiting: dict[str, float] = Field(default_factory=dict)
    """Seconds that stages worked and waited."""


class WorkerThroughput(Section):
    """What one worker published of an iteration, and the seconds it sampled for it."""

    samples: int
    tokens: int
    seconds: float


class TrainBatch(Section):
    """A sealed batch and its ledger: every produced sample is in it or rejected with a reason."""

    iteration: int
    """-1 for a supervised warm start."""
    objective: str
    """``clipped_policy`` or ``supervised``."""
    key: str
    sha256: str
    num_samples: int
    behavior_version: int
    """The newest version that sampled any token of it; -1 for demonstrations."""
    produced: int
    rejected: dict[str, int]
    metrics: dict[str, float]
    seconds: dict[str, float]
    sealed_at: float
    """Unix time; what passes until the trainer computes is start-up."""
    carried_in: int = 0
    """Samples inherited from the iteration before."""
    carried_out: int = 0
    """Samples left over for the next iteration; neither trained nor rejected here."""
    handed_on: int = 0
    """Samples of prompts that nobody finished and that are offered again."""
    oldest_version: int | None = None
    """Oldest policy version that sampled any token of it."""
    offered: int = 0
    """Samples whose prompts were put on the queue; more than ``produced`` where a quota was met early."""
    late: int = 0
    """Samples that came after the quota was met and were not stored."""
    waiting: dict[str, float] = Field(default_factory=dict)
    """Seconds that stages worked and waited."""
    workers: dict[str, WorkerThroughput] = Field(default_factory=dict)


class SampleArchive(Section):
    """Every sample of an iteration with its fate, in the store."""

    iteration: int
    key: str
    num_samples: int
    num_bytes: int


class Candidate(Section):
    """Trained weights whose shards are stored, but which are not a version yet: ``publish`` decides that."""

    manifest_json: str
    """The manifest to commit, as JSON."""


class RewardModelReport(Section):
    """A reward model that was trained and stored."""

    folder: str
    accuracy: float
    """Of pairs that were kept out."""
    first_loss: float
    last_loss: float
    seconds: float


class CampaignSummary(Section):
    """What a run ends with."""

    campaign: str
    version: PolicyVersion
    iterations_done: int
    tensor_digest: str
    exact_sampled: float
    exact_greedy: float
    produced: int
    trained: int
    rejected: dict[str, int]
    pending: int
    report: str
    """Address of the HTML report."""


class Evaluation(Section):
    """Held-out score of one version."""

    version: int
    iteration: int
    num_prompts: int
    exact_greedy: float
    exact_sampled: float
    reward_sampled: float
    seconds: float
