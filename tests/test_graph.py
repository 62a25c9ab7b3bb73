"""The graph as Flyte will see it: edges, pools, pod templates, and that none of it needs torch."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import yaml
from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.tools.ignore import FlyteIgnore, IgnoreGroup
from flytekit.tools.script_mode import list_all_files
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict

from tasks import placement
from tasks.config import CampaignConfig
from tasks.records import CampaignRun, CampaignState, PolicyVersion
from tasks.train import UPDATE_POLICY
from workflows import campaign
from workflows.reward_model import reward_model

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = SerializationSettings(
    project="p",
    domain="d",
    version="v",
    image_config=ImageConfig(default_image=Image("d", "img", "t")),
    fast_serialization_settings=FastSerializationSettings(
        enabled=True, destination_dir="/root", distribution_location="s3://x/f.tar.gz"
    ),
)


def version(number):
    return PolicyVersion(
        campaign="c.0001", version=number, manifest_uri="s3://x", version_id="v", manifest_sha256="0" * 64
    )


def unrolled(entity, **inputs):
    """The dynamic job specification a dynamic node would hand to Flyte at run time."""
    entity._wf = (
        None  # flytekit keeps the first unrolling of a process; a real dynamic node is a process of its own
    )
    context = FlyteContextManager.current_context().with_serialization_settings(SETTINGS)
    with FlyteContextManager.with_context(context) as ctx:
        state = ctx.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        with FlyteContextManager.with_context(ctx.with_execution_state(state)) as ctx:
            literals = TypeEngine.dict_to_literal_map(ctx, inputs, entity.python_interface.inputs)
            return entity.dispatch_execute(ctx, literals)


def edges(*, staleness, iterations=4, reward=None, rollout=None, **schedule):
    """Node id -> all nodes it waits for, directly or through others."""
    schedule = {"iterations": iterations, "max_staleness": staleness, **schedule}
    config = CampaignConfig(schedule=schedule, reward=reward or {}, rollout=rollout or {})
    run = CampaignRun(config=config, lineage=1, code_revision="r")
    state = CampaignState(versions=[version(0)], iterations_done=0)
    spec = unrolled(campaign.unroll, run=run, state=state, until=iterations)
    direct = {
        node.id: {b.binding.promise.node_id for b in node.inputs if b.binding.promise}
        | {
            p.promise.node_id
            for b in node.inputs
            if b.binding.collection
            for p in b.binding.collection.bindings
            if p.promise
        }
        for node in spec.nodes
    }

    @functools.cache
    def ancestors(node):
        return frozenset().union(*({parent} | ancestors(parent) for parent in direct[node]))

    return {node: ancestors(node) for node in direct}, spec


def test_on_policy_generation_waits_for_the_previous_training():
    waits, _ = edges(staleness=0)
    assert {"update-0", "publish-0"} <= waits["generate-1"]


def test_with_staleness_one_generation_does_not_wait_for_the_previous_training():
    waits, _ = edges(staleness=1)
    for k in range(1, 4):
        assert not {f"update-{k - 1}", f"publish-{k - 1}"} & waits[f"generate-{k}"]
        assert {f"update-{k - 1}", f"publish-{k - 1}"} <= waits[f"update-{k}"]
    assert waits["generate-1"] <= {"prompts-1"}  # may start at once
    assert {"publish-0"} <= waits["generate-2"] and "publish-1" not in waits["generate-2"]


def test_an_iteration_is_prompts_generate_score_assemble_update_publish():
    waits, spec = edges(staleness=0, iterations=1)
    chain = ["prompts-0", "generate-0", "score-0", "assemble-0", "update-0", "publish-0"]
    for earlier, later in itertools.pairwise(chain):
        assert earlier in waits[later]
    (mapped,) = [node for node in spec.nodes if node.array_node]
    assert mapped.id == "generate-0"


@pytest.mark.parametrize("pool", ["tasks", "standing"])
def test_scoring_that_overlaps_waits_for_the_prompts_and_not_for_the_workers(pool):
    waits, spec = edges(staleness=0, iterations=2, reward={"overlap": True}, rollout={"pool": pool})
    for k in range(2):
        assert f"prompts-{k}" in waits[f"score-{k}"] and f"generate-{k}" not in waits[f"score-{k}"]
        assert f"score-{k}" in waits[f"update-{k}"]
        assert f"generate-{k}" in {node.id for node in spec.nodes}
    assert "generate-0" in edges(staleness=0, iterations=1, rollout={"pool": pool})[0]["score-0"]


def test_evaluations_follow_every_nth_version_and_the_last():
    waits, _ = edges(staleness=0, iterations=5, evaluate_every=2)
    assert {name for name in waits if name.startswith("evaluate")} == {
        "evaluate-1",
        "evaluate-3",
        "evaluate-4",
    }


def test_a_segment_stays_far_below_flytes_record_limit_and_repeats_no_task():
    _, spec = edges(staleness=1, iterations=25)
    # A dynamic graph goes to the object store (flyte.yaml: 10 MB) and to the admin in one message (4 MB);
    # etcd, which refuses 1.5 MB, gets only the state of its nodes.
    assert spec.to_flyte_idl().ByteSize() < 2_000_000
    names = [template.id.name for template in spec.tasks]
    assert len(names) == len(set(names)) < 12


def test_segments_chain_launch_plans_over_all_iterations():
    run = CampaignRun(config=CampaignConfig(schedule={"iterations": 23}), lineage=1, code_revision="r")
    state = CampaignState(versions=[version(3)], iterations_done=3)
    spec = unrolled(campaign.segments, run=run, state=state)
    until = [b.binding.scalar.primitive.integer for n in spec.nodes for b in n.inputs if b.var == "until"]
    assert until == [13, 23]
    assert all(node.workflow_node.launchplan_ref.name == "moe_rl_segment" for node in spec.nodes)


def serialized_tasks():
    """Task name -> serialized template, of everything the campaign runs."""

    found = {}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(("tasks.", "workflows.")):
            for entity in vars(module).values():
                if hasattr(entity, "pod_template") and hasattr(entity, "task_type"):
                    found[entity.name] = entity
    return {name: get_serializable({}, SETTINGS, entity).template for name, entity in found.items()}


POOL_OF = {
    "tasks.prompts.offer_prompts": placement.CPU,
    "tasks.rollout.rollout_worker": placement.ROLLOUT,
    "tasks.reward.score": placement.REWARD,
    "tasks.reward_model.train_reward_model": placement.REWARD,
    "tasks.buffer.assemble": placement.MEMORY,
    "tasks.train.update_policy_single_1x1": placement.SINGLE,
    "tasks.train.update_policy_laptop_1x2": placement.CPU,
    "tasks.train.update_policy_node_1x8": placement.TRAINER,
    "tasks.train.update_policy_cluster_16x8": placement.TRAINER,
    "tasks.checkpoint.publish": placement.CPU,
    "tasks.evaluate.evaluate": placement.ROLLOUT,
    "tasks.report.report": placement.CPU,
}


def test_every_task_is_serialized_in_its_pool_with_its_pod_template():
    templates = serialized_tasks()
    assert POOL_OF.keys() <= templates.keys()
    for name, template in templates.items():
        spec = template.k8s_pod.pod_spec
        (container,) = spec["containers"]
        pool = next(p for p in placement.POOLS if p.name == spec["nodeSelector"][placement.POOL_LABEL])
        assert POOL_OF.get(name, pool) is pool, name
        assert container["resources"] == {"limits": pool.resources, "requests": pool.resources}, name
        assert container["image"] == f"{placement.REGISTRY}/{pool.image}"
        assert spec["tolerations"][0]["value"] == pool.name
        assert template.metadata.interruptible == pool.is_spot
        is_training = name.startswith("tasks.train.update_policy")
        assert template.metadata.retries.retries == (
            placement.TRAINER_RETRIES if is_training else pool.retries
        )
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert ("/dev/shm" in mounts) == bool(pool.shared_memory)


def test_a_reward_model_is_trained_by_one_task_on_the_reward_pool():
    (node,) = get_serializable({}, SETTINGS, reward_model).template.nodes
    assert node.task_node.reference_id.name == "tasks.reward_model.train_reward_model"


def test_the_trainer_keeps_efa_hugepages_and_its_topology():
    template = serialized_tasks()["tasks.train.update_policy_cluster_16x8"]
    limits = template.k8s_pod.pod_spec["containers"][0]["resources"]["limits"]
    assert limits["vpc.amazonaws.com/efa"] == "16" and limits["hugepages-2Mi"] == "5120Mi"
    assert template.type == "pytorch"
    custom = template.custom if isinstance(template.custom, dict) else MessageToDict(template.custom)
    assert custom["elasticConfig"]["nprocPerNode"] == 8 and custom["elasticConfig"]["maxReplicas"] == 16
    assert {task.task_config.max_restarts for task in UPDATE_POLICY.values()} == {3}, "a killed rank's group"


CAMPAIGNS = sorted((ROOT / "configs/campaigns").glob("*.yaml"))


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_the_first_segment_of_every_shipped_campaign_is_serialized(path):
    config = CampaignConfig.model_validate(yaml.safe_load(path.read_text()))
    run = CampaignRun(config=config, lineage=1, code_revision="r")
    until = min(config.schedule.segment_iterations, config.schedule.iterations)
    state = CampaignState(versions=[version(0)], iterations_done=0)
    spec = unrolled(campaign.unroll, run=run, state=state, until=until)
    assert spec.to_flyte_idl().ByteSize() < 2_000_000
    names = {template.id.name for template in spec.tasks}
    is_standing = config.train.pool == "standing"
    update = "await_update" if is_standing else f"update_policy_{config.train.topology}"
    assert [name for name in names if "update" in name] == [f"tasks.train.{update}"]
    assert len([node for node in spec.nodes if node.id.startswith("update-")]) == until


def test_every_task_declares_outputs():
    # an elastic task that is stopped by SIGTERM exits 0: without outputs Flyte would call that a success
    for name, template in serialized_tasks().items():
        assert template.interface.outputs, name


BLOCKER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "sglang", "polars", "pandera", "valkey",
        "matplotlib"}:
            raise ImportError(f"{name} must not be imported to register a workflow")
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """What ``pyflyte package`` writes, in an interpreter that refuses heavy imports."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    command = [
        str(Path(sys.executable).parent / "pyflyte"),
        "--pkgs",
        "workflows",
        "package",
        "--copy",
        "all",
        "--image",
        "registry.example.com/moe-rl/cpu:0.1.0",
        "--output",
        str(folder / "flyte.tgz"),
        "--force",
    ]
    env = dict(os.environ, PYTHONPATH=str(folder))
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    with tarfile.open(folder / "flyte.tgz") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def test_packaging_beside_a_store_neither_waits_for_its_pipes_nor_takes_its_files(tmp_path):
    shutil.copy(ROOT / ".flyteignore", tmp_path)
    (tmp_path / "tasks/embedded").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    kept = [".flyteignore", "configs/valkey.yaml", "tasks/embedded/valkey.py"]
    for name in kept[1:]:
        (tmp_path / name).touch()
    for folder in ("runs/seaweedfs", "runs/valkey", "other/store/seaweedfs", "other/store/valkey"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "server.json").touch()
        os.mkfifo(tmp_path / folder / "users.fifo")
    (tmp_path / "runs/laptop.0001").mkdir()
    (tmp_path / "runs/laptop.0001/report.html").touch()
    found = list_all_files(str(tmp_path), False, IgnoreGroup(str(tmp_path), [FlyteIgnore]))
    assert sorted(os.path.relpath(path, tmp_path) for path in found) == kept


def test_packaging_needs_no_torch_and_includes_every_workflow(package):
    names = " ".join(package)
    parts = ("campaign.campaign", "campaign.segment", "moe_rl_segment", "update_policy_cluster_16x8")
    parts += ("reward_model.reward_model", "tasks.reward_model.train_reward_model")
    for part in (*parts, "laptop", "one_node", "eks_grpo", "nightly"):
        assert part in names


def test_the_package_holds_no_path_of_the_machine_that_made_it(package):
    for name, content in package.items():
        for path in (ROOT, sys.prefix, tempfile.gettempdir()):
            assert str(path).encode() not in content, (name, path)
