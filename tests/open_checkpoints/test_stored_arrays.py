"""Stored arrays: results of indexing, bytes read, and detection of damage and replacement."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_orbax import Zarr3Layout
from ckptcore_testing import FaultPlan, FaultyStorage, run_ranks
from ckptcore_testing.locations import await_later_times
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.builtin import local_calls
from ckptcore.builtin.local import LocalStorage
from ckptcore.context import IOOptions, PluginOptions
from ckptcore.errors import CheckpointNotFoundError, ChecksumError, CorruptCheckpointError, NotMappableError
from ckptcore.io.block_cache import RecentBlocks
from ckptcore.model import BLOCK_BYTES, Box
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from ckptcore.results import StoredArray

LAYOUTS = ["safetensors", "zarr3", "ocdbt", "dcp"]
FAST = Context(durability="none")
TRUSTING = Context(durability="none", io=IOOptions(verify=False))


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "params": {
            "a": rng.random((7, 5, 3)).astype(np.float32),
            "b": rng.random((40, 3)).astype(ml_dtypes.bfloat16),
            "scalar": np.array(3.5),
            "empty": np.zeros((3, 0)),
            "flags": np.array([True, False, True]),
        },
        "step": 7,
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    location = tmp_path_factory.mktemp("stored") / "c"
    ckptcore.save(location, state(), layout=request.param, context=FAST)
    return location


@pytest.mark.parametrize("context", [FAST, TRUSTING], ids=["verified", "trusted"])
def test_stored_arrays_have_the_attributes_and_elements_of_the_saved_ones(stored: Path, context: Context) -> None:
    with ckptcore.open(stored, context=context) as checkpoint:
        for name, array in state()["params"].items():
            stored_array = checkpoint["params"][name]
            assert isinstance(stored_array, StoredArray)
            assert (stored_array.shape, stored_array.dtype, stored_array.nbytes) == (
                array.shape,
                array.dtype,
                array.nbytes,
            )
            assert (stored_array.ndim, stored_array.size) == (array.ndim, array.size)
            whole = np.asarray(stored_array)
            assert whole.dtype == array.dtype and whole.tobytes() == array.tobytes()
            assert whole.flags.writeable and whole.flags.c_contiguous
            assert stored_array[...].tobytes() == array.tobytes()


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock of the storage an hour ahead. It does not rely on the times of files written a moment ago."""
    later = SimpleNamespace(time_ns=lambda: time.time_ns() + 3_600 * 10**9, monotonic=time.monotonic)
    monkeypatch.setattr("ckptcore.builtin.local_files.time", later)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_index_gives_the_result_of_numpy(stored: Path, long_ago: None, data: st.DataObject) -> None:
    arrays_of = state()["params"]
    name = data.draw(st.sampled_from(sorted(arrays_of)))
    array = arrays_of[name]
    index = data.draw(arrays.basic_indices(array.shape, max_dims=5, allow_newaxis=True))
    with ckptcore.open(stored, context=data.draw(st.sampled_from([FAST, TRUSTING]))) as checkpoint:
        stored_array = checkpoint["params", name]
        for is_anew in (True, False):
            if not is_anew and array.size:
                stored_array[...], stored_array[...]  # after this, all elements are cached
            result, expected = stored_array[index], array[index]
            assert type(result) is type(expected) and result.dtype == expected.dtype
            np.testing.assert_array_equal(result, expected)


def test_numpy_converts_stored_arrays(stored: Path) -> None:
    with ckptcore.open(stored, context=FAST) as checkpoint:
        array = checkpoint["params/a"]
        assert np.asarray(array, dtype=np.float64).dtype == np.float64
        with pytest.raises(ValueError, match="copy=False"):
            array.__array__(copy=False)  # as np.array(array, copy=False) of NumPy 2 does
        assert [row.shape for row in array] == [(5, 3)] * 7 and len(array) == 7
        with pytest.raises(TypeError, match="at least one axis"):
            len(checkpoint["params/scalar"])
        assert repr(array) == "<StoredArray params/a: float32[7, 5, 3]>"


