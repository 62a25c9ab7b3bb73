"""A campaign as Flyte would run it: registered, activated and launched through the real client, every attempt
a ``pyflyte-execute`` process of its own, nodes in parallel, Spot nodes taken away.

What these tests cannot see: propeller, Kubernetes, node loss in a job of several nodes. ``flyte_runner.py``
says how it differs.
"""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from campaigns import SMALL, run
from flyte_admin import admin_on_loopback
from flyte_runner import Attempt, Runner, unpacked
from flytekit.configuration import Config, PlatformConfig
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal
from flytekit.remote import FlyteRemote
from test_launch_plans import IMAGE, WHERE, pyflyte

from tasks.config import CampaignConfig
from tasks.records import CampaignSummary

ROOT = Path(__file__).resolve().parent.parent


@dataclass(kw_only=True)
class Preemptions:
    """Which attempts get which signal, once each, when their log shows that they work, or at once."""

    plan: dict[str, tuple[signal.Signals, str]]
    """Ending of the node's path -> signal, and what its log must hold before."""
    sent: list[str]

    def __call__(self, node: str, attempt: int, log: Path) -> signal.Signals | None:
        for ending, (number, pattern) in self.plan.items():
            if node.endswith(ending) and ending not in self.sent and re.search(pattern, log.read_text()):
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
    for ending, (number, _) in preemptions.plan.items():
        first, *rest = ran.of(ending)
        assert first.outcome != "ok" and [attempt.outcome for attempt in rest] == ["ok"], ran.of(ending)
        assert first.outcome == ("system" if number == signal.SIGKILL else "user"), first
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


@pytest.mark.timeout(900)
def test_an_iteration_outlives_a_killed_worker_and_a_drained_trainer(
    tmp_path: Path, leave_servers: None
) -> None:
    plan = {"generate-0/0": (signal.SIGKILL, ""), "update-0": (signal.SIGTERM, "")}
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
    plan = {"generate-0/0": (signal.SIGKILL, ""), "generate-2/1": (signal.SIGKILL, "")}
    if size == "laptop":
        config = yaml.safe_load((ROOT / "configs/campaigns/laptop.yaml").read_text())
        config["schedule"]["max_staleness"] = 1
    preemptions = Preemptions(plan={**plan, "update-1": (signal.SIGTERM, r"train")}, sent=[])
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
