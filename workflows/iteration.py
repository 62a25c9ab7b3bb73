"""One iteration of reinforcement learning, as the algorithm box reads.

                      ┌──────── refill ────────┐
    behavior ──► offer prompts ──► generate ──► score ──► assemble ──► update policy ──► publish ──► v + 1
                                   N workers                  │            ▲                ▲
                                                              │   policy ──┘                │
                                                              └────────► archive ───────────┘

A plain function that is called while a campaign is unrolled, not a sub-workflow: generation waits only for
``behavior``, so with a policy that is some versions older it runs while earlier iterations still train.
"""

from typing import Any

from tasks.archive import archive
from tasks.buffer import assemble
from tasks.checkpoint import publish
from tasks.prompts import offer_prompts, refill_prompts
from tasks.records import CampaignRun
from tasks.reward import score
from tasks.rollout import await_rollouts, generate
from tasks.train import update_policy


def iteration(run: CampaignRun, k: int, *, behavior: Any, policy: Any) -> Any:
    """Iteration ``k``: sample with ``behavior``, train ``policy``, return the published version.

    ``behavior`` and ``policy`` are promises of ``PolicyVersion`` (or values), and so is the result.
    """
    prompts = node(f"prompts-{k}", offer_prompts(run=run, iteration=k, behavior=behavior))
    rollouts = node(f"generate-{k}", sample(run, prompts, behavior))
    if run.config.reward.overlap:
        rollouts = []  # scoring follows the queue and does not wait for the workers
    scores = node(f"score-{k}", score(run=run, prompts=prompts, behavior=behavior, rollouts=rollouts))
    for n in range(1, run.config.rollout.refill_rounds + 1):  # without prompts once enough groups differ
        more = refill_prompts(run=run, behavior=behavior, scores=scores, refill=n)
        more = node(f"prompts-{k}-{n}", more)
        rollouts = node(f"generate-{k}-{n}", sample(run, more, behavior))
        more_scores = score(run=run, prompts=more, behavior=behavior, rollouts=rollouts, before=scores)
        scores = node(f"score-{k}-{n}", more_scores)
    batch = node(f"assemble-{k}", assemble(run=run, scores=scores, policy=policy))
    kept = node(f"archive-{k}", archive(run=run, batch=batch, policy=policy))
    trained = node(f"update-{k}", update_policy(run.config)(run=run, batch=batch, policy=policy))
    return node(f"publish-{k}", publish(run=run, candidate=trained, archive=kept))


def sample(run: CampaignRun, prompts: Any, behavior: Any) -> Any:
    """What the workers of the pool made of the prompts on the queue."""
    if run.config.rollout.pool == "standing":
        return await_rollouts(run=run, prompts=prompts)
    workers = list(range(run.config.rollout.workers))
    return generate(worker=workers, run=run, prompts=prompts, behavior=behavior)


def node(name: str, promise: Any) -> Any:
    """Name a node of the graph by its stage and iteration, for people and for recovery."""
    return promise.with_overrides(node_name=name)
