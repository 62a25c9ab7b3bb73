"""What users of other frameworks report of checkpoints, one claim a test; the row of the complaints is in
each.

The claims that other files test better are there: kills (test_crash_points.py, test_artifacts_faults.py),
standing workers (test_standing.py), Spot (test_chaos.py, test_notices.py).
"""

from __future__ import annotations

import json

import pytest
from publishing import manifest, publish, put_folder
from test_preemption import attempt, disturbed, made, make_job

from tasks.artifacts.cursor import DATASET, first_prompt, position_after, require_same_data
from tasks.artifacts.errors import VersionConflict
from tasks.artifacts.lineage import describe, diff, export
from tasks.artifacts.manifest import DataCursor
from tasks.session import run_environment, run_store


def cursor(position: int, dataset: str = "digits/1") -> DataCursor:
    return DataCursor(dataset=dataset, position=position, seed=0)


def test_data_without_a_pointer_never_restarts_at_step_0(policy_store):
    """Row 2: the tracker was never written, so a resume began at 0 and overwrote."""
    published = publish(policy_store, 4)
    policy_store.bucket.delete(policy_store.root + "latest.json")
    assert policy_store.head() == published[3]
    with pytest.raises(VersionConflict, match=r"version 0 of campaign .* must be published once"):
        policy_store.commit(manifest(policy_store, 0, {}, tensor_digest="0" * 64))


def test_the_version_counter_survives_a_restart_and_never_goes_back(policy_store, store_folder):
    """Row 6: the policy's version restarted at 1."""
    from tasks.artifacts.store import open_store

    publish(policy_store, 3)
    restarted = open_store(str(store_folder), policy_store.campaign)
    assert restarted.head().version == 2
    for version in (1, 2):
        with pytest.raises(VersionConflict):
            restarted.commit(manifest(restarted, version, {}, tensor_digest="0" * 64))
    with pytest.raises(ValueError, match="versions must have no gaps"):
        restarted.commit(manifest(restarted, 4, {}))
    assert restarted.commit(manifest(restarted, 3, {})).version == 3


def test_other_data_on_resume_are_refused_by_name(policy_store):
    """Row 8: a swapped dataset skipped as many samples without a word."""
    policy_store.commit(manifest(policy_store, 0, {}, data=cursor(0)))
    policy_store.commit(manifest(policy_store, 1, {}, data=cursor(48)))
    head = policy_store.manifest(1)
    require_same_data(head, "digits/1")
    with pytest.raises(
        ValueError, match=r"version 1, 'digits/1', of which 48 prompts were offered, got 'other'"
    ):
        require_same_data(head, "other")


def without_environment() -> None:
    """In a rank, whose machine may have neither the data nor the packages."""
    from tasks.environments import make

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank made the environment")

    make.make_environment = refuse
    disturbed(0, lambda *_: print("trains", flush=True))


def test_ranks_know_the_lineages_data_without_making_its_environment(store_folder, tmp_path):
    """Each rank loaded all of the data for the 16 letters that name them."""
    job = make_job("data", store_folder, {}, minibatches=1)
    run = job[0]
    codes, said = attempt(job, tmp_path, without_environment)
    assert codes == [0, 0] and "trains" in said, said
    offered = run.config.rollout.prompts_reserved
    dataset = run_environment(run).fingerprint()
    assert made(tmp_path).data == DataCursor(dataset=dataset, position=offered, seed=run.config.seed)
    store = run_store(run)
    store.bucket.delete(store.root + DATASET)
    codes, said = attempt(job, tmp_path, without_environment)
    assert 0 not in codes and "trains" not in said, said  # noticed before anything is trained


