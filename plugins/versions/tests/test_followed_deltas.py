"""A follower reads the deltas since its version, of the boxes that it needs, and notices every damage."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.faulty_storage import with_faults, with_storage
from ckptcore_testing.locations import objects_at
from ckptcore_versions import Follower, Publisher, Version, follow
from ckptcore_versions.deltas.chunks import MAX_CHUNK_BYTES
from ckptcore_versions.following import local_files, patching, preparing
from ckptcore_versions.following.cache import Cache, CachedVersion, complete_versions
from ckptcore_versions.following.patching import FilePatching

import ckptcore
from ckptcore import ShardedArray
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.threads import IOThreads
from ckptcore.model import Box, HostArray
from ckptcore.plugins import installed_plugins
from ckptcore.policies import LatestN
from ckptcore.protocols import StorageBackend, StorageOptions
from plugins.versions.tests.followed import TRAINED_SHAPE, expect_equal, trained


class Counted:
    """A directory of versions in memory, whose reads are counted.

    Attributes:
        location: its URL.
        context: the options for a follower.
    """

    def __init__(self, name: str) -> None:
        """Begin at 0 bytes."""
        self.location = f"memory://{name}/weights"
        self.plan = FaultPlan()
        self.context = with_storage(ckptcore.Context(), "memory", functools.partial(_counted, self.plan))

    def bytes_read(self) -> int:
        """Return the bytes that were read since the last call."""
        nbytes, self.plan.bytes_read = self.plan.bytes_read, 0
        return nbytes


def _counted(plan: FaultPlan, url: str, options: StorageOptions) -> StorageBackend:
    return with_faults(installed_plugins().storage("memory")(url, options), plan)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Counted:
    """Return an empty directory in memory."""
    return Counted(request.node.name.translate(str.maketrans("[ ", "--", "]")))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """Return a publisher to the directory ``weights``."""
    with Publisher(tmp_path / "weights") as versions:
        yield versions


def read(version: Version | None, number: int) -> Version:
    """Return a version that must exist, with its weights."""
    assert version is not None and version.number == number
    expect_equal(version, trained(number))
    return version


@pytest.mark.parametrize("layout", ["deltas", "slime"])
def test_arrays_may_be_tied_and_untied(layout: str, tmp_path: Path) -> None:
    """Also if the follower skips the versions in which they were tied."""
    first, second = np.arange(60_000, dtype=np.float32), np.arange(60_000, dtype=np.float32) * 2
    changed = first.copy()
    changed[7] = -1
    states = [
        {"a": first, "b": second},
        {"a": first, "b": first},
        {"a": changed, "b": changed},
        {"a": changed, "b": changed.copy()},
        {"a": changed, "b": second},
    ]
    jumps = list(itertools.combinations(range(len(states)), 2))
    with Publisher(tmp_path / "weights", layout=layout) as versions, ExitStack() as stack:
        followers = [stack.enter_context(follow(tmp_path / "weights", cache=tmp_path / f"{jump}")) for jump in jumps]
        memories = [{name: np.zeros(60_000, np.float32) for name in "ab"} for _ in jumps]
        for number, state in enumerate(states):
            versions.publish(number, state)
            for jump, follower, memory in zip(jumps, followers, memories, strict=True):
                if number in jump:
                    version = follower.next_version()
                    assert version is not None
                    version.load_into(memory)
                    for name, array in state.items():
                        np.testing.assert_array_equal(memory[name], array, f"{name} at {number} of {jump}")


def test_only_the_deltas_since_the_version_before_are_read(counted: Counted, tmp_path: Path) -> None:
    whole = sum([array.nbytes for array in trained(0).values()])
    with (
        Publisher(counted.location) as publisher,
        follow(counted.location, cache=tmp_path / "cache", context=counted.context) as follower,
    ):
        publisher.publish(0, trained(0))
        read(follower.next_version(0), 0)
        assert whole <= counted.bytes_read() <= 1.01 * whole
        for number in (1, 2, 3):
            publisher.publish(number, trained(number))
        version = read(follower.next_version(0), 3)
        assert counted.bytes_read() < 0.06 * whole
        assert set(version.changed) == {"matrix", "vector"}
        assert sum([box.size for box in version.changed["matrix"]]) == TRAINED_SHAPE[0] * TRAINED_SHAPE[1]


def test_checksums_of_a_version_are_computed_while_it_is_written(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only blocks that no window has as a whole are read again."""
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal((2048, 1023), np.float32) for name in ("a", "b")}
    publisher.publish(0, weights)
    with follow(tmp_path / "weights", cache=tmp_path / "cache") as follower:
        assert follower.next_version(0) is not None
        for array in weights.values():
            array[:, ::100] += 1
        publisher.publish(1, weights)
        read_again = []

        def read_into(descriptor: int, path: str, offset: int, buffer: memoryview) -> None:
            read_again.append(len(buffer))
            patching.read_into(descriptor, path, offset, buffer)

        monkeypatch.setattr(local_files, "read_into", read_into)
        assert follower.next_version(0) is not None
        whole = sum([array.nbytes for array in weights.values()])
        assert 0 < sum(read_again) <= whole // 7
    newest, _ = complete_versions(str(tmp_path / "cache"))
    assert newest.version.number == 1 and newest.is_intact(IOThreads())


