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
from typing import Any, Final, NamedTuple

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

_DECOMPRESSION: Final = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}

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
    gaps = at.astype(np.int32)  # a chunk, and so a group of small ones, is far below 2 GiB
    gaps[1:] -= gaps[:-1].copy()
    gaps[1:] -= 1
    has_changes = bounds[1:] > bounds[:-1]
    first = bounds[:-1][has_changes]
    gaps[first] = at[first] - np.array(ends[:-1])[has_changes]
    gap_bytes, gap_bounds = _gap_bytes(gaps, bounds)
    planes = [_bytes(plane) for plane in _planes(_zigzag(differences.take(at)))]
    encoded = []
    at_ends, at_bounds = itertools.pairwise(ends), itertools.pairwise(bounds.tolist())
    for (start, stop), (low, high), of_gaps in zip(at_ends, at_bounds, itertools.pairwise(gap_bounds), strict=True):
        if low == high:
            encoded.append(b"")
        elif 2 * (high - low) > stop - start:
            encoded.append(_encode_all(old[start:stop], new[start:stop], compressor))
        else:
            parts = [gap_bytes[slice(*of_gaps)], *[plane[low:high] for plane in planes]]
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
    kind, digest, content = _head(encoded)
    if kind in (_SPARSE, _PACKED) and has_old:
        changes = _changes_of(content, 0, words.size, words.itemsize, is_packed=kind == _PACKED)
        _apply_changes([changes], words)
    else:
        _replace_all(kind, content, words, has_old=has_old)
    if is_whole:
        _compare(digest, words)


def decode_all(chunks: Sequence[EncodedWords], words: HostArray, *, has_old: bool = True) -> None:
    """Replace the old words of several whole chunks by the new ones, in place. See `decode`.

    Changed words of all chunks are found and written together, because a call of NumPy takes longer than the changes of
    a small chunk.

    Args:
        chunks: the encoded bytes of each chunk; ascending and disjoint.
        words: writable words that contain all chunks.
        has_old: see `decode`.

    Raises:
        CorruptCheckpointError: the bytes are damaged, or the words differ from those that were encoded.
    """
    changes: list[_Changes] = []
    digests: list[tuple[int, HostArray]] = []
    for encoded, start, stop in chunks:
        kind, digest, content = _head(encoded)
        own = words[start:stop]
        if kind in (_SPARSE, _PACKED) and has_old:
            changes.append(_changes_of(content, start, stop - start, words.itemsize, is_packed=kind == _PACKED))
        else:
            _replace_all(kind, content, own, has_old=has_old)
        digests.append((digest, own))
    if changes:
        _apply_changes(changes, words)
    for digest, own in digests:
        _compare(digest, own)


class EncodedWords(NamedTuple):
    """A chunk among words.

    Attributes:
        encoded: its encoded bytes.
        start, stop: its words.
    """

    encoded: memoryview
    start: int
    stop: int


class _Changes(NamedTuple):
    """The changed words of a chunk.

    Attributes:
        start: the position of its first word.
        size: the number of its words.
        changed: the number of changed words.
        plain: their gaps, and the planes of their differences.
    """

    start: int
    size: int
    changed: int
    plain: memoryview


def _head(encoded: memoryview) -> tuple[int, int, memoryview]:
    """Return the kind, the digest and the content of an encoded chunk."""
    if len(encoded) < _HEAD.size:
        raise _damaged(f"it has {len(encoded)} bytes")
    kind, digest = _HEAD.unpack_from(encoded)
    return kind, digest, encoded[_HEAD.size :]


def _replace_all(kind: int, content: memoryview, words: HostArray, *, has_old: bool) -> None:
    """Replace all words of a chunk."""
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
    else:
        raise _damaged(f"unknown encoding {kind}")


def _compare(digest: int, words: HostArray) -> None:
    if (actual := xxh3_64_intdigest(_bytes(words))) != digest:
        raise CorruptCheckpointError(
            f"the elements of a chunk differ from those that were saved: expected XXH3-64 {digest:016x}, found "
            f"{actual:016x}. The base or the differences are damaged; load another checkpoint"
        )


