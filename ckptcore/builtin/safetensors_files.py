"""Safetensors files of other software, and JSON files in their directories. All content is hostile until checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckptcore.builtin.safetensors_writing import (
    DTYPE_BITS,
    DTYPES,
    MAX_HEADER_BYTES,
    METADATA,
    PAIRS,
    PART,
    RAW,
    SHARDING,
)
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.protocols import Inspection, ReadStore

__all__ = [
    "Constants",
    "FileHeader",
    "TensorEntry",
    "inspect_files",
    "read_header",
    "read_json_object",
    "refuse_lost_root",
]


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


def _record_of(entry: TensorEntry) -> ArrayRecord | None:
    """Return the array that a header describes; None if there is none.

    A tensor of F4 whose last axis has an even length is an array of bytes with two elements each, the first in the
    lower half. Any other tensor of a dtype that NumPy lacks is a one-dimensional array of its bytes; `kind` and `notes`
    have its dtype and its shape.
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


_FILE: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_ADAPTER: Final = "adapter_model"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_KNOWN_STEMS: Final = ("model", "diffusion_pytorch_model", _ADAPTER)
"""Names that transformers, diffusers and PEFT look for (their SAFE(TENSORS)_WEIGHTS_NAME), in order of preference."""

_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_SLICES: Final = re.compile(r"shard-\d+-.+-\d+-of-\d+\.safetensors")
"""Files with slices of arrays. Their headers have `SHARDING`, which files of whole arrays may have as well."""


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """A tensor in a safetensors file.

    Attributes:
        name: its name.
        record: its array.
        key: the file.
        offset: the position of its first element in the file, in bytes.
    """

    name: str
    record: ArrayRecord
    key: str
    offset: int


_Found: TypeAlias = tuple[Sequence["_TensorEntry"], Mapping[str, JSON]]
"""Tensors, and the metadata of their files."""


def inspect_files(store: ReadStore, entry: str | None) -> Inspection | None:
    """Inspect safetensors files of other software. Return None if the location has none.

    The metadata of an adapter has the content of ``adapter_config.json`` as ``adapter_config``.

    Args:
        store: the files of the location.
        entry: the file that the user named, with any suffix, or None for a directory.

    Raises:
        CorruptCheckpointError: a file is damaged.
        CheckpointNotFoundError: there are several files, and no index lists which belong together; or a file has slices
            of arrays.
        CorruptCheckpointError: a file of a directory is part of a checkpoint of ckptcore, which has lost its root.
    """
    found = _find_tensors(store, entry)
    if found is None:
        return None
    entries, metadata = found
    files = sorted({entry.key for entry in entries})
    if entry is None:
        keys = files or [name for name in store.list_names("") if name.endswith(_FILE)]
        refuse_lost_root(keys[0], metadata)
    if SHARDING in metadata and (slices := [key for key in files if _SLICES.fullmatch(key.rpartition("/")[2])]):
        raise CheckpointNotFoundError(
            f"{slices[0]} has slices of arrays, and not whole arrays: name the directory of its checkpoint as the "
            f"location. Without {_ROOT} there, load the arrays alone with {_READER_OF_SLICES}"
        )
    metadata = {name: text for name, text in metadata.items() if name != PART}
    numbers = {key: number for number, key in enumerate(files)}
    skeleton = Node("dict", tuple([entry.name for entry in entries]), (LEAF,) * len(entries))
    state: JSON = {
        "files": files,
        "leaf": list(range(len(entries))),
        "file": [numbers[entry.key] for entry in entries],
        "offset": [entry.offset for entry in entries],
    }
    tree = TreeMetadata(skeleton, tuple([entry.record for entry in entries]))
    return Inspection(tree, state, "safetensors", dict(metadata))


_ROOT: Final = "checkpoint.json"
_READER_OF_SLICES: Final = "HuggingFaceStorageReader of torch.distributed.checkpoint"


def refuse_lost_root(key: str, metadata: Mapping[str, object]) -> None:
    """Refuse a safetensors file that is part of a checkpoint of ckptcore, in a directory without a root.

    Args:
        key: the file.
        metadata: the metadata of its header.

    Raises:
        CorruptCheckpointError: it is part of a checkpoint.
    """
    if PART not in metadata:
        return
    way = (
        f"The files have slices of arrays: {_READER_OF_SLICES} loads the arrays alone, without checks"
        if SHARDING in metadata
        else "To load the arrays alone, without checks, name the file, or the index of several files, as the location"
    )
    raise CorruptCheckpointError(
        f"{key} is part of a checkpoint of ckptcore, but {_ROOT} is missing in its directory, so that the structure, "
        f"the values and the checksums are lost: restore {_ROOT} from a copy, or load another checkpoint. {way}",
        key=_ROOT,
    )


