"""Writer of ``.metadata``, as a pickle that torch reads.

Many similar rows of pickle opcodes are encoded in one step. A row is a template: constant opcodes with columns of
numbers between them. All rows form a matrix of bytes in which each field has the width of its longest value. A mask
selects the bytes in use; these bytes, row after row, are the pickle. A number has 2, 3, 5 or 10 bytes: BININT1,
BININT2, BININT, or LONG1 with 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.metadata.entries import (
    DcpChunk,
    DcpChunkColumns,
    DcpMetadata,
    DcpTensors,
    DcpValue,
    TensorHead,
    ranges_of,
)

_BLOCK_ROWS: Final = 1 << 13
"""Rows encoded at a time, so that their matrix stays in the cache."""
_MAX_BY_OPCODE: Final = 4
"""Tuples of at least this number of items begin with MARK."""
_TUPLES: Final = np.frombuffer(b")\x85\x86\x87", np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class OpcodeField:
    """A part of every row.

    Attributes:
        data: bytes, of equal width for each row; a single row if all rows are equal.
        nbytes: number of leading bytes in use, per row; None if all are in use.
    """

    data: HostArray
    nbytes: HostArray | None = None


def bytes_field(data: bytes) -> OpcodeField:
    """Return a field with the same bytes in every row."""
    return OpcodeField(np.frombuffer(data, np.uint8)[None, :])


def number_field(numbers: HostArray, present: HostArray | None = None) -> OpcodeField:
    """Return an int64 number per row; no bytes in rows where `present` is false."""
    width = np.full(len(numbers), 10, np.int64)
    width[(-(1 << 31) <= numbers) & (numbers < 1 << 31)] = 5
    width[(numbers >= 0) & (numbers < 1 << 16)] = 3
    width[(numbers >= 0) & (numbers < 1 << 8)] = 2
    room = int(width.max(initial=2))
    raw = np.ascontiguousarray(numbers, "<i8").view(np.uint8).reshape(-1, 8)
    data = np.zeros((len(numbers), room), np.uint8)
    if room == 10:
        data[:, 0], data[:, 1], data[:, 2:] = 0x8A, 8, raw  # LONG1 of 8 bytes
        shorter = width < 10
        data[shorter, 1:6] = raw[shorter, :5]
    else:
        data[:, 1:] = raw[:, : room - 1]
    opcodes = np.array([0, 0, ord("K"), ord("M"), 0, ord("J"), 0, 0, 0, 0, 0x8A], np.uint8)
    data[:, 0] = opcodes[width]
    return OpcodeField(data, width if present is None else np.where(present, width, 0))


def reference_field(numbers: HostArray) -> OpcodeField:
    """Return a reference to a memo entry per row, by its number."""
    raw = np.ascontiguousarray(numbers, "<u4").view(np.uint8).reshape(-1, 4)
    long = numbers >= 1 << 8
    data = np.zeros((len(numbers), 5), np.uint8)
    data[:, 0] = np.where(long, ord("j"), ord("h"))
    data[:, 1:] = raw
    return OpcodeField(data, np.where(long, 5, 2))


def size_fields(axes: HostArray, numbers: HostArray, class_opcodes: bytes) -> Sequence[OpcodeField]:
    """Return the fields of a ``torch.Size`` per row.

    Args:
        axes: number of axes per row.
        numbers: one extent per axis and row; values beyond the row's axes are ignored.
        class_opcodes: opcodes of the class.
    """
    marked = axes >= _MAX_BY_OPCODE
    fields = [bytes_field(class_opcodes)]
    if marked.any():
        fields.append(OpcodeField(np.full((len(axes), 1), ord("("), np.uint8), marked.astype(np.int64)))
    fields += [number_field(numbers[:, axis], axes > axis) for axis in range(numbers.shape[1])]
    closing = np.where(marked, np.uint8(ord("t")), _TUPLES[np.minimum(axes, _MAX_BY_OPCODE - 1)])
    return [*fields, OpcodeField(closing[:, None]), bytes_field(b"\x85R")]


def encode_rows(fields: Sequence[OpcodeField], count: int) -> tuple[bytes, HostArray]:
    """Return the bytes of all rows, concatenated, and the offset of each row, followed by the end of the last row."""
    lengths = np.zeros(count, np.int64)
    for field in fields:
        lengths += field.data.shape[1] if field.nbytes is None else field.nbytes
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    width = sum(field.data.shape[1] for field in fields)
    parts: list[bytes] = []
    for start in range(0, count, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, count)
        matrix = np.empty((stop - start, width), np.uint8)
        counts = np.ones((stop - start, width), bool)
        column = 0
        for field in fields:
            room = field.data.shape[1]
            matrix[:, column : column + room] = field.data if len(field.data) == 1 else field.data[start:stop]
            if field.nbytes is not None:
                counts[:, column : column + room] = np.arange(room) < field.nbytes[start:stop, None]
            column += room
        parts.append(matrix[counts].tobytes())
    return b"".join(parts), begins


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_INDEX: Final = (_METADATA, "MetadataIndex")
_CHUNK: Final = (_METADATA, "ChunkStorageMetadata")
_INFO: Final = (_FILES, "_StorageInfo")
_BEGIN: Final = b")\x81}("
"""EMPTY_TUPLE NEWOBJ EMPTY_DICT MARK: an object whose attributes follow."""
_SET: Final = b"ub"
"""SETITEMS BUILD: the attributes are complete."""
_SMALL: Final = tuple([b"K" + bytes([memo_number]) for memo_number in range(256)])


def write_metadata(metadata: DcpMetadata) -> bytes:
    """Return the bytes of a ``.metadata`` that torch reads like its own.

    Chunks are encoded as rows of opcodes, all in one step. Texts, classes, and the layout and memory
    format of tensors are written once and then referred to; other objects do not enter the memo. The
    pickle is a single frame, because readers load it into memory as a whole anyway.
    """
    pickle = _OpcodeCache()
    out = pickle.out
    out += [pickle[_METADATA, "Metadata"], _BEGIN, pickle["state_dict_metadata"], b"}("]
    names = metadata.names
    stored = DcpTensors.of(metadata.tensors)
    tensors = [name for name in names if name in stored.heads]
    numbers = np.fromiter(map(stored.numbers.__getitem__, tensors), np.int64, len(tensors))
    counts = np.diff(stored.bounds)[numbers]
    columns = stored.columns.take(ranges_of(stored.bounds[numbers], counts))
    rows, begins, start = b"", [0], 0
    heads: dict[TensorHead, bytes] = {}
    stops = iter(np.cumsum(counts).tolist())
    for name in names:
        out.append(pickle[name])
        head = stored.heads.get(name)
        if head is None:
            out += [pickle[_METADATA, "BytesStorageMetadata"], b")\x81"]
            continue
        if head not in heads:
            # The first call defines classes and texts in the memo. The second returns only references to them, which
            # all later tensors of this kind use.
            out.append(_tensor_head(head, pickle))
            heads[head] = _tensor_head(head, pickle)
        else:
            out.append(heads[head])
        stop = next(stops)
        if start < stop and not rows:
            # The first chunk defines the classes and attributes that all others refer to.
            first = columns.chunk(0)
            out += (pickle[_CHUNK], _BEGIN, pickle["offsets"], pickle.sizes[first.offsets])
            out += (pickle["sizes"], pickle.sizes[first.sizes], _SET)
            rows, begins = _chunk_rows(columns, pickle)
            out.append(rows[begins[1] : begins[stop]])
        else:
            out.append(rows[begins[start] : begins[stop]])
        start = stop
        out.append(b"eub")
    out += [b"u", pickle["planner_data"]]
    _write_paths(metadata, pickle)
    out += [pickle["storage_data"], b"}("]
    for name, value in metadata.values.items():
        out += (pickle[_INDEX], _BEGIN, pickle["fqn"], pickle[name], pickle["index"], b"Nub")
        _write_item_range(value, pickle)
    _write_item_ranges([pickle.memo_number(name) for name in tensors], counts, columns, pickle)
    out += [b"u", pickle["storage_meta"], pickle[_METADATA, "StorageMeta"], _BEGIN]
    out += [pickle["checkpoint_id"], pickle.optional(metadata.checkpoint_id)]
    out += [pickle["save_id"], pickle.optional(metadata.save_id), pickle["load_id"], b"N", pickle["modules"], b"]ub"]
    out += [pickle["version"], pickle["1.0.0"], b"ub."]
    data = b"".join(out)
    return b"\x80\x04\x95" + len(data).to_bytes(8, "little") + data


def _tensor_head(head: TensorHead, pickle: _OpcodeCache) -> bytes:
    """Return the opcodes of a tensor up to its chunks.

    They are equal for all tensors with the same head, except that those of the first tensor define the classes and
    texts.
    """
    dtype, shape, requires_grad = head
    parts = [pickle[_METADATA, "TensorStorageMetadata"], _BEGIN, pickle["properties"]]
    parts += [pickle[_METADATA, "TensorProperties"], b")\x81(", pickle["torch", dtype]]
    parts += [pickle.call(("torch.serialization", "_get_layout"), "torch.strided")]
    parts += [b"\x88" if requires_grad else b"\x89", pickle.call((_METADATA, "_MEM_FORMAT_ENCODING"), 0)]
    parts += [b"\x89tb", pickle["size"], pickle.sizes[shape], pickle["chunks"], b"]("]
    return b"".join(parts)


def _chunk_rows(columns: DcpChunkColumns, pickle: _OpcodeCache) -> tuple[bytes, list[int]]:
    """Return the opcodes of all chunks, and the offset of each chunk, followed by the end of the last chunk."""
    class_opcodes = pickle["torch", "Size"]
    fields = [
        bytes_field(pickle[_CHUNK] + _BEGIN + pickle["offsets"]),
        *size_fields(columns.axes, columns.offsets, class_opcodes),
        bytes_field(pickle["sizes"]),
        *size_fields(columns.axes, columns.sizes, class_opcodes),
        bytes_field(_SET),
    ]
    rows, begins = encode_rows(fields, len(columns.axes))
    return rows, begins.tolist()


def _write_item_ranges(names: Sequence[int], counts: HostArray, columns: DcpChunkColumns, pickle: _OpcodeCache) -> None:
    """Write the location of each chunk.

    The first location in each file and locations with transforms are written one by one. All locations between two such
    locations are written in one step.

    Args:
        names: memo number of the name of each tensor.
        counts: number of chunks of each tensor.
        columns: the chunks of all tensors.
        pickle: opcodes to write to.
    """
    out = pickle.out
    count = int(counts.sum())
    if not count:
        return
    references = np.repeat(np.array(names, np.int64), counts)
    numbers = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
    alone = set(np.unique(columns.file, return_index=True)[1].tolist()) | set(columns.transforms) | {0}
    files = np.zeros(len(columns.files), np.int64)
    done = 0
    for row in [*sorted(alone), count]:
        if done < row:
            run = slice(done, row)
            fields = [
                bytes_field(pickle[_INDEX] + _BEGIN + pickle["fqn"]),
                reference_field(references[run]),
                bytes_field(pickle["index"]),
                number_field(numbers[run]),
                bytes_field(pickle["offset"]),
                *size_fields(columns.axes[run], columns.offsets[run], pickle["torch", "Size"]),
                bytes_field(_SET + pickle[_INFO] + _BEGIN + pickle["relative_path"]),
                reference_field(files[columns.file[run]]),
                bytes_field(pickle["offset"]),
                number_field(columns.offset[run]),
                bytes_field(pickle["length"]),
                number_field(columns.length[run]),
                bytes_field(_SET),
            ]
            out.append(encode_rows(fields, row - done)[0])
        if row == count:
            return
        chunk = columns.chunk(row)
        out += (pickle[_INDEX], _BEGIN, pickle["fqn"], _memo_opcodes(int(references[row])))
        out += (pickle["index"], _int_opcodes(int(numbers[row])), pickle["offset"], pickle.sizes[chunk.offsets], _SET)
        _write_item_range(chunk, pickle)
        files[columns.file[row]] = pickle.memo_number(chunk.relative_path)
        done = row + 1


def _write_paths(metadata: DcpMetadata, pickle: _OpcodeCache) -> None:
    if metadata.paths is None:
        pickle.out.append(b"N")
        return
    pickle.out.append(b"}(")
    out = pickle.out
    for name, path in metadata.paths.items():
        out += (pickle[name], b"(")
        out += [_int_opcodes(step) if isinstance(step, int) else pickle[step] for step in path]
        out.append(b"t")
    pickle.out.append(b"u")


def _write_item_range(entry: DcpChunk | DcpValue, pickle: _OpcodeCache) -> None:
    out = pickle.out
    out += (pickle[_INFO], _BEGIN, pickle["relative_path"], pickle[entry.relative_path])
    out += (pickle["offset"], _int_opcodes(entry.offset), pickle["length"], _int_opcodes(entry.length))
    if entry.transforms:
        names = [pickle[text] for text in entry.transforms]
        out += [pickle["transform_descriptors"], b"](", *names, b"e"]
    out.append(_SET)


class _OpcodeCache(dict[str | tuple[str, str], bytes]):
    """Opcodes of texts and classes; must be written in the order of lookups.

    The first lookup returns opcodes that create the text or class and add it to the memo. Later
    lookups return a reference.

    Attributes:
        out: the opcodes written so far.
        sizes: opcodes of ``torch.Size`` values.
    """

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.sizes = _SizeOpcodes(self)
        self._numbered = 0
        self._calls: dict[tuple[str, str], bytes] = {}

    def __missing__(self, item: str | tuple[str, str]) -> bytes:
        if isinstance(item, tuple):
            module, name = item
            made = self[module] + self[name] + b"\x93\x94"
            self[item] = self._next()
            return made
        data = item.encode("utf-8", "surrogatepass")
        nbytes = len(data)
        self[item] = self._next()
        return b"\x8c%c%b\x94" % (nbytes, data) if nbytes < 256 else b"X%b%b\x94" % (nbytes.to_bytes(4, "little"), data)

    def call(self, function: tuple[str, str], argument: str | int) -> bytes:
        """Return the opcodes of a call with a text or a number. A function must always have the same argument."""
        known = self._calls.get(function)
        if known is not None:
            return known
        opcodes = (
            self[function] + (_int_opcodes(argument) if isinstance(argument, int) else self[argument]) + b"\x85R\x94"
        )
        self._calls[function] = self._next()
        return opcodes

    def optional(self, text: str | None) -> bytes:
        """Return the opcodes of a text or None."""
        return b"N" if text is None else self[text]

    def memo_number(self, text: str) -> int:
        """Return the memo number of a text that was written before."""
        return int.from_bytes(self[text][1:], "little")

    def _next(self) -> bytes:
        memo_number = self._numbered
        self._numbered += 1
        return _memo_opcodes(memo_number)


class _SizeOpcodes(dict[tuple[int, ...], bytes]):
    """Opcodes of ``torch.Size`` values by size."""

    def __init__(self, pickle: _OpcodeCache) -> None:
        self._pickle = pickle

    def __missing__(self, size: tuple[int, ...]) -> bytes:
        numbers = b"".join(map(_int_opcodes, size))
        count = len(size)
        pair = numbers + (b")", b"\x85", b"\x86", b"\x87")[count] if count < 4 else b"(" + numbers + b"t"
        made = self._pickle["torch", "Size"]
        self[size] = self._pickle["torch", "Size"] + pair + b"\x85R"
        return made + pair + b"\x85R"


def _int_opcodes(memo_number: int) -> bytes:
    """Return the opcodes of an int."""
    if 0 <= memo_number < 256:
        return _SMALL[memo_number]
    if 0 <= memo_number < 1 << 16:
        return b"M" + memo_number.to_bytes(2, "little")
    if -(1 << 31) <= memo_number < 1 << 31:
        return b"J" + struct.pack("<i", memo_number)
    return b"\x8a\x08" + struct.pack("<q", memo_number)


def _memo_opcodes(memo_number: int) -> bytes:
    """Return the opcodes of a reference to a memo entry."""
    return b"h" + bytes([memo_number]) if memo_number < 256 else b"j" + memo_number.to_bytes(4, "little")
