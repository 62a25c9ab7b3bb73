"""What a configuration refuses at launch, and what the message says."""

import ast
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from tasks.config import CampaignConfig, ConfigError, changes, with_overrides
from tasks.section import Section
from tasks.session import read_config
from tasks.train_config import TOPOLOGIES

ROOT = Path(__file__).resolve().parent.parent
CAMPAIGNS = sorted((ROOT / "configs/campaigns").glob("*.yaml"))


def load(**sections):
    return CampaignConfig.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_every_shipped_campaign_is_valid_and_named_after_its_file(path):
    config = load(**yaml.safe_load(path.read_text()))
    assert config.name == path.stem.replace("_", "-")


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_campaign_that_trains_on_gpus_samples_on_them(path):
    """One sampled a model of 30 billion parameters with the engine for machines without a GPU."""
    config = load(**yaml.safe_load(path.read_text()))
    assert (config.train.backend == "nccl") == (config.rollout.engine == "sglang")
    if config.rollout.sglang.device == "cuda" and config.rollout.engine == "sglang":
        assert config.rollout.sglang.cuda_graphs, "worth 7x in decoding"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trian": {}}, ["unknown key 'trian'", "Did you mean train?"]),
        (
            {"environment": {"name": "calculator"}, "rollout": {"record_routing": "experts"}},
            ["turns, as calculator does", "got partial='drop', record_routing='experts'", "replay_routing"],
        ),
        ({"iterations": 5}, ["unknown key 'iterations' here. Put it under schedule."]),
        ({"batch_size": 5}, ["unknown key 'batch_size' here. Put it under warm_start or rollout."]),
        ({"train": {"learning_rat": 1}}, ["train: ", "'learning_rat'", "Did you mean learning_rate?"]),
        ({"rollout": {"zzz": 1}}, ["rollout: ", "Known keys: engine, sglang, workers"]),
        ({"train": {"learning_rate": "fast"}}, ["train.learning_rate: ", "valid number", "'fast'"]),
        ({"rollout": {"workers": 0}}, ["rollout.workers: ", "greater than or equal to 1", "got 0"]),
        ({"rollout": {"group_size": 1}}, ["rollout.group_size: ", "greater than or equal to 2", "got 1"]),
        ({"rollout": {"engine": "vllm"}}, ["rollout.engine: ", "'embedded' or 'sglang'", "got 'vllm'"]),
        ({"train": {"ep": 3}}, ["train: ep must divide the 2 ranks", "ep=3", "[1, 2]"]),
        ({"train": {"ep": 1}}, ["dispatcher 'local' goes with ep=1", "Set dispatcher to local"]),
        (
            {"train": {"stuck_after_seconds": 120}},
            ["must be below collective_timeout_seconds", "120.0 >= 120", "Lower it to 60"],
        ),
        (
            {"train": {"freeze_router": True, "router_aux_loss_coefficient": 0.1}},
            ["router_aux_loss_coefficient must be 0 with freeze_router", "got 0.1"],
        ),
        (
            {"model": {"folder": "/m"}},
            ["model: num_experts must be given with model.folder", "folder='/m'", "num_experts=0"],
        ),
        (
            {"model": {"num_experts": 8}},
            ["model: num_experts must be given with model.folder and only with it"],
        ),
        (
            {
                "model": {"folder": "/m", "num_experts": 96},
                "train": {"topology": "cluster_16x8", "ep": 8, "fsdp": 64},
            },
            ["train.fsdp must divide model.num_experts, got fsdp=64, num_experts=96", "[1, 8, 16, 32]"],
        ),
        (
            {
                "rollout": {"max_new_tokens": 16384},
                "train": {"dispatcher": "deepep", "backend": "nccl", "compute_dtype": "bfloat16"},
            },
            ["train.deepep.max_tokens * cp * tp must exceed rollout.max_new_tokens", "16384 <= 16384"],
        ),
        (
            {
                "environment": {"name": "calculator", "calculator": {"max_turns": 8}},
                "rollout": {"max_new_tokens": 4096},
                "train": {"dispatcher": "deepep", "backend": "nccl", "compute_dtype": "bfloat16"},
            },
            ["must exceed rollout.max_new_tokens * 8 turns", "16384 <= 32768"],
        ),
        ({"train": {"fsdp": 3}}, ["train: fsdp must divide the 2 ranks", "fsdp=3", "[1, 2]"]),
        (
            {"train": {"topology": "node_1x8", "ep": 4, "fsdp": 2}},
            ["be 1 or a multiple of ep, got fsdp=2, ep=4", "[1, 4, 8]"],
        ),
        (
            {"train": {"topology": "node_1x8", "fsdp": 8}, "model": {"random": {"num_experts": 4}}},
            ["train.fsdp must divide model.random.num_experts", "[1, 2, 4]"],
        ),
        (
            {"train": {"topology": "node_1x8", "tp": 4, "cp": 4}},
            ["train: cp must divide the 2 ranks that the other axes leave of 8, got cp=4", "[1, 2]"],
        ),
        ({"train": {"pp": 3}}, ["train: pp must divide the 2 ranks", "got pp=3", "[1, 2]"]),
        (
            {"train": {"topology": "node_1x8", "pp": 4, "ep": 4}},
            ["train: ep must divide the 2 ranks of a pipeline stage, got ep=4", "[1, 2]"],
        ),
        (
            {"train": {"topology": "node_1x8", "tp": 2, "ep": 8, "fsdp": 2}},
            ["make fsdp * cp * tp (cp * tp is 2) a multiple of ep, got fsdp=2, ep=8", "[1, 4]"],
        ),
        (
            {"train": {"topology": "node_1x8", "tp": 4}},
            ["train.tp must divide num_kv_heads of model.random, got tp=4, num_kv_heads=2", "[1, 2]"],
        ),
        (
            {"train": {"topology": "node_1x8", "pp": 8, "ep": 1, "dispatcher": "local"}},
            ["train.pp must be at most num_layers of model.random, got pp=8, num_layers=2", "[1, 2]"],
        ),
        (
            {"train": {"topology": "node_1x8", "cp": 2, "router_aux_loss_coefficient": 0.1}},
            ["router_aux_loss_coefficient must be 0 with cp or pp above 1", "cp=2, pp=1"],
        ),
        (
            {"model": {"random": {"num_experts": 7}}},
            ["train.ep must divide model.random.num_experts", "[1]"],
        ),
        (
            {"train": {"dispatcher": "deepep"}},
            ["'deepep' sends bfloat16 rows between GPUs", "backend='gloo'", "'all_to_all'"],
        ),
        (
            {"train": {"dispatcher": "deepep", "backend": "nccl"}},
            ["'deepep' sends bfloat16 rows between GPUs", "compute_dtype='float32'", "'bfloat16'"],
        ),
        (
            {
                "train": {
                    "dispatcher": "deepep",
                    "backend": "nccl",
                    "compute_dtype": "bfloat16",
                    "deepep": {"max_tokens": 8192},
                }
            },
            ["max_tokens must be at least micro_batch_tokens, got 8192 < 16384", "Set it to 16384"],
        ),
        (
            {
                "train": {
                    "dispatcher": "deepep",
                    "backend": "nccl",
                    "compute_dtype": "bfloat16",
                    "deepep": {"api": "legacy", "layout": "expanded"},
                }
            },
            ["'legacy' knows the compact layout only", "layout='expanded'"],
        ),
        (
            {"train": {"deepep": {"fp8": True}}},
            ["deepep speaks to dispatcher 'deepep' only, got dispatcher='all_to_all'", "fp8=True"],
        ),
        (
            {"train": {"dispatcher": "nvlink"}},
            ["'nvlink' joins GPUs of one node, got backend='gloo'", "one of [2], or"],
        ),
        (
            {"train": {"topology": "cluster_16x8", "ep": 16, "dispatcher": "nvlink", "backend": "nccl"}},
            ["ep=16 with 8 ranks a node", "one of [2, 4, 8], or dispatcher to 'deepep'"],
        ),
        (
            {"train": {"dispatcher": "nvlink", "backend": "nccl", "nvlink": {"max_tokens": 8192}}},
            ["nvlink.max_tokens must be at least micro_batch_tokens, got 8192 < 16384"],
        ),
        (
            {"train": {"nvlink": {"capacity": 1.5}}},
            ["nvlink speaks to dispatcher 'nvlink' only, got dispatcher='all_to_all'", "capacity=1.5"],
        ),
        ({"train": {"network": "efa"}}, ["network 'efa' is for backend 'nccl', got backend='gloo'"]),
        ({"model": {"random": {"num_kv_heads": 3}}}, ["num_kv_heads must divide num_heads", "[1, 2, 4]"]),
        ({"model": {"random": {"experts_per_token": 9}}}, ["at most num_experts", "9 > 8"]),
        ({"environment": {"num_digits": 2}}, ["held_out must be at most half of the 100 prompts", "got 256"]),
        ({"rollout": {"max_portions_per_worker": 1}}, ["must reach the 8 portions", "2 * 1 = 2", "to 4"]),
        ({"rollout": {"max_new_tokens": 4}}, ["must exceed environment.num_digits", "4 <= 4", "Set it to 8"]),
        (
            {"algorithm": {"num_minibatches": 9999}},
            ["algorithm.num_minibatches must be at most the 4096 samples"],
        ),
        ({"name": "Bad Name"}, ["name: ", "'Bad Name'"]),
        ({"train": {"max_grad_norm": math.inf}}, ["train.max_grad_norm: ", "finite number", "got inf"]),
        ({"rollout": {"temperature": math.nan}}, ["rollout.temperature: ", "finite number", "got nan"]),
        ({"checkpoint": {"store": ""}}, ["store must be s3://bucket/prefix or a folder, got ''"]),
        ({"checkpoint": {"store": "s3:/bucket/x"}}, ["store must be s3://bucket/prefix", "'s3:/bucket/x'"]),
        ({"name": "ep"}, ["name: must be 3 to 63 lower-case letters", "got 'ep'"]),
        ({"name": "over-"}, ["name: must be 3 to 63 lower-case letters", "end with a letter or digit"]),
        (
            {
                "rollout": {"engine": "sglang", "sglang": {"context_length": 10}},
                "model": {"dtype": "bfloat16"},
            },
            ["sglang.context_length must exceed max_new_tokens by more than 2", "got 10 and 8"],
        ),
        ({"rollout": {"lease_seconds": 1e-6}}, ["rollout.lease_seconds: ", "0.001", "got 1e-06"]),
        (
            {
                "train": {"topology": "node_1x8", "ep": 4, "fsdp": 8},
                "model": {"random": {"num_experts": 4}},
            },
            ["train.fsdp must divide model.random.num_experts", "Set train.fsdp to one of [1, 4]"],
        ),
        ({"checkpoint": {"store": "s3:///x"}}, ["store must be s3://bucket/prefix", "'s3:///x'"]),
        ({"checkpoint": {"store": "gs://b/x"}}, ["store must be s3://bucket/prefix", "'gs://b/x'"]),
        ({"rollout": {"workers": 0}, "train": {"ep": 3}}, ["rollout.workers", "train: ep must divide"]),
    ],
)
def test_a_bad_value_is_refused_with_field_relation_values_and_remedy(sections, words):
    with pytest.raises(ConfigError) as refusal:
        load(**sections)
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


