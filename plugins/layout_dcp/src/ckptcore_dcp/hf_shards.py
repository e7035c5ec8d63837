"""Safetensors shards that torch.distributed.checkpoint's HuggingFaceStorageWriter writes with ``save_distributed``.

Each ``shard-00001-model-00001-of-00002.safetensors`` is a safetensors file with boxes of tensors.
``DCP_SHARDING_INFO`` in its header states their offsets, as the JSON ``{name: {"saved_offsets":
[...]}}``. No file lists the shards, so the shape of a tensor is computed from its boxes (torch
2.13.0, hf_storage.py). Consolidated files, ``model-*.safetensors``, are plain safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import LEAF, ArrayRecord, Box, LeafRecord, Node, TreeMetadata, unreadable_leaf
from ckptcore.plain_safetensors import refuse_lost_root
from ckptcore.planning import ChunkColumns, cuts_of
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_dcp.stored_tensors import FRAMEWORK, spec_and_kind

_SHARD: Final = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors", re.ASCII)
_INFO: Final = "DCP_SHARDING_INFO"
_MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors library."""
_MAX_COUNT: Final = 1 << 62
_DTYPES: Final = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
"""Torch dtypes by their names in safetensors headers."""
_PAIRS: Final = "F4"
"""The dtype for which torch packs two elements into one."""


@dataclass(frozen=True, slots=True)
class _ShardBox:
    """A box of a tensor in a file.

    Attributes:
        name: the tensor.
        dtype: its torch dtype; None for a dtype that ckptcore does not support, which `stored_dtype` names.
        box: the box.
        key: the file.
        offset, nbytes: its elements in the file, in bytes.
        stored_dtype: the dtype in the header of the file.
    """

    name: str
    dtype: str | None
    box: Box
    key: str
    offset: int
    nbytes: int
    stored_dtype: str


def inspect_shards(store: ReadStore, names: Sequence[str]) -> Inspection | None:
    """Inspect a directory of safetensors shards with these file names. Return None for other directories.

    Raises:
        CorruptCheckpointError: a header cannot be read.
    """
    files = [name for name in names if _SHARD.fullmatch(name)]
    by_name: dict[str, list[_ShardBox]] = {}
    for key in files:
        parts = _read_boxes(store, key)
        if parts is None:
            return None
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
    if not files:
        return None
    columns = ChunkColumns()
    leaves: list[LeafRecord] = []
    for name, parts in by_name.items():
        first = parts[0]
        if (problem := _problem(name, parts)) is not None or first.dtype is None:
            assert problem is not None  # a missing dtype is a problem
            leaves.append(unreadable_leaf(problem))
            continue
        shape = tuple([max(stops) for stops in zip(*[part.box.stop for part in parts], strict=True)])
        spec, kind = spec_and_kind(first.dtype, shape)
        if not spec.is_possible:
            raise CorruptCheckpointError(
                f"the tensor {name!r} is {spec}, which exceeds the address space", key=first.key
            )
        boxes: dict[Box, _ShardBox] = {}
        for part in parts:
            if part.box.size:
                boxes.setdefault(part.box, part)  # skips replicas: each process writes all of its boxes
        for box, part in boxes.items():
            columns.add(len(leaves), part.key, part.offset, box)
        leaves.append(ArrayRecord(spec, kind, cuts_of(shape, boxes) if len(boxes) > 1 else None, FRAMEWORK))
    skeleton = Node("dict", tuple(by_name), (LEAF,) * len(by_name))
    return Inspection(
        TreeMetadata(skeleton, tuple(leaves)),
        {"content": "elements", **columns.to_json()},
        "torch.distributed.checkpoint (safetensors)",
    )


def _problem(name: str, parts: Sequence[_ShardBox]) -> CorruptCheckpointError | UnsupportedLeafError | None:
    """Return the reason why a tensor cannot be loaded; None if it can be."""
    first = parts[0]
    if any(part.stored_dtype != first.stored_dtype or len(part.box.stop) != len(first.box.stop) for part in parts):
        return CorruptCheckpointError(
            f"the shards of the tensor {name!r} have different dtypes or numbers of axes: restore {first.key} from a "
            "copy, or load another checkpoint",
            key=first.key,
        )
    if first.dtype is None:
        return UnsupportedLeafError(
            f"the tensor {name!r} of {first.key} has the dtype {first.stored_dtype[:40]!r}, which NumPy cannot hold"
        )
    return None


def _read_boxes(store: ReadStore, key: str) -> Sequence[_ShardBox] | None:
    """Return the boxes in a file, or None if its header has no sharding info."""
    file_bytes = store.size(key)
    header_bytes = int.from_bytes(store.get(key, 0, 8), "little")
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise _damaged(
            key, f"it is no safetensors file, or cut off: of {file_bytes} bytes, its header should have {header_bytes}"
        )
    header = _parse_json(store.get(key, 8, 8 + header_bytes), key)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_INFO), str):
        return None
    refuse_lost_root(key, metadata)
    info = _parse_json(metadata[_INFO].encode("utf-8", "surrogatepass"), key)
    parts = [_shard_box(name, described, info, key, 8 + header_bytes, file_bytes) for name, described in header.items()]
    position = 8 + header_bytes
    for part in sorted(parts, key=lambda part: (part.offset, part.nbytes)):
        if part.offset != position:
            raise _damaged(key, f"the tensor {part.name!r} begins at byte {part.offset}, expected byte {position}")
        position += part.nbytes
    return parts


def _shard_box(name: str, described: Any, info: Any, key: str, start: int, file_bytes: int) -> _ShardBox:
    try:
        dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
        offsets = info[name]["saved_offsets"]
        if not (isinstance(shape, list) and isinstance(offsets, list) and len(shape) == len(offsets) <= 64):
            raise ValueError("shape and offsets have different numbers of axes")
        if not isinstance(dtype, str):
            raise TypeError("the dtype is no text")
        for number in (*shape, *offsets, first, last):
            if type(number) is not int or not 0 <= number < _MAX_COUNT:
                raise ValueError(f"{str(number)[:40]} is not a valid count")
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(key, f"the header does not describe {name!r}: {error!r}") from error
    stop = tuple([offset + extent for offset, extent in zip(offsets, shape, strict=True)])
    if dtype not in _DTYPES:
        return _ShardBox(name, None, Box(tuple(offsets), stop), key, start + first, last - first, dtype)
    if dtype == _PAIRS:
        if not shape or shape[-1] % 2:
            raise _damaged(key, f"the tensor {name!r} has the shape {shape}; its last axis must be even")
        # The writer states offsets in pairs (torch's unit) and shapes in elements (the format's
        # unit).
        shape = [*shape[:-1], shape[-1] // 2]
        stop = (*stop[:-1], offsets[-1] + shape[-1])
    spec, _ = spec_and_kind(_DTYPES[dtype], tuple(shape))
    if spec.nbytes != last - first or start + last > file_bytes:
        raise _damaged(
            key,
            f"the tensor {name!r} is {spec} and needs {spec.nbytes} bytes, but the header states bytes {first} to "
            f"{last} of {file_bytes - start}",
        )
    return _ShardBox(name, _DTYPES[dtype], Box(tuple(offsets), stop), key, start + first, spec.nbytes, dtype)


def _parse_json(data: bytes, key: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("duplicate key")
        return made

    try:
        parsed = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(key, f"its JSON cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise _damaged(key, "its JSON is not an object")
    return parsed


def _damaged(key: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key} cannot be read: {reason}; restore it from a copy, or load another checkpoint", key=key
    )