ROW_BYTES = 64 << 10


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """Save an array of 16 MiB. A row has 64 KiB, and is a block."""
    array = np.arange(256 * 16384, dtype=np.int32).reshape(256, 16384)
    location = tmp_path_factory.mktemp("large") / "c"
    ckptcore.save(location, {"before": np.zeros(100, np.uint8), "w": array}, context=FAST)
    return location, array


def read_by(location: Path, context: Context, *indices: Any) -> int:
    with ckptcore.open(location, context=context) as checkpoint:
        for index in indices:
            checkpoint["w"][index]
        return checkpoint.bytes_read


def test_a_slice_reads_only_the_blocks_it_needs(large: tuple[Path, np.ndarray[Any, Any]]) -> None:
    location, _ = large
    assert read_by(location, FAST, slice(20, 24)) == 4 * ROW_BYTES
    assert read_by(location, FAST, (200, 5)) == ROW_BYTES
    assert read_by(location, FAST, (slice(4, 12), slice(0, 16))) == 8 * ROW_BYTES
    assert read_by(location, FAST, (slice(0, 256, 128), slice(0, 16))) == 2 * ROW_BYTES
    assert read_by(location, FAST, (slice(None, None, -120), 0)) == 3 * ROW_BYTES
    # Without verification, only the elements and small gaps are read.
    assert read_by(location, TRUSTING, slice(20, 24)) == 4 * 65536
    assert read_by(location, TRUSTING, (200, slice(5, 9))) == 16
    assert read_by(location, TRUSTING, (slice(0, 256, 64), slice(0, 16))) <= 4 * 128


def test_verified_blocks_are_not_read_again(large: tuple[Path, np.ndarray[Any, Any]]) -> None:
    location, array = large
    assert read_by(location, FAST, *[(20, slice(start, start + 9)) for start in range(0, 16000, 999)]) == ROW_BYTES
    with ckptcore.open(location, context=FAST) as checkpoint:
        assert checkpoint["w"] is checkpoint["w"]
        for row in range(0, 256, 3):
            np.testing.assert_array_equal(checkpoint["w"][row : row + 2], array[row : row + 2])
        assert checkpoint.bytes_read <= 1.1 * array.nbytes + BLOCK_BYTES


