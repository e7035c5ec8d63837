"""Frames: header and checksum around the body of each manifest and node of an OCDBT database.

``magic u32 big endian | length u64 LE of the whole frame | version varint 0 | compression varint |
body | crc32c u32 LE of all preceding bytes``.
"""

from __future__ import annotations

from typing import Final

import zstandard

from ckptcore.errors import ChecksumError, UnsupportedVersionError
from ckptcore_orbax.crc32c import crc32c_of
from ckptcore_orbax.ocdbt.cursor import ByteRange

MANIFEST_MAGIC: Final = bytes.fromhex("0cdb3a2a")
NODE_MAGIC: Final = bytes.fromhex("0cdb20de")

HEAD_BYTES: Final = 12
"""Length of magic and length field."""

_FOOT_BYTES: Final = 4
_MIN_BYTES: Final = HEAD_BYTES + 2 + _FOOT_BYTES

_ALWAYS_ALLOWED_BODY: Final = 4 << 20
_MAX_GROWTH: Final = 1000
_MAX_BODY: Final = (1 << 31) - 1
"""Limit for the size of a decompressed body, because zstd can expand its input up to 30,000 times.

The limit is the larger of `_ALWAYS_ALLOWED_BODY` and `_MAX_GROWTH` times the compressed size, but
at most `_MAX_BODY`. Nodes with similar keys compress only about 100 times.
"""

_SLICE: Final = 1024
"""Compressed bytes per step of the decompression.

A step yields at most 32 MiB: a zstd block has at least 4 bytes and expands to at most 128 KiB.
"""


def frame_length(head: bytes, magic: bytes, byte_range: ByteRange) -> int:
    """Return the length of a frame from its first bytes, `HEAD_BYTES` or more.

    Raises:
        CorruptCheckpointError: the data is too short, or does not begin with `magic`.
    """
    if len(head) < HEAD_BYTES:
        raise byte_range.damage_error(f"it ends after {len(head)} bytes, within the first {HEAD_BYTES}")
    if head[:4] != magic:
        raise byte_range.damage_error(f"it begins with {head[:4].hex()}, expected {magic.hex()}")
    return int.from_bytes(head[4:HEAD_BYTES], "little")


def decode_frame(data: bytes, magic: bytes, byte_range: ByteRange) -> bytes:
    """Return the body of a frame after checking its checksum.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError
    """
    stated = frame_length(data, magic, byte_range)
    if stated != len(data) or stated < _MIN_BYTES:
        raise byte_range.damage_error(f"it states a length of {stated} bytes and has {len(data)}")
    view = memoryview(data)
    stored = int.from_bytes(data[-_FOOT_BYTES:], "little")
    checksum = crc32c_of(view[:-_FOOT_BYTES])
    if checksum != stored:
        raise ChecksumError(
            f"{byte_range} has the checksum "
            f"{checksum:08x}, expected {stored:08x}; restore the checkpoint from a copy, or load another one",
            key=byte_range.key,
            start=byte_range.start,
            stop=byte_range.stop,
        )
    version, compression = data[HEAD_BYTES], data[HEAD_BYTES + 1]
    if version != 0:
        raise UnsupportedVersionError(
            f"{byte_range.key} contains an OCDBT {byte_range.noun} of version {version}, expected 0; "
            "load it with a newer ckptcore"
        )
    body = view[HEAD_BYTES + 2 : -_FOOT_BYTES]
    if compression == 0:
        return bytes(body)
    if compression == 1:
        return _decompress(body, byte_range)
    raise UnsupportedVersionError(
        f"{byte_range.key} contains an OCDBT {byte_range.noun} of compression {compression}, "
        "expected 0 (none) or 1 (zstd); load it with a newer ckptcore"
    )


def encode_frame(body: bytes, magic: bytes) -> bytes:
    """Return a frame with an uncompressed body. Readers accept it even if the database states a compression."""
    total = len(body) + _MIN_BYTES
    encoded = b"".join((magic, total.to_bytes(8, "little"), b"\0\0", body))
    return encoded + crc32c_of(encoded).to_bytes(_FOOT_BYTES, "little")


def _decompress(data: memoryview, byte_range: ByteRange) -> bytes:
    limit = min(_MAX_BODY, max(_ALWAYS_ALLOWED_BODY, _MAX_GROWTH * len(data)))
    try:
        stated = zstandard.frame_content_size(data)
        if stated > limit:
            raise byte_range.damage_error(
                f"its {len(data)} bytes would decompress to {stated}, expected at most {limit}"
            )
        # tensorstore compresses large nodes as a stream, whose zstd header states no decompressed size.
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        pieces = []
        total = 0
        for start in range(0, len(data), _SLICE):
            if decompressor.eof:
                raise byte_range.damage_error("bytes are left after the end of the compressed data")
            piece = decompressor.decompress(data[start : start + _SLICE])
            total += len(piece)
            if total > limit:
                raise byte_range.damage_error(f"its {len(data)} bytes decompress to more than {limit}")
            pieces.append(piece)
    except zstandard.ZstdError as error:
        raise byte_range.damage_error(f"it cannot be decompressed: {error}") from error
    if not decompressor.eof or decompressor.unused_data:
        raise byte_range.damage_error("the compressed data does not end where the frame ends")
    if stated >= 0 and total != stated:
        raise byte_range.damage_error(f"it decompresses to {total} bytes, but states {stated}")
    return b"".join(pieces)
