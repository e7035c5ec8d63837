"""Decompression of files that are compressed as a whole, into temporary files."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.temporary import TemporaryFile

_BLOCK_BYTES: Final = 4 << 20
_MAX_GROWTH: Final = 50
"""Maximum ratio of content to file size. Trained models compress less; a small hostile file can expand to terabytes."""
_ALWAYS_ALLOWED_BYTES: Final = 1 << 30


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Codec(NamedTuple):
    """A method of compression.

    Attributes:
        name: its name.
        magic: the first bytes of a file.
        make: returns a decompressor of one stream.
        errors: the errors of damaged data.
    """

    name: str
    magic: bytes
    make: Callable[[], _Decompressor]
    errors: tuple[type[Exception], ...]


class _ZlibStream:
    """Decompressor of zlib with the methods of `bz2.BZ2Decompressor`. Not thread-safe."""

    def __init__(self, window_bits: int) -> None:
        self._inner = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


_CODECS: Final = (
    Codec("gzip", b"\x1f\x8b", lambda: _ZlibStream(31), (zlib.error,)),
    Codec("bzip2", b"BZh", bz2.BZ2Decompressor, (OSError, ValueError)),
    Codec("xz", b"\xfd7zXZ\x00", lzma.LZMADecompressor, (lzma.LZMAError,)),
    Codec("lzma", b"\x5d\x00\x00", lzma.LZMADecompressor, (lzma.LZMAError,)),
    Codec("zlib", b"\x78", lambda: _ZlibStream(15), (zlib.error,)),
)


def codec_of(head: bytes) -> Codec | None:
    """Return the method of compression of a file with these first bytes, or None."""
    for codec in _CODECS:
        # The first two bytes of zlib data, as a big-endian number, are a multiple of 31 (RFC 1950).
        if head.startswith(codec.magic) and (codec.name != "zlib" or int.from_bytes(head[:2], "big") % 31 == 0):
            return codec
    return None


def most_content_bytes(size: int) -> int:
    """Return the maximum length of the content, in bytes, for a file of `size` compressed bytes."""
    return max(_ALWAYS_ALLOWED_BYTES, _MAX_GROWTH * size)


def decompressed_head(codec: Codec, head: bytes, nbytes: int) -> bytes:
    """Decompress `head`, the first bytes of a file, to at most `nbytes` bytes. Return no bytes if it is damaged."""
    try:
        return codec.make().decompress(head, nbytes)
    except codec.errors:
        return b""


def decompressed(codec: Codec, fetch: Callable[[int, int], bytes], size: int, key: str) -> tuple[TemporaryFile, int]:
    """Return a temporary file with the content of a file, and its length in bytes.

    Args:
        codec: the method of compression.
        fetch: reads the file.
        size: length of the file, in bytes.
        key: the file, for errors.

    Raises:
        CorruptCheckpointError: it cannot be decompressed.
        UnsupportedLeafError: the content is too long.
        StorageError: the temporary directory is full.
    """
    file = TemporaryFile(f"of {key}, which is compressed by {codec.name}")
    length = 0
    try:
        for block in _blocks(codec, fetch, size, key):
            length += len(block)
            if length > most_content_bytes(size):
                raise UnsupportedLeafError(
                    f"{key!r} has {size} bytes, and more than {length} after decompression by {codec.name}, which is "
                    "too much for a temporary copy: decompress it, and load the result"
                )
            file.write(block)
    except BaseException:
        file.close()
        raise
    return file, length


def _blocks(codec: Codec, fetch: Callable[[int, int], bytes], size: int, key: str) -> Iterator[bytes]:
    """Yield the content in blocks. Several streams may follow one another, as gzip and xz allow."""
    position, data, stream = 0, b"", codec.make()
    while True:
        block = b""
        if not stream.eof:
            try:
                block = stream.decompress(data, _BLOCK_BYTES)
            except codec.errors as error:
                raise _damaged(codec, key, str(error)) from error
            data = b""
        if block:
            yield block
            continue
        if stream.eof:
            data = stream.unused_data
        if not data and position < size:
            data = fetch(position, min(position + _BLOCK_BYTES, size))
            if not data:
                raise _damaged(codec, key, f"the file has {position} of {size} bytes")
            position += len(data)
        if stream.eof and data.startswith(codec.magic):
            stream = codec.make()
        elif stream.eof:
            return  # the end, or padding
        elif not data:
            raise _damaged(codec, key, "it is cut off")


def _damaged(codec: Codec, key: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key!r} cannot be decompressed by {codec.name}: {reason}; restore it from a copy, or load another checkpoint",
        key=key,
    )
