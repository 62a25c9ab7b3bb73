"""Which versions keep their files: planned first, and never a file that a kept version is made of."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from publishing import manifest, publish
from test_patches import dense, flipped, put_patched, write

from tasks.artifacts import versions
from tasks.artifacts.catalogue import lineage_key
from tasks.artifacts.errors import NotFound, Retired
from tasks.artifacts.manifest import stored_objects
from tasks.artifacts.retention import Keep, carry_out, hold, plan_retention, reasons_to_keep, release
from tasks.artifacts.store import PolicyStore, open_store
from tasks.config import CampaignConfig

LATER = timedelta(hours=25)


def publish_chain(store: PolicyStore, folder: Path, number: int) -> None:
    """Versions of one file as patches, whole every fourth time; version 2 has the best evaluation."""
    tensors, parent = dense(num=2, size=20_000), None
    for version in range(number):
        path = write(folder / "model.safetensors", tensors)
        parent = put_patched(store, path, parent, full_every=4)
        store.commit(manifest(store, version, {path.name: parent}))
        score = {"version": version, "exact_sampled": 1.0 - abs(version - 2) / 10}
        store.put_object(f"evaluations/{version:06d}-c.json", json.dumps(score).encode())
        tensors = flipped(tensors, version)


def readable(store: PolicyStore, folder: Path, cache: Path) -> list[int]:
    """Versions that a reader with nothing can pull once the lifecycle rule has freed what is deleted."""
    client, found = store.bucket._client, []
    for page in client.get_paginator("list_object_versions").paginate(
        Bucket=store.bucket.name, Prefix=store.root + "blobs/"
    ):
        hidden = {marker["Key"] for marker in page.get("DeleteMarkers", []) if marker["IsLatest"]}
        for entry in page.get("Versions", []):
            if entry["Key"] in hidden:
                client.delete_object(Bucket=store.bucket.name, Key=entry["Key"], VersionId=entry["VersionId"])
    reader = open_store(str(folder), store.campaign, cache=cache)
    for version in range(reader.head().version + 1):
        try:
            reader.pull(version)
            found.append(version)
        except Retired:
            continue
    return found


def test_kept_are_the_last_every_mth_the_best_and_what_is_held():
    scores, held = {1: 0.5, 3: 0.9, 6: 0.9, 8: 0.1}, {2: ["me"]}
    kept = reasons_to_keep(
        range(10), Keep(last=2, every=5, best=1), scores=scores, held=held, needed_by={2: ["a"]}
    )
    assert kept == {
        9: ["newest"], 8: ["last 2"], 0: ["every 5"], 5: ["every 5"], 2: ["held by me", "needed by a"],
        6: ["best 1 by exact_sampled (0.9)"],
    }  # fmt: skip
    assert reasons_to_keep([7], Keep(last=1, best=0), scores={}, held={}, needed_by={}) == {7: ["newest"]}
    with pytest.raises(ValueError, match="last must be at least 1"):
        Keep(last=0)


def test_a_kept_version_outlives_every_retired_one_it_was_patched_from(policy_store, store_folder, tmp_path):
    publish_chain(policy_store, tmp_path, 8)
    plan = plan_retention(policy_store, Keep(last=1, every=0, best=1), now=datetime.now(UTC) + LATER)
    assert (sorted(plan.kept), plan.retired) == ([2, 7], [0, 1, 3, 4, 5, 6])
    assert carry_out(policy_store, plan) == len(plan.keys) == 1  # of v3: 0 to 2 and 4 to 7 are in the chains
    assert readable(policy_store, store_folder, tmp_path / "reader") == [0, 1, 2, 4, 5, 6, 7]
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "other")
    with pytest.raises(Retired, match=r"version 3 .* got a record of their removal"):
        reader.pull(3)
    assert [m.version for m in policy_store.history()] == list(range(8))  # the lineage stays
    policy_store.commit(manifest(policy_store, 8, policy_store.manifest(7).files))  # and goes on


def test_a_plan_changes_nothing_and_what_is_young_or_held_stays(policy_store, store_folder, tmp_path):
    publish(policy_store, 5)
    keys = set(policy_store.bucket.keys(policy_store.root))
    plan = plan_retention(policy_store, Keep(last=1, best=0))
    assert (plan.keys, plan.young) == ([], 4)  # a candidate's files are not older than a day
    hold(policy_store, 1, "reader", hours=None)
    hold(policy_store, 2, "gone", hours=1e-9)
    keys.add(f"{policy_store.root}holds/000000000001/reader.json")
    keys.add(f"{policy_store.root}holds/000000000002/gone.json")
    plan = plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0))
    assert plan.kept == {4: ["newest"], 1: ["held by reader"]} and len(plan.keys) == 3
    assert set(policy_store.bucket.keys(policy_store.root)) == keys
    carry_out(policy_store, plan)
    assert readable(policy_store, store_folder, tmp_path / "reader") == [1, 4]
    release(policy_store, 1, "reader")
    again = plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0))
    assert again.retired == [1] and len(again.keys) == 1


def store_config(store: PolicyStore, **sections) -> str:
    config = CampaignConfig.model_validate(sections)
    store.put_object(f"config/{config.digest()}.json", config.model_dump_json().encode())
    return config.digest()


def test_what_the_campaign_itself_may_yet_read_is_kept_without_a_hold(policy_store):
    """Row 4: open iterations sample from older versions, evaluations come late, a loss has a reference."""
    configs = [
        store_config(policy_store, schedule={"max_staleness": 2, "evaluate_every": 4, "iterations": 9}),
        store_config(
            policy_store,
            algorithm={"kl": "loss", "kl_coefficient": 0.1, "reference_version": 1},
            warm_start={"steps": 1},
            schedule={"evaluate_every": 3, "iterations": 9},
        ),
    ]
    for version in range(9):  # the configuration changes after version 5
        files = {"weights.bin": policy_store.put_bytes(b"%d" % version)}
        digest = configs[version > 5]
        policy_store.commit(manifest(policy_store, version, files, config_digest=digest))
    policy_store.put_object("evaluations/000006-c.json", b'{"version": 6}')
    kept = plan_retention(policy_store, Keep(last=1, best=0)).kept
    assert kept == {
        8: ["newest", "needed by open iterations"],
        7: ["needed by open iterations"],
        6: ["needed by open iterations"],
        4: ["needed by its evaluation"],
        1: ["needed by the reference of the loss"],
    }


def test_cleanup_never_deletes_a_version_that_a_reader_took_since_the_plan(policy_store):
    """Row 4: a cleaner deleted weights that were being loaded."""
    publish(policy_store, 3)
    plan = plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0))
    hold(policy_store, 0, "engine", hours=1)
    with pytest.raises(
        ValueError, match=r"must not retire what is held, got holds since: \{0: \['engine'\]\}"
    ):
        carry_out(policy_store, plan)
    assert not policy_store.is_retired(0) and policy_store.pull(0)


def test_a_version_published_while_files_are_removed_keeps_the_old_file_it_shares(
    policy_store, store_folder, tmp_path
):
    publish(policy_store, 3)
    plan = plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0))
    (shared,) = (
        blob for file in [policy_store.manifest(0).files["weights.bin"]] for blob in stored_objects(file)
    )
    assert shared.key in plan.keys
    policy_store.commit(manifest(policy_store, 3, {"weights.bin": shared}))  # content that recurs
    carry_out(policy_store, plan)
    assert 3 in readable(policy_store, store_folder, tmp_path / "reader")


def test_a_removal_that_was_interrupted_is_repeated(policy_store, store_folder, tmp_path, monkeypatch):
    publish(policy_store, 4)
    plan = plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0))
    with monkeypatch.context() as patch:
        patch.setattr(policy_store.bucket, "delete", lambda key: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            carry_out(policy_store, plan)
    again = plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0))
    assert again.retired == [] and again.keys == plan.keys
    carry_out(policy_store, again)
    assert readable(policy_store, store_folder, tmp_path / "reader") == [3]


def test_the_command_shows_first_and_removes_only_when_told(policy_store, store_folder, capsys):
    campaign = f"{policy_store.campaign}.0001"
    policy_store.put_object(lineage_key(1), b"{}")
    store = open_store(str(store_folder), campaign)
    publish(store, 3)
    where = ["--store", str(store_folder), "--campaign", campaign]
    prune = ["prune", *where, "--last", "1", "--best", "0", "--min-age-hours", "0"]
    versions.main(prune)
    assert "nothing was changed; --yes removes" in capsys.readouterr().out and not store.is_retired(0)
    versions.main(["hold", *where, "0", "--by", "me", "--hours", "2"])
    versions.main([*prune, "--yes"])
    assert "held by me" in (out := capsys.readouterr().out) and "1 objects removed" in out
    assert (store.is_retired(0), store.is_retired(1), store.is_retired(2)) == (False, True, False)
    versions.main(["list", *where])
    assert [line.endswith("retired") for line in capsys.readouterr().out.splitlines()] == [False, True, False]
    with pytest.raises(SystemExit, match=r"version 9 of campaign .* must exist"):
        versions.main(["describe", *where, "9"])


@pytest.mark.parametrize("hours", [-5.0, 0.0, float("nan"), float("inf"), 1e30])
def test_hours_that_hold_nothing_or_name_no_date_are_refused(policy_store, hours):
    """A hold of -5 hours said that the version was held, and had run out; an endless one was a traceback."""
    with pytest.raises(ValueError, match=r"hours must be above 0 .* Leave it out"):
        hold(policy_store, 0, "me", hours=hours)
    if hours:
        with pytest.raises(ValueError, match="min_age_hours from 0 to"):
            Keep(min_age_hours=hours)


def test_nothing_to_retire_is_an_error(policy_store):
    with pytest.raises(ValueError, match="must have versions to retire some, got none"):
        plan_retention(policy_store, Keep())
    with pytest.raises(NotFound):
        hold(policy_store, 0, "me", hours=None)


def test_the_help_says_what_each_command_does_and_which_versions_prune_keeps(capsys):
    for command in ([], ["prune"]):
        with pytest.raises(SystemExit):
            versions.main([*command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "list A line a version",
        "export A Hugging Face folder",
        "release End a hold",
        "default: 24",
    ):
        assert words in text
