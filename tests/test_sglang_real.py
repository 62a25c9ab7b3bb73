"""What only a real SGLang server shows: launches, deaths, routing records, the router, determinism.

They need an interpreter that has sglang (see ``test_engine.py``) and minutes: each starts servers of its own.
"""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from engines import sglang_config, start_sglang
from policies import save_tiny_policy

from tasks.embedded.process import HOST
from tasks.engine import sglang_server
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import Fleet
from tasks.engine.sglang_client import SglangError
from tasks.engine.sglang_model import served_folder
from tasks.engine.sglang_server import LaunchedServer

pytestmark = pytest.mark.sglang
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def kill_server(folder):
    """SIGKILL for whatever has the folder in its command line: the server, or the guard it ends with."""
    found = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    assert found
    for pid in found:
        os.kill(int(pid), signal.SIGKILL)


def wait_for_router(url, log):
    """Until it has met both of its workers."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/workers", timeout=5) as response:
                if len(json.load(response)["workers"]) == 2:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    pytest.fail(log.read_text()[-2000:])


def test_an_unknown_argument_of_the_installed_version_ends_the_launch_with_its_name(
    folder, tmp_path, monkeypatch
):
    real = sglang_server.server_arguments
    monkeypatch.setattr(
        sglang_server, "server_arguments", lambda *a, **k: [*real(*a, **k), "--enable-deepep-moe"]
    )
    with pytest.raises(RuntimeError, match="enable-deepep-moe"):
        start_sglang(tmp_path).load(folder, 0)


def test_a_killed_server_is_replaced_by_the_next_load(folder, tmp_path):
    """Start-up has a budget of its own; a server that is dead, not slow, is started again (complaint 28)."""

    engine = start_sglang(tmp_path / "server")
    engine.load(folder, 1)
    kill_server(tmp_path / "server")
    with pytest.raises(SglangError, match=r"broke off|no SGLang server"):
        engine.generate(REQUESTS, PARAMS)
    engine.load(folder, 2)
    assert engine.generate(REQUESTS, PARAMS)


def test_routing_records_are_those_of_transformers(folder, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    engine = start_sglang(tmp_path, routing=True)
    engine.load(folder, 1)
    (group,) = engine.generate([REQUESTS[0]], replace(PARAMS, record_routing="experts"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for done in group:
        ids = torch.tensor([[*REQUESTS[0].prompt_ids, *done.response_ids]])[:, :-1]
        logits = model(ids, output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2).indices.sort().values for layer in logits], dim=1)
        assert done.routed_experts is not None
        assert (np.sort(done.routed_experts, axis=-1) == chosen.numpy()).all()


def test_losing_one_of_two_servers_behind_the_router_costs_no_sample(folder, tmp_path):
    """One server is killed while both sample; the router still believes in it, the client does not."""

    config = sglang_config()
    dtype = "float32" if config.device == "cpu" else "bfloat16"
    servers = [LaunchedServer(config, tmp_path / name, dtype=dtype, routing=False) for name in "ab"]
    served = served_folder(folder, tmp_path)
    urls = tuple(server.start(served, 0) for server in servers)
    port = 29_000 + os.getpid() % 1_000
    command = [config.python, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)]
    with (tmp_path / "router.log").open("wb") as log:
        router = subprocess.Popen(
            [*command, "--worker-urls", *urls],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=servers[0].environment(),
        )
    try:
        changes = {"urls": urls, "router_url": f"http://{HOST}:{port}", "startup_seconds": 60.0}
        fleet = Fleet(config.model_copy(update=changes), dtype=dtype, folder=tmp_path)
        engine = fleet.view()
        engine.load(folder, 1)
        wait_for_router(f"http://{HOST}:{port}", tmp_path / "router.log")
        long = SamplingParams(max_new_tokens=200, temperature=1.0, top_p=1.0, stop_ids=frozenset())
        timer = threading.Timer(1.0, kill_server, (tmp_path / "a",))
        timer.start()
        groups = engine.generate(REQUESTS * 4, long)
        assert [len(c.response_ids) for group in groups for c in group] == [200] * 64
        assert not sglang_server.answers(urls[0]), (
            "one was lost; the router or the client asked the other again"
        )
        assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
    finally:
        router.terminate()
        router.wait(20)


def test_an_attached_server_that_is_lost_is_left_out_until_it_can_adopt_a_version_again(folder, tmp_path):
    """Before, the next load failed for the whole fleet. Now it fails when nobody is left."""
    config = sglang_config()
    dtype = "float32" if config.device == "cpu" else "bfloat16"
    servers = [LaunchedServer(config, tmp_path / name, dtype=dtype, routing=False) for name in "ab"]
    served = served_folder(folder, tmp_path)
    urls = tuple(server.start(served, 0) for server in servers)
    engine = Fleet(config.model_copy(update={"urls": urls}), dtype=dtype, folder=tmp_path).view()
    engine.load(folder, 1)
    assert "2 of 2 attached" in engine.describe()
    kill_server(tmp_path / "a")
    engine.load(folder, 2)
    assert [address.is_out for address in engine.fleet.addresses] == [True, False]
    assert f"out of service: {urls[0]}" in engine.describe()
    assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
    assert servers[0].start(served, 0) == urls[0], "on its port"
    assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
    assert engine.fleet.addresses[0].is_out, "it holds another version until the next one is loaded"
    engine.load(folder, 3)
    assert "2 of 2 attached" in engine.describe()
    for name in "ab":
        kill_server(tmp_path / name)
    with pytest.raises(SglangError, match="could adopt version 4") as caught:
        engine.load(folder, 4)
    assert all(url in str(caught.value) for url in urls)


def test_in_deterministic_mode_a_sample_depends_on_its_seed_alone(folder, tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("SGLang's deterministic mode needs a CUDA device")
    engine = start_sglang(tmp_path)
    engine.load(folder, 1)
    requests = [
        Request(prompt_ids=(2, 9, 10, 11, 3), seeds=(11, 12, 13)),
        Request(prompt_ids=(2, 5, 6, 7, 8, 9, 10, 3), seeds=(31,)),
    ]
    together = engine.generate(requests, PARAMS)
    assert together == engine.generate(requests, PARAMS)
    alone = [engine.generate([request], PARAMS)[0] for request in requests]
    assert alone == together
