"""Broadcasts: read the share of this process, and send it to others while the next part is read."""

from __future__ import annotations

import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

from ckptcore.io.background import BackgroundThreads
from ckptcore.io.elements import copy_elements
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.collective.joint import PeerFailure
from ckptcore.loading.collective.shares import Message, Round, SharedPlan, message_offsets
from ckptcore.loading.reading import LeafRead, Reading, check_sizes, unread
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending, ReadItem, ReadPlan, Ready
from ckptcore.protocols import Channels

__all__ = ["AHEAD", "Broadcasts"]

AHEAD: Final = 4
"""Messages that are read ahead of sending."""

_HEAD_BYTES: Final = 64
"""Bytes before the elements of a message, which keep them aligned. The first one is `_FAILED` if the sender failed."""

_FAILED: Final = 1


class Broadcasts:
    """Carries out a `SharedPlan`. One thread; others read for it meanwhile.

    Every message is sent, even after a failure: then it carries no data but the failure, and no other process hangs.
    """

    def __init__(self, reading: Reading, plan: SharedPlan, channels: Channels, rank: int) -> None:
        """Take memory for messages, and read nothing yet.

        Args:
            reading: the planned reading of this process.
            plan: of this process.
            channels: that connect the groups of the plan.
            rank: of this process.

        Raises:
            MemoryError
        """
        self._reading = reading
        self._plan = plan
        self._rank = rank
        self._channels = channels
        self._itemsize = _itemsizes(reading.opened)
        self._error: Exception | None = None
        self._peer_failed = False
        messages = [message for part in plan.rounds for message in part.messages]
        self._depth = max(1, min(channels.depth, AHEAD))
        longest = max([message.nbytes for message in messages], default=0)
        count = min(len(messages), self._depth + AHEAD)
        self._free = [channels.memory(_HEAD_BYTES + longest) for _ in range(count)]
        self._groups = {group: number for number, group in enumerate(plan.groups)}

    def run(self) -> None:
        """Run the exchange: read local shares, send and receive messages, and place each array once it is complete.

        Raises:
            PeerFailure: if another process sent that it failed.
            RankFailedError: if another process does not respond.
            Errors of reading and building, after everything was sent.
        """
        reading = self._reading
        self._guard(lambda: check_sizes(reading.opened, {unit.leaf for unit in reading.units}))
        by_leaf: dict[int, list[LeafRead]] = {}
        for unit in reading.units:
            if unit.array is None and any(box.size for box in unit.boxes):
                by_leaf.setdefault(unit.leaf, []).append(unit)
            else:
                self._guard(functools.partial(self._place_empty, unit))
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
        """Do some work unless something failed. Its error is raised once everything was sent."""
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised once every message was sent
            self._error = error

    def _place_empty(self, unit: LeafRead) -> None:
        self._reading.place(unit, self._reading.buffers_of(unit))

    def _run_round(self, part: Round, by_leaf: Mapping[int, Sequence[LeafRead]], readers: BackgroundThreads) -> None:
        places = _Places(self._reading)
        self._guard(lambda: places.add([unit for leaf in sorted(part.leaves) for unit in by_leaf.get(leaf, ())]))
        if self._failed or not part.direct:
            self._send_all(part.messages, places, None, readers)
        else:
            direct = _Direct(self._reading.opened, part.direct, places)
            reader = readers.submit(direct.read)
            try:
                self._send_all(part.messages, places, direct, readers)
                self._guard(lambda: self._finish_direct(direct, reader, places))
            finally:
                direct.stop()  # it must not read into released memory
                wait([reader])
        self._guard(places.expect_complete)

    def _finish_direct(self, direct: _Direct, reader: Future[None], places: _Places) -> None:
        places.have(direct.all_landed())
        reader.result()

    def _send_all(
        self, messages: Sequence[Message], places: _Places, direct: _Direct | None, readers: BackgroundThreads
    ) -> None:
        """Send and receive the messages of a round in order, as many at once as the channels allow."""
        to_read = deque(message for message in messages if message.reader == self._rank)
        being_read: deque[tuple[HostArray, Future[None] | None]] = deque()
        under_way: deque[tuple[Message, HostArray, Pending[None]]] = deque()
        for message in messages:
            # One buffer is kept for the next message; the others are filled ahead.
            while to_read and len(being_read) < AHEAD and self._free:
                memory = self._free.pop()
                being_read.append((memory, self._start_reading(to_read.popleft(), memory, readers)))
            if message.reader == self._rank:
                memory, read = being_read.popleft()
                if read is not None:
                    self._guard(read.result)
                memory[0] = _FAILED if self._failed else 0
            else:
                memory = self._free.pop()
            under_way.append((message, memory, self._start_sending(message, memory)))
            while len(under_way) >= self._depth:
                self._land(*under_way.popleft(), places)
            if direct is not None:
                self._guard(lambda: places.have(direct.landed()))
        while under_way:
            self._land(*under_way.popleft(), places)

    def _start_reading(self, message: Message, memory: HostArray, readers: BackgroundThreads) -> Future[None] | None:
        if self._failed:
            return None
        opened, views = self._reading.opened, self._views(message, memory)
        return readers.submit(lambda: _read_all(opened, message.pieces, views))

    def _start_sending(self, message: Message, memory: HostArray) -> Pending[None]:
        if len(message.members) == 1:
            return Ready(None)
        data = memory[: _HEAD_BYTES + message.nbytes]
        return self._channels.broadcast(self._groups[message.members], message.reader, data)

    def _land(self, message: Message, memory: HostArray, pending: Pending[None], places: _Places) -> None:
        """Wait for a message, and take its elements."""
        pending.result()
        if message.reader != self._rank and memory[0] == _FAILED:
            self._peer_failed = True
        views = self._views(message, memory)
        self._guard(lambda: places.put(zip(message.pieces, views, strict=True)))
        self._free.append(memory)

    def _views(self, message: Message, memory: HostArray) -> Sequence[HostArray]:
        """Return the pieces of a message as arrays in its memory."""
        offsets, _ = message_offsets(message.pieces, self._itemsize)
        leaves = self._reading.opened.tree.leaves
        views = []
        for item, offset in zip(message.pieces, offsets, strict=True):
            record = leaves[item.leaf]
            assert isinstance(record, ArrayRecord)  # who wants a box wants an array
            dtype = record.spec.numpy_dtype
            start = _HEAD_BYTES + offset
            raw = memory[start : start + item.box.size * dtype.itemsize]
            views.append(raw.view(dtype).reshape(item.box.shape))
        return views


