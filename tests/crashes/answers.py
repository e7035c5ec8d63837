"""An object storage that loses answers. Clients retry such requests, or requests are executed again later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from ckptcore_testing.faulty_storage import with_storage

import ckptcore
from ckptcore.builtin.memory import MemoryStorage, MemoryStorages
from ckptcore.errors import AtomicityError, ObjectNotFoundError, StorageError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import IfTag, ObjectWriter, PutCondition, StorageBackend, StorageOpener, StorageOptions

SCHEME: Final = "answers"
"""The scheme of the storage."""

Mishap: TypeAlias = Literal["lost", "retried", "late", "never sent"]
"""Outcomes of a request. Its client gets an error, except that a client that retries gets the second answer.

The request is executed ("lost"), executed twice by a client that retries ("retried"), executed just before the next
change of the same object ("late"), or not executed ("never sent").
"""

Kept: TypeAlias = Literal["kept", "kept if it exists", "ignored", "unknown"]
"""Handling of conditions: the storage checks them, checks only tags of existing objects, ignores or refuses them."""


class Storages:
    """Objects in memory that all simulated processes of a test share."""

    def __init__(self) -> None:
        self.memory = MemoryStorages()

    def open(self) -> MemoryStorage:
        """Return a storage of all objects."""
        return self.memory.open("memory://bucket", StorageOptions())

    def context(self, answers: Answers | None = None, **io: Any) -> ckptcore.Context:
        """Return a Context of a new simulated process that receives these answers."""
        plugin = _Plugin(self, answers or Answers())
        context = ckptcore.Context(
            plugins=ckptcore.context.PluginOptions(extra=[plugin]),
            io=ckptcore.context.IOOptions(threads=1, **io),
        )
        return with_storage(context, SCHEME, plugin.open)


class Answers:
    """Answers to the changes of a process, which are puts, completed objects, deletions and aborted uploads.

    Attributes:
        changes: the method and the keys of each change, in order of their numbers.
        replays: functions that repeat a change, by number.
    """

    def __init__(
        self,
        mishaps: Mapping[int, Mishap] | None = None,
        *,
        kept: Kept = "kept",
        before: Callable[[int, str, Sequence[str]], None] | None = None,
        opening: Callable[[str], None] | None = None,
    ) -> None:
        """Assign outcomes to changes by their number.

        Args:
            mishaps: the outcome of changes, by number.
            kept: the handling of conditions.
            before: called before each change with its number, its method and its keys.
            opening: called with the key before an object is opened for writing in pieces. This is not a change.
        """
        self._mishaps = mishaps or {}
        self.kept: Final = kept
        self._before = before
        self.opening: Final = opening or (lambda key: None)
        self.changes: list[tuple[str, tuple[str, ...]]] = []
        self.replays: list[Callable[[], object]] = []
        self._waiting: list[tuple[str, Callable[[], object]]] = []

    def do(self, name: str, keys: Sequence[str], change: Callable[[], Any], again: Callable[[], Any]) -> Any:
        """Run a change with the outcome for its number."""
        number = len(self.changes)
        self.changes.append((name, tuple(keys)))
        self.replays.append(again)
        if self._before is not None:
            self._before(number, name, tuple(keys))
        for key, late in [request for request in self._waiting if request[0] in keys]:
            self._waiting.remove((key, late))
            quietly(late)
        mishap = self._mishaps.get(number)
        if mishap == "late":
            self._waiting.append((keys[0], change))
        elif mishap != "never sent":
            result = change()
            if mishap is None:
                return result
            if mishap == "retried":
                return again()
        raise StorageError(f"the test lost the answer to {name} of {', '.join(keys)}")


def quietly(change: Callable[[], object]) -> None:
    """Execute a request that arrives late. Ignore a refusal."""
    try:
        change()
    except (StorageError, ValueError):
        return  # refused: a condition failed, or the upload has ended


class _Plugin:
    def __init__(self, storages: Storages, answers: Answers) -> None:
        self._storages = storages
        self._answers = answers

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {SCHEME: self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        inner = self._storages.memory.open(url.replace(SCHEME, "memory", 1), options)
        return _Answering(inner, self._answers)


class _Answering(MemoryStorage):
    """A storage in memory with the given answers."""

    def __init__(self, inner: MemoryStorage, answers: Answers) -> None:
        super().__init__(inner._store, inner._prefix, inner._url)  # shares the objects of `inner`
        self._answers = answers

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        if condition is not None and self._answers.kept == "unknown":
            raise AtomicityError("this storage knows no conditions")
        kept = condition if self._answers.kept.startswith("kept") else None
        if self._answers.kept == "kept if it exists" and isinstance(condition, IfTag) and self._lacks(key):
            kept = None

        def change() -> str:
            return super(_Answering, self).put(key, data, condition=kept)

        return str(self._answers.do("put", [key], change, change))

    def _lacks(self, key: str) -> bool:
        try:
            self.size(key)
        except ObjectNotFoundError:
            return True
        return False

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        self._answers.opening(key)
        return _Writer(key, super().open_writer(key, size), self._answers)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        self._answers.opening(key)
        kept = self._answers.kept.startswith("kept")
        inner = super().open_new(key, size) if kept else super().open_writer(key, size)
        return _Writer(key, inner, self._answers)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""

        def change() -> None:
            super(_Answering, self).delete(keys)

        self._answers.do("delete", list(keys), change, change)

    def abort_uploads(self, prefix: str = "") -> int:
        """See `StorageBackend`."""

        def change() -> int:
            return super(_Answering, self).abort_uploads(prefix)

        return int(self._answers.do("abort_uploads", [prefix], change, change))


class _Writer:
    def __init__(self, key: str, inner: ObjectWriter, answers: Answers) -> None:
        self._key = key
        self._inner = inner
        self._answers = answers

    def write_at(self, offset: int, data: Any) -> None:
        self._inner.write_at(offset, data)

    def finish(self) -> None:
        self._answers.do("finish", [self._key], self._inner.finish, self._again)

    def _again(self) -> None:
        """Refuse a repeated request: the upload no longer exists."""
        raise StorageError(f"there is no upload of {self._key} any more")

    def abort(self) -> None:
        self._inner.abort()
