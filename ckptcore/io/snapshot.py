"""Snapshots: the arrays of one save in host memory, viewed in place or copied."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from ckptcore.errors import SaveLostError
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.progress import ByteProgress
from ckptcore.protocols import Snapshot

__all__ = ["BoundedSnapshot", "CopiedSnapshot", "CountedSnapshot", "SharedSnapshot", "SnapshotShare", "ViewedSnapshot"]

_AHEAD_BYTES: Final = 64 << 20
"""Bytes of transfers from devices that are started ahead of the writer."""


class ViewedSnapshot:
    """Snapshot of a blocking save: views of the arrays. Starts transfers from devices a little ahead of the writer."""

    def __init__(self, plan: WritePlan, start: Callable[[int], Sequence[Pending[HostArray]]]) -> None:
        """`start` starts the transfer of an item."""
        self.plan = plan
        self._start = start
        self._pending: dict[int, Sequence[Pending[HostArray]]] = {}
        self._next = 0
        self._outstanding = 0
        self._lock = threading.Lock()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        with self._lock:
            if item not in self._pending:
                self._start_item(item)
            while self._next < len(self.plan.items) and self._outstanding < _AHEAD_BYTES:
                if self._next not in self._pending:
                    self._start_item(self._next)
                self._next += 1
            pending = self._pending[item]
        return [array.result() for array in pending]

    def _start_item(self, item: int) -> None:
        self._pending[item] = self._start(item)
        self._outstanding += self.plan.items[item].nbytes

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            if item not in self._pending:
                return  # the writer failed before it took the item
            self._pending[item] = ()
            self._outstanding -= self.plan.items[item].nbytes


class CopiedSnapshot:
    """Snapshot of an asynchronous save: `wait` returns once everything is copied. Copies in the order of the plan."""

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        release: Callable[[HostArray], None],
    ) -> None:
        """`start` starts the copy of an item; `release` frees the memory of an array."""
        self.plan = plan
        self._release = release
        self._writing_ended = False
        self._copy_failed = False
        self._pending: list[Sequence[Pending[HostArray]]] = [start(number) for number in range(len(plan.items))]

    def wait(self) -> None:
        """Wait until everything is copied, or the writer ended. Copied items may be written meanwhile."""
        try:
            for arrays in self._pending:
                for array in arrays:
                    array.result()
        except Exception:
            if self._copy_failed or not self._writing_ended:
                raise
            # The writer failed and freed the memory. The handle of the save raises its error.

    def end_writing(self) -> None:
        """Record that the writer takes no more arrays."""
        self._writing_ended = True

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        try:
            return [array.result() for array in self._pending[item]]
        except Exception:
            self._copy_failed = True  # set before the writer ends because of it: `wait` raises the error too
            raise

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        arrays, self._pending[item] = self._pending[item], ()
        for array in arrays:
            self._release(array.result())


class BoundedSnapshot:
    """Snapshot of an asynchronous save with bounded memory: copies items while the writer writes.

    Copies the items that the writer waits for first, and the others in the order of the plan.
    `copy_all` runs on the thread of the caller. The writer takes and releases items on other threads.
    """

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        release: Callable[[HostArray], None],
        limit: int,
    ) -> None:
        """See `CopiedSnapshot`. Copies use at most `limit` bytes, except for an item that the writer waits for.

        A single item may also be larger than the limit.
        """
        self.plan = plan
        self._start = start
        self._release = release
        self._limit = limit
        self._used_bytes = 0
        self._changed = threading.Condition()
        self._requested: deque[int] = deque()
        self._pending: dict[int, Sequence[Pending[HostArray]]] = {}
        self._error: BaseException | None = None
        self._writing_ended = False

    def again(self, plan: WritePlan, items: Sequence[int]) -> BoundedSnapshot:
        """Return a snapshot that copies items of this snapshot again, for another plan.

        Args:
            plan: the other plan.
            items: for each item of that plan, the number of the item in this snapshot.
        """
        start = self._start
        return BoundedSnapshot(plan, lambda number: start(items[number]), self._release, self._limit)

    def copy_all(self) -> None:
        """Copy every item. Return once the last is copied, or the writer ended; then the source may change."""
        waiting = dict.fromkeys(range(len(self.plan.items)))
        try:
            while waiting:
                number = self._next(waiting)
                if number is None:
                    return
                del waiting[number]
                arrays = self._start(number)
                for array in arrays:
                    array.result()
                with self._changed:
                    self._pending[number] = arrays
                    self._changed.notify_all()
        except BaseException as error:
            if isinstance(error, Exception) and self._writing_ended:
                return  # the writer freed the memory, and raises its own error
            self.fail(error)
            raise
        finally:
            self._start = _refuse_to_start

    def _next(self, waiting: dict[int, None]) -> int | None:
        with self._changed:
            while not self._writing_ended:
                while self._requested and self._requested[0] not in waiting:
                    self._requested.popleft()
                number = self._requested[0] if self._requested else next(iter(waiting))
                nbytes = self.plan.items[number].nbytes
                # The limit does not apply to an item that the writer waits for: that would be a deadlock.
                if self._requested or self._used_bytes == 0 or self._used_bytes + nbytes <= self._limit:
                    self._used_bytes += nbytes
                    return number
                self._changed.wait()
            return None

    def wait_until_written(self) -> None:
        """Wait until every copied item is written, or the writer ended."""
        with self._changed:
            while self._used_bytes and not self._writing_ended:
                self._changed.wait()

    def fail(self, error: BaseException) -> None:
        """Stop copying. `take` then raises `SaveLostError`, caused by this error, for items that are not copied."""
        with self._changed:
            self._error = self._error or error
            self._start = _refuse_to_start
            self._changed.notify_all()

    def end_writing(self) -> None:
        """Record that the writer takes no more items."""
        with self._changed:
            self._writing_ended = True
            self._changed.notify_all()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        with self._changed:
            if item not in self._pending:
                self._requested.append(item)
                self._changed.notify_all()
            while item not in self._pending:
                if self._error is not None:
                    raise SaveLostError(f"the state could not be copied: {self._error}") from self._error
                self._changed.wait()
            arrays = self._pending[item]
        return [array.result() for array in arrays]

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._changed:
            if item not in self._pending:
                return  # the writer failed before it took the item
            arrays, self._pending[item] = self._pending[item], ()
            self._used_bytes -= self.plan.items[item].nbytes
            self._changed.notify_all()
        for array in arrays:
            self._release(array.result())


def _refuse_to_start(item: int) -> NoReturn:
    raise SaveLostError(f"cannot copy the array {item}: copying has ended")


class CountedSnapshot:
    """Snapshot that counts the bytes of items once they are written, in any layout. See `Snapshot`."""

    def __init__(self, snapshot: Snapshot, progress: ByteProgress) -> None:
        self.plan = snapshot.plan
        self.take = snapshot.take
        self._release = snapshot.release
        self._progress = progress

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        self._release(item)
        self._progress.complete(self.plan.items[item].nbytes)


class SharedSnapshot:
    """Arrays that several layouts write, one layout after the other. The last one releases an array. Thread-safe."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._users = [0] * len(snapshot.plan.items)
        self._lock = threading.Lock()

    def share(self, plan: WritePlan, items: Sequence[int]) -> SnapshotShare:
        """Return the share of one layout. All shares are created before the first one is written.

        Args:
            plan: the plan of the layout.
            items: for each item of that plan, the number of the item in the shared snapshot.
        """
        with self._lock:
            for item in items:
                self._users[item] += 1
        return SnapshotShare(self, plan, items)

    def take(self, item: int) -> Sequence[HostArray]:
        """Return the arrays of an item."""
        return self._snapshot.take(item)

    def release(self, item: int) -> None:
        """Release an item for one share. The last share releases its memory."""
        with self._lock:
            self._users[item] -= 1
            last = self._users[item] == 0
        if last:
            self._snapshot.release(item)


class SnapshotShare:
    """The share of one layout in a `SharedSnapshot`. See `Snapshot`."""

    def __init__(self, shared: SharedSnapshot, plan: WritePlan, items: Sequence[int]) -> None:
        self.plan = plan
        self.shared = shared
        self._items = items
        self._unreleased = set(range(len(items)))
        self._lock = threading.Lock()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        return self.shared.take(self._items[item])

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            if item not in self._unreleased:
                return
            self._unreleased.discard(item)
        self.shared.release(self._items[item])

    def end_writing(self) -> None:
        """Release all remaining items: the layout is done, or failed."""
        for item in range(len(self._items)):
            self.release(item)
