"""Reading a ``.metadata``."""

from __future__ import annotations

from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore_dcp.metadata.entries import DcpMetadata
from ckptcore_dcp.metadata.fast import FastObjects
from ckptcore_dcp.metadata.pickled import PickledMetadata
from ckptcore_dcp.pickles import ObjectReader, read_pickle

__all__ = ["read_fast", "read_metadata", "read_plainly"]


def read_metadata(data: bytes, *, key: str) -> DcpMetadata:
    """Read a ``.metadata``, every byte of which may be hostile.

    A chunk without a place is left out: a save whose writer failed leaves such chunks (pytorch issue 191391), and the
    other tensors can be loaded. A load checks that the chunks make up a tensor.

    Args:
        data: the file.
        key: its name, for errors.

    Raises:
        CorruptCheckpointError: if it is not one, a part lies outside of its tensor, or a file outside of the
            checkpoint.
        UnsupportedLeafError: if a tensor has a dtype that no array has.
    """
    try:
        return read_fast(data, key=key)
    except CheckpointError:
        return read_plainly(data, key=key)  # it decides if the file is wrong, and says how


def read_fast(data: bytes, *, key: str) -> DcpMetadata:
    """Read a ``.metadata`` with `FastObjects`; refuses a pickle that uses objects in another way than torch's."""
    reader = PickledMetadata(key, len(data))
    return _metadata(data, key, reader, FastObjects(data, reader.size).read)


def read_plainly(data: bytes, *, key: str) -> DcpMetadata:
    """Read a ``.metadata`` opcode by opcode."""
    return _metadata(data, key, PickledMetadata(key, len(data)), None)


def _metadata(data: bytes, key: str, reader: PickledMetadata, objects: ObjectReader | None) -> DcpMetadata:
    value, stop = read_pickle(data, key=key, objects=objects)
    if stop != len(data):
        raise CorruptCheckpointError(f"{key} has {len(data)} bytes, and its pickle ends at byte {stop}", key=key)
    return reader.metadata(value)
