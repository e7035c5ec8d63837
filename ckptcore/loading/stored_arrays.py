"""Stored arrays: arrays of an open checkpoint, whose elements are read on demand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from ckptcore.errors import CheckpointError
from ckptcore.io.block_cache import BlockCache
from ckptcore.io.elements import bytes_of, c_strides, copy_elements, is_little, little_dtype, new_bytes
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.indexing import BasicIndex, Indexed, index_box, rows_of
from ckptcore.loading.open_state import OpenState, find_plain_place, map_array
from ckptcore.loading.reading import allocate_for, check_sizes
from ckptcore.model.arrays import ArraySpec, HostArray
from ckptcore.model.objects import BLOCK_BYTES
from ckptcore.model.tree import TreePath, format_path
from ckptcore.runtime import runtime_of

__all__ = ["StoredArray"]

_RUN_BYTES: Final = 8 << 20
"""The calling thread alone reads elements that follow each other up to this; several threads read more."""

_NEAR_BYTES: Final = 64 << 10
"""Gaps up to this are cheaper to read than to leave out, if nothing is verified."""

_BATCH_BYTES: Final = 32 << 20
"""Memory for bytes that are read at once and then copied to their places."""

_BATCH_PARTS: Final = 1024
"""Most boxes that are read at once."""


class StoredArray:
    """An array of an open checkpoint. Indexing reads the elements that it returns, and bytes that verify them.

    Takes what NumPy's basic indexing does (integers, slices with steps, ``...``, None), and returns what NumPy would: a
    new array, or a scalar. `numpy.asarray` reads all of it. Any thread.

    Attributes:
        path: the keys that lead to it.
        shape: elements along each axis.
        dtype: of the elements.
    """

    __slots__ = (
        "_extent",
        "_held",
        "_is_little",
        "_is_plain",
        "_leaf",
        "_offset",
        "_row",
        "_spec",
        "_state",
        "_stored_dtype",
        "_view",
        "dtype",
        "path",
        "shape",
    )

    def __init__(self, state: OpenState, leaf: int, path: TreePath, spec: ArraySpec) -> None:
        """An array of a state, by the number of its leaf; reads nothing."""
        self.path = path
        self.shape = spec.shape
        self.dtype = dtype = spec.numpy_dtype
        little = little_dtype(dtype)
        self._is_plain = little == dtype
        self._is_little = is_little(dtype)
        self._stored_dtype = dtype if self._is_plain else little
        self._state = state
        self._leaf = leaf
        self._spec = spec
        self._extent = spec.shape[0] if spec.shape else 0
        self._row = math.prod(spec.shape[1:]) * dtype.itemsize
        self._offset = 0
        self._held: BlockCache | Literal[False] | None = None  # False: it is not in one place; None: not known yet
        self._view: HostArray | None = None  # all of it in memory, of which only what is at hand is touched

    def __repr__(self) -> str:
        return f"<StoredArray {format_path(self.path)}: {self._spec}>"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements in all."""
        return self._spec.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._spec.nbytes

    def __len__(self) -> int:
        """Elements along the first axis."""
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements for each index of the first axis, read one by one."""
        return (self[number] for number in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """Return all of it, read again by each call."""
        if copy is False:
            raise ValueError(
                "a stored array is read into new memory: ask for it without copy=False, or for memory_map()"
            )
        array: HostArray = self._read(index_box(..., self.shape))
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, index: BasicIndex) -> Any:
        """Return what NumPy would for this index, read into new memory.

        Raises:
            IndexError: for an index that NumPy refuses, and for lists, arrays and booleans.
            CorruptCheckpointError: if bytes are not what was written.
            CheckpointNotFoundError: if the checkpoint was replaced since it was opened.
            ValueError: if it was closed.
        """
        rows = rows_of(index, self._extent)
        if rows is not None and self._row:
            start, stop = rows
            held, view = self._held, self._view
            if (
                held
                and view is not None
                and held.is_cached(self._offset + start * self._row, self._offset + stop * self._row)
                and not self._state.is_closed
                and self._is_little
            ):
                # Fast path: adds no cost to reads that need no verification.
                found = view[index]
                if found.nbytes <= _RUN_BYTES:
                    return found.copy() if self._is_plain else found.copy().view(self.dtype)
            elif type(index) is slice and index.step is None:
                array = self._read_rows(start, stop)
                if array is not None:
                    return array
        indexed = index_box(index, self.shape)
        array = self._read(indexed)
        return array if indexed.is_plain else array[indexed.local]

    def _read_rows(self, start: int, stop: int) -> HostArray | None:
        """Return a range of the first axis; None if it is not in one object, or large."""
        state = self._state
        if state.is_closed:
            _ = state.opened  # says so
        held = self._held
        if held is None:
            held = self._find()
        first = self._offset + start * self._row
        last = first + (stop - start) * self._row
        if held is False or last - first > _RUN_BYTES:
            return None
        if held.is_cached(first, last):
            view = self._mapped(held) if self._view is None else self._view
            if view is not None:
                return self._copy(view[start:stop])
        return self._read_run(held, first, (stop - start, *self.shape[1:]))

    def _read_run(self, held: BlockCache, first: int, shape: tuple[int, ...]) -> HostArray:
        """Return elements that follow each other from a byte of the object on."""
        array = np.empty(shape, self._stored_dtype)
        self._read_into(held, first, bytes_of(array))
        if self._is_plain:
            return array
        return array.view(self.dtype) if self._is_little else self._copy(array)

    def _read_into(self, held: BlockCache, first: int, memory: memoryview) -> None:
        try:
            held.read_into(first, memory)
        except CheckpointError as error:
            self._state.explain(error)

    def memory_map(self) -> HostArray:
        """Return a read-only view of the elements in their file, which the operating system reads as they are touched.

        Their checksums are not compared: `ckptcore.verify` does that. The view can be used after the checkpoint is
        closed, or replaced.

        Raises:
            NotMappableError: where elements are compressed, in several pieces, or not on a local disk; says why.
            CheckpointNotFoundError: if the checkpoint was replaced since it was opened.
        """

        def map_opened(opened: Checkpoint) -> HostArray:
            return map_array(opened, self._leaf, self._spec, format_path(self.path))

        return self._state.guard(map_opened)

    def _copy(self, view: HostArray) -> HostArray:
        """Return stored elements as an array of its own."""
        if self._is_little:
            return view.copy() if self._is_plain else view.copy().view(self.dtype)
        array = np.empty(view.shape, self.dtype)
        copy_elements(array, view)
        return array

    def _read(self, indexed: Indexed) -> HostArray:
        """Return an array of just the wanted elements."""
        _ = self._state.opened  # a closed one gives nothing
        if 0 in indexed.counts:
            return np.empty(indexed.counts, self.dtype)
        near = self._read_near(indexed)
        if near is not None:
            return near
        self._state.guard(lambda opened: check_sizes(opened, {self._leaf}))
        array = allocate_for(self._state.opened, self._leaf, ArraySpec(indexed.counts, self._spec.dtype))
        if indexed.is_box:
            self._state.read(self._leaf, (indexed.box,), (array,))
            return array
        self._read_parts(indexed, array)
        return array

    def _read_near(self, indexed: Indexed) -> HostArray | None:
        """Return the same if they are near each other in one object; None if they are not, or this does not pay."""
        held = self._held
        if held is None:
            held = self._find()
        if held is False:
            return None
        itemsize = self.dtype.itemsize
        strides = c_strides(self.shape)
        first, last = _extent(indexed, strides)
        span = (last - first) * itemsize
        follow = span == math.prod(indexed.counts) * itemsize
        begin = self._offset + first * itemsize
        if (span <= _RUN_BYTES or not follow) and held.is_cached(begin, begin + span):
            view = self._mapped(held) if self._view is None else self._view
            if view is not None:
                return self._copy(view[indexed.elements])
        if span > (_RUN_BYTES if follow else BLOCK_BYTES if held.is_verified else _NEAR_BYTES):
            return None if follow else self._pick(held, indexed, strides)
        if follow:
            return self._read_run(held, begin, indexed.counts)
        memory = new_bytes(span)
        self._read_into(held, begin, memory)
        steps = [step * stride * itemsize for step, stride in zip(indexed.steps, strides, strict=True)]
        return self._copy(np.ndarray(indexed.counts, self._stored_dtype, memory, 0, steps))

    def _pick(self, held: BlockCache, indexed: Indexed, strides: tuple[int, ...]) -> HostArray | None:
        """Return elements that do not follow each other, copied from mapped memory; None if it cannot be mapped.

        Their blocks are read and verified once, also for later reads of elements beside them.
        """
        view = self._mapped(held) if self._view is None else self._view
        if view is None:
            return None
        threads, itemsize = runtime_of(self._state.context).io_threads, self.dtype.itemsize
        array = np.empty(indexed.counts, self._stored_dtype)
        whole = _Part(indexed, tuple([slice(0, count) for count in indexed.counts]))
        for part in _far_parts(whole, tuple([stride * itemsize for stride in strides])):
            begin, end = _extent(part.indexed, strides)
            try:
                if not held.fetch(self._offset + begin * itemsize, self._offset + end * itemsize, threads):
                    return None
            except CheckpointError as error:
                self._state.explain(error)
            copy_elements(array[part.place], view[part.indexed.elements])
        if self._is_plain:
            return array
        return array.view(self.dtype) if self._is_little else self._copy(array)

    def _find(self) -> BlockCache | Literal[False]:
        """Return the object that contains it; False if it is read as loads read it."""
        state = self._state
        place = state.attempt(lambda opened: find_plain_place(opened, self._leaf))  # what is held is looked at below
        held = None if place is None else state.hold(place.key)
        if place is None or held is None or (place.is_sealed and state.context.io.verify and not held.is_verified):
            self._held = False
            return False
        self._offset = place.offset
        self._held = held
        return held

    def _mapped(self, held: BlockCache) -> HostArray | None:
        """Return all of it as mapped memory, or None. Called once some is at hand: one slice is read faster."""
        memory = held.memory()
        if memory is not None and self._offset + self.nbytes <= len(memory):
            self._view = np.ndarray(self.shape, self._stored_dtype, memory, self._offset)
        return self._view

    def _read_parts(self, indexed: Indexed, array: HostArray) -> None:
        """Read elements that are not a box, by boxes."""
        itemsize = self.dtype.itemsize
        batch: list[tuple[Indexed, HostArray]] = []
        held = 0
        whole = _Part(indexed, tuple([slice(0, count) for count in indexed.counts]))
        for part in _parts(whole, tuple([stride * itemsize for stride in c_strides(self.shape)])):
            nbytes = part.indexed.box.size * itemsize
            if batch and (held + nbytes > _BATCH_BYTES or len(batch) == _BATCH_PARTS):
                self._read_batch(batch)
                batch, held = [], 0
            batch.append((part.indexed, array[part.place]))
            held += nbytes
        self._read_batch(batch)

    def _read_batch(self, batch: list[tuple[Indexed, HostArray]]) -> None:
        boxes = [part.box for part, _ in batch]
        buffers = [np.empty(box.shape, self.dtype) for box in boxes]
        self._state.read(self._leaf, boxes, buffers)
        for (part, target), buffer in zip(batch, buffers, strict=True):
            copy_elements(target, buffer[tuple([slice(None, None, step) for step in part.steps])])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the wanted elements, and their place in the result."""

    indexed: Indexed
    place: tuple[slice, ...]

    def cut(self, axis: int, low: int, high: int) -> _Part:
        """Return the part from one index to another along an axis."""
        indexed, origin = self.indexed, self.place[axis].start
        starts, counts, place = list(indexed.starts), list(indexed.counts), list(self.place)
        starts[axis] += low * indexed.steps[axis]
        counts[axis] = high - low
        place[axis] = slice(origin + low, origin + high)
        return _Part(replace(indexed, starts=tuple(starts), counts=tuple(counts)), tuple(place))


