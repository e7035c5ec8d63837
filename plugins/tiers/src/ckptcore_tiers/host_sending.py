"""Senders of steps: one process copies a whole step, or each host sends its part.

An upload can take hours, so the processes do not wait for each other in an exchange of the job.
They communicate through objects in the far directory, under ``.ckptcore/uploads``. The leader
claims the location of the step, and writes a message with the step. The first process of each other
host polls for the message, sends its objects to the claim, and writes a mark. When all marks exist,
the leader commits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from ckptcore_tools.copies import copy_whole
from ckptcore_tools.copies.manifests import Manifest, StoredRoot
from ckptcore_tools.copies.transfers import Transfer

from ckptcore.commit.location import Location, SubPath, resolve_location
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.commit.root import HOST_COPIES, ROOT_KEY, Claim, PartialSave, Root
from ckptcore.commit.stored_root import LocationVersion, parse_root, read_root, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.events import logger_named
from ckptcore.io.threads import call_within
from ckptcore.model.metadata import ObjectRecord
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import save_created
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.hosts import Hosts
from ckptcore_tiers.near_tier import Deadline


class StepUpload(NamedTuple):
    """A committed step to copy to the far directory.

    Attributes:
        step: number of the step.
        name: name of its directory in the far directory.
        replaces: True to replace an existing step of that name.
        progress: called with the bytes done and the total bytes.
        is_stopped: polled during the copy; True stops it.
        before_commit: called when everything but the root is copied. An error prevents the commit.
    """

    step: int
    name: str
    replaces: bool
    progress: Callable[[int, int], None]
    is_stopped: Callable[[], bool]
    before_commit: Callable[[], None]


class StepSender(Protocol):
    """Copies a committed step to the far directory, and commits it there."""

    def __call__(self, upload: StepUpload) -> int:
        """Copy a step, or resume an interrupted copy. Return the number of bytes sent once it is committed.

        Raises:
            CancelledError: if `is_stopped` returned True. The next call resumes the copy.
            CorruptCheckpointError, CheckpointNotFoundError: if the near step is damaged or missing.
            CheckpointError: if the far directory failed.
        """
        ...


class WholeStepSender:
    """A `StepSender` for a near directory that all processes share, so that it contains whole steps."""

    def __init__(self, near: StepDirectory, far: StepDirectory, context: Context) -> None:
        """Create the sender without I/O.

        Args:
            near: directory to copy steps from.
            far: directory to copy steps to.
            context: options.
        """
        self._near = near
        self._far = far
        self._context = context

    def __call__(self, upload: StepUpload) -> int:
        """See `StepSender`."""
        # Copy also the arrays that the step refers to in other checkpoints (its bases), because the
        # policies may not upload or keep the bases themselves.
        report = copy_whole(
            self._near.location(upload.step),
            SubPath(self._far.directory, upload.name),
            self._context,
            overwrite="non-atomic" if upload.replaces else False,
            progress=upload.progress,
            is_stopped=upload.is_stopped,
            before_commit=upload.before_commit,
        )
        return report.sent_bytes


logger = logger_named("ckptcore.tiers")

_UPLOADS: Final = f"{INTERNAL_DIRECTORY}/uploads"
_CURRENT: Final = f"{_UPLOADS}/current.json"
_CURRENT_BYTES: Final = 1 << 16
_FIRST_POLL_SECONDS: Final = 0.05
_LAST_POLL_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class _HostPart:
    """The part of a step on one host.

    Attributes:
        manifest: its objects, with the root of the whole step.
        late: roots of checkpointables and their tables, which are sent last.
        expected: sizes in bytes of all objects of the step, by key, including those on other hosts.
    """

    manifest: Manifest
    late: tuple[ObjectRecord, ...]
    expected: dict[str, int]

    def keys(self) -> Iterator[str]:
        """Yield the keys of all objects of the step, some of them twice."""
        yield from self.manifest.keys()
        yield from self.expected
        for record in self.late:
            yield record.key


def _read_host_part(location: Location) -> _HostPart:
    """Read the part of a step on this host.

    Raises:
        CheckpointNotFoundError: if the step does not exist.
        CorruptCheckpointError: if a root cannot be read, or an object does not have its size in the
            root.
    """
    store = location.store
    data = root_bytes(store)
    root = None if data is None else parse_root(store, data)
    if data is None or root is None or isinstance(root, Claim | PartialSave):
        raise CheckpointNotFoundError(f"{location.display}: no committed step; it was deleted")
    known: dict[str, ObjectRecord] = dict(root.objects) if isinstance(root, Root) else {}
    late: set[str] = set()
    for entry in store.list_names() if not isinstance(root, Root) else ():
        inside = subdirectory(store, entry[:-1]) if entry.endswith("/") else None
        member = None if inside is None else read_root(inside)
        if isinstance(member, Root):
            known.update({entry + key: record for key, record in member.objects.items()})
            late.update([entry + ROOT_KEY, *[entry + part for part in member.parts]])
    own = {ROOT_KEY, *root.parts}
    records: list[ObjectRecord] = []
    for key in store.list():
        if key in own or HOST_COPIES in key.split("/")[:2]:
            continue  # the leader commits the root; only this host uses the copies
        size = store.size(key)
        record = known.get(key, ObjectRecord(key, size))
        if record.size != size:
            raise CorruptCheckpointError(
                f"{key} in {location.display} has {size} bytes, but {record.size} bytes were written", key=key
            )
        records.append(ObjectRecord(key, size, record.checksums) if key in known else record)
    stored = StoredRoot("", data, {key: store.get(key) for key in root.parts})
    return _HostPart(
        Manifest.of(
            location, LocationVersion(data), stored, (), [record for record in records if record.key not in late]
        ),
        tuple([record for record in records if record.key in late]),
        {key: record.size for key, record in known.items()},
    )


def _send_host_part(
    part: _HostPart,
    store: StorageBackend,
    context: Context,
    sent: Callable[[int], None],
    is_stopped: Callable[[], bool],
) -> int:
    """Send the part of a host. Return the number of bytes sent."""
    transfer = Transfer(
        part.manifest.location.store, store, runtime_of(context).io_threads, sent=sent, is_stopped=is_stopped
    )
    for records in (part.manifest.objects, part.manifest.markers, part.late):
        transfer.send(records)
    return transfer.counts.sent_bytes


def _mark_key(copy_id: str, rank: int) -> str:
    return f"{_UPLOADS}/{copy_id}.{rank}"


class LeaderSender:
    """The `StepSender` of the leader, which sends steps together with the `HostSender`s of the other hosts."""

    def __init__(self, near: StepDirectory, far: StepDirectory, store: StorageBackend, hosts: Hosts, context: Context):
        """Delete the message of an earlier run.

        Args:
            near: near directory of this host.
            far: the far directory.
            store: storage of the far directory.
            hosts: groups of processes that share a near directory.
            context: options.
        """
        self._near = near
        self._far = far
        self._store = store
        self._others = [rank for rank in hosts.firsts if rank != hosts.first_of(0)]
        self._context = context
        store.delete([_CURRENT])

    def __call__(self, upload: StepUpload) -> int:
        """See `StepSender`. Progress and result count only the bytes of this host."""
        context = self._context
        near = resolve_location(self._near.location(upload.step), runtime_of(context).storages)
        part = _read_host_part(near)
        copy_id, total = part.manifest.copy_id, part.manifest.nbytes
        to = resolve_location(SubPath(self._far.directory, upload.name), runtime_of(context).storages, to_write=True)
        claimed = Claim(copy_id, save_created())
        claim = to.commit_method.begin(to, claimed, "non-atomic" if upload.replaces else False, resume=True)
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes  # not atomic: concurrent updates only make the progress imprecise
            upload.progress(done, total)

        try:
            claim.expect_distinct(part.keys)
            claim.show_claim()
            self._store.put(
                _CURRENT, json.dumps({"step": upload.step, "name": upload.name, "copy_id": copy_id}).encode()
            )
            sent = _send_host_part(part, claim.store, context, count, upload.is_stopped)
            self._wait_for_others(copy_id, upload.is_stopped)
            self._expect_sizes(part, claim.store)
            root = part.manifest.root
            assert root is not None  # `_read_host_part` always sets it
            upload.before_commit()
            claim.commit(root.data, root.parts)
        except (NameCollisionError, InvalidLocationError):
            claim.abort()  # no attempt can succeed
            raise
        except BaseException:
            claim.leave()
            raise
        self._store.delete([_CURRENT, *[_mark_key(copy_id, rank) for rank in self._others]])
        return sent

    def _wait_for_others(self, copy_id: str, is_stopped: Callable[[], bool]) -> None:
        missing = {_mark_key(copy_id, rank) for rank in self._others}
        pause = _FIRST_POLL_SECONDS
        while missing := missing.difference(self._store.list(_UPLOADS)):
            if is_stopped():
                raise CancelledError
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def _expect_sizes(self, part: _HostPart, store: StorageBackend) -> None:
        """Check that every object in the root has arrived.

        Raises:
            StorageError: if an object is missing or has another size. The next attempt sends it
                again.
        """
        for key, size in part.expected.items():
            try:
                stored: int | None = store.size(key)
            except ObjectNotFoundError:
                stored = None
            if stored != size:
                marks = [_mark_key(part.manifest.copy_id, rank) for rank in self._others]
                self._store.delete(marks)  # so that every host sends its part again
                raise StorageError(
                    f"{key} in {self._far.display} {'is missing' if stored is None else f'has {stored} bytes'}: "
                    f"expected {size} bytes from the host that wrote it; the hosts send the step again"
                )

    def close(self, run: str, until: Deadline) -> None:
        """Notify the other hosts that this run sends no more steps."""
        call_within(until.left_to_stop(), partial(self._close, run))

    def _close(self, run: str) -> None:
        try:
            self._store.put(_CURRENT, json.dumps({"closed": run}).encode())
        except StorageError as error:
            logger.warning(
                "cannot notify the other hosts that uploads are done, so they wait until a timeout: %s", error
            )


class HostSender:
    """Sends the parts of one host that the leader requests, on a thread of the first process of that host."""

    def __init__(
        self, rank: int, run: str, near: StepDirectory, far: StepDirectory, store: StorageBackend, context: Context
    ) -> None:
        """Start the thread.

        Args:
            rank: rank of this process.
            run: id of the run, equal on all processes.
            near: near directory of this host.
            far: the far directory.
            store: storage of the far directory.
            context: options.
        """
        self._rank = rank
        self._run = run
        self._near = near
        self._far = far
        self._store = store
        self._context = context
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="ckptcore-upload", daemon=True)
        self._thread.start()

    def close(self, until: Deadline) -> None:
        """Wait until the leader closes its uploads, or a deadline, then stop."""
        self._ended.wait(until.left())
        self.stop(until)

    def stop(self, until: Deadline) -> None:
        """Interrupt the running transfer, and wait for the thread. Further calls do nothing."""
        self._stopped.set()
        self._thread.join(until.left_to_stop())

    def _poll(self) -> None:
        pause = _FIRST_POLL_SECONDS
        while not self._stopped.is_set():
            try:
                if self._send_current():
                    pause = _FIRST_POLL_SECONDS
            except CancelledError:
                return
            except Exception as error:  # noqa: BLE001  # retried; the leader reports steps that are not uploaded
                logger.warning("cannot send from %s to %s, retrying: %s", self._near.display, self._far.display, error)
            if self._ended.is_set():
                return
            self._stopped.wait(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def _send_current(self) -> bool:
        """Send the part of the step in the leader's message. Return True if it was sent."""
        try:
            message: Any = json.loads(self._store.get(_CURRENT, 0, _CURRENT_BYTES))
        except (ObjectNotFoundError, ValueError):
            return False
        if not isinstance(message, dict):
            return False
        if message.get("closed") == self._run:
            self._ended.set()
            return False
        step, name, copy_id = message.get("step"), message.get("name"), message.get("copy_id")
        if not isinstance(step, int) or not isinstance(name, str) or self._far.names.parse(name) != step:
            return False
        if not self._near.is_committed(step) or _mark_key(str(copy_id), self._rank) in self._store.list(_UPLOADS):
            return False
        context = self._context
        near = resolve_location(self._near.location(step), runtime_of(context).storages)
        part = _read_host_part(near)
        if part.manifest.copy_id != copy_id:
            return False  # another save of the step
        to = resolve_location(SubPath(self._far.directory, name), runtime_of(context).storages, to_write=True)
        store = to.commit_method.store_of(to, part.manifest.copy_id)
        claimed = read_root(store)
        if not isinstance(claimed, Claim) or claimed.save_id != copy_id:
            return False
        try:
            _send_host_part(part, store, context, _ignore_progress, self._stopped.is_set)
        except CheckpointError:
            if not self._near.recheck(step):
                return False  # deleted meanwhile
            raise
        self._store.put(_mark_key(part.manifest.copy_id, self._rank), b"")
        return True


def _ignore_progress(nbytes: int) -> None:
    """Do nothing: only the leader reports progress."""
