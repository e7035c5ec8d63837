"""Arrays mapped into memory, and the file ranges that allow it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import numpy as np

from ckptcore.builtin.local_files import LocalFile
from ckptcore.errors import CorruptCheckpointError, NotMappableError
from ckptcore.io.chunk_reads import native_reader
from ckptcore.io.elements import is_little
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord

__all__ = [
    "PlainPlace",
    "find_plain_place",
    "map_array",
]


@dataclass(frozen=True, slots=True)
class PlainPlace:
    """Where all elements of an array are, uncompressed, little endian and in C order.

    Attributes:
        key: the object.
        offset: of the first element in it, in bytes.
        is_sealed: whether a checksum of them stands right behind them.
    """

    key: str
    offset: int
    is_sealed: bool


def find_plain_place(opened: Checkpoint, leaf: int) -> PlainPlace | None:
    """Return the place of an array; None if it is compressed, in several chunks, or in no known place.

    Raises:
        CorruptCheckpointError: the metadata that describes the place is damaged.
    """
    record = opened.tree.leaves[leaf]
    if not isinstance(record, ArrayRecord) or not record.spec.size or opened.copies or opened.derived:
        return None
    leaf = opened.tree.aliases.get(leaf, leaf)
    whole = Box.whole(record.spec.shape)
    index = opened.index
    chunks = iter(index.boxes(leaf, whole))
    chunk = next(chunks, None)
    if chunk is None or not chunk.is_plain or chunk.box != whole or next(chunks, None) is not None:
        return None
    if chunk.is_exact:
        return PlainPlace(chunk.key, chunk.offset, False)
    native = native_reader(index)
    if native is not None and native.reads(leaf, opened.store):
        return None
    places = index.locate([chunk], opened.store)
    if places.encoded or places.inline or places.fills:
        return None
    return PlainPlace(places.keys[0], places.starts[0], bool(places.checksums))


_FILE: Final = "file://"


def map_array(opened: Checkpoint, leaf: int, spec: ArraySpec, name: str) -> HostArray:
    """Map an array. Its file stays mapped, and on the disk, until the last view of it is gone.

    Args:
        opened: the checkpoint.
        leaf: the number of the array.
        spec: of it.
        name: of it, for errors.

    Raises:
        NotMappableError: says why it cannot be.
        CorruptCheckpointError: if the file ends before it does.
    """
    address = opened.store.address
    if address is None or not address.url.startswith(_FILE):
        raise _refusal(
            opened, name, "is not on a local disk" if address is None else f"is at {address.url}, not on a local disk"
        )
    if not spec.size:
        return np.ndarray(spec.shape, spec.numpy_dtype, b"")
    if not is_little(spec.numpy_dtype):
        raise _refusal(opened, name, "has another byte order in files than this machine has in memory")
    place = find_plain_place(opened, leaf)
    if place is None:
        raise _refusal(
            opened,
            name,
            f"does not stand in one file as it is in memory: the layout {opened.layout.name} has it compressed, or in pieces",
        )
    root = unquote(address.url.removeprefix(_FILE), errors="surrogateescape").rstrip("/") or "/"
    file = LocalFile(place.key, f"{root}/{place.key}", os.path.dirname(root))
    stop = place.offset + spec.nbytes
    if stop > file.status.st_size:
        raise CorruptCheckpointError(
            f"{place.key!r} is too short: expected bytes {place.offset} to {stop}, found {file.status.st_size} bytes in all; it was cut "
            "off, restore it from a copy, or load another checkpoint",
            key=place.key, start=min(place.offset, file.status.st_size), stop=stop,
        )  # fmt: skip
    return np.ndarray(spec.shape, spec.numpy_dtype, file.map(), place.offset)


def _refusal(opened: Checkpoint, name: str, reason: str) -> NotMappableError:
    return NotMappableError(
        f"{name} of {opened.location.display} cannot be mapped into memory: it {reason}; read it by indexing, as array[...], or convert "
        "the checkpoint to safetensors on a local disk"
    )
