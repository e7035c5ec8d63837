"""Writing of safetensors files: headers, and slices of arrays that no process holds as a whole.

The names of dtypes are those of safetensors 0.8 (``safetensors/src/tensor.rs``). Shapes in headers are in elements,
also for dtypes smaller than a byte, whose elements are packed. The library refuses a tensor that does not end at a byte
boundary.

Slices are stored like those of torch.distributed.checkpoint's ``HuggingFaceStorageWriter(save_distributed=True)``, so
that it loads them (torch 2.13.0, hf_storage.py): ``shard-<process, from 1>-<stem>-<number>-of-<files of the
process>.safetensors``. Each is a plain safetensors file in which a tensor is a box of the array with that name.
``DCP_SHARDING_INFO`` in its metadata is the JSON ``{name: {"saved_offsets": [...]}}``: the start of each box.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ArraySegment, BytesSegment, Segment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.planning import ChunkColumns
from ckptcore.protocols import Snapshot, WriteStore

DTYPES: Final[Mapping[str, str]] = {
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
"""The names of dtypes in safetensors, by their names in NumPy and ml_dtypes."""

DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of each dtype of safetensors. The library writes the tensors of the last dtype first."""

METADATA: Final = "__metadata__"
"""The key of the metadata of a file in its header."""

_ORDER: Final = {dtype: -position for position, dtype in enumerate(DTYPE_BITS)}
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""

PAIRS: Final = "torch.float4_e2m1fn_x2"
"""The kind of an array of bytes with two F4 elements each: the dtype that the safetensors library uses for F4."""

RAW: Final = "safetensors."
"""Prefix of the kind of an array with the bytes of a tensor whose dtype NumPy lacks. The name of the dtype follows."""


PART: Final = "__ckptcore__"
"""The key in the metadata of a file for the version of the root that describes it. Without a root, the structure,
the values and the checksums are lost."""

_PART_VERSION: Final = "1"


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
    if dtype.kind in "mM":
        return "I64", spec.shape
    return "U8", spec.shape if dtype.itemsize == 1 else (*spec.shape, dtype.itemsize)


def _raw_entry(record: ArrayRecord) -> tuple[str, Sequence[int]] | None:
    """Return the stored dtype and shape of an array that is loaded as bytes; None for other records."""
    name = record.kind.removeprefix(RAW)
    bits, shape = DTYPE_BITS.get(name), record.notes.get("shape")
    if bits is None or not isinstance(shape, list) or not all(type(extent) is int for extent in shape):
        return None
    extents = [extent for extent in shape if isinstance(extent, int)]
    fits = min(extents, default=0) >= 0 and math.prod(extents) * bits == 8 * record.spec.size
    return (name, extents) if fits and len(record.spec.shape) == 1 else None


_ALIGNMENT: Final = 64
_LARGE_ALIGNMENT: Final = 4096
"""Alignment of the first element in a large file, in bytes: a page, so that direct I/O needs no copy."""


def aligned_header(header: Mapping[str, JSON], data_bytes: int) -> bytes:
    """Return the bytes of a file before its elements.

    Args:
        header: by name, the dtype, shape and position of each tensor.
        data_bytes: the size of all elements in bytes.
    """
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    alignment = _LARGE_ALIGNMENT if data_bytes > 1 << 20 else _ALIGNMENT
    padded = -(-(8 + len(encoded)) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + encoded.ljust(padded)


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Sequence[str]]:
    """Encode the header of a file, equal to the header of the safetensors library 0.8.

    Args:
        tensors: by name, the dtype (a key of `DTYPE_BITS`) and the shape in elements.
        metadata: names and values, in the order in which they are written. None: write no metadata.

    Returns:
        The bytes before the first element, and the names in the order of their elements: wide dtypes first.

    Raises:
        ValueError: a dtype is unknown, the elements of a tensor do not fill whole bytes, a name is reserved, or the
            header exceeds 100 MB, the limit of readers.
        TypeError: a name, or a name or value of the metadata, is not a str.
    """
    header: dict[str, Any] = {}
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
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name][0]], name))
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
    if padded > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {padded} bytes; safetensors allows {MAX_HEADER_BYTES}. Save several files")
    return padded.to_bytes(8, "little") + encoded.ljust(padded), names


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of `count` files of whole arrays."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def file_metadata(
    tree: TreeMetadata, names: Mapping[int, str], leaves: Collection[int], own: Mapping[str, str], *, standalone: bool
) -> dict[str, JSON]:
    """Return the metadata of a file with these leaves: aliases with the names of their arrays, and the user's entries.

    The user's entries replace others, as in `safetensors.torch.save_model`. A file that is not `standalone` says that
    it is part of a checkpoint.
    """
    here = set(leaves)
    metadata: dict[str, JSON] = {
        names[alias]: names[target] for alias, target in tree.aliases.items() if target in here
    }
    if not standalone:
        metadata[PART] = _PART_VERSION
    metadata["format"] = "pt"  # Hugging Face loaders require it, whatever software wrote the file
    metadata.update(own)
    return metadata


SHARDING: Final = "DCP_SHARDING_INFO"
"""The key in the metadata of a file for the starts of its boxes."""

_TOGETHER_BYTES: Final = 256 << 20
"""Approximate bytes of a group of arrays with several separate boxes. Groups are written one after the other, because
an array stays in memory until its last box is written."""


class _Slice(NamedTuple):
    """A box of an array that is one tensor of a file.

    Attributes:
        item: the number of the item.
        boxes: the numbers of the boxes of the item that form this box.
        box: the box.
    """

    item: int
    boxes: tuple[int, ...]
    box: Box


