"""Boxes of arrays: positions, shapes and dtypes, the processes that hold them, and their memory."""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.errors import UnsupportedLeafError

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""An array in host memory, of a dtype of NumPy or ml_dtypes."""

_MAX_WORK: Final = 1 << 16
"""Maximum number of steps and of listed elements in an exact comparison. Beyond this limit, memory counts as shared."""

_NUMPY_NAMES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_ML_NAMES: Final = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1", "int2", "uint2", "int4", "uint4",
    "complex32", "bcomplex32",
)  # fmt: skip
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {name: np.dtype(name) for name in _NUMPY_NAMES}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
_MAX_FIXED_BYTES = 1 << 20


@functools.cache
def _ml_dtypes() -> Mapping[str, np.dtype[Any]]:
    """Return the dtypes of ml_dtypes by name, as far as the installed version has them."""
    import ml_dtypes  # takes longer to import than most of the core, and few states have its dtypes

    return {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}


@functools.cache
def _ml_names() -> Mapping[np.dtype[Any], str]:
    return {dtype: name for name, dtype in _ml_dtypes().items()}


@functools.lru_cache(maxsize=256)
def dtype_from_name(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name in a checkpoint, in native byte order.

    The names are the names in NumPy and ml_dtypes (``float32``, ``bfloat16``), ``datetime64`` and ``timedelta64`` with
    or without a unit (``datetime64[ns]``), ``S7`` for 7 bytes and ``U7`` for 7 characters of UCS-4. The name may come
    from a hostile file: no other names are accepted.

    Raises:
        UnsupportedLeafError: it is another name.
    """
    if (known := _DTYPES.get(name)) is not None:
        return known
    for prefix in ("datetime64", "timedelta64"):
        if name.startswith(prefix + "[") and name.endswith("]"):
            unit = name[len(prefix) + 1 : -1].lstrip("0123456789")
            count = name[len(prefix) + 1 : len(name) - 1 - len(unit)]
            if unit in _TIME_UNITS and unit != "generic" and len(count) < 9:
                return np.dtype(name)
        elif name == prefix:
            return np.dtype(name)
    if re.fullmatch(r"[SU][1-9][0-9]{0,6}", name) and int(name[1:]) <= _MAX_FIXED_BYTES:
        return np.dtype(name)
    if (known := _ml_dtypes().get(name)) is not None:
        return known
    raise UnsupportedLeafError(
        f"the dtype name {name[:80]!r} is unknown to this version of ckptcore; "
        "it may have been written by a newer version or with a newer ml_dtypes"
    )


