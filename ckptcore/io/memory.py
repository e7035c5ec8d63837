"""Host memory for transfers: a memory limit, reused buffers, huge pages."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
from collections import deque
from typing import Any, Final

import numpy as np

from ckptcore.errors import InsufficientMemoryError
from ckptcore.io.elements import copy_elements, plain
from ckptcore.io.threads import IOThreads, reset_in_children
from ckptcore.model import ArraySpec, HostArray, Pending, Ready
from ckptcore.records import dataclass

PAGE_BYTES: Final = 4096
"""Minimum alignment of the memory of `map_pages`."""

HUGE_PAGE_BYTES: Final = 2 << 20
"""Bytes of a huge page on most systems. On systems with larger huge pages, the memory consists of small pages."""

_SPARE: Final = 32
"""A partly used huge page at the end of an array is allowed if it wastes less than 1/32 of the array's size: the first
use of memory takes many times longer with small pages than with huge pages."""


@dataclass(slots=True, eq=False)
class Pages:
    """Part of a memory mapping. The mapping is unmapped once no reference to it or to its arrays remains."""

    _mapping: mmap.mmap
    _offset: int
    nbytes: int

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an array at the start of the memory; not initialised."""
        return np.ndarray(shape, dtype, self._mapping, self._offset)

    def memory(self) -> memoryview:
        """Return all of the memory as bytes."""
        return memoryview(self._mapping)[self._offset : self._offset + self.nbytes]

    def cut(self, start: int, stop: int) -> Pages:
        """Return a part of the memory; offsets in bytes."""
        return Pages(self._mapping, self._offset + start, stop - start)


