"""Codecs of encoded read chunks, run by tensorstore in memory."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Semaphore
from typing import Any, Final, Literal

import google_crc32c
import numpy as np
import tensorstore
import zstandard

from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageCredentialsError,
    StorageError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    UnsupportedLeafError,
)
from ckptcore.model import Box, HostArray
from ckptcore_orbax.zarr.array_files import inner_array
from ckptcore_orbax.zarr.codecs import FrameFormat, expect_blosc_size, frame_format, is_blosc, max_encoded_bytes
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.save_threads import start
from ckptcore_orbax.zarr.tensorstore_guard import expect_usable

_LARGE_BYTES: Final = 16 << 20
"""Bytes of elements whose encoded bytes stay where they are written: far more than a huge page, which has 2 MiB."""

_STORAGE_ERRORS: Final[Mapping[str, type[StorageError]]] = {
    "UNAUTHENTICATED": StorageCredentialsError,
    "PERMISSION_DENIED": StoragePermissionError,
    "DEADLINE_EXCEEDED": StorageTimeoutError,
    "UNAVAILABLE": StorageError,
    "ABORTED": StorageError,
    "CANCELLED": StorageError,
    "RESOURCE_EXHAUSTED": StorageThrottledError,
}
"""tensorstore status codes that do not indicate damage, https://abseil.io/docs/cpp/guides/status-codes."""

_UNKNOWN_DTYPE: Final = re.compile(r"Unsupported (data type|zarr dtype): ")
"""Message of tensorstore 0.1.74 to 0.1.86 for a dtype that only later versions support. It does not mean damage,
because ckptcore parsed the same metadata before."""

_OLD_TENSORSTORE: Final = (
    "the installed TensorStore does not know its dtype; update it: pip install --upgrade tensorstore"
)


def expect_dtype(dtype: str) -> None:
    """Check that the installed tensorstore can encode a dtype.

    Raises:
        UnsupportedLeafError: the installed tensorstore is too old.
    """
    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(f"{_OLD_TENSORSTORE}, or save with compression=None") from error


class ChunkCodec:
    """Encodes and decodes the read chunks of one array concurrently. Thread-safe; tensorstore has its own threads."""

    def __init__(self, name: str, format: ArrayFormat, missing: Literal["error", "fill"] = "error") -> None:
        """Create a codec for an array.

        Args:
            name: name of the array, for errors.
            format: format of the array.
            missing: meaning of a missing inner chunk, if read chunks are themselves sharded.
        """
        self._name = name
        self._fills = missing == "fill"
        self._form = inner_array(format)
        self._blosc = is_blosc(self._form)
        self._frame = frame_format(self._form)
        self._document = json.dumps(self._form.document).encode()
        self._key = self._form.chunk_key((0,) * len(self._form.inner))
        self._context = tensorstore.Context()
        self._numbers = itertools.count()

    def _open(self) -> tuple[Any, Any]:
        """Return an array of one unwritten read chunk, and its store in memory."""
        kvstore = {"driver": "memory", "path": f"{next(self._numbers)}/"}
        memory = tensorstore.KvStore.open(kvstore, context=self._context).result()
        memory.write(self._form.metadata_key, self._document).result()
        spec = {
            "driver": "zarr3" if self._form.zarr_format == 3 else "zarr",
            "kvstore": kvstore,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": self._fills,
        }
        return tensorstore.open(spec, open=True, context=self._context).result(), memory

    def encode(self, part: Box, elements: HostArray, encoders: Semaphore) -> EncodingChunk:
        """Start to encode a read chunk.

        Args:
            part: box of the given elements within the read chunk; the rest is the fill value.
            elements: elements of that box; must not change until the result is available.
            encoders: limits the chunks that threads of this process encode at a time.
        """
        if self._frame is not None and part.shape == self._form.inner:
            encoders.acquire()
            encoding = start(partial(_encode_frame, elements, self._frame), "ckptcore-encoder")
            encoding.add_done_callback(lambda _: encoders.release())
            return EncodingChunk(self._name, encoding, None, "")
        expect_usable()
        with _WriteErrors(self._name):
            array, memory = self._open()
            writing = array[part.slices].write(elements, can_reference_source_data_indefinitely=True)
        return EncodingChunk(self._name, writing, memory, self._key)

    def decode(self, data: bytes, part: Box, elements: HostArray) -> DecodingChunk:
        """Start to decode a read chunk.

        Args:
            data: the encoded bytes; may be hostile.
            part: box of the requested elements within the read chunk.
            elements: destination for that box.

        Raises:
            CorruptCheckpointError: its header states more bytes than a read chunk has.
        """
        if self._blosc:
            expect_blosc_size(self._form, data, self._name)
        expect_usable()
        with ReadErrors(self._name):
            array, memory = self._open()
            memory.write(self._key, data).result()
            reading = tensorstore.array(elements).write(array[part.slices])
        return DecodingChunk(self._name, reading, memory)