@pytest.mark.parametrize("is_mapped", [True, False])
def test_slices_of_verified_blocks_read_only_their_elements(
    large: tuple[Path, np.ndarray[Any, Any]], long_ago: None, is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, array = large
    if not is_mapped:
        monkeypatch.setattr("ckptcore.builtin.local_files.is_local_file_system", lambda descriptor: False)
    starts = np.random.default_rng(0).permutation(250)
    with ckptcore.open(location, context=FAST) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][:], array)
        for start in range(0, 256, 8):  # large reads by several threads do not fill the cache
            np.testing.assert_array_equal(checkpoint["w"][start : start + 8], array[start : start + 8])
        before = checkpoint.bytes_read
        for start in starts:
            np.testing.assert_array_equal(checkpoint["w"][start : start + 5], array[start : start + 5])
            np.testing.assert_array_equal(checkpoint["w"][start, ::500], array[start, ::500])
        assert checkpoint.bytes_read - before <= len(starts) * 6 * 65536
        if is_mapped:
            np.testing.assert_array_equal(checkpoint["w"][::-3, 7], array[::-3, 7])
            assert checkpoint.bytes_read == before  # all elements come from memory


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.bfloat16])
def test_elements_of_verified_rows_come_from_memory(tmp_path: Path, long_ago: None, dtype: Any) -> None:
    array = np.arange(1 << 20).reshape(64, 128, 128).astype(dtype)
    ckptcore.save(tmp_path / "c", {"w": array}, context=FAST)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        checkpoint["w"][20:24], checkpoint["w"][20:24]
        before = checkpoint.bytes_read
        assert before <= 8 * 64 << 10  # only these blocks were verified
        indices: list[Any] = [21, (22, 5), (23, 1, 2), slice(20, 24, 2), (slice(20, 24), slice(None, None, -3), 7)]
        for index in [*indices, (slice(-44, -40), slice(3, 3))]:
            result, expected = checkpoint["w"][index], array[index]
            assert type(result) is type(expected) and result.dtype == expected.dtype
            np.testing.assert_array_equal(result, expected)
        assert checkpoint.bytes_read == before


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the names of further system calls on files."""
    called: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return call(*arguments, **options)

        return noting

    for name in ("fstat", "stat", "lstat", "lseek", "preadv", "pread", "open", "readlink"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    opening = local_calls.open_without_links
    for module in ("local_calls", "local_files"):
        monkeypatch.setattr(f"ckptcore.builtin.{module}.open_without_links", noted("openat2", opening))
    return called


def test_opening_and_slicing_need_few_system_calls(
    large: tuple[Path, np.ndarray[Any, Any]], long_ago: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, array = large
    if local_calls.open_without_links("/", os.O_RDONLY) is None:
        pytest.skip("this system opens files in another way")
    looks = {"openat2": 4, "fstat": 3, "pread": 2, "preadv": 1}  # the location, the root twice, the file
    for context, more in ((FAST, {"fstat": 1}), (TRUSTING, {})):
        for _ in range(2):
            with monkeypatch.context() as patch:
                called = note_calls(patch)
                with ckptcore.open(location, context=context) as checkpoint:
                    rows = checkpoint["w"][20:24]
            assert Counter(called) == Counter(looks) + Counter(more)
            np.testing.assert_array_equal(rows, array[20:24])


@pytest.mark.parametrize(("context", "calls"), [(FAST, ["fstat"]), (TRUSTING, ["lseek"])], ids=["verified", "trusted"])
def test_a_slice_of_cached_elements_needs_one_system_call(
    large: tuple[Path, np.ndarray[Any, Any]],
    long_ago: None,
    monkeypatch: pytest.MonkeyPatch,
    context: Context,
    calls: list[str],
) -> None:
    location, array = large
    with ckptcore.open(location, context=context) as checkpoint:
        checkpoint["w"][3:5], checkpoint["w"][3:5]
        called = note_calls(monkeypatch)
        for index in (slice(3, 5), (slice(3, 5), slice(0, 16)), 4):
            rows = checkpoint["w"][index]
            assert called == calls
            called.clear()
            np.testing.assert_array_equal(rows, array[index])


def test_the_blocks_of_columns_are_verified_once(
    large: tuple[Path, np.ndarray[Any, Any]], long_ago: None, tmp_path: Path
) -> None:
    location, array = large
    with ckptcore.open(location, context=FAST) as checkpoint:
        for columns in (slice(0, 16), slice(16, 900, 7), slice(None, None, -4000), 5):
            np.testing.assert_array_equal(checkpoint["w"][:, columns], array[:, columns])
            np.testing.assert_array_equal(checkpoint["w"][200:10:-3, columns], array[200:10:-3, columns])
        assert array.nbytes <= checkpoint.bytes_read <= array.nbytes + 2 * BLOCK_BYTES
    wide = np.arange(2 * 4 * 600_000, dtype=np.int32).reshape(2, 4, 600_000)
    ckptcore.save(tmp_path / "c", {"w": wide}, context=FAST)
    indices: list[Any] = [
        (slice(None), slice(None), slice(5, 9)),
        (1, slice(None, None, 2), slice(5, None, 500_000)),
        (slice(None), 3, 7),
    ]
    for index in indices:
        with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
            for _ in range(2):  # unverified, then verified
                np.testing.assert_array_equal(checkpoint["w"][index], wide[index])
            assert checkpoint.bytes_read <= 10 * 64 << 10  # the file has 294 blocks


def test_damage_between_columns_is_detected(tmp_path: Path, long_ago: None) -> None:
    array = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024)
    ckptcore.save(tmp_path / "c", {"w": array}, context=FAST)
    file = tmp_path / "c" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[2 * BLOCK_BYTES + 5000] ^= 1
    file.write_bytes(data)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        for _ in range(2):
            with pytest.raises(ChecksumError, match=r"this is in w"):
                checkpoint["w"][:, 0:4]
        np.testing.assert_array_equal(checkpoint["w"][:400, 0:4], array[:400, 0:4])


def test_a_verified_file_is_verified_again_after_a_change(tmp_path: Path, long_ago: None) -> None:
    array = np.arange(3 * BLOCK_BYTES // 4, dtype=np.int32)
    ckptcore.save(tmp_path / "c", {"w": array}, context=FAST)
    file = tmp_path / "c" / "model.safetensors"
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        for index in (slice(262_000, 262_010), slice(262_000, 262_010), slice(0, 10), slice(0, 10)):
            np.testing.assert_array_equal(checkpoint["w"][index], array[index])
        await_later_times(tmp_path)
        with file.open("r+b") as written:
            written.seek(BLOCK_BYTES + 5000)
            written.write(b"x")
        for index in (slice(262_000, 262_010), slice(270_000, 270_010)):
            with pytest.raises(ChecksumError, match=r"this is in w"):
                checkpoint["w"][index]
        np.testing.assert_array_equal(checkpoint["w"][:10], array[:10])


def test_truncation_of_an_open_file_is_detected(tmp_path: Path, long_ago: None) -> None:
    array = np.arange(1 << 20, dtype=np.int32)
    for context in (FAST, TRUSTING):
        ckptcore.save(tmp_path / "c", {"w": array}, context=FAST, overwrite=True)
        file = tmp_path / "c" / "model.safetensors"
        with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
            for _ in range(3):  # the file is mapped after a few reads
                np.testing.assert_array_equal(checkpoint["w"][900_000:900_010], array[900_000:900_010])
            await_later_times(tmp_path)
            os.truncate(file, BLOCK_BYTES + 100)
            for index in (slice(900_000, 900_010), 900_000, slice(900_000, 900_010, 3)):
                with pytest.raises(CorruptCheckpointError):
                    checkpoint["w"][index]
            assert checkpoint["w"][0] == 0


def test_a_large_read_with_steps_equals_numpy(tmp_path: Path) -> None:
    array = np.arange(768 * 16384, dtype=np.int32).reshape(768, 16384)  # 48 MiB, more than the 32 MiB of a batch
    ckptcore.save(tmp_path / "c", {"w": array}, context=FAST)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][:, 3::700], array[:, 3::700])
        np.testing.assert_array_equal(checkpoint["w"][5:700:7, ::-3], array[5:700:7, ::-3])
        np.testing.assert_array_equal(checkpoint["w"][::40], array[::40])


def test_results_do_not_share_memory_with_caches(large: tuple[Path, np.ndarray[Any, Any]]) -> None:
    location, array = large
    for context in (FAST, TRUSTING):
        with ckptcore.open(location, context=context) as checkpoint:
            first = checkpoint["w"][3:5]
            first[...] = -1
            np.testing.assert_array_equal(checkpoint["w"][3:5], array[3:5])
            np.testing.assert_array_equal(checkpoint["w"][4], array[4])


def test_several_threads_read_concurrently(large: tuple[Path, np.ndarray[Any, Any]]) -> None:
    location, array = large
    wrong: list[int] = []

    with ckptcore.open(location, context=FAST) as checkpoint:

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for start in rng.integers(0, 250, 60):
                if not np.array_equal(checkpoint["w"][start : start + 5], array[start : start + 5]):
                    wrong.append(int(start))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_only_reads_of_the_damaged_block_fail(tmp_path: Path) -> None:
    array = np.arange(3 * BLOCK_BYTES // 4, dtype=np.int32)
    ckptcore.save(tmp_path / "c", {"w": array}, context=FAST)
    file = tmp_path / "c" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[BLOCK_BYTES + 5000] ^= 1
    file.write_bytes(data)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][:10], array[:10])
        for index in (slice(262_000, 262_010), ..., slice(None, None, 10_000)):
            with pytest.raises(ChecksumError, match=r"this is in w"):
                checkpoint["w"][index]
    with ckptcore.open(tmp_path / "c", context=TRUSTING) as checkpoint:
        assert checkpoint["w"][262_000] == array[262_000]


def test_a_truncated_file_is_detected(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.zeros(1 << 20, np.int32)}, context=FAST)
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: BLOCK_BYTES + 100])
    for context in (FAST, TRUSTING):
        with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
            assert checkpoint["w"][0] == 0
            for index in (slice(900_000, 900_010), ..., slice(None, None, 100_000)):
                with pytest.raises(CorruptCheckpointError):
                    checkpoint["w"][index]
            with pytest.raises(CorruptCheckpointError, match="too short"):
                checkpoint["w"].memory_map()


def test_a_replaced_checkpoint_is_detected(stored: Path, tmp_path: Path) -> None:
    layout = ckptcore.metadata(stored).layout
    first = np.arange(3_000_000, dtype=np.int32)
    ckptcore.save(tmp_path / "c", {"w": first, "v": first}, layout=layout, context=FAST)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][:8], first[:8])
        ckptcore.save(tmp_path / "c", {"w": first + 1, "v": first + 1}, layout=layout, overwrite=True, context=FAST)
        for name, index in (("v", slice(0, 8)), ("v", ...), ("w", slice(2_999_990, None)), ("w", slice(0, 8))):
            try:
                rows = checkpoint[name][index]
            except CheckpointNotFoundError as error:
                assert "was replaced or deleted after it was opened" in str(error)
            else:  # open files are those of the opened save
                np.testing.assert_array_equal(rows, first[index])
        with pytest.raises(CheckpointNotFoundError, match="replaced or deleted"):
            checkpoint["w"][...]


def test_a_deleted_checkpoint_is_detected(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(8)}, context=FAST)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        ckptcore.delete(tmp_path / "c")
        with pytest.raises(CheckpointNotFoundError, match="replaced or deleted"):
            checkpoint["w"][0]


def test_reads_of_a_closed_checkpoint_fail(stored: Path) -> None:
    checkpoint = ckptcore.open(stored, context=FAST)
    array = checkpoint["params/a"]
    assert array[0:2].shape == (2, 5, 3)
    checkpoint.close()
    checkpoint.close()
    for index in (slice(0, 2), slice(0, 0), 3, ...):
        with pytest.raises(ValueError, match="is closed"):
            array[index]
    with pytest.raises(ValueError, match="is closed"):
        checkpoint["params/flags"]
    with pytest.raises(ValueError, match="is closed"):
        array.memory_map()
    assert repr(checkpoint) == "<OpenCheckpoint: closed>"


class Counted:
    """A plugin whose URL ``bykey:///PATH`` is a local directory. Each read opens the object by its key."""

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"bykey": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return FaultyStorage(LocalStorage(url.removeprefix("bykey://"), options), FaultPlan())


