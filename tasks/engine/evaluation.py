"""Held-out score of a policy folder."""

from pathlib import Path

from tasks.engine.make import make_engine, sampling_params
from tasks.engine.protocol import Request
from tasks.environments.scoring import judge
from tasks.experience.ledger import seed_of
from tasks.policy.tokenizer import load_tokenizer, prompt_ids
from tasks.records import CampaignRun, Evaluation
from tasks.session import run_environment

SAMPLES_PER_PROMPT = 4


def held_out_score(run: CampaignRun, folder: Path, version: int, *, iteration: int) -> Evaluation:
    """Exact match and mean reward of held-out prompts; sampled scores are means over several samples a
    prompt.

    Seeds derive from the prompt alone, so two versions are compared on the same randomness.
    """
    environment, tokenizer = run_environment(run), load_tokenizer(folder)
    engine = make_engine(run.config.rollout, dtype=run.config.model.dtype)
    engine.load(folder, version)
    prompts = environment.held_out_prompts()
    scores: dict[bool, list[tuple[bool, float]]] = {}
    for greedy in (False, True):
        copies = 1 if greedy else SAMPLES_PER_PROMPT
        requests = [
            Request(
                prompt_ids=tuple(prompt_ids(tokenizer, prompt.text)),
                seeds=tuple(seed_of(run.config.seed, -1, prompt.prompt_id, index) for index in range(copies)),
            )
            for prompt in prompts
        ]
        params = sampling_params(run.config.rollout, folder, greedy=greedy)
        scores[greedy] = []
        for prompt, completions in zip(prompts, engine.generate(requests, params), strict=True):
            for completion in completions:
                outcome = judge(
                    environment,
                    tokenizer,
                    prompt_id=prompt.prompt_id,
                    response_ids=completion.response_ids,
                    finish_reason=completion.finish_reason,
                )
                scores[greedy].append((outcome.is_exact, outcome.reward or 0.0))
    sampled, best = scores[False], scores[True]
    return Evaluation(
        version=version,
        iteration=iteration,
        num_prompts=len(prompts),
        exact_greedy=sum(exact for exact, _ in best) / len(best),
        exact_sampled=sum(exact for exact, _ in sampled) / len(sampled),
        reward_sampled=sum(reward for _, reward in sampled) / len(sampled),
        seconds=0.0,
    )
