"""A file that is stored both ways: fetched by the faster one, by measurement or by word; the same bits."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from publishing import manifest
from test_patches import dense, flipped, put_patched, write

from tasks.artifacts.errors import CorruptArtifact
from tasks.artifacts.manifest import Manifest, PatchedBlob, stored_objects
from tasks.artifacts.rates import FORGOTTEN, Rates
from tasks.artifacts.retention import Keep, carry_out, plan_retention
from tasks.artifacts.store import PolicyStore, open_store
from tasks.checkpoint_config import CheckpointConfig

MB = 1_000_000
NAME = "model.safetensors"


def choice_of(rates: Rates, *, num_patches: int = 1) -> bool:
    return rates.choose("measured", size=1000 * MB, patch_bytes=20 * MB, num_patches=num_patches).is_whole


def test_the_faster_way_is_taken_once_both_are_known(tmp_path):
    """By hand, of 1,000 MB with a patch of 20: at 1,000 MB/s the whole takes 1 s, and 0.02 s + 1,000 MB by
    the rate as a patch; two patches are applied in twice the time."""
    rates = Rates(tmp_path / "rates.json")
    assert not choice_of(rates)  # nothing is known
    rates.transferred(500 * MB, 0.5)
    assert not choice_of(rates)  # patches are not
    rates.applied(1000 * MB, 0.9)
    assert not choice_of(rates) and choice_of(rates, num_patches=2)
    slower = Rates(tmp_path / "slower.json")
    slower.transferred(500 * MB, 0.5)
    slower.applied(1000 * MB, 1.1)
    assert choice_of(slower)


def test_means_move_and_small_transfers_say_nothing(tmp_path):
    rates = Rates(tmp_path / "rates.json")
    rates.transferred(1000, 10.0)
    assert rates.transfer.mean == 0 and not (tmp_path / "rates.json").exists()
    rates.transferred(100 * MB, 1.0)
    rates.transferred(100 * MB, 2.0)  # of seconds: 0.7 x 1 + 0.3 x 2 = 1.3
    assert rates.transfer.mean == pytest.approx(100 * MB / 1.3)
    again = Rates(tmp_path / "rates.json")
    assert again.transfer == rates.transfer and again.apply.mean == 0
    (tmp_path / "rates.json").write_text('{"transfer": {"mean": ')
    assert Rates(tmp_path / "rates.json").transfer.mean == 0


def test_a_way_that_was_not_taken_for_long_is_measured_again(tmp_path):
    rates = Rates(tmp_path / "rates.json")
    rates.transferred(1000 * MB, 1.0)
    rates.applied(1000 * MB, 2.0)
    chosen = []
    for _ in range(2 * FORGOTTEN + 2):
        chosen.append(choice_of(rates))
        if chosen[-1]:
            rates.transferred(1000 * MB, 1.0)
        else:
            rates.applied(1000 * MB, 2.0)
    assert [i for i, is_whole in enumerate(chosen) if not is_whole] == [FORGOTTEN, 2 * FORGOTTEN + 1]


@pytest.fixture
def both(policy_store: PolicyStore, tmp_path: Path) -> list[bytes]:
    """Three versions of one file, the second and third stored both ways; their contents."""
    tensors, parent, contents = dense(), None, []
    for version in range(3):
        path = write(tmp_path / NAME, tensors)
        parent = put_patched(policy_store, path, parent, full_every=4, whole_beside=True)
        policy_store.commit(manifest(policy_store, version, {NAME: parent}))
        contents.append(path.read_bytes())
        tensors = flipped(tensors, version)
    return contents


def reader_of(store: PolicyStore, folder: Path, cache: Path, **options) -> PolicyStore:
    return open_store(str(folder), store.campaign, cache=cache, **options)


def test_every_way_makes_the_same_bits_and_a_line_says_which(
    policy_store, both, store_folder, tmp_path, capsys
):
    for fetch, fetched in (("patches", (1, 2)), ("whole", (3, 0))):
        reader = reader_of(policy_store, store_folder, tmp_path / fetch, fetch=fetch)
        for version in range(3):
            assert (reader.pull(version) / NAME).read_bytes() == both[version]
        received = reader.cache.received
        assert (received.full_files, received.patches) == fetched
        how = {"patches": "as patches", "whole": "whole"}[fetch]
        assert capsys.readouterr().out.count(f"{NAME}, 0.8 MB, {how}: as checkpoint.fetch says") == 2


def test_a_reader_measures_and_then_takes_the_faster_way(
    policy_store, both, store_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tasks.artifacts.rates.LEAST_BYTES", 1)
    reader = reader_of(policy_store, store_folder, tmp_path / "reader")
    reader.pull(0)
    assert reader.cache.rates.transfer.mean > 0
    assert (reader.pull(1) / NAME).read_bytes() == both[1]
    assert reader.cache.received.patches == 1 and reader.cache.rates.apply.mean > 0
    assert f"{NAME}, 0.8 MB, as patches: nothing measured yet" in capsys.readouterr().out
    again = reader_of(policy_store, store_folder, tmp_path / "reader")  # another process of this machine
    again.cache.rates.applied(1, 1e3)
    assert (again.pull(2) / NAME).read_bytes() == both[2]
    assert again.cache.received.full_files == 1 and again.cache.received.patches == 0
    assert "s as patches expected" in capsys.readouterr().out.split("MB, whole: ")[1]


def test_a_late_joiner_fetches_one_file(policy_store, both, store_folder, tmp_path, capsys):
    reader = reader_of(policy_store, store_folder, tmp_path / "reader")
    assert (reader.pull(2) / NAME).read_bytes() == both[2]
    assert (reader.cache.received.full_files, reader.cache.received.patches) == (1, 0)
    assert "whole: none of its parents is here" in capsys.readouterr().out


def test_a_version_stored_one_way_leaves_no_choice_and_says_nothing(
    policy_store, store_folder, tmp_path, capsys
):
    tensors, parent = dense(), None
    for version in range(2):
        parent = put_patched(policy_store, write(tmp_path / NAME, tensors), parent, full_every=4)
        policy_store.commit(manifest(policy_store, version, {NAME: parent}))
        tensors = flipped(tensors, version)
    assert isinstance(parent, PatchedBlob) and parent.whole is None
    reader_of(policy_store, store_folder, tmp_path / "reader").pull(1)
    assert "fetch" not in capsys.readouterr().out


def test_a_whole_file_is_part_of_its_version_alone(policy_store, both, store_folder, tmp_path):
    """Named in the manifest, refused if it is another content, and removed with its version."""
    published = policy_store.manifest(1)
    assert Manifest.model_validate_json(published.model_dump_json()) == published
    file = published.files[NAME]
    assert isinstance(file, PatchedBlob) and file.whole in stored_objects(file)
    other = policy_store.manifest(0).files[NAME]
    with pytest.raises(ValueError, match="whole must be the content"):
        PatchedBlob.model_validate(file.model_dump() | {"whole": other.model_dump()})
    carry_out(policy_store, plan_retention(policy_store, Keep(last=1, best=0, min_age_hours=0)))
    assert policy_store.bucket.head(file.whole.key) is None
    for fetch in ("patches", "whole"):
        reader = reader_of(policy_store, store_folder, tmp_path / fetch, fetch=fetch)
        assert (reader.pull(2) / NAME).read_bytes() == both[2]


def test_a_patch_that_makes_another_content_is_named_by_its_tensor(policy_store, store_folder, tmp_path):
    """Each object is what it should be, and the publisher was wrong: only the whole's hash sees it."""
    old = dense()
    new = flipped(old, 1)
    parent = put_patched(policy_store, write(tmp_path / NAME, old), None, full_every=4)
    right = put_patched(policy_store, write(tmp_path / NAME, new), parent, full_every=4)
    other = put_patched(
        policy_store, write(tmp_path / "other", old | {"layer.2": new["layer.1"]}), None, full_every=4
    )
    wrong = put_patched(policy_store, write(tmp_path / NAME, new), other, full_every=4)
    assert isinstance(right, PatchedBlob) and isinstance(wrong, PatchedBlob)
    swapped = right.model_copy(update={"patches": wrong.patches})
    policy_store.commit(manifest(policy_store, 0, {NAME: swapped}))
    reader = reader_of(policy_store, store_folder, tmp_path / "reader")
    with pytest.raises(CorruptArtifact, match=r"tensor layer\.2 must have its published content after"):
        reader.pull(0)


