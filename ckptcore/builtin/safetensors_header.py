"""Headers of safetensors files: their dtypes, entries and sizes.

The names are those of safetensors 0.8 (``safetensors/src/tensor.rs``). Shapes in headers are in elements, also for
dtypes smaller than a byte. Their elements are packed; the library refuses a tensor that does not end at a byte
boundary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.builtin.json_objects import parse_json_object, read_json_object
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.protocols import ReadStore

__all__ = [
    "METADATA",
    "TensorEntry",
    "encode_header",
    "file_metadata",
    "file_names",
    "header_entry",
    "inspect_files",
    "record_of",
]

_WHOLE_BYTES: Final[Mapping[str, str]] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The names of dtypes whose elements have whole bytes, by ours."""

_OURS: Final = {theirs: ours for ours, theirs in _WHOLE_BYTES.items()}

_BITS: Final[Mapping[str, int]] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of dtypes smaller than a byte. Those of ml_dtypes have a byte per element and are other dtypes."""

_PAIRS: Final = "torch.float4_e2m1fn_x2"
"""The kind of an array of bytes with two F4 elements each: the dtype that the safetensors library uses for F4."""

_RAW: Final = "safetensors."
"""Prefix of the kind of an array that holds the bytes of a tensor whose dtype NumPy lacks. The dtype's name follows."""

_NAME: Final = re.compile(r"\w{1,40}", re.ASCII)


def header_entry(record: ArrayRecord) -> tuple[str, Sequence[int]]:
    """The dtype and shape that a header states for an array that is stored whole."""
    spec = record.spec
    if spec.dtype == "uint8" and record.kind != PLAIN_ARRAY and spec.shape:
        if record.kind == _PAIRS:
            return "F4", (*spec.shape[:-1], 2 * spec.shape[-1])
        raw = _raw_entry(record)
        if raw is not None:
            return raw
    if (known := _WHOLE_BYTES.get(spec.dtype)) is not None:
        return known, spec.shape
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return "I64", spec.shape
    return "U8", spec.shape if dtype.itemsize == 1 else (*spec.shape, dtype.itemsize)


def _raw_entry(record: ArrayRecord) -> tuple[str, Sequence[int]] | None:
    """Return the dtype and shape from which `record_of` made a record of bytes; None for other records."""
    name = record.kind.removeprefix(_RAW)
    bits, shape = _BITS.get(name), record.notes.get("shape")
    if bits is None or not isinstance(shape, list) or not all(type(extent) is int for extent in shape):
        return None
    extents = [extent for extent in shape if isinstance(extent, int)]
    fits = min(extents, default=0) >= 0 and math.prod(extents) * bits == 8 * record.spec.size
    return (name, extents) if fits and len(record.spec.shape) == 1 else None


