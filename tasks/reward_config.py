"""How responses are scored: by which scorers, in what processes, with what weights; no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.section import Section

Scorer = Literal["verifier", "reward_model", "classify", "judge"]


class RewardModelConfig(Section):
    """A Hugging Face sequence-classification model with one output; ``workflows/reward_model.py`` trains
    one."""

    folder: str = ""
    device: str = "cpu"
    batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward pass, padding included; rows of like length share one."""
    scale: float = Field(default=1.0, gt=0)
    """The reward is the sigmoid of the output divided by this."""
    base: str = ""
    """Checkpoint that training starts from; empty = a small random one with the random policy's tokenizer."""
    pairs_path: str = ""
    """Parquet or JSONL of ``prompt``, ``chosen``, ``rejected``; empty = pairs that the environment makes."""
    pairs: int = Field(default=4096, ge=1)
    """Preference pairs to train on; a sixteenth as many more are kept out to measure its accuracy."""
    steps: int = Field(default=120, ge=1)
    batch_pairs: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    min_accuracy: float = Field(default=0.8, ge=0, le=1)
    """Pairs kept out that it must rank as the truth does; a worse model is not stored."""


class EndpointConfig(Section):
    """An HTTP service."""

    url: str = ""
    model: str = ""
    key_file: str = ""
    """File with the key that is sent as a bearer token; empty = none is sent."""
    concurrency: int = Field(default=32, ge=1)
    deadline_seconds: float = Field(default=60.0, gt=0)
    """Of one sample, all attempts together; then it is a failure."""
    attempts: int = Field(default=3, ge=1)


class ClassifyConfig(EndpointConfig):
    """A reward model behind SGLang's ``/classify``; ``url`` is the server's root."""

    tokenizer: str = ""
    """Folder of the model's tokenizer, for its chat template."""
    batch_size: int = Field(default=32, ge=1)
    scale: float = Field(default=1.0, gt=0)
    """As of ``reward.model``."""


class JudgeConfig(EndpointConfig):
    """A language model behind an OpenAI-compatible chat endpoint; ``url`` ends in ``/v1``."""

    instruction: str = (
        "Grade the answer to the task from 0 (wrong or useless) to 10 (right and complete). End with one "
        "line `grade: N`. If the task cannot be judged, end with `grade: none`."
    )
    max_tokens: int = Field(default=512, ge=1)
    largest_grade: float = Field(default=10.0, gt=0)


class RewardConfig(Section):
    parts: dict[Scorer, float] = Field(default_factory=lambda: {"verifier": 1.0})
    """Scorer -> weight. A weight of 0 measures and reports a part without rewarding it. ``verifier`` is the
    environment's."""
    normalise: Literal["none", "group"] = "none"
    """``group`` divides each part by its standard deviation in the prompt's group before they are weighed, so
    that a part counts by its weight and not by its scale. Needs two parts."""
    max_failure_share: float = Field(default=0.05, ge=0, lt=1)
    """A larger share of samples that could not be scored stops the run: a failure is no reward of 0."""
    workers: int = Field(default=2, ge=1)
    """Processes of a verifier that the environment does not call trusted."""
    max_workers: int = Field(default=64, ge=1)
    """To which the pool grows while samples wait behind slow ones."""
    deadline_seconds: float = Field(default=10.0, gt=0)
    """Wall time of one verification; then its process is killed and the sample is a failure."""
    memory_mb: int = Field(default=512, ge=16)
    """What one verification may allocate."""
    overlap: bool = False
    """Score groups while others are still generated: the score stage waits for the queue, not for the
    workers."""
    model: RewardModelConfig = RewardModelConfig()
    classify: ClassifyConfig = ClassifyConfig()
    """A reward model behind SGLang's ``/v1/classify`` (``sglang.launch_server --is-embedding``)."""
    judge: JudgeConfig = JudgeConfig()
    control: Literal["none", "flipped", "shuffled"] = "none"
    """Control experiments: a flipped (1 - reward) or shuffled reward must not learn the task."""

    @model_validator(mode="after")
    def _parts_can_be_weighed(self) -> Self:
        if not any(weight > 0 for weight in self.parts.values()) or min(self.parts.values()) < 0:
            raise ValueError(
                f"parts must have weights of at least 0 and one above it, got {self.parts}. Raise a weight."
            )
        if self.normalise == "group" and (len(self.parts) < 2 or self.control != "none"):
            raise ValueError(
                f"normalise 'group' needs two parts and no control, got parts={self.parts}, "
                f"control={self.control!r}. Set normalise to 'none'."
            )
        if self.max_workers < self.workers:
            raise ValueError(
                f"max_workers must be at least workers, got {self.max_workers} < {self.workers}. Raise it to "
                f"{self.workers}."
            )
        needs = {
            "reward_model": self.model.folder,
            "classify": self.classify.url and self.classify.tokenizer,
            "judge": self.judge.url,
        }
        for scorer, value in needs.items():
            field = {"reward_model": "model.folder", "classify": "classify.url and tokenizer"}.get(
                scorer, f"{scorer}.url"
            )
            if scorer in self.parts and not value:
                raise ValueError(f"{field} must be given with part '{scorer}', got ''. Set reward.{field}.")
        return self
