"""Encodings of chunks: what changed between the old and the new elements, in few bytes. Pure functions.

An encoded chunk begins with the kind of its encoding (1 byte) and the XXH3-64 of its new elements (8 bytes). All
numbers are little endian. A chunk is encoded as *words*: unsigned integers of 1, 2, 4 or 8 bytes, one or several per
element.

=========== ==================================================================================================
kind        the bytes that follow
=========== ==================================================================================================
raw         the new words
planes      the new words as byte planes, one zstd frame
differences the difference of every word as byte planes, one zstd frame
sparse      the number of changed words (4 bytes), their gaps, and their differences as byte planes
packed      like sparse, with one zstd frame after the number
=========== ==================================================================================================

*Byte planes* are the lowest bytes of all words, then the second lowest, and so on. A *difference* is new minus old,
modulo the size of a word, in zigzag form: small differences of either sign become small numbers. A *gap* is the number
of equal words before a changed word: a byte 255 stands for 255 equal words and continues the gap, any other byte ends
it.
"""

from __future__ import annotations

import struct
import sys
from math import gcd
from typing import Any, Final

import numpy as np
from xxhash import xxh3_64_intdigest

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, HostArray, sort_of_numbers

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_RAW: Final = 0
_PLANES: Final = 1
_DIFFERENCES: Final = 2
_SPARSE: Final = 3
_PACKED: Final = 4

_HEAD: Final = struct.Struct("<BQ")
_COUNT: Final = struct.Struct("<I")

HEAD_BYTES: Final = _HEAD.size
"""An encoded chunk has at most this number of bytes more than its elements."""

_LEVEL: Final = 1
"""The level of zstd. Higher levels are slower and save less than 1 % of these bytes."""

_WINDOW_LOG: Final = 23
"""Frames with a larger window, in powers of 2 of bytes, are refused before zstd takes memory for it."""

_WORTHWHILE: Final = 0.7
"""If an encoding has a larger part of the bytes of the elements, the new words are also tried without the old ones."""

_END: Final = 255
"""Gaps are written in this base: a byte with this value continues the gap."""


