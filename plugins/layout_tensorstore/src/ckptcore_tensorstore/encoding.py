"""Encoding chunks that the direct path does not write: tensorstore does, in memory, so that any storage can hold them."""

from __future__ import annotations

import json
from typing import Any

import tensorstore

from ckptcore.model import Box, HostArray
from ckptcore_tensorstore.zarr import ArrayFormat

__all__ = ["ChunkEncoder", "EncodingChunk", "open_in_memory"]

_ARRAY = "array/"


def open_in_memory(form: ArrayFormat) -> tuple[Any, Any]:
    """An array of this format that nothing was written to, and the store in memory that its chunks go to and come from."""
    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory", "path": _ARRAY}, context=context).result()
    document = "zarr.json" if form.zarr_format == 3 else ".zarray"
    memory.write(document, json.dumps(form.document).encode()).result()
    spec = {
        "driver": "zarr3" if form.zarr_format == 3 else "zarr",
        "kvstore": {"driver": "memory", "path": _ARRAY},
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        "cache_pool": {"total_bytes_limit": 0},
    }
    return tensorstore.open(spec, open=True, context=context).result(), memory


class EncodingChunk:
    """A chunk that is being encoded."""

    __slots__ = ("_future", "_key", "_memory")

    def __init__(self, future: Any, memory: Any, key: str) -> None:
        self._future = future
        self._memory = memory
        self._key = key

    def result(self) -> bytes:
        """Wait for the bytes of the chunk; they are nowhere else afterwards."""
        self._future.result()
        value = self._memory.read(self._key).result().value
        self._memory.write(self._key, None).result()
        return bytes(value)


class ChunkEncoder:
    """Encodes chunks of arrays of one format. One thread at a time; tensorstore uses threads of its own."""

    def __init__(self, form: ArrayFormat) -> None:
        self._form = form
        self._array, self._memory = open_in_memory(form)

    def start(self, index: tuple[int, ...], valid: Box, elements: HostArray) -> EncodingChunk:
        """Begin to encode a chunk.

        Args:
            index: of the chunk.
            valid: its box as far as the array goes.
            elements: of that box; not changed until the result is there.
        """
        future = self._array[valid.slices].write(elements, can_reference_source_data_indefinitely=True).commit
        return EncodingChunk(future, self._memory, self._form.chunk_key(index))