def test_a_storage_that_keeps_no_files_open(large: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path) -> None:
    location, array = large
    context = Context(durability="none", plugins=PluginOptions(extra=[Counted()]))
    with ckptcore.open(f"bykey://{location}", context=context) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][20:24], array[20:24])
        np.testing.assert_array_equal(checkpoint["w"][::100, 5], array[::100, 5])
    ckptcore.save(tmp_path / "c", {"w": np.zeros(8)}, context=FAST)
    # Without verification, only the root shows that the checkpoint was replaced.
    trusting = Context(durability="none", plugins=PluginOptions(extra=[Counted()]), io=IOOptions(verify=False))
    with ckptcore.open(f"bykey://{tmp_path}/c", context=trusting) as checkpoint:
        ckptcore.save(tmp_path / "c", {"w": np.ones(8)}, overwrite=True, context=FAST)
        with pytest.raises(CheckpointNotFoundError, match="replaced or deleted"):
            checkpoint["w"][0:4]


def test_few_files_of_a_checkpoint_are_open_at_once(tmp_path: Path) -> None:
    state = {f"a{number}": np.full((4, 2), number) for number in range(400)}
    ckptcore.save(tmp_path / "c", state, layout="zarr3", context=FAST)
    for context in (FAST, TRUSTING):
        before = len(os.listdir("/dev/fd"))
        with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
            for _ in range(2):
                for name, array in state.items():
                    np.testing.assert_array_equal(checkpoint[name][1:3], array[1:3])
            # A storage also keeps some recently read files open.
            assert len(os.listdir("/dev/fd")) <= before + 2 * 150 + 64


