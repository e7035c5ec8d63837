"""Arrays of a delta as derived arrays: the elements of the base, changed in place by the chunks of each delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from ckptcore.io.elements import bytes_of, copy_elements, is_little, little_dtype, plain
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray, Part
from ckptcore_versions.chunks import ArrayChunks, EncodedChunk, part_of
from ckptcore_versions.encoding import decode, word_bytes, words_of

_THREADED_BYTES: Final = 4 << 20
"""From this number of bytes of elements on, chunks are decoded in several threads. To start threads takes 0.1 ms."""


class EncodedRun(NamedTuple):
    """Chunks whose encoded bytes are adjacent, so that one range contains them.

    Attributes:
        box: the range, in bytes, among the encoded bytes of the array.
        chunks: the chunks.
    """

    box: Box
    chunks: Sequence[EncodedChunk]


def runs_of(chunks: Sequence[EncodedChunk]) -> list[EncodedRun]:
    """Group chunks into runs."""
    groups: list[list[EncodedChunk]] = []
    for chunk in chunks:
        if groups and groups[-1][-1].stop == chunk.start:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [EncodedRun(Box((group[0].start,), (group[-1].stop,)), group) for group in groups]


@dataclass(frozen=True, slots=True, eq=False)
class PatchedArray:
    """An array of a delta. See `DerivedArray`.

    Attributes:
        spec: the array.
        base: the array that the first delta changes; None if the base does not have it.
        deltas: for each delta, from the oldest, the encoded bytes of the array, and its chunks.
    """

    spec: ArraySpec
    base: DerivedArray | None
    deltas: tuple[tuple[DerivedArray, ArrayChunks], ...]

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The encoded bytes of each delta, and the base."""
        encoded = [encoded for encoded, _ in self.deltas]
        return encoded if self.base is None else [*encoded, self.base]

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the encoded bytes of the chunks with elements of the box, and the box of the base."""
        parts = [
            Part(number, run.box)
            for number, (_, chunks) in enumerate(self.deltas)
            for run in runs_of(chunks.within(box))
        ]
        return parts if self.base is None else [*parts, Part(len(self.deltas), box)]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray | None] | None:
        """Return `out` as the view of the base, so that the base is read in place."""
        return None if self.base is None else [*[None] * (len(self.needed(box)) - 1), out]

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Apply the chunks of each delta in turn.

        Raises:
            CorruptCheckpointError: encoded bytes are damaged, or the base differs from that of the save.
        """
        position = 0
        for number, (_, chunks) in enumerate(self.deltas):
            runs = runs_of(chunks.within(box))
            encoded = parts[position : position + len(runs)]
            position += len(runs)
            apply_runs(self.spec, box, out, runs, encoded, has_old=number > 0 or self.base is not None)


def apply_runs(
    spec: ArraySpec,
    box: Box,
    target: HostArray,
    runs: Sequence[EncodedRun],
    encoded: Sequence[HostArray],
    *,
    has_old: bool = True,
) -> None:
    """Change the elements of a box in place. Large boxes are changed by several threads.

    Args:
        spec: the array.
        box: the box.
        target: its elements, in the dtype of the array and of any strides.
        runs: chunks with elements of the box. Elements of other chunks do not change.
        encoded: the encoded bytes of each run.
        has_old: False if the target has no old elements, because the base does not have the array.

    Raises:
        CorruptCheckpointError: encoded bytes are damaged, or the old elements differ from those of the save. The
            elements of the box are then undefined.
    """
    pieces = [
        (chunk.box, data[chunk.start - run.box.start[0] : chunk.stop - run.box.start[0]])
        for run, array in zip(runs, encoded, strict=True)
        for data in (bytes_of(array),)
        for chunk in run.chunks
    ]
    apply = partial(_apply_piece, spec, box, target, has_old)
    if sum([chunk.size for chunk, _ in pieces]) * spec.numpy_dtype.itemsize < _THREADED_BYTES:
        for piece in pieces:
            apply(piece)
    else:
        for_each(IOThreads(), pieces, apply)


def _apply_piece(spec: ArraySpec, box: Box, target: HostArray, has_old: bool, piece: tuple[Box, memoryview]) -> None:
    """Change the elements of a box that are in one chunk."""
    chunk, data = piece
    common = chunk.intersect(box)
    assert common is not None  # the caller selected chunks of the box
    part = part_of(target, common, box)
    is_whole, size = common == chunk, word_bytes(spec)
    if is_whole and part.flags.c_contiguous and is_little(part.dtype):
        decode(data, words_of(plain(part), size), has_old=has_old)
        return
    elements: HostArray = np.zeros(chunk.shape, little_dtype(part.dtype))
    inside = part_of(elements, common, chunk)
    if has_old:
        copy_elements(inside, part)
    decode(data, words_of(elements, size), has_old=has_old, is_whole=is_whole)
    copy_elements(part, inside)
