"""The local storage on systems without fast or atomic operations, and reads that bypass the page cache."""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import ckptcore
from ckptcore.builtin import local, local_calls, local_files, local_mounts
from ckptcore.builtin.local import LocalStorage, open_local
from ckptcore.builtin.local_calls import open_inside
from ckptcore.builtin.local_files import ColdReader
from ckptcore.errors import (
    AtomicityError,
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
)
from ckptcore.protocols import IF_ABSENT, StorageOptions

SIZE = (5 << 20) + 777


@functools.cache
def pattern(nbytes: int) -> bytes:
    """Return bytes that differ at different positions."""
    return np.random.default_rng(0).bytes(nbytes)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return open_local(str(tmp_path), StorageOptions())


# --- renames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_the_storage_works_without_atomic_renames(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(local_calls, "c_function", lambda *_: refuse)
    check_without_atomic_renames(storage)


def test_the_storage_works_without_functions_of_system(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_calls, "c_function", lambda *_: None)
    check_without_atomic_renames(storage)


def test_a_run_replaces_steps_by_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keras and TorchTitan save the same steps again."""
    monkeypatch.setattr(local_calls, "c_function", lambda *_: None)
    with ckptcore.Checkpointer(tmp_path) as run:
        for number in (1, 2, 3):
            for step in (1, 2):
                run.save_blocking(step, {"n": number}, overwrite="best-effort")
                assert run.load(step) == {"n": number}
    assert caplog.text.count("so a checkpoint is replaced by two renames") == 1
    with pytest.raises(AtomicityError):
        ckptcore.save(tmp_path / "1", {"n": 4}, overwrite=True)


def check_without_atomic_renames(storage: LocalStorage) -> None:
    storage.put("a/b", b"1", condition=IF_ABSENT)
    with pytest.raises(ConditionFailedError):
        storage.put("a/b", b"2", condition=IF_ABSENT)
    storage.put("c/d", b"2")
    with pytest.raises(AtomicityError, match="nothing was changed"):
        storage.exchange("a", "c")
    with pytest.raises(ConditionFailedError):
        storage.rename("a", "c")
    storage.rename("a", "e")
    assert {key: storage.get(key) for key in storage.list()} == {"c/d": b"2", "e/b": b"1"}


def test_an_exchange_raises_other_errors_unchanged(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EACCES)
        return -1

    storage.put("a/b", b"1")
    storage.put("c/d", b"2")
    monkeypatch.setattr(local_calls, "c_function", lambda *_: refuse)
    with pytest.raises(OSError, match="Permission denied"):
        storage.exchange("a", "c")


# --- allocation and early writeback -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [None, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_allocation_and_writeback(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    def refuse(*_: int) -> int:
        assert number is not None
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(local_calls, "c_function", lambda *_: refuse if number else None)
    writer = storage.open_writer("a", SIZE)
    for start in range(0, SIZE, 1 << 20):
        writer.write_at(start, pattern(SIZE)[start : start + (1 << 20)])
    writer.finish()
    assert storage.get("a") == pattern(SIZE)


def test_a_writeback_that_fails_is_an_error(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    writer = storage.open_writer("a", SIZE)
    monkeypatch.setattr(local_calls, "c_function", lambda *_: refuse)
    with pytest.raises(OSError, match="cannot write"):
        writer.write_at(0, pattern(SIZE))
    writer.abort()
    assert list(storage.list()) == []


def test_a_system_that_does_not_number_its_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In gVisor, neither `statx` nor /proc returns the number of a mount."""

    def without_number(path: str, *arguments: Any, **options: Any) -> Any:
        return io.BytesIO(b"flags:\t0100000\n") if "fdinfo" in path else open(path, *arguments, **options)

    monkeypatch.setattr(local_mounts, "c_function", lambda *_: None)
    monkeypatch.setattr(local_mounts, "open", without_number, raising=False)
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    ckptcore.save(tmp_path / "c", {"w": np.zeros(3)}, overwrite=True)
    assert ckptcore.load(tmp_path / "c")["w"].tolist() == [0] * 3


