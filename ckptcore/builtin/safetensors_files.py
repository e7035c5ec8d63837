"""The safetensors format: dtypes, headers, and JSON files in the same directory. Content is hostile until checked.

Dtypes have the names of safetensors 0.8 (``safetensors/src/tensor.rs``). Shapes in headers are always in elements.
Elements smaller than a byte are packed, and the library refuses a tensor that does not end at a byte boundary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord
from ckptcore.model.tree import JSON
from ckptcore.protocols import ReadStore
from ckptcore.records import NamedTuple

_DTYPES: Final = (
    ("BOOL", 8, "bool"),
    ("F4", 4, None),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("I16", 16, "int16"),
    ("U16", 16, "uint16"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("I32", 32, "int32"),
    ("U32", 32, "uint32"),
    ("F32", 32, "float32"),
    ("C64", 64, "complex64"),
    ("F64", 64, "float64"),
    ("I64", 64, "int64"),
    ("U64", 64, "uint64"),
)
"""The dtypes of safetensors: name, bits per element, and name in NumPy or ml_dtypes (None if they lack it). The library
writes tensors in the reverse order of this table."""

DTYPES: Final[Mapping[str, str]] = {ours: name for name, _, ours in _DTYPES if ours is not None}
"""The names of dtypes in safetensors, by their names in NumPy and ml_dtypes."""

DTYPE_BITS: Final[Mapping[str, int]] = {name: bits for name, bits, _ in _DTYPES}
"""Bits per element of each dtype of safetensors. The library writes tensors in the reverse order of these dtypes."""

METADATA: Final = "__metadata__"
"""The key in a header for the metadata of the file."""

_MAX_HEADER_BYTES: Final = 100_000_000
"""The same limit as in the safetensors library."""

PAIRS: Final = "torch.float4_e2m1fn_x2"
"""The kind of an array of bytes that have two F4 elements each. The safetensors library uses this dtype for F4."""

RAW: Final = "safetensors."
"""Prefix of the kind of an array that has the bytes of a tensor, because NumPy lacks its dtype. The dtype follows."""

PART: Final = "__ckptcore__"
"""The metadata key of a file that is part of a checkpoint. The value is the version of the root that describes the
file. Without the root, the structure, the values and the checksums are lost."""

PART_VERSION: Final = "1"

SHARDING: Final = "DCP_SHARDING_INFO"
"""The metadata key for the starts of the boxes in a file."""


def header_entry(record: ArrayRecord) -> tuple[str, Sequence[int]]:
    """Return the dtype and shape that a header states for an array."""
    spec = record.spec
    if spec.dtype == "uint8" and record.kind != PLAIN_ARRAY and spec.shape:
        if record.kind == PAIRS:
            return "F4", (*spec.shape[:-1], 2 * spec.shape[-1])
        raw = _raw_entry(record)
        if raw is not None:
            return raw
    if (known := DTYPES.get(spec.dtype)) is not None:
        return known, spec.shape
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":  # timedelta64 and datetime64
        return "I64", spec.shape
    # Other dtypes are stored as bytes. If an element has several bytes, they are an additional last axis.
    return "U8", spec.shape if dtype.itemsize == 1 else (*spec.shape, dtype.itemsize)


def _raw_entry(record: ArrayRecord) -> tuple[str, Sequence[int]] | None:
    """Return the dtype and shape in the file of an array that loads as bytes; None for other records."""
    name = record.kind.removeprefix(RAW)
    bits, shape = DTYPE_BITS.get(name), record.notes.get("shape")
    if bits is None or not isinstance(shape, list) or not all(type(extent) is int for extent in shape):
        return None
    extents = [extent for extent in shape if isinstance(extent, int)]
    fits = min(extents, default=0) >= 0 and math.prod(extents) * bits == 8 * record.spec.size
    return (name, extents) if fits and len(record.spec.shape) == 1 else None


_ALIGNMENT: Final = 64
_LARGE_ALIGNMENT: Final = 4096
"""Alignment of the first element in a large file, in bytes. It is the size of a page, so that direct I/O needs no copy.
"""


def encode_file(
    metadata: Mapping[str, JSON], tensors: Iterable[tuple[str, ArrayRecord]]
) -> tuple[bytes, Sequence[int]]:
    """Return the bytes of a file before its elements, and the position of each tensor in the file.

    Args:
        metadata: the metadata of the header.
        tensors: the names and arrays, in the order of their elements.
    """
    header: dict[str, JSON] = {METADATA: metadata}
    starts = []
    position = 0
    for name, record in tensors:
        dtype, shape = header_entry(record)
        starts.append(position)
        position += record.spec.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[-1], position]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    alignment = _LARGE_ALIGNMENT if position > 1 << 20 else _ALIGNMENT
    padded = -(-(8 + len(encoded)) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + encoded.ljust(padded), [8 + padded + start for start in starts]


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Sequence[str]]:
    """Encode the header of a file. The safetensors library 0.8 writes the same bytes.

    Args:
        tensors: the dtype (a key of `DTYPE_BITS`) and the shape in elements of each tensor, by name.
        metadata: names and values, in the order in which they are written. None: write no metadata.

    Returns:
        The bytes before the first element, and the names in the order of their elements: wide dtypes first.

    Raises:
        ValueError: a dtype is unknown, the elements of a tensor do not fill whole bytes, a name is reserved, or the
            header exceeds 100 MB, the limit of readers.
        TypeError: the name of a tensor, or a name or value of the metadata, is not a str.
    """
    header: dict[str, JSON] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for entry in metadata.items() for text in entry):
            raise TypeError("names and values of safetensors metadata must be str; use json.dumps(...) of other values")
        header[METADATA] = dict(metadata)
    if METADATA in tensors:
        raise ValueError(f"a tensor cannot be named {METADATA!r}: safetensors stores metadata under this name")
    for name, (dtype, _) in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"names of tensors must be str; found {name!r}")
        if dtype not in DTYPE_BITS:
            raise ValueError(f"tensor {name!r}: safetensors has no dtype {dtype!r}; expected one of {list(DTYPE_BITS)}")
    order = {dtype: -position for position, dtype in enumerate(DTYPE_BITS)}
    names = sorted(tensors, key=lambda name: (order[tensors[name][0]], name))
    position = 0
    for name in names:
        dtype, shape = tensors[name]
        nbytes, rest = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
        if rest:
            raise ValueError(f"tensor {name!r}: {dtype} elements of shape {list(shape)} do not fill whole bytes")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-len(encoded) // 8) * 8
    if padded > _MAX_HEADER_BYTES:
        raise ValueError(f"the header has {padded} bytes; safetensors allows {_MAX_HEADER_BYTES}. Save several files")
    return padded.to_bytes(8, "little") + encoded.ljust(padded), names


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of `count` files that contain whole arrays."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class TensorEntry(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        dtype: the name of its dtype in the format, such as ``"F32"``.
        shape: elements along each axis.
        start: the position of its first byte in the file.
        stop: the position after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class FileHeader(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        tensors: the tensors by name, in the order of their bytes.
        metadata: the metadata, names and values as str; None if the header has none.
        nbytes: the position of the first element in the file, in bytes.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] | None
    nbytes: int


_OURS: Final = {theirs: ours for ours, theirs in DTYPES.items()}

_NAME: Final = r"(?a)\w{1,40}"


def record_of(entry: TensorEntry) -> ArrayRecord | None:
    """Return the array that a header describes; None if no array can have this shape, or if the dtype is not a name.

    A tensor of F4 whose last axis has an even length is an array of bytes. Each byte has two elements, the first in the
    lower half. Any other tensor of a dtype that NumPy lacks is a one-dimensional array of its bytes. The `kind` of the
    record then has the dtype, and its `notes` have the shape.
    """
    dtype, shape = entry.dtype, entry.shape
    if (ours := _OURS.get(dtype)) is not None:
        record = ArrayRecord(ArraySpec(shape, ours))
        return record if record.spec.is_possible else None
    if not re.fullmatch(_NAME, dtype):
        return None
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        record = ArrayRecord(ArraySpec((*shape[:-1], shape[-1] // 2), "uint8"), PAIRS)
        return record if record.spec.is_possible else None
    notes: dict[str, JSON] = {"shape": list(shape)}
    return ArrayRecord(ArraySpec((entry.stop - entry.start,), "uint8"), f"{RAW}{dtype}", notes=notes)


_ROOT: Final = "checkpoint.json"
READER_OF_SLICES: Final = "HuggingFaceStorageReader of torch.distributed.checkpoint"


def refuse_lost_root(key: str, metadata: Mapping[str, object]) -> None:
    """Refuse a safetensors file that is part of a checkpoint of ckptcore, in a directory without a root.

    Args:
        key: the file.
        metadata: the metadata of its header.

    Raises:
        CorruptCheckpointError: the file is part of a checkpoint.
    """
    if PART not in metadata:
        return
    way = (
        f"The files have slices of arrays: {READER_OF_SLICES} loads the arrays alone, without checks"
        if SHARDING in metadata
        else "To load the arrays alone, without checks, name the file, or the index of several files, as the location"
    )
    raise CorruptCheckpointError(
        f"{key} is part of a checkpoint of ckptcore, but {_ROOT} is missing in its directory, so that the structure, "
        f"the values and the checksums are lost: restore {_ROOT} from a copy, or load another checkpoint. {way}",
        key=_ROOT,
    )


_MAX_AXES: Final = 64


def fits(header_bytes: int, file_bytes: int) -> bool:
    """Return True if a header of this length fits into a file of that length."""
    return 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8)


def read_header(read: Callable[[int, int], bytes], file_bytes: int, name: str) -> FileHeader:
    """Read and check the header of a file.

    The tensors must fill the rest of the file, without gaps or overlaps. If the dtype is in `DTYPE_BITS`, the shape
    must agree with the number of bytes. Other dtypes are accepted, because a newer version of the format may add some.

    Args:
        read: returns the bytes of the file from a start to a stop.
        file_bytes: the size of the file.
        name: the name of the file, for errors.

    Raises:
        CorruptCheckpointError: the file is not a safetensors file, or is damaged.
    """
    header_bytes = int.from_bytes(read(0, 8), "little") if file_bytes >= 8 else -1
    if not fits(header_bytes, file_bytes):
        from ckptcore.model.file_kinds import FILE_HEAD_BYTES, file_kind  # only for this error

        kind = file_kind(read(0, min(file_bytes, FILE_HEAD_BYTES)), "")
        if kind is not None:
            raise CorruptCheckpointError(f"{name} is {kind}", key=name)
        stated = f" and states a header of {header_bytes}" if header_bytes >= 0 else ""
        raise CorruptCheckpointError(
            f"{name} is not a safetensors file, or is cut off: it has {file_bytes} bytes{stated}; restore it from a "
            "copy, or load another one",
            key=name,
        )
    start = 8 + header_bytes
    encoded = read(8, start)
    if (scanned := _scan_header(encoded, file_bytes)) is not None:
        return scanned
    header = parse_json_object(encoded, name)
    metadata = header.pop(METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise CorruptCheckpointError(f"the __metadata__ of {name} is not a map of strings", key=name)
    entries = [(_entry(tensor, described, name, start), tensor) for tensor, described in header.items()]
    entries.sort(key=lambda pair: (pair[0].start, pair[0].stop))
    position = start
    for entry, tensor in entries:
        if entry.start != position:
            raise CorruptCheckpointError(
                f"the tensor {tensor!r} of {name} starts at byte {entry.start}, where byte {position} is expected; "
                "the file is damaged: restore it from a copy, or load another one",
                key=name,
            )
        position = entry.stop
    if position != file_bytes:
        raise CorruptCheckpointError(
            f"{name} has {file_bytes} bytes, and its header describes {position}; the file is cut off or "
            "damaged: restore it from a copy, or load another one",
            key=name,
        )
    return FileHeader({tensor: entry for entry, tensor in entries}, metadata, start)


_ENTRY: Final = r'(?a),"([^"\\\x00-\x1f]*)":\{"dtype":"(\w+","shape":\[[\d,]*)\],"data_offsets":\[(\d+,\d+)\]\}'
"""A tensor of a header as the safetensors library writes it. The groups are the name, the dtype with the shape, and the
offsets."""

_ENTRY_CHARACTERS: Final = len(',"":{"dtype":"],"data_offsets":[]}')
_METADATA_START: Final = f'{{"{METADATA}":'


def _scan_header(encoded: bytes, file_bytes: int) -> FileHeader | None:
    """Parse a header in exactly the form that the safetensors library writes; None for other or damaged headers.

    This takes half of the time of a JSON parser. Most files with many tensors have this form.

    Args:
        encoded: the JSON.
        file_bytes: the size of the file.
    """
    metadata: Any = None
    try:
        text = str(encoded, "utf-8").rstrip(" ")
        if text.startswith(_METADATA_START):
            decoder = json.JSONDecoder(object_pairs_hook=_unique)
            metadata, stop = decoder.raw_decode(text, len(_METADATA_START))
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                return None
            rest = text[stop:]
        else:
            rest = f",{text[1:]}"
        position = 8 + len(encoded)
        characters = 0
        kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
        tensors: dict[str, TensorEntry] = {}
        matches = re.findall(_ENTRY, rest)
        offset = 0
        for name, kind, offsets in matches:
            if kind not in kinds:
                dtype, _, extents = kind.partition('","shape":[')
                shape = tuple(json.loads(f"[{extents}]"))
                kinds[kind] = dtype, shape, math.prod(shape) * DTYPE_BITS[dtype]
            dtype, shape, bits = kinds[kind]
            stop = offset + bits // 8
            if bits % 8 or offsets != f"{offset},{stop}" or len(shape) > _MAX_AXES:
                return None
            tensors[name] = TensorEntry(dtype, shape, position + offset, position + stop)
            characters += len(name) + len(kind) + len(offsets)
            offset = stop
    except (ValueError, KeyError, RecursionError):
        return None
    # The pattern skips text between its matches, so their lengths must add up to the whole header.
    whole = (
        text[:1] == "{"
        and rest[-1:] == "}"
        and characters + len(matches) * _ENTRY_CHARACTERS == len(rest) - 1
        and len(tensors) == len(matches)
        and METADATA not in tensors
        and position + offset == file_bytes
    )
    return FileHeader(tensors, metadata, position) if whole else None


def _entry(tensor: str, described: Any, name: str, start: int) -> TensorEntry:
    try:
        dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(
            f"the header of {name} does not describe {tensor!r}: {error!r}", key=name
        ) from error
    have_types = type(dtype) is str and type(shape) is list and type(first) is int and type(last) is int
    if not (have_types and 0 <= first <= last and len(shape) <= _MAX_AXES) or not all(
        type(extent) is int and extent >= 0 for extent in shape
    ):
        raise CorruptCheckpointError(
            f"the header of {name} describes {tensor!r} with dtype {dtype}, shape {shape} and offsets {first} to "
            f"{last}",
            key=name,
        )
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (last - first):
        raise CorruptCheckpointError(
            f"the header of {name} is damaged: the tensor {tensor!r} has dtype {dtype!r}, shape {shape} and "
            f"{last - first} bytes, which do not agree",
            key=name,
        )
    return TensorEntry(dtype, tuple(shape), start + first, start + last)


_MAX_JSON_BYTES: Final = 1 << 24
_MAX_JSON_DEPTH: Final = 64


Constants: TypeAlias = Literal["refused", "kept"]
"""Handling of ``NaN`` and ``Infinity``, which are not JSON but occur in model configurations that Python wrote."""


def read_json_object(store: ReadStore, key: str, *, constants: Constants = "refused") -> dict[str, JSON]:
    """Read a JSON object from a file that is next to the files with tensors. Its depth and size are limited.

    Raises:
        ObjectNotFoundError: the file does not exist.
        CorruptCheckpointError: the file does not contain a JSON object, or exceeds a limit.
    """
    nbytes = store.size(key)
    if nbytes > _MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            f"{key} has {nbytes} bytes, at most {_MAX_JSON_BYTES} are expected. Name a file of tensors to load it "
            "alone",
            key=key,
        )
    config: dict[str, JSON] = parse_json_object(store.get(key), key, constants=constants)
    level: list[JSON] = [config]
    for _ in range(_MAX_JSON_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return config
    raise CorruptCheckpointError(f"the JSON in {key} is nested deeper than {_MAX_JSON_DEPTH} levels", key=key)


def parse_json_object(data: bytes, key: str, *, constants: Constants = "refused") -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CorruptCheckpointError: the file does not contain a JSON object, or an object has a key twice.
    """

    def constant_of(constant: str) -> object:
        if constants == "kept":
            return float(constant)
        raise ValueError(f"it has {constant}, which is not JSON")

    try:
        parsed = json.loads(str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=constant_of)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the JSON in {key} cannot be read: {error}", key=key) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"the JSON in {key} is not an object", key=key)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed_object = dict(pairs)
    if len(parsed_object) != len(pairs):
        raise ValueError("an object has a key twice")
    return parsed_object
