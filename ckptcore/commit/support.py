"""StorageSupport: what the storages of a Context were found to support, each tried once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.io.threads import reset_in_children
from ckptcore.protocols import AtomicDirectories, DirectoryFeatures, StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.leased_locks import LeasedLocks
    from ckptcore.commit.leases import Clock
    from ckptcore.context import WithoutConditions

logger = logger_named("ckptcore.commit")

_MAX_REMEMBERED: Final = 1024
"""Most directories whose support is remembered. Beyond this, some are tried twice."""

T = TypeVar("T")

_Place: TypeAlias = tuple[str, bytes]
"""The address of a directory, and its mount: another file system may be mounted there later."""


class StorageSupport:
    """Remember what storages were found to support. One object for each Context. Thread-safe.

    Attributes:
        without: what a save does on a storage without conditional puts: see `IOOptions.without_conditions`.
        conditional_puts: by tested service (scheme and host): True if it supports them, False if it ignores conditions.
        creates_missing: by tested service: True if it accepts the tag of an object that does not exist any more.
        lacks_locks: True once a directory without locks was found.
    """

    def __init__(self, without: WithoutConditions = "refuse", clock: Clock | None = None) -> None:
        """Try nothing yet. `clock` is the clock of leases; None: the system's."""
        self.without: Final = without
        self._clock = clock
        self.conditional_puts: dict[str, bool] = {}
        self.creates_missing: dict[str, bool] = {}
        self.lacks_locks = False
        self._leases: dict[_Place, LeasedLocks | None] = {}
        self._features: dict[_Place, DirectoryFeatures] = {}
        self._said: set[str] = set()
        self._lock = threading.Lock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def features(self, directory: StorageBackend, own: str, mount: bytes) -> DirectoryFeatures:
        """Return what the file system of a directory was found to do. It is tried once, and said once.

        Args:
            directory: a storage with `AtomicDirectories`, opened at a directory of checkpoints.
            own: a directory in it that exists, and that this process has locked.
            mount: see `PlaceLimits`.

        Raises:
            StorageError
        """
        key = _url(directory), mount
        known = self._features.get(key)
        if known is not None:
            return known
        features = _remember(self._features, key, cast(AtomicDirectories, directory).probe(own))
        weaker = [] if features.exchanges else ["cannot exchange directories, so no checkpoint is replaced atomically"]
        if features.merges:
            weaker.append(
                f"treats names as equal that differ in {', '.join(sorted(features.merges))}; saves refuse such names"
            )
        if weaker:
            logger.info("%s: this file system %s", key[0], ", and ".join(weaker))
        return features

    def say_once(self, directory: StorageBackend, weaker: str) -> None:
        """Log one warning about what is weaker in a directory, with its address."""
        text = f"{_url(directory)}: {weaker}"
        with self._lock:
            if text in self._said:
                return
            if len(self._said) >= _MAX_REMEMBERED:
                self._said.clear()
            self._said.add(text)
        logger.warning("%s", text)

    def leases(self, directory: StorageBackend) -> LeasedLocks | None:
        """Return the leases that replace the locks of a file system without locks; None if it has locks.

        One object for each directory, because it has to observe the leases of other processes to find expired ones.

        Args:
            directory: a storage with `AtomicDirectories`, opened at a directory of checkpoints.
        """
        directories = cast(AtomicDirectories, directory)
        try:
            key = _url(directory), directories.limits(INTERNAL_DIRECTORY).mount
            with self._lock:
                if key in self._leases:
                    return self._leases[key]
            has_locks = directories.has_locks()  # without the lock: a mount may not answer
        except StorageError:
            return None  # the operation that needs a lock fails with the reason
        with self._lock:
            if key in self._leases:  # another thread was faster
                return self._leases[key]
            self.lacks_locks = self.lacks_locks or not has_locks
            return _remember(self._leases, key, None if has_locks else self._new_leases(directory))

    def _new_leases(self, directory: StorageBackend) -> LeasedLocks:
        from ckptcore.commit.leased_locks import LeasedLocks  # only file systems without locks need it here

        display = _url(directory)
        logger.warning(
            "%s: other hosts may not see the locks (flock) of this file system, so ckptcore uses leases. "
            "After a process is killed, the files of its save and its ownership of a run remain until another process "
            "has seen its lease unchanged for more than a minute; Checkpointer(if_in_use='take over') waits for that. "
            "On Lustre, the mount option flock avoids this",
            display,
        )
        return LeasedLocks(directory, display, clock=self._clock)


def _remember(known: dict[_Place, T], place: _Place, value: T) -> T:
    """Remember what was found in a directory that has an address. Return it."""
    if len(known) >= _MAX_REMEMBERED:
        known.clear()
    if place[0]:
        known[place] = value
    return value


def _url(directory: StorageBackend) -> str:
    """Return the address of a directory; empty if it has none."""
    address = directory.address
    return "" if address is None else address.url