BOTH = {"fetch": "whole", "whole_beside": True}


@pytest.mark.parametrize("values", [{"fetch": "whole"}, {"fetch": "patches"}, BOTH | {"full_every": 1}])
def test_a_way_that_is_not_stored_is_refused_at_launch(values):
    with pytest.raises(ValueError, match=r"checkpoint\.fetch must be measured unless"):
        CheckpointConfig.model_validate(values)
    CheckpointConfig.model_validate(BOTH)


def test_a_reader_without_anything_gets_weights_that_came_back_to_the_beginning_of_their_chain(
    policy_store, store_folder, tmp_path, monkeypatch
):
    """Made of its own full file it waited for ever, for the lock that it held itself."""
    parent, tensors = None, dense()
    for version in range(3):
        path = write(tmp_path / "model.safetensors", flipped(tensors, 7) if version == 1 else tensors)
        parent = put_patched(policy_store, path, parent, full_every=4)
        policy_store.commit(manifest(policy_store, version, {path.name: parent}))
    reader = open_store(str(store_folder), policy_store.campaign, cache=tmp_path / "reader")
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: flock(fd, how | fcntl.LOCK_NB))  # nobody else locks
    assert isinstance(parent, PatchedBlob) and len(parent.patches) == 2
    assert (reader.pull(2) / path.name).read_bytes() == path.read_bytes()
