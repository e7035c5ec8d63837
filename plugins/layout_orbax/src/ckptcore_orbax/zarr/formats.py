"""Format of a zarr array: its grid, chunk keys and encoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

from ckptcore.model import JSON, ArraySpec
from ckptcore_orbax.zarr.documents import encode_document
from ckptcore_orbax.zarr.dtypes import ZarrFormat

_INDEX_ENTRY_BYTES: Final = 16
_CRC_BYTES: Final = 4


CompressionName: TypeAlias = Literal["zstd", "gzip", "blosc"]
"""Codecs for compressed chunks."""


@dataclass(frozen=True, slots=True)
class Compression:
    """Compression of chunks.

    Attributes:
        name: the codec; ``blosc`` is blosc's own lz4 with a byte shuffle.
        level: level of the codec; None for the default. For zstd this is the default of Orbax, which
            differs between zarr 2 and 3.
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
"""Levels that TensorStore accepts."""


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Encoding of chunk keys.

    Attributes:
        encoding: ``default``: ``c/0/1``, or ``c`` for an array without axes. ``v2``: ``0.1``, or ``0``.
        separator: separator of the parts.
    """

    encoding: Literal["default", "v2"]
    separator: Literal["/", "."]

    def key(self, index: tuple[int, ...]) -> str:
        """Return the key of a chunk, relative to the array."""
        if self.encoding == "default":
            return self.separator.join(["c", *map(str, index)])
        return self.separator.join(map(str, index)) or "0"


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """The metadata of an array.

    Chunks at the edge of an array are stored whole. Elements outside the array are arbitrary.

    Attributes:
        zarr_format: 2 for a ``.zarray``, 3 for a ``zarr.json``.
        spec: shape and dtype as stored.
        chunk: shape of a write chunk, which is stored under one key; at least 1 per axis.
        inner: shape of a read chunk, which divides the write chunk; equal to it if not `sharded`.
        sharded: whether a chunk contains inner chunks and a readable index of them (codec
            ``sharding_indexed``).
        index_at: position of the index in the chunk; unused if not `sharded`.
        index_checksum: whether the CRC32C of the index follows it.
        direct: whether inner chunks are raw elements: C order, little endian, uncompressed.
        checksum: whether the CRC32C of an inner chunk follows it; only if `direct`.
        fill: bytes of the element for missing chunks, in the host's byte order; None if not stated.
        keys: encoding of chunk keys.
        document: the metadata as accepted by TensorStore; never changed.
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
        """Key of the metadata, relative to the array."""
        return "zarr.json" if self.zarr_format == 3 else ".zarray"

    def chunk_key(self, index: tuple[int, ...]) -> str:
        """Return the key of a write chunk, relative to the array."""
        return self.keys.key(index)

    @property
    def grid(self) -> tuple[int, ...]:
        """Write chunks along each axis; 0 for arrays without elements."""
        return tuple([-(-extent // size) for extent, size in zip(self.spec.shape, self.chunk, strict=True)])

    @property
    def inner_grid(self) -> tuple[int, ...]:
        """Inner chunks of one write chunk, along each axis."""
        return tuple([size // inner for size, inner in zip(self.chunk, self.inner, strict=True)])

    @property
    def inner_bytes(self) -> int:
        """Size of an inner chunk in bytes, uncompressed and without its checksum."""
        return prod(self.inner) * self.spec.numpy_dtype.itemsize

    @property
    def inner_stored_bytes(self) -> int:
        """Stored size of an inner chunk in bytes, with its checksum; only if `direct`."""
        return self.inner_bytes + (_CRC_BYTES if self.checksum else 0)

    @property
    def index_bytes(self) -> int:
        """Size of the index of a chunk in bytes, with its checksum; 0 if not `sharded`."""
        if not self.sharded:
            return 0
        return prod(self.inner_grid) * _INDEX_ENTRY_BYTES + (_CRC_BYTES if self.index_checksum else 0)

    @property
    def chunk_bytes(self) -> int:
        """Stored size in bytes of a chunk that has all its inner chunks and no gaps; only if `direct`."""
        return prod(self.inner_grid) * self.inner_stored_bytes + self.index_bytes


def encode_metadata(format: ArrayFormat) -> bytes:
    """Return the content of the array's ``zarr.json`` or ``.zarray``."""
    return encode_document(format.document)