def name_of_dtype(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in checkpoints, the inverse of `dtype_from_name`. Ignores byte order.

    Raises:
        UnsupportedLeafError: it is an object, structured, void or platform-dependent dtype, or a string dtype whose
            length is 0 or more than 1 Mi characters.
    """
    native = dtype.newbyteorder("=") if dtype.byteorder in "<>" else dtype
    if (name := _NAMES.get(native)) is not None:
        return name
    if dtype.kind in "mM":
        return str(native.name)
    if dtype.kind in "SU" and dtype.names is None:
        length = dtype.itemsize // (4 if dtype.kind == "U" else 1)
        if 0 < length <= _MAX_FIXED_BYTES:
            return f"{dtype.kind}{length}"
    if (name := _ml_names().get(native)) is not None:
        return name
    if dtype.names is not None:
        reason, remedy = "structured", f"save a dict of its fields, such as value[{dtype.names[0]!r}]"
    elif dtype.hasobject:
        reason, remedy = "object", "save value.tolist() if its elements can be saved"
    else:
        reason = "not portable or not known"
        remedy = "save value.view('uint8'), which keeps all bits, or a cast to a plain dtype"
    raise UnsupportedLeafError(f"dtype {dtype} cannot be stored ({reason}); {remedy}")


def sort_of_numbers(dtype: str) -> str | None:
    """Return the sort of numbers of a dtype, by its name: bool, int, float or complex; None if it is not numeric."""
    if dtype == "bool":
        return "bool"
    if dtype.startswith(("int", "uint")):
        return "int"
    if dtype.startswith(("float", "bfloat")):
        return "float"
    return "complex" if dtype.startswith(("complex", "bcomplex")) else None


class Box(NamedTuple):
    """A half-open range per axis, in elements: ``start <= index < stop``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    @functools.lru_cache(maxsize=512)  # an array is looked up several times, and many arrays have one shape
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box of a whole array, with extents as plain ints; equal shapes of other types have the same."""
        return Box((0,) * len(shape), tuple(map(int, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """The number of elements; 1 for a box without axes."""
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the array."""
        return tuple([slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True)])

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array of the elements of `outer`."""
        return tuple(
            [
                slice(start - origin, stop - origin)
                for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
            ]
        )

    def relative(self, origin: tuple[int, ...]) -> Box:
        """Return this box in coordinates relative to an index of the array."""
        return Box(tuple(map(operator.sub, self.start, origin)), tuple(map(operator.sub, self.stop, origin)))

    def band(self, axis: int, start: int, stop: int) -> Box:
        """Return the part from `start` to `stop` along an axis. Both are within the box."""
        return Box(
            (*self.start[:axis], start, *self.start[axis + 1 :]), (*self.stop[:axis], stop, *self.stop[axis + 1 :])
        )

    def bands(self, axis: int, step: int) -> Sequence[Box]:
        """Divide the box into parts of `step` elements along an axis, in order. The last part may have fewer."""
        stop = self.stop[axis]
        return [self.band(axis, start, min(start + step, stop)) for start in range(self.start[axis], stop, step)]

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the common elements, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(map(operator.ge, start, stop)) else Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Return True if the bounds of `other` are within the bounds of this box."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))


class ArraySpec(NamedTuple):
    """Shape and dtype of an array.

    Attributes:
        shape: elements along each axis.
        dtype: a name that `dtype_from_name` knows.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of this array in host memory."""
        return dtype_from_name(self.dtype)

    @property
    def size(self) -> int:
        """The number of elements; 1 for an array without axes."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory, contiguous."""
        return math.prod(self.shape) * dtype_from_name(self.dtype).itemsize

    @property
    def is_possible(self) -> bool:
        """True if its bytes can be addressed. If an axis is empty, NumPy still requires this of the other axes."""
        elements = math.prod([extent for extent in self.shape if extent])
        return elements * dtype_from_name(self.dtype).itemsize <= sys.maxsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class AbstractArray:
    """Shape and dtype of an array to load, without a framework. It loads as a NumPy array.

    Attributes:
        shape: elements along each axis.
        dtype: a dtype of NumPy or ml_dtypes.
        framework: for a stored array, the framework from which it was saved, such as ``"torch"``; None if unknown. An
            array in the state of an object loads in this framework, because the object may not have the array yet.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    framework: str | None = field(default=None, compare=False, repr=False)

    def __init__(self, shape: tuple[int, ...], dtype: Any, framework: str | None = None) -> None:
        """`dtype` is anything that `numpy.dtype` takes, or a name that `dtype_from_name` knows."""
        object.__setattr__(self, "shape", tuple(map(operator.index, shape)))
        object.__setattr__(self, "dtype", dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype))
        object.__setattr__(self, "framework", framework)

    def __copy__(self) -> AbstractArray:
        """Return an equal object, without the checks of `__init__`."""
        array: AbstractArray = object.__new__(AbstractArray)
        _set(array, "shape", self.shape)
        _set(array, "dtype", self.dtype)
        _set(array, "framework", self.framework)
        return array


_set: Final = object.__setattr__


class Shard(NamedTuple):
    """A box held by a process, with its replica number.

    Attributes:
        box: its position in the array.
        replica: the number of this replica. By default the process with replica 0 writes the box.
        replicas: the number of processes or devices that hold the same box.
    """

    box: Box
    replica: int = 0
    replicas: int = 1


class StridedMemory(NamedTuple):
    """The memory of the elements of an array.

    Attributes:
        space: the address space, such as a device; addresses of different spaces are unrelated. ``"host"``: the memory
            of this process.
        address: the address of the first element.
        shape: the shape, in elements.
        strides: the distance between elements along each axis, in bytes; may be negative.
        itemsize: the bytes of an element.
        encoding: how the bytes encode an element; the same bytes in two encodings are different elements.
    """

    space: Hashable
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    encoding: str = ""

    @classmethod
    def of(cls, array: HostArray) -> StridedMemory:
        """Return the memory of a NumPy array."""
        dtype = array.dtype
        encoding = dtype.name if dtype.isnative else f"swapped {dtype.name}"
        return cls("host", array.__array_interface__["data"][0], array.shape, array.strides, dtype.itemsize, encoding)

    @property
    def extent(self) -> range:
        """The addresses from the first byte to the last. Empty if there are no elements."""
        if 0 in self.shape or not self.itemsize:
            return range(self.address, self.address)
        reaches = [stride * (length - 1) for stride, length in zip(self.strides, self.shape, strict=True)]
        first = self.address + sum([reach for reach in reaches if reach < 0])
        last = self.address + sum([reach for reach in reaches if reach > 0])
        return range(first, last + self.itemsize)

    def shares_bytes(self, other: StridedMemory) -> bool:
        """Return True if elements of both share a byte. Elements that are only interleaved share no byte."""
        if self.space != other.space:
            return False
        own, others = self.extent, other.extent
        if max(own.start, others.start) >= min(own.stop, others.stop):
            return False
        try:
            bound: Any = _MAX_WORK  # NumPy's stubs allow only two values
            return np.shares_memory(_addresses(self), _addresses(other), max_work=bound)
        except np.exceptions.TooHardError:
            return True

    def overlaps_itself(self) -> bool:
        """Return True if two of its elements share a byte, as in a broadcast array."""
        if not self.extent:
            return False
        axes = sorted(
            (abs(stride), length) for stride, length in zip(self.strides, self.shape, strict=True) if length > 1
        )
        reach = self.itemsize
        for stride, length in axes:
            if stride < reach:
                return self._repeats_an_offset(axes)
            reach += stride * (length - 1)
        return False

    def _repeats_an_offset(self, axes: list[tuple[int, int]]) -> bool:
        """Return True if two elements overlap, or if there are too many elements to compare their offsets."""
        if any(stride < self.itemsize for stride, _ in axes):
            return True
        if math.prod([length for _, length in axes]) > _MAX_WORK:
            return True
        offsets = np.zeros(1, np.int64)
        for stride, length in axes:
            offsets = np.add.outer(offsets, stride * np.arange(length)).ravel()
        return bool((np.diff(np.sort(offsets)) < self.itemsize).any())


def _addresses(memory: StridedMemory) -> HostArray:
    """Return an array of the same addresses. Its elements must not be read: the memory may be on a device."""
    interface = {
        "version": 3,
        "data": (memory.address, True),
        "shape": memory.shape,
        "strides": memory.strides,
        "typestr": f"|V{memory.itemsize}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


WHOLE_SAMPLE_BYTES: Final = 256 << 10
"""Maximum size in bytes of an array that `sampled` returns whole."""

_SAMPLE_EVERY_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 64


def sample_steps(itemsize: int) -> tuple[int, int]:
    """Return the distance between the parts of a sample, and the size of a part, in elements of `itemsize` bytes.

    Every process must sample the same elements, even if the array is on a device or not contiguous in some processes.
    Therefore parts are counted in elements of the array in C order.
    """
    taken = max(1, _SAMPLE_BYTES // itemsize)
    return max(taken, _SAMPLE_EVERY_BYTES // itemsize), taken


def sampled(array: HostArray) -> Sequence[HostArray]:
    """Return the elements of an array that are compared with the elements of other processes.

    A small array is returned whole. Of a larger array, return 64 bytes of every 4 KiB and the last 64 bytes. If
    arrays differ in 4 KiB or more in a row, their samples differ. See ``docs/design/ranks-with-different-trees.md``.
    """
    if array.nbytes <= WHOLE_SAMPLE_BYTES:
        return (array,)
    step, taken = sample_steps(array.itemsize)
    flat = array.reshape(-1)
    rows = flat.size // step
    return (flat[: rows * step].reshape(rows, step)[:, :taken], flat[-taken:])
