"""A campaign as Flyte would run it: registered, activated and launched through the real client, every attempt
a ``pyflyte-execute`` process of its own, nodes in parallel, Spot nodes taken away.

What these tests cannot see: propeller, Kubernetes, node loss in a job of several nodes. ``flyte_runner.py``
says how it differs.
"""

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from campaigns import SMALL, run
from flyte_admin import admin_on_loopback
from flyte_runner import Attempt, NodeFailed, Runner, classified, num_descendants, unpacked
from flyteidl.core import errors_pb2
from flyteidl.core.literals_pb2 import LiteralMap as Literals
from flytekit.configuration import Config, PlatformConfig
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal
from flytekit.remote import FlyteRemote
from test_graph import serialized_tasks, unrolled, version
from test_launch_plans import IMAGE, WHERE, pyflyte

from tasks import placement
from tasks.config import CampaignConfig
from tasks.records import CampaignRun, CampaignState, CampaignSummary
from workflows import campaign

ROOT = Path(__file__).resolve().parent.parent


def error(*, recoverable: bool) -> bytes:
    """The document that a failed attempt leaves."""
    kinds = errors_pb2.ContainerError
    kind = kinds.RECOVERABLE if recoverable else kinds.NON_RECOVERABLE
    return errors_pb2.ErrorDocument(error=kinds(message="x\nwhy", kind=kind)).SerializeToString()


def unrolled_first_iteration() -> Any:
    run_ = CampaignRun(config=CampaignConfig(), lineage=1, code_revision="r")
    state = CampaignState(versions=[version(0)], iterations_done=0)
    return unrolled(campaign.unroll, run=run_, state=state, until=1).to_flyte_idl()


@dataclass(kw_only=True)
class Preemptions:
    """Which nodes get which signal, once each: a worker at once, a trainer when its ranks exist."""

    plan: dict[str, signal.Signals]
    """Ending of the node's path -> signal."""
    sent: list[str]

    def __call__(self, node: str, process: int) -> signal.Signals | None:
        for ending, number in self.plan.items():
            # a trainer at work has a tracker, the server of its ranks, and two ranks
            is_at_work = "update" not in ending or num_descendants(process) >= 4
            if node.endswith(ending) and ending not in self.sent and is_at_work:
                self.sent.append(ending)
                return number
        return None


@dataclass(frozen=True, kw_only=True)
class Ran:
    summary: CampaignSummary
    attempts: list[Attempt]

    def of(self, ending: str) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.node.endswith(ending)]


def through_flyte(folder: Path, config: dict[str, Any], preempt: Any, *, num_parallel: int = 3) -> Ran:
    """Register everything, launch the plan ``laptop`` with this configuration, run what was launched."""
    from tasks.embedded.seaweed import ensure_s3
    from tasks.embedded.valkey import ensure_valkey

    store = folder / "store"
    ensure_s3(store)  # they stay while this process lives, as a cluster's store and buffer do
    ensure_valkey(store)
    with admin_on_loopback(folder / "admin") as (admin, environment):
        arguments = ("--image", IMAGE, "--version", "v1", "--copy", "all", "--activate-launchplans")
        pyflyte(environment, "register", *WHERE, *arguments, "workflows")
        platform = PlatformConfig(endpoint=environment["FLYTE_PLATFORM_URL"], insecure=True)
        remote = FlyteRemote(
            Config.auto().with_params(platform=platform), default_project="moe", default_domain="production"
        )
        inputs = {"config": CampaignConfig.model_validate(config), "store": str(store)}
        execution = remote.execute(remote.fetch_launch_plan(name="laptop", version="v1"), inputs=inputs)
        request = admin.executions[execution.id.name]
    template = next(iter(admin.tasks.values())).spec.template
    arguments = list(template.k8s_pod.pod_spec["containers"][0]["args"])
    archive = Path(arguments[arguments.index("--additional-distribution") + 1])
    runner = Runner(
        tasks={name: found.spec.template for (name, _), found in admin.tasks.items()},
        workflows={name: found.spec.template for (name, _), found in admin.workflows.items()},
        launch_plans={name: found.spec for (name, _), found in admin.launch_plans.items()},
        folder=folder / "execution",
        root=unpacked(archive, folder / "root"),
        preempt=preempt,
        num_parallel=num_parallel,
    )
    outputs = runner.launch(request.spec.launch_plan.name, request.inputs)
    (output,) = outputs.literals.values()
    context = FlyteContextManager.current_context()
    summary = TypeEngine.to_python_value(context, Literal.from_flyte_idl(output), CampaignSummary)
    return Ran(summary=summary, attempts=runner.attempts)


def overlap(ran: Ran, one: str, other: str) -> float:
    """Seconds that the last attempts of two nodes ran at the same time."""
    a, b = ran.of(one)[-1], ran.of(other)[-1]
    return min(a.ended, b.ended) - max(a.started, b.started)


def check_preempted(ran: Ran, preemptions: Preemptions) -> None:
    """Every signal was sent, none ended as a success, each cost one attempt, nothing else failed."""
    assert sorted(preemptions.sent) == sorted(preemptions.plan)
    for ending, number in preemptions.plan.items():
        first, *rest = ran.of(ending)
        assert first.outcome != "ok" and [attempt.outcome for attempt in rest] == ["ok"], ran.of(ending)
        assert first.outcome == ("system" if number == signal.SIGKILL else "user"), first
        assert number != signal.SIGTERM or "TrainingPreempted" in first.message, first
        assert first.is_spot == ("generate" in ending)
    others = [a for a in ran.attempts if not any(a.node.endswith(ending) for ending in preemptions.plan)]
    assert all(attempt.outcome == "ok" for attempt in others)
    summary = ran.summary
    assert summary.pending == 0 and summary.produced == summary.trained + sum(summary.rejected.values())


