"""The campaign's loop in one process on one rank, for tests that learn: minutes become seconds.

The same engine, verifier, assembly, update, critic and configuration as a campaign; left out are the graph,
the servers, the store and the second rank, which have tests of their own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tasks.config import CampaignConfig
from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.make import make_dialogue, sampling_params
from tasks.engine.protocol import Request
from tasks.environments.demonstrations import demonstrated
from tasks.environments.health import reward_metrics
from tasks.environments.make import make_environment
from tasks.environments.scorer import Sample, make_scorer
from tasks.experience.ledger import seed_of
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.chat import Chat
from tasks.policy.models.model import build_random, load_policy
from tasks.policy.models.routers import Routers
from tasks.policy.models.routing import Routing
from tasks.policy.models.tokenizer import character_tokenizer, prompt_ids
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.ranks.progress import Progress
from tasks.policy.step.reading import read_rows
from tasks.policy.step.trainer import Learner, make_optimizer, policy_reader
from tasks.policy.training.beside import with_column
from tasks.policy.training.critic import read_values, train_critic
from tasks.policy.training.epoch import train
from tasks.policy.training.nonfinite import NonFiniteSteps
from tasks.policy.training.trainee import Trainee, learning_rate
from tasks.rl.assembly import assemble_frame
from tasks.rl.refill import refill_sizes, telling_prompts
from tasks.schema import ScoredFrame, make_frame

ROOT = Path(__file__).resolve().parent.parent
LAPTOP = yaml.safe_load((ROOT / "configs/campaigns/laptop.yaml").read_text())
SAMPLES_PER_PROMPT = 4


def laptop(**sections: dict[str, Any]) -> CampaignConfig:
    """The laptop campaign on one rank, with changes by section."""
    one_rank = {"train": {"ep": 1, "dispatcher": "local"}}
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in LAPTOP.items()}
    for changes in (one_rank, sections):
        for name, values in changes.items():
            merged[name] = merged.get(name, {}) | values if isinstance(values, dict) else values
    return CampaignConfig.model_validate(merged)


def campaign(name: str, **sections: dict[str, Any]) -> CampaignConfig:
    """A shipped campaign on one rank, with changes by section."""
    merged = yaml.safe_load((ROOT / f"configs/campaigns/{name}.yaml").read_text())
    for changes in ({"train": {"ep": 1, "dispatcher": "local"}}, sections):
        for section, values in changes.items():
            merged[section] = merged.get(section, {}) | values
    return CampaignConfig.model_validate(merged)


def two_digits(**sections: dict[str, Any]) -> CampaignConfig:
    """A smaller task with the laptop's policy: reverse two digits, in a fifth of the samples an iteration."""
    small: dict[str, dict[str, Any]] = {
        "environment": {"num_digits": 2, "held_out": 20},
        "warm_start": {"steps": 20},
        "rollout": {"prompts_per_iteration": 96, "max_new_tokens": 6},
        "algorithm": {"num_minibatches": 8},
        "schedule": {"iterations": 24},
    }
    for name, values in sections.items():
        small[name] = small.get(name, {}) | values
    return laptop(**small)


@dataclass
class Curve:
    """Exact match of each iteration's samples (fresh prompts, temperature 1), and of held-out prompts."""

    exact: list[float] = field(default_factory=list)
    held_out: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples_per_iteration: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def samples_to(self, threshold: float) -> float:
        """Samples until the exact match first reached the threshold, between iterations by a line."""
        before = 0.0
        for index, exact in enumerate(self.exact):
            if exact >= threshold:
                part = (threshold - before) / (exact - before) if exact > before else 0.0
                return max(index - 1 + part, 0.0) * self.samples_per_iteration
            before = exact
        return float("inf")


