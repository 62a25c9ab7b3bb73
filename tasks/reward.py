"""Scoring: every sample gets a score, an abstention, or a failure with a reason."""

import time
from typing import Any

from flytekit import task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, PromptSet, RolloutReport, ScoreReport, TrainBatch
from tasks.session import WEIGHTS, find_sealed, run_buffer, run_environment, run_store, say

GROUPS_PER_TAKE = 128


@task(**placement.REWARD.task_arguments())
def score(
    run: CampaignRun,
    prompts: PromptSet,
    behavior: PolicyVersion,
    rollouts: list[RolloutReport | None],
    before: ScoreReport | None = None,
) -> ScoreReport:
    """Verify every published sample of the iteration exactly once; the queue must be empty.

    ``before`` is the report of the iteration without its last refill; this one sums up both.
    """
    from tasks.engine.pool import await_queue
    from tasks.environments.scoring import readable, score_groups
    from tasks.policy.tokenizer import load_tokenizer

    start, buffer, iteration = time.monotonic(), run_buffer(run), prompts.iteration
    if sealed := find_sealed(run, iteration):
        return _report_of(sealed)
    environment, tokenizer = (
        run_environment(run),
        load_tokenizer(run_store(run).pull(behavior, without=WEIGHTS)),
    )

    def score_waiting() -> None:
        while taken := buffer.take_rollouts("score", iteration=iteration, max_groups=GROUPS_PER_TAKE):
            groups, unreadable = readable(taken)
            for handle, reason in unreadable:
                worker = buffer.refuse_rollout("score", iteration, handle, reason)
                say(
                    "score",
                    f"refused a group of worker {worker}, now barred: {reason[:160]}",
                    iteration=iteration,
                )
            buffer.publish_scored("score", iteration, score_groups(groups, environment, tokenizer))

    score_waiting()
    while run.config.rollout.pool == "standing" and buffer.outstanding(
        iteration
    ):  # refused groups come again
        await_queue(run, prompts)
        score_waiting()
    if waiting := buffer.outstanding(iteration):
        raise RuntimeError(
            f"iteration {iteration} must have no portion left on the queue, got {waiting} of "
            f"{prompts.num_portions}: workers were lost or barred. Nothing is lost with them; run the "
            "campaign again to go on from here."
        )
    if prompts.refill == run.config.rollout.refill_rounds:
        buffer.close(iteration)  # from here on the iteration's counts are final
    reports = [report for report in rollouts if report is not None]
    return _report(run, buffer, prompts, reports, start, before)


def _report(
    run: CampaignRun,
    buffer: Any,
    prompts: PromptSet,
    reports: list[RolloutReport],
    start: float,
    before: ScoreReport | None,
) -> ScoreReport:
    import polars as pl

    from tasks.schema import ScoredFrame, from_bytes

    iteration = prompts.iteration
    frame = from_bytes(*(group.payload for group in buffer.scan_scored(iteration)), schema=ScoredFrame)
    scored = frame.filter(pl.col("outcome") == "score")
    num_failures = int((frame["outcome"] == "failure").sum())
    if num_failures > run.config.reward.max_failure_share * max(len(frame), 1):
        reasons = frame.filter(pl.col("outcome") == "failure")["reason"].unique().to_list()[:3]
        raise RuntimeError(
            f"iteration {iteration}: at most {run.config.reward.max_failure_share:.0%} of samples may fail "
            f"to be scored, got {num_failures} of {len(frame)}: {reasons}. A failure is not a reward of 0; "
            "mend the verifier and run the campaign again."
        )
    report = ScoreReport(
        iteration=iteration,
        behavior_version=prompts.behavior_version,
        num_samples=len(frame),
        num_failures=num_failures,
        reward_mean=_mean(scored["reward"]),
        exact_share=_mean(scored["is_exact"]),
        finished_share=_mean(frame["finish_reason"] == "stop"),
        response_tokens_mean=_mean(frame["response_ids"].list.len()),
        generate_seconds=sum(r.seconds for r in reports) + (before.generate_seconds if before else 0.0),
        generate_load_seconds=sum(r.load_seconds for r in reports)
        + (before.generate_load_seconds if before else 0.0),
        generated_tokens=int(frame["response_ids"].list.len().sum()),
        score_seconds=time.monotonic() - start + (before.score_seconds if before else 0.0),
        num_offered=prompts.num_samples + (before.num_offered if before else 0),
    )
    say(
        "score",
        f"reward {report.reward_mean:.3f}, exact {report.exact_share:.3f}, finished "
        f"{report.finished_share:.3f}, {report.num_samples} samples, {report.num_failures} failures, "
        f"{report.score_seconds:.1f} s",
        iteration=iteration,
    )
    return report


def _report_of(sealed: TrainBatch) -> ScoreReport:
    """Of an iteration that was sealed before; assembly hands that batch on whatever this says."""
    metrics, seconds = sealed.metrics, sealed.seconds
    return ScoreReport(
        iteration=sealed.iteration,
        behavior_version=sealed.behavior_version,
        num_samples=sealed.produced,
        num_failures=int(metrics["failures"]),
        reward_mean=metrics["reward"],
        exact_share=metrics["exact_match"],
        finished_share=metrics["finished"],
        response_tokens_mean=metrics["response_tokens"],
        generate_seconds=seconds["generate"] + seconds["load_engine"],
        generate_load_seconds=seconds["load_engine"],
        generated_tokens=int(metrics["generated_tokens"]),
        score_seconds=seconds["score"],
        num_offered=sealed.offered,
    )


def _mean(column: Any) -> float:
    return float(column.mean() or 0.0)
