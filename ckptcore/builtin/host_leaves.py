"""Leaves in host memory: NumPy arrays and scalars, Python scalars, text, bytes, None, `io.BytesIO` and `bytearray`.

Some other values are stored as a short text, a number or a list: paths, times, enum members, ranges and the like. A
load without an abstract tree returns this plain form. If the abstract tree has a value of such a type, the load returns
a value of that type. The type comes from the caller, never from the checkpoint.
"""

from __future__ import annotations

import binascii
import copy
import datetime
import enum
import io
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from ckptcore.errors import CorruptCheckpointError, PluginError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model.arrays import (
    AbstractArray,
    ArraySpec,
    Box,
    HostArray,
    Shard,
    StridedMemory,
    dtype_from_name,
    name_of_dtype,
    sampled,
)
from ckptcore.model.columns import COLUMN_KINDS, column_record, column_value
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, ValueRecord, unreadable_error
from ckptcore.model.transfer import Pending, Ready
from ckptcore.model.tree import JSON, float_from_json, float_to_json, text_from_json, text_to_json
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler, Priority

_INLINE_BYTES: Final = 1 << 14
"""Largest str or bytes that is stored in the root, in bytes. A larger value is stored as an array of uint8."""

_SCALAR: Final = "numpy.scalar"

_MAX_SCALAR_BYTES: Final = 1 << 12
"""Longest scalar whose abstract leaf is a scalar, in bytes. The limit is needed because a checkpoint may state any
length for text. The abstract leaf of a longer scalar is an array without axes, which needs no memory before the read.
"""


