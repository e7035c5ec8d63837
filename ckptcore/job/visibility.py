"""Checks that the processes of a job share one directory.

The leader creates an object with a new name in the directory, and the other processes look for it. Comparing properties
of the directory is not enough: local disks of different hosts have the same paths, often the same devices and inodes,
and the same old steps.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from ckptcore.commit.leases import SYSTEM_CLOCK
from ckptcore.commit.location import Location
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.commit.root import ROOT_KEY, Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.errors import NotSharedError, ObjectNotFoundError
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.protocols import StorageBackend

_TIMEOUT_SECONDS: Final = 10.0
"""Time limit to find the object of the leader. Network file systems may cache for seconds that it does not exist."""

_PROBES: Final = f"{INTERNAL_DIRECTORY}/probe-"


@contextmanager
def seen_by_all(agreement: Agreement, name: str, directory: str, look: Callable[[], bool]) -> Iterator[None]:
    """Check that every process sees the object that the leader creates in the body. Call it on every rank in a stage.

    Costs one exchange, after which the other ranks look for the object. The end of the stage reports ranks that do not
    see it.

    Args:
        agreement: the agreement of the job. In a job of one process, nothing is checked.
        name: the name of the exchange.
        directory: the directory as seen by this process: an absolute path or a URL.
        look: returns True if the object exists; may raise `ObjectNotFoundError`.

    Raises:
        NotSharedError: this process does not see the object within 10 seconds. If the leader failed to create it, the
            other ranks do not look for it.
    """
    if agreement.size == 1:
        yield
        return
    try:
        yield
    except BaseException:
        if agreement.rank == 0:
            agreement.lead(name, lambda: None)  # the others wait for this; the end of the stage reports the error
        raise
    leader_directory: str | None = agreement.lead(name, lambda: f"{directory} on {_host()}")
    if agreement.rank != 0 and leader_directory is not None:
        _look_for(look, directory, leader_directory)


def sees_claim(claimed: Claim, location: Location) -> bool:
    """Return True if this process sees the claim that the leader wrote.

    Raises:
        ObjectNotFoundError: this process sees no root at all.
    """
    expected = encode_claim(claimed)
    store = location.commit_method.store_of(location, claimed.save_id)
    return store.get(ROOT_KEY, 0, len(expected) + 1) == expected


def expect_claim(claimed: Claim, location: Location) -> None:
    """Check that a worker sees the claim of its controller, which is rank 0, before it writes.

    Raises:
        NotSharedError: this process does not see the claim within 10 seconds.
    """
    _look_for(lambda: sees_claim(claimed, location), location.absolute, location.display)


@contextmanager
def expect_one_directory(
    agreement: Agreement, directories: Callable[[], Sequence[tuple[StorageBackend, str]]]
) -> Iterator[None]:
    """Check that all processes share directories that the leader opens in the body. Call it on every rank.

    The body is the stage "own". The object of the leader is created at its end, so that this costs one more stage.

    Args:
        agreement: the agreement of the job. In a job of one process, nothing is checked.
        directories: returns each storage, opened at a directory, which need not be durable; and the directory as seen
            by this process, an absolute path or a URL. Called after the body.

    Raises:
        NotSharedError: this process does not see the object of the leader.
        RankFailedError: another process does not see it.
    """

    def create() -> JSON:
        key = _PROBES + os.urandom(8).hex()
        for store, _ in directories():
            of_killed_leaders = [name for name in store.list(INTERNAL_DIRECTORY) if name.startswith(_PROBES)]
            store.delete(of_killed_leaders)
            store.put(key, b"")
        return [key, [f"{directory} on {_host()}" for _, directory in directories()]]

    with agreement.stage("own") as stage:
        yield
        stage.decide = create if agreement.size > 1 else None
    if agreement.size == 1:
        return
    key, of_leader = stage.decision
    try:
        with agreement.stage("shared"):
            if agreement.rank != 0:
                for (store, directory), leader_directory in zip(directories(), of_leader, strict=True):
                    _look_for(partial(_exists, store, key), directory, leader_directory)
    finally:
        if agreement.rank == 0:
            for store, _ in directories():
                store.delete([key])


def _exists(store: StorageBackend, key: str) -> bool:
    return store.size(key) == 0


def _look_for(look: Callable[[], bool], directory: str, leader_directory: str) -> None:
    for _ in SYSTEM_CLOCK.attempts(_TIMEOUT_SECONDS, first=0.05, last=1.0):
        with suppress(ObjectNotFoundError):
            if look():
                return
    raise NotSharedError(
        f"{directory}: {_host()} cannot see the files that rank 0 created in {leader_directory} (waited "
        f"{_TIMEOUT_SECONDS:g} s). All processes of a job must share one directory: use a file system that all hosts "
        "mount, or the URL of an object store. Or save in each process alone, into separate directories, with a "
        "Context whose coordinator has one rank"
    )


def _host() -> str:
    return f"host {platform.node() or 'without a name'}"
