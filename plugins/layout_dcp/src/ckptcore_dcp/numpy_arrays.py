"""NumPy arrays and scalars in pickles. Their bytes are stored as a text or as bytes, and are read in place.

Arrays of structures become one leaf for each field.

Source: ``array_reduce``, ``array_reduce_ex_picklebuffer`` and ``arraydescr_reduce`` of NumPy's
``methods.c`` and ``descriptor.c``, and `numpy._core.numeric._frombuffer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import HostArray, dtype_from_name, name_of_dtype
from ckptcore_dcp.pickles import Call, Global, OutOfLine, Places, Value, brief, builtin_value
from ckptcore_dcp.stored_tensors import PickledBytes, StoredTensor, c_strides

Fields: TypeAlias = "StoredTensor | str | Mapping[str, Fields]"
"""An array, a description of an array that cannot be loaded, or the arrays of the fields of a structure by name."""

_BFLOAT16: Final = np.dtype("V2")
"""The dtype that numpy.save stores instead of bfloat16, because the format has no name for bfloat16.

`jax.numpy.load` reads it as bfloat16 too.
"""


def arrays_of(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    storage: str,
    pickled: PickledBytes | None = None,
) -> Fields:
    """Return the array with these properties. An array of structures becomes one array for each field.

    Raw bytes (``|V3``) become uint8 with one more axis, except ``|V2``, which is bfloat16. The array of a field is a
    view of the bytes of that field in all elements.

    Args:
        dtype: any dtype, in the stored byte order.
        shape: extents.
        strides: distance between elements along each axis, in elements.
        storage: key of the storage.
        pickled: place of the bytes in a pickle, or None.
    """
    whole = tuple([stride * dtype.itemsize for stride in strides])
    return _arrays(dtype, shape, whole, 0, StoredTensor(storage, "uint8", (), (), 0, framework=None, pickled=pickled))


def _arrays(
    dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int, like: StoredTensor
) -> Fields:
    """Return the arrays of a field. Strides and offset are in bytes."""
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = (*shape, *inner)
        strides = (*strides, *[step * dtype.itemsize for step in c_strides(inner)])
        return _arrays(dtype, shape, strides, offset, like)
    if dtype.names is not None:
        fields: Mapping[str, Any] = dtype.fields or {}
        return {name: _arrays(fields[name][0], shape, strides, offset + fields[name][1], like) for name in dtype.names}
    is_raw = dtype.type is np.void  # the kind of dtypes of ml_dtypes is V too
    if is_raw and dtype.itemsize != 1 and dtype != _BFLOAT16:
        shape, strides = (*shape, dtype.itemsize), (*strides, 1)
    name = "bfloat16" if dtype == _BFLOAT16 else "uint8"
    if not is_raw:
        try:
            name = name_of_dtype(dtype)
        except UnsupportedLeafError as error:
            return f"a NumPy array that cannot be loaded: {error}"
    elif not dtype.itemsize:
        return "a NumPy array whose elements have no bytes"
    array = replace(like, dtype=name, shape=shape)
    if dtype.byteorder == ">":
        pickled = None if like.pickled is None else replace(like.pickled, big_endian=True)
        array = replace(array, storage=f"{like.storage}>", pickled=pickled)
    itemsize = array.itemsize
    if math.gcd(offset, *strides) % itemsize:
        return replace(array, strides=strides, offset=offset, in_bytes=True)
    return replace(array, strides=tuple([step // itemsize for step in strides]), offset=offset // itemsize)


_SCALAR: Final = "numpy.scalar"
"""Kind of the records of NumPy scalars, as the core saves them."""

_PACKAGES: Final = ("numpy.core", "numpy._core")
"""Packages of NumPy 1 and 2."""
_RECONSTRUCT: Final = frozenset(Global(f"{package}.multiarray", "_reconstruct") for package in _PACKAGES)
_FROM_BUFFER: Final = frozenset(Global(f"{package}.numeric", "_frombuffer") for package in _PACKAGES)
_MAKE_SCALAR: Final = frozenset(Global(f"{package}.multiarray", "scalar") for package in _PACKAGES)
_MASKED: Final = frozenset(Global(f"numpy.ma{part}", "_mareconstruct") for part in ("", ".core"))
_ARRAY_TYPES: Final = frozenset(["ndarray", "matrix", "recarray", "memmap", "chararray"])
_BOOL: Final = Call(Global("numpy", "dtype"), ("b1",))
_MAX_NESTED_DTYPES: Final = 8
_DTYPE: Final = Global("numpy", "dtype")
_ENCODE: Final = Global("_codecs", "encode")
_BYTE_ARRAYS: Final = frozenset(Global(module, "bytearray") for module in ("builtins", "__builtin__"))
_LATIN_1: Final = ("latin1", "latin-1")
_BYTES: Final = frozenset(Global(module, "bytes") for module in ("builtins", "__builtin__"))
_MAX_AXES: Final = 64
_MAX_COUNT: Final = 1 << 62


class Objects(NamedTuple):
    """The objects of an array as nested lists in its shape. For an array without axes, the object itself."""

    elements: Value


class MaskedArray(NamedTuple):
    """The parts of a masked array."""

    data: StoredTensor
    mask: StoredTensor
    fill_value: Value


NumpyValue: TypeAlias = "Fields | Objects | MaskedArray | bool | int | float | complex"


@dataclass(frozen=True, slots=True)
class NumpyReader:
    """Recognises NumPy arrays and scalars among the values of one pickle.

    Attributes:
        key: the object that contains the pickle, for errors.
        places: byte ranges of texts and bytes in the pickle; None if the pickle is compressed, so that
            they have no byte range in the object.
    """

    key: str
    places: Places | None

    def read(self, call: Call, path: str) -> NumpyValue | None:
        """Return the array or scalar that a call creates; None for other calls.

        An array of structures becomes an array for each field, and an array of objects becomes nested
        lists. Without `places`, a scalar becomes a number, and the result for an array is None.

        Raises:
            CorruptCheckpointError: the array is invalid.
        """
        function, arguments, state = call.function, call.arguments, call.state
        if function in _MAKE_SCALAR and len(arguments) == 2:
            return self._scalar(arguments[0], arguments[1], path)
        if function in _RECONSTRUCT and arguments and _is_array_type(arguments[0]) and isinstance(state, tuple):
            # The state is (version, shape, dtype, is Fortran, data). NumPy before 1.0 wrote no version.
            if not 4 <= len(state) <= 5:
                raise self._corrupt(path, f"a NumPy array with {brief(state)}")
            shape, dtype, fortran, data = state[-4:]
            return self._array(shape, dtype, data, "F" if fortran is True else "C", None, path)
        if function in _FROM_BUFFER:
            match arguments:
                case (data, dtype, shape, str() as order, *axes):
                    return self._array(shape, dtype, data, order, axes[0] if axes else None, path)
        if function in _MASKED:
            match state:
                case (_, shape, dtype, fortran, data, mask, fill):
                    return self._masked(shape, dtype, fortran is True, data, mask, fill, path)
        return None

    def of_jax(self, call: Call, path: str) -> StoredTensor | None:
        """Return the JAX array that a call creates from the parts of a NumPy array; None for other calls."""
        match call.arguments:
            case (Global() as make, tuple() as arguments, tuple() as state, _):
                array = self.read(Call(make, arguments, state), path)
                if isinstance(array, StoredTensor):
                    return replace(array, framework="jax")
        return None

    def _array(
        self, shape: Value, dtype: Value, data: Value, order: str, axes: Value, path: str
    ) -> Fields | Objects | None:
        extents = self._naturals(shape, path)
        kind = self._dtype(dtype, path)
        strides = c_strides(extents)
        if order == "F":
            strides = c_strides(extents[::-1])[::-1]
        elif order == "K":  # elements in C order, then a transposition
            permutation = self._naturals(axes, path)
            if sorted(permutation) != list(range(len(extents))):
                raise self._corrupt(path, "the axes of a NumPy array have an invalid order")
            extents, strides = (tuple([row[axis] for axis in permutation]) for row in (extents, strides))
        elif order not in ("C", "A"):
            raise self._corrupt(path, f"a NumPy array in the order {order[:40]!r}")
        if kind is None:
            return _objects(data, extents) if isinstance(data, list) else None
        return self._stored(extents, strides, kind, data, path)

    def _masked(
        self, shape: Value, dtype: Value, is_fortran: bool, data: Value, mask: Value, fill: Value, path: str
    ) -> MaskedArray | None:
        order = "F" if is_fortran else "C"
        array = self._array(shape, dtype, data, order, None, path)
        masked = self._array(shape, _BOOL, mask, order, None, path)
        if not isinstance(array, StoredTensor) or not isinstance(masked, StoredTensor):
            return None
        return MaskedArray(array, masked, fill)

    def _scalar(self, dtype: Value, data: Value, path: str) -> StoredTensor | bool | int | float | complex | None:
        if (kind := self._dtype(dtype, path)) is None or kind.type is np.void:
            return None
        content = _plain_bytes(data)
        if content is None or len(content) != kind.itemsize:
            return None  # it only looks like a scalar
        if isinstance(stored := self._stored((), (), kind, data, path), StoredTensor):
            return replace(stored, kind=_SCALAR)
        number: object = np.frombuffer(content, kind)[0].item()
        return number if isinstance(number, bool | int | float | complex) else None

    def _stored(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], data: Value, path: str
    ) -> Fields | None:
        nbytes = math.prod(shape) * dtype.itemsize
        place = self._place(data, nbytes)
        if place is None:
            return None
        if place.size != nbytes:
            raise self._corrupt(path, f"an array of {dtype} of shape {shape} has {place.size} bytes")
        return arrays_of(dtype, shape, strides, "", place)

    def _place(self, data: Value, nbytes: int) -> PickledBytes | None:
        """Return the place of the bytes of an array; None if unknown. `nbytes` is their expected length."""
        is_text = False
        if isinstance(data, Call) and data.function in _BYTE_ARRAYS and len(data.arguments) == 1:
            (data,) = data.arguments
        if isinstance(data, Call) and data.function == _ENCODE and len(data.arguments) == 2:
            data, encoding = data.arguments
            is_text = encoding in _LATIN_1
        elif isinstance(data, Call) and data.function in _BYTES and not data.arguments:
            return PickledBytes(0, 0, 0)
        if isinstance(data, OutOfLine):
            length = data.stop - data.start
            # The length of a text in characters is unknown until it is read.
            return PickledBytes(data.start, length, nbytes if is_text else length, "text" if is_text else "bytes")
        place = self.places.find(data) if self.places is not None and isinstance(data, str | bytes) else None
        if place is None:
            return None
        start, stop, escaped = place
        assert isinstance(data, str | bytes)  # it has a place
        if is_text:
            return PickledBytes(start, stop - start, len(data), "escaped text" if escaped else "text")
        if escaped:
            plain = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
            return PickledBytes(start, stop - start, len(plain), "escaped bytes")
        return PickledBytes(start, stop - start, stop - start)

    def _dtype(self, dtype: Value, path: str) -> np.dtype[Any] | None:
        try:
            return numpy_dtype(dtype)
        except OverflowError as error:
            raise self._corrupt(path, str(error)) from error

    def _naturals(self, value: Value, path: str) -> tuple[int, ...]:
        if isinstance(value, tuple | list) and len(value) <= _MAX_AXES:
            numbers = [number for number in value if type(number) is int and 0 <= number < _MAX_COUNT]
            if len(numbers) == len(value) and math.prod(max(number, 1) for number in numbers) < _MAX_COUNT:
                return tuple(numbers)
        raise self._corrupt(path, f"the shape or the axes of a NumPy array are a {brief(value)}")

    def _corrupt(self, path: str, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{path} in {self.key!r} cannot be read: {reason}; restore the file from a copy, or load another "
            "checkpoint",
            key=self.key,
        )


def _is_array_type(value: Value) -> bool:
    """Return True for an array, and for a subclass of NumPy that adds no state."""
    return isinstance(value, Global) and value.module.partition(".")[0] == "numpy" and value.name in _ARRAY_TYPES


def numpy_dtype(value: Value, depth: int = 0) -> np.dtype[Any] | None:
    """Return a dtype in the byte order of the file, or None if its elements have no fixed size.

    The call is ``dtype("f8", False, True)`` with a state that has a version and ``<``, ``>`` or
    ``|``. The state also contains the unit of times and the fields of structures. For a dtype of
    another library, the argument is a class.

    Raises:
        OverflowError: a size or an offset is larger than any memory.
    """
    if not isinstance(value, Call) or value.function != _DTYPE or not value.arguments or depth > _MAX_NESTED_DTYPES:
        return None
    code, state = value.arguments[0], value.state if isinstance(value.state, tuple) else ()
    order = state[1] if len(state) > 1 else "|"
    try:
        if len(state) > 5 and (state[2] is not None or state[3] is not None):
            return _structure(state, depth)
        if isinstance(code, Global):
            return dtype_from_name(code.name) if code.module == "ml_dtypes" and order != ">" else None
        if not isinstance(code, str) or order not in ("<", ">", "|"):
            return None
        parsed = np.dtype(f"{order}{code}{_unit(state) if code[:1] in ('M', 'm') else ''}")
        if parsed.kind != "V":
            name_of_dtype(parsed)
        return None if parsed.hasobject else parsed
    except (OverflowError, MemoryError) as error:
        raise OverflowError("a NumPy dtype has a size or an offset that is too large") from error
    except (TypeError, ValueError, SyntaxError, UnsupportedLeafError):
        return None


def _structure(state: tuple[Value, ...], depth: int) -> np.dtype[Any] | None:
    """Return a dtype of fields, or of arrays, from its state: ``(3, "|", array, names, fields, size, ...)``."""
    array, names, fields, size = state[2:6]
    if array is not None:
        match array:
            case (Call() as inner, (int() | tuple()) as shape):
                kind = numpy_dtype(inner, depth + 1)
                extents: Any = shape  # NumPy checks it
                repeated: np.dtype[Any] | None = None if kind is None else np.dtype((kind, extents))
                return repeated
        return None
    if not isinstance(names, tuple) or not isinstance(fields, dict) or type(size) is not int:
        return None
    parsed_fields: list[tuple[str, np.dtype[Any], int]] = []
    for name in names:
        match fields.get(name):
            case (Call() as inner, int() as offset, *_) if isinstance(name, str):
                kind = numpy_dtype(inner, depth + 1)
                if kind is None:
                    return None
                parsed_fields.append((name, kind, offset))
            case _:
                return None
    columns: Any = {
        "names": [name for name, _, _ in parsed_fields],
        "formats": [kind for _, kind, _ in parsed_fields],
        "offsets": [offset for _, _, offset in parsed_fields],
        "itemsize": size,
    }
    structure: np.dtype[Any] = np.dtype(columns)
    return structure


def _objects(elements: list[Value], shape: tuple[int, ...]) -> Objects | None:
    """Return the elements of an array of objects, or None if there are fewer or more."""
    if len(elements) != math.prod(shape):
        return None
    array: HostArray = np.empty(len(elements), object)
    for number, element in enumerate(elements):
        array[number] = element
    return Objects(array.reshape(shape).tolist())  # NumPy pickles objects in C order, also from Fortran arrays


def _unit(state: tuple[Value, ...]) -> str:
    """Return the unit of a time, such as ``[25s]``, from ``(..., ({}, (b"s", 25, 1, 1)))``."""
    match state:
        case (*_, (_, (bytes() | Call() as unit, int() as count, *_))):
            name = _plain_bytes(unit)
            if name is not None and name.isalpha() and 0 < count < _MAX_COUNT:
                return f"[{count}{name.decode('ascii')}]"
    return ""


def _plain_bytes(data: Value) -> bytes | None:
    """Return bytes that are stored as such, or as a call that encodes a text. None for other values."""
    if isinstance(data, Call):
        data = builtin_value(data)
    return data if isinstance(data, bytes) else None
