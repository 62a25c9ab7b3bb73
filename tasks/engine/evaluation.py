"""Held-out score of a policy folder."""

from collections.abc import Sequence
from pathlib import Path

from tasks.engine.collector import old_objects_apart
from tasks.engine.make import make_dialogue, make_engine, sampling_params
from tasks.engine.protocol import Completion, Request
from tasks.environments.protocol import Outcome, Prompt
from tasks.environments.scorer import Sample, make_scorer
from tasks.experience.ledger import seed_of
from tasks.policy.models.tokenizer import load_tokenizer, prompt_ids, require_room
from tasks.records import CampaignRun, Evaluation
from tasks.session import run_environment

SAMPLES_PER_PROMPT = 4


def held_out_score(run: CampaignRun, folder: Path, version: int, *, iteration: int) -> Evaluation:
    """Exact match and mean reward of held-out prompts; sampled scores are means over several samples a
    prompt.

    Seeds derive from the prompt alone, so two versions are compared on the same randomness.
    """
    environment, tokenizer = run_environment(run), load_tokenizer(folder)
    prompts = environment.held_out_prompts()
    ids = [tuple(prompt_ids(tokenizer, prompt.text)) for prompt in prompts]
    lengths = ((prompt.prompt_id, len(each)) for prompt, each in zip(prompts, ids, strict=True))
    require_room(folder, lengths, run.config.rollout)
    engine = make_engine(run.config.rollout, dtype=run.config.model.dtype)
    engine.load(folder, version)
    scorer = make_scorer(run.config, environment, tokenizer, is_truth=True)
    dialogue = make_dialogue(run.config, folder, environment)
    scores: dict[bool, list[tuple[bool, float]]] = {}
    for greedy in (False, True):
        copies = 1 if greedy else SAMPLES_PER_PROMPT
        requests = [
            Request(
                prompt_ids=tokens,
                seeds=tuple(seed_of(run.config.seed, -1, prompt.prompt_id, index) for index in range(copies)),
            )
            for prompt, tokens in zip(prompts, ids, strict=True)
        ]
        params = sampling_params(run.config.rollout, folder, greedy=greedy)
        with old_objects_apart():
            if dialogue is None:
                completions = engine.generate(requests, params)
            else:
                completions = dialogue.generate(engine, [p.prompt_id for p in prompts], requests, params)
        scores[greedy] = _scores(run, scorer.truths(_samples(prompts, requests, completions)))
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


def _samples(
    prompts: Sequence[Prompt], requests: Sequence[Request], completions: Sequence[Sequence[Completion]]
) -> list[Sample]:
    return [
        Sample(
            prompt_id=prompt.prompt_id,
            prompt_ids=request.prompt_ids,
            response_ids=completion.response_ids,
            finish_reason=completion.finish_reason,
            chosen=completion.chosen,
        )
        for prompt, request, group in zip(prompts, requests, completions, strict=True)
        for completion in group
    ]


def _scores(run: CampaignRun, outcomes: Sequence[Outcome]) -> list[tuple[bool, float]]:
    """(exact, reward) of what was scored; a failure is no score of 0, so too many of them stop the run."""
    failures = [outcome.reason for outcome in outcomes if outcome.kind == "failure"]
    if len(failures) > run.config.reward.max_failure_share * len(outcomes):
        raise RuntimeError(
            f"at most {run.config.reward.max_failure_share:.0%} of held-out samples may fail to be scored, "
            f"got {len(failures)} of {len(outcomes)}, first: {failures[0]}. Mend the verifier and run the "
            "campaign again."
        )
    scored = [(outcome.is_exact, outcome.reward) for outcome in outcomes if outcome.reward is not None]
    return scored or [(False, 0.0)]