@dataclass(slots=True, eq=False)
class _Place:
    """The destination of one array.

    Attributes:
        unit: the planned read.
        buffers: the memory of its boxes.
        missing: elements that are not there yet.
    """

    unit: LeafRead
    buffers: Sequence[HostArray]
    missing: int


class _Places:
    """Destinations of the elements of a round, by leaf."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._places: dict[int, list[_Place]] = {}

    def add(self, units: Sequence[LeafRead]) -> None:
        """Take memory for units."""
        for unit in units:
            place = _Place(unit, self._reading.buffers_of(unit), sum([box.size for box in unit.boxes]))
            self._places.setdefault(unit.leaf, []).append(place)

    def memory_of(self, item: ReadItem) -> HostArray:
        """Return the memory of a box that is requested whole."""
        return next(
            buffer
            for place in self._places[item.leaf]
            for box, buffer in zip(place.unit.boxes, place.buffers, strict=True)
            if box == item.box
        )

    def have(self, items: Iterable[ReadItem]) -> None:
        """Count boxes that were read into the memory that `memory_of` returned."""
        self.put((item, self.memory_of(item)) for item in items)

    def put(self, pieces: Iterable[tuple[ReadItem, HostArray]]) -> None:
        """Copy elements to all destinations, and place the leaves that are complete."""
        for item, elements in pieces:
            places = self._places[item.leaf]
            for place in places:
                for box, buffer in zip(place.unit.boxes, place.buffers, strict=True):
                    if box.contains(item.box):
                        if buffer is not elements:
                            part: HostArray = buffer[item.box.within(box)] if box.start else buffer
                            copy_elements(part, elements)
                        place.missing -= item.box.size
            # All copies come first: a leaf that is built owns its memory.
            self._places[item.leaf] = [place for place in places if place.missing]
            for place in places:
                if not place.missing:
                    self._reading.place(place.unit, place.buffers)

    def expect_complete(self) -> None:
        """Check that nothing is missing.

        Raises:
            CorruptCheckpointError
        """
        for leaf, places in self._places.items():
            if places:
                raise unread(self._reading.opened, leaf)


class _Direct:
    """Boxes that are read directly into their destination, on a separate thread."""

    def __init__(self, opened: Checkpoint, items: Sequence[ReadItem], places: _Places) -> None:
        self._opened = opened
        self._items = items
        self._buffers = [places.memory_of(item) for item in items]
        self._landed: queue.SimpleQueue[ReadItem | None] = queue.SimpleQueue()
        self._is_stopped = False

    def read(self) -> None:
        """Read all boxes. Runs on the separate thread."""
        opened = self._opened
        try:
            plan = ReadPlan(opened.tree, tuple(self._items))
            for number in opened.read(plan, self._buffers):
                if self._is_stopped:
                    break
                self._landed.put(self._items[number])
        finally:
            self._landed.put(None)

    def stop(self) -> None:
        """Read no further boxes."""
        self._is_stopped = True

    def landed(self) -> Iterator[ReadItem]:
        """Iterate over the boxes that were read since the last call."""
        while True:
            try:
                item = self._landed.get_nowait()
            except queue.Empty:
                return
            if item is None:
                self._landed.put(None)
                return
            yield item

    def all_landed(self) -> Iterator[ReadItem]:
        """Wait for the remaining boxes, and iterate over them."""
        while (item := self._landed.get()) is not None:
            yield item


def _itemsizes(opened: Checkpoint) -> Callable[[int], int]:
    """Return a function that returns the bytes per element of an array, by number of its leaf."""
    known: dict[int, int] = {}

    def find(leaf: int) -> int:
        size = known.get(leaf)
        if size is None:
            record = opened.tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)  # who wants a box wants an array
            size = known[leaf] = record.spec.numpy_dtype.itemsize
        return size

    return find


def _read_all(opened: Checkpoint, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> None:
    """Fill buffers with boxes."""
    missing = set(range(len(items)))
    plan = ReadPlan(opened.tree, tuple(items))
    missing.difference_update(opened.read(plan, buffers))
    if missing:
        raise unread(opened, items[min(missing)].leaf)
