"""Conformance tests of storages."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ckptcore.errors import (
    AtomicityError,
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    SaveLostError,
)
from ckptcore.protocols import IF_ABSENT, IfTag, StampedReader, StorageBackend
from ckptcore.protocols.storage import ReaderByKey
from ckptcore_testing.cases import check_each
from ckptcore_testing.storage_model import storage_machine

HOSTILE_KEYS: Sequence[str] = (
    "", "/", "/absolute", "..", "../outside", "a/../b", "a/..", ".", "./a", "a/.", "a//b", "a/", "/a/", "//a", "nul\0",
    "a/nul\0/b",
)  # fmt: skip
"""Keys that every storage must refuse."""

UNUSUAL_KEYS: Sequence[str] = (
    "with space", "%41%2F", "a?b#c", "plus+and&equals=", "'quotes'\"", ".hidden", "...", "..a", "a..", "~", "$HOME",
    "*", "ü/日本語", "é", "x" * 200, "deep/" * 20 + "end", "-rf", "a:b", "tab\tname", "(1)", "{x}", "[y]",
)  # fmt: skip
"""Keys that every storage must support."""


class DirectoryTests:
    """Fixtures of tests that use new directories of a storage.

    Attributes:
        threads: number of concurrent threads.
    """

    threads: int = 8

    def open(self, directory: str) -> StorageBackend:
        """Open a directory. Equal names in one test open the same directory.

        Args:
            directory: the name, with ``/`` between its parts. Each test uses another name, so that the directory is
                empty at the start of a test.
        """
        raise NotImplementedError("define the method `open`")

    @pytest.fixture
    def name(self) -> str:
        """Return a directory name that no other test uses."""
        return f"conformance-{uuid.uuid4().hex}"

    @pytest.fixture
    def storage(self, name: str) -> StorageBackend:
        """Return an empty directory."""
        return self.open(name)

    def _at_once(self, work: Callable[[int], object]) -> list[object]:
        """Call `work` on several threads at the same time. Return the results."""
        barrier = threading.Barrier(self.threads)

        def start(worker: int) -> object:
            barrier.wait()
            return work(worker)

        with ThreadPoolExecutor(self.threads) as threads:
            return list(threads.map(start, range(self.threads)))


class StorageBackendTests(DirectoryTests):
    """Conformance tests of a storage. Subclass it and define `open`.

    Attributes:
        examples: number of sequences of operations that Hypothesis tries.
        conditional: True if `put` supports conditions. Otherwise it must raise `AtomicityError` and change nothing.
        refused_keys: keys of `UNUSUAL_KEYS` that the storage refuses, because the service would change them.
    """

    examples: int = 25
    conditional: bool = True
    refused_keys: Sequence[str] = ()

    # --- reading ------------------------------------------------------------------------------------------------------

    def test_the_storage_describes_itself(self, storage: StorageBackend) -> None:
        suited = storage.capabilities
        assert all(isinstance(count, int) and count > 0 for count in suited)
        assert suited.part_bytes == 1 or suited.part_bytes % (1 << 20) == 0
        assert storage.address is None or storage.address.url.endswith("/")

    def test_a_new_directory_is_empty(self, storage: StorageBackend) -> None:
        assert list(storage.list()) == []
        assert list(storage.list("a")) == []
        assert list(storage.list_names()) == []
        assert list(storage.list_names("a/b")) == []

    def test_get_returns_byte_ranges(self, storage: StorageBackend) -> None:
        storage.put("digits", b"0123456789")
        assert storage.get("digits") == b"0123456789"
        assert storage.get("digits", 3) == b"3456789"
        assert storage.get("digits", 3, 5) == b"34"
        assert storage.get("digits", 0, 0) == b""
        assert storage.get("digits", 7, 7) == b""
        assert isinstance(storage.get("digits", 1, 2), bytes)

    def test_ranges_end_with_the_object(self, storage: StorageBackend) -> None:
        storage.put("digits", b"0123456789")
        assert storage.get("digits", 8, 100) == b"89"
        assert storage.get("digits", 10) == b""
        assert storage.get("digits", 10, 20) == b""
        assert storage.get("digits", 99, 2**60) == b""
        assert storage.get("digits", 5, 2**60) == b"56789"

    def test_an_object_can_be_empty(self, storage: StorageBackend) -> None:
        storage.put("empty", b"")
        assert storage.get("empty") == b""
        assert storage.size("empty") == 0
        assert list(storage.list()) == ["empty"]
        storage.get_into("empty", [(0, memoryview(bytearray(0)))])

    def test_a_missing_object_is_an_error(self, storage: StorageBackend) -> None:
        storage.put("file", b"1")
        for key in ("missing", "missing/below", "file/below", "fil"):
            for read in (storage.get, storage.get_with_tag, storage.size):
                with pytest.raises(ObjectNotFoundError):
                    read(key)
            with pytest.raises(ObjectNotFoundError):
                storage.get_into(key, [(0, memoryview(bytearray(1)))])

    def test_a_directory_is_not_an_object(self, storage: StorageBackend) -> None:
        storage.put("directory/name", b"1")
        for read in (storage.get, storage.get_with_tag, storage.size):
            with pytest.raises(ObjectNotFoundError):
                read("directory")
        with pytest.raises(ObjectNotFoundError):
            storage.get_into("directory", [(0, memoryview(bytearray(1)))])

    def test_get_into_fills_exactly_the_buffers(self, storage: StorageBackend) -> None:
        data = _pattern(100_000)
        storage.put("data", data)
        memory = bytearray(b"\xee" * 300)
        view = memoryview(memory)
        storage.get_into("data", [(50_000, view[10:110]), (0, view[120:121]), (99_999, view[200:201])])
        expected = bytearray(b"\xee" * 300)
        expected[10:110] = data[50_000:50_100]
        expected[120:121] = data[:1]
        expected[200:201] = data[99_999:]
        assert memory == expected

    def test_get_into_reads_adjacent_ranges(self, storage: StorageBackend) -> None:
        data = _pattern(5000)
        storage.put("data", data)
        pieces = [bytearray(size) for size in [1, 0, 7] * 600]
        starts = list(itertools.accumulate(map(len, pieces), initial=3))
        storage.get_into("data", [(start, memoryview(piece)) for start, piece in zip(starts, pieces, strict=False)])
        assert b"".join(pieces) == data[3 : 3 + 8 * 600]

    def test_get_into_works_at_every_alignment(self, storage: StorageBackend) -> None:
        check_each(
            partial(self._check_get_into_works_at_every_alignment, storage),
            (1, 4095, 4096, 4097, 300_000, (1 << 20) + 1, 9_000_001),
        )

    def _check_get_into_works_at_every_alignment(self, storage: StorageBackend, nbytes: int) -> None:
        data = _pattern(nbytes)
        _write(storage, "data", data)
        memory = memoryview(bytearray(nbytes + 5000))
        for start, shift in ((0, 0), (0, 1), (1, 0), (nbytes // 2, 64), (nbytes // 3, 4097), (nbytes - 1, 3)):
            target = memory[shift : shift + nbytes - start]
            target[:] = bytes(len(target))
            storage.get_into("data", [(start, target)])
            assert target == data[start:]

    def test_get_into_reports_missing_bytes(self, storage: StorageBackend) -> None:
        storage.put("directory/data", bytes(1000))
        for start, size in ((995, 10), (1000, 1), (5000, 1), (0, 2_000_000)):
            with pytest.raises(CorruptCheckpointError, match="directory/data") as caught:
                storage.get_into(
                    "directory/data", [(0, memoryview(bytearray(4))), (start, memoryview(bytearray(size)))]
                )
            assert caught.value.key == "directory/data"
            assert caught.value.stop == start + size
            assert caught.value.start is not None
            assert caught.value.start <= 1000

    def test_an_open_object_does_not_change(self, storage: StorageBackend) -> None:
        _write(storage, "data", b"old" * 1000)
        reader = storage.open_reader("data")
        if isinstance(reader, ReaderByKey):
            pytest.skip("this storage opens an object again for each read")
        with pytest.raises(ObjectNotFoundError):
            storage.open_reader("absent")
        memory = bytearray(6)
        reader.get_into([(0, memoryview(memory))])
        assert memory == b"oldold"
        with pytest.raises(CorruptCheckpointError, match="data") as caught:
            reader.get_into([(2995, memoryview(bytearray(6)))])
        assert caught.value.key == "data"
        storage.put("data", b"new" * 1000)
        with suppress(ObjectNotFoundError):  # a reader may fail, but does not read another object
            reader.get_into([(3, memoryview(memory)[:3]), (0, memoryview(memory)[3:])])
        assert memory == b"oldold"
        storage.open_reader("data").get_into([(0, memoryview(memory))])
        assert memory == b"newnew"

    def test_an_open_object_does_not_change_and_detects_a_replacement(self, storage: StorageBackend) -> None:
        _write(storage, "data", b"old" * 1000)
        reader = storage.open_stamped("data")
        if not isinstance(reader, StampedReader):
            pytest.skip("this storage does not keep objects open for small reads")
        with pytest.raises(ObjectNotFoundError):
            storage.open_stamped("absent")
        stamp = reader.stamp()
        memory = bytearray(6)
        reader.get_into([(3, memoryview(memory)[:3]), (0, memoryview(memory)[3:])])
        assert memory == b"oldold"
        storage.put("data", b"newer" * 1000)
        reader.get_into([(1, memoryview(memory))])
        assert memory == b"ldoldo" and reader.size() == 3000
        # The value of the stamp is not checked, because a replacement may change the stamp of the old object, too.
        assert stamp is None or isinstance(hash(stamp), int)
        mapped = reader.memory()
        assert mapped is None or (mapped.readonly and mapped[:3000] == b"old" * 1000)
        again = storage.open_stamped("data")
        assert isinstance(again, StampedReader)
        again.get_into([(0, memoryview(memory))])
        assert memory == b"newern" and again.size() == 5000
        with pytest.raises(CorruptCheckpointError, match="data") as caught:
            reader.get_into([(2995, memoryview(bytearray(6)))])
        assert caught.value.key == "data"

    # --- putting ------------------------------------------------------------------------------------------------------

    def test_put_replaces(self, storage: StorageBackend) -> None:
        for data in (b"first and long", b"second", b"", b"fourth"):
            tag = storage.put("a/b", data)
            assert storage.get_with_tag("a/b") == (data, tag)
            assert storage.size("a/b") == len(data)

    def test_readers_see_the_new_object_after_put(self, storage: StorageBackend) -> None:
        for number in range(20):
            storage.put("counter", b"%04d" % number)
            memory = bytearray(4)
            storage.get_into("counter", [(0, memoryview(memory))])
            assert memory == b"%04d" % number

    def test_unsupported_conditions_are_refused(self, storage: StorageBackend) -> None:
        if self.conditional:
            pytest.skip("this storage supports conditions")
        for condition in (IF_ABSENT, IfTag(storage.put("a/b", b"first"))):
            for key in ("a/b", "a/new"):
                with pytest.raises(AtomicityError):
                    storage.put(key, b"second", condition=condition)
        assert storage.get("a/b") == b"first"
        assert list(storage.list()) == ["a/b"]

    def _needs_conditions(self) -> None:
        if not self.conditional:
            pytest.skip("this storage has no conditional puts")

    def test_put_with_if_absent_only_creates(self, storage: StorageBackend) -> None:
        self._needs_conditions()
        tag = storage.put("a/b", b"first", condition=IF_ABSENT)
        with pytest.raises(ConditionFailedError):
            storage.put("a/b", b"second", condition=IF_ABSENT)
        assert storage.get_with_tag("a/b") == (b"first", tag)
        assert list(storage.list()) == ["a/b"]
        storage.delete(["a/b"])
        storage.put("a/b", b"third", condition=IF_ABSENT)
        assert storage.get("a/b") == b"third"

    def test_put_with_if_tag_replaces_only_that_version(self, storage: StorageBackend) -> None:
        self._needs_conditions()
        first = storage.put("a/b", b"first")
        second = storage.put("a/b", b"second", condition=IfTag(first))
        with pytest.raises(ConditionFailedError):
            storage.put("a/b", b"third", condition=IfTag(first))
        assert storage.get_with_tag("a/b") == (b"second", second)
        storage.put("a/b", b"fourth", condition=IfTag(second))
        assert storage.get("a/b") == b"fourth"

    def test_if_tag_fails_if_the_object_was_deleted(self, storage: StorageBackend) -> None:
        self._needs_conditions()
        tag = storage.put("a/b", b"first")
        storage.delete(["a/b"])
        with pytest.raises(ConditionFailedError):
            storage.put("a/b", b"second", condition=IfTag(tag))
        assert list(storage.list()) == []

    def test_only_one_of_many_concurrent_creations_succeeds(self, storage: StorageBackend) -> None:
        self._needs_conditions()
        for number in range(5):
            key = f"directory/{number}"

            def create(worker: int, key: str = key) -> bool:
                try:
                    storage.put(key, b"worker %d" % worker, condition=IF_ABSENT)
                except ConditionFailedError:
                    return False
                return True

            won = self._at_once(create)
            assert won.count(True) == 1
            assert storage.get(key) == b"worker %d" % won.index(True)

    def test_concurrent_conditional_puts_lose_no_update(self, storage: StorageBackend) -> None:
        """All threads increment a counter by compare-and-swap."""
        self._needs_conditions()
        storage.put("counter", b"0")

        def count(worker: int) -> None:
            for _ in range(10):
                while True:
                    value, tag = storage.get_with_tag("counter")
                    try:
                        storage.put("counter", b"%d" % (int(value) + 1), condition=IfTag(tag))
                    except ConditionFailedError:
                        continue
                    break

        self._at_once(count)
        assert storage.get("counter") == b"%d" % (self.threads * 10)

    def test_readers_never_see_a_partial_put(self, storage: StorageBackend) -> None:
        values = [bytes([number]) * (50_000 + number) for number in range(3)]
        storage.put("value", values[0])
        seen: list[bytes] = []

        def work(worker: int) -> None:
            for turn in range(20):
                if worker == 0:
                    storage.put("value", values[turn % 3])
                else:
                    seen.append(storage.get("value"))

        self._at_once(work)
        assert set(seen) <= set(values)

    # --- writing in pieces --------------------------------------------------------------------------------------------

    def test_a_writer_accepts_pieces_in_any_order(self, storage: StorageBackend) -> None:
        check_each(
            partial(self._check_a_writer_accepts_pieces_in_any_order, storage),
            (0, 1, 70_000, (9 << 20) + 17),
            (True, False),
        )

    def _check_a_writer_accepts_pieces_in_any_order(self, storage: StorageBackend, nbytes: int, known: bool) -> None:
        data = _pattern(nbytes)
        writer = storage.open_writer("directory/data", nbytes if known else None)
        step = max(1, nbytes // 5)
        for number, start in enumerate(reversed(range(0, nbytes, step))):
            piece = data[start : start + step]
            writer.write_at(start, (piece, bytearray(piece), memoryview(piece))[number % 3])
        writer.finish()
        assert storage.get("directory/data") == data
        assert storage.size("directory/data") == nbytes
        assert list(storage.list()) == ["directory/data"]

    def test_a_writer_accepts_empty_pieces(self, storage: StorageBackend) -> None:
        writer = storage.open_writer("data", 3)
        writer.write_at(0, b"")
        writer.write_at(0, b"abc")
        writer.write_at(3, memoryview(b""))
        writer.finish()
        assert storage.get("data") == b"abc"

    def test_memory_can_be_reused_after_write_at(self, storage: StorageBackend) -> None:
        memory = bytearray(1 << 20)
        writer = storage.open_writer("data", 6 << 20)
        for number in range(6):
            memory[:] = bytes([number]) * len(memory)
            writer.write_at(number << 20, memoryview(memory))
            memory[:] = b"\xff" * len(memory)
        writer.finish()
        assert storage.get("data") == b"".join(bytes([number]) * (1 << 20) for number in range(6))

    def test_a_writer_accepts_pieces_from_many_threads(self, storage: StorageBackend) -> None:
        data = _pattern(self.threads * 300_001)
        writer = storage.open_writer("data", len(data))

        def write_part(worker: int) -> None:
            stop = (worker + 1) * 300_001
            for start in range(worker * 300_001, stop, 70_000):
                writer.write_at(start, data[start : min(start + 70_000, stop)])

        self._at_once(write_part)
        writer.finish()
        assert storage.get("data") == data

    def test_a_writer_accepts_pieces_of_one_request(self, storage: StorageBackend) -> None:
        check_each(partial(self._check_a_writer_accepts_pieces_of_one_request, storage), (True, False))

    def _check_a_writer_accepts_pieces_of_one_request(self, storage: StorageBackend, known: bool) -> None:
        part = max(storage.capabilities.part_bytes, 1 << 20)
        data = _pattern(3 * part + part // 2 + 1)
        writer = storage.open_writer("data", len(data) if known else None)
        with ThreadPoolExecutor(4) as pool:

            def write_part(number: int) -> None:
                memory = bytearray(data[number * part : (number + 1) * part])
                writer.write_at(number * part, memoryview(memory))
                memory[:] = bytes(len(memory))  # write_at must have sent or copied the bytes

            list(pool.map(write_part, (3, 1, 0, 2)))
        writer.finish()
        assert storage.size("data") == len(data)
        assert storage.get("data") == data

    def test_a_writer_replaces_an_object(self, storage: StorageBackend) -> None:
        storage.put("data", b"the old and longer one")
        _write(storage, "data", b"new")
        assert storage.get("data") == b"new"
        memory = bytearray(3)
        storage.get_into("data", [(0, memoryview(memory))])
        assert memory == b"new"

    def test_abort_leaves_no_object(self, storage: StorageBackend) -> None:
        writer = storage.open_writer("directory/data", 10)
        writer.write_at(0, b"01234")
        writer.abort()
        writer.abort()
        assert "directory/data" not in list(storage.list())
        with pytest.raises(ObjectNotFoundError):
            storage.get("directory/data")
        _write(storage, "directory/data", b"again")
        assert storage.get("directory/data") == b"again"

    def test_several_writers_can_run_at_once(self, storage: StorageBackend) -> None:
        def write_one(worker: int) -> None:
            for number in range(5):
                _write(storage, f"directory-{number}/{worker}", b"%d %d" % (worker, number))

        self._at_once(write_one)
        for worker, number in itertools.product(range(self.threads), range(5)):
            assert storage.get(f"directory-{number}/{worker}") == b"%d %d" % (worker, number)

    def test_sync_accepts_written_keys(self, storage: StorageBackend) -> None:
        storage.put("a/b/c", b"1")
        _write(storage, "a/d", b"2")
        storage.sync(["a/b/c", "a/d"])
        storage.sync([])
        assert storage.get("a/b/c") == b"1"

    # --- listing and deleting -----------------------------------------------------------------------------------------

    def test_list_is_sorted_and_limited_to_a_directory(self, storage: StorageBackend) -> None:
        keys = ["a", "a-b", "a.b", "aa/x", "ab", "b/a", "b/a-1/x", "b/c/y", "b/z", "c"]
        for key in reversed(keys):
            storage.put(key, b"1")
        assert list(storage.list()) == sorted(keys)
        assert list(storage.list("b")) == ["b/a", "b/a-1/x", "b/c/y", "b/z"]
        assert list(storage.list("b/")) == ["b/a", "b/a-1/x", "b/c/y", "b/z"]
        assert list(storage.list("b/c")) == ["b/c/y"]
        assert list(storage.list("a")) == [], "an object is no directory, and no part of a name is"
        assert list(storage.list_names()) == ["a", "a-b", "a.b", "aa/", "ab", "b/", "c"]
        assert list(storage.list_names("b")) == ["a", "a-1/", "c/", "z"]
        assert list(storage.list_names("b/")) == ["a", "a-1/", "c/", "z"]
        assert list(storage.list_names("a")) == []

    def test_list_sizes_has_the_sizes_of_all_objects_below_a_directory(self, storage: StorageBackend) -> None:
        for size, key in enumerate(["a", "aa/x", "b/a", "b/c d/%y", "b/c/z"]):
            storage.put(key, bytes(size))
        if storage.list_sizes() is None:
            pytest.skip("listings of this storage have no sizes")
        assert storage.list_sizes() == {key: storage.size(key) for key in storage.list()}
        assert storage.list_sizes("b") == {"b/a": 2, "b/c d/%y": 3, "b/c/z": 4}
        assert storage.list_sizes("b/c") == {"b/c/z": 4}
        assert storage.list_sizes("a") == {}, "an object is no directory"
        storage.put("b/a", bytes(9))
        storage.delete(["b/c/z"])
        assert storage.list_sizes("b") == {"b/a": 9, "b/c d/%y": 3}

    def test_delete_removes_objects_and_ignores_missing_keys(self, storage: StorageBackend) -> None:
        for key in ("a/b/c", "a/b/d", "a/e", "f"):
            storage.put(key, b"1")
        storage.delete([])
        storage.delete(["missing", "missing/below", "a/b/missing", "f/below", "a/b/c"])
        assert list(storage.list()) == ["a/b/d", "a/e", "f"]
        storage.delete(["a/b/d", "a/b/d"])
        assert list(storage.list_names("a")) == ["e"], "a directory that becomes empty vanishes"
        storage.delete(["a/e", "f"])
        assert list(storage.list_names()) == []
        storage.put("a/b/c", b"2")
        assert storage.get("a/b/c") == b"2"

    def test_delete_does_not_remove_a_directory(self, storage: StorageBackend) -> None:
        storage.put("a/b", b"1")
        storage.delete(["a"])
        assert list(storage.list()) == ["a/b"]

    def test_delete_while_calls_the_check_before_it_deletes(self, storage: StorageBackend) -> None:
        for key in ("a/b", "c", "tab\tname"):
            storage.put(key, b"1")
        seen: list[list[str]] = []
        storage.delete_while(["a/b", "tab\tname", "missing"], lambda: seen.append(list(storage.list())))
        assert seen and seen[0] == ["a/b", "c", "tab\tname"]
        assert list(storage.list()) == ["c"]
        storage.delete_while([], lambda: None)
        assert list(storage.list()) == ["c"]

    def test_an_error_of_the_check_stops_a_deletion(self, storage: StorageBackend) -> None:
        storage.put("a", b"1")

        def refuse() -> None:
            raise SaveLostError("another save is here")

        with pytest.raises(SaveLostError, match="another save is here"):
            storage.delete_while(["a"], refuse)
        assert list(storage.list()) == ["a"]

    def test_concurrent_writes_and_deletions_in_one_directory_succeed(self, storage: StorageBackend) -> None:
        """Removing an empty directory does not affect concurrent writes to it."""

        def work(worker: int) -> None:
            for number in range(20):
                key = f"a/b/{worker}"
                if number % 2:
                    _write(storage, key, b"%d" % number)
                else:
                    storage.put(key, b"%d" % number)
                assert storage.get(key) == b"%d" % number
                storage.delete([key])

        self._at_once(work)
        assert list(storage.list_names()) == []

    # --- keys and directories -----------------------------------------------------------------------------------------

    def test_hostile_keys_are_refused(self, storage: StorageBackend) -> None:
        check_each(partial(self._check_hostile_keys_are_refused, storage), HOSTILE_KEYS)

    def _check_hostile_keys_are_refused(self, storage: StorageBackend, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: storage.get(key),
            lambda: storage.get_with_tag(key),
            lambda: storage.get_into(key, [(0, memoryview(bytearray(1)))]),
            lambda: storage.size(key),
            lambda: storage.put(key, b"1"),
            lambda: storage.put(key, b"1", condition=IF_ABSENT),
            lambda: storage.open_writer(key, 1),
            lambda: storage.delete([key]),
            lambda: storage.sync([key]),
        ]
        if key not in ("", "a/"):  # these do name directories
            calls += [lambda: list(storage.list(key)), lambda: storage.list_names(key)]
        for call in calls:
            with pytest.raises(InvalidLocationError):
                call()
        assert list(storage.list()) == []

    def test_unusual_keys_are_accepted(self, storage: StorageBackend) -> None:
        check_each(partial(self._check_unusual_keys_are_accepted, storage), UNUSUAL_KEYS)

    def _check_unusual_keys_are_accepted(self, storage: StorageBackend, key: str) -> None:
        if key in self.refused_keys:
            for write in (storage.put, partial(_write, storage)):
                with pytest.raises(InvalidLocationError):
                    write(key, b"data")
            assert list(storage.list()) == []
            return
        storage.put(key, b"put")
        assert storage.get(key) == b"put"
        _write(storage, key, b"written")
        assert storage.get(key) == b"written"
        assert list(storage.list()) == [key]
        first, slash, _ = key.partition("/")
        assert list(storage.list_names()) == [first + slash]
        storage.delete([key])
        assert list(storage.list()) == []

    def test_the_same_directory_has_the_same_objects(self, storage: StorageBackend, name: str) -> None:
        other = self.open(name)
        tag = storage.put("a/b", b"1")
        assert other.get_with_tag("a/b") == (b"1", tag)
        other.put("a/b", b"2", condition=IfTag(tag) if self.conditional else None)
        memory = bytearray(1)
        storage.get_into("a/b", [(0, memoryview(memory))])
        assert memory == b"2"
        other.delete(["a/b"])
        with pytest.raises(ObjectNotFoundError):
            storage.get_into("a/b", [(0, memoryview(memory))])

    def test_a_subdirectory_can_be_opened(self, storage: StorageBackend, name: str) -> None:
        inner = self.open(f"{name}/a")
        assert list(inner.list()) == []
        storage.put("a/b/c", b"1")
        storage.put("ab/c", b"2")
        assert list(inner.list()) == ["b/c"]
        assert inner.get("b/c") == b"1"
        inner.put("d", b"3")
        assert storage.get("a/d") == b"3"
        assert list(storage.list()) == ["a/b/c", "a/d", "ab/c"]

    def test_directories_are_independent(self, name: str) -> None:
        first, second = self.open(f"{name}/one"), self.open(f"{name}/one-more")
        first.put("a", b"1")
        assert list(second.list()) == []
        second.put("a", b"2")
        second.delete(["a"])
        assert first.get("a") == b"1"

    # --- all together -------------------------------------------------------------------------------------------------

    def test_any_sequence_of_operations_matches_a_dict(self) -> None:
        """Any sequence of operations has the same results as with a dict of bytes."""
        run_state_machine_as_test(
            storage_machine(lambda: self.open(f"conformance-{uuid.uuid4().hex}"), conditional=self.conditional),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )

    def test_many_threads_read_and_write_at_once(self, storage: StorageBackend) -> None:
        def work(worker: int) -> None:
            mine: dict[str, bytes] = {}
            for number in range(30):
                key = f"shared/{number % 4}/{worker}"
                data = _pattern(number * 997, worker)
                if number % 3 == 0:
                    storage.put(key, data)
                elif number % 3 == 1:
                    _write(storage, key, data)
                elif key in mine:
                    storage.delete([key])
                    del mine[key]
                    continue
                else:
                    continue
                mine[key] = data
                for known, expected in mine.items():
                    memory = bytearray(len(expected))
                    storage.get_into(known, [(0, memoryview(memory))])
                    assert memory == expected
                    assert storage.size(known) == len(expected)
            keys = [key for key in storage.list("shared") if key.endswith(f"/{worker}")]
            assert keys == sorted(mine)

        self._at_once(work)


def _pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that repeat only every 16396 bytes, which is not a multiple of a page. Detects misplaced bytes."""
    words = b"".join(
        [(seed * 1_000_003 + number * 2_654_435_761 & 0xFFFFFFFF).to_bytes(4, "little") for number in range(4099)]
    )
    return (words * (nbytes // len(words) + 1))[:nbytes]


def _write(storage: StorageBackend, key: str, data: bytes) -> None:
    """Write an object with a writer."""
    writer = storage.open_writer(key, len(data))
    writer.write_at(0, data)
    writer.finish()
