"""Stored arrays: arrays of an open checkpoint, whose elements are read on demand."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from ckptcore.distributions import ShownInNotebooks
from ckptcore.errors import CheckpointError
from ckptcore.io.block_cache import BlockCache
from ckptcore.io.elements import bytes_of, c_strides, copy_elements, is_little, little_dtype, new_bytes
from ckptcore.loading.reading import allocate_for, check_sizes
from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, HostArray
from ckptcore.model.tree import TreePath, format_path
from ckptcore.on_demand.indexing import AxisIndex, BasicIndex, index_box, rows_of
from ckptcore.on_demand.open_state import OpenState, find_plain_extent, map_array
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.runtime import runtime_of

_RUN_BYTES: Final = 8 << 20
"""Maximum contiguous bytes that the calling thread reads itself. Several threads read larger ranges."""

_NEAR_BYTES: Final = 64 << 10
"""Gaps up to this size are cheaper to read than to skip, if nothing is verified."""

_BATCH_BYTES: Final = 32 << 20
"""Maximum bytes of a batch of boxes. A batch is one read; its requested elements are then copied to the result."""

_BATCH_PARTS: Final = 1024
"""Maximum number of boxes in a batch."""


class StoredArray(ShownInNotebooks):
    """An array of an open checkpoint. Indexing reads the requested elements, without the rest of the array.

    Indexing may also read bytes around them: the rest of blocks that are verified, the rest of compressed chunks, and
    small gaps.

    Supports the basic indexing of NumPy (integers, slices with steps, ``...``, None) and returns the same results: a
    new array, or a scalar. `numpy.asarray` reads the whole array. Thread-safe.

    Attributes:
        path: its path in the tree.
        shape: elements along each axis.
        dtype: dtype of the elements.
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
        """Refer to a leaf of an open checkpoint. Reads nothing."""
        self.path = path
        self.shape = spec.shape
        self.dtype, self._stored_dtype, self._is_plain, self._is_little, self._row = _form_of(spec)
        self._state = state
        self._leaf = leaf
        self._spec = spec
        self._extent = spec.shape[0] if spec.shape else 0
        self._offset = 0
        self._held: BlockCache | Literal[False] | None = None  # False: read through the layout; None: not known yet
        self._view: HostArray | None = None  # mapped memory; only verified blocks of it are read

    def __reduce__(self) -> tuple[type[StoredArray], tuple[OpenState, int, TreePath, ArraySpec]]:
        """Pickle and copy the reference to the array, without cached data."""
        return type(self), (self._state, self._leaf, self.path, self._spec)

    def __repr__(self) -> str:
        return f"<StoredArray {format_path(self.path)}: {self._spec}>"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._spec.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._spec.nbytes

    def __len__(self) -> int:
        """Return the number of elements along the first axis."""
        if not self.shape:
            raise TypeError("len() needs an array with at least one axis")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements at each index of the first axis. Reads them one by one."""
        return (self[number] for number in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """Return the whole array in new memory. Each call reads it again.

        Raises:
            ValueError: `copy` is False.
        """
        if copy is False:
            raise ValueError("a stored array is read into new memory: do not pass copy=False, or use memory_map()")
        array: HostArray = self._read(index_box(..., self.shape))
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, index: BasicIndex) -> Any:
        """Read the elements at an index into new memory. The result equals that of NumPy indexing.

        Raises:
            IndexError: NumPy refuses the index, or it has lists, arrays or booleans.
            TypeError: a bound of a slice is not an integer.
            CorruptCheckpointError: bytes differ from those written.
            CheckpointNotFoundError: the checkpoint was replaced or deleted since it was opened.
            ValueError: the checkpoint was closed, or the step of a slice is 0.
        """
        rows = rows_of(index, self._extent)
        if rows is not None and self._row and not self._state.is_closed:
            # The only fast path, without calls of `index_box`: ranges along the first axis of an array in one object.
            try:
                held = self._find() if self._held is None else self._held
                first, last = self._offset + rows[0] * self._row, self._offset + rows[1] * self._row
                if held and last - first <= _RUN_BYTES:
                    if held.is_cached(first, last):  # verified before, or needs no verification
                        view = self._mapped(held) if self._view is None else self._view
                        if view is not None:
                            return self._copy(view[index])
                    if type(index) is slice and index.step is None:
                        return self._read_run(held, first, (rows[1] - rows[0], *self.shape[1:]))
            except CheckpointError as error:
                self._state.explain(error)
        indexed = index_box(index, self.shape)
        array = self._read(indexed)
        return array if indexed.is_plain else array[indexed.local]

    def _read_run(self, held: BlockCache, first: int, shape: tuple[int, ...]) -> HostArray:
        """Read contiguous elements, which begin at a byte of an object."""
        array = np.empty(shape, self._stored_dtype)
        held.read_into(first, bytes_of(array))
        if self._is_plain:
            return array
        return array.view(self.dtype) if self._is_little else self._copy(array)

    def memory_map(self) -> HostArray:
        """Map the array into memory. Returns a read-only view; the operating system reads its file on access.

        Does not verify checksums; see `ckptcore.verify`. The view stays valid after the checkpoint is closed or
        replaced.

        Raises:
            NotMappableError: elements are compressed, in several pieces, or not on a local disk.
            CheckpointNotFoundError: the checkpoint was replaced or deleted since it was opened.
            ValueError: the checkpoint was closed.
        """

        def map_opened(checkpoint: Checkpoint) -> HostArray:
            return map_array(checkpoint, self._leaf, self._spec, format_path(self.path))

        return self._state.guard(map_opened)

    def _copy(self, view: HostArray) -> HostArray:
        """Copy stored elements to a new array."""
        if self._is_little:
            return view.copy() if self._is_plain else view.copy().view(self.dtype)
        array = np.empty(view.shape, self.dtype)
        copy_elements(array, view)
        return array

    def _read(self, indexed: AxisIndex) -> HostArray:
        """Read the requested elements."""
        _ = self._state.checkpoint  # raises if the checkpoint is closed
        if 0 in indexed.counts:
            return np.empty(indexed.counts, self.dtype)
        try:
            near = self._read_near(indexed)
        except CheckpointError as error:
            self._state.explain(error)
        if near is not None:
            return near
        self._state.guard(lambda checkpoint: check_sizes(checkpoint, {self._leaf}))
        array = allocate_for(self._state.checkpoint, self._leaf, ArraySpec(indexed.counts, self._spec.dtype))
        if indexed.is_box:
            self._state.read(self._leaf, (indexed.box,), (array,))
            return array
        self._read_parts(indexed, array)
        return array

    def _read_near(self, indexed: AxisIndex) -> HostArray | None:
        """Read elements directly from the object that contains the array.

        Returns None if only the layout can read them, or if they are a range so large that several threads should read
        it.
        """
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
        if follow:
            return None if span > _RUN_BYTES else self._read_run(held, begin, indexed.counts)
        if span > (held.block_bytes if held.is_verified else _NEAR_BYTES):
            picked = self._pick(held, indexed, strides)
            if picked is not None or span > BLOCK_BYTES:
                return picked
        memory = new_bytes(span)
        held.read_into(begin, memory)
        steps = [step * stride * itemsize for step, stride in zip(indexed.steps, strides, strict=True)]
        return self._copy(np.ndarray(indexed.counts, self._stored_dtype, memory, 0, steps))

    def _pick(self, held: BlockCache, indexed: AxisIndex, strides: tuple[int, ...]) -> HostArray | None:
        """Copy elements that are not contiguous from mapped memory. Returns None if the object cannot be mapped.

        Each block is read and verified once, even if later calls need other elements of it.
        """
        view = self._mapped(held) if self._view is None else self._view
        if view is None:
            return None
        threads, itemsize = runtime_of(self._state.context).io_threads, self.dtype.itemsize
        array = np.empty(indexed.counts, self._stored_dtype)
        whole = _IndexedPart(indexed, tuple([slice(0, count) for count in indexed.counts]))
        for part in _far_parts(whole, tuple([stride * itemsize for stride in strides]), held.block_bytes):
            begin, end = _extent(part.indexed, strides)
            if not held.fetch(self._offset + begin * itemsize, self._offset + end * itemsize, threads):
                return None
            copy_elements(array[part.slices], view[part.indexed.elements])
        if self._is_plain:
            return array
        return array.view(self.dtype) if self._is_little else self._copy(array)

    def _find(self) -> BlockCache | Literal[False]:
        """Return the open object that contains the array; False if boxes must be read through the layout."""
        state = self._state
        extent = find_plain_extent(state.checkpoint, self._leaf)
        held = None if extent is None else state.hold(extent.key)
        # If an object has no block checksums, a checksum may follow the elements. Only the layout verifies it.
        if extent is None or held is None or (extent.has_checksum and state.context.io.verify and not held.is_verified):
            self._held = False
            return False
        self._offset = extent.offset
        self._held = held
        return held

    def _mapped(self, held: BlockCache) -> HostArray | None:
        """Return the array in mapped memory, or None. Mapping takes too long for one slice: call it after a read."""
        memory = held.memory()
        if memory is not None and self._offset + self.nbytes <= len(memory):
            self._view = np.ndarray(self.shape, self._stored_dtype, memory, self._offset)
        return self._view

    def _read_parts(self, indexed: AxisIndex, array: HostArray) -> None:
        """Read elements that are not a box, in several boxes."""
        itemsize = self.dtype.itemsize
        batch: list[tuple[AxisIndex, HostArray]] = []
        held = 0
        whole = _IndexedPart(indexed, tuple([slice(0, count) for count in indexed.counts]))
        for part in _parts(whole, tuple([stride * itemsize for stride in c_strides(self.shape)])):
            nbytes = part.indexed.box.size * itemsize
            if batch and (held + nbytes > _BATCH_BYTES or len(batch) == _BATCH_PARTS):
                self._read_batch(batch)
                batch, held = [], 0
            batch.append((part.indexed, array[part.slices]))
            held += nbytes
        self._read_batch(batch)

    def _read_batch(self, batch: list[tuple[AxisIndex, HostArray]]) -> None:
        boxes = [part.box for part, _ in batch]
        buffers = [np.empty(box.shape, self.dtype) for box in boxes]
        self._state.read(self._leaf, boxes, buffers)
        for (part, target), buffer in zip(batch, buffers, strict=True):
            copy_elements(target, buffer[tuple([slice(None, None, step) for step in part.steps])])


@functools.lru_cache(maxsize=512)
def _form_of(spec: ArraySpec) -> tuple[np.dtype[Any], np.dtype[Any], bool, bool, int]:
    """Return the dtype of an array, the plain dtype of its stored elements, and the bytes of a row.

    Also returns whether the two dtypes are equal, and whether their elements have the same bytes. Cached: checkpoints
    have many arrays of one form.
    """
    dtype = spec.numpy_dtype
    little = little_dtype(dtype)
    is_plain = little == dtype
    return dtype, dtype if is_plain else little, is_plain, is_little(dtype), math.prod(spec.shape[1:]) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _IndexedPart:
    """A part of the requested elements, and its slices in the result."""

    indexed: AxisIndex
    slices: tuple[slice, ...]

    def cut(self, axis: int, low: int, high: int) -> _IndexedPart:
        """Return the part between two indices along an axis."""
        indexed, origin = self.indexed, self.slices[axis].start
        starts, counts, slices = list(indexed.starts), list(indexed.counts), list(self.slices)
        starts[axis] += low * indexed.steps[axis]
        counts[axis] = high - low
        slices[axis] = slice(origin + low, origin + high)
        return _IndexedPart(replace(indexed, starts=tuple(starts), counts=tuple(counts)), tuple(slices))


def _extent(indexed: AxisIndex, strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the flat range of elements that contains the requested elements. `strides` are in elements."""
    first = last = 0
    for start, step, count, stride in zip(indexed.starts, indexed.steps, indexed.counts, strides, strict=True):
        first += start * stride
        last += (start + (count - 1) * step) * stride
    return first, last + 1


def _far_parts(part: _IndexedPart, strides: tuple[int, ...], block_bytes: int) -> Iterator[_IndexedPart]:
    """Split the requested elements until no part skips a whole block. `strides` are in bytes."""
    steps, counts = part.indexed.steps, part.indexed.counts
    for axis, (step, count) in enumerate(zip(steps, counts, strict=True)):
        if count > 1 and step * strides[axis] > block_bytes:
            for number in range(count):
                yield from _far_parts(part.cut(axis, number, number + 1), strides, block_bytes)
            return
    yield part


def _parts(part: _IndexedPart, strides: tuple[int, ...]) -> Iterator[_IndexedPart]:
    """Split the requested elements at large gaps, and then until the box of each part fits into a batch, if possible.

    `strides` are in bytes.
    """
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
