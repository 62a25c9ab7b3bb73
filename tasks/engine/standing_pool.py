"""Waiting for a standing pool of workers to empty an iteration's queue."""

import time

from tasks.records import CampaignRun, PromptSet, RolloutReport
from tasks.say import say
from tasks.session import run_buffer

POLL_SECONDS = 0.1
SAY_SECONDS = 5.0


def await_queue(run: CampaignRun, prompts: PromptSet) -> None:
    """Return once no portion is left; says how it goes. A pool that stands still for too long is an error."""
    buffer, iteration, limit = run_buffer(run), prompts.iteration, run.config.rollout.standing_timeout_seconds
    published, moved, spoke = -1, time.monotonic(), time.monotonic()
    while buffer.outstanding(iteration):
        now, before = time.monotonic(), published
        published = buffer.num_published(iteration)
        if published != before:
            moved = now
        elif now - moved > limit:
            held = buffer.progress(iteration).leases_by_worker
            raise RuntimeError(
                f"iteration {iteration} must make progress within "
                f"rollout.standing_timeout_seconds={limit:g}, got "
                f"none at {published} of {prompts.num_groups} groups; leases: {dict(held) or 'none'}. Start "
                "workers with `python -m tasks.engine.standing --config ...`, this store and the code "
                f"{run.code_revision} (those of another say so and wait), then run the campaign again."
            )
        if now - spoke > SAY_SECONDS:
            spoke, progress = now, buffer.progress(iteration)
            say(
                "generate",
                f"{published} of {prompts.num_groups} groups, {progress.queued} portions queued, "
                f"{progress.leased} "
                f"leased by {len(progress.leases_by_worker)} workers",
                iteration=iteration,
            )
        time.sleep(POLL_SECONDS)


def pool_reports(run: CampaignRun, prompts: PromptSet) -> list[RolloutReport]:
    """What each worker of the pool published of the iteration; its engine was loaded before."""
    return [
        RolloutReport(
            iteration=prompts.iteration,
            worker=name,
            engine=run.config.rollout.engine,
            num_portions=0,
            num_samples=share.samples,
            num_tokens=share.tokens,
            seconds=share.seconds,
            load_seconds=0.0,
        )
        for name, share in run_buffer(run).progress(prompts.iteration).workers.items()
    ]
