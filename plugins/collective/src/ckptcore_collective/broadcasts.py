"""Broadcasts of shared reads: send the data that this process has read, while it reads the next part."""

from __future__ import annotations

import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

from ckptcore.io.elements import copy_elements
from ckptcore.io.threads import BackgroundThreads
from ckptcore.loading.joint import PeerFailure
from ckptcore.loading.reading import LeafRead, TreeRead, check_sizes, incomplete_read
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending, ReadItem, ReadPlan, Ready
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import Channels
from ckptcore_collective.shares import Message, Round, SharedPlan, message_offsets

READ_AHEAD: Final = 4
"""Maximum number of messages that are read before it is their turn to be sent."""

_HEAD_BYTES: Final = 64
"""Size of the header of a message, which keeps the elements aligned. Its first byte is `_FAILED` after a failure."""

_FAILED: Final = 1


class Broadcasts:
    """Runs a `SharedPlan`. Used by one thread; other threads read for it.

    Every message is sent, even after a failure, so that no process hangs. After a failure, messages report the failure
    instead of data.
    """

    def __init__(self, reading: TreeRead, plan: SharedPlan, channels: Channels, rank: int) -> None:
        """Allocate memory for messages. Reads nothing yet.

        Args:
            reading: the planned reads of this process.
            plan: the plan of this process.
            channels: connect the groups of the plan.
            rank: rank of this process.

        Raises:
            MemoryError
        """
        self._reading = reading
        self._plan = plan
        self._rank = rank
        self._channels = channels
        self._error: Exception | None = None
        self._peer_failed = False
        messages = [message for part in plan.rounds for message in part.messages]
        self._depth = max(1, min(channels.depth, READ_AHEAD))
        longest = max([message.nbytes for message in messages], default=0)
        count = min(len(messages), self._depth + READ_AHEAD)
        self._free = [channels.memory(_HEAD_BYTES + longest) for _ in range(count)]
        self._groups = {group: number for number, group in enumerate(plan.groups)}

    def run(self) -> None:
        """Run the exchange: read local shares, send and receive messages, and place each array once it is complete.

        Raises:
            PeerFailure: if another process reported a failure.
            RankFailedError: if another process does not respond.
            Errors of reading and building, after everything was sent.
        """
        reading = self._reading
        self._guard(lambda: check_sizes(reading.checkpoint, {leaf_read.leaf for leaf_read in reading.leaf_reads}))
        by_leaf: dict[int, list[LeafRead]] = {}
        for leaf_read in reading.leaf_reads:
            if leaf_read.array is None and any(box.size for box in leaf_read.boxes):
                by_leaf.setdefault(leaf_read.leaf, []).append(leaf_read)
            else:
                self._guard(functools.partial(self._place_empty, leaf_read))
        readers = BackgroundThreads(2, "ckptcore-read")
        try:
            for part in self._plan.rounds:
                self._run_round(part, by_leaf, readers)
        finally:
            readers.join(cancel=True)
        if self._error is not None:
            raise self._error
        if self._peer_failed:
            raise PeerFailure

    @property
    def _failed(self) -> bool:
        return self._error is not None or self._peer_failed

    def _guard(self, work: Callable[[], object]) -> None:
        """Run a function unless a failure occurred before. Its error is raised once all messages were sent."""
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised once every message was sent
            self._error = error

    def _place_empty(self, leaf_read: LeafRead) -> None:
        self._reading.finish_leaf(leaf_read, self._reading.buffers_of(leaf_read))

    def _run_round(self, part: Round, by_leaf: Mapping[int, Sequence[LeafRead]], readers: BackgroundThreads) -> None:
        destinations = _RoundBuffers(self._reading)
        self._guard(
            lambda: destinations.add([leaf_read for leaf in sorted(part.leaves) for leaf_read in by_leaf.get(leaf, ())])
        )
        if self._failed or not part.direct:
            self._send_all(part.messages, destinations, None, readers)
        else:
            direct = _DirectReads(self._reading.checkpoint, part.direct, destinations)
            reader = readers.submit(direct.read)
            try:
                self._send_all(part.messages, destinations, direct, readers)
                self._guard(lambda: self._finish_direct(direct, reader, destinations))
            finally:
                direct.stop()  # before its memory is released
                wait([reader])
        self._guard(destinations.expect_complete)

    def _finish_direct(self, direct: _DirectReads, reader: Future[None], destinations: _RoundBuffers) -> None:
        destinations.mark_complete(direct.all_completed())
        reader.result()

    def _send_all(
        self,
        messages: Sequence[Message],
        destinations: _RoundBuffers,
        direct: _DirectReads | None,
        readers: BackgroundThreads,
    ) -> None:
        """Send and receive the messages of a round in order, as many at the same time as the channels allow."""
        to_read = deque(message for message in messages if message.reader == self._rank)
        being_read: deque[tuple[HostArray, Future[None] | None]] = deque()
        in_flight: deque[tuple[Message, HostArray, Pending[None]]] = deque()
        for message in messages:
            # At most `_depth - 1` messages are in flight, and `READ_AHEAD` are read ahead, so one buffer is left to
            # receive a message.
            while to_read and len(being_read) < READ_AHEAD and self._free:
                memory = self._free.pop()
                being_read.append((memory, self._start_reading(to_read.popleft(), memory, readers)))
            if message.reader == self._rank:
                memory, read = being_read.popleft()
                if read is not None:
                    self._guard(read.result)
                memory[0] = _FAILED if self._failed else 0
            else:
                memory = self._free.pop()
            in_flight.append((message, memory, self._start_sending(message, memory)))
            while len(in_flight) >= self._depth:
                self._finish_message(*in_flight.popleft(), destinations)
            if direct is not None:
                self._guard(lambda: destinations.mark_complete(direct.completed()))
        while in_flight:
            self._finish_message(*in_flight.popleft(), destinations)

    def _start_reading(self, message: Message, memory: HostArray, readers: BackgroundThreads) -> Future[None] | None:
        if self._failed:
            return None
        checkpoint, views = self._reading.checkpoint, self._views(message, memory)
        return readers.submit(lambda: _read_all(checkpoint, message.pieces, views))

    def _start_sending(self, message: Message, memory: HostArray) -> Pending[None]:
        if len(message.members) == 1:
            return Ready(None)
        data = memory[: _HEAD_BYTES + message.nbytes]
        return self._channels.broadcast(self._groups[message.members], message.reader, data)

    def _finish_message(
        self, message: Message, memory: HostArray, pending: Pending[None], destinations: _RoundBuffers
    ) -> None:
        """Wait for a message, and copy its elements to their destinations."""
        pending.result()
        if message.reader != self._rank and memory[0] == _FAILED:
            self._peer_failed = True
        views = self._views(message, memory)
        self._guard(lambda: destinations.put(zip(message.pieces, views, strict=True)))
        self._free.append(memory)

    def _views(self, message: Message, memory: HostArray) -> Sequence[HostArray]:
        """Return the pieces of a message as arrays in its memory."""
        leaves = self._reading.checkpoint.tree.leaves
        records = [leaves[item.leaf] for item in message.pieces]
        dtypes = [record.spec.numpy_dtype for record in records if isinstance(record, ArrayRecord)]
        offsets, _ = message_offsets(message.pieces, [dtype.itemsize for dtype in dtypes])
        views = []
        for item, offset, dtype in zip(message.pieces, offsets, dtypes, strict=True):
            start = _HEAD_BYTES + offset
            raw = memory[start : start + item.box.size * dtype.itemsize]
            views.append(raw.view(dtype).reshape(item.box.shape))
        return views