def record_of(dtype: str, shape: Sequence[int], nbytes: int) -> ArrayRecord | None:
    """Return the array that a header describes; None if the header is inconsistent.

    A tensor of F4 is an array of bytes with two elements each, the first in the lower half. A tensor of any other dtype
    that NumPy lacks is a one-dimensional array of its bytes; `kind` and `notes` have its dtype and its shape.

    Args:
        dtype: its name in the format; one of a newer version has other names.
        shape: elements along each axis.
        nbytes: bytes that the header states.
    """
    if (ours := _OURS.get(dtype)) is not None:
        record = ArrayRecord(ArraySpec(tuple(shape), ours))
        return record if record.spec.nbytes == nbytes and record.spec.is_possible else None
    bits = _BITS.get(dtype)
    if not _NAME.fullmatch(dtype) or (bits is not None and math.prod(shape) * bits != 8 * nbytes):
        return None
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        record = ArrayRecord(ArraySpec((*shape[:-1], shape[-1] // 2), "uint8"), _PAIRS)
        return record if record.spec.is_possible else None
    notes: dict[str, JSON] = {"shape": list(shape)}
    return ArrayRecord(ArraySpec((nbytes,), "uint8"), f"{_RAW}{dtype}", notes=notes)


_MAX_HEADER_BYTES: Final = 100_000_000
"""What the safetensors library itself accepts."""

_FILE: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_ADAPTER: Final = "adapter_model"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_KNOWN_STEMS: Final = ("model", "diffusion_pytorch_model", _ADAPTER)
"""What transformers, diffusers and PEFT look for (SAFE_WEIGHTS_NAME, SAFETENSORS_WEIGHTS_NAME of each), in the order of preference."""

_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file.

    Attributes:
        name: its name.
        record: its array.
        key: the file.
        offset: where its first element is in the file, in bytes.
    """

    name: str
    record: ArrayRecord
    key: str
    offset: int


def inspect_files(store: ReadStore, entry: str | None) -> tuple[Sequence[TensorEntry], Mapping[str, JSON]] | None:
    """All tensors at a location with the metadata of their files; None if there is nothing of safetensors.

    The metadata of an adapter has the ``adapter_config.json`` that stands beside it as ``adapter_config``.

    Args:
        store: where to look.
        entry: the one file that was named, whatever its suffix, or None for a directory.

    Raises:
        CorruptCheckpointError: if there is, and it is broken.
        CheckpointNotFoundError: if there are several files and no index says how they belong together.
    """
    if entry is not None:
        if entry == f"{_ADAPTER}{_FILE}":
            found = _read_header(store, entry)
            try:
                return _with_config(store, *found)
            except CorruptCheckpointError:
                return found  # who names the file can have its tensors whatever stands beside it
        if entry.endswith(_INDEX):
            return _read_index(store, entry)
        return _read_header(store, entry) if entry.endswith(_FILE) or _has_header(store, entry) else None
    names = store.list_names("")
    indexes = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(_FILE)]
    if not indexes and not files:
        return None
    stem = _stem_meant(indexes, files)
    if stem is None:
        raise CheckpointNotFoundError(
            f"there are several safetensors files and nothing says which belong together: {', '.join([*indexes, *files])}; "
            "name one of them as the location"
        )
    entries, metadata = _read_stem(store, stem, indexes, files)
    return _with_config(store, entries, metadata) if stem == _ADAPTER else (entries, metadata)


def _with_config(
    store: ReadStore, entries: Sequence[TensorEntry], metadata: Mapping[str, JSON]
) -> tuple[Sequence[TensorEntry], Mapping[str, JSON]]:
    """An adapter with the config that stands beside it, where one does."""
    try:
        config = read_json_object(store, _ADAPTER_CONFIG)
    except ObjectNotFoundError:
        return entries, metadata
    return entries, {**metadata, "adapter_config": config}


def _read_stem(
    store: ReadStore, stem: str, indexes: Sequence[str], files: Sequence[str]
) -> tuple[Sequence[TensorEntry], Mapping[str, str]]:
    """The files whose names begin with a stem: by their index, or the one, or all shards."""
    if f"{stem}{_INDEX}" in indexes:
        return _read_index(store, f"{stem}{_INDEX}")
    if f"{stem}{_FILE}" in files:
        return _read_header(store, f"{stem}{_FILE}")
    shards = [shard for name in files if (shard := _SHARD.fullmatch(name)) and shard[1] == stem]
    counts = sorted({int(shard[3]) for shard in shards})
    if counts != [len(shards)]:
        raise CorruptCheckpointError(
            f"{counts[0] if len(counts) == 1 else counts} safetensors shards belong together and {len(shards)} are there: "
            f"{[shard[0] for shard in shards]}"
        )
    return _unite(store, [shard[0] for shard in shards])


def _stem_meant(indexes: Sequence[str], files: Sequence[str]) -> str | None:
    """What the names of the files that are meant begin with; None if nothing tells.

    Where there are several checkpoints it is that of the library whose directory it is: a model that was trained with an adapter
    has files of it beside its own.
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


def _unite(store: ReadStore, files: Sequence[str]) -> tuple[Sequence[TensorEntry], Mapping[str, str]]:
    entries: dict[str, TensorEntry] = {}
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


def _read_index(store: ReadStore, key: str) -> tuple[Sequence[TensorEntry], Mapping[str, str]]:
    index = parse_json_object(store.get(key), key)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptCheckpointError(f"{key} has no weight_map from names to files", key=key)
    directory = key.rpartition("/")[0]
    files = sorted({f"{directory}/{file}" if directory else file for file in weight_map.values()})
    try:
        entries, metadata = _unite(store, files)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(f"{key} lists a file that is not there: {error}", key=key) from error
    missing = weight_map.keys() - {entry.name for entry in entries}
    if missing:
        raise CorruptCheckpointError(
            f"{key} lists tensors that are in none of its files: {sorted(missing)[:5]}", key=key
        )
    return [entry for entry in entries if entry.name in weight_map], metadata


def _has_header(store: ReadStore, key: str) -> bool:
    """Return whether a file begins like a safetensors file: with the length of a header that fits into it, and "{".

    Files of torch.save, and others that begin with letters, state a length beyond any limit.
    """
    file_bytes = store.size(key)
    begin = store.get(key, 0, min(file_bytes, 9))
    return _fits(int.from_bytes(begin[:8], "little"), file_bytes) and begin[8:] == b"{"


def _fits(header_bytes: int, file_bytes: int) -> bool:
    """Return whether a header of this length fits into a file of that length."""
    return 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8)


def _read_header(store: ReadStore, key: str) -> tuple[Sequence[TensorEntry], Mapping[str, str]]:
    file_bytes = store.size(key)
    if file_bytes < 8:
        raise CorruptCheckpointError(f"{key} is no safetensors file: it has {file_bytes} bytes", key=key)
    header_bytes = int.from_bytes(store.get(key, 0, 8), "little")
    if not _fits(header_bytes, file_bytes):
        raise CorruptCheckpointError(
            f"{key} is no safetensors file, or is cut off: it has {file_bytes} bytes and states a header of {header_bytes}",
            key=key,
        )
    header = parse_json_object(store.get(key, 8, 8 + header_bytes), key)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CorruptCheckpointError(f"the __metadata__ of {key} is not a map of strings", key=key)
    start = 8 + header_bytes
    entries = [_entry(name, described, key, start) for name, described in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.record.spec.nbytes))
    position = start
    for entry in entries:
        if entry.offset != position:
            raise CorruptCheckpointError(
                f"the tensor {entry.name!r} of {key} begins at byte {entry.offset}, where byte {position} is expected",
                key=key,
            )
        position += entry.record.spec.nbytes
    if position != file_bytes:
        raise CorruptCheckpointError(
            f"{key} has {file_bytes} bytes, where its header describes {position}; the file is cut off or damaged",
            key=key,
        )
    return entries, metadata


def _entry(name: str, described: Any, key: str, start: int) -> TensorEntry:
    try:
        dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(f"the header of {key} does not describe {name!r}: {error!r}", key=key) from error
    whole = (
        isinstance(shape, list) and len(shape) <= 64 and all(type(extent) is int and extent >= 0 for extent in shape)
    )
    if (
        not whole
        or not isinstance(dtype, str)
        or type(first) is not int
        or type(last) is not int
        or not 0 <= first <= last
    ):
        raise CorruptCheckpointError(
            f"the header of {key} describes {name!r} with dtype {dtype}, shape {shape} and offsets {first} to {last}",
            key=key,
        )
    record = record_of(dtype, shape, last - first)
    if record is None:
        raise CorruptCheckpointError(
            f"the header of {key} is damaged: the tensor {name!r} has dtype {dtype[:40]!r}, shape {shape} and "
            f"{last - first} bytes, which do not agree",
            key=key,
        )
    return TensorEntry(name, record, key, start + first)


METADATA: Final = "__metadata__"
"""The name in a header under which the metadata of the file stands."""

_ALIGNMENT: Final = 64
_LARGE_ALIGNMENT: Final = 4096
"""Where elements begin in a large file, in bytes: a page, so that direct I/O needs no copy."""


def encode_header(header: Mapping[str, JSON], data_bytes: int) -> bytes:
    """What stands before the elements of a file.

    Args:
        header: by name, what each tensor is and where.
        data_bytes: how many bytes of elements follow.
    """
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    alignment = _LARGE_ALIGNMENT if data_bytes > 1 << 20 else _ALIGNMENT
    padded = -(-(8 + len(encoded)) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + encoded.ljust(padded)


def file_names(stem: str, count: int) -> list[str]:
    """The names of so many files that hold whole arrays."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def file_metadata(
    tree: TreeMetadata, names: Mapping[int, str], leaves: Collection[int], own: Mapping[str, str]
) -> dict[str, JSON]:
    """Return the metadata of a file with these leaves: aliases with the names of their arrays, and the user's entries.

    The user's entries replace others, as in `safetensors.torch.save_model`.
    """
    here = set(leaves)
    metadata: dict[str, JSON] = {
        names[alias]: names[target] for alias, target in tree.aliases.items() if target in here
    }
    metadata["format"] = "pt"  # Hugging Face loaders ask for it; it says nothing of who wrote the file
    metadata.update(own)
    return metadata
