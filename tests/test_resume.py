"""Where a campaign goes on: the versions that sample next, and what an earlier configuration left behind."""

import pytest

from tasks import report
from tasks.artifacts import versions
from tasks.artifacts.catalogue import config_of
from tasks.artifacts.manifest import Manifest
from tasks.artifacts.store import PolicyStore, open_store
from tasks.checkpoint import open_campaign, resume
from tasks.checkpoint import publish as publish_version
from tasks.config import CampaignConfig, ConfigError, with_overrides
from tasks.experience import query, watch
from tasks.experience.records import Group, WorkItem
from tasks.records import CampaignRun, Candidate, TrainBatch
from tasks.reporting.collect import campaign_ledger
from tasks.session import run_buffer, run_store

KINDS = ["init", "warm_start", "iteration", "iteration", "iteration"]


@pytest.fixture
def run(store_folder, valkey_url, campaign):
    config = CampaignConfig.model_validate(
        {
            "name": campaign,
            "checkpoint": {"store": str(store_folder)},
            "buffer": {"url": valkey_url},
        }
    )
    return CampaignRun(config=config, lineage=1, code_revision="r")


def publish(run, count):
    """The first ``count`` versions of a warm-started campaign."""
    store = run_store(run)
    store.put_object(f"config/{run.config.digest()}.json", run.config.model_dump_json().encode())
    for version, kind in enumerate(KINDS[:count]):
        store.commit(
            Manifest(
                campaign=run.campaign,
                version=version,
                parent=version - 1 if version else None,
                kind=kind,
                iteration=max(0, version - 1),
                files={},
                tensor_digest=f"d{version}",
                config_digest=run.config.digest(),
                code_revision="r",
            )
        )


def staleness(run, s):
    return run.model_copy(update={"config": with_overrides(run.config, schedule__max_staleness=s)})


def resumed(run):
    state = resume.task_function(run)
    return [v.version for v in state.versions], state.iterations_done


def opened(config, *, name=None, fresh=False, iterations=None):
    return open_campaign.task_function(
        config, name=name, iterations=iterations, learning_rate=None, store=None, fresh=fresh
    )


def changed(run):
    """The same lineage under another configuration, whose run has begun."""
    other = run.model_copy(update={"config": with_overrides(run.config, train__learning_rate=0.5)})
    run_store(other).put_object(
        f"config/{other.config.digest()}.json", other.config.model_dump_json().encode()
    )
    return other


def ledger(run):
    store = run_store(run)
    return campaign_ledger(store, run, store.history()).require_balanced()


@pytest.fixture
def other(run):
    """The learning rate changed in the middle of an iteration, of which each configuration made samples."""
    publish(run, 2)
    put_and_publish(run, iteration=0, samples=6)
    found = changed(run)
    resumed(found)
    put_and_publish(found, iteration=0, samples=4)
    return found


@pytest.mark.parametrize(("skipped", "is_stale"), [(0, True), (1, True), (2, False)])
def test_a_version_whose_optimizer_stepped_and_whose_weights_did_not_move_is_refused(run, skipped, is_stale):
    """Row 1: weights of another step were saved, and the save succeeded. Skipped steps move nothing."""
    publish(run, 3)
    store = run_store(run)
    before = store.manifest(2)
    metrics = {"steps": 2.0, "skipped_steps": float(skipped)}
    trained = before.model_copy(update={"version": 3, "parent": 2, "iteration": 2, "metrics": metrics})
    candidate = Candidate(manifest_json=trained.model_dump_json())
    if is_stale:
        with pytest.raises(RuntimeError, match="must differ from version 2 after 2 optimizer steps"):
            publish_version.task_function(run=run, candidate=candidate)
    else:
        assert publish_version.task_function(run=run, candidate=candidate).version == 3
    assert store.head().version == (2 if is_stale else 3)


def test_a_new_campaign_has_no_versions(run):
    assert resumed(run) == ([], 0)


@pytest.mark.parametrize(
    ("count", "s", "versions", "done"),
    [
        (1, 0, [0], 0), (2, 0, [1], 0), (4, 0, [3], 2),
        (2, 1, [1], 0),  # version 0 was never to sample: the warm start replaced it
        (3, 1, [1, 2], 1), (5, 1, [3, 4], 3), (4, 3, [1, 2, 3], 2),
    ],
)  # fmt: skip
def test_a_resumed_campaign_samples_with_the_versions_an_undisturbed_one_would(run, count, s, versions, done):
    run = staleness(run, s)
    publish(run, count)
    assert resumed(run) == (versions, done)


