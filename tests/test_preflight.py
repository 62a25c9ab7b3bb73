"""The preflight: every check passes on facts of a right node and names its problem on those of a wrong one.

What these tests cannot see: a GPU node. The texts of nvidia-smi, fi_info, NCCL and kubectl are in the form
that those tools document; on this machine the laptop's checks run for real.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from flyte_admin import admin_on_loopback

from tasks import placement, preflight
from tasks.config import CampaignConfig
from tasks.planning import facts as reading
from tasks.planning import two_ranks
from tasks.planning.check import CHECKS, NODE
from tasks.planning.preflight import PreflightFailed, in_use, judge, require, table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = CampaignConfig.model_validate(yaml.safe_load((ROOT / "configs/campaigns/one_node.yaml").read_text()))
SMI = "\n".join(
    f"{i}, NVIDIA H200, 143771, 4, Enabled, 0, 1980, Not Active, 580.95.05, Completed" for i in range(8)
)
NVLINK = "\n".join(
    f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\n" + "\n".join(f"\t Link {k}: 26.562 GB/s" for k in range(18))
    for i in range(8)
)
FI_INFO = "provider: efa\n    fabric: efa-direct\n    domain: rdmap79s0-rdm\nprovider: efa\n    fabric: efa\n"
NCCL = "node:1:2 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)\n"
MAPS = "7f0 r-xp 0 08:01 1 /usr/lib/python3/site-packages/nvidia/nccl/lib/libnccl.so.2\n" * 2
NODES = json.dumps(
    {
        "items": [
            {
                "metadata": {
                    "name": f"node-{i}",
                    "labels": {
                        "node.kubernetes.io/instance-type": "p5en.48xlarge",
                        "topology.kubernetes.io/zone": "us-east-2a",
                    },
                },
                "status": {"allocatable": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16"}},
            }
            for i in range(2)
        ]
    }
)


def good(role: str) -> dict[str, Any]:
    """What a right node of the role would have recorded."""
    want = preflight.wanted(CONFIG, role)
    found = {
        "environment": ["PATH", *placement.TRAINER.variables],
        "maps": MAPS,
        "versions": {**want.versions, "torch": f"{want.versions.get('torch', '2.13.0')}+cu130"},
        "deep_ep": {"path": "/usr/lib/python3/site-packages/deep_ep/__init__.py", "version": "2.0.0+874779c"},
        "two_ranks": {"sum": 3.0, "nccl_log": NCCL, "efa_bytes": 50331648, "log": ""},
        "shared_memory_gib": want.shared_memory_gib or 0.06,
        "machine": {"memory_gib": want.memory_gib, "cpus": want.cpus},
        "scratch": {"free_gib": 27000.0, "device": "/dev/md127"},
        "store": {"versioning": "Enabled", "conditional": [200, 412], "skew_seconds": 0.2},
        "buffer": [
            {"where": f"valkey-{n}:6379", "tls": True, "version": "9.1.2", "policy": "noeviction"}
            for n in range(2)
        ],
        "model_folder": True,
        "gpus": reading.parse_gpus(SMI),
        "nvlinks": reading.parse_nvlinks(NVLINK),
        "efa_devices": [f"rdmap{n}s0" for n in range(16)],
        "fi_info": FI_INFO,
        "has_gdrdrv": True,
        "memlock_bytes": -1,
        "hugepages_total": 5128,
        "metadata": {"zone": "us-east-2a"},
        "nodes": reading.parse_nodes(NODES),
        "queues": ["localqueue.kueue.x-k8s.io/trainer"],
        "flyte_version": "v1.16.8",
        "images": dict.fromkeys(want.images, 200),
    }
    return found


def refused(role: str, facts: dict[str, Any], **changes: Any) -> dict[str, str]:
    from dataclasses import replace

    outcomes = judge(facts, replace(preflight.wanted(CONFIG, role), **changes))
    return {outcome.name: outcome.problem for outcome in outcomes if not outcome.is_passed}


@pytest.mark.parametrize("role", preflight.ROLES)
def test_a_right_node_passes(role: str) -> None:
    assert refused(role, good(role)) == {}


def test_a_preflight_says_what_a_node_has_loaded_and_sends_through() -> None:
    """Sockets, or a foreign package of DeepEP's name, must show also where nothing refuses them."""
    text = in_use(good("trainer"))
    for part in (
        "network OFI efa (efa-direct), 16 devices", "8 GPUs, 16 EFA devices", "torch 2.12.1+cu130",
        "deep_ep 2.0.0+874779c at /usr/lib/python3/site-packages/deep_ep/__init__.py",
        "loaded: nccl /usr/lib/python3/site-packages/nvidia/nccl/lib/libnccl.so.2",
    ):  # fmt: skip
        assert part in text, text
    unread = in_use({name: {"error": "none"} for name in good("trainer")})
    assert unread == "network unknown; 0 GPUs, 0 EFA devices; ; loaded: none"