def test_another_number_of_prompts_on_resume_skips_and_repeats_none(policy_store):
    """Row 8: a position that is a product of the iteration's number jumps when the factor changes."""
    references = [
        policy_store.commit(manifest(policy_store, version, {}, data=cursor(48 * version)))
        for version in range(3)
    ]
    assert first_prompt(policy_store, references[2], 2, offered=48) == 96
    assert first_prompt(policy_store, references[2], 2, offered=10) == 96  # not 20
    # sampled by an older version: the newest one before the iteration counts, and what is in flight behind it
    assert first_prompt(policy_store, references[0], 2, offered=10) == 96
    assert first_prompt(policy_store, references[0], 4, offered=10) == 116
    old = policy_store.manifest(2).model_copy(update={"data": None})
    assert position_after(old, offered=48) == 96  # of an earlier release


def test_staleness_after_a_resume_is_that_before_the_crash(policy_store):
    """Row 5: the positions of iterations in flight are the same whether versions came meanwhile or not."""
    references = [policy_store.commit(manifest(policy_store, 0, {}, data=cursor(0)))]
    before = first_prompt(policy_store, references[0], 2, offered=48)
    for version in (1, 2):
        policy_store.commit(manifest(policy_store, version, {}, data=cursor(48 * version)))
    assert first_prompt(policy_store, references[0], 2, offered=48) == before == 96


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_export_has_every_tensor_and_the_bytes_of_the_version(family, policy_store, tmp_path):
    """Row 31: an exported mixture of experts was wrong or incomplete without an error."""
    import torch
    from families import saved, tiny_policy
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tasks.policy.checkpoint.weights import tensor_digest

    folder = saved(tiny_policy(family), tmp_path)
    files = put_folder(policy_store, folder) | {"optimizer-1.safetensors": policy_store.put_bytes(b"moments")}
    policy_store.commit(manifest(policy_store, 0, files))
    names = export(policy_store, 0, tmp_path / "exported")
    assert "optimizer-1.safetensors" not in names and "moe-rl.json" in names
    before, after = (
        {k: v for path in place.glob("*.safetensors") for k, v in load_file(path).items()}
        for place in (folder, tmp_path / "exported")
    )
    assert tensor_digest(before.items()) == tensor_digest(after.items())
    _, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with pytest.raises(ValueError, match="must not exist before an export"):
        export(policy_store, 0, tmp_path / "exported")


def test_a_version_says_what_it_was_made_of_and_two_say_what_differs(policy_store):
    publish(policy_store, 2)
    described = describe(policy_store, 1)
    assert (described["parents"], described["stored_as"], described["added_bytes"]) == ([0], "full", 9)
    difference = diff(policy_store, 0, 1)
    assert difference["files"] == {"changed": ["weights.bin"]} and difference["is_descendant"]
    assert difference["code"] == difference["tensors"] == "equal" and difference["bytes_to_fetch"] == 9


def test_the_report_says_what_the_newest_version_changed(policy_store):
    """As the command does: configuration, code, data and evaluation, whatever their text is."""
    from tasks.config import CampaignConfig
    from tasks.reporting.difference import difference_section

    configs = [
        CampaignConfig.model_validate({"name": "unit", "train": {"learning_rate": rate}})
        for rate in (0.5, 0.125)
    ]
    for version, config in enumerate(configs):
        policy_store.put_object(f"config/{config.digest()}.json", config.model_dump_json().encode())
        changes = {"config_digest": config.digest(), "code_revision": f"<b>{version}"}
        policy_store.commit(manifest(policy_store, version, {}, data=cursor(48 * version), **changes))
        score = {"exact_sampled": version + 0.25, "exact_greedy": 0.5, "reward_sampled": 0.5}
        policy_store.put_object(f"evaluations/{version:06d}-x.json", json.dumps(score).encode())
    html = difference_section([diff(policy_store, 0, 1)])
    for cells in (
        ("<code>train.learning_rate</code>", "0.5", "0.125"),
        ("code", "&lt;b&gt;0", "&lt;b&gt;1"),
        ("data position", "0", "48"),
        ("exact_sampled", "0.2500", "1.2500"),
    ):
        assert "".join(f'<td class="l">{cell}</td>' for cell in cells) in html, (cells, html)
    assert "data dataset" not in html and "tensors" not in html
    assert difference_section([]) == ""
