"""The codec chain of a ``zarr.json``, which encodes the chunks of an array."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON
from ckptcore_orbax.zarr.documents import expect, parse_chunk_shape
from ckptcore_orbax.zarr.dtypes import dtype_of_version2
from ckptcore_orbax.zarr.formats import ArrayFormat, Compression

_Codec: TypeAlias = tuple[str, dict[str, JSON] | None]
"""Name and configuration. The configuration is None if the codec has members other than these two."""

_INDEX_CODECS: Final[Sequence[JSON]] = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
)


@dataclass(frozen=True, slots=True)
class ChunkCodecs:
    """Properties of a codec chain that readers need to find and read inner chunks.

    Attributes:
        inner, sharded, index_at, index_checksum, direct, checksum: as in `ArrayFormat`.
        inner_codecs: the codec chain of an inner chunk.
    """

    inner: tuple[int, ...]
    sharded: bool
    index_at: Literal["end", "start"]
    index_checksum: bool
    direct: bool
    checksum: bool
    inner_codecs: JSON


def chunk_codecs(value: JSON, chunk: tuple[int, ...], itemsize: int) -> ChunkCodecs:
    """Return the properties of a codec chain for chunks of this shape. Unknown chains are neither direct nor sharded.

    Raises:
        CorruptCheckpointError: it is not a codec chain, or inner chunks do not divide the chunk.
    """
    chain = _without_identities(_chain(value), len(chunk))
    if len(chain) == 1 and chain[0][0] == "sharding_indexed" and chain[0][1] is not None:
        sharding = _sharding(chain[0][1], chunk, itemsize)
        if sharding is not None:
            return sharding
    raw = _raw(chain, itemsize)
    return ChunkCodecs(chunk, False, "end", False, raw is not None, raw == "checksum", value)


def codec_names(value: JSON) -> list[str]:
    """Return the names of the codecs of a chain, which must be valid."""
    return [name for name, _ in _chain(value)]


def _last_compressor(value: JSON) -> str:
    """Return the name of the last codec that is not a checksum. The chain must be valid."""
    names = codec_names(value)
    while len(names) > 1 and names[-1] == "crc32c":
        names.pop()
    return names[-1]


def codecs_to_json(
    chunk: tuple[int, ...],
    inner: tuple[int, ...],
    itemsize: int,
    *,
    checksum: bool,
    compression: Compression | None,
) -> list[JSON]:
    """Return the codec chain for little-endian elements, sharded if inner chunks are smaller."""
    codecs: list[JSON] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}
    ]
    if compression is not None:
        codecs.append(_compressor(compression, itemsize))
    if checksum:
        codecs.append({"name": "crc32c"})
    if inner == chunk:
        return codecs
    return [
        {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": list(inner), "codecs": codecs, "index_codecs": list(_INDEX_CODECS)},
        }
    ]


def _compressor(compression: Compression, itemsize: int) -> JSON:
    level = compression.level
    match compression.name:
        case "zstd":
            # The default level of Orbax 0.12.8.
            return {"name": "zstd", "configuration": {"level": 3 if level is None else level, "checksum": False}}
        case "gzip":
            return {"name": "gzip", "configuration": {"level": 1 if level is None else level}}
        case "blosc":
            clevel = 5 if level is None else level
            return {
                "name": "blosc",
                "configuration": {
                    "cname": "lz4",
                    "clevel": clevel,
                    "shuffle": "shuffle",
                    "typesize": itemsize,
                    "blocksize": 0,
                },
            }


def _chain(value: JSON) -> list[_Codec]:
    codecs = expect(value, list, "its list of codecs")
    if not codecs:
        raise CorruptCheckpointError("its list of codecs is empty")
    return [_codec(codec) for codec in codecs]


def _codec(value: JSON) -> _Codec:
    if isinstance(value, str):  # the short form of zarr 3.1
        return value, {}
    members = expect(value, dict, "a codec")
    name = expect(members.get("name"), str, "the name of a codec")
    configuration = expect(members.get("configuration", {}), dict, f"the configuration of the codec {name[:40]!r}")
    return name, configuration if members.keys() <= {"name", "configuration"} else None


def _without_identities(chain: list[_Codec], axes: int) -> list[_Codec]:
    """Return the chain without leading transpositions that change nothing."""
    identities: list[JSON] = [{"order": list(range(axes))}, {"order": "C"}]
    if axes < 2:
        identities.append({"order": "F"})
    first = 0
    while first < len(chain) and chain[first][0] == "transpose" and chain[first][1] in identities:
        first += 1
    return chain[first:]


def _raw(chain: list[_Codec], itemsize: int) -> Literal["plain", "checksum"] | None:
    """Return ``plain`` for raw little-endian elements, ``checksum`` if a CRC32C follows them, else None."""
    if not chain or chain[0][0] != "bytes":
        return None
    endian = chain[0][1]
    if endian != {"endian": "little"} and not (itemsize == 1 and endian in ({}, {"endian": "big"})):
        return None
    if len(chain) == 1:
        return "plain"
    return "checksum" if chain[1:] == [("crc32c", {})] else None


def _sharding(configuration: dict[str, JSON], chunk: tuple[int, ...], itemsize: int) -> ChunkCodecs | None:
    """Return the properties of ``sharding_indexed``, or None if its index cannot be read."""
    inner = parse_chunk_shape(configuration.get("chunk_shape"), chunk, "its inner chunk")
    if any(size % part for size, part in zip(chunk, inner, strict=True)):
        raise CorruptCheckpointError(f"its inner chunk {inner} does not divide its chunk {chunk}")
    location = expect(configuration.get("index_location", "end"), str, "its index_location")
    if location not in ("end", "start"):
        raise CorruptCheckpointError(f"its index_location is {location[:80]!r}; expected 'end' or 'start'")
    codecs = configuration.get("codecs")
    chain = _chain(codecs)
    index = _raw(_chain(configuration.get("index_codecs")), 8)
    if index is None or not configuration.keys() <= {"chunk_shape", "codecs", "index_codecs", "index_location"}:
        return None
    raw = _raw(_without_identities(chain, len(chunk)), itemsize)
    return ChunkCodecs(
        inner=inner,
        sharded=True,
        index_at="start" if location == "start" else "end",
        index_checksum=index == "checksum",
        direct=raw is not None,
        checksum=raw == "checksum",
        inner_codecs=codecs,
    )


_SIZE: Final = slice(4, 8)
"""Position of the uncompressed size in a blosc chunk, little endian (c-blosc 1, README_CHUNK_FORMAT)."""


def is_blosc(inner: ArrayFormat) -> bool:
    """Return whether a chunk of this format begins with a blosc header.

    False if another compressor or a nested shard encloses the blosc data and hides its header.

    Args:
        inner: the format of one inner chunk, from `inner_array`.
    """
    if inner.zarr_format == 3:
        return _last_compressor(inner.document["codecs"]) == "blosc"
    compressor = inner.document["compressor"]
    return isinstance(compressor, dict) and compressor.get("id") == "blosc"


_PADDED: Final = frozenset(["bool", "float4_e2m1fn", "int2", "int4"])
"""Dtypes of fewer than 8 bits, whose bytes tensorstore checks or extends."""


class FrameFormat(NamedTuple):
    """Settings of a chunk that is a zstd frame.

    Attributes:
        level: level of zstd.
        checksum: whether the frame ends in a checksum of its elements.
        crc32c: whether the CRC32C of the frame follows it.
    """

    level: int
    checksum: bool
    crc32c: bool


def frame_format(inner: ArrayFormat) -> FrameFormat | None:
    """Return the settings of a chunk that is a zstd frame of elements in C order, little endian; None for any other.

    Args:
        inner: the format of one inner chunk, from `inner_array`.
    """
    document = inner.document
    if inner.spec.dtype in _PADDED or sys.byteorder != "little":
        return None
    crc32c = False
    if inner.zarr_format == 3:
        chain = _without_identities(_chain(document["codecs"]), len(inner.chunk))
        if crc32c := chain[-1:] == [("crc32c", {})]:
            chain.pop()
        if not chain or chain[-1][0] != "zstd" or _raw(chain[:-1], inner.spec.numpy_dtype.itemsize) != "plain":
            return None
        settings = chain[-1][1]
        if settings is None or not settings.keys() <= {"level", "checksum"}:
            return None
    else:
        compressor = document["compressor"]
        is_plain = not document["filters"] and (document["order"] == "C" or len(inner.chunk) < 2)
        if not isinstance(compressor, dict) or compressor.get("id") != "zstd" or not is_plain:
            return None
        if dtype_of_version2(document["dtype"])[1] != "little":
            return None
        settings = compressor
    level = settings.get("level", 0)  # 0: the default of zstd
    return FrameFormat(level if type(level) is int else 0, settings.get("checksum") is True, crc32c)


def is_framed(inner: ArrayFormat) -> bool:
    """Return whether a chunk of this format is only a zstd frame; see `frame_format`."""
    frame = frame_format(inner)
    return frame is not None and not frame.crc32c


def expect_blosc_size(inner: ArrayFormat, data: bytes, name: str) -> None:
    """Reject a chunk whose blosc header states a larger uncompressed size than that of an inner chunk.

    A header can state up to 2 GiB. tensorstore 0.1.86 checks the size only after decoding, and
    aborts the process if memory is insufficient.

    Args:
        inner: format from `inner_array`, for which `is_blosc` holds.
        data: the chunk.
        name: name of the array, for errors.

    Raises:
        CorruptCheckpointError
    """
    nbytes = int.from_bytes(data[_SIZE], "little")
    if nbytes > inner.inner_bytes:
        raise CorruptCheckpointError(
            f"{name!r} cannot be decoded: a chunk states {nbytes} bytes; expected at most {inner.inner_bytes}; "
            "restore the checkpoint from a copy, or load another one"
        )


def max_encoded_bytes(nbytes: int) -> int:
    """Return the maximum size of an encoded read chunk of `nbytes`.

    zstd expands incompressible data by 1/256, and small inputs by up to 64 bytes
    (``ZSTD_COMPRESSBOUND``); blosc adds up to 16 bytes (``BLOSC_MAX_OVERHEAD``). A zstd
    frame has a header of up to 18 bytes, and each block of 128 KiB has a header of 3 bytes. A
    checksum has 4 bytes.
    """
    return nbytes + nbytes // 256 + 128