def test_an_array_saved_in_slices_reads_as_one_array(tmp_path: Path) -> None:
    array = np.arange(4000, dtype=np.float32).reshape(40, 100)

    def save(rank: int, context: Context) -> None:
        box = Box((20 * rank, 0), (20 * rank + 20, 100))
        sharded = ShardedArray(array.shape, array.dtype, [ArrayShard(box, array[box.slices])])
        ckptcore.save(tmp_path / "c", {"w": sharded}, context=context)

    run_ranks(2, save, durability="none")
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][15:25, ::7], array[15:25, ::7])
        with pytest.raises(NotMappableError, match="compressed or in several pieces"):
            checkpoint["w"].memory_map()


def test_an_uncompressed_array_can_be_mapped(stored: Path) -> None:
    expected = state()["params"]
    with ckptcore.open(stored, context=FAST) as checkpoint:
        maps = {name: checkpoint["params", name].memory_map() for name in expected}
    for name, array in expected.items():
        assert maps[name].dtype == array.dtype
        np.testing.assert_array_equal(maps[name], array)
        with pytest.raises(ValueError, match="WRITEABLE"):
            maps[name].flags.writeable = True


def test_a_memory_map_outlives_its_checkpoint(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(5)}, context=FAST)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        mapped = checkpoint["w"].memory_map()
        ckptcore.save(tmp_path / "c", {"w": np.zeros(9)}, overwrite=True, context=FAST)
        with pytest.raises(CheckpointNotFoundError, match="replaced or deleted"):
            checkpoint["w"].memory_map()
    assert mapped.tolist() == [0, 1, 2, 3, 4]