def _find_tensors(store: ReadStore, entry: str | None) -> _Found | None:
    if entry is not None:
        if entry == f"{_ADAPTER}{_FILE}":
            found = _read_header(store, entry)
            try:
                return _with_config(store, *found)
            except CorruptCheckpointError:
                return found  # the user named this file, so other files of its directory may be damaged
        if entry.endswith(_INDEX):
            return _read_index(store, entry)
        return _read_header(store, entry) if entry.endswith(_FILE) or _has_header(store, entry) else None
    names = store.list_names("")
    indexes = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(_FILE)]
    if not indexes and not files:
        return None
    stem = _choose_stem(indexes, files)
    if stem is None:
        for key in files[:1]:  # all files of a lost checkpoint are marked
            refuse_lost_root(key, _read_header(store, key)[1])
        raise CheckpointNotFoundError(
            "the directory has several safetensors files and no index lists which belong together: "
            f"{', '.join([*indexes, *files])}. Name one of them as the location"
        )
    entries, metadata = _read_stem(store, stem, indexes, files)
    return _with_config(store, entries, metadata) if stem == _ADAPTER else (entries, metadata)


def _with_config(store: ReadStore, entries: Sequence[_TensorEntry], metadata: Mapping[str, JSON]) -> _Found:
    """Add the config of an adapter to its metadata, if there is one."""
    try:
        config = read_json_object(store, _ADAPTER_CONFIG)
    except ObjectNotFoundError:
        return entries, metadata
    return entries, {**metadata, "adapter_config": config}


def _read_stem(
    store: ReadStore, stem: str, indexes: Sequence[str], files: Sequence[str]
) -> tuple[Sequence[_TensorEntry], Mapping[str, str]]:
    """Read the files with a stem: the files that the index lists, the single file, or all shards."""
    if f"{stem}{_INDEX}" in indexes:
        return _read_index(store, f"{stem}{_INDEX}")
    if f"{stem}{_FILE}" in files:
        return _read_header(store, f"{stem}{_FILE}")
    shards = [shard for name in files if (shard := _SHARD.fullmatch(name)) and shard[1] == stem]
    counts = sorted({int(shard[3]) for shard in shards})
    if counts != [len(shards)]:
        raise CorruptCheckpointError(
            f"expected {counts[0] if len(counts) == 1 else counts} safetensors shards that belong together, found "
            f"{len(shards)}: {[shard[0] for shard in shards]}"
        )
    return _read_files(store, [shard[0] for shard in shards])


def _choose_stem(indexes: Sequence[str], files: Sequence[str]) -> str | None:
    """Return the stem of the files to load; None if it is ambiguous.

    If a directory has several checkpoints, the main one of a known library is loaded: a model that was trained with an
    adapter has the files of the adapter too.
    """
    indexed = {name.removesuffix(_INDEX) for name in indexes}
    stems = {shard[1] if (shard := _SHARD.fullmatch(name)) else name.removesuffix(_FILE) for name in files}
    for stem in _KNOWN_STEMS:
        if stem in indexed or stem in stems:
            return stem
    for found in (indexed, stems):
        if len(found) == 1:
            return found.pop()
    return None


def _read_files(store: ReadStore, files: Sequence[str]) -> tuple[Sequence[_TensorEntry], Mapping[str, str]]:
    entries: dict[str, _TensorEntry] = {}
    metadata: dict[str, str] = {}
    for key in files:
        found, own = _read_header(store, key)
        metadata.update(own)
        for entry in found:
            if entry.name in entries:
                raise CorruptCheckpointError(
                    f"the tensor {entry.name!r} is both in {entries[entry.name].key} and in {key}", key=key
                )
            entries[entry.name] = entry
    return list(entries.values()), metadata


def _read_index(store: ReadStore, key: str) -> tuple[Sequence[_TensorEntry], Mapping[str, str]]:
    index = _parse_json_object(store.get(key), key)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptCheckpointError(f"{key} has no weight_map from names to files", key=key)
    directory = key.rpartition("/")[0]
    files = sorted({f"{directory}/{file}" if directory else file for file in weight_map.values()})
    try:
        entries, metadata = _read_files(store, files)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(f"{key} lists a file that does not exist: {error}", key=key) from error
    missing = weight_map.keys() - {entry.name for entry in entries}
    if missing:
        raise CorruptCheckpointError(
            f"{key} lists tensors that are in none of its files: {sorted(missing)[:5]}", key=key
        )
    return [entry for entry in entries if entry.name in weight_map], metadata


def _has_header(store: ReadStore, key: str) -> bool:
    """Return True if a file starts like a safetensors file: the length of a header that fits into it, then "{".

    Files of torch.save, and others that start with letters, state a length beyond any limit.
    """
    file_bytes = store.size(key)
    begin = store.get(key, 0, min(file_bytes, 9))
    return _fits(int.from_bytes(begin[:8], "little"), file_bytes) and begin[8:] == b"{"