class Loop:
    """A policy that is warm-started and then trained, iteration by iteration."""

    def __init__(self, config: CampaignConfig, folder: Path, teacher: dict[str, torch.Tensor] | None = None):
        self.teacher = teacher
        self.config, self.mesh = config, make_mesh(1, 1)
        self.tokenizer = character_tokenizer()
        self.environment = make_environment(config.environment, seed=config.seed)
        build_random(
            **config.model.random.model_dump(),
            vocab_size=len(self.tokenizer),
            seed=config.seed,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        ).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.scorer = make_scorer(config, self.environment, self.tokenizer)
        self.truth = make_scorer(config, self.environment, self.tokenizer, is_truth=True)
        self.dialogue = make_dialogue(config, folder, self.environment)
        torch.use_deterministic_algorithms(True)
        self.folder, self.params = folder, sampling_params(config.rollout, folder)
        self.model = load_policy(folder, dispatcher=LocalDispatcher()).train()
        self.routing = Routing(self.model, replay=config.train.replay_routing)
        self.engine = EmbeddedEngine(batch_size=config.rollout.batch_size)
        self.engine.load(folder, 0)
        self.versions: list[dict[str, torch.Tensor]] = []
        self.critic: Learner | None = None
        self._warm_start()
        self.reference = self.weights()
        self.optimizer = self._adamw(self.model, config.train.learning_rate)
        if config.algorithm.advantage == "gae":
            value = load_policy(folder, dispatcher=LocalDispatcher(), head="value").train()
            value.load_state_dict(self.reference, strict=False)
            optimizer = self._adamw(value, config.algorithm.critic.learning_rate)
            self.critic = Learner(value, optimizer, self.mesh)

    def iterate(self, k: int) -> tuple[float, dict[str, float]]:
        """Sample with the policy of ``max_staleness`` iterations before, train the newest."""
        self.versions.append(self.weights())
        age = min(self.config.schedule.max_staleness, k)
        frame = self.sample(k, self.versions[-1 - age], version=k - age)
        exact = float(frame["is_exact"].mean())  # pyright: ignore[reportArgumentType]
        batch, _, metrics = assemble_frame(frame, self.config, iteration=k, policy_version=k)
        metrics |= reward_metrics(frame)
        rows, algorithm = batch.rows(named=True), self.config.algorithm
        if algorithm.kl != "none":
            rows = with_column(rows, "reference_logprob", self._read(rows, self.reference))
        if self.teacher:
            rows = with_column(rows, "teacher_logprob", self._read(rows, self.teacher))
        if self.critic:
            rows = read_values(self.critic, rows, self.config.train)
            metrics |= train_critic(self.critic, rows, algorithm, self.config.train)
        if algorithm.correction.proximal == "recomputed":
            rows = with_column(rows, "proximal_logprob", self._read(rows, self.versions[-1]))
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.config, k)
        return exact, metrics | self._train(self.optimizer, rows, "clipped_policy")

    def sample(self, k: int, weights: dict[str, torch.Tensor], *, version: int) -> Any:
        """The scored samples of an iteration."""
        assert self.engine.model is not None
        self.engine.model.load_state_dict(weights)
        rollout = self.config.rollout
        start, first = k * rollout.prompts_reserved, rollout.prompts_offered
        rows: list[dict[str, Any]] = []
        is_telling: list[bool] = []
        for refill in range(1 + rollout.refill_rounds):
            sizes = refill_sizes(is_telling, first=first, wanted=rollout.prompts_per_iteration, rounds=refill)
            if len(sizes) <= refill:
                break
            done = len(is_telling)
            prompts = [self.environment.train_prompt(start + done + i) for i in range(sizes[refill])]
            rows += self._samples(k, prompts, version, rollout.group_size)
            telling = telling_prompts(make_frame(rows, ScoredFrame))
            is_telling += [prompt.prompt_id in telling for prompt in prompts]
        return make_frame(rows, ScoredFrame)

    def held_out(self) -> float:
        """Exact match of held-out prompts at temperature 1."""
        assert self.engine.model is not None
        self.engine.model.load_state_dict(self.weights())
        rows = self._samples(-1, self.environment.held_out_prompts(), 0, SAMPLES_PER_PROMPT)
        self.held_out_reward = sum(row["reward"] or 0.0 for row in rows) / len(rows)
        return sum(row["is_exact"] for row in rows) / len(rows)

    def _samples(self, k: int, prompts: Any, version: int, copies: int) -> list[dict[str, Any]]:
        requests = [
            Request(
                prompt_ids=tuple(prompt_ids(self.tokenizer, prompt.text)),
                seeds=tuple(seed_of(self.config.seed, k, prompt.prompt_id, i) for i in range(copies)),
            )
            for prompt in prompts
        ]
        rows = []
        if self.dialogue is None:
            answers = self.engine.generate(requests, self.params)
        else:
            answers = self.dialogue.generate(
                self.engine, [p.prompt_id for p in prompts], requests, self.params
            )
        samples = [
            Sample(
                prompt_id=prompt.prompt_id, prompt_ids=request.prompt_ids, chosen=completion.chosen,
                response_ids=completion.response_ids, finish_reason=completion.finish_reason,
            )
            for prompt, request, completions in zip(prompts, requests, answers, strict=True)
            for completion in completions
        ]  # fmt: skip
        outcomes = iter(self.truth.truths(samples) if k < 0 else self.scorer.outcomes(samples))
        for prompt, request, completions in zip(prompts, requests, answers, strict=True):
            for index, completion in enumerate(completions):
                ids, reason, outcome = completion.response_ids, completion.finish_reason, next(outcomes)
                rows.append(
                    {
                        "iteration": k,
                        "prompt_id": prompt.prompt_id,
                        "sample_index": index,
                        "policy_version": version,
                        "prompt_ids": list(request.prompt_ids),
                        "response_ids": ids,
                        "behavior_logprob": completion.logprobs,
                        "finish_reason": reason,
                        "chosen": completion.chosen,
                        "parts": [asdict(part) for part in outcome.parts],
                        "outcome": outcome.kind,
                        "reward": outcome.reward,
                        "is_exact": outcome.is_exact,
                        "reason": outcome.reason,
                    }
                )
        return rows

    def _warm_start(self) -> None:
        warm, rows = self.config.warm_start, []
        for position in range(warm.steps * warm.batch_size):
            prompt = self.environment.train_prompt(position)
            answer, mask = demonstrated(self.environment, Chat(self.tokenizer), prompt)
            rows.append(
                {
                    "prompt_ids": prompt_ids(self.tokenizer, prompt.text),
                    "response_ids": answer,
                    "behavior_logprob": [0.0] * len(answer),
                    "loss_mask": mask,
                    "advantage": 0.0,
                    "minibatch": position // warm.batch_size,
                }
            )
        self._train(self._adamw(self.model, warm.learning_rate), rows, "supervised")

    def _train(self, optimizer: Any, rows: list[dict[str, Any]], objective: str) -> dict[str, float]:
        nonfinite: Any = NonFiniteSteps(None, iteration=0, rank=0, limit=1, in_a_row=0)  # type: ignore[arg-type]
        trainee = Trainee(
            self.model, optimizer, self.mesh, progress=Progress(), nonfinite=nonfinite,
            routers=Routers(routing=self.routing),
        )  # fmt: skip
        return train(trainee, rows, self.config, objective=objective)

    def _read(self, rows: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> list[list[float]]:
        assert self.engine.model is not None
        self.engine.model.load_state_dict(weights)
        train_config = self.config.train
        return read_rows(
            self.engine.model, rows, self.mesh, policy_reader(),  # type: ignore[arg-type]
            max_tokens=train_config.micro_batch_tokens, packing=train_config.packing,
        )  # fmt: skip

    def _adamw(self, model: Any, lr: float) -> Any:
        train_config = self.config.train
        betas = (train_config.beta1, train_config.beta2)
        return make_optimizer(model, lr=lr, betas=betas, eps=train_config.eps, weight_decay=0.0)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


def learn(
    config: CampaignConfig, *, until: float = 2.0, teacher: dict[str, torch.Tensor] | None = None
) -> Curve:
    """Train for the schedule's iterations, or until an iteration's samples reach ``until``."""
    torch.set_num_threads(1)
    curve = Curve(samples_per_iteration=config.rollout.samples_per_iteration)
    with tempfile.TemporaryDirectory() as name:
        loop = Loop(config, Path(name), teacher)
        for k in range(config.schedule.iterations):
            start = time.process_time()
            exact, metrics = loop.iterate(k)
            curve.exact.append(exact)
            curve.metrics.append(metrics)
            curve.seconds.append(time.process_time() - start)
            if exact >= until:
                break
        curve.held_out, curve.weights = loop.held_out(), loop.weights()
    return curve


if __name__ == "__main__":
    task = {"laptop": laptop, "two_digits": two_digits}.get(sys.argv[1], partial(campaign, sys.argv[1]))
    curve = learn(task(**json.loads(sys.argv[2])), until=float(sys.argv[3]) if len(sys.argv) > 3 else 2.0)
    print(" ".join(f"{exact:.3f}" for exact in curve.exact), f"held out {curve.held_out:.3f}")
    seconds = sum(curve.seconds) / len(curve.seconds)
    print(f"samples to 0.9: {curve.samples_to(0.9):,.0f}; CPU-s an iteration {seconds:.2f}")
    print({name: round(value, 4) for name, value in curve.metrics[-1].items()})
