"""Reading and writing of safetensors files, with checks of the header and of slice indices."""

from __future__ import annotations

import mmap
import operator
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from safetensors import SafetensorError

from ckptcore import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.plain_safetensors import DTYPE_BITS, FileHeader, TensorEntry, encode_header, read_header, replace_file
from ckptcore.protocols import Buffer

Backend: TypeAlias = Literal["mmap", "pread"]
"""Methods of reading the bytes of tensors: through mapped memory, or with system calls."""

_MAX_READ_BYTES = 1 << 30
_MAX_BUFFERS = 1024  # IOV_MAX of Linux


class TensorReader(Protocol):
    """Reads tensors of a file for one framework."""

    def whole(self, entry: TensorEntry) -> Any:
        """Return a tensor."""
        ...

    def every(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their bytes."""
        ...

    def slicer(self, entry: TensorEntry) -> Callable[[Any], Any]:
        """Return a function that returns the slice of a tensor for an index."""
        ...


def checked_header(data: bytes) -> FileHeader:
    """Return the header of a file in memory.

    Raises:
        SafetensorError: the file is damaged, or has a dtype that the library does not know.
    """
    return _with_known_dtypes(lambda start, stop: data[start:stop], len(data), "the file")


def _with_known_dtypes(read: Callable[[int, int], bytes], file_bytes: int, name: str) -> FileHeader:
    try:
        header = read_header(read, file_bytes, name)
    except CorruptCheckpointError as error:
        raise SafetensorError(f"Error while deserializing header: {error}") from error
    for tensor, entry in header.tensors.items():
        if entry.dtype not in DTYPE_BITS:
            raise SafetensorError(
                f"Error while deserializing header: the tensor {tensor!r} of {name} has the unknown dtype "
                f"{entry.dtype[:40]!r}; expected one of {list(DTYPE_BITS)}"
            )
    return header


class OpenFile:
    """A file that is open for reading, with its header. Closed when it is garbage-collected. Thread-safe.

    Attributes:
        name: the file name, for errors.
        nbytes: the size of the file.
        descriptor: the descriptor of the file.
        header: the checked header.
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        """Open a file and check its header.

        Raises:
            FileNotFoundError: the file does not exist or cannot be opened.
            SafetensorError: the file is damaged, or not a regular file.
        """
        self.descriptor = -1
        self.name = os.fspath(filename)
        if not isinstance(self.name, str):
            raise TypeError(f"expected a path as str or os.PathLike[str]; found {self.name!r}")
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer.
            self.descriptor = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FileNotFoundError(f"{error.strerror}: {self.name}") from error  # as the library does
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SafetensorError(f"{self.name} is not a regular file")
        self.nbytes = status.st_size
        self.header = _with_known_dtypes(self._read, self.nbytes, self.name)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _read(self, start: int, stop: int) -> bytes:
        return os.pread(self.descriptor, stop - start, start)

    def map(self) -> memoryview:
        """Map the whole file, read-only. The mapping outlives this object."""
        return memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ))

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes from a position.

        Raises:
            SafetensorError: the file ends too early.
        """
        if len(buffer) <= _MAX_READ_BYTES and os.preadv(self.descriptor, (buffer,), start) == len(buffer):
            return
        while buffer:
            count = os.preadv(self.descriptor, (buffer[:_MAX_READ_BYTES],), start)
            if count == 0:
                raise SafetensorError(
                    f"{self.name} is cut off: byte {start} is missing; it changed after it was opened"
                )
            start += count
            buffer = buffer[count:]

    def read_elements(self, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with all elements of the file, in order. Small buffers are filled together.

        Raises:
            SafetensorError: the file ends too early.
        """
        start = self.header.nbytes
        for first in range(0, len(buffers), _MAX_BUFFERS):
            group = buffers[first : first + _MAX_BUFFERS]
            stop = start + sum(map(len, group))
            if stop - start > _MAX_READ_BYTES or os.preadv(self.descriptor, group, start) < stop - start:
                for buffer in group:
                    self.read_into(start, buffer)
                    start += len(buffer)
            start = stop