def test_a_late_joiner_reads_the_chain_and_a_follower_that_starts_again_what_it_lacks(
    counted: Counted, tmp_path: Path
) -> None:
    whole = sum([array.nbytes for array in trained(0).values()])
    with Publisher(counted.location) as publisher:
        for number in range(4):
            publisher.publish(number, trained(number))
        with follow(counted.location, cache=tmp_path / "cache", context=counted.context) as follower:
            read(follower.next_version(0), 3)
            assert whole <= counted.bytes_read() < 1.2 * whole
        publisher.publish(4, trained(4))
        with follow(counted.location, cache=tmp_path / "cache", context=counted.context) as follower:
            version = read(follower.next_version(0), 4)
            assert set(version.changed) == {"matrix", "vector", "frozen"}
            assert counted.bytes_read() < 0.03 * whole


def test_a_full_version_is_compared_with_the_version_before(publisher: Publisher, tmp_path: Path) -> None:
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        publisher.publish(0, trained(0))
        read(follower.next_version(0), 0)
        publisher.publish(1, trained(1), full=True)
        assert set(read(follower.next_version(0), 1).changed) == {"matrix", "vector"}
        publisher.publish(2, trained(2))
        assert set(read(follower.next_version(0), 2).changed) == {"matrix", "vector"}


def test_labels_come_with_a_version(tmp_path: Path) -> None:
    with (
        Publisher(tmp_path / "weights", run="grpo-7") as publisher,
        follow(publisher.directory, cache=tmp_path / "cache") as follower,
    ):
        publisher.publish(3, trained(3), step=1200)
        labels = read(follower.next_version(0), 3).labels
        assert (labels.run, labels.number, labels.step) == ("grpo-7", 3, 1200)
        assert len(labels.digest) == 64


def test_only_changed_chunks_are_written_into_weights(publisher: Publisher, tmp_path: Path) -> None:
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        weights = trained(0)
        publisher.publish(0, weights)
        served = {name: np.zeros_like(array) for name, array in weights.items()}
        read(follower.next_version(0), 0).load_into(served)
        changed = {**weights, "matrix": weights["matrix"].copy()}
        changed["matrix"][700, 3] = 9
        publisher.publish(1, changed)
        version = follower.next_version(0)
        assert version is not None
        version.load_into(served)
        (box,) = version.changed["matrix"]
        assert version.written_bytes == box.size * 4 <= MAX_CHUNK_BYTES
        np.testing.assert_array_equal(served["matrix"], changed["matrix"])


