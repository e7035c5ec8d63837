"""The arrays of a snapshot, read in boxes of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from ckptcore.errors import AtomicityError
from ckptcore.model import Box, HostArray
from ckptcore.protocols import Snapshot
from ckptcore_orbax.zarr.chunking import iter_chunks
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.stored_arrays import stored_box, stored_view


class ChunkSource:
    """One array of a snapshot. Takes the array for its first chunk, and releases it after the last. Thread-safe.

    Attributes:
        leaf: number of the leaf in the tree.
        name: name of the array.
        format: format in which the array is stored.
        chunks: index and box of each chunk that this process writes. A box may exceed the array.
    """

    def __init__(self, snapshot: Snapshot, item: int, name: str, format: ArrayFormat) -> None:
        """Plan the chunks. Does not take the array yet.

        Args:
            snapshot: the snapshot.
            item: number of the array in the snapshot's plan.
            name: name of the array, for errors.
            format: format in which the array is stored.

        Raises:
            AtomicityError: this process has only a part of a chunk.
        """
        planned = snapshot.plan.items[item]
        self.leaf = planned.leaf
        self.name = name
        self.format = format
        self._snapshot = snapshot
        self._item = item
        self._boxes = [stored_box(box, format.spec) for box in planned.boxes]
        self._whole = Box.whole(format.spec.shape)
        self._boxes_of_chunk: dict[tuple[int, ...], list[int]] = {}
        self.chunks = self._plan_chunks()
        self._arrays: Sequence[tuple[Box, HostArray]] | None = None
        self._left = 0
        self._lock = threading.Lock()

    def _plan_chunks(self) -> Sequence[tuple[tuple[int, ...], Box]]:
        """Return the index and box of each chunk of this process, in C order; boxes may exceed the array."""
        chunk = self.format.chunk
        if self._boxes == [self._whole]:
            return list(iter_chunks(chunk, self._whole))
        # A process may have hundreds of boxes of an array, so each chunk is compared only with
        # intersecting boxes.
        touched: dict[tuple[int, ...], Box] = {}
        for number, box in enumerate(self._boxes):
            for index, outer in iter_chunks(chunk, box):
                touched[index] = outer
                self._boxes_of_chunk.setdefault(index, []).append(number)
        found = []
        for index, outer in sorted(touched.items()):
            wanted = outer.intersect(self._whole)
            common_boxes = [self._boxes[number].intersect(outer) for number in self._boxes_of_chunk[index]]
            sizes = [common.size for common in common_boxes if common is not None]
            if wanted is None or sum(sizes) != wanted.size:
                raise AtomicityError(
                    f"{self.name}: this process has only a part of the chunk {list(index)} of {list(chunk)} "
                    "elements, and no two processes can write one chunk: the cuts that its leaf handler describes "
                    "are not those of its shards"
                )
            found.append((index, outer))
        return found

    def inner_boxes(self, outer: Box) -> Iterator[Box]:
        """Yield the read chunks of a chunk, in C order."""
        if not self.format.sharded:
            yield outer
            return
        for _, box in iter_chunks(self.format.inner, outer):
            yield box

    def expect_segments(self, segments: int) -> None:
        """Set the number of segments that will be opened and closed. Releases the array if there are none."""
        self._left = segments
        if not segments:
            self._snapshot.release(self._item)

    def opener(self, box: Box) -> Callable[[], Sequence[tuple[Box, HostArray]]]:
        """Return a function that returns the parts of a box; see `parts`."""
        return lambda: self.parts(box)

    def parts(self, box: Box) -> Sequence[tuple[Box, HostArray]]:
        """Return the boxes and arrays that form a box, with zeros outside the array."""
        arrays = self._take()
        if len(arrays) == 1 and arrays[0][0] == box:
            return arrays
        return [*self.filled_parts(box), *self._padding(box)]

    def filled_parts(self, box: Box) -> list[tuple[Box, HostArray]]:
        """Return the boxes and arrays that form a box of one chunk, inside the array."""
        arrays = self._take()
        if self._boxes_of_chunk:
            index = tuple(map(int.__floordiv__, box.start, self.format.chunk))
            arrays = [arrays[number] for number in self._boxes_of_chunk[index]]
        found = []
        for box_part, array in arrays:
            if (common := box_part.intersect(box)) is not None:
                found.append((common, array[common.within(box_part)]))
        return found

    def gather(self, box: Box) -> HostArray:
        """Return a copy of the elements of a box that are inside the array: little endian, in C order.

        Always a copy: the array may change between the digest of the elements and their encoding.
        """
        valid = box.intersect(self._whole)
        assert valid is not None  # every chunk contains elements of the array
        dtype = self.format.spec.numpy_dtype.newbyteorder("<")
        parts = self.filled_parts(valid)
        if len(parts) == 1:
            return np.array(parts[0][1], dtype, order="C").reshape(valid.shape)
        whole = np.empty(valid.shape, dtype)
        for part, array in parts:
            whole[part.within(valid)] = array
        return whole

    def _padding(self, box: Box) -> Iterator[tuple[Box, HostArray]]:
        """Yield boxes of zeros that form the part of a box outside the array."""
        zero = np.zeros((), self.format.spec.numpy_dtype)
        start, stop = list(box.start), list(box.stop)
        for axis, extent in enumerate(self._whole.stop):
            if stop[axis] > extent:
                beyond = Box((*start[:axis], max(start[axis], extent), *start[axis + 1 :]), tuple(stop))
                if prod(beyond.shape):
                    yield beyond, np.broadcast_to(zero, beyond.shape)
                stop[axis] = max(start[axis], extent)

    def _take(self) -> Sequence[tuple[Box, HostArray]]:
        with self._lock:
            if self._arrays is None:
                taken = self._snapshot.take(self._item)
                self._arrays = [
                    (box, stored_view(array, self.format.spec)) for box, array in zip(self._boxes, taken, strict=True)
                ]
            return self._arrays

    def close(self) -> None:
        """Count a segment as written or abandoned. The last one releases the array."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._arrays = None
        self._snapshot.release(self._item)