@dataclass(slots=True, eq=False)
class _LeafBuffers:
    """The destination of one array.

    Attributes:
        leaf_read: the planned read.
        buffers: the memory of its boxes.
        missing: number of elements that were not received yet.
    """

    leaf_read: LeafRead
    buffers: Sequence[HostArray]
    missing: int


class _RoundBuffers:
    """Destinations of the elements of a round, by leaf."""

    def __init__(self, reading: TreeRead) -> None:
        self._reading = reading
        self._destinations: dict[int, list[_LeafBuffers]] = {}

    def add(self, leaf_reads: Sequence[LeafRead]) -> None:
        """Allocate memory for arrays."""
        for leaf_read in leaf_reads:
            destination = _LeafBuffers(
                leaf_read, self._reading.buffers_of(leaf_read), sum([box.size for box in leaf_read.boxes])
            )
            self._destinations.setdefault(leaf_read.leaf, []).append(destination)

    def memory_of(self, item: ReadItem) -> HostArray:
        """Return the memory of a requested box."""
        return next(
            buffer
            for destination in self._destinations[item.leaf]
            for box, buffer in zip(destination.leaf_read.boxes, destination.buffers, strict=True)
            if box == item.box
        )

    def mark_complete(self, items: Iterable[ReadItem]) -> None:
        """Mark boxes as complete that were read into the memory that `memory_of` returned."""
        self.put((item, self.memory_of(item)) for item in items)

    def put(self, pieces: Iterable[tuple[ReadItem, HostArray]]) -> None:
        """Copy elements to all destinations, and build the leaves that are complete."""
        for item, elements in pieces:
            destinations = self._destinations[item.leaf]
            for destination in destinations:
                for box, buffer in zip(destination.leaf_read.boxes, destination.buffers, strict=True):
                    if box.contains(item.box):
                        if buffer is not elements:
                            part: HostArray = buffer[item.box.within(box)] if box.start else buffer
                            copy_elements(part, elements)
                        destination.missing -= item.box.size
            # Copy to all destinations before building: a built leaf owns its memory.
            self._destinations[item.leaf] = [destination for destination in destinations if destination.missing]
            for destination in destinations:
                if not destination.missing:
                    self._reading.finish_leaf(destination.leaf_read, destination.buffers)

    def expect_complete(self) -> None:
        """Check that all arrays are complete.

        Raises:
            CorruptCheckpointError
        """
        for leaf, destinations in self._destinations.items():
            if destinations:
                raise incomplete_read(self._reading.checkpoint, leaf)


