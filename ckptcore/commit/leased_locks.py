"""LeasedLocks: locks that are leases, for object stores and for file systems without locks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from ckptcore.commit.leases import Lease, SeenLease, new_holder, read_lease, take_lease
from ckptcore.commit.locks import (
    OWNER,
    OWNER_LEASE,
    OWNER_RECORD,
    IfInUse,
    Lock,
    Locks,
    Purpose,
    SeenOwner,
    is_absent,
    read_owner,
)
from ckptcore.commit.names import INTERNAL_DIRECTORY, save_of_hidden
from ckptcore.commit.subdirectory import has_directories, make_directory
from ckptcore.errors import DirectoryInUseError, StorageError, StorageFullError
from ckptcore.events import logger_named
from ckptcore.protocols import IF_ABSENT, IfTag

logger = logger_named("ckptcore.commit")

_RENEWALS_PER_LEASE: Final = 3


class LeasedLocks(Locks):
    """Locks that are leases, for object stores, and for file systems without locks. See `Locks`.

    A lease is valid until this object has seen it unchanged for longer than a lease time. Before an expired lease is
    ignored, it is marked as released in the storage, so that a suspended holder fails when it checks.
    """

    def _is_locked(self, key: str) -> bool:
        if key.endswith(".json"):
            return super()._is_locked(key)
        # A process on a host with kernel locks has locked this directory. Its record is never renewed, so an old record
        # does not prove that the process has ended. A deletion is short, so its lock expires here. A reader may need
        # its step for long, so its pin does not expire.
        is_pin = key.startswith(f"{INTERNAL_DIRECTORY}/pins/")
        return is_pin or not self._seen.is_expired(SeenLease(key, "", None))

    def _lock(self, lease: Lease, number: int = 0, key: str = "") -> Lock:
        """Begin to renew a lease on a thread. Return it as a lock."""
        try:
            stop = self._clock.repeat(self._lease_seconds / _RENEWALS_PER_LEASE, lease.renew, lease.release)
        except BaseException:
            lease.release()
            raise

        def release() -> None:
            try:
                lease.release()
            except StorageError as error:
                logger.warning("%s cannot be released, so its lease has to expire: %s", lease.subject, error)
            stop()

        return Lock(lease.subject, check=lease.check, release=release, number=number, key=key)

    def _take(self, purpose: Purpose, name: str) -> Lock:
        return self._take_as(f"{INTERNAL_DIRECTORY}/{purpose}/{name}.{new_holder().hold_id}.json", f"the step {name}")

    def _take_as(self, key: str, subject: str) -> Lock:
        lease = take_lease(self._store, key, subject, "delete", IF_ABSENT, self._lease_seconds, self._clock)
        if lease is None:
            raise StorageError(
                f"cannot lock {subject}: {key} already exists, although its name is random. Check if other "
                "software writes there"
            )
        return self._lock(lease, key=key)

    def lock_directory(self, name: str, *, waits: bool = False) -> Lock | None:
        """Lock a hidden directory of a save. Return None if another process has locked it.

        Of two processes that call this at the same time, one or both see the lease of the other, and withdraw.

        Args:
            name: the name of the directory.
            waits: wait about one lease time for a renewal of existing leases, and break the leases that are not
                renewed.

        Raises:
            StorageError
        """
        name = save_of_hidden(name)
        own = f"{INTERNAL_DIRECTORY}/saving/{name}.{new_holder().hold_id}.json"
        if waits and not self._await_directory(name):
            return None
        with ExitStack() as stack:
            lock = stack.enter_context(self._take_as(own, f"the directory {name}"))
            others = [key for key, locked in self._keys("saving").items() if locked == name and key != own]
            if any(self._is_locked(key) for key in others):
                return None
            stack.pop_all()
            return lock

    def unannounced_directory(self, name: str) -> Lock | None:
        """Return a lock to delete a hidden directory on a disk too full for a lease. None if another process locked it.

        Only a deletion can make room. If another process takes a lease at the same time, it also finds the disk full,
        or it loses its files and notices that at its commit.
        """
        if self._locked("saving", save_of_hidden(name)):
            return None
        return Lock(f"the directory {name}", check=lambda: None, release=lambda: None)

    def _await_directory(self, name: str) -> bool:
        """Wait until the leases of a hidden directory have expired. Return False if one was renewed."""
        for key, locked in self._keys("saving").items():
            seen = read_lease(self._store, key) if locked == name else None
            try:
                if seen is not None and not seen.is_released:
                    self._await_expiry(seen)
            except DirectoryInUseError:
                return False
        return True

    def sweep(self) -> None:
        """See `Locks`."""
        super().sweep()
        self._locked("saving")

    def _keys(self, purpose: Purpose) -> Mapping[str, str]:
        keys = super()._keys(purpose)
        self._seen.forget_others(f"{INTERNAL_DIRECTORY}/{purpose}/", keys)
        return keys

    def may_expire(self, name: str) -> bool:
        """See `Locks`. Pins of this process, and of hosts with kernel locks, do not expire."""
        for key, step in self._keys("pins").items():
            if step == name and not key.endswith(".json"):
                return False
            seen = read_lease(self._store, key) if step == name else None
            if seen is not None and seen.holder is not None and seen.holder.is_here and not seen.is_released:
                return False
        return True

    def _own(self, if_in_use: IfInUse, at_least: int) -> Lock:
        while True:
            self._expect_unlocked(if_in_use)
            seen = self._unleased(if_in_use)
            number = self._next_number(seen, at_least)
            lease = take_lease(
                self._store,
                OWNER_LEASE,
                self._owned,
                "mark",
                IF_ABSENT if seen is None else IfTag(seen.tag),
                self._lease_seconds,
                self._clock,
                number=number,
                before=None if seen is None else seen.holder,
                is_absent=partial(is_absent, self._store),
            )
            if lease is not None:
                lock = self._lock(lease, number)
                try:
                    if has_directories(type(self._store)):
                        with suppress(StorageFullError):  # `is_absent` looks for this directory
                            make_directory(self._store, OWNER)
                    # Again, because an owner with a kernel lock writes its record before it looks for leases.
                    self._expect_unlocked("error")
                except BaseException:
                    lock.close()
                    raise
                return lock
            # Another process took the lease first. Read it again, because that process may release it.

    def _expect_unlocked(self, if_in_use: IfInUse) -> None:
        """Check that no process on a host with locks owns the directory. Its lock cannot be seen here.

        Raises:
            DirectoryInUseError
        """
        holder = read_owner(self._store)
        if holder is None or holder.released:
            return
        if if_in_use == "error":
            raise self._in_use(
                f"{holder.describe()} owns it, or failed without releasing it, on a host with locks that this host "
                "cannot see",
                ". If that process has failed, pass if_in_use='take over', or open the directory on that host",
            )
        # Its record is never renewed, so the owner may still run. If it does, it notices the takeover before its next
        # commit.
        logger.warning("%s is taken over from %s, which may be alive", self._display, holder.describe())
        self._store.put(OWNER_RECORD, replace(holder, released=True).encode())
        self._clock.sleep(self._lease_seconds / 2)  # the owner may complete an operation that follows its last check

    def _locked_owner(self) -> SeenOwner | None:
        holder = read_owner(self._store)
        return None if holder is None or holder.released else SeenOwner(holder, None)
