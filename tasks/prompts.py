"""Which prompts an iteration works on: put on the work queue, or sealed as demonstrations."""

import time

from flytekit import task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, PromptSet, TrainBatch
from tasks.session import WEIGHTS, find_sealed, run_buffer, run_environment, run_store, say


@task(**placement.CPU.task_arguments())
def offer_prompts(run: CampaignRun, iteration: int, behavior: PolicyVersion) -> PromptSet:
    """Put an iteration's prompts on the work queue, to be sampled by ``behavior``. Safe to repeat."""
    from tasks.experience.records import WorkItem
    from tasks.policy.tokenizer import load_tokenizer, prompt_ids
    from tasks.schema import PromptFrame, make_frame, to_bytes

    rollout, environment = run.config.rollout, run_environment(run)
    if find_sealed(run, iteration):
        say("prompts", "the iteration's batch is sealed: nothing is sampled again", iteration=iteration)
        return PromptSet(
            iteration=iteration,
            behavior_version=behavior.version,
            num_portions=0,
            num_groups=0,
            num_samples=0,
        )
    tokenizer = load_tokenizer(run_store(run).pull(behavior, without=WEIGHTS))
    first = iteration * rollout.prompts_offered
    prompts = [environment.train_prompt(first + i) for i in range(rollout.prompts_offered)]
    rows = [
        {"iteration": iteration, "prompt_id": p.prompt_id, "prompt_ids": prompt_ids(tokenizer, p.text)}
        for p in prompts
    ]
    items = [
        WorkItem(
            iteration=iteration,
            portion=portion,
            policy_version=behavior.version,
            num_groups=len(part),
            num_samples=len(part) * rollout.group_size,
            payload=to_bytes(make_frame(part, PromptFrame)),
        )
        for portion in range(rollout.num_portions)
        if (part := rows[portion * rollout.groups_per_portion : (portion + 1) * rollout.groups_per_portion])
    ]
    buffer = run_buffer(run)
    buffer.check_server()
    added = buffer.put_work(items)
    over = f", {rollout.oversample:.0%} more than are needed" if rollout.oversample else ""
    known = f", {len(items) - added} were there before" if added < len(items) else ""
    say(
        "prompts",
        f"{len(rows)} x {rollout.group_size} in {len(items)} portions{over}{known}",
        iteration=iteration,
    )
    return PromptSet(
        iteration=iteration,
        behavior_version=behavior.version,
        num_portions=len(items),
        num_groups=len(rows),
        num_samples=len(rows) * rollout.group_size,
    )


@task(**placement.CPU.task_arguments())
def demonstrations(run: CampaignRun, policy: PolicyVersion) -> TrainBatch:
    """Seal right answers to training prompts as a supervised batch; one mini-batch a step."""
    import hashlib

    from tasks.policy.tokenizer import encode, load_tokenizer, prompt_ids
    from tasks.schema import TrainFrame, make_frame, to_bytes

    start = time.time()
    warm, environment = run.config.warm_start, run_environment(run)
    tokenizer = load_tokenizer(run_store(run).pull(policy, without=WEIGHTS))
    rows = []
    for position in range(warm.steps * warm.batch_size):
        prompt = environment.train_prompt(position)
        answer = [*encode(tokenizer, environment.demonstration(prompt)), tokenizer.eos_token_id]
        rows.append(
            {
                "iteration": -1,
                "prompt_id": prompt.prompt_id,
                "sample_index": 0,
                "policy_version": -1,
                "prompt_ids": prompt_ids(tokenizer, prompt.text),
                "response_ids": answer,
                "behavior_logprob": [0.0] * len(answer),
                "loss_mask": [True] * len(answer),
                "reward": None,
                "advantage": 0.0,
                "minibatch": position // warm.batch_size,
            }
        )
    payload = to_bytes(make_frame(rows, TrainFrame))
    key = f"batches/warm-start-{run.config.digest()}.arrow"
    run_store(run).put_object(key, payload)
    say("warm", f"{len(rows)} demonstrations in {warm.steps} supervised steps")
    return TrainBatch(
        iteration=-1,
        objective="supervised",
        key=key,
        sha256=hashlib.sha256(payload).hexdigest(),
        num_samples=len(rows),
        behavior_version=-1,
        produced=0,
        rejected={},
        metrics={},
        seconds={"demonstrations": time.time() - start},
        sealed_at=time.time(),
    )
