"""Safetensors files of other software, and JSON files in their directories. All content is hostile until checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ckptcore.builtin.safetensors_writing import BITS, METADATA, PAIRS, RAW, WHOLE_BYTES
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.protocols import Inspection, ReadStore

__all__ = ["Constants", "inspect_files", "read_json_object"]

_OURS: Final = {theirs: ours for ours, theirs in WHOLE_BYTES.items()}

_NAME: Final = r"(?a)\w{1,40}"


def _record_of(dtype: str, shape: Sequence[int], nbytes: int) -> ArrayRecord | None:
    """Return the array that a header describes; None if the header is inconsistent.

    A tensor of F4 whose last axis has an even length is an array of bytes with two elements each, the first in the
    lower half. Any other tensor of a dtype that NumPy lacks is a one-dimensional array of its bytes; `kind` and `notes`
    have its dtype and its shape.

    Args:
        dtype: the name of the dtype in the format; newer versions have further names.
        shape: elements along each axis.
        nbytes: the bytes that the header states.
    """
    if (ours := _OURS.get(dtype)) is not None:
        record = ArrayRecord(ArraySpec(tuple(shape), ours))
        return record if record.spec.nbytes == nbytes and record.spec.is_possible else None
    bits = BITS.get(dtype)
    if not re.fullmatch(_NAME, dtype) or (bits is not None and math.prod(shape) * bits != 8 * nbytes):
        return None
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        record = ArrayRecord(ArraySpec((*shape[:-1], shape[-1] // 2), "uint8"), PAIRS)
        return record if record.spec.is_possible else None
    notes: dict[str, JSON] = {"shape": list(shape)}
    return ArrayRecord(ArraySpec((nbytes,), "uint8"), f"{RAW}{dtype}", notes=notes)


_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""

_FILE: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_ADAPTER: Final = "adapter_model"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_KNOWN_STEMS: Final = ("model", "diffusion_pytorch_model", _ADAPTER)
"""Names that transformers, diffusers and PEFT look for (their SAFE(TENSORS)_WEIGHTS_NAME), in order of preference."""

_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


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
        CheckpointNotFoundError: there are several files, and no index lists which belong together.
    """
    found = _find_tensors(store, entry)
    if found is None:
        return None
    entries, metadata = found
    files = sorted({entry.key for entry in entries})
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


def _fits(header_bytes: int, file_bytes: int) -> bool:
    """Return True if a header of this length fits into a file of that length."""
    return 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8)


def _read_header(store: ReadStore, key: str) -> tuple[Sequence[_TensorEntry], Mapping[str, str]]:
    file_bytes = store.size(key)
    if file_bytes < 8:
        raise CorruptCheckpointError(f"{key} is not a safetensors file: it has {file_bytes} bytes", key=key)
    header_bytes = int.from_bytes(store.get(key, 0, 8), "little")
    if not _fits(header_bytes, file_bytes):
        raise CorruptCheckpointError(
            f"{key} is not a safetensors file, or is cut off: it has {file_bytes} bytes and states a header of "
            f"{header_bytes}",
            key=key,
        )
    header = _parse_json_object(store.get(key, 8, 8 + header_bytes), key)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CorruptCheckpointError(f"the __metadata__ of {key} is not a map of strings", key=key)
    start = 8 + header_bytes
    entries = [_entry(name, described, key, start) for name, described in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.record.spec.nbytes))
    position = start
    for entry in entries:
        if entry.offset != position:
            raise CorruptCheckpointError(
                f"the tensor {entry.name!r} of {key} starts at byte {entry.offset}, where byte {position} is expected",
                key=key,
            )
        position += entry.record.spec.nbytes
    if position != file_bytes:
        raise CorruptCheckpointError(
            f"{key} has {file_bytes} bytes, and its header describes {position}; the file is cut off or damaged",
            key=key,
        )
    return entries, metadata


def _entry(name: str, described: Any, key: str, start: int) -> _TensorEntry:
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
    record = _record_of(dtype, shape, last - first)
    if record is None:
        raise CorruptCheckpointError(
            f"the header of {key} is damaged: the tensor {name!r} has dtype {dtype[:40]!r}, shape {shape} and "
            f"{last - first} bytes, which do not agree",
            key=key,
        )
    return _TensorEntry(name, record, key, start + first)


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

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed_object = dict(pairs)
        if len(parsed_object) != len(pairs):
            raise ValueError("an object has a key twice")
        return parsed_object

    def constant_of(constant: str) -> object:
        if constants == "kept":
            return float(constant)
        raise ValueError(f"it has {constant}, which is not JSON")

    try:
        parsed = json.loads(data, object_pairs_hook=unique, parse_constant=constant_of)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the JSON in {key} cannot be read: {error}", key=key) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"the JSON in {key} is not an object", key=key)
    return parsed
