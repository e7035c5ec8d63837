"""Reading a ``.metadata``, by rows where it is large and as torch writes it, else value by value."""

from __future__ import annotations

from typing import Final

from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore_dcp.metadata.entries import DcpMetadata
from ckptcore_dcp.metadata.pickled import PickledMetadata
from ckptcore_dcp.metadata.row_metadata import metadata_with_rows
from ckptcore_dcp.metadata.row_reading import MetadataRows
from ckptcore_dcp.pickles import Value, read_pickle
from ckptcore_dcp.pickles.rows import RowReader

__all__ = ["read_metadata"]

_LEAST_BYTES: Final = 5 << 14
"""In a shorter file looking for rows takes longer than reading them."""


def read_metadata(data: bytes, *, key: str, rows_from: int = _LEAST_BYTES) -> DcpMetadata:
    """What a ``.metadata`` says; every byte of it may be hostile.

    A chunk of which nothing says where it lies is left out: a save whose writer failed leaves such (pytorch issue 191391), and
    the other tensors can be loaded. Whether the chunks make up a tensor is known when it is loaded.

    Args:
        data: the file.
        key: its name, for errors.
        rows_from: how long a file is that is read by rows, in bytes. It makes no difference to what is found.

    Raises:
        CorruptCheckpointError: if it is not one, a part lies outside of its tensor, or a file outside of the checkpoint.
        UnsupportedLeafError: if a tensor has a dtype that no array has.
    """
    found = _by_rows(data, key) if len(data) >= rows_from else None
    return PickledMetadata(key, len(data)).metadata(_value(data, key, None)) if found is None else found


def _by_rows(data: bytes, key: str) -> DcpMetadata | None:
    """What it says; None where it is not as torch writes it, or wrong: the reader of values tells which."""
    rows = MetadataRows(data, key)
    try:
        return metadata_with_rows(_value(data, key, rows), rows, PickledMetadata(key, len(data)))
    except CheckpointError:
        return None


def _value(data: bytes, key: str, rows: RowReader | None) -> Value:
    value, stop = read_pickle(data, key=key, rows=rows)
    if stop != len(data):
        raise CorruptCheckpointError(f"{key} has {len(data)} bytes, and its pickle ends at byte {stop}", key=key)
    return value
