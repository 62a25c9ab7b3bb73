"""All that a reward is made of: the environment's verifier, reward models, a judge, weighed.

    outcome  = failure, if a part that counts failed
               abstain, if every part that counts abstained
               sum of weight * reward / sum of weight over the parts that scored, otherwise

Parts of weight 0 are measured and reported, and cannot fail a sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.config import CampaignConfig
from tasks.environments.grades import Grade, Graded
from tasks.environments.pool import Call, VerifierPool, standing_pool
from tasks.environments.protocol import Environment, Outcome, Part, is_trusted, verify
from tasks.policy.models.chat import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOOL_FAILED = "ToolFailure: the environment did not answer a turn; the rollout worker's log has the reason"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a scorer needs of a row."""

    prompt_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    finish_reason: str
    chosen: Sequence[bool] | None = None


class Scorer:
    """Outcomes of samples. Give it many at once: pools and batches are as wide as what they are given."""

    def __init__(
        self,
        environment: Environment,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        weights: Mapping[Any, float] | None = None,
        others: Mapping[str, Grade] | None = None,
        pool: VerifierPool | None = None,
    ) -> None:
        self.environment, self.pool = environment, pool
        self.weights: dict[str, float] = dict(weights or {"verifier": 1.0})
        self.others = dict(others or {})
        self.chat = Chat(tokenizer)

    @property
    def is_cheap(self) -> bool:
        """Scores in this process and at once."""
        return self.pool is None and not self.others

    def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The weighed word on each sample."""
        if list(self.weights) == ["verifier"]:
            return self.truths(samples)
        talks = [self._talk(sample) for sample in samples]
        grades: dict[str, list[Graded]] = {}
        truths = self._verified(samples, talks) if "verifier" in self.weights else None
        if truths is not None:
            grades["verifier"] = [
                Graded(part=_part("verifier", truth), reward=truth.reward) for truth in truths
            ]
        messages = [
            self.chat.messages(sample.prompt_ids, turns, replies)
            for sample, (turns, replies) in zip(samples, talks, strict=True)
        ]
        for name, grade in self.others.items():
            grades[name] = grade(messages)
        return [
            weighed(
                {name: column[i] for name, column in grades.items()},
                self.weights,
                is_exact=truths is not None and truths[i].is_exact,
            )
            for i in range(len(samples))
        ]

    def truths(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The verifier's word alone."""
        return self._verified(samples, [self._talk(sample) for sample in samples])

    def _talk(self, sample: Sample) -> tuple[list[str], list[str]]:
        is_finished = sample.finish_reason == "stop"
        return self.chat.conversation(sample.response_ids, sample.chosen, is_finished=is_finished)

    def _verified(
        self, samples: Sequence[Sample], talks: Sequence[tuple[list[str], list[str]]]
    ) -> list[Outcome]:
        calls = [
            Call(prompt_id=sample.prompt_id, turns=tuple(turns), is_finished=sample.finish_reason == "stop")
            for sample, (turns, _) in zip(samples, talks, strict=True)
        ]
        if self.pool is None:
            outcomes = [judged(self.environment, call) for call in calls]
        else:
            outcomes = [as_outcome(answer) for answer in self.pool.run(calls)]
        return [
            Outcome(kind="failure", reason=TOOL_FAILED) if sample.finish_reason == "tool_failure" else outcome
            for sample, outcome in zip(samples, outcomes, strict=True)
        ]


def judged(environment: Environment, call: Call) -> Outcome:
    """In this process; a verifier that raised is a failure with a reason, never a reward of 0."""
    try:
        return verify(environment, call.prompt_id, call.turns, is_finished=call.is_finished)
    except Exception as error:
        return Outcome(kind="failure", reason=f"{type(error).__name__}: {error}")


def as_outcome(answer: Mapping[str, Any]) -> Outcome:
    """A worker's answer; what it may not say (a failure with a reward, say) is a failure."""
    try:
        kind, reward = answer["kind"], None
        if kind == "score":
            if not 0.0 <= (reward := float(answer["reward"])) <= 1.0:
                raise ValueError(f"a reward must be from 0 to 1, got {reward}")
        elif kind not in ("abstain", "failure"):
            raise ValueError(f"an outcome must be a score, an abstention or a failure, got {kind!r}")
        reason = str(answer.get("reason") or ("unknown" if kind == "failure" else ""))
        part = Part(
            name="verifier", kind=kind, value=reward if kind == "score" else None, reason=reason,
            seconds=float(answer.get("seconds", 0.0)),
        )  # fmt: skip
        return Outcome(
            kind=kind, reward=part.value, is_exact=bool(answer.get("is_exact", False)), reason=reason,
            parts=(part,),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        return Outcome(kind="failure", reason=f"{type(error).__name__}: {error}")


def weighed(grades: Mapping[str, Graded], weights: Mapping[str, float], *, is_exact: bool) -> Outcome:
    """One sample's outcome from its parts."""
    parts = tuple(grade.part for grade in grades.values())
    counted = {name: grade for name, grade in grades.items() if weights[name] > 0}
    for name, grade in counted.items():
        if grade.part.kind == "failure":
            return Outcome(kind="failure", reason=f"{name}: {grade.part.reason}", parts=parts)
    scored = {name: grade.reward for name, grade in counted.items() if grade.reward is not None}
    if not scored:
        reasons = "; ".join(f"{name}: {grade.part.reason}" for name, grade in counted.items())
        return Outcome(kind="abstain", reason=reasons, is_exact=is_exact, parts=parts)
    total = sum(weights[name] for name in scored)
    reward = sum(weights[name] * value for name, value in scored.items()) / total
    return Outcome(kind="score", reward=min(max(reward, 0.0), 1.0), is_exact=is_exact, parts=parts)


def _part(name: str, outcome: Outcome) -> Part:
    known = outcome.parts[0] if outcome.parts else None
    return Part(
        name=name, kind=outcome.kind, value=outcome.reward, reason=outcome.reason,
        seconds=known.seconds if known else 0.0,
    )  # fmt: skip


def make_scorer(
    campaign: CampaignConfig,
    environment: Environment,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    is_truth: bool = False,
) -> Scorer:
    """The scorer a configuration names; ``is_truth``: of the verifier alone, for evaluation."""
    config = campaign.reward
    others: dict[str, Grade] = {}
    if not is_truth:
        if "reward_model" in config.parts:
            from tasks.environments.reward_model import standing_reward_model

            others["reward_model"] = standing_reward_model(config.model).grade
        if "classify" in config.parts:
            from tasks.environments.remote import ClassifyClient

            others["classify"] = ClassifyClient(config.classify).grade
        if "judge" in config.parts:
            from tasks.environments.remote import JudgeClient

            others["judge"] = JudgeClient(config.judge).grade
    weights = {"verifier": 1.0} if is_truth else config.parts
    needs_pool = "verifier" in weights and not is_trusted(environment)
    return Scorer(
        environment,
        tokenizer,
        weights=weights,
        others=others,
        pool=environment_pool(campaign) if needs_pool else None,
    )


def environment_pool(campaign: CampaignConfig) -> VerifierPool:
    """The process pool of a campaign's environment, kept for as long as this process lives."""
    config = campaign.reward
    return standing_pool(
        environment=campaign.environment.model_dump(mode="json"),
        seed=campaign.seed,
        workers=config.workers,
        max_workers=config.max_workers,
        deadline_seconds=config.deadline_seconds,
        memory_mb=config.memory_mb,
    )
