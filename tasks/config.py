"""Every workflow input, checked at launch; no torch.

``CampaignConfig`` is one YAML under ``configs/campaigns/``. Sections are frozen and refuse unknown keys:
Flyte drops the unknown keys of a dataclass silently, so a typo would train the default. Relations between
fields are checked here and only here; an error says the field, the relation, the values and what to do.
"""

import hashlib
import json
import math
from typing import Any, Literal, Self

import click
from pydantic import Field, ValidationError, model_validator

from tasks.section import Section, divisors
from tasks.train_config import TrainConfig

IMMUTABLE_SECTIONS = ("seed", "model", "environment", "warm_start")
"""What a campaign may not change when it resumes: its versions would no longer be one lineage."""


class ConfigError(click.UsageError, ValueError):
    """A configuration that is refused at launch; the command line shows the message without a traceback."""


class RandomPolicy(Section):
    """A randomly initialised mixture-of-experts policy, small enough for a CPU."""

    family: Literal["qwen3_moe", "deepseek_v3"] = "qwen3_moe"
    num_layers: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=64, ge=16)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=8)
    num_experts: int = Field(default=8, ge=2)
    experts_per_token: int = Field(default=2, ge=1)
    expert_width: int = Field(default=64, ge=8)

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}. Set num_kv_heads to one of {divisors(self.num_heads)}."
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts, got {self.experts_per_token} > "
                f"{self.num_experts}. Lower experts_per_token."
            )
        return self


class ModelConfig(Section):
    """Where version 0 comes from."""

    folder: str = ""
    """A Hugging Face checkpoint folder that becomes version 0; empty builds ``random``."""
    num_experts: int = Field(default=0, ge=0)
    """Routed experts a layer of the checkpoint in ``folder``: what a mesh is checked against at launch."""
    random: RandomPolicy = RandomPolicy()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in a checkpoint. The trainer keeps float32 ones and stores them with the optimizer."""

    @property
    def experts(self) -> tuple[str, int]:
        """The field that says how many experts a layer has, and what it says."""
        if self.folder:
            return "model.num_experts", self.num_experts
        return "model.random.num_experts", self.random.num_experts

    @model_validator(mode="after")
    def _folder_comes_with_its_experts(self) -> Self:
        if bool(self.folder) != bool(self.num_experts):
            raise ValueError(
                "num_experts must be given with model.folder and only with it, got "
                f"folder={self.folder!r}, num_experts={self.num_experts}. Set it to the number of routed "
                "experts in the folder's config.json, or set neither."
            )
        return self


class EnvironmentConfig(Section):
    name: Literal["reverse_digits", "sort_digits"] = "reverse_digits"
    num_digits: int = Field(default=4, ge=2, le=8)
    held_out: int = Field(default=256, ge=1)
    """Prompts that are kept out of training; every evaluation uses them."""

    @model_validator(mode="after")
    def _some_prompts_remain(self) -> Self:
        if self.held_out * 2 > 10**self.num_digits:
            raise ValueError(
                f"held_out must be at most half of the {10**self.num_digits} prompts of {self.num_digits} "
                f"digits, got {self.held_out}. Lower held_out or raise num_digits."
            )
        return self


class RolloutConfig(Section):
    engine: Literal["embedded"] = "embedded"
    workers: int = Field(default=2, ge=1)
    """Mapped tasks that drain the work queue; on a cluster each is one Spot node. Of no effect for
    ``standing``."""
    pool: Literal["tasks", "standing"] = "tasks"
    """``tasks``: each iteration starts its workers as mapped tasks. ``standing``: workers with warm engines
    run beside the campaign (``python -m tasks.engine.standing``), and the generate stage waits for them."""
    standing_timeout_seconds: float = Field(default=900.0, gt=0)
    """A standing pool that settles nothing for this long stops the run."""
    prompts_per_iteration: int = Field(default=512, ge=1)
    group_size: int = Field(default=8, ge=2)
    """Samples of one prompt. Group-relative advantages of a single sample are always zero, so at least 2."""
    oversample: float = Field(default=0.0, ge=0, le=1)
    """Share of prompts offered beyond ``prompts_per_iteration``. The iteration ends when that many groups are
    published; stragglers are dropped and counted. Which groups are the first is not repeatable."""
    groups_per_portion: int = Field(default=64, ge=1)
    """Prompt groups that one lease covers."""
    max_portions_per_worker: int = Field(default=0, ge=0)
    """Leases one worker task takes before it leaves the rest to the others; 0 = until the queue is empty. A
    local run executes mapped tasks one after the other, so without it the first worker would do all."""
    max_new_tokens: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    batch_size: int = Field(default=512, ge=1)
    """Sequences the embedded engine decodes, and a worker publishes, together: what a lost worker may have to
    redo."""
    lease_seconds: float = Field(default=60.0, gt=0)
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
    def quota_groups(self) -> int:
        """Groups at which an iteration is closed; 0 = when all are done."""
        return self.prompts_per_iteration if self.oversample else 0

    @property
    def samples_per_iteration(self) -> int:
        return self.prompts_per_iteration * self.group_size

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


class RewardConfig(Section):
    max_failure_share: float = Field(default=0.05, ge=0, lt=1)
    """A larger share of samples that could not be scored stops the run: a failure is no reward of 0."""
    control: Literal["none", "flipped", "shuffled"] = "none"
    """Control experiments: a flipped (1 - reward) or shuffled reward must not learn the task."""


class BufferConfig(Section):
    url: str | tuple[str, ...] = "embedded"
    """``embedded`` starts a Valkey server beside the store; else ``valkey://`` or ``valkeys://`` (TLS). A
    list spreads the portions over several servers (shards)."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded server; 0 picks a free one."""
    capacity_mb: int = Field(default=512, ge=1)
    """Payload bytes of unscored rollouts, on each server, at which publishing waits (backpressure)."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases of one portion before it is set aside as poisoned."""