def test_a_hard_link_whose_reply_was_lost_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: LocalStorage
) -> None:
    """NFS may send the request twice. The second request fails, because the first one created the link."""
    link = os.link

    def lost(source: str, path: str) -> None:
        link(source, path)
        raise FileExistsError(errno.EEXIST, "File exists", path)

    def refuse(source: str, path: str) -> None:
        raise AtomicityError("renameat2 is not supported")

    monkeypatch.setattr(os, "link", lost)
    monkeypatch.setattr(local, "rename_without_replacing", refuse)
    storage.put("a", b"1", condition=IF_ABSENT)
    with pytest.raises(ConditionFailedError):
        monkeypatch.setattr(os, "link", link)
        storage.put("a", b"2", condition=IF_ABSENT)
    assert storage.get("a") == b"1" and list(storage.list()) == ["a"]


# --- opening without links --------------------------------------------------------------------------------------------


def test_only_a_path_without_links_is_opened_directly(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_bytes(b"bytes")
    (tmp_path / "d/link").symlink_to("a")
    (tmp_path / "e").symlink_to("d")
    descriptor = local_calls.open_without_links(f"{tmp_path}/d/a", os.O_RDONLY | os.O_CLOEXEC)
    if descriptor is None:
        pytest.skip("this system does not open files so")
    try:
        assert os.read(descriptor, 9) == b"bytes" and not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
    for path in ("d/link", "e/a", "e/link", "absent", "d/a\0b", "d/a/b"):
        assert local_calls.open_without_links(f"{tmp_path}/{path}", os.O_RDONLY) is None


@pytest.mark.parametrize("can_without_links", [True, False])
def test_real_paths_equal_those_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_without_links: bool
) -> None:
    if not can_without_links:
        monkeypatch.setattr(local_calls, "open_without_links", lambda path, flags: None)
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "link").symlink_to("d/e")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "d")
    paths = [
        "e",
        "./e/",
        "../link",
        "../link/../e",
        "absent/x",
        "../loop/x",
        ".",
        "",
        "/",
        "//",
        "///d",
        "/proc/self/fd",
    ]
    for path in [
        *paths,
        *[f"{tmp_path}{tail}" for tail in ("", "//d/./e/", "/link", "/link/..", "/d/absent", "/loop")],
    ]:
        assert local_calls.real_path(path) == os.path.realpath(path), path


@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.EPERM])
def test_a_system_that_cannot_open_without_links(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            if number is not None:
                self.syscall = Refusing()

    class Refusing:
        def __call__(self, *_: object) -> int:
            ctypes.set_errno(number or 0)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    local_calls._opener.cache_clear()
    try:
        assert local_calls.open_without_links("/", os.O_RDONLY) is None
    finally:
        local_calls._opener.cache_clear()


@pytest.mark.parametrize("can_without_links", [True, False])
def test_links_are_checked_with_and_without_openat2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_without_links: bool
) -> None:
    if not can_without_links:
        monkeypatch.setattr("ckptcore.builtin.local_files.open_without_links", lambda path, flags: None)
    elif local_calls.open_without_links("/", os.O_RDONLY) is None:
        pytest.skip("this system does not open files so")
    walked: list[str] = []

    def noting(root: str, path: str, flags: int) -> int:
        walked.append(path)
        return open_inside(root, path, flags)

    directory = tmp_path / "directory"
    storage = open_local(str(directory), StorageOptions())
    (tmp_path / "secret").write_bytes(b"secret")
    storage.put("plain", b"1")
    (directory / "within").symlink_to("plain")
    (directory / "out").symlink_to(tmp_path / "secret")
    monkeypatch.setattr("ckptcore.builtin.local_files.open_inside", noting)
    assert storage.get("plain") == b"1" and bool(walked) is not can_without_links
    assert storage.get("within") == b"1"
    with pytest.raises(InvalidLocationError, match="leads out"):
        storage.get("out")
    with pytest.raises(ObjectNotFoundError):
        storage.get("absent")


# --- reads that bypass the page cache ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cold_file() -> Iterator[Path]:
    # Do not use the directory for temporary files. It may be in memory, where direct reads do not exist.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".cold-") as directory:
        path = Path(directory) / "data"
        path.write_bytes(pattern(SIZE))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        yield path