def checked_index(index: Any, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Check an index, and return its items.

    Like the library, this accepts integers, slices within the shape, and one ellipsis.

    Raises:
        SafetensorError: the index contains something else, or is out of bounds.
        OverflowError: a bound of a slice is negative.
    """
    items: Sequence[Any] = index if type(index) is tuple else (index,)
    if len(items) <= len(shape) and all(map(_fits, items, shape)):
        return tuple(items)
    items = _expanded(index, len(shape))
    checked: list[int | slice] = []
    for axis, item in enumerate(items):
        extent = shape[axis] if axis < len(shape) else 0
        if isinstance(item, slice):
            checked.append(_checked_slice(item))
            continue
        try:
            position = operator.index(item)
        except TypeError:
            raise SafetensorError(
                f"Unsupported slice index at position {axis}: expected slice, int, or ellipsis"
            ) from None
        if position < -extent:
            raise SafetensorError(f"Invalid index {position} for dimension {axis} of size {extent}")
        checked.append(position % extent if position < 0 else position)
    if len(checked) > len(shape):
        raise _slicing_error(checked, shape, "more slicing indexes than dimensions in tensor")
    for axis in reversed(range(len(checked))):
        _check_bounds(checked, shape, axis)
    return tuple(checked)


def _fits(item: Any, extent: int) -> bool:
    """Return True for a non-negative integer or a slice without step, within the bounds.

    A fast path for common indices.
    """
    if type(item) is int:
        return 0 <= item < extent
    if type(item) is not slice or item.step is not None:
        return False
    start = 0 if item.start is None else item.start
    stop = extent if item.stop is None else item.stop
    return type(start) is int and type(stop) is int and 0 <= start <= stop <= extent and start < extent


def _expanded(index: Any, axes: int) -> list[Any]:
    """Return the items of an index, with slices instead of the ellipsis."""
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        return [slice(0, 0)]
    items = list(index) if isinstance(index, tuple) else [index]
    positions = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(positions) > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    for position in positions:
        items[position : position + 1] = [slice(None)] * max(0, axes - len(items) + 1)
    return items


def _checked_slice(item: slice) -> slice:
    bounds = [bound if bound is None else operator.index(bound) for bound in (item.start, item.stop, item.step)]
    if any(bound is not None and bound < 0 for bound in bounds[:2]):
        raise OverflowError(f"the bounds of {item} must not be negative; use positions from the start of the axis")
    if bounds[2] is not None and bounds[2] < 1:
        raise SafetensorError(f"Slice step must be a positive integer, got {bounds[2]}")
    return slice(*bounds)


def _check_bounds(index: Sequence[int | slice], shape: Sequence[int], axis: int) -> None:
    item, extent = index[axis], shape[axis]
    if isinstance(item, slice):
        start, stop = item.start or 0, extent if item.stop is None else item.stop
    else:
        start, stop = item, item + 1
    if start >= extent or stop > extent:
        position = start if start >= extent else stop - 1
        raise _slicing_error(
            index, shape, f"index {position} out of bounds for tensor dimension #{axis} of size {extent}"
        )
    if stop < start:
        raise _slicing_error(index, shape, f"the slice of dimension #{axis} ends before it starts")


def _slicing_error(index: Sequence[int | slice], shape: Sequence[int], reason: str) -> SafetensorError:
    """Return the error for an index that does not fit."""
    written = ", ".join([_written(item) if isinstance(item, slice) else str(item) for item in index])
    return SafetensorError(f"Error during slicing [{written}] with shape {list(shape)}: {reason}")


def _written(item: slice) -> str:
    parts = ["" if bound is None else str(bound) for bound in (item.start, item.stop)]
    return ":".join(parts if item.step in (None, 1) else [*parts, str(item.step)])


class TensorBytes(NamedTuple):
    """A tensor to write.

    Attributes:
        dtype: the name of its dtype in the format, such as ``"F32"``.
        shape: elements along each axis.
        data: its bytes, little endian, in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def save_bytes(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] | None) -> bytes:
    """Return the bytes of a file.

    Raises:
        SafetensorError: the format has no such tensors.
        TypeError: a name or the metadata is not a str.
    """
    return b"".join(_pieces(tensors, metadata))


def save_to(
    tensors: Mapping[str, TensorBytes],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    context: Context | None,
) -> None:
    """Write a file atomically. See `ckptcore.plain_safetensors.replace_file`.

    Raises:
        SafetensorError: the format has no such tensors, or the file cannot be written.
        TypeError: a name or the metadata is not a str.
    """
    pieces = _pieces(tensors, metadata)
    try:
        replace_file(filename, pieces, context=context)
    except CheckpointError as error:
        raise SafetensorError(f"Error while serializing: {error}") from error


def _pieces(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] | None) -> list[Buffer]:
    try:
        header, names = encode_header({name: tensor[:2] for name, tensor in tensors.items()}, metadata)
    except ValueError as error:
        raise SafetensorError(f"Error while serializing: {error}") from error
    return [header, *[tensors[name].data for name in names]]