def test_overrides_replace_the_files_values_and_none_keeps_them():
    config = load(schedule={"iterations": 7})
    changed = with_overrides(config, name="other", schedule__iterations=None, train__learning_rate=0.5)
    assert (changed.name, changed.schedule.iterations, changed.train.learning_rate) == ("other", 7, 0.5)
    assert with_overrides(config) == config


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_what_a_launch_prints_is_what_differs_and_means_the_same_campaign(path, tmp_path):
    config = read_config(path)
    printed = config.departures()
    (tmp_path / "again.yaml").write_text(printed)
    assert read_config(tmp_path / "again.yaml") == config
    assert len(printed.splitlines()) < 60  # the whole has about 180


def test_a_launch_of_the_defaults_prints_nothing_but_the_override():
    effective = with_overrides(load(train={"eps": 0.5}), name="other")
    assert yaml.safe_load(effective.departures()) == {"name": "other", "train": {"eps": 0.5}}


def test_overrides_pass_the_same_checks():
    with pytest.raises(ConfigError, match=r"schedule\.iterations"):
        with_overrides(load(), schedule__iterations=0)


def test_digest_names_the_values_not_how_they_were_written():
    assert load().digest() == load(seed=0, train={"ep": 2}).digest()
    assert load().digest() != load(seed=1).digest()


