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
of equal words before a changed word, as the sum of its bytes: a byte 255 is followed by another byte of the same gap,
any other byte is its last.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Iterable, Sequence
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


def encode(old: HostArray | None, new: HostArray, stops: Sequence[int]) -> list[bytes]:
    """Encode the new words of adjacent chunks. The result is empty for a chunk that is equal to its old words.

    Args:
        old, new: words of equal number and size, see `words_of`; `old` is None if there are no old words.
        stops: the end of each chunk, ascending. The first chunk begins at 0.
    """
    ends = [0, *stops]
    compressor = zstd.ZstdCompressor(_LEVEL)  # a new one for each chunk would take half of the time
    if old is None:
        return [_smallest(None, new[start:stop], compressor) for start, stop in itertools.pairwise(ends)]
    differences = new - old
    differs = differences != 0  # the positions of true elements are found eight times as fast as those of numbers
    if 2 * int(np.count_nonzero(differs)) > new.size:  # positions of most words would take much memory
        return [_encode_all(old[start:stop], new[start:stop], compressor) for start, stop in itertools.pairwise(ends)]
    at = differs.nonzero()[0]
    bounds = np.searchsorted(at, ends)
    gaps = at.copy()
    gaps[1:] -= at[:-1] + 1
    has_changes = bounds[1:] > bounds[:-1]
    first = bounds[:-1][has_changes]
    gaps[first] = at[first] - np.array(ends[:-1])[has_changes]
    gap_bytes, gap_ends = _gap_bytes(gaps)
    planes = [_bytes(plane) for plane in _planes(_zigzag(differences.take(at)))]
    encoded = []
    for (start, stop), (low, high) in zip(itertools.pairwise(ends), itertools.pairwise(bounds.tolist()), strict=True):
        if low == high:
            encoded.append(b"")
        elif 2 * (high - low) > stop - start:
            encoded.append(_encode_all(old[start:stop], new[start:stop], compressor))
        else:
            of_gaps = gap_bytes[gap_ends[low] : gap_ends[high]]
            parts = [of_gaps, *[plane[low:high] for plane in planes]]
            encoded.append(
                _smallest(_encode_changed(high - low, parts, new[start:stop], compressor), new[start:stop], compressor)
            )
    return encoded


def _encode_all(old: HostArray, new: HostArray, compressor: zstd.ZstdCompressor) -> bytes:
    """Encode a chunk of which most words changed; empty if it is equal."""
    if np.array_equal(old, new):
        return b""
    planes = map(_bytes, _planes(_zigzag(new - old)))
    return _smallest(_encoded(_DIFFERENCES, new, _compressed(planes, compressor)), new, compressor)


def _encode_changed(count: int, parts: Sequence[memoryview], new: HostArray, compressor: zstd.ZstdCompressor) -> bytes:
    """Encode a chunk of which `count` words changed. `parts` are their gaps, and the planes of their differences."""
    packed = _compressed(parts, compressor)
    if len(packed) < sum(map(len, parts)):
        return _encoded(_PACKED, new, _COUNT.pack(count) + packed)
    return _encoded(_SPARSE, new, b"".join([_COUNT.pack(count), *parts]))


def _smallest(encoded: bytes | None, new: HostArray, compressor: zstd.ZstdCompressor) -> bytes:
    """Return the smallest of an encoding and the encodings without old words."""
    if encoded is None or len(encoded) > _WORTHWHILE * new.nbytes:
        planes = _encoded(_PLANES, new, _compressed(map(_bytes, _planes(new)), compressor))
        encoded = planes if encoded is None or len(planes) < len(encoded) else encoded
        if len(encoded) >= HEAD_BYTES + new.nbytes:
            return _encoded(_RAW, new, new.tobytes())
    return encoded


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
    if is_whole and (actual := xxh3_64_intdigest(_bytes(words))) != digest:
        raise CorruptCheckpointError(
            f"the elements of a chunk differ from those that were saved: expected XXH3-64 {digest:016x}, found "
            f"{actual:016x}. The base or the differences are damaged; load another checkpoint"
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


def _gap_bytes(gaps: HostArray) -> tuple[memoryview, Sequence[int] | range]:
    """Return gaps as bytes, and where the bytes of each gap begin; also where the last one ends."""
    if int(gaps.max(initial=0)) < _END:
        return _bytes(gaps.astype(np.uint8)), range(gaps.size + 1)
    continued = gaps // _END
    ends = np.cumsum(continued + 1)
    encoded = np.full(int(ends[-1]), _END, np.uint8)
    encoded[ends - 1] = gaps - continued * _END
    return _bytes(encoded), [0, *ends.tolist()]


def _positions(gaps: HostArray, count: int, size: int) -> HostArray:
    """Return the ascending positions that follow from gaps.

    Raises:
        CorruptCheckpointError: there are not `count` gaps, or a position is not below `size`.
    """
    ends = gaps != _END
    if np.count_nonzero(ends) != count or not ends[-1]:
        raise _damaged(f"expected {count} gaps, found {np.count_nonzero(ends)}")
    steps = gaps.astype(np.intp)  # the type of an index: others are converted, which takes longer than all of this
    steps += ends
    at: HostArray = np.cumsum(steps, out=steps)
    at -= 1
    if gaps.size > count:
        at = at[ends]
    if int(at[-1]) >= size:
        raise _damaged(f"a changed word is at {at[-1]} of {size}")
    return at


def _planes(words: HostArray) -> HostArray:
    """Return byte planes, C-contiguous."""
    planes: HostArray = np.empty((words.itemsize, words.size), np.uint8)
    for number, plane in enumerate(planes):  # faster than a transposed copy, which moves single bytes
        np.copyto(plane, words >> 8 * number if number else words, casting="unsafe")
    return planes


def _joined(planes: bytes | memoryview, dtype: np.dtype[Any]) -> HostArray:
    """Return the words of byte planes."""
    lowest, *others = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    words: HostArray = lowest.astype(dtype)
    for number, plane in enumerate(others, start=1):
        words |= plane.astype(dtype) << 8 * number
    return words


def _zigzag(differences: HostArray) -> HostArray:
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)


def _unzigzag(words: HostArray) -> HostArray:
    return (words >> 1) ^ -(words & 1)


def _compressed(parts: Iterable[memoryview], compressor: zstd.ZstdCompressor) -> bytes:
    """Return one zstd frame. Each part begins a block, because the symbols of parts have other frequencies."""
    blocks = [compressor.compress(part, compressor.FLUSH_BLOCK) for part in parts]
    return b"".join([*blocks, compressor.flush(compressor.FLUSH_FRAME)])


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