def open_cold(path: Path) -> ColdReader:
    reader = local_files.open_cold_reader(str(path), os.stat(path))
    if reader is None:
        pytest.skip("this system or file system has no O_DIRECT")
    return reader


@settings(deadline=None)
@given(
    start=st.integers(0, SIZE) | st.sampled_from([0, 4096, 1 << 20, (5 << 20), SIZE - 1]),
    sizes=st.lists(
        st.integers(0, 2 << 20) | st.sampled_from([0, 1, 4095, 4096, 1 << 20, 5 << 20]), min_size=1, max_size=4
    ),
    shift=st.integers(0, 4096) | st.sampled_from([0, 8, 64, 512, 4096]),
)
def test_direct_reads_return_the_bytes_of_the_file(cold_file: Path, start: int, sizes: list[int], shift: int) -> None:
    """The offset and the memory can have any alignment. A read may be short, and then the caller reads the rest."""
    reader = open_cold(cold_file)
    data = pattern(SIZE)
    memory = np.zeros(sum(sizes) + 10_000, np.uint8)
    base = -memory.__array_interface__["data"][0] % 4096 + shift
    view = memory.data
    buffers = []
    for size in sizes:
        buffers.append(view[base : base + size])
        base += size
    count = reader.read_into(start, buffers)
    expected = data[start : start + sum(sizes)]
    assert count <= len(expected)
    assert bytes(view[base - sum(sizes) : base][:count]) == expected[:count]
    if start % 4096 == 0 or sum(sizes) == 0:
        assert count == len(expected), "the disk gave all there is"


@pytest.mark.parametrize("buffers", [1, 3])
def test_a_cold_file_is_read_whole_by_storage(cold_file: Path, monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    storage = open_local(str(cold_file.parent), StorageOptions())
    monkeypatch.setattr(ColdReader, "is_cold", lambda *_: True)
    data = pattern(SIZE)
    for start, stop in ((0, SIZE), (1, SIZE), (4096, 1 << 20), (12345, 3_000_000), (SIZE - 10, SIZE)):
        memory = memoryview(bytearray(stop - start))
        cuts = [len(memory) * number // buffers for number in range(buffers + 1)]
        storage.get_into("data", [(start + low, memory[low:high]) for low, high in itertools.pairwise(cuts)])
        assert memory == data[start:stop]
    with pytest.raises(CorruptCheckpointError) as caught:
        storage.get_into("data", [(SIZE - 300_000, memoryview(bytearray(400_000)))])
    assert caught.value.stop == SIZE + 100_000


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_disk_that_refuses_direct_reads(cold_file: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    open_cold(cold_file)
    storage = open_local(str(cold_file.parent), StorageOptions())
    preadv = os.preadv
    direct: set[int] = set()
    plain_open = os.open

    def open_file(path: str, flags: int, *arguments: int) -> int:
        descriptor = plain_open(path, flags, *arguments)
        direct.discard(descriptor)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refuse(descriptor: int, *arguments: object) -> int:
        if descriptor in direct:
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, *arguments)  # type: ignore[arg-type]  # the arguments of the call

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(ColdReader, "is_cold", lambda *_: True)
    memory = memoryview(bytearray(SIZE))
    storage.get_into("data", [(0, memory)])
    assert memory == pattern(SIZE)
    storage.get_into("data", [(4096, memory[: 1 << 20])])
    assert memory[: 1 << 20] == pattern(SIZE)[4096 : 4096 + (1 << 20)]
    assert direct, "it was tried"


def test_bytes_in_the_cache_are_not_cold(cold_file: Path) -> None:
    reader = open_cold(cold_file)
    cold_file.read_bytes()
    assert not reader.is_cold(0, 1 << 20)
    assert not reader.is_cold(0, 100), "nor what is too small to be worth it"


def test_a_file_that_replaced_another_is_not_read_in_its_place(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    assert local_files.open_cold_reader(str(tmp_path / "one"), os.stat(tmp_path / "other")) is None
    assert local_files.open_cold_reader(str(tmp_path / "gone"), os.stat(tmp_path / "other")) is None
