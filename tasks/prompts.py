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
    return _offer(run, iteration, behavior, refill=0, first=0, count=run.config.rollout.prompts_offered)


@task(**placement.CPU.task_arguments())
def refill_prompts(run: CampaignRun, behavior: PolicyVersion, scores: ScoreReport, refill: int) -> PromptSet:
    """Offer fresh prompts in place of groups that earned one reward, if too few differ. Safe to repeat."""
    from tasks.artifacts.cursor import first_prompt
    from tasks.rl.refill import refill_sizes, telling_prompts
    from tasks.schema import ScoredFrame, from_bytes

    rollout, iteration = run.config.rollout, scores.iteration
    sizes = [0]
    if not find_sealed(run, iteration):
        groups = run_buffer(run).scan_scored(iteration)
        telling = telling_prompts(from_bytes(*(group.payload for group in groups), schema=ScoredFrame))
        environment, reserved = run_environment(run), rollout.prompts_reserved
        start = first_prompt(run_store(run), behavior, iteration, offered=reserved)
        ids = [environment.train_prompt(start + i).prompt_id for i in range(reserved)]
        sizes = refill_sizes(
            [prompt_id in telling for prompt_id in ids],
            first=rollout.prompts_offered,
            wanted=rollout.prompts_per_iteration,
            rounds=refill,
        )
    count = sizes[refill] if len(sizes) > refill else 0
    return _offer(run, iteration, behavior, refill=refill, first=sum(sizes[:refill]), count=count)


def _offer(
    run: CampaignRun, iteration: int, behavior: PolicyVersion, *, refill: int, first: int, count: int
) -> PromptSet:
    """Put ``count`` prompts on the queue, from the ``first`` of those reserved for the iteration."""
    from tasks.artifacts.cursor import first_prompt
    from tasks.experience.records import WorkItem
    from tasks.policy.models.tokenizer import load_tokenizer, prompt_ids, require_room
    from tasks.schema import PromptFrame, make_frame, to_bytes

    rollout, environment = run.config.rollout, run_environment(run)
    _require_same_data(run, environment)
    if find_sealed(run, iteration):
        say("prompts", "the iteration's batch is sealed: nothing is sampled again", iteration=iteration)
        count = 0
    if not count:
        return _prompt_set(run, iteration, behavior, refill=refill, num_portions=0, num_groups=0)
    reserved = first_prompt(run_store(run), behavior, iteration, offered=rollout.prompts_reserved)
    prompts = [environment.train_prompt(reserved + first + i) for i in range(count)]
    with run_store(run).reading(behavior, without=WEIGHTS) as folder:
        tokenizer = load_tokenizer(folder)
        rows = [
            {"iteration": iteration, "prompt_id": p.prompt_id, "prompt_ids": prompt_ids(tokenizer, p.text)}
            for p in prompts
        ]
        require_room(folder, ((row["prompt_id"], len(row["prompt_ids"])) for row in rows), rollout)
    offered = make_frame(rows, PromptFrame)  # of all portions: two prompts of one id are refused
    parts = [rows[i : i + rollout.groups_per_portion] for i in range(0, count, rollout.groups_per_portion)]
    items = [
        WorkItem(
            iteration=iteration,
            portion=refill * rollout.num_portions + number,
            policy_version=behavior.version,
            num_groups=len(part),
            num_samples=len(part) * rollout.group_size,
            payload=to_bytes(make_frame(part, PromptFrame)),
        )
        for number, part in enumerate(parts)
    ]
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
    say(
        "prompts",
        f"{len(rows)} x {rollout.group_size} in {len(items)} portions{over}{known}",
        iteration=iteration,
    )
    num_groups = len(rows) + handed
    return _prompt_set(
        run, iteration, behavior, refill=refill, num_portions=len(items), num_groups=num_groups
    )


def _prompt_set(
    run: CampaignRun,
    iteration: int,
    behavior: PolicyVersion,
    *,
    refill: int,
    num_portions: int,
    num_groups: int,
) -> PromptSet:
    return PromptSet(
        iteration=iteration,
        behavior_version=behavior.version,
        num_portions=num_portions,
        num_groups=num_groups,
        num_samples=num_groups * run.config.rollout.group_size,
        refill=refill,
    )


@task(**placement.CPU.task_arguments())
def demonstrations(run: CampaignRun, policy: PolicyVersion) -> TrainBatch:
    """Seal right answers to training prompts as a supervised batch; one mini-batch a step."""
    import hashlib

    from tasks.environments.demonstrations import demonstrated
    from tasks.policy.models.chat import Chat
    from tasks.policy.models.tokenizer import load_tokenizer, prompt_ids
    from tasks.schema import TrainFrame, make_frame, to_bytes

    start = time.time()
    warm, environment = run.config.warm_start, run_environment(run)
    with run_store(run).reading(policy, without=WEIGHTS) as folder:
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


def _require_same_data(run: CampaignRun, environment: "Environment") -> None:
    """A position means the same prompt for the whole lineage, whatever became of the files it came from."""
    store, name, found = run_store(run), "data/fingerprint", environment.fingerprint()
    known = store.find_object(name)
    if known is None:
        store.put_object(name, found.encode())
    elif known.decode() != found:
        raise ValueError(
            f"campaign {run.campaign} must go on with the data it began with, got {found!r} instead of "
            f"{known.decode()!r}. Restore the data, or pass --fresh to start a new lineage."
        )
