"""Locks: holds that are locked directories. The kernel releases them when the process dies."""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Literal, Self

from ckptcore.commit.holding import ADMINISTRATION, Hold, Purpose, new_holder
from ckptcore.errors import SaveLostError, StorageError
from ckptcore.io.threads import renew_in_children
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = ["LockedHold", "LockedSteps"]

logger = logging.getLogger("ckptcore.commit")

_NAME: Final = re.compile(r"(.+)\.[0-9a-f]{16}/", re.DOTALL)


class LockedHold:
    """A directory that this process has locked. Any thread."""

    def __init__(self, lock: AbstractContextManager[None], subject: str) -> None:
        """Take charge of a lock.

        Args:
            lock: closed or not entered: both mean that it is held.
            subject: what is held, in words, for errors.
        """
        self._lock = lock
        self._subject = subject
        self._state: Literal["held", "closed", "parent's"] = "held"
        renew_in_children(self)

    def renew(self) -> None:
        """Hold nothing: this is a forked child, and what was held is its parent's."""
        self._state = "parent's"

    def check(self) -> None:
        """See `Hold`."""
        if self._state == "parent's":
            raise SaveLostError(
                f"{self._subject} is held by the process that this one was forked from; save from there, "
                "or open what you need in this process"
            )
        if self._state == "closed":
            raise SaveLostError(f"{self._subject} is no longer held: it was closed; open it again")

    def close(self) -> None:
        """See `Hold`."""
        if self._state != "held":
            return
        self._state = "closed"
        try:
            self._before_unlocking()
        finally:
            self._lock.__exit__(None, None, None)

    def _before_unlocking(self) -> None:
        """Tidy up while nobody else can hold it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _LockedStep(LockedHold):
    """A locked directory that goes with its hold."""

    def __init__(
        self, directories: AtomicDirectories, key: str, lock: AbstractContextManager[None], subject: str
    ) -> None:
        super().__init__(lock, subject)
        self._directories = directories
        self._key = key

    def _before_unlocking(self) -> None:
        _remove(self._directories, self._key)


class LockedSteps:
    """How steps are held where directories can be locked. See `HoldsOfSteps`.

    A hold counts from when its directory is locked. Who finds one that is not locked removes it under its lock, so
    whoever has made it and not locked it yet notices, and makes another.
    """

    def __init__(self, store: StorageBackend, directories: AtomicDirectories) -> None:
        """Hold steps of the directory that `store` was opened at; `directories` is the same storage."""
        self._store = store
        self._directories = directories

    def take(self, purpose: Purpose, name: str) -> Hold:
        """See `HoldsOfSteps`."""
        while True:
            key = f"{ADMINISTRATION}/{purpose}/{name}.{new_holder().hold_id}"
            lock = self._directories.lock_directory(key)
            if lock is not None:
                return _LockedStep(self._directories, key, lock, f"the step {name}")
            # Somebody looks at this very moment whether its holder lives.

    def living(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """See `HoldsOfSteps`."""
        found: set[str] = set()
        for entry in self._store.list_names(f"{ADMINISTRATION}/{purpose}"):
            matched = _NAME.fullmatch(entry)
            if matched is None or (name is not None and matched[1] != name):
                continue
            if self._is_held(f"{ADMINISTRATION}/{purpose}/{entry.removesuffix('/')}"):
                found.add(matched[1])
        return frozenset(found)

    def _is_held(self, key: str) -> bool:
        try:
            lock = self._directories.lock_directory(key)
        except StorageError as error:
            # Another user's, perhaps. What cannot be known to be dead is alive.
            logger.warning("whether the holder of %s lives cannot be found out, so it is left alone: %s", key, error)
            return True
        if lock is None:
            return True
        with lock:
            _remove(self._directories, key)
        return False


def _remove(directories: AtomicDirectories, key: str) -> None:
    """Remove a directory whose lock this process has; what stays is found again, as that of a dead holder."""
    try:
        directories.delete_directory(key)
    except StorageError as error:
        logger.warning("%s cannot be removed: %s", key, error)