def _read_header(store: ReadStore, key: str) -> tuple[Sequence[_TensorEntry], Mapping[str, str]]:
    header = read_header(partial(store.get, key), store.size(key), key)
    entries = []
    for name, entry in header.tensors.items():
        record = _record_of(entry)
        if record is None:
            raise CorruptCheckpointError(
                f"the header of {key} is damaged: the tensor {name!r} has dtype {entry.dtype[:40]!r} and shape "
                f"{list(entry.shape)}, which cannot be",
                key=key,
            )
        entries.append(_TensorEntry(name, record, key, entry.start))
    return entries, header.metadata or {}


_MAX_AXES: Final = 64


def _fits(header_bytes: int, file_bytes: int) -> bool:
    """Return True if a header of this length fits into a file of that length."""
    return 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8)


def read_header(read: Callable[[int, int], bytes], file_bytes: int, name: str) -> FileHeader:
    """Read and check the header of a file.

    The tensors fill the rest of the file, without gaps and overlaps. For each dtype in `DTYPE_BITS`, the shape agrees
    with the number of bytes. Files of a newer version of the format may have further dtypes.

    Args:
        read: returns the bytes of the file from a start to a stop.
        file_bytes: the size of the file.
        name: the name of the file, for errors.

    Raises:
        CorruptCheckpointError: the file is not a safetensors file, or is damaged.
    """
    if file_bytes < 8:
        raise CorruptCheckpointError(f"{name} is not a safetensors file: it has {file_bytes} bytes", key=name)
    header_bytes = int.from_bytes(read(0, 8), "little")
    if not _fits(header_bytes, file_bytes):
        raise CorruptCheckpointError(
            f"{name} is not a safetensors file, or is cut off: it has {file_bytes} bytes and states a header of "
            f"{header_bytes}",
            key=name,
        )
    start = 8 + header_bytes
    encoded = read(8, start)
    if (scanned := _scan_header(encoded, file_bytes)) is not None:
        return scanned
    header = _parse_json_object(encoded, name)
    metadata = header.pop(METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise CorruptCheckpointError(f"the __metadata__ of {name} is not a map of strings", key=name)
    found = [(_entry(tensor, described, name, start), tensor) for tensor, described in header.items()]
    found.sort(key=_position)
    position = start
    for entry, tensor in found:
        if entry.start != position:
            raise CorruptCheckpointError(
                f"the tensor {tensor!r} of {name} starts at byte {entry.start}, where byte {position} is expected",
                key=name,
            )
        position = entry.stop
    if position != file_bytes:
        raise CorruptCheckpointError(
            f"{name} has {file_bytes} bytes, and its header describes {position}; the file is cut off or damaged",
            key=name,
        )
    return FileHeader({tensor: entry for entry, tensor in found}, metadata, start)


_ENTRY: Final = re.compile(
    r'(?a),"([^"\\\x00-\x1f]*)":\{"dtype":"(\w+","shape":\[[\d,]*)\],"data_offsets":\[(\d+,\d+)\]\}'
)
"""A tensor of a header as the safetensors library writes it: the name, the dtype and shape, the offsets."""

_ENTRY_CHARACTERS: Final = len(',"":{"dtype":"],"data_offsets":[]}')
_METADATA_START: Final = f'{{"{METADATA}":'


def _scan_header(encoded: bytes, file_bytes: int) -> FileHeader | None:
    """Return a header that is written as the safetensors library writes it; None for any other, also a damaged one.

    This takes half of the time of parsing JSON, and files with many tensors are mostly of the library.

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
        found = _ENTRY.findall(rest)
        offset = 0
        for name, kind, offsets in found:
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
    whole = (
        text[:1] == "{"
        and rest[-1:] == "}"
        and characters + len(found) * _ENTRY_CHARACTERS == len(rest) - 1
        and len(tensors) == len(found)
        and METADATA not in tensors
        and position + offset == file_bytes
    )
    return FileHeader(tensors, metadata, position) if whole else None


def _position(found: tuple[TensorEntry, str]) -> tuple[int, int]:
    return found[0].start, found[0].stop


def _entry(tensor: str, described: Any, name: str, start: int) -> TensorEntry:
    try:
        dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(
            f"the header of {name} does not describe {tensor!r}: {error!r}", key=name
        ) from error
    valid = type(dtype) is str and type(shape) is list and type(first) is int and type(last) is int
    if valid:
        valid = 0 <= first <= last and len(shape) <= _MAX_AXES
    if valid:
        for extent in shape:
            if type(extent) is not int or extent < 0:
                valid = False
    if not valid:
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
    """Read a JSON object from a file next to tensors. Its depth and size are limited.

    Raises:
        ObjectNotFoundError: the file does not exist.
        CorruptCheckpointError: the file contains anything else.
    """
    nbytes = store.size(key)
    if nbytes > _MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            f"{key} has {nbytes} bytes, at most {_MAX_JSON_BYTES} are expected. Name a file of tensors to load it "
            "alone",
            key=key,
        )
    config: dict[str, JSON] = _parse_json_object(store.get(key), key, constants=constants)
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


def _parse_json_object(data: bytes, key: str, *, constants: Constants = "refused") -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CorruptCheckpointError: the file contains anything else, or an object has a key twice.
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
