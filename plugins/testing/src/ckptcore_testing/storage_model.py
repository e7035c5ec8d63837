"""A Hypothesis state machine that compares a storage with a dict."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ckptcore.errors import ConditionFailedError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.protocols import IF_ABSENT, IfTag, StorageBackend

# No key is the directory of another one, because file systems cannot have both.
_KEYS = st.sampled_from(["a", "b", "c/a", "c/b", "c/d/e", "c/d/f", "g/h/i", "c-d", "c.d"])
_DIRECTORIES = st.sampled_from(["", "c", "c/d", "g", "g/h", "z"])
_DATA = st.one_of(
    st.binary(max_size=40), st.builds(lambda byte, size: byte * size, st.binary(min_size=1, max_size=1),
                                      st.sampled_from([4096, 65_537, 300_000]))
)  # fmt: skip
_PLACES = st.integers(0, 50) | st.sampled_from([4095, 4096, 65_536, 299_999, 300_000, 400_000])


def storage_machine(
    open_empty: Callable[[], StorageBackend], *, conditional: bool = True
) -> type[RuleBasedStateMachine]:
    """Return a Hypothesis state machine that compares a storage with a dict.

    Args:
        open_empty: opens a new empty storage.
        conditional: True if the storage has conditional puts.
    """

    class StorageMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.storage = open_empty()
            self.model: dict[str, bytes] = {}
            self.tags: dict[str, str] = {}

        @rule(key=_KEYS, data=_DATA)
        def put(self, key: str, data: bytes) -> None:
            self.tags[key] = self.storage.put(key, data)
            self.model[key] = data

        @precondition(lambda self: conditional)
        @rule(key=_KEYS, data=_DATA)
        def put_if_absent(self, key: str, data: bytes) -> None:
            try:
                self.tags[key] = self.storage.put(key, data, condition=IF_ABSENT)
            except ConditionFailedError:
                assert key in self.model
            else:
                assert key not in self.model
                self.model[key] = data

        @precondition(lambda self: conditional and self.tags)
        @rule(data=_DATA, choose=st.data())
        def put_if_tag(self, data: bytes, choose: st.DataObject) -> None:
            key = choose.draw(st.sampled_from(sorted(self.tags)))
            tag = self.tags[key]
            current = self.storage.get_with_tag(key)[1] if key in self.model else None
            try:
                self.tags[key] = self.storage.put(key, data, condition=IfTag(tag))
            except ConditionFailedError:
                assert current != tag
            else:
                assert current == tag
                self.model[key] = data

        @rule(key=_KEYS, data=_DATA, known=st.booleans(), cut=st.integers(0, 300_000))
        def write(self, key: str, data: bytes, known: bool, cut: int) -> None:
            writer = self.storage.open_writer(key, len(data) if known else None)
            cut = min(cut, len(data))
            writer.write_at(cut, data[cut:])
            writer.write_at(0, data[:cut])
            writer.finish()
            self.model[key] = data

        @rule(key=_KEYS, data=_DATA)
        def give_up(self, key: str, data: bytes) -> None:
            if key in self.model:
                return  # the storage decides whether the old object remains
            writer = self.storage.open_writer(key)
            writer.write_at(0, data)
            writer.abort()

        @rule(keys=st.lists(_KEYS, max_size=4))
        def delete(self, keys: list[str]) -> None:
            self.storage.delete(keys)
            for key in keys:
                self.model.pop(key, None)

        @rule(key=_KEYS, start=_PLACES, length=st.none() | _PLACES)
        def get(self, key: str, start: int, length: int | None) -> None:
            stop = None if length is None else start + length
            try:
                data = self.storage.get(key, start, stop)
            except ObjectNotFoundError:
                assert key not in self.model
            else:
                assert data == self.model[key][start:stop]

        @rule(key=_KEYS, ranges=st.lists(st.tuples(_PLACES, _PLACES), max_size=4))
        def get_into(self, key: str, ranges: list[tuple[int, int]]) -> None:
            buffers = [(start, bytearray(size)) for start, size in ranges]
            try:
                self.storage.get_into(key, [(start, memoryview(buffer)) for start, buffer in buffers])
            except ObjectNotFoundError:
                assert key not in self.model
            except CorruptCheckpointError:
                assert any(start + size > len(self.model[key]) for start, size in ranges)
            else:
                for start, buffer in buffers:
                    assert buffer == self.model[key][start : start + len(buffer)]

        @rule(key=_KEYS)
        def size(self, key: str) -> None:
            try:
                nbytes = self.storage.size(key)
            except ObjectNotFoundError:
                assert key not in self.model
            else:
                assert nbytes == len(self.model[key])

        @rule(directory=_DIRECTORIES)
        def list(self, directory: str) -> None:
            below = directory + "/" if directory else ""
            expected = sorted([key for key in self.model if key.startswith(below)])
            keys = [*self.storage.list(directory)]
            assert keys == expected
            names = {key[len(below) :].partition("/")[:2] for key in expected}
            assert [*self.storage.list_names(directory)] == sorted([name + slash for name, slash in names])

    return StorageMachine