def test_changed_chunks_are_joined_across_the_columns_of_large_arrays(publisher: Publisher, tmp_path: Path) -> None:
    """Few boxes are copied fast."""
    shape = (2048, 2052)  # 16 MiB and more, in chunks of some columns
    weights = {"matrix": np.zeros(shape, np.float32)}
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        publisher.publish(0, weights)
        assert follower.next_version(0) is not None
        first, second = weights["matrix"] + 1, weights["matrix"] + 1
        second[0, 0] = second[-1, -1] = 2
        publisher.publish(1, {"matrix": first})
        version = follower.next_version(0)
        assert version is not None and version.changed == {"matrix": (Box.whole(shape),)}
        publisher.publish(2, {"matrix": second})
        version = follower.next_version(0)
        assert version is not None
        top, bottom = version.changed["matrix"]
        assert (top.start, bottom.stop) == ((0, 0), shape)
        assert top.stop[1] < shape[1] and bottom.start[1] > 0
        np.testing.assert_array_equal(version.arrays["matrix"], second)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_pages_of_a_prepared_version_are_in_memory(publisher: Publisher, tmp_path: Path) -> None:
    """The engine pauses for the copy alone, without page faults."""
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("the system cannot enter pages")
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        for number in range(2):
            publisher.publish(number, trained(number))
            version = follower.next_version(0)
            assert version is not None
            path = Path(version.directory) / "model.safetensors"
            mapped = Path("/proc/self/smaps").read_text().split(f"{os.path.realpath(path)}\n")[1]
            found = re.search(r"^Rss: +([0-9]+) kB", mapped, re.MULTILINE)
            assert found is not None and int(found[1]) * 1024 >= path.stat().st_size


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing"])
def test_a_damaged_delta_is_named_and_the_version_before_stays(
    publisher: Publisher, tmp_path: Path, damage: str
) -> None:
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        for number in (0, 1):
            publisher.publish(number, trained(number))
            before = read(follower.next_version(0), number)
        publisher.publish(2, trained(2))
        publisher.publish(3, trained(3))
        at = Path(publisher.directory) / "v000002"
        (delta,) = at.glob("deltas.*")
        if damage == "bit":
            content = bytearray(delta.read_bytes())
            content[len(content) // 2] ^= 1
            delta.write_bytes(content)
        elif damage == "truncated":
            os.truncate(delta, 1000)
        else:
            delta.unlink()
        assert follower.next_version(0) is None
        assert [skip.step for skip in follower.skipped] == [2, 3]
        assert any("v000002" in skip.reason for skip in follower.skipped)
        read(before, 1)
        assert sorted(os.listdir(tmp_path / "cache")) == ["v000000", "v000001"]
        publisher.publish(4, trained(4), full=True)
        read(follower.next_version(0), 4)


def test_a_version_whose_base_was_replaced_is_left_out(publisher: Publisher, tmp_path: Path) -> None:
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        publisher.publish(1, trained(1))
        read(follower.next_version(0), 1)
        for number in (2, 3):
            publisher.publish(number, trained(number))
        os.rename(Path(publisher.directory) / "v000002", tmp_path / "moved")
        ckptcore.save(Path(publisher.directory) / "v000002", trained(2))
        read(follower.next_version(0), 2)
        assert follower.next_version(0) is None
        assert [skip.step for skip in follower.skipped] == [3]
        assert "v000002" in follower.skipped[0].reason and "replaced by another save" in follower.skipped[0].reason


@pytest.mark.parametrize("position", [-5, 100_000])
def test_damaged_files_of_the_version_before_are_noticed_and_everything_is_read_again(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """In elements that the delta changes, and in elements that it does not."""
    present: list[list[str]] = []
    begin = Cache.begin

    def watched(cache: Cache, number: int) -> str:
        present.append(os.listdir(cache.directory))
        return begin(cache, number)

    monkeypatch.setattr(Cache, "begin", watched)
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        publisher.publish(0, trained(0))
        file = Path(read(follower.next_version(0), 0).directory) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[position] ^= 1
        with file.open("r+b") as stream:
            stream.write(content)
        publisher.publish(1, trained(1))
        read(follower.next_version(0), 1)
    assert present == [[], ["v000000"], ["v000000"]]  # the second attempt has the space of the first


@pytest.mark.parametrize("reads", ["FilePatching.write", "CachedVersion.verify"])
def test_a_base_that_is_truncated_while_it_is_read_is_an_error(
    reads: str, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a mapped file instead kills the process. So does a failing disk."""
    owner, name = reads.split(".")
    kind: Any = {"FilePatching": FilePatching, "CachedVersion": CachedVersion}[owner]
    read_file: Any = getattr(kind, name)
    errors: list[str] = []
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        publisher.publish(0, trained(0))
        base = Path(read(follower.next_version(0), 0).directory) / "model.safetensors"

        def truncated(*arguments: Any) -> None:
            os.truncate(base, 4096)
            try:
                read_file(*arguments)
            except CorruptCheckpointError as error:
                errors.append(str(error))
                raise

        monkeypatch.setattr(kind, name, truncated)
        publisher.publish(1, trained(1))
        read(follower.next_version(0), 1)  # everything is read again
    assert len(errors) == 1 and f"{base} ends before" in errors[0]


def test_a_version_whose_base_was_deleted_is_read_if_the_cache_has_the_base(
    publisher: Publisher, tmp_path: Path
) -> None:
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        for number in (0, 1):
            publisher.publish(number, trained(number))
        read(follower.next_version(0), 1)
        publisher.publish(2, trained(2))
        os.rename(Path(publisher.directory) / "v000000", tmp_path / "moved")
        read(follower.next_version(0), 2)
    with follow(publisher.directory, cache=tmp_path / "other") as follower:
        assert follower.next_version(0) is None
        assert {skip.step for skip in follower.skipped} == {1, 2}


def test_an_array_that_is_added_is_read(publisher: Publisher, tmp_path: Path) -> None:
    with follow(publisher.directory, cache=tmp_path / "cache") as follower:
        publisher.publish(0, trained(0))
        read(follower.next_version(0), 0)
        weights = {**trained(1), "adapter": np.ones((3, 3))}
        publisher.publish(1, weights)
        version = follower.next_version(0)
        assert version is not None and set(version.changed) == set(weights)
        expect_equal(version, weights)


ROWS = 3 << 12
"""Rows of 4 KiB, 48 MiB in all: what a process wrote has many more bytes than a block of checksums."""


def test_three_followers_read_their_boxes_of_the_deltas_of_four_processes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=(ROWS, 1024)).astype(np.float32)
    second = first + rng.normal(scale=1e-3, size=first.shape).astype(np.float32)
    location = "memory://four-publish-and-three-follow/weights"

    def publish(rank: int, context: ckptcore.Context) -> None:
        own = slice(rank * ROWS // 4, (rank + 1) * ROWS // 4)
        with Publisher(location, context=context) as publisher:
            for number, matrix in enumerate((first, second)):
                part = ShardedArray.part(matrix[own], (own.start, 0), matrix.shape)
                publisher.publish(number, {"matrix": part})

    def serve(rank: int, context: ckptcore.Context) -> list[int]:
        plan = FaultPlan()
        counted = with_storage(context, "memory", functools.partial(_counted, plan))
        box = Box((rank * ROWS // 3, 0), ((rank + 1) * ROWS // 3, 1024))
        like = {"matrix": ShardedArray(first.shape, np.float32, [ArrayShard(box)])}
        read_bytes = []
        cache = tmp_path / f"cache{rank}"
        with follow(location, cache=cache, like=like, start=0, timeout=0, context=counted) as follower:
            for version, matrix in zip(follower, (first, second), strict=True):
                array: Any = version.arrays["matrix"]
                (shard,) = array.shards
                np.testing.assert_array_equal(shard.elements, matrix[box.slices])
                read_bytes.append(plan.bytes_read)
                plan.bytes_read = 0
        return read_bytes

    run_ranks(4, publish)
    of_full, of_delta = map(sum, zip(*run_ranks(3, serve), strict=True))
    assert first.nbytes <= of_full <= 1.05 * first.nbytes
    encoded = sum([len(data) for key, data in objects_at(f"{location}/v000001").items() if key.startswith("deltas.")])
    assert encoded <= of_delta <= 1.05 * encoded


@pytest.mark.slow
def test_a_thousand_versions_are_followed_by_some_that_join_late(tmp_path: Path) -> None:
    context = ckptcore.Context(durability="none")
    weights = {"w": np.zeros(1000, np.float32), "b": np.arange(10.0)}
    chance = random.Random(0)
    followers: list[Follower] = []
    yielded = 0
    with Publisher(tmp_path / "weights", full_every=50, keep=LatestN(3), context=context) as publisher:
        for number in range(1000):
            weights["w"][number % 1000] = number
            publisher.publish(number, weights)
            if number % 200 == 77:
                followers.append(follow(publisher.directory, cache=tmp_path / f"cache{number}", context=context))
            for follower in followers:
                if chance.random() < 0.5:
                    version = follower.next_version(0)
                    assert version is not None and version.number == number
                    np.testing.assert_array_equal(version.arrays["w"], weights["w"])
                    yielded += 1
        for follower in followers:
            follower.close()
    assert yielded > 1000
    for number in range(77, 1000, 200):
        assert len(os.listdir(tmp_path / f"cache{number}")) == 2


def test_an_object_of_a_delta_is_read_by_one_request(counted: Counted, tmp_path: Path) -> None:
    """A request for each of its chunks would take longer than to decode them."""
    weights = {f"matrix{number}": np.zeros((600, 400), np.float32) for number in range(20)}
    with (
        Publisher(counted.location) as publisher,
        follow(counted.location, cache=tmp_path / "cache", context=counted.context) as follower,
    ):
        for number in range(2):
            publisher.publish(number, weights)
            del counted.plan.operations[:]
            version = follower.next_version(0)
            assert version is not None
            expect_equal(version, weights)
            weights = {name: matrix + (np.arange(400) % 50 == 0) for name, matrix in weights.items()}
            weights = {name: matrix.astype(np.float32) for name, matrix in weights.items()}
    keys = [key for operation in counted.plan.operations for key in operation.keys]
    assert len([key for key in keys if "deltas." in key]) == 1


@pytest.mark.parametrize("is_large", [False, True])
def test_chunks_of_any_boxes_are_applied(is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes hold columns, and two followers rows: neither whole chunks nor adjacent elements.

    A window that is too large for memory is written into the mapped file.
    """
    if is_large:
        monkeypatch.setattr(preparing, "LARGEST_WINDOW_BYTES", 1000)
    rng = np.random.default_rng(0)
    states = [{"cube": rng.normal(size=(7, 300, 500)).astype(np.float32), "few": np.zeros(3)}]
    for number in range(1, 4):
        cube = states[-1]["cube"].copy()
        cube[:, number * 50 :: 7, 3 * number :: 5] += 1
        states.append({"cube": cube, "few": states[-1]["few"] + (number == 2)})
    location = str(tmp_path / "weights")

    def publish(number: int, rank: int, context: ckptcore.Context) -> None:
        own = states[number]["cube"][:, :, rank * 250 : (rank + 1) * 250]
        part = ShardedArray.part(own, (0, 0, rank * 250), (7, 300, 500))
        with Publisher(location, context=context) as publisher:
            publisher.publish(number, {"cube": part, "few": states[number]["few"]})

    followed = []
    with ExitStack() as stack:
        for rank, steps in itertools.product(range(3), [(0, 1, 2, 3), (0, 2, 3), (1, 3)]):
            box = Box.whole((7, 300, 500)) if rank == 2 else Box((0, 110 * rank, 0), (7, 110 * rank + 190, 500))
            like = {"cube": ShardedArray((7, 300, 500), np.float32, [ArrayShard(box)]), "few": np.zeros(3)}
            follower = stack.enter_context(follow(location, cache=tmp_path / f"cache{rank}{steps}", like=like))
            followed.append((follower, box, steps))
        for number, state in enumerate(states):
            run_ranks(2, functools.partial(publish, number))
            for follower, box, steps in followed:
                if number in steps:
                    version = follower.next_version(0)
                    assert version is not None and version.number == number
                    array: Any = version.arrays["cube"]
                    elements = array.shards[0].elements if isinstance(array, ShardedArray) else array
                    np.testing.assert_array_equal(elements, state["cube"][box.slices])
                    np.testing.assert_array_equal(version.arrays["few"], state["few"])


def follow_both(
    counted: Counted, tmp_path: Path, first: Mapping[str, HostArray], second: Mapping[str, HostArray]
) -> tuple[Version, float]:
    """Publish and follow two versions. Return the second, and the bytes read for it divided by those stored."""
    with (
        Publisher(counted.location) as publisher,
        follow(counted.location, cache=tmp_path / "cache", context=counted.context) as follower,
    ):
        for number, weights in enumerate((first, second)):
            publisher.publish(number, weights)
            counted.bytes_read()
            version = follower.next_version(0)
            assert version is not None
            expect_equal(version, weights)
    stored = sum([len(data) for data in objects_at(f"{counted.location}/v000001").values()])
    return version, counted.bytes_read() / stored


def test_the_deltas_of_many_arrays_are_read_once(counted: Counted, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = {f"matrix{number}": rng.normal(size=(1024, 512)).astype(np.float32) for number in range(12)}
    second = {name: matrix + (np.arange(512) % 50 == 0).astype(np.float32) for name, matrix in first.items()}
    _, share = follow_both(counted, tmp_path, first, second)
    assert share <= 1.05


@pytest.mark.parametrize("files", [1, 4, 10])
@pytest.mark.parametrize("limits", ["usual", "several batches", "nothing is kept"])
def test_a_delta_of_several_local_files_is_read_once(
    files: int, limits: str, counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects have the arrays stripe by stripe. Without room to keep an object, it is read for each batch."""
    rng = np.random.default_rng(0)
    first = {f"matrix{number}": rng.normal(size=(768, 512)).astype(np.float32) for number in range(20)}
    second = {name: np.where(rng.random(matrix.shape) < 0.1, -matrix, matrix) for name, matrix in first.items()}
    nbytes = sum([matrix.nbytes for matrix in first.values()])
    limited = functools.partial(SafetensorsLayout, max_file_bytes=nbytes // files)
    monkeypatch.setattr(local_files, "SafetensorsLayout", limited)
    if limits != "usual":
        monkeypatch.setattr(patching, "_ENCODED_BYTES", 100_000)
        monkeypatch.setattr(patching, "_KEPT_SHARE", 1 if limits == "several batches" else nbytes)
    version, share = follow_both(counted, tmp_path, first, second)
    assert len(list(Path(version.directory).glob("*.safetensors"))) == files
    assert limits == "nothing is kept" or share <= 1.02