class AlgorithmConfig(Section):
    """GRPO (arXiv 2402.03300) with the clip-higher and token-level loss of DAPO (arXiv 2503.14476)."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    entropy_coefficient: float = Field(default=0.01, ge=0)
    normalize_by_std: bool = True
    """Divide centred rewards by the group's standard deviation (GRPO); off = Dr. GRPO (arXiv 2503.20783)."""
    num_minibatches: int = Field(default=32, ge=1)
    """Optimizer steps an iteration; each sees its share of the samples once."""


class WarmStartConfig(Section):
    """Supervised steps on the environment's demonstrations before the first iteration."""

    steps: int = Field(default=0, ge=0)
    """0 = none."""
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)


class CheckpointConfig(Section):
    store: str = "./runs"
    """``s3://bucket/prefix``, or a folder: then an embedded S3 server keeps its data there."""
    endpoint_url: str = ""
    """For S3 services other than Amazon's."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded server; 0 picks a free one."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """Free space that the embedded store's folder must have before a run starts."""


class ScheduleConfig(Section):
    iterations: int = Field(default=20, ge=1)
    segment_iterations: int = Field(default=10, ge=1, le=40)
    """Iterations of one workflow record. Flyte stores a record in one object of about 1.5 MB."""
    max_staleness: int = Field(default=0, ge=0, le=8)
    """Versions by which the sampling policy may be older than the one it trains; 0 = on-policy. With 1,
    generation of iteration k + 1 runs while iteration k trains."""
    evaluate_every: int = Field(default=5, ge=1)
    """Evaluate each n-th version; the first and the last are always evaluated."""


class CampaignConfig(Section):
    """One campaign: the value of ``--config``, of a launch plan's fixed input and of a schedule."""

    name: str = Field(default="laptop", pattern=r"^[a-z0-9][a-z0-9-]{2,62}$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _relations_between_sections(self) -> Self:
        field, experts = self.model.experts
        for name, size in (("ep", self.train.ep), ("fsdp", self.train.fsdp)):
            if experts % size:
                both = [size for size in divisors(self.train.world_size) if experts % size == 0]
                raise ValueError(
                    f"train.{name} must divide {field}, got {name}={size}, num_experts={experts}. "
                    f"Set train.{name} to one of {both}."
                )
        if self.algorithm.num_minibatches > self.rollout.samples_per_iteration:
            raise ValueError(
                f"algorithm.num_minibatches must be at most the {self.rollout.samples_per_iteration} samples "
                f"of an iteration, got {self.algorithm.num_minibatches}. Lower it or raise "
                "rollout.prompts_per_iteration."
            )
        if self.rollout.max_new_tokens <= self.environment.num_digits:
            raise ValueError(
                "rollout.max_new_tokens must exceed environment.num_digits (an answer and its end), got "
                f"{self.rollout.max_new_tokens} <= {self.environment.num_digits}. Set it to "
                f"{self.environment.num_digits + 4}."
            )
        return self

    @classmethod
    def model_validate_json(
        cls, json_data: str | bytes | bytearray, **kwargs: Any
    ) -> Self:  # what Flyte calls
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as error:
            raise ConfigError(_readable(error)) from None

    def digest(self) -> str:
        """Hex digest of the values; equal for equal values however they were written."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def with_overrides(config: CampaignConfig, **overrides: str | int | float | None) -> CampaignConfig:
    """The effective configuration: dotted fields (``train__learning_rate=...``) replace the file's values.

    ``None`` keeps the file's value. The result passes the same checks as a file.
    """
    data = config.model_dump()
    for path, value in overrides.items():
        if value is not None:
            *sections, field = path.split("__")
            target = data
            for section in sections:
                target = target[section]
            target[field] = value
    return CampaignConfig.model_validate_json(json.dumps(data))


def changes(before: CampaignConfig, after: CampaignConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted field -> (value before, value after) for every field that differs."""
    old, new = _flat(before.model_dump()), _flat(after.model_dump())
    return {
        name: (old.get(name), new.get(name)) for name in sorted(old | new) if old.get(name) != new.get(name)
    }


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _readable(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
        lines.append(f"{where}: {message}{got}" if where else f"{message}{got}")
    return "configuration refused.\n" + "\n".join(lines)
