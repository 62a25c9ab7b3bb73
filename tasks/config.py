"""Every workflow input, checked at launch; no torch.

``CampaignConfig`` is one YAML under ``configs/campaigns/``. Sections are frozen and refuse unknown keys:
Flyte drops the unknown keys of a dataclass silently, so a typo would train the default. Relations between
fields of a section are checked in its file (``*_config.py``), those between sections here; an error says the
field, the relation, the values and what to do.
"""

import hashlib
import json
import re
from dataclasses import replace
from typing import Any, Self

import click
from pydantic import Field, ValidationError, field_validator, model_validator

from tasks.algorithm_config import AlgorithmConfig
from tasks.checkpoint_config import CheckpointConfig
from tasks.environment_config import EnvironmentConfig
from tasks.grid import Grid
from tasks.model_config import ModelConfig, WarmStartConfig
from tasks.preflight_config import PreflightConfig
from tasks.reward_config import RewardConfig
from tasks.rollout_config import BufferConfig, RolloutConfig
from tasks.section import Section, divisors
from tasks.train_config import TrainConfig

IMMUTABLE_SECTIONS = ("seed", "model", "environment", "warm_start")
"""What a campaign may not change when it resumes: its versions would no longer be one lineage."""
FIXED_BY_TRAINING = ("train.freeze_router",)
"""Nor these behind its first iteration, whose optimizer has a state of exactly the weights that it trains."""


class ConfigError(click.UsageError, ValueError):
    """A configuration that is refused at launch; the command line shows the message without a traceback."""


class ScheduleConfig(Section):
    iterations: int = Field(default=20, ge=1)
    segment_iterations: int = Field(default=10, ge=1, le=25)
    """Iterations of one workflow record. Flyte stores a record in one object of about 1.5 MB."""
    max_staleness: int = Field(default=0, ge=0, le=8)
    """Versions by which the sampling policy may be older than the one it trains; 0 = on-policy. With 1,
    generation of iteration k + 1 runs while iteration k trains."""
    evaluate_every: int = Field(default=5, ge=1)
    """Evaluate each n-th version; the first and the last are always evaluated."""


