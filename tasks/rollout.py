"""Generation: workers on Spot nodes drain the iteration's queue."""

import os
import socket
import time

from flytekit import map_task, task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, PromptSet, RolloutReport
from tasks.session import OPTIMIZER, run_buffer, run_store, say


@task(**placement.ROLLOUT.task_arguments())
def rollout_worker(
    worker: int, run: CampaignRun, prompts: PromptSet, behavior: PolicyVersion
) -> RolloutReport:
    """One worker: load the policy, then lease, sample, publish and settle until the queue is empty."""
    from tasks.engine.make import make_engine, sampling_params
    from tasks.engine.worker import drain_queue

    start = time.monotonic()
    config, name = run.config.rollout, f"{worker}@{socket.gethostname()}:{os.getpid()}"
    folder = run_store(run).pull(behavior, without=OPTIMIZER)
    engine = make_engine(config, dtype=run.config.model.dtype)
    engine.load(folder, behavior.version)
    loaded = time.monotonic()
    done = drain_queue(
        engine,
        run_buffer(run),
        worker=name,
        iteration=prompts.iteration,
        params=sampling_params(config, folder),
        base_seed=run.config.seed,
        group_size=config.group_size,
        max_portions=config.max_portions_per_worker,
    )
    say(
        "generate",
        f"worker {worker}: {done.num_portions} portions, {done.num_samples} samples of v{behavior.version}, "
        f"{done.num_tokens / max(done.seconds, 1e-9):,.0f} tokens/s, {time.monotonic() - start:.1f} s",
        iteration=prompts.iteration,
    )
    return RolloutReport(
        iteration=prompts.iteration,
        worker=name,
        engine=engine.describe(),
        num_portions=done.num_portions,
        num_samples=done.num_samples,
        num_tokens=done.num_tokens,
        seconds=time.monotonic() - start,
        load_seconds=loaded - start,
    )


generate = map_task(rollout_worker, bound_inputs={"run", "prompts", "behavior"}, min_success_ratio=0.5)
"""One mapped task for all iterations (a new one a turn would add a task template to the graph each time).
Half of the workers may be lost for good: the queue, not the workers, decides whether an iteration is
complete."""
