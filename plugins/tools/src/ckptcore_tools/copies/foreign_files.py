"""Files of checkpoints of other software that their metadata list, and that a copy must not lack. No array is read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, ObjectNotFoundError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, Box
from ckptcore.model.metadata import unreadable_error
from ckptcore.opening.checkpoint import Checkpoint, missing_file

_BATCH_CHUNKS: Final = 1024


def expect_files(opened: Checkpoint, directory: str) -> None:
    """Refuse a tree of other software that lists what is missing: a file, a chunk, or boxes of an array.

    Args:
        opened: the tree.
        directory: its directory within the checkpoint; empty for all of it.

    Raises:
        CorruptCheckpointError: what is missing.
    """
    try:
        _expect_values(opened)
        _expect_arrays(opened)
    except CorruptCheckpointError as error:
        within = f"{directory}: " if directory else ""
        raise CorruptCheckpointError(f"{within}{error}. Nothing was written", key=error.key) from None


def _expect_values(opened: Checkpoint) -> None:
    """Refuse a leaf that cannot be read because its file is missing. Other damage is copied as it is."""
    for record in opened.tree.leaves:
        error = unreadable_error(record)
        if isinstance(error, CorruptCheckpointError) and error.key is not None:
            try:
                opened.location.store.size(error.key)
            except (ObjectNotFoundError, InvalidLocationError):
                raise error from None


def _expect_arrays(opened: Checkpoint) -> None:
    """Refuse an array that lacks boxes, or the file of a chunk. `FileCheck` checked those with known extents."""
    index, tree = opened.index, opened.tree
    arrays = {leaf: record.spec for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    sizes = dict(_listed(opened))
    for leaf, spec in arrays.items():
        with suppress(UnsupportedLeafError):  # an array that cannot be read here
            index.check([leaf])
            if leaf not in tree.aliases and not any(True for _ in index.extents(leaf)):
                _expect_chunks(opened, leaf, Box.whole(index.stored_specs.get(leaf, spec).shape), sizes)


def _listed(opened: Checkpoint) -> Mapping[str, int]:
    """Return the sizes of all objects, if the storage lists them at once."""
    return {} if opened.version.is_object else opened.location.store.list_sizes() or {}


def _expect_chunks(opened: Checkpoint, leaf: int, box: Box, sizes: dict[str, int]) -> None:
    """Look up the chunks of an array in batches. Adds the sizes of objects that were not listed."""
    if not box.size:
        return
    chunks = iter(opened.index.boxes(leaf, box))
    while batch := list(itertools.islice(chunks, _BATCH_CHUNKS)):
        try:
            found = [(chunk.key, chunk.offset, chunk.offset) for chunk in batch if chunk.is_exact]
            if others := [chunk for chunk in batch if not chunk.is_exact]:
                located = opened.index.locate(others, opened.store)
                for row, (key, start) in enumerate(zip(located.keys, located.starts, strict=True)):
                    if key and row not in located.inline and row not in located.fills:
                        found.append((key, start, located.stops.get(row) or start))
            for key, start, stop in found:
                if key not in sizes or stop > sizes[key]:  # a listing may be outdated
                    sizes[key] = opened.store.size(key)
                if not start <= stop <= sizes[key]:
                    raise CorruptCheckpointError(
                        f"{key} has {sizes[key]} bytes, and a chunk ends at byte {stop}: it was cut off. Restore it "
                        "from a copy, or copy another checkpoint",
                        key=key,
                    )
        except ObjectNotFoundError as error:
            raise missing_file(opened, error) from error
