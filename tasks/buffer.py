"""Assembly: seal an iteration's scored samples as one train batch; account for every one of them."""

import contextlib
import hashlib
import time

from flytekit import task

from tasks import placement
from tasks.artifacts.errors import ObjectConflict
from tasks.records import CampaignRun, PolicyVersion, ScoreReport, TrainBatch, WorkerThroughput
from tasks.say import say
from tasks.session import batch_name, find_sealed, run_buffer, run_store


@task(**placement.MEMORY.task_arguments())
def assemble(run: CampaignRun, scores: ScoreReport, policy: PolicyVersion) -> TrainBatch:
    """Group-relative advantages of the admitted samples, in mini-batches, sealed in the store.

    The first seal of an iteration stands: a repeated call returns it, so a retried trainer reads the same
    bytes.
    """
    from tasks.experience.frames import scored_samples
    from tasks.experience.leftovers import leave_over, with_inherited
    from tasks.rl.assembly import KEPT, assemble_frame, newest_version
    from tasks.schema import to_bytes

    start, iteration = time.monotonic(), scores.iteration
    name = batch_name(run, iteration)
    if sealed := find_sealed(run, iteration):
        batch = sealed.model_copy(update={"sealed_at": time.time()})
        say("assemble", f"sealed before: {batch.num_samples} samples", iteration=iteration)
        return batch
    buffer = run_buffer(run)
    own = scored_samples(buffer, iteration)
    frame = with_inherited(run, iteration, own)
    train, rejected, metrics = assemble_frame(
        frame, run.config, iteration=iteration, policy_version=policy.version
    )
    kept = rejected.pop(KEPT, 0)
    counts = leave_over(run, iteration, frame, train, policy_version=policy.version)
    for lost in buffer.unscored(iteration):
        rejected["unscored"] = rejected.get("unscored", 0) + lost.group.num_samples
    produced, shares = buffer.produced(iteration), buffer.progress(iteration).workers
    if produced.refused:
        rejected["refused"] = produced.refused
    payload = to_bytes(train)
    batch = TrainBatch(
        iteration=iteration,
        objective="clipped_policy",
        key=f"{name}.arrow",
        sha256=hashlib.sha256(payload).hexdigest(),
        num_samples=len(train),
        behavior_version=max(scores.behavior_version, newest_version(frame)),
        produced=produced.samples,
        rejected=rejected,
        metrics={**_score_metrics(scores), **scores.metrics, **metrics},
        seconds=_stage_seconds(scores, time.monotonic() - start),
        waiting=scores.waiting,
        sealed_at=time.time(),
        carried_in=len(frame) - len(own),
        carried_out=kept,
        oldest_version=frame["policy_version"].min(),  # pyright: ignore[reportArgumentType]
        **{"offered": scores.num_offered, **counts},
        late=produced.late,
        workers={
            name: WorkerThroughput(samples=share.samples, tokens=share.tokens, seconds=share.seconds)
            for name, share in shares.items()
        },
    )
    require_signal(batch, scores, control=run.config.reward.control)
    batch = _seal(run, batch, payload)
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items()) if count) or "none"
    carried = f", {batch.carried_in} inherited, {kept} kept" if batch.carried_in or kept else ""
    say("assemble", f"{len(train)} samples to train, rejected: {dropped}{carried}", iteration=iteration)
    return batch


def _seal(run: CampaignRun, batch: TrainBatch, payload: bytes) -> TrainBatch:
    """Store the rows, then what is said of them; of two that seal the same rows at once, the first stands."""
    store = run_store(run)
    store.put_object(batch.key, payload)
    with contextlib.suppress(ObjectConflict):
        key = f"{batch_name(run, batch.iteration)}.json"
        store.put_object(key, batch.model_dump_json().encode())
    return find_sealed(run, batch.iteration) or batch


def _score_metrics(scores: ScoreReport) -> dict[str, float]:
    return {
        "reward": scores.reward_mean,
        "exact_match": scores.exact_share,
        "finished": scores.finished_share,
        "response_tokens": scores.response_tokens_mean,
        "generated_tokens": float(scores.generated_tokens),
        "failures": float(scores.num_failures),
    }


def _stage_seconds(scores: ScoreReport, assemble_seconds: float) -> dict[str, float]:
    return {
        "load_engine": scores.generate_load_seconds,
        "generate": scores.generate_seconds - scores.generate_load_seconds,
        "score": scores.score_seconds,
        "assemble": assemble_seconds,
    }


def require_signal(batch: TrainBatch, scores: ScoreReport, *, control: str) -> None:
    """Nothing to train is well if nothing is left to learn: the next version is this one again. So it is for
    a control, whose reward has nothing to teach."""
    if batch.num_samples:
        return
    if scores.exact_share == 1:
        text = "every sample is right, nothing is left to learn: make the task harder"
    elif control != "none":
        text = f"every sample earned the same {control} reward, nothing is left to learn"
    else:
        cut = "no response ended: raise rollout.max_new_tokens, " if scores.finished_share == 0 else ""
        raise RuntimeError(
            f"iteration {batch.iteration}: at least one group must have differing rewards, got none: "
            f"{batch.rejected}. Every sample of every prompt earned the same reward, so there is nothing to "
            f"learn from: {cut}make the task easier or harder, raise rollout.group_size or "
            "rollout.temperature, or warm-start longer."
        )
    say("assemble", text, iteration=batch.iteration)