class HostArrayHandler(LeafHandler):
    """`numpy.ndarray`, NumPy scalars and `AbstractArray`. Without an abstract tree, all arrays load as NumPy arrays."""

    priority = Priority.EXACT

    def describe(self, leaf: Any) -> LeafRecord:
        """Return shape and dtype. A scalar has the kind ``numpy.scalar``. A note records a changed byte order."""
        dtype: np.dtype[Any] = leaf.dtype
        if isinstance(leaf, np.ndarray) and type(leaf) is not np.ndarray:
            _refuse_subclass(type(leaf))
        spec = ArraySpec(leaf.shape, name_of_dtype(dtype))
        if isinstance(leaf, np.generic):
            return ArrayRecord(spec, _SCALAR)
        if not dtype.isnative:
            return ArrayRecord(spec, notes={"converted": "byte order"})
        return ArrayRecord(spec)

    def abstract(self, leaf: Any) -> object:
        """Return an `AbstractArray`, or a scalar itself."""
        record = self.describe(leaf)
        if isinstance(leaf, AbstractArray | np.generic):
            return leaf
        assert isinstance(record, ArrayRecord)  # `describe` returns no other records
        return AbstractArray(record.spec.shape, record.spec.numpy_dtype)

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the address, shape, strides and dtype of the elements."""
        if not isinstance(leaf, np.ndarray) or leaf.size == 0:
            return None
        return (leaf.__array_interface__["data"][0], leaf.shape, leaf.strides, leaf.dtype)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole array, which is assumed to be equal in every process."""
        if isinstance(leaf, AbstractArray):
            raise UnsupportedLeafError("an AbstractArray has no elements to save; pass the array itself")
        return (Shard(Box.whole(leaf.shape), rank, size),)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole array, also for an `AbstractArray`."""
        return (Shard(Box.whole(leaf.shape), rank, size),)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return zero for views, because the array is in host memory. An `AbstractArray` represents such an array."""
        return HostBytes(0, sum([box.size for box in boxes]) * leaf.dtype.itemsize)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy boxes, because the caller may change an array at any time."""
        return [memory.copy(view) for view in self._views(leaf, boxes)]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return views."""
        return [Ready(view) for view in self._views(leaf, boxes)]

    def _views(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[HostArray]:
        array = np.asarray(leaf)
        return [array if box.shape == array.shape else array[box.slices] for box in boxes]

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the whole array."""
        return (Box.whole(stored.spec.shape),)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the array itself, if its elements have the stored form."""
        if not isinstance(abstract, np.ndarray) or not abstract.flags.c_contiguous or not abstract.flags.writeable:
            return None
        whole = abstract.shape == box.shape and abstract.dtype == stored.spec.numpy_dtype
        return np.asarray(abstract) if whole else None

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Return an array, or a NumPy scalar if a scalar is requested.

        If nothing is requested, a saved NumPy scalar, str or bytes is returned in its own type.
        """
        if isinstance(stored, ValueRecord):
            return _decode_value(stored)
        array = _assemble(stored.spec, boxes)
        if isinstance(abstract, np.generic) or (stored.kind == _SCALAR and abstract is None):
            return _scalar(array) if stored.kind == _SCALAR else array[()]
        if stored.kind in ("str", "bytes") and abstract is None and array.dtype == np.uint8:
            return _decode_text(stored.kind, array)
        return array

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into a writable array of any strides. Skips elements that were read directly into it."""
        if not isinstance(target, np.ndarray) or not target.flags.writeable or isinstance(stored, ValueRecord):
            return False
        for box, elements in boxes:
            part = target if box.shape == target.shape else target[box.slices]
            if not np.may_share_memory(part, elements):
                np.copyto(part, elements, casting="equiv")
        return True

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of a writable array; None for other arrays."""
        writable = isinstance(target, np.ndarray) and target.flags.writeable
        return [StridedMemory.of(target)] if writable else None


class HostValueHandler(LeafHandler):
    """bool, int, float, complex, str, bytes and None. They are stored in the root; long str and bytes as uint8 arrays.

    Also handles columns, which are lists, tuples and dicts of such values: see `ckptcore.model.columns`.
    """

    priority = Priority.EXACT

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the value as JSON that restores it exactly; a long str or bytes as an array of uint8."""
        kind = VALUE_KINDS.get(type(leaf))
        if kind is None:
            return column_record(leaf)
        if kind in ("str", "bytes") and len(leaf) > _INLINE_BYTES // 4:
            encoded = _encode_text(leaf)
            if encoded.nbytes > _INLINE_BYTES:
                return ArrayRecord(ArraySpec(encoded.shape, "uint8"), kind)
        return ValueRecord(kind, _encode_value(leaf))

    def abstract(self, leaf: Any) -> object:
        """Return the value itself, or a copy of a column, because a list may grow."""
        return copy.copy(leaf)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole value, which is assumed to be equal in every process."""
        return (Shard(Box.whole(_encode_text(leaf).shape), rank, size),)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole value, in every process."""
        return self.shards(leaf, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the encoded size of a str, and zero for bytes, which are not copied."""
        encoded = sum([box.size for box in boxes]) if isinstance(leaf, str) else 0
        return HostBytes(encoded, encoded)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Return the bytes of a str or bytes, which are immutable."""
        return self.view_on_host(leaf, boxes)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return the bytes of a str or bytes."""
        array = _encode_text(leaf)
        return [Ready(array[box.slices]) for box in boxes]

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]]:
        """Sample text of any length, because encoding it needs no transfer from a device."""
        (view,) = self.view_on_host(leaf, [box])
        return [Ready(part) for part in sampled(view.result())]

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the whole array."""
        return (Box.whole(stored.spec.shape),)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Return the saved value."""
        if isinstance(stored, ValueRecord):
            return _decode_value(stored)
        return _decode_text(stored.kind, _assemble(stored.spec, boxes))


class BufferHandler(HostValueHandler):
    """`bytearray`, and `io.BytesIO`, which programs use for the output of ``torch.save``. They are stored like bytes.

    A load without an abstract tree returns bytes. An `io.BytesIO` that a load builds is at position 0.
    """

    def __init__(self, content: Callable[[Any], bytes], make: Callable[[bytes], object]) -> None:
        """Handle a type of buffers.

        Args:
            content: returns the bytes of a buffer.
            make: returns a new buffer with the given bytes.
        """
        self._content = content
        self._make = make

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the record of its bytes."""
        return super().describe(self._content(leaf))

    def abstract(self, leaf: Any) -> object:
        """Return an empty buffer."""
        return self._make(b"")

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """Return all bytes, which are assumed to be equal in every process."""
        return super().shards(self._content(leaf), rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the size of the copy of a `bytearray`; zero for `io.BytesIO`, which copies only when it is changed."""
        copied = len(leaf) if isinstance(leaf, bytearray) else 0
        return HostBytes(copied, copied)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return the current bytes, which are immutable."""
        return super().view_on_host(self._content(leaf), boxes)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Return a buffer with the saved bytes."""
        return self._make(cast(bytes, super().build(b"", stored, boxes)))


VALUE_KINDS: Final[dict[type, str]] = {
    type(None): "none",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytes: "bytes",
}
"""The kind of record of each type that this module encodes itself. For values of other kinds, a handler makes the JSON.
"""

PLAIN_ARRAY_KINDS: Final = (PLAIN_ARRAY, _SCALAR)
"""The kinds of arrays that have no meaning beyond their elements, so that a load can adjust or convert them."""

PLAIN_KINDS: Final = frozenset((*VALUE_KINDS.values(), *COLUMN_KINDS.values()))
"""The kinds of the records of plain values, and of long containers of them."""

_ARRAY_HANDLER: Final = HostArrayHandler()
_VALUE_HANDLER: Final = HostValueHandler()
_BUFFER_HANDLERS: Final[dict[type, BufferHandler]] = {
    io.BytesIO: BufferHandler(io.BytesIO.getvalue, io.BytesIO),
    bytearray: BufferHandler(bytes, bytearray),
}


def leaf_handler(leaf_type: type) -> LeafHandler | None:
    """Return the handler for leaves of a type, or None."""
    if issubclass(leaf_type, np.ndarray | np.generic | AbstractArray):
        return _ARRAY_HANDLER
    if leaf_type in VALUE_KINDS:
        return _VALUE_HANDLER
    return _BUFFER_HANDLERS.get(leaf_type)


def abstract_leaves(records: Sequence[ArrayRecord]) -> Sequence[object]:
    """Return `abstract_of_stored` for each stored array."""
    return list(map(abstract_of_stored, records))


def abstract_of_stored(record: ArrayRecord) -> object:
    """Return the abstract leaf for a stored array: a str, bytes or NumPy scalar if such a leaf was saved.

    Otherwise, and for a NumPy scalar of more than `_MAX_SCALAR_BYTES`, return an `AbstractArray`.
    """
    spec = record.spec
    if record.kind == _SCALAR and not spec.shape and spec.nbytes <= _MAX_SCALAR_BYTES:
        if spec.numpy_dtype.kind == "U":
            # Use spaces, because NumPy drops trailing NULs, and derives the dtype from the remaining characters.
            return np.str_(" " * (spec.nbytes // 4))
        return np.bytes_(b" " * spec.nbytes) if spec.numpy_dtype.kind == "S" else np.zeros((), spec.numpy_dtype)[()]
    if record.kind in ("str", "bytes"):
        return "" if record.kind == "str" else b""
    return AbstractArray(spec.shape, spec.dtype, record.framework)


def _refuse_subclass(array_type: type) -> None:
    """Refuse subclasses of `numpy.ndarray`, which may have more data than elements.

    Raises:
        UnsupportedLeafError: every subclass except `numpy.memmap`.
    """
    if issubclass(array_type, np.ma.MaskedArray):
        raise UnsupportedLeafError("a masked array cannot be stored as one array; save its .data and .mask")
    if not issubclass(array_type, np.memmap):
        raise UnsupportedLeafError(
            f"a {array_type.__module__}.{array_type.__qualname__} has more data than its elements, and only these "
            "would be stored: save np.asarray(value) and its other data, or pass a handler for it in "
            "Context(plugins=PluginOptions(handlers=...))"
        )


def _scalar(array: HostArray) -> object:
    """Return a NumPy scalar. Indexing the array would drop trailing NULs of text, which belong to the scalar.

    Raises:
        CorruptCheckpointError: text has invalid code points.
    """
    if array.dtype.kind == "S":
        return np.bytes_(array.tobytes())
    if array.dtype.kind != "U":
        return array[()]
    try:
        return np.str_(array.tobytes().decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"a saved numpy.str_ is not UTF-32: {error}") from error


def _assemble(spec: ArraySpec, boxes: Sequence[tuple[Box, HostArray]]) -> HostArray:
    if len(boxes) == 1 and boxes[0][0].shape == spec.shape:
        return boxes[0][1]
    raise PluginError(f"expected the whole host array of {spec} as one box, found {len(boxes)} boxes")


def _encode_text(leaf: str | bytes) -> HostArray:
    data = leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf
    return np.frombuffer(data, np.uint8)


def _decode_text(kind: str, array: HostArray) -> object:
    data = array.tobytes()
    if kind == "bytes":
        return data
    if kind == "str":
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(f"a saved str is not UTF-8: {error}") from error
    return array


def _encode_value(leaf: Any) -> JSON:
    if isinstance(leaf, bool) or leaf is None:
        return leaf
    if isinstance(leaf, str):
        return text_to_json(leaf)
    if isinstance(leaf, int):
        # Readers in other languages keep 53 bits of a JSON number, and Python refuses very long decimal numbers.
        return leaf if abs(leaf) < 1 << 53 else hex(leaf)
    if isinstance(leaf, float):
        return float_to_json(leaf)
    if isinstance(leaf, complex):
        return [_encode_value(leaf.real), _encode_value(leaf.imag)]
    return binascii.b2a_base64(leaf, newline=False).decode("ascii")


_JSON_TYPES: Final[Mapping[str, type]] = {"str": str, "int": int, "float": float, "bool": bool}


def _decode_value(record: ValueRecord) -> object:
    value = record.value
    if type(value) is _JSON_TYPES.get(record.kind):
        return value  # fast path for most values
    if (error := unreadable_error(record)) is not None:
        raise type(error)(
            f"it cannot be loaded, because {error}. To load other leaves, request PLACEHOLDER for it"
        ) from error
    try:
        match record.kind, value:
            case ("none", None) | ("bool", bool()):
                return value
            case "str", str() | {"utf8": str()}:
                return text_from_json(value)
            case "int", int() if not isinstance(value, bool):
                return value
            case "int", str():
                return int(value, 16)
            case "float", float() | int() | str() if not isinstance(value, bool):
                return float_from_json(value)
            case "complex", [real, imaginary]:
                return complex(float_from_json(real), float_from_json(imaginary))
            case "bytes", str():
                return binascii.a2b_base64(value, strict_mode=True)
            case (("list" | "tuple" | "dict"), _):
                return column_value(record)
            case (("none" | "bool" | "str" | "int" | "float" | "complex" | "bytes"), _):
                pass
            case _, {"utf8": str()}:
                return text_from_json(value)
            case _:
                return value
    except (ValueError, TypeError, OverflowError, binascii.Error) as error:
        raise CorruptCheckpointError(f"a saved {record.kind} cannot be read from {str(value)[:80]!r}") from error
    raise CorruptCheckpointError(f"a saved {record.kind} cannot be read from {str(value)[:80]!r}")


class ValueForm(NamedTuple):
    """The stored form of the values of some types.

    Attributes:
        kind: its name in records.
        encode: returns a value as JSON. A load without an abstract tree returns this JSON.
        decode: returns a value of a type from this JSON. For hostile JSON, raises an error that
            `ValueFormHandler.build` converts.
    """

    kind: str
    encode: Callable[[Any], JSON]
    decode: Callable[[type, Any], object]


class ValueFormHandler(HostValueHandler):
    """Values with a `ValueForm`."""

    def __init__(self, form: ValueForm) -> None:
        self._form = form

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the value in its plain form."""
        return ValueRecord(self._form.kind, self._form.encode(leaf))

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Return a value of the type of `abstract`.

        Raises:
            TreeMismatchError: the stored value cannot be converted to that type.
        """
        kind = type(abstract)
        if not isinstance(stored, ValueRecord):
            difference = f"a {kind.__qualname__} is requested, an array is stored"
            raise TreeMismatchError(f"{difference}; request an array", [difference])
        try:
            return self._form.decode(kind, stored.value)
        except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
            difference = f"kind: the stored {stored.kind} {str(stored.value)[:80]!r} is no {kind.__qualname__}"
            raise TreeMismatchError(f"{difference} ({error})", [difference]) from error


def form_handler(leaf_type: type) -> LeafHandler | None:
    """Return the handler for values of a type, or None."""
    form = _EXACT.get(f"{leaf_type.__module__}.{leaf_type.__qualname__}")
    if form is None and issubclass(leaf_type, enum.Enum):
        form = _FLAG if issubclass(leaf_type, enum.Flag) else _MEMBER
    # No value is a path if nothing has imported the module.
    elif form is None and (paths := sys.modules.get("pathlib")) and issubclass(leaf_type, paths.PurePath):
        form = _PATH
    elif form is None and issubclass(leaf_type, np.dtype):
        form = _DTYPE
    return None if form is None else ValueFormHandler(form)


def _of_text(kind: str) -> ValueForm:
    """Return the form of a type whose constructor accepts the text that `str` returns for its values."""
    return ValueForm(kind, str, lambda leaf_type, text: leaf_type(_text(text)))


def _text(value: object) -> str:
    if not isinstance(value, str | dict):
        raise TypeError("it is not text")
    return text_from_json(value)


def _encode_datetime(value: datetime.datetime) -> JSON:
    """Return ISO 8601. The name of a zone follows in brackets, as in RFC 9557; ``[fold]`` marks a repeated hour."""
    zone = getattr(value.tzinfo, "key", None)
    if isinstance(zone, str):
        return f"{value.isoformat()}[{zone}]"
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise UnsupportedLeafError(
            f"a datetime with the time zone {value.tzinfo!r} has no portable name; save value.astimezone("
            "datetime.timezone.utc)"
        )
    return value.isoformat() + ("[fold]" if value.fold else "")


def _decode_datetime(leaf_type: Any, text: object) -> object:
    moment, _, suffix = _text(text).removesuffix("]").partition("[")
    value = leaf_type.fromisoformat(moment)
    if suffix == "fold":
        return value.replace(fold=1)
    if suffix:
        import zoneinfo  # only values with a named zone need it

        return value.astimezone(zoneinfo.ZoneInfo(suffix))
    return value


def _encode_time(value: datetime.time) -> JSON:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise UnsupportedLeafError("a time with a named zone has no offset; save the time and the name of its zone")
    return value.isoformat() + ("[fold]" if value.fold else "")


def _decode_time(leaf_type: Any, text: object) -> object:
    moment, _, suffix = _text(text).partition("[")
    return leaf_type.fromisoformat(moment).replace(fold=int(bool(suffix)))


def _encode_dtype(value: np.dtype[Any]) -> JSON:
    name = name_of_dtype(value)
    if dtype_from_name(name) != value:
        raise UnsupportedLeafError(f"a dtype of the other byte order, {value.str!r}, is saved as text: str(dtype.str)")
    return name


def _int_to_json(value: int) -> JSON:
    return value if abs(value) < 1 << 53 else hex(value)


def _int_from_json(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("it is not a number")
    return int(value, 16) if isinstance(value, str) else value


def _element_to_json(element: Any) -> JSON:
    if type(element) is str:
        return text_to_json(element)
    is_small = type(element) is int and abs(element) < 1 << 53
    if element is None or type(element) is bool or is_small or (type(element) is float and math.isfinite(element)):
        return cast(JSON, element)
    if type(element) is tuple:
        return list(map(_element_to_json, element))
    raise UnsupportedLeafError(
        f"a frozenset with a {type(element).__qualname__} is not stored, only one of finite numbers, text and None, "
        "and tuples of these: save list(value)"
    )


def _element_from_json(element: Any) -> Any:
    if isinstance(element, list | tuple):
        return tuple(map(_element_from_json, element))
    return text_from_json(element) if isinstance(element, dict) else element


def _elements(value: frozenset[Any]) -> JSON:
    return sorted(map(_element_to_json, value), key=lambda element: (type(element).__name__, repr(element)))


_PATH: Final = ValueForm("path", lambda value: text_to_json(str(value)), lambda leaf_type, text: leaf_type(_text(text)))
_MEMBER: Final = ValueForm(
    "enum",
    lambda member: text_to_json(member.name),
    lambda leaf_type, name: leaf_type[_text(name)],  # type: ignore[index]  # an Enum
)
_FLAG: Final = ValueForm(
    "flag", lambda value: _int_to_json(value.value), lambda leaf_type, value: leaf_type(_int_from_json(value))
)
_DTYPE: Final = ValueForm("dtype", _encode_dtype, lambda _, name: dtype_from_name(_text(name)))

_EXACT: Final[Mapping[str, ValueForm]] = {
    "datetime.datetime": ValueForm("datetime", _encode_datetime, _decode_datetime),
    "datetime.date": ValueForm(
        "date", datetime.date.isoformat, lambda _, text: datetime.date.fromisoformat(_text(text))
    ),
    "datetime.time": ValueForm("time", _encode_time, _decode_time),
    "datetime.timedelta": ValueForm(
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda _, parts: datetime.timedelta(*parts),
    ),
    "builtins.range": ValueForm(
        "range",
        lambda value: [_int_to_json(part) for part in (value.start, value.stop, value.step)],
        lambda _, parts: range(*map(_int_from_json, parts)),
    ),
    "builtins.frozenset": ValueForm(
        "frozenset", _elements, lambda _, parts: frozenset(map(_element_from_json, list(parts)))
    ),
    "decimal.Decimal": _of_text("decimal"),
    "fractions.Fraction": _of_text("fraction"),
    "uuid.UUID": _of_text("uuid"),
    **{
        f"ipaddress.IPv{version}{kind}": _of_text("address")
        for version in (4, 6)
        for kind in ("Address", "Interface", "Network")
    },
}
"""Forms of exact types, by name. Subclasses are excluded, because they may have more content, such as nanoseconds."""