def test_pending_samples_of_an_earlier_configuration_are_rejected_by_name(run):
    publish(run, 3)
    put_and_publish(run, iteration=1, samples=6)
    later = changed(run)
    resumed(later)
    totals = campaign_ledger(run_store(later), later, []).require_balanced().totals()
    assert totals.rejected == {"configuration_changed": 6} and totals.pending == 0
    assert run_buffer(run).progress(1).groups_published == 1
    assert run_buffer(run).take_rollouts("anyone", iteration=1, max_groups=9) == []  # freed


def test_a_run_comes_back_to_a_configuration_that_another_one_set_aside(run, other):
    """Changed back in the middle of the next try."""
    resumed(run)
    put_and_publish(run, iteration=0, samples=5)
    (entry,) = ledger(run).iterations
    assert (entry.pending, entry.rejected) == (5, {"configuration_changed": 4})
    resumed(other)
    assert run_buffer(run).produced(0).is_dropped and not run_buffer(other).produced(0).is_dropped


def test_samples_are_not_rejected_for_a_run_that_set_them_aside_but_lost_the_race_to_publish(run, other):
    """Two runs at once: the second sets aside what the first trains, which then publishes all the same."""
    seal_and_publish(run, samples=6)
    for _ in range(2):
        (entry,) = ledger(run).iterations
        assert (entry.produced, entry.trained, entry.rejected) == (10, 6, {"configuration_changed": 4})
        resumed(run)  # frees what the loser left, and counts it once
        assert run_buffer(other).produced(0).is_dropped


def test_two_runs_that_start_a_new_lineage_at_once_get_one_each(run, monkeypatch):
    monkeypatch.setattr(PolicyStore, "list_objects", lambda *_: [])  # both looked before either wrote
    assert [opened(run.config, fresh=True).lineage for _ in range(3)] == [1, 2, 3]


def test_samples_of_an_unpublished_iteration_are_pending(run):
    publish(run, 2)
    put_and_publish(run, iteration=0, samples=4)
    resumed(run)
    (entry,) = campaign_ledger(run_store(run), run, []).require_balanced().iterations
    assert (entry.iteration, entry.produced, entry.pending) == (0, 4, 4)


def put_and_publish(run, *, iteration, samples):
    buffer = run_buffer(run)
    item = WorkItem(
        iteration=iteration, portion=0, policy_version=1, num_groups=1, num_samples=samples, payload=b"x"
    )
    buffer.put_work([item])
    (lease,) = buffer.lease("w", iteration=iteration, policy_version=1)
    buffer.publish(lease, [Group(group_id="g", num_samples=samples, payload=b"y")])
    buffer.settle(lease)


def seal_and_publish(run, *, samples):
    """Iteration 0 of a run, trained whole."""
    store, key = run_store(run), f"batches/000000-{run.config.digest()}"
    batch = TrainBatch(
        iteration=0, objective="clipped_policy", key=f"{key}.arrow", sha256="s", num_samples=samples,
        behavior_version=1, produced=samples, rejected={}, metrics={}, seconds={}, sealed_at=0.0,
    )  # fmt: skip
    store.put_object(f"{key}.json", batch.model_dump_json().encode())
    trained = store.manifest(1).model_copy(
        update={
            "version": 2, "parent": 1, "kind": "iteration", "iteration": 1, "batch": f"{key}.arrow",
            "num_samples": samples, "tensor_digest": "d2", "config_digest": run.config.digest(),
        }
    )  # fmt: skip
    store.commit(trained)


def test_an_older_lineage_is_gone_on_with_by_its_whole_name(run):
    plain = run.config.name
    assert [opened(run.config).lineage, opened(run.config, fresh=True).lineage] == [1, 2]
    older = opened(run.config, name=f"{plain}.0001")
    assert (older.lineage, older.config) == (1, run.config)
    assert opened(run.config, name=plain).lineage == 2
    for wrong in (".0003", ".1"):
        with pytest.raises(
            ConfigError, match=rf"one of \['{plain}.0001', '{plain}.0002'\], got '{plain}{wrong}'"
        ):
            opened(run.config, name=plain + wrong)
    with pytest.raises(ConfigError, match=rf"without a lineage where --fresh .* got {plain}\.0001"):
        opened(run.config, name=f"{plain}.0001", fresh=True)


def test_a_run_that_was_stopped_has_a_report_of_what_it_published(run, tmp_path, capsys):
    opened(run.config)
    publish(run, 2)
    where, page = ["--store", run.config.checkpoint.store, "--campaign"], tmp_path / "report.html"
    report.main([*where, run.config.name, "--to", str(page)])
    assert f"{page}: {run.campaign}, 0 of 20 iterations" in capsys.readouterr().out
    assert f"{run.campaign}" in page.read_text() and "version 1<" in page.read_text()
    with pytest.raises(SystemExit, match="got none named 'misspelt'"):
        report.main([*where, "misspelt"])


