"""A follower yields the newest complete version, and serves the one before while a newer one is unreadable."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_versions import Version, follow
from ckptcore_versions.following import preparing as preparing_module

import ckptcore
from ckptcore.errors import (
    DirectoryInUseError,
    InvalidLocationError,
    RankFailedError,
    StorageError,
    StorageFullError,
    TreeMismatchError,
)
from ckptcore.job.agreement import Agreement
from ckptcore.model import Box
from ckptcore.training.steps import StepDirectory
from plugins.versions.tests.followed import Published, expect_equal, first_weights


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    """Return an empty directory of versions."""
    with Published(tmp_path / "weights") as versions:
        yield versions


def read(version: Version | None) -> Version:
    """Return a version that must exist."""
    assert version is not None
    return version


def test_each_version_is_yielded_with_its_arrays_and_files(published: Published, tmp_path: Path) -> None:
    with follow(published.location, cache=tmp_path / "cache") as follower:
        assert follower.next_version(0) is None
        for number in (1, 2, 5):
            weights = published.publish(number)
            version = read(follower.next_version(0))
            assert version.number == number
            expect_equal(version, weights)
            assert follower.next_version(0) is None


def test_the_first_version_lists_all_boxes_as_changed_and_the_next_only_those_that_differ(
    published: Published, tmp_path: Path
) -> None:
    with follow(published.location, cache=tmp_path / "cache") as follower:
        published.publish(1)
        assert read(follower.next_version(0)).changed == {
            "bias": (Box((0,), (5,)),),
            "layers.0.weight": (Box((0, 0), (600, 1000)),),
            "scale": (Box((), ()),),
        }
        published.publish(2)
        changed = read(follower.next_version(0)).changed
        assert set(changed) == {"layers.0.weight", "scale"}
        (box,) = changed["layers.0.weight"]
        assert box.start <= (2, 0) and box.stop >= (3, 1000) and box.size * 4 <= 1 << 20


def test_a_late_follower_skips_versions_and_lists_what_changed_in_all_of_them(
    published: Published, tmp_path: Path
) -> None:
    with follow(published.location, cache=tmp_path / "cache") as follower:
        published.publish(1)
        read(follower.next_version(0))
        published.publish(2)
        published.publish(599)  # another piece of the matrix
        version = read(follower.next_version(0))
        assert version.number == 599 and len(version.changed["layers.0.weight"]) == 2
        expect_equal(version, published.weights[599])


def test_an_iteration_ends_after_the_timeout_and_a_new_one_goes_on(published: Published, tmp_path: Path) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache", timeout=0) as follower:
        assert [version.number for version in follower] == [1]
        published.publish(2)
        assert [version.number for version in follower] == [2]


def test_a_follower_that_waits_looks_when_it_is_woken_and_ends_when_it_is_closed(
    published: Published, tmp_path: Path
) -> None:
    yielded: list[int] = []
    received = threading.Semaphore(0)
    follower = follow(published.location, cache=tmp_path / "cache", poll_seconds=3600)

    def iterate() -> None:
        for version in follower:
            yielded.append(version.number)
            received.release()

    thread = threading.Thread(target=iterate)
    thread.start()
    for number in (1, 2):
        published.publish(number)
        follower.wake()
        assert received.acquire(timeout=60)
    follower.close()
    thread.join(60)
    assert not thread.is_alive() and yielded == [1, 2]


def test_a_message_that_was_lost_is_made_up_for_by_listing(published: Published, tmp_path: Path) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache", poll_seconds=0.01) as follower:
        versions = iter(follower)
        assert next(versions).number == 1
        publishing = threading.Thread(target=published.publish, args=(2,))
        publishing.start()
        assert next(versions).number == 2
        publishing.join()


def test_start_begins_with_a_version_or_the_next_one_after_it(published: Published, tmp_path: Path) -> None:
    for number in (1, 2, 4, 5):
        published.publish(number)
    for start, expected in ((2, [2, 5]), (3, [4, 5]), (6, []), (None, [5])):
        with follow(published.location, cache=tmp_path / f"cache{start}", start=start, timeout=0) as follower:
            assert [version.number for version in follower] == expected


def test_a_damaged_version_is_named_and_the_next_readable_one_is_yielded(
    published: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with follow(published.location, cache=tmp_path / "cache") as follower:
        published.publish(1)
        before = read(follower.next_version(0))
        published.publish(2)
        _flip(Path(published.location) / "v000002" / "model.safetensors")
        assert follower.next_version(0) is None
        assert [skip.step for skip in follower.skipped] == [2]
        assert "layers/0" in follower.skipped[0].reason or "model.safetensors" in follower.skipped[0].reason
        assert "version 2 cannot be read, version 1 stays in use" in caplog.text
        expect_equal(before, published.weights[1])
        assert os.listdir(tmp_path / "cache") == ["v000001"]
        published.publish(3)
        assert read(follower.next_version(0)).number == 3
        assert follower.skipped == ()


def test_a_damaged_newest_version_does_not_hide_an_older_one(published: Published, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        published.publish(number)
    _flip(Path(published.location) / "v000003" / "model.safetensors")
    with follow(published.location, cache=tmp_path / "cache", timeout=0) as follower:
        assert [version.number for version in follower] == [2]
        assert [skip.step for skip in follower.skipped] == [3]


def test_a_damaged_version_that_is_restored_is_yielded(published: Published, tmp_path: Path) -> None:
    published.publish(1)
    file = Path(published.location) / "v000001" / "model.safetensors"
    _flip(file)
    with follow(published.location, cache=tmp_path / "cache") as follower:
        assert follower.next_version(0) is None
        _flip(file)
        assert any(follower.next_version(0) is not None for _ in range(3))


def test_a_stale_listing_does_not_lead_back_to_an_older_version(published: Published, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        published.publish(number)
    newest = Path(published.location) / "v000003"
    with follow(published.location, cache=tmp_path / "cache") as follower:
        assert read(follower.next_version(0)).number == 3
        os.rename(newest, tmp_path / "hidden")
        assert follower.next_version(0) is None
        os.rename(tmp_path / "hidden", newest)
        assert follower.next_version(0) is None
        published.publish(4)
        assert read(follower.next_version(0)).number == 4


def test_a_version_that_is_deleted_while_it_is_read_is_left_out(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(1)
    published.publish(2)
    read_files = preparing_module.Preparation._read_all

    def delete_first(self: Any) -> None:
        shutil.rmtree(os.path.join(published.location, "v000002"), ignore_errors=True)  # against the lease
        read_files(self)

    monkeypatch.setattr(preparing_module.Preparation, "_read_all", delete_first)
    with follow(published.location, cache=tmp_path / "cache", timeout=0) as follower:
        assert [version.number for version in follower] == [1]
        assert follower.skipped == ()


def test_a_version_is_leased_while_it_is_read(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        published.publish(number)
    read_files = preparing_module.Preparation._read_all
    refused: list[str] = []

    def try_to_delete(self: Any) -> None:
        with pytest.raises(ckptcore.errors.StepPinnedError) as refusal:
            published.checkpointer.delete(2)
        refused.append(str(refusal.value))
        read_files(self)

    monkeypatch.setattr(preparing_module.Preparation, "_read_all", try_to_delete)
    with follow(published.location, cache=tmp_path / "cache") as follower:
        assert read(follower.next_version(0)).number == 2
        published.checkpointer.delete(2)
    assert refused


def test_a_follower_that_starts_again_reads_nothing_that_its_cache_has(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache") as follower:
        read(follower.next_version(0))

    def refuse(self: Any) -> None:
        raise AssertionError("the cache has the version")

    monkeypatch.setattr(preparing_module.Preparation, "_read_all", refuse)
    with follow(published.location, cache=tmp_path / "cache") as follower:
        version = read(follower.next_version(0))
        expect_equal(version, published.weights[1])
        assert set(version.changed) == {"bias", "layers.0.weight", "scale"}


@pytest.mark.parametrize("damage", ["bytes", "size", "state", "other number"])
def test_a_damaged_cache_is_not_used(published: Published, tmp_path: Path, damage: str) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache") as follower:
        cached = Path(read(follower.next_version(0)).directory)
    if damage == "bytes":
        _flip(cached / "model.safetensors")
    elif damage == "size":
        os.truncate(cached / "model.safetensors", 1000)
    elif damage == "state":
        (cached / "ckptcore-version.json").write_text("{}")
    else:
        state = json.loads((cached / "ckptcore-version.json").read_text())
        state["version"]["number"] = 7
        (cached / "ckptcore-version.json").write_text(json.dumps(state))
    with follow(published.location, cache=tmp_path / "cache") as follower:
        expect_equal(read(follower.next_version(0)), published.weights[1])


def test_two_versions_stay_in_the_cache_and_arrays_of_older_ones_stay_valid(
    published: Published, tmp_path: Path
) -> None:
    with follow(published.location, cache=tmp_path / "cache") as follower:
        versions = []
        for number in range(1, 5):
            published.publish(number)
            versions.append(read(follower.next_version(0)))
            expected = [f"v{kept:06d}" for kept in (number - 1, number) if kept]
            assert sorted(os.listdir(tmp_path / "cache")) == expected
        for version in versions:
            np.testing.assert_array_equal(
                version.arrays["layers.0.weight"], published.weights[version.number]["layers"]["0"]["weight"]
            )


def test_two_followers_cannot_share_a_cache(published: Published, tmp_path: Path) -> None:
    with (
        follow(published.location, cache=tmp_path / "cache"),
        pytest.raises(DirectoryInUseError, match="give each follower a cache of its own"),
    ):
        follow(published.location, cache=tmp_path / "cache")
    follow(published.location, cache=tmp_path / "cache").close()


def test_files_of_others_in_the_cache_stay(published: Published, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "v000000").mkdir(parents=True)
    (cache / ".ckptcore-version-0123456789abcdef").mkdir()
    (cache / "notes.txt").touch()
    published.publish(1)
    with follow(published.location, cache=cache) as follower:
        read(follower.next_version(0))
    assert sorted(os.listdir(cache)) == ["notes.txt", "v000000", "v000001"]


@pytest.mark.parametrize("cache", ["weights", "cache"])
def test_a_cache_with_versions_that_no_follower_wrote_is_refused(
    published: Published, tmp_path: Path, cache: str
) -> None:
    """Also if the cache is the directory of the versions themselves."""
    published.publish(1)
    (tmp_path / "cache" / "v000001").mkdir(parents=True)
    (tmp_path / "cache" / "v000001" / "model.safetensors").touch()
    before = sorted(tmp_path.rglob("v000001/*"))
    with (
        follow(published.location, cache=tmp_path / cache) as follower,
        pytest.raises(StorageError, match="v000001 has the name of a version, and no follower wrote it"),
    ):
        follower.next_version(0)
    assert sorted(tmp_path.rglob("v000001/*")) == before
    assert ckptcore.verify(f"{published.location}/v000001").state == "sound"


def test_a_cache_that_was_removed_is_not_taken_for_a_damaged_version(published: Published, tmp_path: Path) -> None:
    with follow(published.location, cache=tmp_path / "cache") as follower:
        published.publish(1)
        before = read(follower.next_version(0))
        shutil.rmtree(tmp_path / "cache")
        published.publish(2)
        with pytest.raises(StorageError, match="the cache, was removed"):
            follower.next_version(0)
        assert follower.skipped == ()
        np.testing.assert_array_equal(before.arrays["bias"], published.weights[1]["bias"])


def test_a_cache_is_a_local_directory(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidLocationError, match="cache='s3://bucket/cache': expected a directory on a local disk"):
        follow(published.location, cache="s3://bucket/cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    published.publish(1)
    with follow(published.location, cache="~/cache") as follower:
        assert read(follower.next_version(0)).directory == str(tmp_path / "home" / "cache" / "v000001")


def test_a_full_disk_is_an_error_and_the_version_before_stays(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache", timeout=0) as follower:
        before = read(follower.next_version(0))
        published.publish(2)

        def refuse(descriptor: int, nbytes: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(preparing_module, "allocate", refuse)
            with pytest.raises(StorageFullError, match="file system is full"):
                next(iter(follower))
        assert os.listdir(tmp_path / "cache") == ["v000001"]
        expect_equal(before, published.weights[1])
        assert [version.number for version in follower] == [2]


def test_a_new_run_with_lower_numbers_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that began again in an emptied directory would otherwise never be followed, without a word."""
    place = tmp_path / "weights"
    with follow(place, cache=tmp_path / "cache") as follower:
        for number in (7, 3):
            shutil.rmtree(place, ignore_errors=True)
            with Published(place) as published:
                published.publish(number)
            if number == 7:
                assert read(follower.next_version(0)).number == 7
                assert follower.next_version(0) is None and "newest version" not in caplog.text
        for _ in range(2):
            assert follower.next_version(0) is None
    assert caplog.text.count("is 3, and version 7 stays in use") == 1
    with follow(place, cache=tmp_path / "cache") as follower:
        expect_equal(read(follower.next_version(0)), published.weights[3])


