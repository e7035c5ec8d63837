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
from ckptcore_versions.deltas.encoding import EncodedWords, decode, decode_all, word_bytes, words_of

_RUN_BYTES: Final = 8 << 20
"""Maximum encoded bytes of a run, unless one chunk has more."""

_THREADED_BYTES: Final = 4 << 20
"""From this number of bytes of elements on, chunks are decoded in several threads. To start threads takes 0.1 ms."""

_TOGETHER_BYTES: Final = 1 << 20
"""Bytes of elements whose chunks are decoded together. They stay in the cache of a processor."""


class Run(NamedTuple):
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
        remaining = iter(parts)
        for number, (_, chunks) in enumerate(self.deltas):
            encoded = [
                (chunk.box, memory[chunk.start - run.range.start[0] : chunk.stop - run.range.start[0]])
                for run in runs_of(chunks.within(box))
                for memory in (bytes_of(next(remaining)),)
                for chunk in run.chunks
            ]
            changed = ChangedBox(box, out, word_bytes(self.spec), encoded)
            _apply_runs(changed, has_old=number > 0 or self.base is not None)


def runs_of(chunks: Sequence[EncodedChunk]) -> list[Run]:
    """Group chunks into runs of at most 8 MiB."""
    groups: list[list[EncodedChunk]] = []
    for chunk in chunks:
        group = groups[-1] if groups else []
        if group and group[-1].stop == chunk.start and chunk.stop - group[0].start <= _RUN_BYTES:
            group.append(chunk)
        else:
            groups.append([chunk])
    return [Run(Box((group[0].start,), (group[-1].stop,)), group) for group in groups]


class ChangedBox(NamedTuple):
    """A box of an array that is changed in place by chunks of one delta.

    Attributes:
        box: the box.
        elements: its elements, of any strides.
        word: the bytes of a word: see `word_bytes`.
        chunks: the chunks with elements of the box, and their encoded bytes.
        offset: the position of the elements in the memory of `apply_chunks`, in bytes.
    """

    box: Box
    elements: HostArray
    word: int
    chunks: Sequence[tuple[Box, memoryview]]
    offset: int = 0


def _apply_runs(changed: ChangedBox, *, has_old: bool) -> None:
    """Change the elements of a box by the chunks of one delta. Uses several threads if there are many elements.

    Args:
        changed: the box, and all of its chunks.
        has_old: False if there are no old elements, because the base does not have the array.

    Raises:
        CorruptCheckpointError: encoded bytes are damaged, or the old elements differ from those of the save. The
            elements of the box are then undefined.
    """
    elements, chunks = changed.elements, changed.chunks
    is_plain = elements.flags.c_contiguous and is_little(elements.dtype)
    memory = words_of(plain(elements), 1) if is_plain else None
    if sum([box.size for box, _ in chunks]) * elements.itemsize < _THREADED_BYTES:
        apply_chunks(memory, [changed], has_old=has_old)
        return
    count = max(1, len(chunks) * _TOGETHER_BYTES // elements.nbytes)
    groups = [changed._replace(chunks=chunks[at : at + count]) for at in range(0, len(chunks), count)]
    for_each(IOThreads(), groups, lambda group: apply_chunks(memory, [group], has_old=has_old))


def apply_chunks(memory: HostArray | None, changes: Sequence[ChangedBox], *, has_old: bool = True) -> None:
    """Change boxes of one array or several in place.

    Args:
        memory: the memory of all boxes, as bytes, if each box is contiguous in it, in C order and little endian.
        changes: the boxes. Chunks of different boxes are of different arrays, or do not overlap.
        has_old: see `_apply_runs`.

    Raises:
        CorruptCheckpointError: see `_apply_runs`.
    """
    together: dict[tuple[int, int], list[EncodedWords]] = {}
    for changed in changes:
        box, elements, word = changed.box, changed.elements, changed.word
        shape, stride = box.shape, elements.nbytes // max(1, box.shape[0]) if box.start else 0
        for chunk, encoded in changed.chunks:
            # Rows of an array are contiguous. Other boxes are copied, such as columns of a large array.
            if memory is None or chunk.shape[1:] != shape[1:] or not box.contains(chunk):
                _apply_chunk(changed, chunk, encoded, has_old=has_old)
                continue
            first = changed.offset + (stride * (chunk.start[0] - box.start[0]) if stride else 0)
            words = EncodedWords(encoded, first // word, first // word + chunk.size * elements.itemsize // word)
            together.setdefault((word, first % word), []).append(words)
    for (word, first), encoded_words in together.items():
        assert memory is not None  # otherwise there are none
        whole = (memory.size - first) // word * word
        decode_all(encoded_words, words_of(memory[first : first + whole], word), has_old=has_old)


def _apply_chunk(changed: ChangedBox, chunk: Box, encoded: memoryview, *, has_old: bool) -> None:
    """Change the elements of a box that are in one chunk."""
    box, elements, word = changed[:3]
    common = chunk.intersect(box)
    assert common is not None  # the caller selected chunks of the box
    part = part_of(elements, common, box)
    whole: HostArray = np.zeros(chunk.shape, little_dtype(part.dtype))
    inside = part_of(whole, common, chunk)
    if has_old:
        copy_elements(inside, part)
    decode(encoded, words_of(whole, word), has_old=has_old, is_whole=common == chunk)
    copy_elements(part, inside)
