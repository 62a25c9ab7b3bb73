"""Generation: workers on Spot nodes drain the iteration's queue."""

import os
import socket
import time

from flytekit import map_task, task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, PromptSet, RolloutReport
from tasks.say import say
from tasks.session import OPTIMIZER, run_buffer, run_store


@task(**placement.ROLLOUT.task_arguments())
def rollout_worker(
    worker: int, run: CampaignRun, prompts: PromptSet, behavior: PolicyVersion
) -> RolloutReport:
    """One worker: load the policy, then lease, sample, publish and settle until the queue is empty."""
    from tasks.engine.make import make_engine, make_workers
    from tasks.engine.notices import departing
    from tasks.engine.overlap import drain_together

    start = time.monotonic()
    config, name = run.config.rollout, f"{worker}@{socket.gethostname()}:{os.getpid()}"
    if not prompts.num_portions:  # a refill that is not needed: no engine is started for it
        return RolloutReport(
            iteration=prompts.iteration, worker=name, engine=config.engine, num_portions=0, num_samples=0,
            num_tokens=0, seconds=0.0, load_seconds=0.0,
        )  # fmt: skip
    engine = make_engine(config, dtype=run.config.model.dtype)
    with (
        run_store(run).reading(behavior, without=OPTIMIZER) as folder,
        departing(
            grace_seconds=config.grace_seconds,
            metadata_url=config.metadata_url,
            poll_seconds=config.notice_poll_seconds,
        ) as departure,
    ):
        engine.load(folder, behavior.version)
        loaded = time.monotonic()
        members = make_workers(
            run.config, engine, run_buffer(run), folder=folder, name=name, departure=departure
        )
        done = drain_together(members, prompts.iteration, max_portions=config.max_portions_per_worker)
    seconds = time.monotonic() - start
    returned = f", {done.num_returned} returned on {departure.reason}" if departure.is_due else ""
    say(
        "generate",
        f"worker {worker}: {done.num_portions} portions, {done.num_samples} samples of v{behavior.version}, "
        f"{done.num_tokens / max(done.seconds, 1e-9):,.0f} tokens/s, {seconds:.1f} s{returned}",
        iteration=prompts.iteration,
    )
    departure.exit()
    return RolloutReport(
        iteration=prompts.iteration,
        worker=name,
        engine=engine.describe(),
        num_portions=done.num_portions,
        num_samples=done.num_samples,
        num_tokens=done.num_tokens,
        seconds=seconds,
        load_seconds=loaded - start,
    )


@task(**placement.CPU.task_arguments())
def await_rollouts(run: CampaignRun, prompts: PromptSet) -> list[RolloutReport]:
    """The generate stage of a standing pool: wait until its workers have emptied the queue."""
    from tasks.engine.standing_pool import await_queue, pool_reports

    await_queue(run, prompts)
    reports = pool_reports(run, prompts)
    samples, tokens = sum(r.num_samples for r in reports), sum(r.num_tokens for r in reports)
    say(
        "generate",
        f"{len(reports)} standing workers: {samples} samples, {tokens} tokens",
        iteration=prompts.iteration,
    )
    return reports


generate = map_task(rollout_worker, bound_inputs={"run", "prompts", "behavior"}, min_success_ratio=0.5)
"""One mapped task for all iterations (a new one a turn would add a task template to the graph each time).
Half of the workers may be lost for good: the queue, not the workers, decides whether an iteration is
complete."""
