"""A campaign: segments of iterations, from version 0 or from where it stopped. Entry point of ``pyflyte
run``.

pyflyte run workflows/campaign.py campaign --config configs/campaigns/laptop.yaml
"""

# pyright: reportReturnType=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false
# Inside a workflow a task call returns a promise of its declared type.

import warnings

from flytekit import LaunchPlan, dynamic, workflow

from tasks import placement
from tasks.checkpoint import hand_on, initialize, open_campaign, publish, resume
from tasks.command_line import says_what_is_wrong
from tasks.config import CampaignConfig
from tasks.evaluate import evaluate
from tasks.preflight import preflight_task
from tasks.prompts import demonstrations
from tasks.records import CampaignRun, CampaignState, CampaignSummary
from tasks.report import report
from tasks.session import is_evaluated
from tasks.train import update_policy
from workflows.iteration import iteration, node

DEFAULT = CampaignConfig()

# flytekit spells the negative of a flag twice (--no_fresh, --no-fresh), which click answers with a warning a
# run.
warnings.filterwarnings("ignore", message="The parameter --fresh is used more than once")


@dynamic(**placement.CPU.task_arguments())
def unroll(run: CampaignRun, state: CampaignState, until: int) -> CampaignState:
    """Iterations up to ``until`` as a graph. With ``max_staleness`` s, iteration k samples with the policy
    published s iterations before the one it trains: asynchrony is nothing but the edges of this graph."""
    schedule = run.config.schedule
    policies, evaluations = list(state.versions), []
    for k in range(state.iterations_done, until):
        behavior = policies[max(0, len(policies) - 1 - schedule.max_staleness)]
        policies.append(iteration(run, k, behavior=behavior, policy=policies[-1]))
        if is_evaluated(run.config, k + 1):
            evaluations.append(node(f"evaluate-{k}", evaluate(run=run, policy=policies[-1])))
    return hand_on(
        versions=policies[-(schedule.max_staleness + 1) :], iterations_done=until, evaluations=evaluations
    )


@workflow
def segment(run: CampaignRun, state: CampaignState, until: int) -> CampaignState:
    """A workflow record of its own: small enough for Flyte to store, recoverable alone."""
    return unroll(run=run, state=state, until=until)


segment_plan = LaunchPlan.get_or_create(workflow=segment, name="moe_rl_segment")


@dynamic(**placement.CPU.task_arguments())
def first_versions(run: CampaignRun, state: CampaignState) -> CampaignState:
    """Version 0 and its warm start, as far as they are missing, and the score of the version the run starts
    from."""
    versions = list(state.versions) or [initialize(run=run)]
    if run.config.warm_start.steps and (not state.versions or state.versions[-1].version == 0):
        batch = demonstrations(run=run, policy=versions[-1])
        trained = node("warm-start", update_policy(run.config)(run=run, batch=batch, policy=versions[-1]))
        versions = [publish(run=run, candidate=trained)]
    score = evaluate(run=run, policy=versions[-1])
    return hand_on(versions=versions, iterations_done=state.iterations_done, evaluations=[score])


@dynamic(**placement.CPU.task_arguments())
def segments(run: CampaignRun, state: CampaignState) -> CampaignState:
    """The remaining iterations as a chain of segments, each handing its newest versions to the next."""
    schedule = run.config.schedule
    for start in range(state.iterations_done, schedule.iterations, schedule.segment_iterations):
        until = min(start + schedule.segment_iterations, schedule.iterations)
        state = segment_plan(run=run, state=state, until=until)
    return state


@dynamic(**placement.CPU.task_arguments())
def preflight(run: CampaignRun) -> CampaignRun:
    """The checks of each role in ``preflight.roles``, one after the other; the rest of the campaign waits."""
    checked = run
    for role in run.config.preflight.roles:
        checked = node(f"preflight-{role}", preflight_task(run.config, role)(run=checked))
    return checked


@says_what_is_wrong
@workflow
def campaign(
    config: CampaignConfig = DEFAULT,
    name: str | None = None,
    iterations: int | None = None,
    learning_rate: float | None = None,
    store: str | None = None,
    fresh: bool = False,
) -> CampaignSummary:
    """Post-train a mixture-of-experts policy. The scalars override the configuration where given; ``fresh``
    starts a new lineage of the same name instead of going on with the newest one."""
    run = open_campaign(
        config=config, name=name, iterations=iterations, learning_rate=learning_rate, store=store, fresh=fresh
    )
    run = preflight(run=run)
    state = first_versions(run=run, state=resume(run=run))
    return report(run=run, state=segments(run=run, state=state))