class CampaignConfig(Section):
    """One campaign: the value of ``--config``, of a launch plan's fixed input and of a schedule."""

    name: str = "laptop"
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
    preflight: PreflightConfig = PreflightConfig()

    @field_validator("name")
    @classmethod
    def _the_name_fits_labels_and_folders(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", name):
            raise ValueError(
                "must be 3 to 63 lower-case letters, digits and hyphens, and begin and end with a letter or "
                f"digit, as labels of Kubernetes do, got {name!r}. Choose such a name."
            )
        return name

    @model_validator(mode="after")
    def _relations_between_sections(self) -> Self:
        self._check_mesh()
        if self.algorithm.num_minibatches > self.rollout.samples_per_iteration:
            raise ValueError(
                f"algorithm.num_minibatches must be at most the {self.rollout.samples_per_iteration} samples "
                f"of an iteration, got {self.algorithm.num_minibatches}. Lower it or raise "
                "rollout.prompts_per_iteration."
            )
        self._check_models_beside_the_policy()
        self._check_engine_precision()
        self._check_newer_versions()
        self._check_longest_row()
        self.algorithm.check_length(self.rollout.max_new_tokens)
        first = 1 if self.warm_start.steps else 0
        if self.algorithm.kl != "none" and self.algorithm.reference_version > first:
            raise ValueError(
                f"algorithm.reference_version must be there when the first iteration trains: at most {first} "
                f"with warm_start.steps={self.warm_start.steps}, got {self.algorithm.reference_version}. Set "
                f"it to {first}."
            )
        replays, records = self.train.replay_routing, self.rollout.record_routing
        if replays not in ("none", records) and (replays, records) != ("experts", "experts_and_weights"):
            raise ValueError(
                "train.replay_routing must be something that rollout.record_routing records, got "
                f"replay_routing={replays!r}, record_routing={records!r}. Set record_routing to {replays!r}."
            )
        if self.environment.answers:
            self.check_answered_turns()
        if self.rollout.max_new_tokens <= (shortest := self.environment.shortest_answer):
            raise ValueError(
                "rollout.max_new_tokens must exceed environment.num_digits (an answer and its end), got "
                f"{self.rollout.max_new_tokens} <= {shortest}. Set it to {shortest + 4}."
            )
        return self

    def _check_mesh(self) -> None:
        """Against what the configuration knows of the model; a checkpoint's own file says the rest."""
        grid, (field, experts) = self.train.grid, self.model.experts
        product = "fsdp" if grid.cp * grid.tp == 1 else "fsdp * cp * tp"
        for axis, name, size in (("ep", "ep", grid.ep), ("fsdp", product, grid.expert_shards)):
            if experts % size:
                sizes = divisors(grid.stage_size)
                choices = [n for n in sizes if _holds(replace(grid, **{axis: n}), experts)]
                raise ValueError(
                    f"train.{name} must divide {field}, got {name}={size}, num_experts={experts}. Set "
                    f"train.{axis} to one of {choices or [n for n in sizes if experts % n == 0]}."
                )
        if not self.model.folder:
            shape = self.model.random
            grid.check_model(
                "model.random",
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                num_layers=shape.num_layers,
            )

    def _check_models_beside_the_policy(self) -> None:
        """What reads a batch with a model that is not cut into stages, or replays by whole sequences."""
        algorithm, train = self.algorithm, self.train
        wanted = {
            "algorithm.kl": algorithm.kl != "none",
            "algorithm.advantage 'teacher'": algorithm.advantage == "teacher",
            "algorithm.advantage 'gae'": algorithm.advantage == "gae",
            "algorithm.correction.proximal": algorithm.correction.proximal != "behavior",
            "train.replay_routing": train.replay_routing != "none",
        }
        is_whole = algorithm.advantage == "gae" or train.replay_routing != "none"
        sizes = {"pp": train.pp, **({"cp": train.cp} if is_whole else {})}
        sizes |= {"tp": train.tp} if algorithm.advantage == "gae" else {}
        for name, size in sizes.items():
            if size > 1 and any(wanted.values()):
                asked = ", ".join(field for field, is_on in wanted.items() if is_on)
                raise ValueError(f"train.{name} must be 1 with {asked}, got {size}. Set it to 1.")

    @property
    def max_age(self) -> int:
        """Versions by which a sample may be older than the policy it trains."""
        return self.schedule.max_staleness + (self.rollout.leftovers == "keep")

    def _check_engine_precision(self) -> None:
        server = self.rollout.sglang
        is_plain_cuda = (
            self.rollout.engine == "sglang" and server.device == "cuda" and not server.deterministic
        )
        if is_plain_cuda and self.model.dtype == "float32":
            raise ValueError(
                "model.dtype must be 'bfloat16' for sglang on CUDA, whose norms take half precision outside "
                "its deterministic mode, got 'float32'. Set it so, or rollout.sglang.deterministic."
            )

    def _check_newer_versions(self) -> None:
        """What versions that come while responses run cannot go with."""
        if self.rollout.follow == "required":
            return
        if self.schedule.max_staleness == 0:
            raise ValueError(
                "schedule.max_staleness must be at least 1 with rollout.follow 'newest', got 0: an "
                "on-policy iteration is sampled by the newest version, and there is no newer one before it "
                "is trained. Raise it, or set follow to 'required'."
            )
        if self.train.deterministic:
            raise ValueError(
                "train.deterministic must be false with rollout.follow 'newest', got true: samples depend on "
                "when a version is published, so bits do not repeat. Set it to false, or follow to "
                "'required'."
            )

    def check_answered_turns(self) -> None:
        """What an environment that answers turns cannot go with. Whether a module's does is known once it was
        made, when a campaign is opened."""
        rollout, name = self.rollout, self.environment.title
        if rollout.partial == "keep" or rollout.record_routing != "none":
            raise ValueError(
                "rollout.partial must be 'drop' and record_routing 'none' with an environment that answers "
                f"turns, as {name} does, got partial={rollout.partial!r}, "
                f"record_routing={rollout.record_routing!r}. Set them so, and train.replay_routing to 'none'."
            )
        if rollout.follow == "newest":
            raise ValueError(
                "rollout.follow must be 'required' with an environment that answers turns, as "
                f"{name} does, whose dialogues cannot be resumed, got 'newest'. Set it so."
            )

    def _check_longest_row(self) -> None:
        """A row longer than a micro-batch goes alone, and must still go through the dispatcher.

        Prompts, an environment's replies and how many turns a module takes are not seen here.
        """
        train, rollout, turns = self.train, self.rollout, self.environment.max_turns
        longest = turns * rollout.max_new_tokens
        if rollout.context_limit:  # prompt and replies included
            longest = min(longest, rollout.context_limit - 1)
        bounds = {"deepep": train.deepep.max_tokens, "nvlink": train.nvlink.max_tokens}
        bound = bounds.get(train.dispatcher, 0) * train.cp * train.tp
        if 0 < bound <= longest:
            raise ValueError(
                f"train.{train.dispatcher}.max_tokens * cp * tp must exceed rollout.max_new_tokens"
                f"{f' * {turns} turns' if turns > 1 else ''}, for a prompt and all that follows pass through "
                f"it whole, got {bound} <= {longest}. Raise max_tokens by a prompt more than that, or cp."
            )

    @classmethod
    def model_validate_json(
        cls, json_data: str | bytes | bytearray, **kwargs: Any
    ) -> Self:  # what Flyte calls
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as error:
            raise ConfigError(_readable(error)) from None

    def departures(self) -> str:
        """YAML of what differs from the defaults: a file that means the same campaign."""
        import yaml

        values = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)

    def digest(self) -> str:
        """Hex digest of the values; equal for equal values however they were written."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def _holds(grid: Grid, experts: int) -> bool:
    """Whether the sizes make a grid over which so many experts can be dealt out."""
    try:
        return experts % grid.checked().expert_shards == 0 and experts % grid.ep == 0
    except ValueError:
        return False


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
