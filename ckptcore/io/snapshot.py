"""Snapshots: the arrays of one save in host memory, viewed in place or copied."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn, Protocol

from ckptcore.errors import SaveLostError
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.progress import ByteProgress
from ckptcore.protocols import LeafHandler, Snapshot

_AHEAD_BYTES: Final = 64 << 20
"""Bytes of transfers from devices that are started ahead of the writer."""


class StateBoxes(NamedTuple):
    """Boxes of a leaf of a state.

    Attributes:
        leaf, handler: the leaf, and its handler.
        boxes: the boxes.
    """

    leaf: object
    handler: LeafHandler
    boxes: tuple[Box, ...]


@dataclass(slots=True, eq=False)
class StateElements:
    """Elements of a state in host memory. Counts the snapshots that use them, and frees them after the last snapshot.

    If several snapshots write the same boxes, the boxes are transferred once. Thread-safe.

    Attributes:
        transfer: starts a transfer to host memory.
        free: frees the memory of an array; None if the memory belongs to the state.
    """

    transfer: Callable[[StateBoxes], Sequence[Pending[HostArray]]]
    free: Callable[[HostArray], object] | None = None
    _numbers: dict[tuple[int, tuple[Box, ...]], int] = field(default_factory=dict)
    """A number for each leaf, by its identity, and boxes of it. The other fields use it: hashing boxes takes time."""
    _users: list[int] = field(default_factory=list)
    _arrays: dict[int, Sequence[Pending[HostArray]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def use(
        self, boxes: Sequence[StateBoxes]
    ) -> tuple[Callable[[int], Sequence[Pending[HostArray]]], Callable[[int], None], Collection[int]]:
        """Return functions with which one snapshot starts and releases an item. Call this before any item is released.

        An item may be released repeatedly, and without being started.

        Args:
            boxes: the boxes of each item. Only the function that starts items refers to the leaves.

        Returns:
            The two functions, and the items that are not released yet.
        """
        numbers: list[int] = []
        for item in boxes:
            number = self._numbers.setdefault((id(item.leaf), item.boxes), len(self._users))
            if number == len(self._users):
                self._users.append(0)
            self._users[number] += 1
            numbers.append(number)
        unreleased = set(range(len(numbers)))

        def start(item: int) -> Sequence[Pending[HostArray]]:
            with self._lock:
                arrays = self._arrays.get(numbers[item])
                if arrays is None:
                    arrays = self._arrays[numbers[item]] = self.transfer(boxes[item])
                return arrays

        def release(item: int) -> None:
            if self._closed:
                return
            with self._lock:
                if item not in unreleased:
                    return
                unreleased.remove(item)
                number = numbers[item]
                self._users[number] -= 1
                arrays = () if self._users[number] else self._arrays.pop(number, ())
            if self.free is not None:
                for array in arrays:
                    self.free(array.result())

        return start, release, unreleased

    def close(self) -> None:
        """Forget all arrays without freeing their memory. Does not wait for running transfers."""
        self._closed = True
        self._arrays.clear()


class StateCopy(Protocol):
    """A running copy of a part of a state."""

    def wait(self) -> None:
        """Return once the program may change this part: when everything is copied, or when the writer has ended."""

    def fail(self, error: BaseException) -> None:
        """Record that the program may have changed this part, so that no more of it is copied."""

    def end_writing(self) -> None:
        """Record that the writer needs nothing more."""


class ViewedSnapshot:
    """Snapshot of a blocking save: views of the arrays. Starts transfers from devices before the writer needs them."""

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        release: Callable[[int], object] = lambda item: None,
    ) -> None:
        """`start` starts the transfer of an item; `release` is called when an item is written."""
        self.plan = plan
        self._start = start
        self._release = release
        self._pending: dict[int, tuple[Sequence[Pending[HostArray]], int]] = {}  # and their bytes
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
            pending, _ = self._pending[item]
        return [array.result() for array in pending]

    def _start_item(self, item: int) -> None:
        nbytes = self.plan.items[item].nbytes
        self._pending[item] = self._start(item), nbytes
        self._outstanding += nbytes

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            if item in self._pending:  # otherwise the writer failed before it took the item
                self._outstanding -= self._pending[item][1]
                self._pending[item] = (), 0
        self._release(item)


class CopiedSnapshot:
    """Snapshot of an asynchronous save. Copies in the order of the plan. `wait` returns once everything is copied."""

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        release: Callable[[int], object],
    ) -> None:
        """`start` starts the copy of an item; `release` frees its memory."""
        self.plan = plan
        self._release = release
        self._writing_ended = False
        self._copy_failed = False
        self._pending: list[Sequence[Pending[HostArray]]] = [start(number) for number in range(len(plan.items))]

    def wait(self) -> None:
        """See `StateCopy`. Copied items may be written meanwhile."""
        try:
            for arrays in self._pending:
                for array in arrays:
                    array.result()
        except Exception:
            if self._copy_failed or not self._writing_ended:
                raise
            # The writer failed and freed the memory. The handle of the save raises its error.

    def fail(self, error: BaseException) -> None:
        """See `StateCopy`. All copies have been started already."""

    def end_writing(self) -> None:
        """See `StateCopy`."""
        self._writing_ended = True

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        try:
            return [array.result() for array in self._pending[item]]
        except Exception:
            self._copy_failed = True  # set before the error ends the writer, so that `wait` raises it too
            raise

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        if self._pending[item]:
            self._pending[item] = ()
            self._release(item)


class BoundedSnapshot:
    """Snapshot of an asynchronous save with bounded memory: copies items while the writer writes.

    Copies the items that the writer waits for first, and the others in the order of the plan.
    `wait` runs on the thread of the caller. The writer takes and releases items on other threads.
    """

    def __init__(
        self,
        plan: WritePlan,
        start: Callable[[int], Sequence[Pending[HostArray]]],
        release: Callable[[int], object],
        limit: int,
        earlier: BoundedSnapshot | None = None,
    ) -> None:
        """See `CopiedSnapshot`. Copies use at most `limit` bytes, except for an item that the writer waits for.

        A single item may also be larger than the limit. Nothing is copied before `earlier` is written.
        """
        self.plan = plan
        self._start = start
        self._release = release
        self._limit = limit
        self._earlier = earlier
        self._used_bytes = 0
        self._changed = threading.Condition()
        self._requested: deque[int] = deque()
        self._pending: dict[int, Sequence[Pending[HostArray]]] = {}
        self._error: BaseException | None = None
        self._writing_ended = False

    def wait(self) -> None:
        """Copy every item. Return once the last item is copied, or the writer has ended. Then the source may change."""
        if self._earlier is not None:
            self._earlier.wait_until_written()
            self._earlier = None
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
                    is_needed = not self._writing_ended
                if not is_needed:
                    self.release(number)
        except BaseException as error:
            if isinstance(error, Exception) and self._writing_ended:
                return  # the writer freed the memory, and raises its own error
            self.fail(error)
            raise
        finally:
            self._start = _refuse_to_start  # the old function refers to the state

    def _next(self, waiting: dict[int, None]) -> int | None:
        with self._changed:
            while not self._writing_ended:
                while self._requested and self._requested[0] not in waiting:
                    self._requested.popleft()
                number = self._requested[0] if self._requested else next(iter(waiting))
                nbytes = self.plan.items[number].nbytes
                # The limit does not apply to an item that the writer waits for, because this would be a deadlock.
                if self._requested or self._used_bytes == 0 or self._used_bytes + nbytes <= self._limit:
                    self._used_bytes += nbytes
                    return number
                self._changed.wait()
            return None

    def wait_until_written(self) -> None:
        """Wait until every copied item is written, or the writer has ended."""
        with self._changed:
            while self._used_bytes and not self._writing_ended:
                self._changed.wait()

    def fail(self, error: BaseException) -> None:
        """See `StateCopy`. `take` then raises `SaveLostError`, caused by this error, for items that are not copied."""
        with self._changed:
            self._error = self._error or error
            self._start = _refuse_to_start
            self._changed.notify_all()

    def end_writing(self) -> None:
        """See `StateCopy`."""
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
            if not self._pending.get(item):
                return  # the writer failed before it took the item
            self._pending[item] = ()
            self._used_bytes -= self.plan.items[item].nbytes
            self._changed.notify_all()
        self._release(item)


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
