"""A killed owner of a directory on a file system without locks. It leaves its lease."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptcore.builtin import local_directories
from ckptcore.builtin.local import open_local
from ckptcore.commit import locks
from ckptcore.commit.location import commit_method
from tests.ownership.fake_clock import FakeClock
from tests.ownership.lockable_storages import OPTIONS


def leave_lease(directory: Path, setattr: Callable[[object, str, object], None] = setattr) -> locks.Lock:
    """Own a directory, and leave the lease as a killed job does. The caller must keep the result.

    After this call, the locks of this process do not reach other hosts, as on FUSE. Time passes only for a process that
    waits for the lease.
    """
    clock = FakeClock()
    dead = clock.process()
    setattr(local_directories, "has_locks_of_all_hosts", lambda descriptor: False)
    setattr(locks, "SYSTEM_CLOCK", clock)
    directory.mkdir(parents=True, exist_ok=True)
    owned = commit_method(open_local(str(directory), OPTIONS)).locks(str(directory), clock=dead).own()
    dead.is_frozen = True
    return owned