def check_overlap(ran: Ran, iterations: int) -> None:
    """Sampling goes on while the policy trains: iteration k is sampled before iteration k - 1 is trained."""
    for k in range(1, iterations):
        assert ran.of(f"generate-{k}/0")[-1].started < ran.of(f"update-{k - 1}")[-1].ended, k


def small(*, iterations: int, max_staleness: int) -> dict[str, Any]:
    schedule = {"iterations": iterations, "segment_iterations": 2, "evaluate_every": 4}
    return {
        **SMALL,
        "name": "through-flyte",
        "warm_start": {"steps": 0},
        "schedule": {**schedule, "max_staleness": max_staleness},
    }


@pytest.mark.parametrize(
    ("code", "files", "outcome"),
    [
        (0, {"outputs.pb": b""}, "ok"),
        (0, {"futures.pb": b""}, "ok"),
        (0, {}, "no outputs"),  # what the plugin's own elastic task leaves when it is drained
        (143, {}, "user"),
        (-9, {"outputs.pb": b""}, "system"),
        (137, {}, "system"),
        (0, {"error.pb": error(recoverable=True)}, "user"),
        (1, {"error.pb": error(recoverable=False)}, "permanent"),
    ],
)
def test_an_attempt_without_outputs_is_never_a_success(
    tmp_path: Path, code: int, files: dict[str, bytes], outcome: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert classified(code, tmp_path)[0] == outcome


@dataclass(kw_only=True)
class Scripted(Runner):
    """A runner whose attempts end as told instead of running."""

    outcomes: list[str]

    def _attempt(self, path, template, inputs, folder, number, is_spot, index):
        (folder / "out").mkdir(parents=True)
        (folder / "out/outputs.pb").write_bytes(b"")
        (folder / "log").write_text("")
        return self.outcomes.pop(0), "told"


def budget(folder: Path, task: str, outcomes: list[str]) -> list[tuple[str, bool]]:
    """How the attempts of a serialized task go: outcome and whether on Spot."""
    template = serialized_tasks()[task].to_flyte_idl()
    empty: dict[str, Any] = {"tasks": {}, "workflows": {}, "launch_plans": {}}
    runner = Scripted(**empty, folder=folder, root=folder, outcomes=list(outcomes))
    with contextlib.suppress(NodeFailed):
        runner.task(Path("node"), template, template.metadata, Literals())
    return [(attempt.outcome, attempt.is_spot) for attempt in runner.attempts]


def test_a_lost_spot_node_spends_the_tasks_one_budget_and_its_last_attempt_is_on_demand(
    tmp_path: Path,
) -> None:
    lost = ["system", "user", "system", "no outputs", "system", "ok"]
    went = budget(tmp_path / "a", "tasks.rollout.rollout_worker", lost)
    assert went == [(outcome, number < 5) for number, outcome in enumerate(lost)]
    went = budget(tmp_path / "b", "tasks.rollout.rollout_worker", ["system"] * 9)
    assert len(went) == placement.SPOT_RETRIES + 1 and went[-1] == ("system", False)
    went = budget(tmp_path / "c", "tasks.rollout.rollout_worker", ["permanent", "ok"])
    assert went == [("permanent", True)]  # an ordinary exception is not repeated
    went = budget(tmp_path / "d", "tasks.train.update_policy_cluster_16x8", ["user"] * 9)
    assert went == [("user", False)] * (placement.TRAINER_RETRIES + 1)


def test_half_of_the_workers_may_be_lost_for_good(tmp_path: Path) -> None:
    spec = unrolled_first_iteration()
    (node,) = [node for node in spec.nodes if node.HasField("array_node")]
    assert node.array_node.min_success_ratio == 0.5
    assert node.array_node.node.metadata.retries.retries == placement.SPOT_RETRIES
    assert node.array_node.node.metadata.interruptible


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_iteration_outlives_a_killed_worker_and_a_drained_trainer(
    tmp_path: Path, leave_servers: None
) -> None:
    plan = {"generate-0/0": signal.SIGKILL, "update-0": signal.SIGTERM}
    preemptions = Preemptions(plan=plan, sent=[])
    ran = through_flyte(tmp_path, small(iterations=1, max_staleness=0), preemptions)
    check_preempted(ran, preemptions)
    assert ran.summary.iterations_done == 1 and ran.summary.version.version == 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("size", ["small", "laptop"])
def test_a_campaign_through_flyte_ends_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, leave_servers: None, size: str
) -> None:
    config = small(iterations=3, max_staleness=1)
    plan = {"generate-0/0": signal.SIGKILL, "generate-2/1": signal.SIGKILL, "update-1": signal.SIGTERM}
    if size == "laptop":
        config = yaml.safe_load((ROOT / "configs/campaigns/laptop.yaml").read_text())
        config["schedule"]["max_staleness"] = 1
    preemptions = Preemptions(plan=plan, sent=[])
    ran = through_flyte(tmp_path / "flyte", config, preemptions)
    check_preempted(ran, preemptions)
    check_overlap(ran, config["schedule"]["segment_iterations"])
    print(
        f"flyte, {size}: {len(ran.attempts)} attempts, 2 SIGKILL, 1 SIGTERM, "
        f"digest {ran.summary.tensor_digest[:12]}, held-out {ran.summary.exact_sampled:.3f}"
    )
    (tmp_path / "local").mkdir()
    undisturbed = run(tmp_path / "local", config, timeout=3000)
    assert ran.summary.tensor_digest == undisturbed.digests()[-1]