def test_changes_lists_dotted_fields_with_both_values():
    assert changes(load(), load(seed=3, train={"eps": 0.5})) == {"seed": (0, 3), "train.eps": (1e-5, 0.5)}


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 2


def test_every_topology_has_a_name_in_the_configuration():
    for name, (nodes, ranks) in TOPOLOGIES.items():
        alone = {"ep": 1, "dispatcher": "local"} if nodes * ranks == 1 else {}
        assert load(train={"topology": name, **alone}).train.world_size == nodes * ranks


def test_a_password_comes_from_a_file_and_never_stands_in_the_url(tmp_path):
    from tasks.rollout_config import BufferConfig
    from tasks.session import _with_password

    (tmp_path / "password").write_text("a/b@c\n")
    url = "valkeys://moe-rl@valkey-0:6379/0?ssl_ca_certs=/ca.crt"
    assert _with_password(url, str(tmp_path / "password")) == url.replace("moe-rl@", "moe-rl:a%2Fb%40c@")
    assert _with_password(url, "") == url
    for wrong in ("valkeys://moe-rl:secret@valkey-0:6379", "valkeys://valkey-0:6379", "embedded"):
        with pytest.raises(ValueError, match="password_file goes with") as error:
            BufferConfig(url=wrong, password_file="x")
        assert "secret" not in str(error.value).split("input_value")[0]


