"""Arrays of a delta as derived arrays: the elements of the base, changed in place by the chunks of each delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ckptcore.derivations import Stored
from ckptcore.io.elements import bytes_of, copy_elements, is_little, little_dtype, plain
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray, Part
from ckptcore_versions.deltas.chunks import ArrayChunks, EncodedChunk, part_of
from ckptcore_versions.deltas.encoding import decode, word_bytes, words_of

_RUN_BYTES: Final = 8 << 20
"""Maximum encoded bytes of a run, unless one chunk has more."""

_THREADED_BYTES: Final = 4 << 20
"""From this number of bytes of elements on, chunks are decoded in several threads. To start threads takes 0.1 ms."""


class _Run(NamedTuple):
    """Chunks whose encoded bytes are adjacent, so that one range contains them.

    Attributes:
        range: the range, in bytes, among the encoded bytes of the array.
        chunks: the chunks.
    """

    range: Box
    chunks: Sequence[EncodedChunk]


@dataclass(frozen=True, slots=True, eq=False)
class PatchedArray:
    """An array of a delta. See `DerivedArray`.

    Attributes:
        spec: the array.
        base: the array that the first delta changes; None if the base does not have it.
        deltas: for each delta, from the oldest, the encoded bytes of the array, and its chunks.
    """

    spec: ArraySpec
    base: Stored | None
    deltas: tuple[tuple[Stored, ArrayChunks], ...]

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The encoded bytes of each delta, and the base."""
        encoded: list[DerivedArray] = [encoded for encoded, _ in self.deltas]
        return encoded if self.base is None else [*encoded, self.base]

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the encoded bytes of the chunks with elements of the box, and the box of the base."""
        parts = [
            Part(number, run.range)
            for number, (_, chunks) in enumerate(self.deltas)
            for run in _runs_of(chunks.within(box))
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
        remaining = iter(parts)
        for number, (_, chunks) in enumerate(self.deltas):
            runs = [(run, next(remaining)) for run in _runs_of(chunks.within(box))]
            has_old = number > 0 or self.base is not None
            _apply_runs(_ChangedBox(box, out, word_bytes(self.spec), has_old), runs)


def _runs_of(chunks: Sequence[EncodedChunk]) -> list[_Run]:
    """Group chunks into runs of at most 8 MiB."""
    groups: list[list[EncodedChunk]] = []
    for chunk in chunks:
        group = groups[-1] if groups else []
        if group and group[-1].stop == chunk.start and chunk.stop - group[0].start <= _RUN_BYTES:
            group.append(chunk)
        else:
            groups.append([chunk])
    return [_Run(Box((group[0].start,), (group[-1].stop,)), group) for group in groups]


class _ChangedBox(NamedTuple):
    """A box of an array that is changed in place.

    Attributes:
        box: the box.
        elements: its elements, of any strides.
        word: the bytes of a word: see `word_bytes`.
        has_old: False if there are no old elements, because the base does not have the array.
    """

    box: Box
    elements: HostArray
    word: int
    has_old: bool


def _apply_runs(changed: _ChangedBox, runs: Sequence[tuple[_Run, HostArray]]) -> None:
    """Change the elements of a box by the chunks of one delta. Uses several threads if there are many elements.

    Args:
        changed: the box.
        runs: the chunks with elements of the box, and their encoded bytes. They do not overlap.

    Raises:
        CorruptCheckpointError: encoded bytes are damaged, or the old elements differ from those of the save. The
            elements of the box are then undefined.
    """
    chunks = [
        (chunk.box, memory[chunk.start - run.range.start[0] : chunk.stop - run.range.start[0]])
        for run, encoded in runs
        for memory in (bytes_of(encoded),)
        for chunk in run.chunks
    ]

    def apply(chunk: tuple[Box, memoryview]) -> None:
        _apply_chunk(changed, *chunk)

    if sum([box.size for box, _ in chunks]) * changed.elements.itemsize < _THREADED_BYTES:
        for chunk in chunks:
            apply(chunk)
    else:
        for_each(IOThreads(), chunks, apply)


def _apply_chunk(changed: _ChangedBox, chunk: Box, encoded: memoryview) -> None:
    """Change the elements of a box that are in one chunk."""
    box, elements, word, has_old = changed
    common = chunk.intersect(box)
    assert common is not None  # the caller selected chunks of the box
    part = part_of(elements, common, box)
    is_whole = common == chunk
    if is_whole and part.flags.c_contiguous and is_little(part.dtype):
        decode(encoded, words_of(plain(part), word), has_old=has_old)
        return
    whole: HostArray = np.zeros(chunk.shape, little_dtype(part.dtype))
    inside = part_of(whole, common, chunk)
    if has_old:
        copy_elements(inside, part)
    decode(encoded, words_of(whole, word), has_old=has_old, is_whole=is_whole)
    copy_elements(part, inside)
