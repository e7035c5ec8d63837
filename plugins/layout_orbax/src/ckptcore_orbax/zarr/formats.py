"""What the metadata of a zarr array says of it: its grid, the keys of its chunks, and how their elements lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

from ckptcore.model import JSON, ArraySpec
from ckptcore_orbax.zarr.documents import encode_document
from ckptcore_orbax.zarr.dtypes import ZarrFormat

__all__ = ["ArrayFormat", "ChunkKeys", "Compression", "CompressionName", "encode_metadata"]

_INDEX_ENTRY_BYTES: Final = 16
_CRC_BYTES: Final = 4


CompressionName: TypeAlias = Literal["zstd", "gzip", "blosc"]
"""The codecs that chunks can be compressed with."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How chunks are compressed.

    Attributes:
        name: the codec; ``blosc`` is blosc's own lz4 with a byte shuffle.
        level: as the codec counts; None for a usual one: of zstd the one that Orbax takes, which differs between
            zarr 2 and 3.
    """

    name: CompressionName
    level: int | None = None

    def __post_init__(self) -> None:
        lowest, highest = _LEVELS.get(self.name, (0, 0))
        if self.name not in _LEVELS:
            raise ValueError(f"Compression(name={self.name!r}): give one of {', '.join(_LEVELS)}")
        if self.level is not None and (type(self.level) is not int or not lowest <= self.level <= highest):
            raise ValueError(
                f"Compression({self.name!r}, level={self.level!r}): give a whole number from {lowest} to {highest}, "
                "or None"
            )


_LEVELS: Final[Mapping[str, tuple[int, int]]] = {"zstd": (-131072, 22), "gzip": (0, 9), "blosc": (0, 9)}
"""What TensorStore takes."""


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """How the keys of chunks are made.

    Attributes:
        encoding: ``default``: ``c`` and the index, so ``c/0/1``, and ``c`` where there are no axes; ``v2``: the index
            alone, so ``0.1``, and ``0`` where there are no axes.
        separator: between the parts.
    """

    encoding: Literal["default", "v2"]
    separator: Literal["/", "."]

    def key(self, index: tuple[int, ...]) -> str:
        """The key of a chunk, within the array."""
        if self.encoding == "default":
            return self.separator.join(["c", *map(str, index)])
        return self.separator.join(map(str, index)) or "0"


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """What the metadata of an array says.

    Chunks at the edge of an array are stored whole: what lies outside of the array is filled up with anything.

    Attributes:
        zarr_format: 2 for a ``.zarray``, 3 for a ``zarr.json``.
        spec: shape and dtype as they are stored.
        chunk: the write chunk, which one key holds, in elements per axis; at least 1 each.
        inner: the read chunk, which divides the write chunk; equal to it where `sharded` is false.
        sharded: whether a chunk holds inner chunks and an index of them (codec ``sharding_indexed``) that can be read.
        index_at: where in the chunk the index stands; means nothing where `sharded` is false.
        index_checksum: whether the CRC32C of the index stands behind it.
        direct: whether the elements of an inner chunk lie in it as they are: in C order, little endian, uncompressed.
        checksum: whether the CRC32C of the elements of an inner chunk stands behind them; only where `direct`.
        fill: the element, as in host memory, that stands for chunks that are missing; None where that is not stated.
        keys: how chunks are named.
        document: the metadata itself, as TensorStore takes it; never changed.
    """

    zarr_format: ZarrFormat
    spec: ArraySpec
    chunk: tuple[int, ...]
    inner: tuple[int, ...]
    sharded: bool
    index_at: Literal["end", "start"]
    index_checksum: bool
    direct: bool
    checksum: bool
    fill: bytes | None
    keys: ChunkKeys
    document: Mapping[str, JSON]

    @property
    def metadata_key(self) -> str:
        """The key of the metadata, within the array."""
        return "zarr.json" if self.zarr_format == 3 else ".zarray"

    def chunk_key(self, index: tuple[int, ...]) -> str:
        """The key of a write chunk, within the array."""
        return self.keys.key(index)

    @property
    def grid(self) -> tuple[int, ...]:
        """Write chunks along each axis; 0 where the array has no elements."""
        return tuple([-(-extent // size) for extent, size in zip(self.spec.shape, self.chunk, strict=True)])

    @property
    def inner_grid(self) -> tuple[int, ...]:
        """Inner chunks of one write chunk, along each axis."""
        return tuple([size // inner for size, inner in zip(self.chunk, self.inner, strict=True)])

    @property
    def inner_bytes(self) -> int:
        """Bytes of the elements of an inner chunk, without their checksum."""
        return prod(self.inner) * self.spec.numpy_dtype.itemsize

    @property
    def inner_stored_bytes(self) -> int:
        """Bytes of an inner chunk in its object, with its checksum; only where `direct`."""
        return self.inner_bytes + (_CRC_BYTES if self.checksum else 0)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of a chunk, with its checksum; 0 where `sharded` is false."""
        if not self.sharded:
            return 0
        return prod(self.inner_grid) * _INDEX_ENTRY_BYTES + (_CRC_BYTES if self.index_checksum else 0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the object of a chunk none of whose inner chunks is missing and that has no gaps; only where `direct`."""
        return prod(self.inner_grid) * self.inner_stored_bytes + self.index_bytes


def encode_metadata(format: ArrayFormat) -> bytes:
    """The bytes of the array's ``zarr.json`` or ``.zarray``."""
    return encode_document(format.document)
