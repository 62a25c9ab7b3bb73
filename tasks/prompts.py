"""Which prompts an iteration works on: put on the work queue, or sealed as demonstrations."""

import time
from typing import TYPE_CHECKING

from flytekit import task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, PromptSet, ScoreReport, TrainBatch
from tasks.say import say
from tasks.session import WEIGHTS, find_sealed, run_buffer, run_environment, run_store

if TYPE_CHECKING:
    from tasks.environments.protocol import Environment


@task(**placement.CPU.task_arguments())
def offer_prompts(run: CampaignRun, iteration: int, behavior: PolicyVersion) -> PromptSet:
    """Put an iteration's prompts on the work queue, to be sampled by ``behavior``. Safe to repeat."""
    first = range(run.config.rollout.prompts_offered)
    return _offer(run, run_environment(run), behavior, iteration=iteration, places=first)


@task(**placement.CPU.task_arguments())
def refill_prompts(run: CampaignRun, behavior: PolicyVersion, scores: ScoreReport, refill: int) -> PromptSet:
    """Offer fresh prompts in place of groups that earned one reward, if too few differ. Safe to repeat."""
    from tasks.artifacts.cursor import first_prompt
    from tasks.experience.frames import scored_samples
    from tasks.rl.refill import refill_sizes, telling_prompts

    rollout, environment, iteration = run.config.rollout, run_environment(run), scores.iteration
    sizes = [0]
    if not find_sealed(run, iteration):
        telling = telling_prompts(scored_samples(run_buffer(run), iteration))
        reserved = rollout.prompts_reserved
        start = first_prompt(run_store(run), behavior, iteration, offered=reserved)
        ids = [environment.train_prompt(start + i).prompt_id for i in range(reserved)]
        sizes = refill_sizes(
            [prompt_id in telling for prompt_id in ids],
            first=rollout.prompts_offered,
            wanted=rollout.prompts_per_iteration,
            rounds=refill,
        )
    places = range(sum(sizes[:refill]), sum(sizes[: refill + 1]))
    return _offer(run, environment, behavior, iteration=iteration, refill=refill, places=places)


def _offer(
    run: CampaignRun,
    environment: "Environment",
    behavior: PolicyVersion,
    *,
    iteration: int,
    refill: int = 0,
    places: range,
) -> PromptSet:
    """Put prompts on the queue: those at some ``places`` of the positions reserved for the iteration."""
    from tasks.artifacts.cursor import first_prompt, fix_dataset
    from tasks.experience.frames import portions
    from tasks.policy.models.tokenizer import load_tokenizer, prompt_ids, require_room
    from tasks.schema import PromptFrame, make_frame

    rollout, store = run.config.rollout, run_store(run)
    fix_dataset(store, environment.fingerprint())
    nothing = PromptSet(
        iteration=iteration, behavior_version=behavior.version, refill=refill, num_portions=0, num_groups=0,
        num_samples=0,
    )  # fmt: skip
    if find_sealed(run, iteration):
        say("prompts", "the iteration's batch is sealed: nothing is sampled again", iteration=iteration)
        return nothing
    if not places:  # a refill that is not needed
        return nothing
    start = first_prompt(store, behavior, iteration, offered=rollout.prompts_reserved)
    prompts = [environment.train_prompt(start + place) for place in places]
    with store.reading(behavior, without=WEIGHTS) as folder:
        tokenizer = load_tokenizer(folder)
        rows = [
            {"iteration": iteration, "prompt_id": p.prompt_id, "prompt_ids": prompt_ids(tokenizer, p.text)}
            for p in prompts
        ]
        require_room(folder, ((row["prompt_id"], len(row["prompt_ids"])) for row in rows), rollout)
    offered = make_frame(rows, PromptFrame)  # of all portions: two prompts of one id are refused
    items = portions(
        offered, rollout, iteration=iteration, policy_version=behavior.version,
        first=refill * rollout.num_portions,
    )  # fmt: skip
    buffer = run_buffer(run)
    buffer.check_server()
    handed = 0
    if rollout.leftovers == "keep":
        from tasks.experience import leftovers

        leftovers.offered(run, iteration, offered)
        handed = leftovers.hand_on(run, iteration, policy_version=behavior.version)  # first on the queue
    added = buffer.put_work(items)
    over = f", {rollout.oversample:.0%} more than are needed" if rollout.oversample else ""
    over += f", refill {refill} of at most {rollout.refill_rounds}" if refill else ""
    over += f", {handed} left over before them" if handed else ""
    known = f", {len(items) - added} were there before" if added < len(items) else ""
    text = f"{len(rows)} x {rollout.group_size} in {len(items)} portions{over}{known}"
    say("prompts", text, iteration=iteration)
    groups = len(rows) + handed
    counts = {"num_portions": len(items), "num_groups": groups, "num_samples": groups * rollout.group_size}
    return nothing.model_copy(update=counts)


@task(**placement.CPU.task_arguments())
def demonstrations(run: CampaignRun, policy: PolicyVersion) -> TrainBatch:
    """Seal right answers to training prompts as a supervised batch; one mini-batch a step."""
    import hashlib

    from tasks.artifacts.cursor import fix_dataset
    from tasks.environments.demonstrations import demonstrated
    from tasks.policy.models.chat import Chat
    from tasks.policy.models.tokenizer import load_tokenizer, prompt_ids
    from tasks.schema import TrainFrame, make_frame, to_bytes

    start = time.time()
    warm, environment, store = run.config.warm_start, run_environment(run), run_store(run)
    fix_dataset(store, environment.fingerprint())
    with store.reading(policy, without=WEIGHTS) as folder:
        tokenizer = load_tokenizer(folder)
    rows, chat = [], Chat(tokenizer)
    for position in range(warm.steps * warm.batch_size):
        prompt = environment.train_prompt(position)
        answer, mask = demonstrated(environment, chat, prompt)
        rows.append(
            {
                "iteration": -1,
                "prompt_id": prompt.prompt_id,
                "sample_index": 0,
                "policy_version": -1,
                "prompt_ids": prompt_ids(tokenizer, prompt.text),
                "response_ids": answer,
                "behavior_logprob": [0.0] * len(answer),
                "loss_mask": mask,
                "reward": None,
                "advantage": 0.0,
                "minibatch": position // warm.batch_size,
            }
        )
    payload = to_bytes(make_frame(rows, TrainFrame))
    key = f"batches/warm-start-{run.config.digest()}.arrow"
    store.put_object(key, payload)
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
