"""Versions that slime wrote are followed: only the deltas are read once the base is in the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ckptcore_versions import Publisher, Version, follow

from plugins.versions.tests.slime_files import INDEX, version_at, write_delta, write_file


def tensors(number: int) -> dict[str, np.ndarray]:
    """Return the weights of a version: one element of a matrix changes each time, and a vector in odd versions."""
    matrix = np.zeros((300, 70), np.float32)
    matrix.reshape(-1)[: number + 1] = 1
    return {"matrix": matrix, "vector": np.full(9, (number + 1) // 2, np.float32), "frozen": np.ones(3, np.float32)}


def publish(directory: Path, number: int, encoding: str = "xor") -> None:
    """Publish a full version 0, or a delta."""
    new = {name: array.tobytes() for name, array in tensors(number).items()}
    if number:
        write_delta(
            directory, number, {name: array.tobytes() for name, array in tensors(number - 1).items()}, new, encoding
        )
        return
    version = version_at(directory, 0)
    file = "model-00000-of-00001.safetensors"
    write_file(version / file, {name: ("F32", [*array.shape], new[name]) for name, array in tensors(0).items()})
    index = {"metadata": {"version": "000000"}, "weight_map": dict.fromkeys(new, file)}
    (version / INDEX).write_text(json.dumps(index))


def expect(version: Version | None, number: int) -> Version:
    """Expect a version with its weights."""
    assert version is not None and version.number == number
    for name, array in tensors(number).items():
        np.testing.assert_array_equal(version.arrays[name], array, err_msg=name)
    return version


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_versions_of_slime_are_followed(tmp_path: Path, encoding: str) -> None:
    directory = tmp_path / "weights"
    publish(directory, 0)
    with follow(directory, cache=tmp_path / "cache") as follower:
        version = expect(follower.next_version(0), 0)
        assert version.labels.run == version.labels.digest == ""
        publish(directory, 1, encoding)
        assert set(expect(follower.next_version(0), 1).changed) == {"matrix", "vector"}
        shutil.rmtree(version_at(directory, 0))  # the cache has it
        publish(directory, 2, encoding)
        publish(directory, 3, encoding)
        assert set(expect(follower.next_version(0), 3).changed) == {"matrix", "vector"}
        publish(directory, 4, encoding)
        assert set(expect(follower.next_version(0), 4).changed) == {"matrix"}


def test_a_follower_that_starts_again_reads_the_whole_chain(tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    for number in range(4):
        publish(directory, number)
        with follow(directory, cache=tmp_path / "cache") as follower:
            expect(follower.next_version(0), number)


def test_a_trainer_that_wrote_a_version_again_is_noticed(tmp_path: Path) -> None:
    """The directory has no ids of saves, so only the checksums of the new elements show that the base was another."""
    directory = tmp_path / "weights"
    for number in (0, 1):
        publish(directory, number)
    with follow(directory, cache=tmp_path / "cache") as follower:
        expect(follower.next_version(0), 1)
        old = {name: array.tobytes() for name, array in tensors(0).items()}
        other = {**tensors(0), "vector": np.full(9, 7, np.float32)}
        again = {name: array.tobytes() for name, array in other.items()}
        shutil.rmtree(version_at(directory, 1))
        write_delta(directory, 1, old, again)
        newest = {**other, "vector": np.full(9, 8, np.float32)}
        write_delta(directory, 2, again, {name: array.tobytes() for name, array in newest.items()})
        version = follower.next_version(0)
        assert version is not None
        np.testing.assert_array_equal(version.arrays["vector"], newest["vector"])


def test_arrays_that_the_next_delta_does_not_change_are_not_taken_from_a_version_that_was_written_again(
    tmp_path: Path,
) -> None:
    """No checksum of the newest delta covers them."""
    directory = tmp_path / "weights"
    for number in (0, 1):
        publish(directory, number)
    with follow(directory, cache=tmp_path / "cache") as follower:
        expect(follower.next_version(0), 1)
        first, again = tensors(0), {**tensors(1), "frozen": np.full(3, 5, np.float32)}
        newest = {**again, "vector": np.full(9, 8, np.float32)}
        shutil.rmtree(version_at(directory, 1))
        for number, (old, new) in enumerate([(first, again), (again, newest)], start=1):
            before, after = ({name: array.tobytes() for name, array in state.items()} for state in (old, new))
            write_delta(directory, number, before, after)
        version = follower.next_version(0)
        assert version is not None and version.number == 2
        for name, array in newest.items():
            np.testing.assert_array_equal(version.arrays[name], array, err_msg=name)


@pytest.mark.parametrize("place", ["same size", "other files"])
def test_a_full_version_that_was_written_again_is_not_the_base_of_the_next(tmp_path: Path, place: str) -> None:
    """No checksum covers the arrays that the delta does not change."""
    directory = tmp_path / "weights"
    publish(directory, 0)
    with follow(directory, cache=tmp_path / "cache") as follower:
        expect(follower.next_version(0), 0)
        again = {**tensors(0), "frozen": np.full(3, 5, np.float32)}
        file = version_at(directory, 0) / "model-00000-of-00001.safetensors"
        content = {name: ("F32", [*array.shape], array.tobytes()) for name, array in again.items()}
        if place == "other files":
            shutil.rmtree(version_at(directory, 0))
            file = version_at(directory, 0) / "model.safetensors"
        write_file(file, content)
        newest = {**again, "vector": np.full(9, 8, np.float32)}
        before, after = ({name: array.tobytes() for name, array in state.items()} for state in (again, newest))
        write_delta(directory, 1, before, after)
        version = follower.next_version(0)
        assert version is not None and version.number == 1
        for name, array in newest.items():
            np.testing.assert_array_equal(version.arrays[name], array, err_msg=name)


def test_versions_of_slime_and_of_a_publisher_follow_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "weights"
    for number in range(3):
        publish(directory, number)
    with follow(directory, cache=tmp_path / "cache") as follower:
        expect(follower.next_version(0), 2)
        with Publisher(directory, layout="slime") as publisher:
            for number in (3, 4):
                publisher.publish(number, tensors(number))
                expect(follower.next_version(0), number)
        for number in (5, 6):
            publish(directory, number)
            assert "frozen" not in expect(follower.next_version(0), number).changed
    assert "version 3 is written as a full version: other software wrote it" in caplog.text
