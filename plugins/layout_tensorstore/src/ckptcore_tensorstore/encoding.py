"""Encoding the chunks of arrays that are not stored as they are, many read chunks at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from ckptcore.model import Box
from ckptcore_tensorstore.chunk_sources import ChunkSource
from ckptcore_tensorstore.using import using_tensorstore
from ckptcore_tensorstore.zarr import ShardIndex, encode_index

if TYPE_CHECKING:
    from ckptcore_tensorstore.codec import EncodingChunk

__all__ = ["EncodedChunk", "encode_chunks"]

_STARTED_BYTES: Final = 64 << 20
"""Elements that are encoded at a time, in bytes."""

_LEAST_STARTED: Final = 2
"""Read chunks that are encoded at a time, however large they are."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk as it is stored.

    Attributes:
        source: the array it is of.
        index: which chunk.
        data: its bytes.
        digests: the xxh3_64 of the elements of each of its read chunks, in C order; zero for those beyond the array.
    """

    source: ChunkSource
    index: tuple[int, ...]
    data: bytes
    digests: bytes


@dataclass(slots=True)
class _Assembly:
    """A chunk whose read chunks are being encoded."""

    source: ChunkSource
    index: tuple[int, ...]
    pending: int
    parts: list[bytes | None] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


def encode_chunks(sources: Sequence[ChunkSource]) -> Iterator[EncodedChunk]:
    """The chunks of arrays, in order. What is encoded at a time has so many bytes as `_STARTED_BYTES` says, and a chunk."""
    if not sources:
        return
    with using_tensorstore():
        yield from _encode(sources)


def _encode(sources: Sequence[ChunkSource]) -> Iterator[EncodedChunk]:
    from ckptcore_tensorstore.codec import ChunkCodec  # tensorstore is imported where it is needed

    started: deque[tuple[_Assembly, int, EncodingChunk, int]] = deque()
    held = 0

    def finish() -> Iterator[EncodedChunk]:
        nonlocal held
        assembly, number, encoding, nbytes = started[0]
        assembly.parts[number] = encoding.result()
        started.popleft()  # now that nothing reads its elements any more, also if it is interrupted
        held -= nbytes
        assembly.pending -= 1
        if not assembly.pending:
            assembly.source.close()
            yield _assembled(assembly)

    try:
        for source in sources:
            form = source.form
            source.expect(len(source.chunks))
            codec = ChunkCodec(source.name, form)
            whole = Box.whole(form.spec.shape)
            for index, outer in source.chunks:
                boxes = [(box, box.intersect(whole)) for box in source.inner_boxes(outer)]
                assembly = _Assembly(source, index, sum(valid is not None for _, valid in boxes))
                assembly.parts = [None] * len(boxes)
                assembly.digests = [bytes(8)] * len(boxes)
                for number, (box, valid) in enumerate(boxes):
                    if valid is None:
                        continue
                    elements = source.gathered(box)
                    assembly.digests[number] = xxhash.xxh3_64_digest(elements.reshape(-1).view(np.uint8).data)
                    part = Box(
                        tuple(map(int.__sub__, valid.start, box.start)), tuple(map(int.__sub__, valid.stop, box.start))
                    )
                    started.append((assembly, number, codec.encode(part, elements), elements.nbytes))
                    held += elements.nbytes
                    while held > _STARTED_BYTES and len(started) > _LEAST_STARTED:
                        yield from finish()
        while started:
            yield from finish()
    finally:
        # After an error tensorstore still reads from memory that is about to be freed.
        for _, _, left, _ in started:
            left.settle()


def _assembled(assembly: _Assembly) -> EncodedChunk:
    form = assembly.source.form
    parts = assembly.parts
    if not form.sharded:
        (data,) = [part for part in parts if part is not None]
    else:
        lengths = np.array([len(part or b"") for part in parts], np.int64)
        offsets = np.cumsum(lengths) - lengths + (form.index_bytes if form.index_at == "start" else 0)
        offsets[[part is None for part in parts]] = -1
        table = encode_index(form, ShardIndex(offsets, lengths))
        stored = [part for part in parts if part is not None]
        data = b"".join([table, *stored] if form.index_at == "start" else [*stored, table])
    return EncodedChunk(assembly.source, assembly.index, data, b"".join(assembly.digests))