def test_there_are_at_least_twenty_checks_and_each_has_a_name() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names)) >= 20
    covered = {name for row in WRONG for name in [row[3]]}
    assert set(names) == covered  # each is shown refusing something below


DISAGREE = "import sys; print('SUM', sys.argv[1])"
T, R, C, K, L = "trainer", "rollout", "cpu", "cluster", "laptop"
WRONG = [
    (T, "gpus", reading.parse_gpus(SMI)[:7], "gpu-count", "got 7"),
    (T, "gpus", reading.parse_gpus(SMI.replace("H200", "H100 80GB HBM3")), "gpu-model", "must be H200"),
    (T, "gpus.3.memory_mib", 18000, "gpu-memory", "[3]"),
    (T, "gpus.2.used_mib", 60000, "gpu-is-idle", "[2]"),
    (T, "gpus", reading.parse_gpus(SMI.replace("5, NVIDIA H200, 143771, 4, Enabled, 0",
                                               "5, NVIDIA H200, 143771, 4, Enabled, 2")), "gpu-ecc", "[5]"),
    (R, "gpus.0.ecc", "Disabled", "gpu-ecc", "[0]"),
    (T, "gpus", reading.parse_gpus(SMI.replace("1980, Not Active", "1980, Active", 1)), "gpu-clocks", "[0]"),
    (T, "gpus.1.max_sm_mhz", 1200, "gpu-clocks", "[1]"),
    (R, "gpus.0.driver", "570.133.20", "gpu-driver", "580"),
    (T, "nvlinks", reading.parse_nvlinks(NVLINK.replace("Link 17: 26.562 GB/s", "Link 17: <inactive>", 1)),
     "nvlink", "{'0': 17}"),
    (T, "gpus.4.fabric", "In Progress", "nvswitch-fabric", "In Progress"),
    (T, "efa_devices", ["rdmap0s0"] * 15, "efa-devices", "got 15"),
    (R, "efa_devices", [], "efa-devices", "TCP without a word"),
    (T, "fi_info", "provider: efa\n    fabric: efa\nprovider: tcp\n", "efa-provider", "tcp"),
    (T, "fi_info", {"error": "RuntimeError: fi_getinfo: -61"}, "efa-provider", "-61"),
    (T, "two_ranks.nccl_log", "NCCL INFO Using network Socket", "efa-is-what-nccl-uses", "got Socket"),
    (R, "two_ranks.nccl_log", NCCL + "NCCL INFO Using network Socket", "efa-is-what-nccl-uses", "got Socket"),
    (T, "two_ranks.nccl_log", NCCL.replace("is efa,", "is tcp,"), "efa-is-what-nccl-uses", "got OFI tcp"),
    (T, "two_ranks.efa_bytes", 0, "efa-counters-move", "another way"),
    (T, "has_gdrdrv", False, "gdrcopy", "gdrdrv"),
    (T, "memlock_bytes", 65536, "locked-memory", "65536"),
    (T, "hugepages_total", 0, "hugepages", "2560 hugepages"),
    (T, "environment", ["NCCL_PROTO"], "obsolete-variables", "NCCL_PROTO"),
    (T, "maps", MAPS + MAPS.replace("/usr/lib", "/opt"), "one-libnccl", "/opt"),
    (T, "versions.nccl", "2.30.4", "versions", "nccl 2.31.2 (got 2.30.4)"),
    (R, "versions.sglang", "0.5.9", "versions", "sglang 0.5.17"),
    (T, "two_ranks.sum", None, "two-ranks-exchange", "got None"),
    (T, "shared_memory_gib", 0.06, "shared-memory", "512 GiB"),
    (L, "shared_memory_gib", 2e-5, "shared-memory", "got 0.0000"),
    (C, "machine.memory_gib", 4.0, "memory-and-cores", "16 GiB"),
    (T, "scratch.free_gib", 20.0, "scratch-space", "20.0"),
    (R, "scratch.device", "overlay", "nvme-mounted", "overlay"),
    (C, "store", {"error": "ValueError: bucket b must have versioning"}, "bucket-versioned", "bucket b"),
    (C, "store.versioning", "Suspended", "bucket-versioned", "Suspended"),
    (C, "store.conditional", [200, 200], "bucket-takes-conditional-writes", "200 and 200"),
    (L, "store.conditional", [412, 412], "bucket-takes-conditional-writes", "412"),
    (R, "store.skew_seconds", -40.0, "clock", "-40.0"),
    (R, "buffer.1", {"where": "valkey-1", "tls": True, "error": "timed out"}, "valkey-reachable", "valkey-1"),
    (C, "buffer.0.policy", "allkeys-lru", "valkey-never-evicts", "allkeys-lru"),
    (C, "buffer.0.tls", False, "valkey-tls", "valkey-0"),
    (C, "model_folder", False, "model-folder", "config.json"),
    (R, "metadata", {"error": "URLError: timed out"}, "metadata-service", "timed out"),
    (R, "metadata.zone", "", "metadata-service", "hop limit"),
    (K, "nodes.0.zone", "us-east-2b", "one-zone", "us-east-2b"),
    (K, "nodes.1.efa", 15, "efa-allocatable", "node-1"),
    (K, "queues", ["localqueue.kueue.x-k8s.io/train"], "kueue-queue", "queue trainer"),
    (K, "flyte_version", "v1.16.3", "flyte-version", "1.16.4"),
    (K, "images", {"registry.example.com/moe-rl/cpu:0.1.0": 404}, "images-resolve", "404"),
    (T, "deep_ep.path", "/root/deep_ep.py", "deep-ep", "/root/deep_ep.py"),
    (T, "deep_ep.version", "1.2.1", "deep-ep", "must be 2.0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "path", "value", "name", "says"), WRONG, ids=lambda v: str(v)[:30])
def test_a_wrong_node_is_refused_by_name(role: str, path: str, value: Any, name: str, says: str) -> None:
    facts = copy.deepcopy(good(role))
    target: Any = facts
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        target = target[part]
    target[last] = value
    problems = refused(role, facts, dispatcher="deepep")
    assert says in problems[name]
    assert "must" in problems[name]
    if "error" not in str(value):
        assert "got" in problems[name] or name in ("efa-counters-move", "metadata-service")


@pytest.mark.parametrize("role", preflight.ROLES)
def test_what_cannot_be_read_is_refused_and_never_taken_for_right(role: str) -> None:
    broken = {name: {"error": "OSError: gone"} for name in good(role)}
    every = {check.name for check in CHECKS if role in check.roles}
    names = refused(role, broken, dispatcher="deepep").keys()
    assert every - names == set()
    assert every - refused(role, {}, dispatcher="deepep").keys() == set()


def test_readers_exist_for_every_fact_that_a_role_needs() -> None:
    for role in preflight.ROLES:
        want = preflight.wanted(CONFIG, role)
        names = reading.readers(CONFIG, want, Path("/tmp")).keys()
        assert refused(role, {name: good(role)[name] for name in names}) == {}


def test_this_machine_passes_the_laptops_checks_for_real(tmp_path: Path, leave_servers: None) -> None:
    command = [sys.executable, "-m", "tasks.preflight", "--config", "configs/campaigns/laptop.yaml"]
    command += ["--store", str(tmp_path / "store")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    count = sum("laptop" in check.roles for check in CHECKS)
    assert f"laptop: {count} of {count} checks pass" in result.stdout
    assert "two-ranks-exchange" in result.stdout


@pytest.mark.parametrize("program", ["import sys; sys.exit(1)", "print('SUM unequal')", DISAGREE])
def test_ranks_that_fail_or_disagree_have_no_sum(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_ranks, "PROGRAM", program)
    assert two_ranks.exchange(gpus=0, counters=lambda: 0)["sum"] is None


def test_recorded_facts_are_judged_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    facts = {**good("trainer"), "has_gdrdrv": False}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    arguments = ["--config", str(ROOT / "configs/campaigns/one_node.yaml"), "--role", "trainer"]
    assert preflight.main([*arguments, "--facts", str(tmp_path / "facts.json")]) == 1
    assert "REFUSE gdrcopy" in capsys.readouterr().out


def test_a_refusal_names_every_check_that_refuses() -> None:
    facts = {**good("trainer"), "has_gdrdrv": False, "memlock_bytes": 65536}
    outcomes = judge(facts, preflight.wanted(CONFIG, "trainer"))
    assert table(outcomes).count("REFUSE") == 2
    with pytest.raises(PreflightFailed, match=r"2 of \d+ checks refuse.*gdrcopy.*locked-memory"):
        require(outcomes, role="trainer")


def test_devices_and_counters_are_read_off_the_kernels_files(tmp_path: Path) -> None:
    for name, vendor in (("rdmap0s0", "0x1d0f"), ("rdmap1s0", "0x1d0f"), ("ibp2s0", "0x15b3")):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device/vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "ports/1/hw_counters").mkdir(parents=True)
        (tmp_path / name / "ports/1/hw_counters/tx_bytes").write_text("40\n")
        (tmp_path / name / "ports/1/hw_counters/tx_pkts").write_text("7\n")
    assert reading.efa_devices(tmp_path) == ["rdmap0s0", "rdmap1s0"]  # B200 shows NVLink's mlx5 devices too
    assert reading.efa_bytes(tmp_path) == 120


def test_flytes_version_comes_from_its_admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with admin_on_loopback(tmp_path, version="v1.16.3") as (_, environment):
        for name in ("FLYTE_PLATFORM_URL", "FLYTE_PLATFORM_INSECURE"):
            monkeypatch.setenv(name, environment[name])
        assert reading.flyte_version() == "v1.16.3"


def test_a_registry_is_asked_for_the_manifest(tmp_path: Path) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Registry(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/v2/moe-rl/cpu/manifests/0.1.0" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    images = tuple(f"127.0.0.1:{server.server_port}/moe-rl/{name}:0.1.0" for name in ("cpu", "rollout"))
    assert list(reading.image_answers(images, scheme="http").values()) == [200, 404]
    server.shutdown()
    server.server_close()


def test_a_shard_that_evicts_or_is_gone_is_read_as_such(valkey_url: str) -> None:
    import valkey

    def shards(*urls: str) -> list[dict[str, Any]]:
        return reading.buffer(CampaignConfig(buffer={"url": list(urls)}))

    client = valkey.Valkey.from_url(valkey_url)
    (found, gone) = shards(valkey_url, "valkey://127.0.0.1:1/0")
    assert found["policy"] == "noeviction" and not found["tls"] and "error" in gone
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        assert shards(valkey_url)[0]["policy"] == "allkeys-lru"
    finally:
        client.config_set("maxmemory-policy", "noeviction")


def test_cluster_campaigns_check_every_kind_of_node_first() -> None:
    for path in (ROOT / "configs/campaigns").glob("*.yaml"):
        config = CampaignConfig.model_validate(yaml.safe_load(path.read_text()))
        if config.checkpoint.store.startswith("s3://"):
            assert config.preflight.roles == ["cpu", "rollout", "trainer"], path
    assert CampaignConfig().preflight.roles == [] and set(NODE) == {"laptop", "cpu", "trainer", "rollout"}


def test_a_single_gpu_needs_no_nvlink_and_no_efa() -> None:
    train = {**CONFIG.train.model_dump(), "topology": "single_1x1", "ep": 1, "fsdp": 1, "dispatcher": "local"}
    single = CampaignConfig.model_validate({**CONFIG.model_dump(), "train": train})
    want = preflight.wanted(single, "trainer")
    assert (want.gpus, want.gpu_name, want.efa, want.hugepages) == (1, "h100", 0, 0)
    gpu = {
        **reading.parse_gpus(SMI)[0],
        "name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "fabric": "N/A",
    }
    alone = {"gpus": [gpu], "nvlinks": {}, "efa_devices": [], "fi_info": {"error": "no such file"},
             "has_gdrdrv": False, "memlock_bytes": 65536, "hugepages_total": 0}  # fmt: skip
    alone["two_ranks"] = {"sum": 3.0, "nccl_log": "", "efa_bytes": 0, "log": ""}
    facts = {
        **good("trainer"),
        **alone,
        "shared_memory_gib": 64.0,
        "machine": {"memory_gib": 200, "cpus": 14},
    }
    assert {o.name: o.problem for o in judge(facts, want) if not o.is_passed} == {}
    names = {
        (topology, role): preflight.preflight_task(CONFIG.model_copy(update={"train": CONFIG.train.model_copy(
            update={"topology": topology})}), role).name.rpartition(".")[2]
        for topology, role in (("single_1x1", "trainer"), ("node_1x8", "trainer"), ("laptop_1x2", "trainer"),
                               ("node_1x8", "rollout"), ("single_1x1", "laptop"))
    }  # fmt: skip
    assert list(names.values()) == ["preflight_single", "preflight_trainer", "preflight_cpu",
                                    "preflight_rollout", "preflight_laptop"]  # fmt: skip


def test_everything_of_a_campaign_waits_for_its_preflight() -> None:
    from test_graph import unrolled

    from tasks.records import CampaignRun
    from workflows import campaign

    run = CampaignRun(config=CONFIG, lineage=1, code_revision="r")
    spec = unrolled(campaign.preflight, run=run)
    order = ["preflight-cpu", "preflight-rollout", "preflight-trainer"]
    assert [node.id for node in spec.nodes] == order
    sources = {n.id: [b.binding.promise.node_id for b in n.inputs if b.binding.promise] for n in spec.nodes}
    assert sources["preflight-rollout"] == ["preflight-cpu"]
    assert sources["preflight-trainer"] == ["preflight-rollout"]
    nodes = {node.id: node for node in campaign.campaign.nodes}

    def name(node: Any) -> str:
        return node.flyte_entity.name.rpartition(".")[2]

    waits = {name(node): {name(up) for up in node.upstream_nodes} for node in nodes.values()}
    assert "open_campaign" in waits["preflight"]
    for later in ("resume", "first_versions", "segments", "report"):
        assert "preflight" in waits[later], waits
