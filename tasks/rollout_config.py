"""How samples are generated and where they wait: engine, workers, Spot, buffer; no torch."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.section import Section
from tasks.sglang_config import SglangConfig


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    sglang: SglangConfig = SglangConfig()
    """With ``engine: sglang`` only."""
    workers: int = Field(default=2, ge=1)
    """Mapped tasks that drain the work queue; on a cluster each is one Spot node. Of no effect for
    ``standing``."""
    pool: Literal["tasks", "standing"] = "tasks"
    """``tasks``: each iteration starts its workers as mapped tasks. ``standing``: workers with warm engines
    run beside the campaign (``python -m tasks.engine.standing``), and the generate stage waits for them."""
    follow: Literal["required", "newest"] = "required"
    """Which version a standing worker samples a portion with: the one that it requires, or at least that and
    always the newest that is published. ``newest`` is taken while responses run (``sglang.in_flight`` says
    what becomes of them; the embedded engine aborts and resumes them): each token has its version, a sample
    is as old as its oldest token. Tokens then depend on when a version came, and bits do not repeat."""
    standing_timeout_seconds: float = Field(default=900.0, gt=0)
    """A standing pool that settles nothing for this long stops the run."""
    prompts_per_iteration: int = Field(default=512, ge=1)
    group_size: int = Field(default=8, ge=2)
    """Samples of one prompt. Group-relative advantages of a single sample are always zero, so at least 2."""
    oversample: float = Field(default=0.0, ge=0, le=1)
    """Share of prompts offered beyond ``prompts_per_iteration``. The iteration ends when that many groups are
    published; what is left is counted. Which groups are the first is not repeatable."""
    leftovers: Literal["drop", "keep"] = "drop"
    """What becomes of groups beyond the quota and of prompts that nobody finished: dropped, or kept for the
    next iteration, whose samples may then be one version older than ``schedule.max_staleness``."""
    partial: Literal["drop", "keep"] = "drop"
    """What becomes of responses that a worker has to abort: their tokens are sampled again, or kept and
    continued. ``keep`` gives up bits that repeat (``train.deterministic`` then covers training alone)."""
    refill_rounds: int = Field(default=0, ge=0, le=8)
    """Times that an iteration offers fresh prompts in place of groups whose samples all earned the same, as
    long as fewer than ``prompts_per_iteration`` groups differ (DAPO's dynamic sampling); then it goes on with
    what there is."""
    groups_per_portion: int = Field(default=64, ge=1)
    """Prompt groups that one lease covers."""
    portions_at_once: int = Field(default=0, ge=0)
    """Leases that one worker samples at the same time, so that its engine has work at the end of one. 0 =
    with SGLang a worker's share of the iteration's portions (all, for ``standing``), at most 4; with the
    embedded engine, which fills a batch with one, 1."""
    max_portions_per_worker: int = Field(default=0, ge=0)
    """Leases one worker task takes before it leaves the rest to the others; 0 = until the queue is empty. A
    local run executes mapped tasks one after the other, so without it the first worker would do all."""
    max_new_tokens: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    record_routing: Literal["none", "experts", "experts_and_weights"] = "none"
    """What travels with each sample of the router's choices (a byte or two an id, two to four a weight, for
    each token, layer and chosen expert), so that a trainer can replay them."""
    batch_size: int = Field(default=512, ge=1)
    """Sequences the embedded engine decodes, and a worker publishes, together: what a lost worker may have to
    redo."""
    lease_seconds: float = Field(default=60.0, ge=0.001)
    """A lease that is not renewed for this long passes to another worker."""
    grace_seconds: float = Field(default=60.0, ge=0)
    """What a worker that has to leave (SIGTERM, Spot notice) spends on finishing samples; then it aborts
    them. Keep it below the pod's termination grace period of 75 s."""
    metadata_url: str = ""
    """Metadata service to ask for Spot notices, on EC2 ``http://169.254.169.254``; empty = not asked."""
    notice_poll_seconds: float = Field(default=5.0, gt=0)
    """Time between two questions to the metadata service."""

    @property
    def num_portions(self) -> int:
        return -(-self.prompts_offered // self.groups_per_portion)

    @property
    def prompts_offered(self) -> int:
        return math.ceil(self.prompts_per_iteration * (1 + self.oversample))

    @property
    def prompts_reserved(self) -> int:
        """Positions of the environment's order that one iteration may offer, refills included."""
        return self.prompts_offered * (1 + self.refill_rounds)

    @property
    def quota_groups(self) -> int:
        """Groups at which an iteration is closed; 0 = when all are done."""
        return self.prompts_per_iteration if self.oversample else 0

    @property
    def samples_per_iteration(self) -> int:
        return self.prompts_per_iteration * self.group_size

    @property
    def context_limit(self) -> int:
        """Positions that the engine serves, where that is bounded; 0 = the policy's own."""
        return self.sglang.context_length if self.engine == "sglang" else 0

    @property
    def context_unused(self) -> int:
        """Positions at the end of a context that the engine never fills. SGLang 0.5.17 refuses what exceeds
        the context, and shortens without a word what exceeds it less these."""
        return 2 if self.engine == "sglang" else 0

    @property
    def is_repeatable(self) -> bool:
        """Whether the engine gives the same tokens for the same sample, whatever it samples beside it."""
        return self.engine == "embedded" or self.sglang.deterministic

    @model_validator(mode="after")
    def _the_engine_can_do_it(self) -> Self:
        if self.engine == "embedded" and self.sglang != SglangConfig():
            raise ValueError(
                "sglang speaks to engine 'sglang' only, got engine='embedded' and "
                f"{sorted(self.sglang.model_fields_set)} of it. Leave them out, or set engine to 'sglang'."
            )
        if self.engine == "embedded" and self.portions_at_once > 1:
            raise ValueError(
                "portions_at_once must be 0 or 1 for the embedded engine, which fills a batch with one, "
                f"got {self.portions_at_once}. Raise groups_per_portion or workers instead."
            )
        unused = self.context_unused
        if 0 < self.context_limit <= self.max_new_tokens + unused:
            raise ValueError(
                f"sglang.context_length must exceed max_new_tokens by more than {unused}, or be 0 for the "
                f"policy's own, got {self.context_limit} and {self.max_new_tokens}. Raise it, or lower "
                "max_new_tokens."
            )
        if self.engine == "sglang" and self.record_routing == "experts_and_weights":
            raise ValueError(
                "record_routing must be 'none' or 'experts' for sglang, whose server returns expert ids "
                "only, got 'experts_and_weights'."
            )
        return self

    @model_validator(mode="after")
    def _somebody_follows(self) -> Self:
        if self.follow == "newest" and self.pool != "standing":
            raise ValueError(
                "pool must be 'standing' with follow 'newest': the workers of an iteration's tasks end with "
                f"it, on the version they began with, got {self.pool!r}. Set pool to 'standing', or follow "
                "to 'required'."
            )
        return self

    @model_validator(mode="after")
    def _a_quota_is_not_refilled(self) -> Self:
        if self.refill_rounds and self.oversample:
            raise ValueError(
                "oversample must be 0 with refill_rounds: an iteration that is closed at its quota takes no "
                f"more prompts, got oversample={self.oversample} and {self.refill_rounds} rounds. Set one of "
                "them to 0."
            )
        return self

    @model_validator(mode="after")
    def _something_can_be_left(self) -> Self:
        if self.leftovers == "keep" and not self.oversample:
            raise ValueError(
                "oversample must be above 0 where leftovers are kept, got oversample=0: without it an "
                "iteration samples exactly what it trains. Raise rollout.oversample or set leftovers to drop."
            )
        return self

    @model_validator(mode="after")
    def _workers_can_take_all_portions(self) -> Self:
        reach = self.workers * self.max_portions_per_worker
        if self.max_portions_per_worker and reach < self.num_portions:
            raise ValueError(
                f"workers * max_portions_per_worker must reach the {self.num_portions} portions of an "
                f"iteration, got {self.workers} * {self.max_portions_per_worker} = {reach}. Raise "
                f"max_portions_per_worker to {-(-self.num_portions // self.workers)}, or set it to 0."
            )
        return self


class BufferConfig(Section):
    url: str | list[str] = "embedded"
    """``embedded`` starts a Valkey server beside the store; else ``valkey://`` or ``valkeys://`` (TLS). A
    list spreads the portions over several servers (shards)."""
    password_file: str = ""
    """File with the password of the user that ``url`` names: a mounted secret, so that no password gets into
    configurations, and so into Flyte's records and the store."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded server; 0 picks a free one."""
    capacity_mb: int = Field(default=512, ge=1)
    """Payload bytes of unscored rollouts, on each server, at which publishing waits (backpressure)."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases of one portion before it is set aside as poisoned."""

    @property
    def urls(self) -> list[str]:
        """A server each."""
        return [self.url] if isinstance(self.url, str) else self.url

    @model_validator(mode="after")
    def _a_password_file_needs_a_user(self) -> Self:
        for url in self.urls:
            user = url.partition("://")[2].partition("@")
            if self.password_file and (not user[1] or ":" in user[0]):
                raise ValueError(
                    "password_file goes with url scheme://USER@HOST, without a password in it, got "
                    f"url={url.replace(user[0], '...') if user[1] else url!r}. Change the url or leave "
                    "password_file empty."
                )
        return self