def _extent(indexed: Indexed, strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the range of elements in C order that contains the wanted ones; `strides` are in elements."""
    first = last = 0
    for start, step, count, stride in zip(indexed.starts, indexed.steps, indexed.counts, strides, strict=True):
        first += start * stride
        last += (start + (count - 1) * step) * stride
    return first, last + 1


def _far_parts(part: _Part, strides: tuple[int, ...]) -> Iterator[_Part]:
    """Cut what is wanted until no part skips a whole block; `strides` are in bytes."""
    steps, counts = part.indexed.steps, part.indexed.counts
    for axis, (step, count) in enumerate(zip(steps, counts, strict=True)):
        if count > 1 and step * strides[axis] > BLOCK_BYTES:
            for number in range(count):
                yield from _far_parts(part.cut(axis, number, number + 1), strides)
            return
    yield part


def _parts(part: _Part, strides: tuple[int, ...]) -> Iterator[_Part]:
    """Cut where that leaves out enough bytes, and until each part takes little memory; `strides` are in bytes."""
    steps, counts = part.indexed.steps, part.indexed.counts
    for axis, (step, count) in enumerate(zip(steps, counts, strict=True)):
        if step > 1 and count > 1 and (step - 1) * strides[axis] >= _NEAR_BYTES:
            for number in range(count):
                yield from _parts(part.cut(axis, number, number + 1), strides)
            return
    if part.indexed.box.size * strides[-1] > _BATCH_BYTES and max(counts) > 1:
        axis = next(axis for axis, count in enumerate(counts) if count > 1)
        middle = counts[axis] // 2
        yield from _parts(part.cut(axis, 0, middle), strides)
        yield from _parts(part.cut(axis, middle, counts[axis]), strides)
        return
    yield part