def write_slices(
    snapshot: Snapshot,
    items: Sequence[int],
    names: Mapping[int, str],
    store: WriteStore,
    *,
    stem: str,
    max_file_bytes: int,
    metadata: Mapping[str, str],
    standalone: bool,
) -> ChunkColumns:
    """Write items of a plan as slices into files of this process.

    Args:
        snapshot: contains the elements.
        items: the numbers of the items.
        names: the names of arrays by leaf.
        store: the store to write to.
        stem: the stem of file names.
        max_file_bytes: the most bytes of elements in a file, unless one box is larger.
        metadata: the user's entries for every file.
        standalone: True if the files do not say that they are part of a checkpoint.
    """
    plan = snapshot.plan
    files = _files(plan, items, max_file_bytes)
    slice_segments = _SliceSegments(snapshot, files)
    columns = ChunkColumns()

    def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
        for number, slices in enumerate(files, start=1):
            key = f"shard-{plan.rank + 1:05d}-{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            header: dict[str, JSON] = {}
            begins: dict[str, JSON] = {}
            segments: list[Segment] = []
            positions: list[int] = []
            position = 0
            for part in slices:
                item = plan.items[part.item]
                spec = ArraySpec(part.box.shape, item.spec.dtype)
                # Packed elements stay bytes: torch's reader of slices (hf_storage.py, torch 2.13.0) supports neither
                # their dtypes nor shapes in other units than the offsets.
                dtype, shape = header_entry(ArrayRecord(spec))
                name = names[item.leaf]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + spec.nbytes]}
                begins[name] = {"saved_offsets": [*part.box.start, *[0] * (len(shape) - len(part.box.start))]}
                positions.append(position)
                segments.append(slice_segments.segment(part))
                position += spec.nbytes
            leaves = [plan.items[part.item].leaf for part in slices]
            about = file_metadata(plan.tree, names, leaves, metadata, standalone=standalone)
            about[SHARDING] = json.dumps(begins, separators=(",", ":"))
            head = aligned_header({METADATA: about, **header}, position)
            for part, start in zip(slices, positions, strict=True):
                columns.add(plan.items[part.item].leaf, key, len(head) + start, part.box)
            yield key, [BytesSegment(head), *segments]

    store.write_many(objects())
    return columns


def _files(plan: WritePlan, items: Sequence[int], max_file_bytes: int) -> list[list[_Slice]]:
    """Divide slices into files: at most one slice of each array per file, wide elements first for alignment."""
    order = sorted(items, key=lambda number: -plan.items[number].spec.numpy_dtype.itemsize)
    cut = [_slices(plan, number) for number in order]
    files = _fill_files(plan, [slices[0] for slices in cut if len(slices) == 1], max_file_bytes)
    several = [slices for slices in cut if len(slices) > 1]
    while several:
        together: list[list[_Slice]] = []
        nbytes = 0
        while several and (not together or nbytes < min(_TOGETHER_BYTES, max_file_bytes)):
            together.append(several.pop(0))
            nbytes += sum(_nbytes(plan, part) for part in together[-1])
        for number in range(max(map(len, together))):
            layer = [slices[number] for slices in together if number < len(slices)]
            files.extend(_fill_files(plan, layer, max_file_bytes))
    return files


def _fill_files(plan: WritePlan, slices: Sequence[_Slice], max_file_bytes: int) -> list[list[_Slice]]:
    files: list[list[_Slice]] = []
    room = 0
    leaves: set[int] = set()
    for part in slices:
        nbytes, leaf = _nbytes(plan, part), plan.items[part.item].leaf
        if not files or nbytes > room or leaf in leaves:
            files.append([])
            room = max_file_bytes
            leaves = set()
        files[-1].append(part)
        leaves.add(leaf)
        room -= nbytes
    return files


def _nbytes(plan: WritePlan, part: _Slice) -> int:
    return part.box.size * plan.items[part.item].spec.numpy_dtype.itemsize


def _slices(plan: WritePlan, number: int) -> list[_Slice]:
    """Return the boxes of an item without empty ones, merged into one if they form a box."""
    item = plan.items[number]
    filled = [position for position, box in enumerate(item.boxes) if box.size]
    if not filled:
        return [] if item.spec.size else [_Slice(number, (0,), item.boxes[0])]
    boxes = [item.boxes[position] for position in filled]
    start = tuple(map(min, zip(*[box.start for box in boxes], strict=True)))
    stop = tuple(map(max, zip(*[box.stop for box in boxes], strict=True)))
    union = Box(start, stop)
    if union.size == sum([box.size for box in boxes]):  # boxes of an item do not overlap
        return [_Slice(number, tuple(filled), union)]
    return [_Slice(number, (position,), item.boxes[position]) for position in filled]


class _SliceSegments:
    """Segments of slices. Releases an item after the last of its slices. Thread-safe."""

    def __init__(self, snapshot: Snapshot, files: Sequence[Sequence[_Slice]]) -> None:
        self._snapshot = snapshot
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()
        for slices in files:
            for part in slices:
                self._left[part.item] = self._left.get(part.item, 0) + 1

    def segment(self, part: _Slice) -> ArraySegment:
        item = self._snapshot.plan.items[part.item]

        def open_arrays() -> Sequence[tuple[Box, HostArray]]:
            arrays = self._snapshot.take(part.item)
            return tuple([(item.boxes[position], arrays[position]) for position in part.boxes])

        def close_arrays() -> None:
            with self._lock:
                self._left[part.item] -= 1
                last = self._left[part.item] == 0
            if last:
                self._snapshot.release(part.item)

        return ArraySegment(part.box, item.spec.numpy_dtype.itemsize, open_arrays, close_arrays)
