"""Scoring: every sample gets a score, an abstention, or a failure with a reason."""

import time
from typing import TYPE_CHECKING, Any

from flytekit import task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, PromptSet, RolloutReport, ScoreReport, TrainBatch
from tasks.say import say
from tasks.session import WEIGHTS, find_sealed, run_buffer, run_environment, run_store

if TYPE_CHECKING:
    from tasks.environments.intake import Intake


@task(**placement.REWARD.task_arguments())
def score(
    run: CampaignRun,
    prompts: PromptSet,
    behavior: PolicyVersion,
    rollouts: list[RolloutReport | None],
    before: ScoreReport | None = None,
) -> ScoreReport:
    """Score every published sample of the iteration exactly once; the queue must be empty in the end.

    With ``reward.overlap`` it starts beside the workers and waits for the queue, not for them. ``before`` is
    the report of the iteration without its last refill; this one sums up both.
    """
    from tasks.engine.standing_pool import await_queue, pool_reports
    from tasks.environments.intake import Intake
    from tasks.environments.scorer import make_scorer
    from tasks.policy.models.tokenizer import load_tokenizer

    start, buffer, iteration = time.monotonic(), run_buffer(run), prompts.iteration
    if sealed := find_sealed(run, iteration):
        return _report_of(sealed)
    with run_store(run).reading(behavior, without=WEIGHTS) as folder:
        tokenizer = load_tokenizer(folder)
    intake = Intake(buffer, make_scorer(run.config, run_environment(run), tokenizer), iteration)
    if run.config.reward.overlap:
        intake.follow(timeout_seconds=run.config.rollout.standing_timeout_seconds)
    intake.score_waiting()
    while run.config.rollout.pool == "standing" and buffer.outstanding(
        iteration
    ):  # refused groups come again
        await_queue(run, prompts)
        intake.score_waiting()
    intake.finish()
    if waiting := buffer.outstanding(iteration):
        raise RuntimeError(
            f"iteration {iteration} must have no portion left on the queue, got {waiting} of "
            f"{prompts.num_portions}: workers were lost or barred. Nothing is lost with them; run the "
            "campaign again to go on from here."
        )
    if buffer.produced(iteration).is_dropped:
        return _report_of(_sealed_by_another(run, iteration))
    if prompts.refill == run.config.rollout.refill_rounds:
        buffer.close(iteration)  # from here on the iteration's counts are final
    reports = [report for report in rollouts if report is not None]
    if run.config.reward.overlap:
        reports = pool_reports(run, prompts)
    return _report(run, intake, prompts, reports, start, before)


def _report(
    run: CampaignRun,
    intake: "Intake",
    prompts: PromptSet,
    reports: list[RolloutReport],
    start: float,
    before: ScoreReport | None,
) -> ScoreReport:
    import polars as pl

    from tasks.environments.health import killed_verifiers, reward_metrics, say_alerts, waiting_seconds
    from tasks.experience.frames import scored_samples

    iteration = prompts.iteration
    frame = scored_samples(intake.buffer, iteration)
    scored = frame.filter(pl.col("outcome") == "score")
    num_failures = int((frame["outcome"] == "failure").sum())
    if num_failures > run.config.reward.max_failure_share * max(len(frame), 1):
        reasons = frame.filter(pl.col("outcome") == "failure")["reason"].unique().to_list()[:3]
        raise RuntimeError(
            f"iteration {iteration}: at most {run.config.reward.max_failure_share:.0%} of samples may fail "
            f"to be scored, got {num_failures} of {len(frame)}: {reasons}. A failure is not a reward of 0; "
            "mend the verifier and run the campaign again."
        )
    metrics = reward_metrics(frame)
    say_alerts(metrics, frame, intake.scorer.chat.tokenizer, iteration=iteration)
    report = ScoreReport(
        iteration=iteration,
        metrics={**metrics, **killed_verifiers(intake)},
        waiting=waiting_seconds(intake, reports),
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


def _sealed_by_another(run: CampaignRun, iteration: int) -> TrainBatch:
    """The batch of a run beside this one, which published the iteration and freed its samples."""
    if sealed := find_sealed(run, iteration):
        return sealed
    raise RuntimeError(
        f"iteration {iteration} of {run.campaign} must keep its samples until it is trained, got them "
        "dropped: another run of the campaign, with another configuration, set them aside. Let one run work "
        "at a time, and run it again to go on."
    )


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
