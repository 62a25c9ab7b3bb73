"""What a campaign takes: sizes against published ones, and every sum by hand."""

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from publishing import manifest
from transformers import AutoConfig

from tasks import placement, plan
from tasks.artifacts.store import open_store
from tasks.config import CampaignConfig
from tasks.planning.budget import Nodes, bytes_moved, memory_of_a_rank, price
from tasks.planning.instances import INSTANCES, PRICED
from tasks.planning.shape import PUBLISHED, Shape, counted, described
from tasks.records import CampaignRun
from tasks.session import CURRENT_RUN, run_store

ROOT = Path(__file__).resolve().parent.parent


def shipped(name: str, **changes: Any) -> CampaignConfig:
    values = yaml.safe_load((ROOT / f"configs/campaigns/{name}.yaml").read_text())
    return CampaignConfig.model_validate({**values, **changes})


def shape_of(name: str) -> Shape:
    return counted(described(shipped(name), None))


def test_the_shipped_campaigns_policies_have_their_published_sizes() -> None:
    """Qwen3-30B-A3B: 30.5 billion, 3.3 active; DeepSeek-V3: 671 billion, 37 active (their model cards)."""
    qwen, deepseek = shape_of("qwen3_30b_a3b"), shape_of("deepseek_v3_moe")
    assert round(qwen.parameters / 1e9, 1) == 30.5 and 3.2e9 < qwen.active < 3.4e9
    assert round(deepseek.parameters / 1e9) == 671 and 37e9 < deepseek.active < 38e9
    assert (qwen.layers, qwen.experts_per_token, qwen.hidden) == (48, 8, 2048)
    assert (deepseek.layers, deepseek.experts_per_token, deepseek.hidden) == (58, 8, 7168)
    # a layer's experts: 3 matrices of hidden x width each
    assert qwen.experts == 48 * 128 * 3 * 2048 * 768 and deepseek.experts == 58 * 256 * 3 * 7168 * 2048


@pytest.mark.parametrize(("name", "gb"), [("one_node", 61), ("qwen3_30b_a3b", 15), ("deepseek_v3_moe", 84)])
def test_a_rank_keeps_what_the_campaigns_file_says(name: str, gb: int) -> None:
    memory = memory_of_a_rank(shape_of(name), shipped(name).train)
    assert round(sum(memory.values())) == gb and list(memory) == ["masters", "gradients", "moments"]
    text = (ROOT / f"configs/campaigns/{name}.yaml").read_text()
    assert f"{gb} GB" in text.partition("\nname:")[0]


SMALL = Shape(dense=1_000_000_000, experts=8_000_000_000, are_experts_apart=True, active_share=0.25,
              layers=10, experts_per_token=2, hidden=1000)  # fmt: skip


def test_memory_is_divided_as_the_grid_divides_it() -> None:
    """Dense parts over fsdp x cp and tp, experts over ep and the rest of them, both over pp."""
    train = shipped("one_node").train

    def gb(**axes: int) -> float:
        return sum(memory_of_a_rank(SMALL, train.model_copy(update=axes)).values())

    assert gb(ep=1, fsdp=1) == 16 * 9
    assert gb(ep=8, fsdp=1) == 16 * (1 + 1)
    assert gb(ep=8, fsdp=8) == 16 * 9 / 8
    assert gb(ep=4, fsdp=8) == 16 * 9 / 8
    assert gb(ep=4, fsdp=4, pp=2) == 16 * 9 / 8
    assert gb(ep=2, fsdp=1, tp=2) == 16 * (1 / 2 + 8 / 2)
    off = train.model_copy(update={"offload_optimizer": True})
    assert memory_of_a_rank(SMALL, off).keys() == {"masters", "gradients"}


def test_bytes_of_an_iteration_by_hand() -> None:
    config = shipped("one_node")  # 256 x 8 samples of 32 tokens, 2 workers, 1 training node, ep 8, bf16
    moved = list(bytes_moved(SMALL, config).items())
    assert moved[0] == ("trainer -> S3: optimizer state", 9 * 12)
    assert moved[1] == ("trainer -> S3: weights (a patch; whole, 18.0, each 10th time)", 18 * 0.015)
    assert moved[2] == ("S3 -> 1 training nodes: what their ranks own", pytest.approx(18 + 108))
    assert moved[3] == ("S3 -> 2 rollout nodes: the patch", 2 * 18 * 0.015)
    assert moved[4][1] == pytest.approx(2 * 65_536 * 11 / 1e9)
    # 10 layers x 2 experts x 1000 values of 2 bytes, out and back, forward and backward, 7 of 8 elsewhere
    assert moved[5] == ("experts' rows, inside nodes", 65_536 * 10 * 2 * 1000 * 2 * 4 * 7 / 8 / 1e9)
    whole = shipped("one_node", checkpoint={"full_every": 1})
    assert bytes_moved(SMALL, whole)["S3 -> 2 rollout nodes: weights"] == 36
    resident = config.model_copy(update={"train": config.train.model_copy(update={"pool": "standing"})})
    assert bytes_moved(SMALL, resident)["S3 -> 1 training nodes: what their ranks own"] == 18 * 0.015
    whole = whole.model_copy(update={"train": resident.train})  # nothing to compare with
    assert bytes_moved(SMALL, whole)["S3 -> 1 training nodes: what their ranks own"] == 0
    records = config.rollout.model_copy(update={"record_routing": "experts"})
    recorded = bytes_moved(SMALL, config.model_copy(update={"rollout": records}))
    assert recorded["rollouts -> buffer -> scorers: samples"] == pytest.approx(2 * 65_536 * 31 / 1e9)


