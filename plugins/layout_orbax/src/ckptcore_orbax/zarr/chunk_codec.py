"""The codecs of read chunks that are not stored as they are: tensorstore runs them, in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import tensorstore

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
from ckptcore_orbax.zarr.codecs import expect_blosc_size, is_blosc
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.tensorstore_guard import expect_usable
from ckptcore_orbax.zarr.version3 import inner_array

__all__ = ["ChunkCodec", "DecodingChunk", "EncodingChunk", "Telling"]


_NO_DAMAGE: Final[Mapping[str, type[StorageError]]] = {
    "UNAUTHENTICATED": StorageCredentialsError,
    "PERMISSION_DENIED": StoragePermissionError,
    "DEADLINE_EXCEEDED": StorageTimeoutError,
    "UNAVAILABLE": StorageError,
    "ABORTED": StorageError,
    "CANCELLED": StorageError,
    "RESOURCE_EXHAUSTED": StorageThrottledError,
}
"""Codes of tensorstore's errors that say nothing of the bytes, https://abseil.io/docs/cpp/guides/status-codes."""


class ChunkCodec:
    """Encodes and decodes the read chunks of one array, many at a time. Any thread; tensorstore uses threads of its own."""

    def __init__(self, name: str, form: ArrayFormat, missing: Literal["error", "fill"] = "error") -> None:
        """Of an array.

        Args:
            name: its name, for errors.
            form: its format.
            missing: what it means that a part of a read chunk is not there, where that consists of parts again.
        """
        self._name = name
        self._fills = missing == "fill"
        self._form = inner_array(form)
        self._blosc = is_blosc(self._form)
        self._document = json.dumps(self._form.document).encode()
        self._key = self._form.chunk_key((0,) * len(self._form.inner))
        self._context = tensorstore.Context()
        self._numbers = itertools.count()

    def _open(self) -> tuple[Any, Any]:
        """An array of one read chunk that is not there yet, and the store in memory that it comes from."""
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

    def encode(self, part: Box, elements: HostArray) -> EncodingChunk:
        """Begin to encode a read chunk.

        Args:
            part: which of its elements there are; the others are the fill value.
            elements: of that box; not changed until the result is there.
        """
        expect_usable()
        with _TellingOfWriting(self._name):
            array, memory = self._open()
            writing = array[part.slices].write(elements, can_reference_source_data_indefinitely=True)
        return EncodingChunk(self._name, writing, memory, self._key)

    def decode(self, data: bytes, part: Box, elements: HostArray) -> DecodingChunk:
        """Begin to decode a read chunk.

        Args:
            data: its bytes; may be hostile.
            part: which of its elements are wanted.
            elements: of that box, to fill.

        Raises:
            CorruptCheckpointError: if it says that it is larger than a read chunk.
        """
        if self._blosc:
            expect_blosc_size(self._form, data, self._name)
        expect_usable()
        with Telling(self._name):
            array, memory = self._open()
            memory.write(self._key, data).result()
            reading = tensorstore.array(elements).write(array[part.slices])
        return DecodingChunk(self._name, reading, memory)


class EncodingChunk:
    """A read chunk that is being encoded."""

    __slots__ = ("_key", "_memory", "_name", "_writing")

    def __init__(self, name: str, writing: Any, memory: Any, key: str) -> None:
        self._name = name
        self._writing = writing
        self._memory = memory
        self._key = key

    def result(self) -> bytes:
        """Wait for its bytes; they are nowhere else afterwards."""
        with _TellingOfWriting(self._name):
            self._writing.result()
            value = bytes(self._memory.read(self._key).result().value)
            self._memory.delete_range(tensorstore.KvStore.KeyRange()).result()
        return value

    def settle(self) -> None:
        """Wait until nothing reads its elements any more, whatever became of it."""
        self._writing.exception()


class DecodingChunk:
    """A read chunk that is being decoded."""

    __slots__ = ("_memory", "_name", "_reading")

    def __init__(self, name: str, reading: Any, memory: Any) -> None:
        self._name = name
        self._reading = reading
        self._memory = memory

    def result(self) -> None:
        """Wait until its elements are where they were wanted.

        Raises:
            CorruptCheckpointError: if its bytes are not those of a chunk.
        """
        with Telling(self._name):
            self._reading.result()
            self._memory.delete_range(tensorstore.KvStore.KeyRange()).result()

    def release(self) -> None:
        """Wait until nothing writes to its elements any more, and release tensorstore's objects."""
        if self._reading is not None:
            self._reading.exception()
        self._reading = self._memory = None


class Telling:
    """Turns what tensorstore raises as it reads into an error that names the array."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError | OSError | IndexError | NotImplementedError) and not isinstance(
            error, CheckpointError
        ):
            raise self.error(str(error).split("[source locations", 1)[0].strip()) from error

    def error(self, text: str) -> CheckpointError:
        """What is raised where tensorstore says this."""
        code = text.partition(":")[0].strip()
        if (kind := _NO_DAMAGE.get(code)) is not None:
            return kind(f"{self._name!r} cannot be read: {text}")
        return CorruptCheckpointError(
            f"{self._name!r} cannot be decoded: {text}; restore the checkpoint from a copy, or load another one"
        )


class _TellingOfWriting(Telling):
    """The same as it writes."""

    __slots__ = ()

    def error(self, text: str) -> CheckpointError:
        """See `Telling`."""
        return UnsupportedLeafError(
            f"{self._name!r} cannot be encoded: {text}; store it with other options. Nothing is committed"
        )
