"""Encoder of many similar rows of pickle opcodes at once.

A row is a template: constant opcodes with columns of numbers between them. All rows form a matrix
of bytes in which each field has the width of its longest value. A mask selects the bytes in use;
these bytes, row after row, are the pickle. A number has 2, 3, 5 or 10 bytes: BININT1, BININT2,
BININT, or LONG1 with 8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptcore.model import HostArray

_BLOCK_ROWS: Final = 1 << 13
"""Rows encoded at a time, so that their matrix stays in the cache."""
_MAX_BY_OPCODE: Final = 4
"""From this number of items, a tuple uses MARK."""
_TUPLES: Final = np.frombuffer(b")\x85\x86\x87", np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class OpcodeField:
    """A part of every row.

    Attributes:
        data: bytes, of equal width for each row; a single row if all rows are equal.
        nbytes: number of leading bytes in use, per row; None: all.
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
    """Return the bytes of all rows, concatenated, and the offset of each row plus the end of the last."""
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