def test_what_training_nodes_fetch_by_hand() -> None:
    """Of 14 bytes a parameter: what is dense of the node's stage, and the experts of its eight ranks."""

    def fetched(name: str, shape: Shape = SMALL, **changes: Any) -> float:
        return bytes_moved(shape, shipped(name, **changes))["S3 -> 16 training nodes: what their ranks own"]

    assert fetched("qwen3_30b_a3b") == pytest.approx(16 * 14 * (1 + 8 / 4))  # a copy on 4 nodes
    assert fetched("deepseek_v3_moe") == pytest.approx(16 * 14 * (1 / 4 + 8 / 16))  # on 16, in 4 stages
    stacked = dataclasses.replace(SMALL, are_experts_apart=False)
    assert fetched("qwen3_30b_a3b", stacked) == pytest.approx(16 * 14 * 9)
    train = shipped("qwen3_30b_a3b").train.model_dump()
    assert fetched(
        "qwen3_30b_a3b", train=train | {"ep": 1, "fsdp": 1, "dispatcher": "local"}
    ) == pytest.approx(16 * 14 * 9)


def test_a_stack_of_all_experts_is_told_from_tensors_of_one() -> None:
    values = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    for family, is_apart in (("mixtral", True), ("gpt_oss", False)):
        assert counted(AutoConfig.for_model(family, **values)).are_experts_apart == is_apart


def test_the_price_is_spots_where_it_was_stated_and_the_pool_is_on_spot() -> None:
    p5en, r7i = INSTANCES["p5en.48xlarge"], INSTANCES["r7i.24xlarge"]
    nodes = [
        Nodes(what="a", instance=p5en, number=16),
        Nodes(what="b", instance=p5en, number=32, is_spot=True),
        Nodes(what="c", instance=r7i, number=2, is_spot=True),  # nobody stated a Spot price
    ]
    placed, on_demand = price(nodes)
    assert placed == pytest.approx(16 * 63.296 + 32 * 26.57 + 2 * 6.35)
    assert on_demand == pytest.approx(48 * 63.296 + 2 * 6.35)


def test_a_plan_names_the_nodes_of_the_topologys_pool() -> None:
    kept = {group.what: group for group in plan.nodes(shipped("qwen3_30b_a3b"))}
    assert {name: group.number for name, group in kept.items()} == {
        "trainer": 16, "rollout-spot": 32, "reward": 1, "memory": 2, "cpu": 1,
    }  # fmt: skip
    assert kept["rollout-spot"].is_spot and not kept["trainer"].is_spot
    train = {"topology": "single_1x1", "ep": 1, "dispatcher": "local"}
    single = plan.nodes(shipped("one_node", train=train))[0]
    assert (single.what, single.on_demand) == (placement.SINGLE.name, 6.88)


def test_the_command_says_what_the_large_plan_costs_an_iteration() -> None:
    command = [sys.executable, "-m", "tasks.plan", "--config", "configs/campaigns/qwen3_30b_a3b.yaml"]
    result = subprocess.run(
        [*command, "--seconds", "900"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    lines = {line[:45].strip(): line[45:].split() for line in result.stdout.splitlines()}
    # 16 x 63.296 + 32 x 26.57 + 30.13 + 2 x 6.35 + 8.57, and with 32 x 63.296
    assert lines["an hour"] == ["1,914.38", "3,089.61"]
    assert lines["an iteration of 900 s"] == ["478.59", "772.40"]
    assert lines["200 iterations"] == ["95,718.80", "154,480.40"]
    assert "keeps 15.3 GB of 151" in result.stdout and f"prices: {PRICED}" in result.stdout
    assert "FIT" not in result.stdout and PRICED.startswith("2026-07-20 on demand")


def test_what_does_not_fit_is_said() -> None:
    train = {**shipped("one_node").train.model_dump(), "fsdp": 1, "ep": 1, "dispatcher": "local"}
    page = plan.text(shipped("one_node", train=train), model=None, seconds=None)
    assert "keeps 488.5 GB of 151" in page and "DOES NOT FIT" in page and "give --seconds" in page


def test_a_checkpoint_that_is_not_here_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shipped("smollm2_moe")
    with pytest.raises(
        SystemExit, match=r"config.json must be readable here, got none in /mnt/models/smollm2-moe"
    ):
        described(config, None)
    with pytest.raises(SystemExit, match=r"got model\.random, which is built for one machine"):
        described(shipped("laptop"), None)  # it said "got none in .."
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=rf"must be readable here, got none in {tmp_path}\."):
        described(shipped("laptop"), Path("."))  # it said "got model.random"
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_hidden_layers": 1}')
    assert counted(described(config, tmp_path)).layers == 1
    assert all(Path(shipped(n).model.folder).name in PUBLISHED for n in ("one_node", "deepseek_v3_moe"))


def test_the_time_of_an_iteration_is_read_off_its_versions(store_folder: Path, campaign: str) -> None:
    config = CampaignConfig.model_validate({"name": campaign, "checkpoint": {"store": str(store_folder)}})
    with pytest.raises(SystemExit, match=r"must hold iterations of .*, got none. Give --seconds"):
        plan.iteration_seconds(config)
    run, start = CampaignRun(config=config, lineage=1, code_revision="r"), datetime(2026, 11, 30, tzinfo=UTC)
    open_store(str(store_folder), campaign).replace_object(CURRENT_RUN, run.model_dump_json().encode())
    store = run_store(run)
    for version, seconds in enumerate(
        (0, 5000, 5100, 5220, 5340)
    ):  # the first starts nodes; the median does not
        store.commit(manifest(store, version, {}, created=start + timedelta(seconds=seconds)))
    assert plan.iteration_seconds(config) == 120
