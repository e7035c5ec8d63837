"""Frames of the format of slime: what changed in one tensor, compressed with zstd; and checksums of tensors.

The payload of a frame is the change of the bytes of a tensor (slime 624b824a, ``slime/utils/disk_delta.py``, and the
readers of SGLang, ``sglang/srt/weight_sync/local_checkpoint.py``):

* ``xor``: the old bytes XOR the new bytes.
* ``overwrite``: the number of changed bytes as u32, their positions as u32 in ascending order, and their new values.
* ``xor_sparse``: the same with u64, and with the old values XOR the new values. Only the fork of SGLang that stitch
  uses reads it, so it is not written.

Numbers are little endian. A frame states the size of its payload, because readers decompress it in one call. They read
several adjacent frames only for ``xor``. Writers write one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import xxhash

from ckptcore.errors import CorruptCheckpointError, MissingDistributionError
from ckptcore.model.arrays import HostArray

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Encoding: TypeAlias = Literal["xor", "overwrite"]
"""The encodings that are written."""

ChecksumFormat: TypeAlias = Literal["xxh3-128", "blake3", "adler32"]
"""The checksums of tensors."""

MAX_OVERWRITE_BYTES: Final = 1 << 32
"""Maximum size of a tensor whose positions fit into u32, in bytes."""

_PIECE_BYTES: Final = 1 << 20
"""Bytes of a tensor that are compared, compressed or changed at a time. They stay in the cache of a core."""

_INPUT_BYTES: Final = 1 << 18
"""Bytes of a frame that are passed to the decompressor at a time. It copies the bytes that it does not consume."""

_LEVEL: Final = 1
"""Level of zstd. Higher levels take much more time, and save little of the bytes of a delta."""


def checksum(name: str, elements: HostArray) -> str:
    """Return the checksum of the bytes of a tensor, in hex digits.

    Args:
        name: the checksum format.
        elements: the bytes, as uint8 with one axis, contiguous.

    Raises:
        MissingDistributionError: the package of the hash is not installed.
        ValueError: the format is unknown.
    """
    if name == "xxh3-128":
        return xxhash.xxh3_128(elements.data).hexdigest()
    if name == "adler32":
        return f"{zlib.adler32(elements.data):08x}"
    if name != "blake3":
        raise ValueError(f"{name!r} is not a checksum format of slime: expected xxh3-128, blake3 or adler32")
    try:
        from blake3 import blake3  # an optional distribution
    except ImportError as error:
        raise MissingDistributionError(
            "checksums of the format blake3 need the package blake3: run pip install 'ckptcore-versions[blake3]'"
        ) from error
    digest: str = blake3(elements.data).hexdigest()
    return digest


class EncodedTensor(NamedTuple):
    """The change of a tensor.

    Attributes:
        frame: the zstd frame.
        checksum: the checksum of the new bytes.
    """

    frame: bytes
    checksum: str


def encode(old: HostArray, new: HostArray, encoding: Encoding, checksum_format: ChecksumFormat) -> EncodedTensor | None:
    """Encode the change of a tensor; None if no byte changed.

    Takes memory for the frame and for a few pieces of 1 MiB.

    Args:
        old, new: the bytes of the tensor, as uint8 with one axis, of equal size.
        encoding: the encoding.
        checksum_format: the format of the checksum.

    Raises:
        MissingDistributionError: the package of the hash is not installed.
    """
    if all(np.array_equal(new[piece], old[piece]) for piece in _pieces(len(new))):
        return None
    if encoding == "xor":
        nbytes, payload = len(new), _xor(old, new)
    else:
        changed = sum([int(np.count_nonzero(new[piece] != old[piece])) for piece in _pieces(len(new))])
        nbytes, payload = 4 + 5 * changed, _overwrite(old, new, changed)
    compressor = zstd.ZstdCompressor(level=_LEVEL)
    compressor.set_pledged_input_size(nbytes)
    parts = [compressor.compress(part.data) for part in payload]
    parts.append(compressor.flush(compressor.FLUSH_FRAME))
    return EncodedTensor(b"".join(parts), checksum(checksum_format, new))


def _pieces(nbytes: int) -> Iterator[slice]:
    for start in range(0, nbytes, _PIECE_BYTES):
        yield slice(start, min(start + _PIECE_BYTES, nbytes))


def _xor(old: HostArray, new: HostArray) -> Iterator[HostArray]:
    for piece in _pieces(len(new)):
        yield new[piece] ^ old[piece]


def _overwrite(old: HostArray, new: HostArray, changed: int) -> Iterator[HostArray]:
    # The positions of a dense change take four times the memory of the tensor, so they are found twice instead.
    yield np.array([changed], "<u4").view(np.uint8)
    for piece in _pieces(len(new)):
        yield (np.flatnonzero(new[piece] != old[piece]) + piece.start).astype("<u4").view(np.uint8)
    for piece in _pieces(len(new)):
        yield new[piece][new[piece] != old[piece]]


class _Scattered(NamedTuple):
    """An encoding with positions.

    Attributes:
        width: bytes of the count and of a position.
        is_xor: True if the values are XORed with the old bytes; False if they replace them.
    """

    width: int
    is_xor: bool


_SCATTERED: Final = {"overwrite": _Scattered(4, False), "xor_sparse": _Scattered(8, True)}

READ_ENCODINGS: Final = ("xor", *_SCATTERED)
"""The encodings that are read."""


def most_frame_bytes(encoding: str, nbytes: int) -> int:
    """Return an upper bound of the size of a frame for a tensor of `nbytes` bytes.

    zstd adds at most 3 bytes to each block that it cannot compress. A writer may use short blocks.
    """
    width = 0 if encoding == "xor" else _SCATTERED[encoding].width
    return 1024 + 2 * (width + (width + 1) * nbytes)


def apply(frame: HostArray, elements: HostArray, encoding: str) -> None:
    """Apply the change in a frame to the bytes of a tensor. After an error, some bytes may be changed.

    Takes memory for a few pieces of 1 MiB, and for the window of zstd, which is at most as large as the tensor.

    Args:
        frame: the frame, as uint8 with one axis. It may be hostile.
        elements: the bytes to change, as uint8 with one axis, contiguous and writable.
        encoding: one of `READ_ENCODINGS`.

    Raises:
        CorruptCheckpointError: the frame is damaged, or does not fit the tensor. The caller adds the name.
    """
    if encoding == "xor":
        payload = _Payload(frame, len(elements), frames="several")
        for piece in _pieces(len(elements)):
            elements[piece] ^= payload.read(piece.stop - piece.start)
        payload.finish()
        return
    width, is_xor = _SCATTERED[encoding]
    most = width + (width + 1) * len(elements)
    positions = _Payload(frame, most, frames="one")
    count = int(positions.read(width).view(f"<u{width}")[0])
    if count > len(elements) or positions.nbytes != width + (width + 1) * count:
        raise CorruptCheckpointError(
            f"it states {count} changed bytes of {len(elements)} in a payload of {positions.nbytes} bytes"
        )
    # All positions come before all values. Decompressing twice takes less memory than keeping the positions.
    values = _Payload(frame, most, frames="one")
    values.skip(width + width * count)
    last = -1
    for piece in _pieces(count):
        size = piece.stop - piece.start
        at = positions.read(width * size).view(f"<u{width}")
        if int(at[0]) <= last or int(at[-1]) >= len(elements) or not (at[1:] > at[:-1]).all():
            raise CorruptCheckpointError(
                f"the positions of changed bytes are not ascending numbers below {len(elements)}, the bytes of the "
                "tensor"
            )
        last = int(at[-1])
        if is_xor:
            elements[at] ^= values.read(size)
        else:
            elements[at] = values.read(size)
    values.finish()


class _Payload:
    """The payload of a frame, or of several adjacent frames, decompressed in pieces.

    Attributes:
        nbytes: the size that the first frame states.
    """

    def __init__(self, frame: HostArray, most: int, *, frames: Literal["one", "several"]) -> None:
        """Check the header of the first frame, and decompress nothing yet.

        Args:
            frame: the frames.
            most: maximum size of the payload, in bytes.
            frames: the number of frames that are allowed.

        Raises:
            CorruptCheckpointError: see `_start`.
        """
        self._frame = frame
        self._position = 0
        self._left = most
        self.nbytes = self._start()
        if frames == "one":
            self._left = 0

    def _start(self) -> int:
        """Start to decompress the frame at the position. Return the size that it states.

        Raises:
            CorruptCheckpointError: the frame states no size or a size above the limit, or is not a frame.
        """
        try:
            header = self._frame[self._position : self._position + _HEADER_BYTES]
            stated = zstd.get_frame_info(header.data).decompressed_size
        except zstd.ZstdError as error:
            raise CorruptCheckpointError(f"byte {self._position} does not begin a whole zstd frame") from error
        if stated is None or stated > self._left:
            raise CorruptCheckpointError(
                f"a zstd frame states {'no size' if stated is None else f'a size of {stated} bytes'} where at most "
                f"{self._left} bytes are expected"
            )
        self._left -= stated
        # zstd allocates a window, but no more than the stated size.
        self._decompressor = zstd.ZstdDecompressor()
        return stated

    def read(self, nbytes: int) -> HostArray:
        """Return the next bytes, as a uint8 array that may be read-only.

        Raises:
            CorruptCheckpointError: a frame is damaged, or the payload ends earlier.
        """
        parts = [self._decompress(nbytes)]
        while (left := nbytes - sum(map(len, parts))) > 0:
            parts.append(self._decompress(left))
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def skip(self, nbytes: int) -> None:
        """Skip bytes. See `read`."""
        while nbytes:
            nbytes -= len(self._decompress(min(nbytes, _PIECE_BYTES)))

    def finish(self) -> None:
        """Check that all bytes were read and that nothing follows.

        Raises:
            CorruptCheckpointError: a frame is damaged, or other bytes follow.
        """
        while not self._decompressor.eof:
            if self._decompress(1):
                raise CorruptCheckpointError("its zstd frame is longer than it states")
        left = len(self._frame) - self._position + len(self._decompressor.unused_data)
        if left:
            raise CorruptCheckpointError(f"{left} bytes follow its last zstd frame")

    def _decompress(self, most: int) -> bytes:
        """Return some of the next bytes, at most `most`. They may be empty."""
        if self._decompressor.eof:
            self._position -= len(self._decompressor.unused_data)
            if self._position == len(self._frame):
                raise CorruptCheckpointError("its zstd frames have fewer bytes than expected")
            self._start()
        data = b""
        if self._decompressor.needs_input:
            data = self._frame[self._position : self._position + _INPUT_BYTES].tobytes()
            if not data:
                raise CorruptCheckpointError("its zstd frame is cut off")
            self._position += len(data)
        try:
            return self._decompressor.decompress(data, max_length=most)
        except zstd.ZstdError as error:
            raise CorruptCheckpointError(f"its zstd frame is damaged: {error}") from error


_HEADER_BYTES: Final = 18
"""Maximum size of the header of a zstd frame (RFC 8878, 3.1.1.1)."""
