"""Fault injection into storages: failures, crashes, wrong bytes and full disks at chosen operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, TypeAlias, TypeVar

from ckptcore.errors import StorageFullError
from ckptcore.protocols import Buffer, DirectoryLock

T = TypeVar("T")

_CHANGES: Final = frozenset(
    {"put", "open_writer", "open_new", "write_at", "finish", "abort", "abort_uploads", "delete", "sync",
     "lock_directory", "rename", "exchange", "place", "replace", "delete_unchanged",
     "hide_from_others", "keep_attributes",
     "sync_directory", "delete_directory"}
)  # fmt: skip


class SimulatedCrash(BaseException):
    """The simulated process has crashed. Not an `Exception`, so that ``except Exception`` does not catch it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a storage or of a writer.

    Attributes:
        number: the number of earlier operations.
        name: the method: ``get``, ``put``, ``write_at``, ``rename``...
        keys: the keys of objects or directories in the call, or its prefix.
        offset: offset in the object, in bytes; 0 if not applicable.
        nbytes: number of bytes to read or write, if known in advance.
    """

    number: int
    name: str
    keys: tuple[str, ...]
    offset: int = 0
    nbytes: int = 0

    @property
    def changes(self) -> bool:
        """True if the operation can change stored data."""
        return self.name in _CHANGES


@dataclass(frozen=True, slots=True)
class CrashAt:
    """Crash before the operation with this number, midway (after half of the bytes, ranges or objects), or after it.

    Operations that cannot be divided do nothing if the crash is midway: for example put, rename, exchange,
    sync_directory, and all reads except get_into.
    """

    operation: int
    moment: Literal["before", "midway", "after"] = "before"


@dataclass(frozen=True, slots=True)
class FailAt:
    """Raise an error instead of running an operation."""

    operation: int
    error: Exception


@dataclass(frozen=True, slots=True)
class FullAfter:
    """Raise `StorageFullError` from each write that would bring the total of written bytes above `nbytes`."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class ShortReadAt:
    """Make an object appear `missing_bytes` shorter to one read."""

    operation: int
    missing_bytes: int = 1


@dataclass(frozen=True, slots=True)
class FlipBitAt:
    """Flip one bit of the bytes that an operation reads or writes. `bit` is taken modulo the number of bits."""

    operation: int
    bit: int = 0


Fault: TypeAlias = CrashAt | FailAt | FullAfter | ShortReadAt | FlipBitAt
"""Any fault of a `FaultPlan`."""


class FaultPlan:
    """A schedule of faults, which several storages can share. Thread-safe.

    Operations of all storages, writers and threads are numbered from 0 in the order of their start. Run the code once
    without faults and read `operations`. Then run the code once for each operation, with a fault there.
    """

    def __init__(self, *faults: Fault) -> None:
        self._faults: dict[int, list[Fault]] = {}
        self._room: int | None = None
        for fault in faults:
            if isinstance(fault, FullAfter):
                self._room = fault.nbytes
            else:
                self._faults.setdefault(fault.operation, []).append(fault)
        self._lock = threading.Lock()
        self._held: list[DirectoryLock] = []
        self.operations: list[Operation] = []
        self.bytes_read = 0
        self.bytes_written = 0
        self.crashed = False

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Start an operation, with its faults."""
        with self._lock:
            self.expect_alive()
            operation = Operation(len(self.operations), name, tuple(keys), offset, nbytes)
            self.operations.append(operation)
            faults = self._faults.get(operation.number, [])
        for fault in faults:
            if isinstance(fault, FailAt):
                raise fault.error
            if isinstance(fault, CrashAt) and fault.moment == "before":
                self.crash()
        return Step(self, operation, faults)

    def take_room(self, operation: Operation) -> None:
        """Count bytes before they are written.

        Raises:
            StorageFullError: if they exceed the limit of `FullAfter`.
        """
        with self._lock:
            if self._room is not None and self.bytes_written + operation.nbytes > self._room:
                raise StorageFullError(
                    f"cannot write {operation.keys[0]} ({operation.nbytes} bytes): the storage is full, because the "
                    f"test limits it to {self._room} bytes"
                )
            self.bytes_written += operation.nbytes

    def count_read(self, nbytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.bytes_read += nbytes

    def crash(self) -> None:
        """Crash: this and all later operations raise `SimulatedCrash`. Locks are released, as by an operating system.

        Raises:
            SimulatedCrash: always.
        """
        with self._lock:
            self.crashed = True
            held, self._held = self._held, []
        for lock in held:
            lock.__exit__(None, None, None)
        self.expect_alive()

    def expect_alive(self) -> None:
        """Check that the simulated process has not crashed.

        Raises:
            SimulatedCrash: if it has crashed.
        """
        if self.crashed:
            raise SimulatedCrash("the test killed this process")

    def hold(self, lock: DirectoryLock) -> DirectoryLock:
        """Return a context manager that releases an acquired lock. A crash releases it, too."""
        with self._lock:
            self._held.append(lock)
        return _HeldLock(self, lock)

    def let_go(self, lock: DirectoryLock) -> None:
        """Release a lock, unless a crash has released it."""
        with self._lock:
            is_held = lock in self._held
            if is_held:
                self._held.remove(lock)
        if is_held:
            lock.__exit__(None, None, None)


class _HeldLock:
    def __init__(self, plan: FaultPlan, lock: DirectoryLock) -> None:
        self._plan = plan
        self._lock = lock
        self._is_entered = False
        self.is_in_place = lock.is_in_place

    def __enter__(self) -> None:
        self._is_entered = True
        self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._is_entered, "a lock must be entered: other storages lock only then"
        self._plan.let_go(self._lock)


class Step:
    """A started operation and its faults. See `FaultPlan.begin`."""

    def __init__(self, plan: FaultPlan, operation: Operation, faults: Sequence[Fault]) -> None:
        self._plan = plan
        self._faults = faults
        self.operation = operation

    def _crashes(self, moment: str) -> bool:
        return any(isinstance(fault, CrashAt) and fault.moment == moment for fault in self._faults)

    def run(self, action: Callable[[], T], half: Callable[[], object] | None = None) -> T:
        """Run the operation, and crash midway or afterwards if planned.

        Args:
            action: runs the operation.
            half: runs half of it, before a crash midway. None: a crash midway comes before the operation.
        """
        if self._crashes("midway"):
            if half is not None:
                half()
            self._plan.crash()
        result = action()
        if self._crashes("after"):
            self._plan.crash()
        # Another thread may have crashed the simulated process during the call. A crashed process gets no result.
        self._plan.expect_alive()
        return result

    def flips(self) -> list[int]:
        """Return the bits to flip."""
        return [fault.bit for fault in self._faults if isinstance(fault, FlipBitAt)]

    def missing_bytes(self) -> int:
        """Return the number of bytes by which the object appears shorter. See `ShortReadAt`."""
        return sum(fault.missing_bytes for fault in self._faults if isinstance(fault, ShortReadAt))

    def flipped(self, data: Buffer) -> Buffer:
        """Return the data, with one bit flipped for each `FlipBitAt`."""
        if not self.flips() or not data:
            return data
        changed = bytearray(data)
        for bit in self.flips():
            changed[bit // 8 % len(changed)] ^= 1 << bit % 8
        return bytes(changed)
