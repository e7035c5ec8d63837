"""The attic: a storage of objects in an SQLite database."""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from ckptcore.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
)
from ckptcore.protocols import Buffer, IfAbsent, IfTag, ObjectWriter, PutCondition, StorageBackend, StorageOptions

T = TypeVar("T")
TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, tag TEXT NOT NULL, data BLOB NOT NULL)"


def open_attic(url: str, options: StorageOptions) -> StorageBackend:
    """Open a directory in a database. Creates nothing."""
    path = url.removeprefix("toy://")
    database, suffix, directory = path.partition(".sqlite")
    if not suffix or (directory and not directory.startswith("/")):
        raise InvalidLocationError(f"{url!r} names no database; expected toy://<path>.sqlite/<directory>")
    return Attic(Path(database + ".sqlite"), directory.strip("/"), durable=options.durable)


class Attic(StorageBackend):
    """A directory in a database."""

    def __init__(self, database: Path, directory: str, *, durable: bool) -> None:
        self._database = database
        self._prefix = checked(directory) + "/" if directory else ""
        self._durable = durable

    def _run(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Run an action in one transaction."""
        try:
            with closing(sqlite3.connect(self._database, timeout=60, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(TABLE)
                try:
                    result = action(connection)
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
                return result
        except sqlite3.Error as error:
            kind = StorageFullError if "full" in str(error) else StorageError
            raise kind(f"the attic {self._database} failed: {error}") from error

    def _row(self, key: str) -> tuple[bytes, str]:
        full = self._prefix + checked(key)
        if not self._database.exists():
            raise ObjectNotFoundError(f"there is no attic {self._database}, so no {full}")
        row = self._run(lambda attic: attic.execute("SELECT data, tag FROM objects WHERE key = ?", (full,)).fetchone())
        if row is None:
            raise ObjectNotFoundError(f"the attic {self._database} has no {full}")
        return bytes(row[0]), str(row[1])

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._row(key)[0][start:stop]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        data, tag = self._row(key)
        return data, tag

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        data = self._row(key)[0]
        for offset, buffer in ranges:
            part = data[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                raise CorruptCheckpointError(
                    f"{key} has {len(data)} bytes, and {len(buffer)} from {offset} are read",
                    key=key,
                    start=len(data),
                    stop=offset + len(buffer),
                )
            buffer[:] = part

    def size(self, key: str) -> int:
        return len(self._row(key)[0])

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        full = self._prefix + checked(key)
        self._database.parent.mkdir(parents=True, exist_ok=True)

        tag = uuid.uuid4().hex

        def store(attic: sqlite3.Connection) -> None:
            row = attic.execute("SELECT tag FROM objects WHERE key = ?", (full,)).fetchone()
            if isinstance(condition, IfAbsent) and row is not None:
                raise ConditionFailedError(f"{full} is there already")
            if isinstance(condition, IfTag) and (row is None or row[0] != condition.tag):
                raise ConditionFailedError(f"{full} does not have the tag {condition.tag}")
            attic.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", (full, tag, data))

        self._run(store)
        return tag

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        return _Writer(self, checked(key))

    def list(self, prefix: str = "") -> Iterator[str]:
        directory = checked(prefix.removesuffix("/")) + "/" if prefix else ""
        return iter([key for key in self._keys() if key.startswith(directory)])

    def _keys(self) -> Sequence[str]:
        if not self._database.exists():
            return []
        rows = self._run(lambda attic: attic.execute("SELECT key FROM objects").fetchall())
        return sorted(key[len(self._prefix) :] for (key,) in rows if key.startswith(self._prefix))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        directory = checked(prefix.removesuffix("/")) + "/" if prefix else ""
        below = [key[len(directory) :] for key in self._keys() if key.startswith(directory)]
        return sorted({name + slash for name, slash, _ in (key.partition("/") for key in below)})

    def delete(self, keys: Sequence[str]) -> None:
        full = [(self._prefix + checked(key),) for key in keys]
        if full and self._database.exists():
            self._run(lambda attic: attic.executemany("DELETE FROM objects WHERE key = ?", full))

    def sync(self, keys: Sequence[str]) -> None:
        for key in keys:  # each transaction is already durable
            checked(key)


class _Writer:
    def __init__(self, attic: Attic, key: str) -> None:
        self._attic = attic
        self._key = key
        self._lock = threading.Lock()
        self._data = bytearray()

    def write_at(self, offset: int, data: Buffer) -> None:
        with self._lock:
            missing = offset + len(data) - len(self._data)
            if missing > 0:
                self._data.extend(bytes(missing))
            self._data[offset : offset + len(data)] = data

    def finish(self) -> None:
        self._attic.put(self._key, bytes(self._data))

    def abort(self) -> None:
        self._data = bytearray()


def checked(key: str) -> str:
    """Return the key. Raise an error if it is invalid."""
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidLocationError(f"{key[:200]!r} is no key of an object")
    try:
        key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidLocationError(f"{key[:200]!r} is no key of an object") from error
    return key