def _encode_frame(elements: HostArray, frame: FrameFormat) -> Sequence[bytes | memoryview]:
    """Return the pieces of a chunk, which has elements.

    A large frame stays in one memory of NumPy, which has huge pages: to fault in the small pages of new bytes took a
    seventh of the processor time of a save. A smaller frame, or one that fills less than half of its memory, is copied,
    because it may wait together with thousands of others. Until it is copied, both exist: up to one such copy per
    encoder at once.
    """
    data = elements.reshape(-1).view(np.uint8).data
    memory, size = np.empty(max_encoded_bytes(len(data)), np.uint8), 0
    reader = zstandard.ZstdCompressor(frame.level, write_checksum=frame.checksum).stream_reader(data, size=len(data))
    while count := reader.readinto(memory[size:].data):
        size += count
    if size == len(memory):
        raise ValueError(f"{len(data)} bytes need more than {size} bytes as a zstd frame")
    encoded = memory[:size]
    pieces = [encoded.data if 2 * size >= len(data) >= _LARGE_BYTES else encoded.tobytes()]
    if frame.crc32c:
        pieces.append(google_crc32c.value(encoded).to_bytes(4, "little"))
    return pieces


class EncodingChunk:
    """A read chunk that is being encoded: in a memory of tensorstore, or without one by `writing`, into its result.

    Attributes:
        keeps_elements: whether the elements may be read after `result` has returned.
    """

    __slots__ = ("_key", "_memory", "_name", "_writing", "keeps_elements")

    def __init__(self, name: str, writing: Any, memory: Any, key: str) -> None:
        self.keeps_elements = memory is not None
        self._name = name
        self._writing = writing
        self._memory = memory
        self._key = key

    def result(self) -> Sequence[bytes | memoryview]:
        """Wait for and return its bytes, in pieces. Frees tensorstore's copy."""
        with _WriteErrors(self._name):
            pieces: Sequence[bytes | memoryview] = self._writing.result()
            if self._memory is None:
                return pieces
            value = bytes(self._memory.read(self._key).result().value)
            self._memory.delete_range(tensorstore.KvStore.KeyRange()).result()
        return (value,)

    def settle(self) -> None:
        """Wait until tensorstore no longer reads the elements. Does not raise errors of the encoding."""
        self._writing.exception()


class DecodingChunk:
    """A read chunk that is being decoded."""

    __slots__ = ("_memory", "_name", "_reading")

    def __init__(self, name: str, reading: Any, memory: Any) -> None:
        self._name = name
        self._reading = reading
        self._memory = memory

    def result(self) -> None:
        """Wait until its elements are in their destination.

        Raises:
            CorruptCheckpointError: the bytes are not a valid chunk.
        """
        with ReadErrors(self._name):
            self._reading.result()
            self._memory.delete_range(tensorstore.KvStore.KeyRange()).result()

    def release(self) -> None:
        """Wait until tensorstore no longer writes to the elements, and release its objects."""
        if self._reading is not None:
            self._reading.exception()
        self._reading = self._memory = None


class ReadErrors:
    """Converts errors of tensorstore while reading to errors that name the array."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        kinds = ValueError | OSError | IndexError | NotImplementedError | zstandard.ZstdError
        if isinstance(error, kinds) and not isinstance(error, CheckpointError):
            raise self.error(str(error).split("[source locations", 1)[0].strip()) from error

    def error(self, text: str) -> CheckpointError:
        """Return the error for a message of tensorstore."""
        code = text.partition(":")[0].strip()
        if (kind := _STORAGE_ERRORS.get(code)) is not None:
            return kind(f"{self._name!r} cannot be read: {text}")
        if _UNKNOWN_DTYPE.search(text):
            return UnsupportedLeafError(f"{self._name!r} cannot be decoded: {_OLD_TENSORSTORE}")
        return CorruptCheckpointError(
            f"{self._name!r} cannot be decoded: {text}; restore the checkpoint from a copy, or load another one"
        )


class _WriteErrors(ReadErrors):
    """Converts errors of tensorstore and zstandard while writing."""

    __slots__ = ()

    def error(self, text: str) -> CheckpointError:
        """See `ReadErrors`."""
        return UnsupportedLeafError(
            f"{self._name!r} cannot be encoded: {text}; store it with other options. Nothing is committed"
        )