def test_a_conversation_is_no_longer_than_the_context_that_is_served():
    sections = {
        "model": {"dtype": "bfloat16"},
        "environment": {"name": "calculator", "calculator": {"max_turns": 8}},
        "train": {
            "dispatcher": "deepep", "backend": "nccl", "compute_dtype": "bfloat16", "deterministic": False,
        },
    }  # fmt: skip
    rollout = {"engine": "sglang", "max_new_tokens": 4096}
    fits = rollout | {"sglang": {"context_length": 16384}}
    CampaignConfig.model_validate(sections | {"rollout": fits})
    longer = rollout | {"sglang": {"context_length": 16385}}
    with pytest.raises(ValueError, match=r"8 turns, .* got 16384 <= 16384"):
        CampaignConfig.model_validate(sections | {"rollout": longer})


def test_sglang_on_cuda_is_refused_in_float32():
    with pytest.raises(ConfigError, match=r"model.dtype must be 'bfloat16' for sglang"):
        CampaignConfig.model_validate_json('{"rollout": {"engine": "sglang"}}')
    CampaignConfig.model_validate_json('{"rollout": {"engine": "sglang"}, "model": {"dtype": "bfloat16"}}')
    CampaignConfig.model_validate_json('{"rollout": {"engine": "sglang", "sglang": {"deterministic": true}}}')


def test_flyte_knows_the_type_of_every_field(monkeypatch):
    """It warns of others each time it looks, at every task of a graph: ten times in a small run."""
    from flytekit.extras.pydantic_transformer import transformer

    import tasks.records

    said: list[str] = []
    monkeypatch.setattr(transformer.logger, "warning", said.append)
    records = [value for value in vars(tasks.records).values() if isinstance(value, type)]
    sections = [record for record in records if issubclass(record, Section) and record is not Section]
    assert CampaignConfig in sections and tasks.records.CampaignRun in sections
    for section in sections:
        transformer.PydanticTransformer().get_literal_type(section)
    assert not said


def raised_texts() -> list[str]:
    """What the project's errors say, without the values in them."""
    trees = (ast.parse(path.read_text()) for path in sorted((ROOT / "tasks").rglob("*.py")))
    raised = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Raise))
    constants = ((part.value for part in ast.walk(node) if isinstance(part, ast.Constant)) for node in raised)
    return [" ".join(text for text in parts if isinstance(text, str)) for parts in constants]


def test_what_errors_tell_people_to_set_is_in_the_configuration() -> None:
    """Not seen: keys that are put together, and texts that are made before they are raised."""
    fields = CampaignConfig.model_fields
    sections = [name for name, field in fields.items() if hasattr(field.annotation, "model_fields")]
    named = re.compile(rf"(?<![\w./])(?:{'|'.join(sections)})(?:\.[a-z_]+)+")
    found = {key for text in raised_texts() for key in named.findall(text)}
    assert len(found) > 30 and any(key.count(".") > 1 for key in found)
    assert not [key for key in found if not is_key(CampaignConfig, *key.split("."))]


def is_key(section: Any, name: str, *rest: str) -> bool:
    field = section.model_fields.get(name)
    if field is None:
        return not rest and hasattr(section, name)  # what is made of several
    kinds = get_args(field.annotation) or (field.annotation,)  # one of a union, as a section that may lack
    return not rest or any(is_key(kind, *rest) for kind in kinds if hasattr(kind, "model_fields"))


def test_a_mesh_is_told_by_its_topology_and_the_axes_that_share():
    assert CampaignConfig().train.mesh == "laptop_1x2, ep 2"
    two = CampaignConfig.model_validate({"train": {"tp": 2, "ep": 1, "dispatcher": "local"}})
    assert two.train.mesh == "laptop_1x2, ep 1, tp 2"