def word_bytes(spec: ArraySpec) -> int:
    """Return the size of the words of an array. A complex number has two words or more."""
    itemsize = spec.numpy_dtype.itemsize
    return gcd(itemsize // 2 if sort_of_numbers(spec.dtype) == "complex" else itemsize, 8)


def words_of(array: HostArray, nbytes: int) -> HostArray:
    """Return the memory of a C-contiguous array as words of `nbytes` bytes: a view with one axis."""
    return array.reshape(-1).view(np.uint8).view(f"<u{nbytes}")


def encode(old: HostArray | None, new: HostArray) -> bytes:
    """Encode the new words of a chunk. Return no bytes if they are equal to the old words.

    Args:
        old, new: words of equal number and size, see `words_of`; `old` is None if there are no old words.
    """
    best = b""
    if old is not None:
        differs = old != new
        count = int(np.count_nonzero(differs))
        if not count:
            return b""
        best = _encode_all(old, new) if 2 * count > new.size else _encode_changed(old, new, np.flatnonzero(differs))
    if old is None or len(best) > _WORTHWHILE * new.nbytes:
        planes = _encoded(_PLANES, new, _compressed(_planes(new)))
        best = planes if old is None or len(planes) < len(best) else best
        if len(best) >= _HEAD.size + new.nbytes:
            return _encoded(_RAW, new, new.tobytes())
    return best


def _encode_all(old: HostArray, new: HostArray) -> bytes:
    return _encoded(_DIFFERENCES, new, _compressed(_planes(_zigzag(new - old))))


def _encode_changed(old: HostArray, new: HostArray, at: HostArray) -> bytes:
    """Encode the words at ascending positions. All others are equal."""
    plain = _gaps(at).tobytes() + _planes(_zigzag(new[at] - old[at])).tobytes()
    packed = _compressed(plain)
    kind, content = (_PACKED, packed) if len(packed) < len(plain) else (_SPARSE, plain)
    return _encoded(kind, new, _COUNT.pack(at.size) + content)


def _encoded(kind: int, new: HostArray, content: bytes) -> bytes:
    return _HEAD.pack(kind, xxh3_64_intdigest(_bytes(new))) + content


def decode(encoded: memoryview, words: HostArray, *, has_old: bool = True, is_whole: bool = True) -> None:
    """Replace the old words of a chunk by the new ones, in place. The encoded bytes may be hostile.

    Takes at most a few times the memory of the words. After an error, the words are undefined.

    Args:
        encoded: the result of `encode`; not empty.
        words: writable words.
        has_old: False if the words have no old values: only encodings that do not need them are accepted.
        is_whole: False if only some of the words have their old values, so that the digest cannot be compared.

    Raises:
        CorruptCheckpointError: the bytes are damaged, or the words differ from those that were encoded.
    """
    if len(encoded) < _HEAD.size:
        raise _damaged(f"it has {len(encoded)} bytes")
    kind, digest = _HEAD.unpack_from(encoded)
    content = encoded[_HEAD.size :]
    if kind == _RAW:
        if len(content) != words.nbytes:
            raise _damaged(f"expected {words.nbytes} bytes of elements, found {len(content)}")
        words[...] = np.frombuffer(content, words.dtype)
    elif kind == _PLANES:
        words[...] = _joined(_decompressed(content, words.nbytes, words.nbytes), words.dtype)
    elif not has_old:
        raise _damaged(f"the base does not have the array, but the encoding {kind} needs it")
    elif kind == _DIFFERENCES:
        words += _unzigzag(_joined(_decompressed(content, words.nbytes, words.nbytes), words.dtype))
    elif kind in (_SPARSE, _PACKED):
        _apply_changes(content, words, is_packed=kind == _PACKED)
    else:
        raise _damaged(f"unknown encoding {kind}")
    if is_whole and (found := xxh3_64_intdigest(_bytes(words))) != digest:
        raise CorruptCheckpointError(
            f"the elements of a chunk differ from those that were saved: expected XXH3-64 {digest:016x}, found "
            f"{found:016x}. The base or the differences are damaged; load another checkpoint"
        )


def _apply_changes(content: memoryview, words: HostArray, *, is_packed: bool) -> None:
    if len(content) < _COUNT.size:
        raise _damaged("the number of changed words is missing")
    (count,) = _COUNT.unpack_from(content)
    if not 1 <= count <= words.size:
        raise _damaged(f"expected 1 to {words.size} changed words, found {count}")
    content = content[_COUNT.size :]
    least = count * (1 + words.itemsize)
    most = least + words.size // _END
    plain: bytes | memoryview = _decompressed(content, least, most) if is_packed else content
    if not least <= len(plain) <= most:
        raise _damaged(f"expected {least} to {most} bytes for {count} changed words, found {len(plain)}")
    gap_bytes = len(plain) - count * words.itemsize
    at = _positions(np.frombuffer(plain, np.uint8, gap_bytes), count, words.size)
    words[at] += _unzigzag(_joined(memoryview(plain)[gap_bytes:], words.dtype))


def _gaps(at: HostArray) -> HostArray:
    """Return the gaps before ascending positions, as bytes."""
    gaps = at.copy()
    gaps[1:] -= at[:-1] + 1
    if int(gaps.max()) < _END:
        return gaps.astype(np.uint8)
    continued, rest = np.divmod(gaps, _END)
    ends = np.cumsum(continued + 1) - 1
    encoded = np.full(int(ends[-1]) + 1, _END, np.uint8)
    encoded[ends] = rest
    return encoded


def _positions(gaps: HostArray, count: int, size: int) -> HostArray:
    """Return the ascending positions that follow from gaps.

    Raises:
        CorruptCheckpointError: there are not `count` gaps, or a position is not below `size`.
    """
    ends = gaps != _END
    if np.count_nonzero(ends) != count or not ends[-1]:
        raise _damaged(f"expected {count} gaps, found {np.count_nonzero(ends)}")
    sums = np.cumsum(gaps, dtype=np.uint32)  # at most 255 times the bytes of a chunk
    at = (sums if gaps.size == count else sums[ends]) + np.arange(count, dtype=np.uint32)
    if int(at[-1]) >= size:
        raise _damaged(f"a changed word is at {at[-1]} of {size}")
    return at


def _planes(words: HostArray) -> HostArray:
    """Return byte planes, C-contiguous."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T)


def _joined(planes: bytes | memoryview, dtype: np.dtype[Any]) -> HostArray:
    """Return the words of byte planes."""
    columns = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(columns.T).reshape(-1).view(dtype)


def _zigzag(differences: HostArray) -> HostArray:
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)


def _unzigzag(words: HostArray) -> HostArray:
    return (words >> 1) ^ -(words & 1)


def _compressed(data: HostArray | bytes) -> bytes:
    return zstd.compress(data if isinstance(data, bytes) else _bytes(data), _LEVEL)


def _decompressed(frame: memoryview, least: int, most: int) -> bytes:
    """Return the content of one frame, which has `least` to `most` bytes. Takes no memory for more.

    Raises:
        CorruptCheckpointError
    """
    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
    try:
        content = decompressor.decompress(frame, max_length=most + 1)
    except zstd.ZstdError as error:
        raise _damaged(f"its zstd frame cannot be read ({error})") from error
    if not least <= len(content) <= most or not decompressor.eof or decompressor.unused_data:
        raise _damaged(f"expected one zstd frame of {least} to {most} bytes, found {len(content)} or more")
    return content


def _bytes(words: HostArray) -> memoryview:
    # NumPy's stubs declare the buffer protocol only for Python 3.12 and later.
    return memoryview(words.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _damaged(reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"an encoded chunk is damaged: {reason}. Restore the checkpoint from a copy, or load another one"
    )