def _changes_of(content: memoryview, start: int, size: int, itemsize: int, *, is_packed: bool) -> _Changes:
    """Return the changed words of a chunk of `size` words."""
    if len(content) < _COUNT.size:
        raise _damaged("the number of changed words is missing")
    (count,) = _COUNT.unpack_from(content)
    if not 1 <= count <= size:
        raise _damaged(f"expected 1 to {size} changed words, found {count}")
    content = content[_COUNT.size :]
    least = count * (1 + itemsize)
    most = least + size // _END
    plain = memoryview(_decompressed(content, least, most)) if is_packed else content
    if not least <= len(plain) <= most:
        raise _damaged(f"expected {least} to {most} bytes for {count} changed words, found {len(plain)}")
    return _Changes(start, size, count, plain)


def _apply_changes(changes: Sequence[_Changes], words: HostArray) -> None:
    """Add differences to the changed words of chunks."""
    ends_of_gaps = [len(chunk.plain) - chunk.changed * words.itemsize for chunk in changes]
    gaps = [chunk.plain[:end] for chunk, end in zip(changes, ends_of_gaps, strict=True)]
    planes = [
        chunk.plain[end + plane * chunk.changed : end + (plane + 1) * chunk.changed]
        for plane in range(words.itemsize)
        for chunk, end in zip(changes, ends_of_gaps, strict=True)
    ]
    at = _positions(np.frombuffer(b"".join(gaps), np.uint8), np.array([len(own) for own in gaps], np.intp), changes)
    words[at] += _unzigzag(_joined(b"".join(planes), words.dtype))


def _gap_bytes(gaps: HostArray, bounds: HostArray) -> tuple[memoryview, Sequence[int]]:
    """Return gaps as bytes, and where the bytes of gaps begin.

    Args:
        gaps: the gaps.
        bounds: the numbers of these gaps, ascending; also the number of all gaps.
    """
    long = (gaps >= _END).nonzero()[0]
    last_bytes = gaps.astype(np.uint8)
    if not long.size:
        return _bytes(last_bytes), bounds.tolist()
    continued = gaps[long] // _END  # a division of all gaps would take longer than everything else
    last_bytes[long] = gaps[long] - continued * _END
    added = np.concatenate([[0], np.cumsum(continued)])
    encoded = np.insert(last_bytes, np.repeat(long, continued), _END)
    return _bytes(encoded), (bounds + added[np.searchsorted(long, bounds)]).tolist()


def _positions(gaps: HostArray, lengths: HostArray, changes: Sequence[_Changes]) -> HostArray:
    """Return the ascending positions that follow from gaps.

    Args:
        gaps: the gaps of all chunks.
        lengths: the number of bytes of the gaps of each chunk; positive.
        changes: the chunks.

    Raises:
        CorruptCheckpointError: a chunk has another number of gaps than of changed words, or a position outside of it.
    """
    stops: HostArray = np.cumsum(lengths)
    firsts: HostArray = stops - lengths
    ends = gaps != _END
    steps = gaps.astype(np.intp)  # the type of an index: others are converted, which takes longer than all of this
    steps += ends
    starts, sizes, counts = np.array([chunk[:3] for chunk in changes], np.intp).T
    found, needed = np.add.reduceat(ends, firsts, dtype=np.intp), np.add.reduceat(steps, firsts)
    for chunk in ((found != counts) | ~ends[stops - 1] | (needed > sizes)).nonzero()[0][:1].tolist():
        raise _damaged(
            f"expected {counts[chunk]} gaps within {sizes[chunk]} words, found {found[chunk]} within {needed[chunk]}"
        )
    # The first step of each chunk leads to it from the end of the steps of the chunk before.
    steps[firsts] += starts
    steps[firsts[1:]] -= starts[:-1] + needed[:-1]
    at: HostArray = np.cumsum(steps, out=steps)
    at -= 1
    return at if gaps.size == counts.sum() else at[ends]


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
    decompressor = zstd.ZstdDecompressor(options=_DECOMPRESSION)
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