def map_pages(nbytes: int) -> Pages:
    """Map memory, which the system provides when it is touched. Memory of a huge page or more is aligned to huge pages.

    All bytes that fill huge pages use huge pages. The rest uses a huge page too, if this wastes little of it. An array
    takes at most 1/32 more memory than its size, or one additional small page.

    Raises:
        MemoryError
    """
    whole = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    huge = whole if (whole - nbytes) * _SPARE < nbytes else nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    # Room to begin at the boundary of a huge page. Pages that are never touched take no memory.
    slack = max(huge - nbytes, 0) + HUGE_PAGE_BYTES if huge else 0
    try:
        mapping = mmap.mmap(-1, max(nbytes, 1) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot get {nbytes} bytes of memory: {error}") from error
    if not slack:
        return Pages(mapping, 0, nbytes)
    offset = -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(mapping, offset, huge)
    return Pages(mapping, offset, nbytes)


def _advise(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
    except OSError:
        # A kernel without transparent huge pages refuses. The memory still works; only its first use is slower.
        return


_LARGE_BYTES: Final = 4 << 20
"""Arrays of at least this size have their own pages."""

_SMALL_BYTES: Final = 64 << 10
"""Arrays below this size use the allocator of NumPy, and are copied immediately."""

_SLAB_BYTES: Final = 32 << 20
"""Bytes of a mapping from which arrays of medium size are cut."""

_PIECE_BYTES: Final = 4 << 20
"""Bytes that a thread copies at a time."""


def allocate(spec: ArraySpec) -> HostArray:
    """Allocate an array that is not initialised. Its memory is freed with the last array that views it.

    Large arrays use huge pages, which a load fills several times faster than small pages.

    Raises:
        InsufficientMemoryError
    """
    nbytes = spec.nbytes
    try:
        if nbytes >= HUGE_PAGE_BYTES:
            return map_pages(nbytes).array(spec.shape, spec.numpy_dtype)
    except MemoryError:
        # The process may have reached its limit of mappings. NumPy's allocator may still have memory.
        pass
    try:
        return np.empty(spec.shape, spec.numpy_dtype)
    except (MemoryError, ValueError) as error:
        raise InsufficientMemoryError(f"not enough memory for {spec}, {nbytes} bytes: {error}") from error


def free(array: HostArray) -> None:
    """Free the memory of an array from `allocate` that is not read any more, although references to the array remain.

    Does nothing for an array without pages of its own.
    """
    # The kernel drops the pages of an anonymous mapping immediately. The addresses stay valid, and read as zeros.
    if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        with contextlib.suppress(OSError):  # memory that the process has locked is freed with the array
            array.base.madvise(mmap.MADV_DONTNEED)


class StagingPool:
    """Memory into which saves copy arrays before they are written, reused by the next save. Thread-safe.

    It never keeps more memory than saves used at their peak. Memory of less than 4 MiB is cut from mappings of 32 MiB.
    Such a mapping is unmapped only as a whole. A forked child starts with an empty pool.
    """

    def __init__(self) -> None:
        """Start empty; saves allocate memory from the system when they need it."""
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget all memory in a forked child, because the saves that used it do not run there."""
        self._lock = threading.Lock()
        self._free: list[tuple[int, int, Pages]] = []
        self._free_bytes = 0
        self._used_bytes = 0
        self._peak_bytes = 0
        self._serial = 0
        self._slab: Pages | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes in use or kept for reuse."""
        with self._lock:
            return self._used_bytes + self._free_bytes

    def take(self, nbytes: int) -> Pages:
        """Return at least `nbytes` of memory.

        Raises:
            MemoryError
        """
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            index = bisect.bisect_left(self._free, (size,))
            # Accept memory that is a little too large, so that it is reused when a shape changes a little.
            if index < len(self._free) and self._free[index][0] <= size + size // 8:
                pages = self._free.pop(index)[2]
                self._free_bytes -= pages.nbytes
            else:
                self._peak_bytes = max(self._peak_bytes, self._used_bytes + size)
                self._drop_free(self._peak_bytes - self._used_bytes - size)
                pages = map_pages(size) if size >= _LARGE_BYTES else self._cut(size)
            self._used_bytes += pages.nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            return pages

    def put_back(self, pages: Pages) -> None:
        """Return memory to the pool."""
        with self._lock:
            self._used_bytes -= pages.nbytes
            self._keep(pages)

    def release_unused(self) -> None:
        """Return all memory that is not in use to the system."""
        with self._lock:
            self._free.clear()
            self._free_bytes = 0
            self._slab = None
            self._peak_bytes = self._used_bytes

    def _keep(self, pages: Pages) -> None:
        self._serial += 1  # orders entries of equal size, because `Pages` cannot be compared
        bisect.insort(self._free, (pages.nbytes, self._serial, pages))
        self._free_bytes += pages.nbytes

    def _drop_free(self, allowed: int) -> None:
        """Free unused memory, the largest first, until at most `allowed` bytes are kept."""
        while self._free_bytes > allowed and self._free:
            self._free_bytes -= self._free.pop()[0]

    def _cut(self, size: int) -> Pages:
        slab = self._slab
        if slab is None or slab.nbytes < size:
            slab = map_pages(_SLAB_BYTES)
        self._slab = slab.cut(size, slab.nbytes)
        return slab.cut(0, size)


class StagingMemory:
    """The `ckptcore.protocols.HostMemory` of one save. Thread-safe.

    Attributes:
        copied_bytes: bytes that were copied, or allocated to be filled. May be too low if several threads call
            `copy` or `empty` concurrently.
    """

    def __init__(self, pool: StagingPool, threads: IOThreads) -> None:
        """Allocate memory from `pool` and copy on `threads`."""
        self._pool = pool
        self._threads = threads
        self._lock = threading.Lock()
        self._leased: dict[int, Pages] = {}  # by start address
        self._pieces: deque[tuple[_PendingCopy, HostArray, HostArray]] = deque()  # copy, destination, source
        self._copiers = 0
        self._copying = 0
        self._not_copying = threading.Condition(self._lock)
        self._closed = False
        self.copied_bytes = 0

    def empty(self, spec: ArraySpec) -> HostArray:
        """Return a C-contiguous array to fill; not initialised."""
        return self._empty(spec.shape, spec.numpy_dtype)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        self._expect_open()
        self.copied_bytes += nbytes
        if nbytes < _SMALL_BYTES:
            return np.empty(shape, dtype)
        pages = self._pool.take(nbytes)
        array = pages.array(shape, dtype)
        with self._lock:
            if not self._closed:
                self._leased[array.ctypes.data] = pages
                return array
        self._pool.put_back(pages)
        raise _closed_error()

    def copy(self, source: HostArray) -> Pending[HostArray]:
        """Copy `source` into memory of the save, in native byte order. `source` must not change before the result.

        Small arrays are copied immediately, others by the threads and by callers that wait for a result.
        """
        if source.nbytes < _SMALL_BYTES:
            self._expect_open()
            self.copied_bytes += source.nbytes
            return Ready(_copy_small(source))
        array = self._empty(source.shape, source.dtype if source.dtype.isnative else source.dtype.newbyteorder("="))
        copy = _PendingCopy(self, self._lock, array)
        pieces = [(copy, to, of) for to, of in _cut_copy(array, source)]
        copy.missing = len(pieces)
        with self._lock:
            if self._closed:
                raise _closed_error()
            self._pieces.extend(pieces)
            more = min(len(pieces), self._threads.count - self._copiers)
            self._copiers += more
        for _ in range(more):
            self._threads.submit(self._copy_pieces)
        return copy

    def _copy_pieces(self) -> None:
        while self.help_copy(is_copier=True):
            pass

    def help_copy(self, *, is_copier: bool = False) -> bool:
        """Copy one piece that no thread has started. Return False if there is none.

        `is_copier` is True if the caller is counted in `_copiers`. If there is no piece, this method ends the counting.
        """
        with self._lock:
            if not self._pieces:
                if is_copier:
                    self._copiers -= 1
                return False
            copy, destination, source = self._pieces.popleft()
            self._copying += 1
        try:
            copy_elements(destination, source)
        except BaseException as error:  # noqa: BLE001  # raised by `result`
            copy.piece_done(error)
        else:
            copy.piece_done(None)
        finally:
            with self._lock:
                self._copying -= 1
                if self._copying == 0:
                    self._not_copying.notify_all()
        return True

    def release(self, array: HostArray) -> None:
        """Return the memory of an array to the pool. A view with the same address is also accepted."""
        if array.nbytes < _SMALL_BYTES:
            return
        with self._lock:
            pages = self._leased.pop(array.ctypes.data, None)
        if pages is not None:
            self._pool.put_back(pages)

    def cancel(self) -> None:
        """Stop copying. Copies that have not started fail. Waits for running copies. Finished copies can be read."""
        with self._lock:
            self._closed = True
            canceled = list(self._pieces)
            self._pieces.clear()
            while self._copying:
                self._not_copying.wait()
        for copy, _, _ in canceled:
            copy.piece_done(_closed_error())

    def close(self) -> None:
        """Cancel copies, and return all memory to the pool. The memory must not be read afterwards."""
        self.cancel()
        with self._lock:
            leased = list(self._leased.values())
            self._leased.clear()
        for pages in leased:
            self._pool.put_back(pages)

    def _expect_open(self) -> None:
        if self._closed:
            raise _closed_error()


def _closed_error() -> RuntimeError:
    return RuntimeError("the memory of a save was used after the save ended")


class _PendingCopy:
    """A copy that threads make piece by piece. See `ckptcore.model.Pending`."""

    __slots__ = ("_array", "_counting", "_done", "_error", "_memory", "missing")

    def __init__(self, memory: StagingMemory, counting: threading.Lock, array: HostArray) -> None:
        self._memory = memory
        self._counting = counting
        self._array = array
        self._error: BaseException | None = None
        # The lock serves as an event: it is acquired until the copy is complete.
        self._done = threading.Lock()
        self._done.acquire()
        self.missing = 0

    def result(self) -> HostArray:
        """Wait for the copy. This thread copies too, so that it never waits for threads that wait for it."""
        while not self._done.acquire(blocking=False):
            if not self._memory.help_copy():
                self._done.acquire()
                break
        self._done.release()
        if self._error is not None:
            raise self._error
        return self._array

    def piece_done(self, error: BaseException | None) -> None:
        """Count a piece."""
        if error is not None:
            self._error = error
        with self._counting:
            self.missing -= 1
            left = self.missing
        if left == 0:
            self._done.release()


def _copy_small(source: HostArray) -> HostArray:
    if source.dtype.isnative:
        return source.copy()
    return plain(source).astype(plain(source).dtype.newbyteorder("=")).view(source.dtype.newbyteorder("="))


def _cut_copy(destination: HostArray, source: HostArray) -> list[tuple[HostArray, HostArray]]:
    """Return the pieces of a copy. Strided arrays are cut along the first axis that is long enough."""
    nbytes = destination.nbytes
    count = -(-nbytes // _PIECE_BYTES)
    if count == 1:
        return [(destination, source)]
    if source.flags.c_contiguous and source.dtype == destination.dtype:
        # Bytes can be cut into equal pieces, even if the array has only short axes.
        source = source.reshape(-1).view(np.uint8)
        destination = destination.reshape(-1).view(np.uint8)
    axis = max(range(source.ndim), key=lambda number: (min(source.shape[number], count), -number))
    step = -(-source.shape[axis] // count)
    before = (slice(None),) * axis
    return [
        (destination[(*before, slice(start, start + step))], source[(*before, slice(start, start + step))])
        for start in range(0, source.shape[axis], step)
    ]
