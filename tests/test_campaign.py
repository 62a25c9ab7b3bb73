"""The whole graph, run as a user runs it: real servers, real torchrun ranks, several processes killed."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from campaigns import SMALL, Finished, refused, run, servers_of, start, stop, wait_for

from tasks.config import CampaignConfig, with_overrides
from tasks.records import CampaignRun
from tasks.session import run_environment, run_store

pytestmark = pytest.mark.filterwarnings("ignore:The parameter --fresh")  # flytekit's own


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Finished:
    """An undisturbed run."""
    return run(tmp_path_factory.mktemp("reference"), SMALL, timeout=1800)


@pytest.fixture(scope="session")
def pristine(reference, tmp_path_factory) -> Path:
    """Its folder as the run left it; tests that look into the reference start its servers again."""
    wait_until_stopped(reference.store)
    folder = tmp_path_factory.mktemp("pristine")
    subprocess.run(["cp", "-a", *reference.store.parent.iterdir(), folder], check=True)
    return folder


@pytest.fixture
def copy(pristine, tmp_path) -> Path:
    """For a run that adds to it."""
    subprocess.run(["cp", "-a", *pristine.iterdir(), tmp_path], check=True)
    return tmp_path


def campaign_run(finished: Finished) -> CampaignRun:
    config = with_overrides(CampaignConfig.model_validate(SMALL), checkpoint__store=str(finished.store))
    return CampaignRun(config=config, lineage=1, code_revision="test")


def wait_until_stopped(folder: Path, *, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while left := servers_of(folder) + [str(path) for path in folder.glob("*/*.stopping")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_campaign_publishes_a_version_an_iteration_and_leaves_no_server(reference, pristine):
    lines = reference.metrics()
    assert [line["kind"] for line in lines] == ["init", "warm_start", "iteration", "iteration", "iteration"]
    assert [line["version"] for line in lines] == [0, 1, 2, 3, 4]
    assert len({line["tensor_digest"] for line in lines}) == 5
    for line in lines[2:]:
        assert line["num_samples"] > 0 and line["metrics"]["kl_k3"] >= 0
        assert {"start_up", "generate", "score", "assemble", "train", "upload", "publish"} <= line[
            "seconds"
        ].keys()
    assert (reference.folder / "report.html").stat().st_size > 1000


def test_the_ledger_of_every_run_balances(reference):
    (row,) = re.findall(r"^ +total +(\d+) +(\d+) +(\d+) +(\d+)", reference.output, re.MULTILINE)
    produced, trained, rejected, pending = map(int, row)
    assert produced == trained + rejected + pending == 3 * 48 * 8 and pending == 0
    assert trained == sum(line["num_samples"] for line in reference.metrics() if line["kind"] == "iteration")


def test_workers_shared_the_queue(reference):
    for k in range(3):
        assert len(re.findall(rf"iter +{k}  generate  worker [01]: 2 portions", reference.output)) == 2


def test_the_effective_configuration_and_its_digest_are_printed_and_stored(reference):
    run_ = campaign_run(reference)
    assert run_.config.digest() in reference.output and f"store: {reference.store}" in reference.output
    stored = run_store(run_).get_object(f"config/{run_.config.digest()}.json")
    assert CampaignConfig.model_validate_json(stored) == run_.config


def test_the_final_checkpoint_loads_in_transformers_and_reproduces_its_evaluation(reference):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_ = campaign_run(reference)
    store = run_store(run_)
    version = store.head().version
    folder = store.pull(version)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    environment = run_environment(run_)
    exact = 0
    prompts = environment.held_out_prompts()
    for prompt in prompts:
        message = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(
                inputs["input_ids"], max_new_tokens=run_.config.rollout.max_new_tokens, do_sample=False
            )
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        ended = ids[-1] == tokenizer.eos_token_id
        response = tokenizer.decode(ids[:-1] if ended else ids)
        exact += environment.verify(prompt.prompt_id, response, is_finished=ended).is_exact
    assert reference.metrics()[-1]["evaluation"]["exact_greedy"] == exact / len(prompts)


def test_the_same_command_again_trains_nothing_and_says_so(reference):
    before = reference.digests()
    again = run(reference.store.parent, SMALL)
    assert "all 3 iterations are done, nothing to train" in again.output and again.digests() == before


def test_a_run_stopped_by_ctrl_c_while_it_trains_and_then_killed_goes_on_to_the_same_bits(
    reference, tmp_path
):
    """Weights and every metric; neither leaves a server. Ctrl-C is answered as everywhere."""
    process = start(tmp_path, SMALL)
    try:
        wait_for(tmp_path, r"iter +0  assemble", process)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert "stopped by Ctrl-C. What was published stays" in (tmp_path / "log").read_text()
    finally:
        stop(process)
    wait_until_stopped(tmp_path / "store")
    process = start(tmp_path, SMALL)
    wait_for(tmp_path, r"iter +1  generate  worker 0", process)
    stop(process)
    wait_until_stopped(tmp_path / "store")
    resumed = run(tmp_path, SMALL)
    assert "found version 2 after 1 iterations: continues with iteration 1" in resumed.output
    assert resumed.digests() == reference.digests()
    assert [line["metrics"] for line in resumed.metrics()] == [
        line["metrics"] for line in reference.metrics()
    ]


EVERY_TRAINING_OPTION = {
    "fsdp": 2,
    "compute_dtype": "bfloat16",
    "packing": "packed",
    "micro_batch_tokens": 256,
    "activation_checkpointing": True,
    "router_aux_loss_coefficient": 0.01,
    "logprob_kernel": "chunked",
    "logprob_keep_gb": 1e-4,
    "offload_optimizer": True,
}


def test_a_campaign_goes_on_with_another_mesh_and_every_training_option(reference, copy):
    schedule = SMALL["schedule"] | {"iterations": 4}
    onwards = run(copy, SMALL | {"train": EVERY_TRAINING_OPTION, "schedule": schedule})
    assert "found version 4 after 3 iterations: continues with iteration 3" in onwards.output
    assert "train.fsdp changed since version 4: 1 -> 2" in onwards.output
    digests, before = onwards.digests(), reference.digests()
    assert digests[:5] == before and len(set(digests)) == 6
    first, trained = (line["metrics"] for line in onwards.metrics()[-2:])
    assert "kernels: logprob chunked" in onwards.output
    assert trained["router_aux_loss_coefficient"] == 0.01 and trained["router_balance"] >= 0.99
    assert trained["skipped_steps"] == 0 and trained["kl_k3"] < 0.1 and "router_balance" not in first


def test_fresh_starts_the_next_lineage_and_keeps_the_first(reference, copy):
    fresh = run(copy, SMALL | {"schedule": {"iterations": 1}}, "--fresh")
    assert fresh.folder.name == "small.0002" and len(fresh.metrics()) == 3
    assert (fresh.store / "small.0001/report.html").exists()
    assert fresh.digests()[:2] == reference.digests()[:2]  # seeds do not depend on the lineage


def test_a_resumed_campaign_may_not_change_its_model(reference):
    output = refused(reference.store.parent, SMALL | {"seed": 9})
    assert "may not change these: seed was 0, is 9" in output and "--fresh" in output


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        (SMALL | {"rollout": {"workers": 0}}, [], ["rollout.workers", "greater than or equal to 1"]),
        (SMALL | {"iterations": 5}, [], ["unknown key 'iterations'"]),
        (SMALL, ["--iterations", "0"], ["schedule.iterations", "greater than or equal to 1"]),
        (SMALL | {"model": {"folder": "/nowhere", "num_experts": 8}}, [], ["/nowhere, which is no folder"]),
        (SMALL | {"checkpoint": {"min_free_gb": 1e9}}, [], ["checkpoint.min_free_gb", "free"]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("leave_servers")
def test_bad_input_stops_the_run_with_one_error_before_any_work(tmp_path, config, arguments, words):
    output = refused(tmp_path, config, *arguments)
    for word in words:
        assert word in output, output[-2000:]
    assert "generate" not in output.split("Error")[-1] and "Traceback" not in output


def test_a_taken_port_is_one_clear_error(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = refused(tmp_path, SMALL | {"checkpoint": {"port": port}})
    assert f"checkpoint.port {port}" in output and "in use" in output and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(3600)  # run alone it makes the reference run too: 11 minutes on a busy machine
def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(reference, tmp_path):
    disk = tmp_path / "store"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(disk)]).returncode:
        pytest.skip("needs the right to mount a small file system")
    config = SMALL | {"checkpoint": {"min_free_gb": 0}}
    process = start(tmp_path, config)
    try:
        wait_for(tmp_path, r"iter +1  generate  worker 0", process, timeout=1200)
        filler = disk / "filler"
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        assert process.wait(600) != 0
        output = " ".join((tmp_path / "log").read_text().split())
        assert "space" in output or "disk" in output, output[-3000:]
        wait_until_stopped(disk)
        filler.unlink()
        assert run(tmp_path, config, timeout=1200).digests() == reference.digests()
    finally:
        stop(process)
        wait_until_stopped(disk)
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
