"""Leases: objects that their holders renew, so that other processes see that the holders are alive.

A holder that calls `Lease.check` before each operation does not use a lease after another process took it over. A
process takes over a lease only after it has seen the lease unchanged for more than a lease time. So the last renewal
began more than a lease time ago. `Lease.check` reads the object to check that this process still has the lease. If the
last renewal began more than half a lease time ago, it renews the lease instead. So the holder has at least half a lease
time for its next operation. Every put is conditional on the last known tag, so one of two concurrent puts fails.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import json
import logging
import os
import platform
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, fields, replace
from typing import Final, Literal

from ckptcore.errors import ConditionFailedError, ObjectNotFoundError, SaveLostError, StorageError
from ckptcore.events import logger_named
from ckptcore.io.threads import reset_in_children
from ckptcore.model.tree import JSON
from ckptcore.protocols import IfTag, PutCondition, StorageBackend
from ckptcore.records import NamedTuple, dataclass

logger = logger_named("ckptcore.commit")

_EXIT_SECONDS: Final = 5.0
"""Maximum time that the end of the program waits for leases to be released."""


class Clock:
    """Time, sleep, and threads that repeat work. Tests override this class. Thread-safe."""

    def now(self) -> float:
        """Return a time in seconds that never decreases."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block this thread for `seconds`."""
        time.sleep(seconds)

    def attempts(self, seconds: float, *, first: float = 0.01, last: float = 2.0) -> Iterator[None]:
        """Yield once for each attempt, with pauses between them that double from `first` to `last`, all in seconds.

        Stops after the first attempt that ends `seconds` or more after the start. So there is at least one attempt.
        """
        deadline = self.now() + seconds
        while True:
            yield
            if self.now() >= deadline:
                return
            self.sleep(first)
            first = min(2 * first, last)

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Callable[[], None]:
        """Call `work` every `seconds` on another thread. Return a function that stops this without waiting.

        `at_end` is called once: when the returned function is called or garbage collected, or at the end of the
        program. `work` and `at_end` must not refer to the returned function, or it is never garbage collected. A
        forked child repeats nothing.
        """
        return _Repetition(seconds, work, at_end).stop


SYSTEM_CLOCK: Final = Clock()


class _Repetition:
    """A thread that repeats work until this object is stopped or garbage collected. The thread does not refer to it."""

    def __init__(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> None:
        # A SimpleQueue, because `__del__` can run at any point, and events and conditions are not reentrant.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread: Final = threading.Thread(
            target=_repeat, args=(self._wake, seconds, work, at_end), name="ckptcore-lease", daemon=True
        )
        self.thread.start()
        _repetitions().add(self)

    def stop(self) -> None:
        self._wake.put(None)

    def __del__(self) -> None:
        self._wake.put(None)


def _repeat(
    wake: queue.SimpleQueue[None], seconds: float, work: Callable[[], None], at_end: Callable[[], None]
) -> None:
    fails = False
    while True:
        try:
            wake.get(timeout=seconds)
        except queue.Empty:
            fails = _fails(work, logging.INFO if fails else logging.WARNING)  # warn once of an outage
        else:
            _fails(at_end, logging.WARNING)
            return