def test_an_older_lineage_has_a_report_and_a_watcher_while_a_newer_one_is_there(run, tmp_path, capsys):
    """As its newest version was made: the newer lineage runs for 7 iterations, the older ran for 20."""
    opened(run.config)
    publish(run, 2)
    opened(with_overrides(run.config, schedule__iterations=7), fresh=True)
    page = tmp_path / "report.html"
    where, plain = ["--store", run.config.checkpoint.store, "--campaign"], run.config.name
    for name, shown, iterations in (("", "0002", 7), (".0002", "0002", 7), (".0001", "0001", 20)):
        report.main([*where, plain + name, "--to", str(page)])
        assert f"{plain}.{shown}, 0 of {iterations} iterations" in capsys.readouterr().out
        assert ("version 1<" in page.read_text()) == (shown == "0001")
        versions.main(["list", *where, plain + name])
        assert capsys.readouterr().out.count("tensors") == (2 if shown == "0001" else 0)
        watch.main([*where, plain + name, "--once"])
        assert capsys.readouterr().out.startswith(f"{plain}.{shown} ")
    opened(run.config, fresh=True)
    for command in (report.main, watch.main):
        with pytest.raises(SystemExit, match=rf"one of \['{plain}.0001', .*got '{plain}.0004'. Name one"):
            command([*where, f"{plain}.0004"])
        with pytest.raises(SystemExit, match=rf"{plain}.0002 must have a version, .*--name {plain}.0002"):
            command([*where, f"{plain}.0002"])
        with pytest.raises(SystemExit, match="got none named 'misspelt'"):
            command([*where, "misspelt.0001"])


def test_versions_and_samples_of_a_lineage_that_was_never_started_are_refused_with_those_that_were(run):
    opened(run.config)
    where = ["--store", run.config.checkpoint.store, "--campaign", f"{run.config.name}.0002"]
    for command, more in ((versions.main, ["list"]), (query.main, ["--version", "0"])):
        with pytest.raises(SystemExit, match=rf"one of \['{run.config.name}.0001'\], got"):
            command([*more, *where])


def test_a_stored_configuration_that_this_release_refuses_is_named(run):
    store = run_store(run)
    refused = run.config.model_dump_json().replace('"ep":2', '"ep":3')
    store.put_object("config/abc.json", refused.encode())
    refusal = rf"{store.campaign}/config/abc\.json must be .*(?s:.)train: ep must divide .*--fresh"
    with pytest.raises(ConfigError, match=refusal):
        config_of(store, "abc")


def test_a_report_does_not_count_the_samples_of_another_folders_queue(run, tmp_path, monkeypatch):
    """Called from elsewhere, a run's relative store is another folder, whose queue it would have started."""
    elsewhere = run.model_copy(update={"config": with_overrides(run.config, checkpoint__store=str(tmp_path))})
    monkeypatch.setattr(report, "newest_run", lambda _: elsewhere)
    with pytest.raises(SystemExit, match="--store must be where the run looks for its queue, got"):
        report.main(["--store", run.config.checkpoint.store, "--campaign", run.config.name])


def test_fresh_opens_the_next_lineage_and_without_it_the_newest(run):
    lineages = [opened(run.config, fresh=fresh).lineage for fresh in (False, False, True, False)]
    assert lineages == [1, 1, 2, 2]


def test_the_effective_configuration_is_stored_by_digest(run, store_folder):
    longer = opened(run.config, iterations=7)
    stored = open_store(str(store_folder), longer.campaign).get_object(
        f"config/{longer.config.digest()}.json"
    )
    assert CampaignConfig.model_validate_json(stored).schedule.iterations == 7


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "algorithm__advantage",
            "gae",
            r"version 2 must have been trained with a critic .* got 1 iterations",
        ),
        ("train__freeze_router", True, r"may not change these: train.freeze_router was False, is True"),
    ],
)
def test_what_the_first_iteration_settled_is_refused_before_anything_is_sampled(run, field, value, words):
    """The training refused it, behind a whole iteration's samples."""
    begun = opened(run.config)
    other = with_overrides(run.config, **{field: value})
    publish(begun, 2)  # version 0 and its warm start, which settles neither
    assert opened(other).campaign == begun.campaign
    publish(begun, 3)
    with pytest.raises(ValueError, match=words):
        opened(other)