def test_a_directory_without_versions_any_more_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before there was one: a follower may begin before the trainer."""
    place = tmp_path / "weights"
    with follow(place, cache=tmp_path / "cache") as follower:
        assert follower.next_version(0) is None and not caplog.text
        with Published(place) as published:
            published.publish(1)
        version = read(follower.next_version(0))
        shutil.rmtree(place)
        for _ in range(2):
            assert follower.next_version(0) is None
        assert caplog.text.count("has no versions any more, and version 1 stays in use") == 1
        expect_equal(version, published.weights[1])
        with Published(place) as again:
            again.publish(2)
        expect_equal(read(follower.next_version(0)), again.weights[2])


def test_a_storage_that_fails_for_a_while_is_waited_for(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache", poll_seconds=0.01) as follower:
        read(follower.next_version(0))
        published.publish(2)
        failures = 3
        reload = StepDirectory.reload

        def fail_three_times(self: StepDirectory, agreement: Agreement) -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise StorageError("the network is down")
            reload(self, agreement)

        monkeypatch.setattr(StepDirectory, "reload", fail_three_times)
        with pytest.raises(StorageError, match="network is down"):
            follower.next_version(0)
        assert read(follower.next_version()).number == 2


def test_a_storage_that_fails_at_first_is_an_error(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: StepDirectory, agreement: Agreement) -> None:
        raise StorageError("no such bucket")

    monkeypatch.setattr(StepDirectory, "reload", fail)
    with (
        follow(published.location, cache=tmp_path / "cache") as follower,
        pytest.raises(StorageError, match="no such bucket"),
    ):
        follower.next_version()


def test_a_follower_needs_the_tree_that_its_abstract_tree_states(published: Published, tmp_path: Path) -> None:
    published.publish(1)
    like = {**first_weights(), "bias": np.zeros(6)}
    with (
        follow(published.location, cache=tmp_path / "cache", like=like) as follower,
        pytest.raises(TreeMismatchError, match="bias"),
    ):
        follower.next_version(0)
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout", "5"),
        ("timeout", True),
        ("timeout", -1),
        ("timeout", float("nan")),
        pytest.param("timeout", 10**400, id="timeout-huge"),
        ("poll_seconds", "1"),
        ("poll_seconds", 0),
        ("poll_seconds", float("inf")),
        ("start", "7"),
        ("step_names", "v"),
    ],
)
def test_an_argument_of_a_wrong_type_or_value_is_refused_by_its_name(option: str, value: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises((TypeError, ValueError), match=f"{option}=.*: expected"):
        follow(tmp_path / "weights", cache=tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()
    if option == "timeout":
        with (
            follow(tmp_path / "weights", cache=tmp_path / "cache") as follower,
            pytest.raises((TypeError, ValueError), match="timeout=.*: expected"),
        ):
            follower.next_version(value)


def test_a_checkpoint_is_no_directory_of_versions(published: Published, tmp_path: Path) -> None:
    published.publish(1)
    with pytest.raises(InvalidLocationError):
        follow(Path(published.location) / "v000001", cache=tmp_path / "cache").next_version(0)


def test_an_adapter_alone_is_read(published: Published, tmp_path: Path) -> None:
    published.publish(1)
    with follow(published.location, cache=tmp_path / "cache", select=ckptcore.select.names("bias")) as follower:
        version = read(follower.next_version(0))
        assert set(version.arrays) == {"bias"}
        assert set(ckptcore.load(version.directory)) == {"bias"}


def test_the_processes_of_a_job_yield_the_same_versions(published: Published, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        published.publish(number)

    def run(rank: int, context: ckptcore.Context) -> list[int]:
        with follow(published.location, cache=tmp_path / f"cache{rank}", timeout=0, context=context) as follower:
            numbers = [version.number for version in follower]
            if rank == 0:
                published.publish(4)
            return [*numbers, read(follower.next_version(60)).number]

    assert run_ranks(2, run) == [[3, 4], [3, 4]]


def test_a_version_that_one_process_cannot_prepare_is_yielded_by_none(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(1)
    read_files = preparing_module.Preparation._read_all

    def refuse(self: Any) -> None:
        if self._cache.directory.endswith("cache1"):
            raise StorageFullError("no space is left")
        read_files(self)

    monkeypatch.setattr(preparing_module.Preparation, "_read_all", refuse)

    def run(rank: int, context: ckptcore.Context) -> type[BaseException]:
        with (
            follow(published.location, cache=tmp_path / f"cache{rank}", context=context) as follower,
            pytest.raises((StorageFullError, RankFailedError)) as failure,
        ):
            follower.next_version(0)
        return failure.type

    assert run_ranks(2, run) == [RankFailedError, StorageFullError]
    assert os.listdir(tmp_path / "cache0") == []


def _flip(file: Path) -> None:
    """Flip a bit in the last half of a file."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