def _fails(work: Callable[[], None], level: int) -> bool:
    """Renew or release a lease. If that fails, log the error and return True."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # the thread continues: one failure does not lose a lease
        logger.log(level, "a lease could not be renewed or released: %s", error)
        return True
    return False


@functools.cache
def _repetitions() -> weakref.WeakSet[_Repetition]:
    """Return the repetitions of this process. They are stopped at its end, after the background saves."""
    repetitions: weakref.WeakSet[_Repetition] = weakref.WeakSet()
    atexit.register(_stop_all, repetitions)
    return repetitions


def _stop_all(repetitions: Collection[_Repetition]) -> None:
    running = list(repetitions)
    for repetition in running:
        repetition.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for repetition in running:
        # Returns immediately in a forked child, where the thread does not exist.
        repetition.thread.join(max(0.0, deadline - time.monotonic()))


LONGEST_LEASE_SECONDS: Final = 3600.0
"""The longest lease. Limits how long a hostile record can make a process wait."""

_FORMAT: Final = "ckptcore hold"
_MAX_BYTES: Final = 4096
_MAX_CHARACTERS: Final = 256
_MAX_TIME_CHARACTERS: Final = 32
_MAX_EARLIER: Final = 16
"""Maximum number of earlier owners in a record, so that the record stays below `_MAX_BYTES`."""


class EarlierOwner(NamedTuple):
    """An earlier owner of a directory: see `Holder`. `released` is False if its process was killed."""

    number: int
    since: str
    released: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """The record of the process that has a lock.

    Attributes:
        hold_id: a random id of the lock: 16 hexadecimal digits.
        host: the name of the machine.
        pid: the id of the process on that machine.
        since: when the lock was taken, ISO 8601 in UTC by the clock of that machine. Only for messages.
        lease_seconds: the lease time. The lease expires if other processes see no renewal for longer (see
            `LeaseObserver`). None for a locked directory.
        renewals: the number of attempted renewals. Makes the bytes, and so the tag, of each attempt differ.
        released: True if the lease was released or broken.
        number: for the owner of a directory, a number higher than the numbers of all earlier owners; otherwise 0.
        process: a random id of the process. A restarted container has the same host and pid, and another process.
        earlier: for the owner of a directory, the last earlier owners, the oldest first.
    """

    hold_id: str
    host: str
    pid: int
    since: str
    lease_seconds: float | None = None
    renewals: int = 0
    released: bool = False
    number: int = 0
    process: str = ""
    earlier: tuple[EarlierOwner, ...] = ()

    def after(self, before: Holder | None) -> Holder:
        """Return this record with `before`, the last owner of the directory, added to the earlier owners."""
        if before is None:
            return self
        last = EarlierOwner(before.number, before.since[:_MAX_TIME_CHARACTERS], before.released)
        return replace(self, earlier=(*before.earlier, last)[-_MAX_EARLIER:])

    def encode(self) -> bytes:
        """Return the record as JSON."""
        document: dict[str, JSON] = {"format": _FORMAT, "version": 1, **asdict(self)}
        return json.dumps(document).encode() + b"\n"

    @property
    def is_here(self) -> bool:
        """True if this process is the holder."""
        return self.process == _process_id(os.getpid())

    def describe(self) -> str:
        """Return the holder in words, for an error."""
        whose = "this process, " if self.is_here else ""
        return f"{whose}process {self.pid} on {self.host or 'a machine without a name'} since {self.since}"


def new_holder(lease_seconds: float | None = None, *, number: int = 0) -> Holder:
    """Return this process as the holder of a new lock."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    pid = os.getpid()
    return Holder(_new_id(), platform.node(), pid, now, lease_seconds, number=number, process=_process_id(pid))


def _new_id() -> str:
    return os.urandom(8).hex()


_IMPORT_ID: Final = _new_id()


def _process_id(pid: int) -> str:
    """Return the id of this process. A forked child has another id, because its `pid` differs."""
    return f"{_IMPORT_ID}-{pid:x}"


def decode_holder(data: bytes) -> Holder | None:
    """Parse a record, which may be hostile; None if it is invalid."""
    if len(data) > _MAX_BYTES:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return None
    try:
        document = {"number": 0, "process": "", **document}  # optional: records of other software may lack both
        document["earlier"] = _decode_earlier(document.get("earlier"))
        holder = Holder(**{field.name: document[field.name] for field in fields(Holder)})
    except KeyError:
        return None
    is_possible = (
        all(_is_text(text) for text in (holder.hold_id, holder.host, holder.process, holder.since))
        and all(
            type(number) is int and 0 <= number < 1 << 62 for number in (holder.pid, holder.renewals, holder.number)
        )
        and (holder.lease_seconds is None or _is_lease(holder.lease_seconds))
        and type(holder.released) is bool
    )
    return holder if is_possible else None


def _decode_earlier(column: object) -> tuple[EarlierOwner, ...]:
    """Return the earlier owners in a record; none if they are invalid, because nothing depends on them."""
    if not isinstance(column, list) or len(column) > _MAX_EARLIER:
        return ()
    for row in column:
        if not isinstance(row, list) or [type(value) for value in row] != [int, str, bool] or not _is_text(row[1]):
            return ()
    return tuple([EarlierOwner(*row) for row in column])


def _is_text(value: object) -> bool:
    # Error messages contain these texts, so they must not contain terminal escape sequences.
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS and value.isprintable()


def _is_lease(value: object) -> bool:
    # The comparison excludes NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_LEASE_SECONDS


def check_lease_seconds(seconds: float) -> float:
    """Return the seconds, if a lease can be that long.

    Raises:
        ValueError
    """
    if not _is_lease(seconds):
        raise ValueError(
            f"lease_seconds={seconds!r}: expected more than 0 and at most {LONGEST_LEASE_SECONDS:.0f} seconds"
        )
    return float(seconds)


