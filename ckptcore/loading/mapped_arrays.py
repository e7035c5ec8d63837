"""Arrays mapped into memory, and the file ranges that allow it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import unquote

import numpy as np

from ckptcore.builtin.local_files import LocalFile
from ckptcore.errors import CorruptCheckpointError, NotMappableError
from ckptcore.io.elements import is_little
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import TileRead
from ckptcore.planning import plan_read
from ckptcore.protocols import Layout, PlacesTiles, ReadStore, StorageAddress

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
    """The place of an array; None where it is compressed, in several pieces, or in no place that is told.

    What a layout says of tiles need only be true most times, so where it does not vouch for a tile, that is only a first look. What
    it reads is asked by a plan of one element, from a store that notes it.

    Raises:
        CorruptCheckpointError: if what says where it is makes no sense.
    """
    record = opened.tree.leaves[leaf]
    layout = opened.layout
    if not isinstance(record, ArrayRecord) or not _places_tiles(type(layout)) or opened.copies or opened.derived:
        return None
    if not record.spec.size:
        return None
    leaf = opened.tree.aliases.get(leaf, leaf)
    shape = record.spec.shape
    whole = Box.whole(shape)
    tiles = iter(cast(PlacesTiles, layout).tiles(opened.tree, opened.state, leaf))
    tile = next(tiles, None)
    if tile is None or not tile.is_plain or tile.box != whole or next(tiles, None) is not None:
        return None
    if tile.is_exact:
        return PlainPlace(tile.key, tile.offset, False)
    first = Box((0,) * len(shape), (1,) * len(shape))
    store = _Noting(opened.store)
    for _ in layout.read(
        plan_read(opened.tree, opened.state, [(leaf, [first])]), [np.empty(first.shape, record.spec.numpy_dtype)], store
    ):
        pass
    reads = store.noted
    if len(reads) != 1 or reads[0].box != whole or reads[0].itemsize != record.spec.numpy_dtype.itemsize:
        return None
    return PlainPlace(reads[0].key, reads[0].offset, reads[0].checksum is not None)


@functools.lru_cache(maxsize=64)
def _places_tiles(kind: type[Layout]) -> bool:
    """Whether layouts of a type say where tiles are. Kept, for it is slow to find out and asked for each array."""
    return issubclass(kind, PlacesTiles)


class _Noting:
    """A `ReadStore` that notes which tiles are read, and reads none of them."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self.noted: list[TileRead] = []

    @property
    def address(self) -> StorageAddress | None:
        return self._store.address

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.get(key, start, stop)

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        return self._store.get_many(ranges)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list_names(self, prefix: str = "") -> Sequence[str]:
        return self._store.list_names(prefix)

    def read_tiles(self, reads: Sequence[TileRead]) -> Iterator[int]:
        self.noted.extend(reads)
        yield from dict.fromkeys([number for read in reads for number, _, _ in read.targets])


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
