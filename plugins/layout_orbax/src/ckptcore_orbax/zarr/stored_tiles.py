"""Where the read chunks of arrays are, as far as that is known without asking the storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ckptcore.model import Box, StoredTile
from ckptcore_orbax.zarr.chunking import chunks_of
from ckptcore_orbax.zarr.grids import expect_countable, flat_index
from ckptcore_orbax.zarr.state import ArraysState, StoredName

__all__ = ["KnownTiles"]


class KnownTiles:
    """The read chunks of the arrays of a state, of which it keeps what it sorted last. Any thread."""

    def __init__(self) -> None:
        self._last: tuple[ArraysState, dict[int, list[int]]] | None = None

    def tiles(self, state: ArraysState, leaf: int) -> Iterator[StoredTile]:
        """The read chunks of an array, those at its edge whole; nothing where it stands in a file that was read.

        Chunks of a database are not looked up: those of this layout are taken to follow each other in C order, as they do where
        one process wrote an array, or several wrote its rows.

        Raises:
            CorruptCheckpointError: if there are more than any array has.
        """
        stored = state.arrays[leaf]
        if leaf in state.embedded:
            return
        form = stored.form
        whole = Box.whole(form.spec.shape)
        expect_countable(whole, form.inner, stored.name)
        # The root has checksums of the blocks that this layout wrote; those of other software have one behind each read chunk.
        is_plain = form.direct and (state.source == "ckptcore" or not form.checksum)
        step = form.inner_stored_bytes if form.direct else 1
        places = self._chunk_places(state, leaf, stored)
        for (index, chunk), (key, offset) in zip(chunks_of(form.chunk, whole), places, strict=False):
            common = chunk.intersect(whole)
            assert common is not None  # the chunk holds elements of the array
            first = tuple(map(int.__mul__, index, form.inner_grid))
            for inner, box in chunks_of(form.inner, common):
                number = flat_index(tuple(map(int.__sub__, inner, first)), form.inner_grid)
                yield StoredTile(key, offset + number * step, box, is_plain)

    def _chunk_places(self, state: ArraysState, leaf: int, stored: StoredName) -> Iterator[tuple[str, int]]:
        """Where each chunk of an array begins, in C order; numbers where nobody knows, without an end."""
        form = stored.form
        if state.storage == "objects":
            for index, _ in chunks_of(form.chunk, Box.whole(form.spec.shape)):
                yield f"{state.prefix}{stored.prefix}{form.chunk_key(index)}", 0
            return
        if form.direct:
            extents = state.extents
            for row in self._rows(state).get(leaf, ()):
                key = f"{state.prefix}{extents.files[extents.file[row]]}"
                for offset in range(extents.start[row], extents.stop[row], max(1, form.chunk_bytes)):
                    yield key, offset
        yield from ((state.prefix, number) for number in itertools.count())

    def _rows(self, state: ArraysState) -> dict[int, list[int]]:
        """By leaf, the numbers of its extents."""
        last = self._last
        if last is None or last[0] is not state:
            rows: dict[int, list[int]] = {}
            for row, leaf in enumerate(state.extents.leaf):
                rows.setdefault(leaf, []).append(row)
            last = self._last = (state, rows)
        return last[1]