@dataclass(frozen=True, slots=True)
class SeenLease:
    """A lease that was read.

    Attributes:
        key: the key of its object.
        tag: the tag of the object; changes with each renewal.
        holder: the record; None if it is invalid.
    """

    key: str
    tag: str
    holder: Holder | None

    @property
    def is_released(self) -> bool:
        """True if it was released or broken."""
        return self.holder is not None and self.holder.released

    def describe(self) -> str:
        """Return the holder in words, for an error."""
        return f"a process whose record {self.key} cannot be read" if self.holder is None else self.holder.describe()

    def seconds(self, otherwise: float) -> float:
        """Return its lease time; `otherwise` if its record has none."""
        return (self.holder and self.holder.lease_seconds) or otherwise


def read_lease(store: StorageBackend, key: str) -> SeenLease | None:
    """Read a lease; None if there is none."""
    try:
        data, tag = store.get_with_tag(key)
    except ObjectNotFoundError:
        return None
    return SeenLease(key, tag, decode_holder(data))


def absent_directory(display: str) -> StorageError:
    """Return the error for an owned directory that does not exist now, for example because it is not mounted."""
    return StorageError(
        f"{display} is not there: its file system is not mounted now, or the directory was removed. Nothing was "
        "written. The next save continues if it is back: mount it again, or open another directory"
    )


def break_lease(store: StorageBackend, seen: SeenLease) -> bool:
    """Mark an expired lease as released, so that it cannot be renewed. Return False if it was renewed or removed."""
    broken = replace(seen.holder or new_holder(), released=True)
    return _put_lease(store, seen.key, broken, IfTag(seen.tag)) is not None


def _put_lease(store: StorageBackend, key: str, holder: Holder, condition: PutCondition) -> SeenLease | None:
    """Put the record of a lease. Return None if the condition is not met.

    The condition also fails if the storage client repeats a put that has succeeded. So after a failure the object is
    read: if it has this record, the put has succeeded. No two puts write equal records, except when a lease is broken
    and released at the same time.

    Raises:
        StorageError: the storage failed. The record may have been written.
    """
    try:
        return SeenLease(key, store.put(key, holder.encode(), condition=condition), holder)
    except (ConditionFailedError, ObjectNotFoundError) as error:
        lease = read_lease(store, key)
        if lease is not None and lease.holder == holder:
            return lease
        if isinstance(error, ObjectNotFoundError) and not isinstance(condition, IfTag):
            raise  # the directory disappeared
        return None


_EXPIRY_FACTOR: Final = 1.25
"""A lease has expired once it was seen unchanged for this multiple of its lease time."""

_MAX_OBSERVED_FACTOR: Final = 0.5
"""Maximum multiple of the lease time that one observation adds. A longer pause does not count in full: this process may
have been suspended, and the holder, too."""


