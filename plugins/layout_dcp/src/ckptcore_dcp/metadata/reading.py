"""Reader of ``.metadata``."""

from __future__ import annotations

from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore_dcp.metadata.entries import DcpMetadata
from ckptcore_dcp.metadata.fast import FastObjects
from ckptcore_dcp.metadata.pickled import PickledMetadata
from ckptcore_dcp.pickles import ObjectReader, read_pickle

__all__ = ["read_fast", "read_metadata", "read_plainly"]


def read_metadata(data: bytes, *, key: str) -> DcpMetadata:
    """Read ``.metadata``. Every byte may be hostile.

    Skips chunks without a location: a save whose writer failed leaves such chunks (pytorch issue
    191391), and the other tensors can still be loaded. Loading checks that chunks cover a tensor.

    Args:
        data: the file.
        key: its name, for errors.

    Raises:
        CorruptCheckpointError: it is not ``.metadata``, a chunk exceeds its tensor, or a file path
            leaves the checkpoint.
        UnsupportedLeafError: a tensor has a dtype that no array has.
    """
    try:
        return read_fast(data, key=key)
    except CheckpointError:
        return read_plainly(data, key=key)  # decides whether the file is corrupt, and reports why


def read_fast(data: bytes, *, key: str) -> DcpMetadata:
    """Read ``.metadata`` with `FastObjects`. Rejects pickles that use objects differently from torch."""
    reader = PickledMetadata(key, len(data))
    return _metadata(data, key, reader, FastObjects(data, reader.size).read)


def read_plainly(data: bytes, *, key: str) -> DcpMetadata:
    """Read ``.metadata`` opcode by opcode."""
    return _metadata(data, key, PickledMetadata(key, len(data)), None)


def _metadata(data: bytes, key: str, reader: PickledMetadata, objects: ObjectReader | None) -> DcpMetadata:
    value, stop = read_pickle(data, key=key, objects=objects)
    if stop != len(data):
        raise CorruptCheckpointError(f"{key} has {len(data)} bytes, but its pickle ends at byte {stop}", key=key)
    return reader.metadata(value)
