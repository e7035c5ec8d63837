"""Storages with the faults of a `FaultPlan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from ckptcore import Context
from ckptcore.errors import CorruptCheckpointError
from ckptcore.plugins import Plugins, installed_plugins
from ckptcore.protocols import (
    AtomicDirectories,
    Buffer,
    DirectoryFeatures,
    DirectoryLock,
    ObjectWriter,
    PlaceLimits,
    PutCondition,
    StorageAddress,
    StorageBackend,
    StorageCapabilities,
    StorageOpener,
)
from ckptcore.runtime import with_registry
from ckptcore_testing.faults import FaultPlan


def with_faults(storage: StorageBackend, plan: FaultPlan) -> FaultyStorage:
    """Return a storage with the faults of a plan. It implements `AtomicDirectories` if `storage` does."""
    if isinstance(storage, AtomicDirectories):
        return FaultyDirectories(storage, storage, plan)
    return FaultyStorage(storage, plan)


class _PluginsWithStorage(Plugins):
    """The installed plugins and one more storage. Shares their caches."""

    def __init__(self, scheme: str, opener: StorageOpener) -> None:
        vars(self).update(vars(installed_plugins()))
        self._scheme, self._opener = scheme, opener

    def storage(self, scheme: str) -> StorageOpener:
        """See `Plugins`."""
        return self._opener if scheme == self._scheme else super().storage(scheme)


def with_storage(context: Context, scheme: str, opener: StorageOpener) -> Context:
    """Return a copy of a Context that opens URLs of a scheme with `opener`.

    A Context with one more plugin would be slower: its first Runtime registers all plugins again, which takes
    milliseconds. Tests that interrupt each operation create thousands of Contexts.
    """
    return with_registry(context, _PluginsWithStorage(scheme, opener))


class FaultyStorage(StorageBackend):
    """A storage with the faults of a plan. Thread-safe.

    `open_reader`, `open_stamped` and `delete_while` are inherited from `StorageBackend`, and call methods with faults.
    """

    def __init__(self, inner: StorageBackend, plan: FaultPlan) -> None:
        """Wrap a storage. Use `with_faults` to keep its `AtomicDirectories`."""
        self.inner = inner
        self.plan = plan

    @property
    def capabilities(self) -> StorageCapabilities:
        """The capabilities of the wrapped storage."""
        return self.inner.capabilities

    @property
    def address(self) -> StorageAddress | None:
        """None, because native I/O would bypass the faults."""
        return None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        step = self.plan.begin("get", [key], start)
        data = step.run(lambda: self.inner.get(key, start, stop))
        data = data[: max(0, len(data) - step.missing_bytes())]
        self.plan.count_read(len(data))
        return bytes(step.flipped(data))

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        step = self.plan.begin("get_with_tag", [key])
        data, tag = step.run(lambda: self.inner.get_with_tag(key))
        data = data[: max(0, len(data) - step.missing_bytes())]
        self.plan.count_read(len(data))
        return bytes(step.flipped(data)), tag

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        nbytes = sum([len(buffer) for _, buffer in ranges])
        step = self.plan.begin("get_into", [key], ranges[0][0] if ranges else 0, nbytes)
        step.run(lambda: self.inner.get_into(key, ranges), lambda: self.inner.get_into(key, ranges[: len(ranges) // 2]))
        self.plan.count_read(nbytes)
        if ranges and step.missing_bytes():
            offset, buffer = ranges[-1]
            stop = offset + len(buffer)
            raise CorruptCheckpointError(
                f"{key} is too short: expected bytes {offset} to {stop}, and the test cut {step.missing_bytes()} off",
                key=key,
                start=max(offset, stop - step.missing_bytes()),
                stop=stop,
            )
        for bit in step.flips():
            index = bit // 8 % max(1, nbytes)
            for _, buffer in ranges:
                if index < len(buffer):
                    buffer[index] ^= 1 << bit % 8
                    break
                index -= len(buffer)

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        step = self.plan.begin("size", [key])
        return max(0, step.run(lambda: self.inner.size(key)) - step.missing_bytes())

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        step = self.plan.begin("put", [key], 0, len(data))
        self.plan.take_room(step.operation)
        return step.run(lambda: self.inner.put(key, bytes(step.flipped(data)), condition=condition))

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        step = self.plan.begin("open_writer", [key])
        return step.run(lambda: _FaultyWriter(key, self.inner.open_writer(key, size), self.plan))

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        step = self.plan.begin("open_new", [key])
        return step.run(lambda: _FaultyWriter(key, self.inner.open_new(key, size), self.plan))

    def abort_uploads(self, prefix: str = "") -> int:
        """See `StorageBackend`."""
        return self.plan.begin("abort_uploads", [prefix]).run(lambda: self.inner.abort_uploads(prefix))

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        return self.plan.begin("list", [prefix]).run(lambda: self.inner.list(prefix))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        return self.plan.begin("list_names", [prefix]).run(lambda: self.inner.list_names(prefix))

    def list_sizes(self, prefix: str = "") -> Mapping[str, int] | None:
        """See `StorageBackend`."""
        return self.plan.begin("list_sizes", [prefix]).run(lambda: self.inner.list_sizes(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self.plan.begin("delete", keys).run(
            lambda: self.inner.delete(keys), lambda: self.inner.delete(keys[: len(keys) // 2])
        )

    def defer_names(self, key: str) -> AbstractContextManager[object]:
        """See `StorageBackend`."""
        return self.inner.defer_names(key)

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self.plan.begin("sync", keys).run(
            lambda: self.inner.sync(keys), lambda: self.inner.sync(keys[: len(keys) // 2])
        )


class FaultyDirectories(FaultyStorage):
    """A storage that implements `AtomicDirectories`, with the faults of a plan."""

    def __init__(self, inner: StorageBackend, directories: AtomicDirectories, plan: FaultPlan) -> None:
        """Wrap a storage. `inner` and `directories` are the same object."""
        super().__init__(inner, plan)
        self._directories = directories

    def lock_directory(self, key: str) -> DirectoryLock | None:
        """See `AtomicDirectories`. A crash releases the lock."""

        def lock() -> DirectoryLock | None:
            held = self._directories.lock_directory(key)
            return None if held is None else self.plan.hold(held)

        return self.plan.begin("lock_directory", [key]).run(lock)

    def has_locks(self) -> bool:
        """See `AtomicDirectories`. Not an operation of the plan, so it has no faults."""
        return self._directories.has_locks()

    def probe(self, key: str) -> DirectoryFeatures:
        """See `AtomicDirectories`."""
        return self._directories.probe(key)

    def limits(self, key: str) -> PlaceLimits:
        """See `AtomicDirectories`."""
        return self._directories.limits(key)

    def can_move(self, key: str, onto: str) -> bool:
        """See `AtomicDirectories`."""
        return self._directories.can_move(key, onto)

    def rename(self, source: str, destination: str) -> None:
        """See `AtomicDirectories`."""
        step = self.plan.begin("rename", [source, destination])
        step.run(lambda: self._directories.rename(source, destination))

    def exchange(self, first: str, second: str) -> None:
        """See `AtomicDirectories`."""
        step = self.plan.begin("exchange", [first, second])
        step.run(lambda: self._directories.exchange(first, second))

    def place(self, source: str, destination: str, keys: Sequence[str]) -> None:
        """See `AtomicDirectories`. A crash midway moves half of the objects."""
        step = self.plan.begin("place", [source, destination])
        step.run(
            lambda: self._directories.place(source, destination, keys),
            lambda: self._directories.place(source, destination, keys[: len(keys) // 2]),
        )

    def replace(self, source: str, destination: str, stamp: str | None) -> None:
        """See `AtomicDirectories`."""
        step = self.plan.begin("replace", [source, destination])
        step.run(lambda: self._directories.replace(source, destination, stamp))

    def stamps(self, keys: Sequence[str]) -> Mapping[str, str]:
        """See `AtomicDirectories`."""
        return self.plan.begin("stamps", keys).run(lambda: self._directories.stamps(keys))

    def delete_unchanged(self, stamps: Mapping[str, str]) -> None:
        """See `AtomicDirectories`. A crash midway deletes half of the objects."""
        half = dict(list(stamps.items())[: len(stamps) // 2])
        self.plan.begin("delete_unchanged", list(stamps)).run(
            lambda: self._directories.delete_unchanged(stamps), lambda: self._directories.delete_unchanged(half)
        )

    def hide_from_others(self, old: str, new: str) -> None:
        """See `AtomicDirectories`."""
        step = self.plan.begin("hide_from_others", [old, new])
        step.run(lambda: self._directories.hide_from_others(old, new))

    def keep_attributes(self, old: str, new: str) -> None:
        """See `AtomicDirectories`."""
        self.plan.begin("keep_attributes", [old, new]).run(lambda: self._directories.keep_attributes(old, new))

    def sync_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self.plan.begin("sync_directory", [key]).run(lambda: self._directories.sync_directory(key))

    def delete_directory(self, key: str) -> None:
        """See `AtomicDirectories`. A crash midway deletes half of the objects."""

        def half() -> None:
            keys = list(self.inner.list(key))
            self.inner.delete(keys[: len(keys) // 2])

        self.plan.begin("delete_directory", [key]).run(lambda: self._directories.delete_directory(key), half)


class _FaultyWriter:
    def __init__(self, key: str, inner: ObjectWriter, plan: FaultPlan) -> None:
        self._key = key
        self._inner = inner
        self._plan = plan

    def write_at(self, offset: int, data: Buffer) -> None:
        step = self._plan.begin("write_at", [self._key], offset, len(data))
        self._plan.take_room(step.operation)
        step.run(
            lambda: self._inner.write_at(offset, step.flipped(data)),
            lambda: self._inner.write_at(offset, data[: len(data) // 2]),
        )

    def finish(self) -> None:
        self._plan.begin("finish", [self._key]).run(self._inner.finish)

    def abort(self) -> None:
        if self._plan.crashed:
            return  # a crashed process removes nothing
        try:
            step = self._plan.begin("abort", [self._key])
        except Exception:  # noqa: BLE001  # an injected error
            return  # abort never raises; if it fails, the object remains
        step.run(self._inner.abort)