class LeaseObserver:
    """Measures how long each lease was seen unchanged, by the clock of this process. Thread-safe."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        """Create an observer without observations. `lease_seconds` is the lease time if a record has none."""
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._seen: dict[str, tuple[str, float, float]] = {}
        """By key: the tag, the time of the last observation, and for how many seconds the lease was seen unchanged."""
        self._lock = threading.Lock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def is_expired(self, seen: SeenLease) -> bool:
        """Record one observation of a lease. Return True if it has expired: it was seen unchanged for long enough."""
        lease_seconds = seen.seconds(self._lease_seconds)
        now = self._clock.now()
        with self._lock:
            tag, last, unchanged = self._seen.get(seen.key, ("", now, 0.0))
            unchanged = unchanged + min(now - last, _MAX_OBSERVED_FACTOR * lease_seconds) if tag == seen.tag else 0.0
            self._seen[seen.key] = seen.tag, now, unchanged
            return unchanged >= _EXPIRY_FACTOR * lease_seconds

    def forget_others(self, directory: str, keys: Collection[str]) -> None:
        """Forget the leases in a directory (with a final ``/``) that are not in `keys`."""
        with self._lock:
            for key in [key for key in self._seen if key.startswith(directory) and key not in keys]:
                del self._seen[key]


_ATTEMPTS: Final = 3
"""Maximum attempts of a renewal or release. An attempt fails if the known tag is outdated, because the response to an
earlier renewal was lost."""


class Lease:
    """A lease that this process took. Thread-safe."""

    def __init__(
        self,
        store: StorageBackend,
        seen: SeenLease,
        subject: str,
        at_close: Literal["mark", "delete"],
        began: float,
        clock: Clock,
        is_absent: Callable[[], bool] = bool,
    ) -> None:
        """Create the lease of an object that was just put.

        Args:
            store: the storage, opened at the directory of steps.
            seen: the object; its holder is this process.
            subject: what is locked, in words, for errors.
            at_close: how the lease is released. "mark": put the object again, marked as released. For a key that other
                processes also use, because a delayed deletion could remove their lease. "delete": for a unique key.
            began: the time, by `clock`, when the put began.
            clock: the clock.
            is_absent: returns True if the directory of the object does not exist now. Called if the object is missing.
        """
        assert seen.holder is not None and seen.holder.lease_seconds is not None
        self.subject: Final = subject
        self._store = store
        self._key = seen.key
        self._tag = seen.tag
        self._holder = seen.holder
        self._renewals = seen.holder.renewals
        self._lease_seconds = seen.holder.lease_seconds
        self._at_close = at_close
        self._began = began  # start of the last successful renewal; other processes see the renewal later
        self._clock = clock
        self._is_absent = is_absent
        self._state: Literal["held", "released", "lost"] = "held"
        self._taken_by: Holder | None = None
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Renew the lease. Does nothing if it was released or lost.

        Raises:
            StorageError: the renewal failed. This process may still have the lease.
        """
        with self._lock:
            if self._state == "held":
                self._renew()

    def check(self) -> None:
        """Check that this process has the lease. Usually one small request.

        Raises:
            SaveLostError: the lease was lost. This is final.
            StorageError: the storage failed, so the state of the lease is unknown.
        """
        with self._lock:
            if self._state == "held":
                if self._clock.now() - self._began > self._lease_seconds / 2:
                    self._renew()
                else:
                    self._look()
            if self._state != "held":
                raise SaveLostError(self._why_not())

    def release(self) -> None:
        """Release the lease. Does nothing if it was released or lost.

        Raises:
            StorageError: the object could not be changed, so the lease has to expire.
        """
        with self._lock:
            if self._state != "held":
                return
            try:
                if self._at_close == "delete":
                    self._store.delete([self._key])
                else:
                    self._replace(replace(self._holder, released=True))
            finally:
                self._state = "released"

    def _renew(self) -> None:
        # Counted even if it fails: its put may arrive later, and must not be mistaken for the put of the next attempt.
        self._renewals += 1
        self._began = self._replace(replace(self._holder, renewals=self._renewals)) or self._began

    def _replace(self, holder: Holder) -> float | None:
        """Replace the object. Return when the put began; None if the lease is lost."""
        for _ in range(_ATTEMPTS):
            began = self._clock.now()
            lease = _put_lease(self._store, self._key, holder, IfTag(self._tag))
            if lease is None:
                self._look()
                if self._state == "lost":
                    return None
                continue
            self._tag = lease.tag
            self._holder = holder
            return began
        raise StorageError(
            f"{self.subject} is locked by this process, but {self._key} cannot be renewed: the storage refused the tag "
            "that it had just returned. Check if other software writes there"
        )

    def _look(self) -> None:
        """Read the object: check that this process still has the lease, and remember the tag.

        Raises:
            StorageError: the directory does not exist now. This process may still have the lease.
        """
        seen = read_lease(self._store, self._key)
        if seen is None and self._is_absent():
            raise absent_directory(self.subject.removeprefix("the directory "))
        if seen is None or seen.holder is None or seen.holder.hold_id != self._holder.hold_id or seen.holder.released:
            self._state = "lost"
            self._taken_by = None if seen is None else seen.holder
            logger.warning("%s", self._why_not())
        else:
            self._tag = seen.tag

    def _why_not(self) -> str:
        if self._state == "released":
            return f"{self.subject} is no longer locked: it was closed; open it again"
        if self._taken_by is None:
            return (
                f"{self.subject} is no longer locked by this process: {self._key} was removed or replaced, by hand or "
                "because this process did not renew its lease in time; open it again"
            )
        if self._taken_by.hold_id == self._holder.hold_id:
            return f"{self.subject} is no longer locked: this process did not renew its lease in time; open it again"
        return (
            f"{self.subject} was taken over by {self._taken_by.describe()}, because this process did not renew its "
            "lease in time. Only one of the two may write: end this job, or end the other one and open it again"
        )


def take_lease(
    store: StorageBackend,
    key: str,
    subject: str,
    at_close: Literal["mark", "delete"],
    condition: PutCondition,
    lease_seconds: float,
    clock: Clock,
    *,
    number: int = 0,
    before: Holder | None = None,
    is_absent: Callable[[], bool] = bool,
) -> Lease | None:
    """Write a lease. Return None if `condition` is not met. See `Lease` and `Holder.after` for the arguments.

    Raises:
        StorageError: the storage failed. If the lease was written, it expires.
    """
    holder = new_holder(lease_seconds, number=number).after(before)
    began = clock.now()
    lease = _put_lease(store, key, holder, condition)
    return None if lease is None else Lease(store, lease, subject, at_close, began, clock, is_absent)
