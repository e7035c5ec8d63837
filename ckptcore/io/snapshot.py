"""Snapshots: the arrays of one save in host memory, in place or copied so that later changes have no effect."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from ckptcore.errors import SaveLostError
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.protocols import Snapshot

__all__ = ["BoundedSnapshot", "CopiedSnapshot", "SharedSnapshot", "SnapshotShare", "ViewedSnapshot"]

_AHEAD_BYTES: Final = 64 << 20
"""Bytes of transfers from devices that are started ahead of the writer."""


class ViewedSnapshot:
    """For a blocking save: arrays as they are; transfers from devices begin a little ahead of the writer."""

    def __init__(self, plan: WritePlan, start: Callable[[int], Sequence[Pending[HostArray]]]) -> None:
        """`start` begins the transfer of an item."""
        self.plan = plan
        self._start = start
        self._pending: dict[int, Sequence[Pending[HostArray]]] = {}
        self._next = 0
        self._outstanding = 0
        self._lock = threading.Lock()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        with self._lock:
            self._begin(item)
            while self._next < len(self.plan.items) and self._outstanding < _AHEAD_BYTES:
                self._begin(self._next)
                self._next += 1
            pending = self._pending[item]
        return [array.result() for array in pending]

    def _begin(self, item: int) -> None:
        if item not in self._pending:
            self._pending[item] = self._start(item)
            self._outstanding += self.plan.items[item].nbytes

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            if item not in self._pending:
                return  # the writer gave up before it took the item
            self._pending[item] = ()
            self._outstanding -= self.plan.items[item].nbytes


class CopiedSnapshot:
    """For an asynchronous save: everything is copied before `wait` returns, in the order of the plan."""

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        give_back: Callable[[HostArray], None],
    ) -> None:
        """`start` begins the copy of an item; `give_back` takes the memory of one back."""
        self.plan = plan
        self._give_back = give_back
        self._writer_ended = False
        self._copy_failed = False
        self._pending: list[Sequence[Pending[HostArray]]] = [start(number) for number in range(len(plan.items))]

    def wait(self) -> None:
        """Wait until the snapshot owns all its memory, or the writer ended; what it has may be written meanwhile."""
        try:
            for arrays in self._pending:
                for array in arrays:
                    array.result()
        except Exception:
            if self._copy_failed or not self._writer_ended:
                raise
            # The writer failed and freed the memory. The handle of the save raises its error.

    def writer_ended(self) -> None:
        """Note that no more arrays will be taken."""
        self._writer_ended = True

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        try:
            return [array.result() for array in self._pending[item]]
        except Exception:
            self._copy_failed = True  # before the writer ends because of it: `wait` raises the error too
            raise

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        arrays, self._pending[item] = self._pending[item], ()
        for array in arrays:
            self._give_back(array.result())


class BoundedSnapshot:
    """For an asynchronous save with a bound on its memory: copies while the writer writes, in the order it asks.

    `copy_all` runs on the thread of the caller; the writer takes and releases on others.
    """

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        give_back: Callable[[HostArray], None],
        limit: int,
    ) -> None:
        """See `CopiedSnapshot`. Holds at most `limit` bytes, unless a single item is larger."""
        self.plan = plan
        self._start = start
        self._give_back = give_back
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()
        self._asked: deque[int] = deque()
        self._pending: dict[int, Sequence[Pending[HostArray]]] = {}
        self._error: BaseException | None = None
        self._writer_ended = False

    def again(self, plan: WritePlan, items: Sequence[int]) -> BoundedSnapshot:
        """Return a snapshot that copies items of this one once more, for another plan.

        Args:
            plan: what it writes.
            items: by item of that plan, the item of this one.
        """
        start = self._start
        return BoundedSnapshot(plan, lambda number: start(items[number]), self._give_back, self._limit)

    def copy_all(self) -> None:
        """Copy every item; returns once the last is copied, or the writer ended. Nothing is held of the source then."""
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
            if isinstance(error, Exception) and self._writer_ended:
                return  # the writer freed the memory, and raises its own error
            self.fail(error)
            raise
        finally:
            self._start = _start_no_more

    def _next(self, waiting: dict[int, None]) -> int | None:
        with self._changed:
            while not self._writer_ended:
                while self._asked and self._asked[0] not in waiting:
                    self._asked.popleft()
                number = self._asked[0] if self._asked else next(iter(waiting))
                nbytes = self.plan.items[number].nbytes
                # An item that the writer waits for is copied beyond the limit: it would wait for ever otherwise.
                if self._asked or self._held == 0 or self._held + nbytes <= self._limit:
                    self._held += nbytes
                    return number
                self._changed.wait()
            return None

    def wait_until_written(self) -> None:
        """Wait until everything that was copied is written, or the writer ended."""
        with self._changed:
            while self._held and not self._writer_ended:
                self._changed.wait()

    def fail(self, error: BaseException) -> None:
        """Raise this error in callers that take arrays which are not copied yet."""
        with self._changed:
            self._error = self._error or error
            self._start = _start_no_more
            self._changed.notify_all()

    def writer_ended(self) -> None:
        """Note that no more arrays will be taken."""
        with self._changed:
            self._writer_ended = True
            self._changed.notify_all()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        with self._changed:
            if item not in self._pending:
                self._asked.append(item)
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
                return  # the writer gave up before it took the item
            arrays, self._pending[item] = self._pending[item], ()
            self._held -= self.plan.items[item].nbytes
            self._changed.notify_all()
        for array in arrays:
            self._give_back(array.result())


def _start_no_more(item: int) -> NoReturn:
    raise SaveLostError(f"the array {item} was to be copied after the copying ended")


class SharedSnapshot:
    """Arrays that several layouts write, one after the other. The last layout releases an array. Any thread."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._users = [0] * len(snapshot.plan.items)
        self._lock = threading.Lock()

    def share(self, plan: WritePlan, items: Sequence[int]) -> SnapshotShare:
        """Return the share of one layout. All shares are created before the first is written.

        Args:
            plan: of the layout.
            items: by item of that plan, the item of the whole.
        """
        with self._lock:
            for item in items:
                self._users[item] += 1
        return SnapshotShare(self, plan, items)

    def take(self, item: int) -> Sequence[HostArray]:
        """The arrays of an item of the whole."""
        return self._snapshot.take(item)

    def leave(self, item: int) -> None:
        """Release an item for one share; the last one releases its memory."""
        with self._lock:
            self._users[item] -= 1
            last = self._users[item] == 0
        if last:
            self._snapshot.release(item)


class SnapshotShare:
    """Share of one of several layouts in a `SharedSnapshot`; a `Snapshot`."""

    def __init__(self, shared: SharedSnapshot, plan: WritePlan, items: Sequence[int]) -> None:
        self.plan = plan
        self.shared = shared
        self._items = items
        self._held = set(range(len(items)))
        self._lock = threading.Lock()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        return self.shared.take(self._items[item])

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            if item not in self._held:
                return
            self._held.discard(item)
        self.shared.leave(self._items[item])

    def writer_ended(self) -> None:
        """Release all items that are left: the layout is done, or failed."""
        for item in range(len(self._items)):
            self.release(item)
