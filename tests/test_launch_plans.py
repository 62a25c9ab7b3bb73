"""Launch plans: registered, activated and started through Flyte's real client, against an admin on loopback.

What these tests cannot see: FlyteAdmin's compiler and scheduler, and its counting of concurrent executions.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from flyte_admin import Admin, admin_on_loopback
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import JsonParamType
from flytekit.models.literals import Literal

from tasks.config import CampaignConfig
from workflows import launch_plans

ROOT = Path(__file__).resolve().parent.parent
PYFLYTE = str(Path(sys.executable).parent / "pyflyte")
CAMPAIGNS = ROOT / "configs/campaigns"
IMAGE = "registry.example.com/moe-rl/cpu:0.1.0"
WHERE = ("--project", "moe", "--domain", "production")


def pyflyte(environment: dict[str, str], *arguments: str) -> str:
    result = subprocess.run(
        [PYFLYTE, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Admin, dict[str, str]]]:
    with admin_on_loopback(tmp_path_factory.mktemp("admin")) as (admin, environment):
        arguments = ("--image", IMAGE, "--version", "v1", "--copy", "all", "--activate-launchplans")
        pyflyte(environment, "register", *WHERE, *arguments, "workflows")
        yield admin, environment


def plan(admin: Admin, name: str) -> Any:
    return admin.launch_plans[(name, "v1")].spec


def value(literal: Any, python_type: type) -> Any:
    context = FlyteContextManager.current_context()
    return TypeEngine.to_python_value(context, Literal.from_flyte_idl(literal), python_type)


def test_every_workflow_and_plan_registers_and_plans_are_activated(registered: tuple[Admin, Any]) -> None:
    admin, _ = registered
    plans = {"laptop", "one_node", "eks_grpo", "nightly", "moe_rl_segment"}
    assert {(name, "v1") for name in plans} <= admin.launch_plans.keys()
    assert {(name, "v1") for name in plans} <= admin.active
    assert ("workflows.campaign.campaign", "v1") in admin.workflows


def test_what_is_registered_holds_every_file_a_pod_needs(registered: tuple[Admin, Any]) -> None:
    import tarfile

    admin, _ = registered
    spec = admin.tasks[("tasks.train.update_policy_cluster_16x8", "v1")].spec.template.k8s_pod.pod_spec
    arguments = list(spec["containers"][0]["args"])
    archive = arguments[arguments.index("--additional-distribution") + 1]
    with tarfile.open(archive) as found:
        names = {name.removeprefix("./") for name in found.getnames()}
    lazy = {
        "tasks/policy/training/update.py",
        "kernels/moe_kernels/logprob.py",
        "configs/campaigns/laptop.yaml",
    }
    assert lazy <= names
    assert arguments[arguments.index("--dest-dir") + 1] == "/root"


@pytest.mark.parametrize(
    ("name", "file"),
    [("laptop", "laptop"), ("one_node", "one_node"), ("eks_grpo", "qwen3_30b_a3b"), ("nightly", "one_node")],
)
def test_a_plan_carries_its_file_and_shows_the_operators_knobs(
    registered: tuple[Admin, Any], name: str, file: str
) -> None:
    spec = plan(registered[0], name)
    shipped = CampaignConfig.model_validate(
        yaml.safe_load((ROOT / f"configs/campaigns/{file}.yaml").read_text())
    )
    fixed, knobs = spec.fixed_inputs.literals, spec.default_inputs.parameters
    config = fixed["config"] if "config" in fixed else knobs["config"].default
    assert value(config, CampaignConfig) == shipped
    assert {"name", "iterations", "learning_rate", "store", "fresh"} <= {*knobs, *fixed}
    for knob in set(knobs) - {"config"}:  # scalars: fields of their own in the console's form
        kind = knobs[knob].var.type
        scalar = kind.simple if not kind.union_type.variants else kind.union_type.variants[0].simple
        assert scalar in (1, 2, 3, 4), knob  # integer, float, string, boolean


def test_the_nightly_plan_has_fixed_inputs_and_skips_while_one_runs(registered: tuple[Admin, Any]) -> None:
    spec = plan(registered[0], "nightly")
    assert spec.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * *"
    assert spec.concurrency_policy.max == 1
    assert spec.concurrency_policy.behavior == 1  # SKIP
    assert {"config", "name", "fresh"} <= set(spec.fixed_inputs.literals)
    assert value(spec.fixed_inputs.literals["fresh"], bool) is False  # goes on, never starts anew
    needed = {name for name, found in spec.default_inputs.parameters.items() if found.required}
    assert not needed  # a scheduler gives no inputs


def test_a_launch_from_the_command_line_reaches_the_admin_with_its_knobs(
    registered: tuple[Admin, dict[str, str]],
) -> None:
    admin, environment = registered
    before = set(admin.executions)
    pyflyte(
        environment, "run", "--remote", *WHERE, "--image", IMAGE, "--copy", "all",
        "workflows/launch_plans.py", "eks_grpo", "--iterations", "7", "--name", "trial",
    )  # fmt: skip
    (name,) = admin.executions.keys() - before
    request = admin.executions[name]
    assert request.spec.launch_plan.name == "eks_grpo"
    assert value(request.inputs.literals["iterations"], int | None) == 7
    assert value(request.inputs.literals["name"], str | None) == "trial"


def test_a_registered_plan_starts_by_name_through_the_remote_client(
    registered: tuple[Admin, dict[str, str]],
) -> None:
    from flytekit.configuration import Config, PlatformConfig
    from flytekit.remote import FlyteRemote

    admin, environment = registered
    platform = PlatformConfig(endpoint=environment["FLYTE_PLATFORM_URL"], insecure=True)
    remote = FlyteRemote(
        Config.auto().with_params(platform=platform), default_project="moe", default_domain="production"
    )
    found = remote.fetch_launch_plan(name="one_node", version="v1")
    execution = remote.execute(found, inputs={"iterations": 3, "fresh": True})
    request = admin.executions[execution.id.name]
    assert request.spec.launch_plan.name == "one_node"
    assert value(request.inputs.literals["fresh"], bool) is True


def test_a_file_is_launched_from_the_command_line_as_it_says(
    registered: tuple[Admin, dict[str, str]],
) -> None:
    """One with sections in sections, and a mapping that is kept as JSON."""
    admin, environment = registered
    before = set(admin.executions)
    pyflyte(
        environment, "run", "--remote", *WHERE, "--image", IMAGE, "--copy", "all",
        "workflows/campaign.py", "campaign", "--config", str(CAMPAIGNS / "smollm2_moe.yaml"),
    )  # fmt: skip
    (name,) = admin.executions.keys() - before
    sent = value(admin.executions[name].inputs.literals["config"], CampaignConfig)
    assert sent == launch_plans.shipped("smollm2_moe")


@pytest.mark.parametrize("path", sorted(CAMPAIGNS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_campaign_arrives_as_its_file_says(path: Path) -> None:
    """Read as the command line reads a file, and sent as Flyte sends an input."""
    read = JsonParamType(CampaignConfig).convert(str(path), None, None)
    sent = TypeEngine.to_literal(
        FlyteContextManager.current_context(),
        read,
        CampaignConfig,
        TypeEngine.to_literal_type(CampaignConfig),
    )
    assert value(sent.to_flyte_idl(), CampaignConfig) == launch_plans.shipped(path.stem)


def test_dry_run_registers_every_campaign_without_an_admin(tmp_path: Path) -> None:
    from os import environ

    output = pyflyte(
        dict(environ), "register", *WHERE, "--image", IMAGE, "--version", "v1", "--dry-run", "--copy", "none",
        "workflows",
    )  # fmt: skip
    for name in ("laptop", "one_node", "eks_grpo", "nightly", "workflows.campaign.campaign"):
        assert name in output
    assert launch_plans.shipped("laptop").name == "laptop"