def test_a_compressed_array_cannot_be_mapped(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(5)}, layout=Zarr3Layout(compression="zstd"), context=FAST)
    with ckptcore.open(tmp_path / "c", context=FAST) as checkpoint:
        assert checkpoint["w"][1:3].tolist() == [1, 2]
        with pytest.raises(NotMappableError, match="in several pieces in the layout zarr3"):
            checkpoint["w"].memory_map()


def test_an_array_on_a_storage_in_memory_cannot_be_mapped() -> None:
    ckptcore.save("memory://maps/c", {"w": np.arange(4)})
    with ckptcore.open("memory://maps/c") as checkpoint:
        assert checkpoint["w"][1:3].tolist() == [1, 2]
        with pytest.raises(NotMappableError, match="not on a local disk"):
            checkpoint["w"].memory_map()


def test_a_limited_number_of_verified_blocks_is_cached() -> None:
    blocks = RecentBlocks(32)
    for number in range(40):
        blocks.keep("a", number * BLOCK_BYTES, b"block")
        assert blocks.find("a", 0) is not None  # a block that is used stays in the cache
    assert blocks.find("a", BLOCK_BYTES) is None and blocks.find("a", 39 * BLOCK_BYTES) is not None
    assert blocks.find("b", 0) is None
    assert sum(blocks.find("a", number * BLOCK_BYTES) is not None for number in range(40)) == 32