class _DirectReads:
    """Boxes that are read directly into their destination, on a separate thread."""

    def __init__(self, checkpoint: Checkpoint, items: Sequence[ReadItem], destinations: _RoundBuffers) -> None:
        self._opened = checkpoint
        self._items = items
        self._buffers = [destinations.memory_of(item) for item in items]
        self._completed: queue.SimpleQueue[ReadItem | None] = queue.SimpleQueue()
        self._is_stopped = False

    def read(self) -> None:
        """Read all boxes. Runs on the separate thread."""
        checkpoint = self._opened
        try:
            plan = ReadPlan(checkpoint.tree, tuple(self._items))
            for number in checkpoint.read(plan, self._buffers):
                if self._is_stopped:
                    break
                self._completed.put(self._items[number])
        finally:
            self._completed.put(None)

    def stop(self) -> None:
        """Read no further boxes."""
        self._is_stopped = True

    def completed(self) -> Iterator[ReadItem]:
        """Iterate over the boxes that were read since the last call."""
        while True:
            try:
                item = self._completed.get_nowait()
            except queue.Empty:
                return
            if item is None:
                self._completed.put(None)  # `all_completed` waits for this end mark, too
                return
            yield item

    def all_completed(self) -> Iterator[ReadItem]:
        """Wait for the remaining boxes, and iterate over them."""
        while (item := self._completed.get()) is not None:
            yield item


def _read_all(checkpoint: Checkpoint, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> None:
    """Fill buffers with boxes."""
    missing = set(range(len(items)))
    plan = ReadPlan(checkpoint.tree, tuple(items))
    missing.difference_update(checkpoint.read(plan, buffers))
    if missing:
        raise incomplete_read(checkpoint, items[min(missing)].leaf)
